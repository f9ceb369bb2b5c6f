"""The rows of logs in a database: encoded, written by the owner of a log, and read.

Consecutive rows share one row of the database: a pack. Deltas never share one with other rows.

A pack is stored under the place (`seq`, `sub`) of its last row. `body` has its events and nothing private; `private`
has the private parts, each with its place. Deltas have no private part, so retention can drop their packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from itertools import groupby
from typing import Any

import msgspec

from ..core.content import to_json_anyway
from ..core.errors import LogUnreadable, OwnershipLost, StoreError
from ..core.events import (
    DELTAS,
    EVENT_TYPES,
    Event,
    ReasoningDelta,
    TextDelta,
    UnknownEvent,
    event_from_bytes,
)
from ..core.rows import LogRow, Private
from ..core.runs import RunStatus
from ..core.stores import LEGS, LogBatch, LogSummary, StoredLog, SummaryUpdate
from .database import ConditionFailed, Link
from .schema import DELTAS_KIND, ROWS_KIND
from .writes import OWNED, POSTGRES, TAKEN_OVER, leave_threads, make_due, run_write, summary_write, thread_write

MOST_ROWS, MOST_BYTES = 256, 256_000
"""The rows and bytes that fill a pack."""
MOST_ROWS_AT_ONCE = 1_000
"""Rows of a log that are encoded on the event loop; more are encoded in the thread that writes them."""
UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError)
"""Errors that decoders raise."""

PackedRow = tuple[str, int, int, str, int, bytes | None, bytes | None]
"""Log, seq and sub of the last row, kind, number of events, events, private parts."""

PACK = "log_id, seq, sub, kind, held, body, private"
"""The columns of a pack."""
_NEW = " AND NOT EXISTS (SELECT 1 FROM events WHERE log_id = ? AND (seq, sub) >= (?, ?))"
_DELTAS, _TEXTS = frozenset(DELTAS), (TextDelta, ReasoningDelta)
_kinds: list[Any] = list(EVENT_TYPES.values())
_decode_events = msgspec.json.Decoder(list[reduce(lambda one, other: one | other, _kinds)]).decode
_decode_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_private = msgspec.json.Decoder(list[tuple[int, int, Private]]).decode


class _Message(msgspec.Struct, frozen=True, tag_field="kind", tag="message"):
    """Consecutive deltas of one message; the fields they share are stored once."""

    first: TextDelta | ReasoningDelta
    deltas: list[str]
    at: list[float]

    @property
    def events(self) -> list[Event]:
        first: Any = self.first
        own = ("seq", "at", "delta")
        shared = {name: getattr(first, name) for name in first.__struct_fields__ if name not in own}
        pieces = enumerate(zip(self.deltas, self.at, strict=True), first.seq)
        return [first.__class__(seq=seq, at=at, delta=delta, **shared) for seq, (delta, at) in pieces]


_MESSAGE, _decode_message = b'{"kind":"message"', msgspec.json.Decoder(_Message).decode


def pack_rows(log_id: str, rows: Iterable[LogRow]) -> list[PackedRow]:
    """Pack consecutive rows of a log."""
    packed: list[PackedRow] = []
    for is_delta, group in groupby(rows, _is_delta):
        if is_delta:
            deltas: list[Any] = [row.event for row in group]
            for first in range(0, len(deltas), MOST_ROWS):
                some = deltas[first : first + MOST_ROWS]
                body = to_json_anyway(_as_message(some) or some)
                packed.append((log_id, some[-1].seq, 0, DELTAS_KIND, len(some), body, None))
        else:
            packed += _pack_others(log_id, group)
    return packed


def _is_delta(row: LogRow) -> bool:
    return row.event.__class__ in _DELTAS and row.private is None


def _pack_others(log_id: str, rows: Iterable[LogRow]) -> Iterator[PackedRow]:
    bodies: list[bytes] = []
    private: list[bytes] = []
    count = size = seq = sub = 0
    for row in rows:
        seq, sub, count = row.seq, row.sub, count + 1
        if row.event is not None:
            bodies.append(to_json_anyway(row.event))
            size += len(bodies[-1])
        if row.private is not None:
            private.append(to_json_anyway((seq, sub, row.private)))
            size += len(private[-1])
        if count == MOST_ROWS or size >= MOST_BYTES:
            yield (log_id, seq, sub, ROWS_KIND, len(bodies), _json_list(bodies), _json_list(private))
            bodies, private, count, size = [], [], 0, 0
    if count:
        yield (log_id, seq, sub, ROWS_KIND, len(bodies), _json_list(bodies), _json_list(private))


def _json_list(parts: list[bytes]) -> bytes | None:
    return b"[%b]" % b",".join(parts) if parts else None


def _as_message(deltas: Sequence[Any]) -> _Message | None:
    """Return deltas as one record, if they belong to one message."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1 or not isinstance(first, _TEXTS) or len({event.__class__ for event in deltas}) > 1:
        return None
    if last.seq - first.seq != len(deltas) - 1 or (last.agent, last.ns) != (first.agent, first.ns):
        return None
    if len({event.message_id for event in deltas}) > 1 or len({event.run_id for event in deltas}) > 1:
        return None
    return _Message(first, [event.delta for event in deltas], [event.at for event in deltas])


@lru_cache
def _append_many(count: int) -> str:
    """SQL that appends a pack to each of some logs, as `BatchWrite` does to one; it divides by zero if it cannot.

    The newer rows of a log are counted in a query of their own, so that the index finds them whatever the planner thinks.
    """
    types = "text, bigint, bigint, text, bigint, bytea, bytea, bigint, bigint, bigint".split(", ")
    first, other = ", ".join([f"?::{name}" for name in types]), ", ".join("?" * len(types))
    rows = ", ".join([f"({first})", *[f"({other})"] * (count - 1)])
    newer = "SELECT 1 FROM events WHERE events.log_id = given.log_id AND (seq, sub) >= (given.from_seq, given.from_sub)"
    return (
        f"WITH given ({PACK}, epoch, from_seq, from_sub) AS (VALUES {rows}), "
        "met AS (SELECT logs.log_id FROM logs JOIN given ON logs.log_id = given.log_id AND logs.epoch = given.epoch "
        f"WHERE owner IS NOT NULL AND ended = 0 AND (SELECT COUNT(*) FROM ({newer} LIMIT 1) AS newer) = 0 "
        "ORDER BY logs.log_id FOR UPDATE OF logs), "
        f"done AS (INSERT INTO events ({PACK}) SELECT {PACK} FROM given WHERE log_id IN (TABLE met) RETURNING 1) "
        f"SELECT 1 / (COUNT(*) = {count})::int FROM done"
    )


def _last_summary(batch: LogBatch) -> SummaryUpdate | None:
    """Return how a log stands whose root run ends in a batch, though its rows do not say so: the run has broken down."""
    for run in batch.runs:
        if run.identity.run_id == batch.log_id and run.has_ended and batch.released and run.result is not None:
            status = "completed" if run.result.status in (RunStatus.COMPLETED, RunStatus.CANCELLED) else "failed"
            summary = LogSummary(status=status, usage=run.result.usage)
            return SummaryUpdate(run.identity.thread_id, run.identity.user_id, summary)
    return None


class BatchWrite:
    """A batch of a log: fenced by the epoch of its owner, and recognised when it is retried."""

    def __init__(self, place: str, batch: LogBatch) -> None:
        self._place, self._batch = place, batch
        is_small = len(batch.rows) <= MOST_ROWS_AT_ONCE
        self._packs = pack_rows(batch.log_id, batch.rows) if is_small else None
        """None until a thread has packed the rows: many would hold up the event loop."""
        saved = {update.record.thread_id for update in batch.threads}
        # A root that ends leaves its thread.
        left = {run.identity.thread_id for run in batch.runs if run.has_ended and run.identity.run_id == batch.log_id}
        left.update(batch.left)
        self.threads, self._left = [*saved, *left], left
        """The threads that it changes, and those that it releases."""
        self._writes: list[Callable[[Link], object]] = [
            thread_write(update, batch.log_id if update.record.thread_id in left else None) for update in batch.threads
        ]
        if rest := sorted(left - saved):
            self._writes.append(partial(leave_threads, log_id=batch.log_id, thread_ids=rest))
        self._writes += [run_write(run) for run in batch.runs]
        if (summary := batch.summary or _last_summary(batch)) is not None:
            self.threads.append(summary.thread_id)
            self._writes.append(summary_write(batch.log_id, summary))

    def write(self, link: Link) -> None:
        batch, log_id = self._batch, self._batch.log_id
        if self._packs is None:
            try:
                self._packs = pack_rows(log_id, batch.rows)
            except UNREADABLE as exc:
                raise StoreError(self._place, f"run {log_id!r} cannot be stored: {exc}") from exc
        try:
            self._append(link, self._packs)
        except ConditionFailed:
            self._check_written(link, self._packs)
            return
        for write in self._writes:
            write(link)
        answer = "UPDATE inbox SET reply = ? WHERE log_id = ? AND wish_id = ? AND reply IS NULL"
        for reply in batch.replies:
            link.run(answer, reply.body, log_id, reply.wish_id)
        if batch.released and not batch.ended:
            if batch.rests:  # a separate statement: it sees every wish put in before the release
                wanted = "SELECT 1 FROM inbox WHERE inbox.log_id = logs.log_id AND reply IS NULL"
                make_due(link, f"log_id = ? AND EXISTS ({wanted})", log_id)
            else:
                link.notify(LEGS)
        for topic in (log_id, *self._left):
            link.notify(topic)

    def _append(self, link: Link, packs: list[PackedRow]) -> None:
        """Insert the rows and release the log, if it is owned at this epoch and has none of these rows yet."""
        batch, where = self._batch, OWNED
        values: list[Any] = [batch.log_id, batch.epoch]
        if packs:
            first = batch.rows[0]
            if len(packs) == 1 and not batch.released and not batch.ended:
                if link.gather(_append_many, (*packs[0], batch.epoch, first.seq, first.sub)):
                    return
            where, values = OWNED + _NEW, [*values, batch.log_id, first.seq, first.sub]
        if batch.ended or (batch.released and batch.rests):
            rests = ", turn = NULL, due_at = NULL"
            owned = f"UPDATE logs SET owner = NULL, ended = {int(batch.ended)}{rests} WHERE {where} RETURNING 1"
        elif batch.released:  # the next worker takes it before new legs
            # A turn says that there is work: without an engine, any process continues it.
            turn = f"CASE WHEN engine IS NULL OR engine = '{POSTGRES}' THEN COALESCE(turn, 0) ELSE turn END"
            owned = f"UPDATE logs SET owner = NULL, level = {TAKEN_OVER}, turn = {turn} WHERE {where} RETURNING 1"
        else:
            owned = f"SELECT 1 FROM logs WHERE {where}{link.locking}"
        link.require(owned, *values)
        link.insert(f"events ({PACK})", packs)

    def _check_written(self, link: Link, packs: list[PackedRow]) -> None:
        """Raise unless an earlier attempt wrote this batch and its outcome was lost."""
        batch = self._batch
        found = link.run("SELECT epoch, owner, ended FROM logs WHERE log_id = ?", batch.log_id)
        epoch, owner, ended = found[0] if found else (None, None, 1)
        is_ours = epoch == batch.epoch
        if packs:
            if self._stored_packs(link) == packs:
                return
            if is_ours and owner is not None and not ended:
                raise StoreError(self._place, f"the log of run {batch.log_id!r} has other rows than those written here")
        elif is_ours and owner is None and (batch.released or batch.ended) and bool(ended) == batch.ended:
            return
        raise OwnershipLost(self._place, batch.log_id)

    def _stored_packs(self, link: Link) -> list[PackedRow]:
        first, last = self._batch.rows[0], self._batch.rows[-1]
        return link.run(
            f"SELECT {PACK} FROM events WHERE log_id = ? AND (seq, sub) >= (?, ?) AND (seq, sub) <= (?, ?) "
            "ORDER BY seq, sub",
            *(self._batch.log_id, first.seq, first.sub, last.seq, last.sub),
        )


def unpack_events(body: bytes) -> list[Event]:
    """Return the events of a pack; raise one of UNREADABLE if it is damaged. Unknown kinds read as UnknownEvent."""
    if body[: len(_MESSAGE)] == _MESSAGE:
        return _decode_message(body).events
    try:
        return _decode_events(body)
    except msgspec.ValidationError:
        return [event_from_bytes(bytes(part)) for part in _decode_parts(body)]


def unpack_rows(seq: int, sub: int, held: int, body: bytes | None, private: bytes | None) -> list[LogRow]:
    """Return the rows of a pack; raise ValueError, with the reason, if it is damaged."""
    events = [] if body is None else unpack_events(body)
    parts = [] if private is None else _decode_private(private)
    _check_events(seq, held, events)
    for event in events:
        if event.__class__ is UnknownEvent:
            kind = event.original.get("kind")  # type: ignore[attr-defined]
            raise ValueError(f"it is of the kind {kind!r}, which this version does not know: a newer one wrote it")
    rows = _merged(events, parts)
    if not rows or (rows[-1].seq, rows[-1].sub) != (seq, sub):
        raise ValueError(f"its last row is not at {seq}.{sub}")
    return rows


def _check_events(seq: int, held: int, events: Sequence[Event]) -> None:
    """Raise ValueError unless these are the events of a pack that ends with `seq`."""
    for expected, event in zip(range(seq - held + 1, seq + 1), events, strict=False):
        if event.seq != expected:
            raise ValueError(f"it has the number {event.seq}, not {expected}")
    if len(events) != held:
        raise ValueError(f"it holds {len(events)} events, not {held}")


def _merged(events: list[Event], parts: list[tuple[int, int, Private]]) -> list[LogRow]:
    """Join each event with its private part; parts without an event become rows of their own."""
    private = {(seq, sub): part for seq, sub, part in parts}
    rows = [LogRow(event.seq, 0, event, private.pop((event.seq, 0), None)) for event in events]
    rows += [LogRow(seq, sub, None, part) for (seq, sub), part in private.items()]
    rows.sort(key=lambda row: (row.seq, row.sub))
    if any(row.event is None and row.sub == 0 for row in rows):
        raise ValueError("it has the private part of an event that is missing")
    for before, row in zip(rows, rows[1:], strict=False):
        if (row.seq, row.sub) not in ((before.seq + 1, 0), (before.seq, before.sub + 1)):
            raise ValueError(f"the row after {before.seq}.{before.sub} is missing")
    return rows


def read_events(link: Link, log_id: str, after: int, limit: int) -> tuple[list[Event], bool] | None:
    """Read the next public events of a log; also return whether it has ended with them."""
    # Read `ended` first, so that rows written between the two queries are not missed.
    log = link.run("SELECT ended FROM logs WHERE log_id = ?", log_id)
    if not log:
        return None
    numbers = "SELECT seq FROM events WHERE log_id = ? AND seq > ? AND held > 0 ORDER BY seq LIMIT ?"
    there = [row[0] for row in link.run(numbers, log_id, after, limit)]
    # A pack may hold many events: read no more packs than are needed.
    enough = next((seq for seq in there if seq - after >= limit), None)
    last = enough or (there[-1] if there else after)
    bodies = "SELECT body FROM events WHERE log_id = ? AND seq > ? AND seq <= ? AND held > 0 ORDER BY seq"
    is_all = enough is None and len(there) < limit
    events: list[Event] = []
    for (body,) in link.run(bodies, log_id, after, last):
        events += unpack_events(body)
    first = next((place for place, event in enumerate(events) if event.seq > after), len(events))
    return events[first : first + limit], is_all and bool(log[0][0])


def read_deltas(link: Link, log_id: str, after: int, upto: int) -> list[Event]:
    """Read the deltas of a log in a range of numbers. The first and the last pack may reach beyond the range."""
    packs = "SELECT body FROM events WHERE log_id = ? AND seq > ? AND seq - held < ? AND kind = ? ORDER BY seq"
    found = link.run(packs, log_id, after, upto, DELTAS_KIND)
    return [event for (body,) in found for event in unpack_events(body) if after < event.seq <= upto]


def read_log(link: Link, log_id: str, place: str) -> StoredLog | None:
    """Read a log with its private parts, without deltas; raise LogUnreadable if rows are missing or damaged."""
    log = link.run("SELECT ended, pruned FROM logs WHERE log_id = ?", log_id)
    if not log:
        return None
    ended, thinned = bool(log[0][0]), bool(log[0][1])
    packs = link.run(
        "SELECT seq, sub, held, body, private FROM events WHERE log_id = ? AND kind <> ? ORDER BY seq, sub",
        *(log_id, DELTAS_KIND),
    )
    deltas, last = link.run(
        "SELECT COALESCE(SUM(held), 0), COALESCE(MAX(seq), 0) FROM events WHERE log_id = ? AND kind = ?",
        *(log_id, DELTAS_KIND),
    )[0]
    end: tuple[int, int] = max((last, 0), tuple(packs[-1][:2]) if packs else (0, 0))
    if not thinned and deltas + sum([pack[2] for pack in packs]) != end[0]:
        # Rows are missing: read the place of each pack only now, to describe the gap.
        before = 0
        for seq, held in link.run("SELECT seq, held FROM events WHERE log_id = ? AND held > 0 ORDER BY seq", log_id):
            if seq - held != before:
                raise LogUnreadable(place, log_id, before + 1, _describe_gap(before, seq - held))
            before = seq
    rows: list[LogRow] = []
    for seq, sub, held, body, private in packs:
        try:
            if thinned:
                rows += [LogRow(event.seq, 0, event) for event in (unpack_events(body) if body else ())]
            else:
                unpacked = unpack_rows(seq, sub, held, body, private)
                _check_joint(rows, unpacked[0])
                rows += unpacked
        except UNREADABLE as exc:
            raise LogUnreadable(place, log_id, max(seq - held + 1, 1), str(exc)) from exc
    return StoredLog(rows=rows, seq=end[0], sub=end[1], ended=ended, thinned=thinned)


def _check_joint(rows: list[LogRow], first: LogRow) -> None:
    """Raise ValueError if a private row is missing between these rows and the first of the next pack."""
    if first.sub > 1 and (not rows or (rows[-1].seq, rows[-1].sub) != (first.seq, first.sub - 1)):
        raise ValueError(f"the private row {first.seq}.{first.sub - 1} is missing")


def _describe_gap(before: int, until: int) -> str:
    """Describe the gap or overlap between event `before` and the events after `until`."""
    if until < before:
        return f"it is stored twice, from event {until + 1} on"
    return f"event {until} is missing" if until == before + 1 else f"events {before + 1} to {until} are missing"
