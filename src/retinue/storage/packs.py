"""The rows of logs in a database: packed for the owner of a log, which writes them, and read.

While a log is written, consecutive rows share one row of `events`. Deltas never share one with other rows (`deltas.py`).
Such a row is stored under the place (`seq`, `sub`) of its last row. `body` has its events and nothing private; `private`
has the private parts, each with its place. Deltas have no private part, so retention can drop their packs.

A log that has ended is rewritten once (`cold.py`): its rows are then in `packs`, and `events` has none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import groupby
from typing import Any

import msgspec
from msgspec.structs import replace

from ..core.content import to_json_anyway
from ..core.events import DELTAS, EVENT_TYPES, Event, MessagesSnapshot, UnknownEvent, event_from_bytes
from ..core.rows import LogRow, Private
from .deltas import Deltas, pack_deltas, unpack_deltas
from .references import LEAST_AT_WORK, Excerpt, Gapped, Homes, encode_excerpt, expand, filled
from .schema import DELTAS_KIND, ROWS_KIND

MOST_ROWS, MOST_BYTES = 256, 256_000
"""The rows and bytes that fill a pack."""
UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError, IndexError)
"""Errors that decoders raise."""

PackedRow = tuple[str, int, int, str, int, bytes | None, bytes | None]
"""Log, seq and sub of the last row, kind, number of events, events, private parts."""

PACK = "log_id, seq, sub, kind, held, body, private"
"""The columns of a pack."""
_DELTAS = frozenset(DELTAS)
_kinds: list[Any] = list(EVENT_TYPES.values())
_decode_events = msgspec.json.Decoder(list[reduce(lambda one, other: one | other, _kinds)]).decode
_decode_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
decode_private = msgspec.json.Decoder(list[tuple[int, int, Private]]).decode
_RECORDS = (b"\x93\xa1", b"\x95\xa1")
"""The first bytes of a record that is no JSON: an excerpt, or deltas in columns."""
_decode_record = msgspec.msgpack.Decoder(Deltas | Excerpt).decode


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
                packed.append((log_id, some[-1].seq, 0, DELTAS_KIND, len(some), _pack_some(some), None))
        else:
            packed += _pack_others(log_id, group)
    return packed


def _is_delta(row: LogRow) -> bool:
    return row.event.__class__ in _DELTAS and row.private is None


def _pack_some(deltas: list[Any]) -> bytes:
    if deltas[-1].seq - deltas[0].seq == len(deltas) - 1:
        try:
            return pack_deltas(deltas)
        except (OverflowError, TypeError):  # times that no clock has, or pieces that are no text
            pass
    return to_json_anyway(deltas)


def _pack_others(log_id: str, rows: Iterable[LogRow]) -> Iterator[PackedRow]:
    bodies = _Bodies()
    private: list[bytes] = []
    count = size = seq = sub = 0
    for row in rows:
        seq, sub, count = row.seq, row.sub, count + 1
        if row.event is not None:
            size += bodies.add(row)
        if row.private is not None:
            private.append(to_json_anyway((seq, sub, row.private)))
            size += len(private[-1])
        if count == MOST_ROWS or size >= MOST_BYTES:
            yield (log_id, seq, sub, ROWS_KIND, bodies.count, bodies.encoded(), _json_list(private))
            bodies, private, count, size = _Bodies(), [], 0, 0
    if count:
        yield (log_id, seq, sub, ROWS_KIND, bodies.count, bodies.encoded(), _json_list(private))


class _Bodies:
    """The events of a pack as JSON, with a gap where a conversation begins with messages that a thread has."""

    def __init__(self) -> None:
        self.count = 0
        self._bodies: list[bytes] = []
        self._size, self._before = 1, 0
        self._threads: list[str] = []
        self._gaps: list[int] = []

    def add(self, row: LogRow) -> int:
        """Add the event of a row; return its size."""
        event = row.event
        if row.history is not None and isinstance(event, MessagesSnapshot):
            thread_id, upto = row.history
            rest = to_json_anyway(event.messages[upto:])[1:-1]
            start = to_json_anyway(replace(event, messages=()))[:-2]
            body = b"%b%b%b]}" % (start, b"," if rest else b"", rest)
            if thread_id not in self._threads:
                self._threads.append(thread_id)
            at = self._size + len(start)
            self._gaps += [at - self._before, self._threads.index(thread_id) + 1, 1, upto, 0]
            self._before = at
        else:
            body = to_json_anyway(event)
        self._bodies.append(body)
        self.count += 1
        self._size += len(body) + 1
        return len(body)

    def encoded(self) -> bytes | None:
        body = _json_list(self._bodies)
        return encode_excerpt(Gapped(body or b"", self._gaps), self._threads, LEAST_AT_WORK) if self._gaps else body


def _json_list(parts: list[bytes]) -> bytes | None:
    return b"[%b]" % b",".join(parts) if parts else None


def unpack_events(body: bytes, homes: Homes | None = None) -> list[Event]:
    """Return the events of a pack; raise one of UNREADABLE if it is damaged. Unknown kinds read as UnknownEvent."""
    return unpack_plain(expand(body), homes)


def unpack_plain(plain: bytes, homes: Homes | None) -> list[Event]:
    """Return the events of a pack that is not compressed any more."""
    if plain[:2] in _RECORDS:
        record = _decode_record(plain)
        if isinstance(record, Deltas):
            return unpack_deltas(record)
        plain = filled(record.text, record.threads, homes)
    return events_from_json(plain)


def events_from_json(plain: bytes) -> list[Event]:
    """Return the events of a list."""
    try:
        return _decode_events(plain)
    except msgspec.ValidationError:
        return [event_from_bytes(bytes(part)) for part in _decode_parts(plain)]


def unpack_rows(
    seq: int, sub: int, held: int, body: bytes | None, private: bytes | None, homes: Homes | None = None
) -> list[LogRow]:
    """Return the rows of a pack; raise ValueError, with the reason, if it is damaged."""
    events = [] if body is None else unpack_events(body, homes)
    parts = [] if private is None else decode_private(private)
    _check_events(seq, held, events)
    check_kinds(events)
    rows = merged(events, parts)
    if not rows or (rows[-1].seq, rows[-1].sub) != (seq, sub):
        raise ValueError(f"its last row is not at {seq}.{sub}")
    return rows


def check_kinds(events: Iterable[Event]) -> None:
    """Raise ValueError for an event that this version does not know."""
    for event in events:
        if event.__class__ is UnknownEvent:
            kind = event.original.get("kind")  # type: ignore[attr-defined]
            raise ValueError(f"it is of the kind {kind!r}, which this version does not know: a newer one wrote it")


def _check_events(seq: int, held: int, events: Sequence[Event]) -> None:
    """Raise ValueError unless these are the events of a pack that ends with `seq`."""
    for expected, event in zip(range(seq - held + 1, seq + 1), events, strict=False):
        if event.seq != expected:
            raise ValueError(f"it has the number {event.seq}, not {expected}")
    if len(events) != held:
        raise ValueError(f"it holds {len(events)} events, not {held}")


def merged(events: list[Event], parts: list[tuple[int, int, Private]], *, gaps: bool = False) -> list[LogRow]:
    """Join each event with its private part; parts without an event become rows of their own. With `gaps`, deltas may be
    missing between them."""
    private = {(seq, sub): part for seq, sub, part in parts}
    rows = [LogRow(event.seq, 0, event, private.pop((event.seq, 0), None)) for event in events]
    rows += [LogRow(seq, sub, None, part) for (seq, sub), part in private.items()]
    rows.sort(key=lambda row: (row.seq, row.sub))
    if any(row.event is None and row.sub == 0 for row in rows):
        raise ValueError("it has the private part of an event that is missing")
    for before, row in zip(rows, rows[1:], strict=False):
        if gaps and row.seq > before.seq and row.sub < 2:
            continue
        if (row.seq, row.sub) not in ((before.seq + 1, 0), (before.seq, before.sub + 1)):
            raise ValueError(f"the row after {before.seq}.{before.sub} is missing")
    return rows
