"""The rows of logs in a database: packed for the owner of a log, which writes them, and read.

Consecutive rows share one row of the database: a pack. Deltas never share one with other rows.

A pack is stored under the place (`seq`, `sub`) of its last row. `body` has its events and nothing private; `private`
has the private parts, each with its place. Deltas have no private part, so retention can drop their packs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import msgspec

from ..core.content import to_json_anyway
from ..core.errors import LogUnreadable
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
from ..core.stores import StoredLog
from .database import Link
from .schema import DELTAS_KIND, ROWS_KIND

MOST_ROWS, MOST_BYTES = 256, 256_000
"""The rows and bytes that fill a pack."""
UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError)
"""Errors that decoders raise."""

PackedRow = tuple[str, int, int, str, int, bytes | None, bytes | None]
"""Log, seq and sub of the last row, kind, number of events, events, private parts."""

PACK = "log_id, seq, sub, kind, held, body, private"
"""The columns of a pack."""
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
            first = size = 0
            for last, delta in enumerate(deltas, 1):
                size += len(delta.delta)
                if last - first < MOST_ROWS and size < MOST_BYTES and last < len(deltas):
                    continue
                some, first, size = deltas[first:last], last, 0
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


def read_events(link: Link, log_id: str, after: int, limit: int, most_bytes: int) -> tuple[list[Event], bool] | None:
    """Read the next public events of a log, in whole packs; also return whether it has ended with them."""
    # Read `ended` first, so that rows written between the two queries are not missed.
    log = link.run("SELECT ended FROM logs WHERE log_id = ?", log_id)
    if not log:
        return None
    packs = "SELECT seq, length(body) FROM events WHERE log_id = ? AND seq > ? AND held > 0 ORDER BY seq LIMIT ?"
    there: list[tuple[int, int]] = link.run(packs, log_id, after, limit)
    last = size = 0
    for seq, length in there:  # a pack may hold many events: read no more packs than are needed
        size += length
        if last and (last - after >= limit or size > most_bytes):
            break
        last = seq
    is_all = len(there) < limit and last == (there[-1][0] if there else 0) and last - after < limit
    bodies = "SELECT body FROM events WHERE log_id = ? AND seq > ? AND seq <= ? AND held > 0 ORDER BY seq"
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
