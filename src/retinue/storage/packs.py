"""Rows of a log as rows of the database. Consecutive rows share one, but deltas never share one with other rows.

A pack is stored under the place (`seq`, `sub`) of its last row. `body` has its events and nothing private; `private`
has the private parts, each with its place. Deltas have no private part, so retention can drop their packs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import msgspec

from ..core.codec import to_json_bytes
from ..core.events import (
    EVENT_TYPES,
    ActivityDelta,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallStreamDelta,
    UnknownEvent,
    event_from_bytes,
)
from ..core.rows import LogRow, Private

DELTAS = (TextDelta, ReasoningDelta, ToolCallArgsDelta, ToolCallStreamDelta, ActivityDelta)
"""Events that report in pieces what another event reports as a whole."""
ROWS_KIND, DELTAS_KIND = "rows", "deltas"

MOST_ROWS, MOST_BYTES = 256, 256_000
"""A pack is full with so many rows, or when its rows have so many bytes."""

PackedRow = tuple[str, int, int, str, int, bytes | None, bytes | None]
"""Log, seq and sub of the last row, kind, how many events it holds, events, private parts."""

_DELTAS, _TEXTS = frozenset(DELTAS), (TextDelta, ReasoningDelta)
_kinds: list[Any] = list(EVENT_TYPES.values())
_decode_events = msgspec.json.Decoder(list[reduce(lambda one, other: one | other, _kinds)]).decode
_decode_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_private = msgspec.json.Decoder(list[tuple[int, int, Private]]).decode


class _Message(msgspec.Struct, frozen=True, tag_field="kind", tag="message"):
    """Consecutive deltas of one message; what they have in common is stored once."""

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
    deltas: list[Event] = []
    pack = _Pack(log_id)
    for row in rows:
        if row.event.__class__ in _DELTAS and row.private is None:
            if pack.count:
                packed.append(pack.close())
            deltas.append(row.event)  # type: ignore[arg-type]
            if len(deltas) == MOST_ROWS:
                packed.append(_pack_deltas(log_id, deltas))
                deltas = []
            continue
        if deltas:
            packed.append(_pack_deltas(log_id, deltas))
            deltas = []
        pack.add(row)
        if pack.count == MOST_ROWS or pack.size >= MOST_BYTES:
            packed.append(pack.close())
    if deltas:
        packed.append(_pack_deltas(log_id, deltas))
    if pack.count:
        packed.append(pack.close())
    return packed


class _Pack:
    """A pack in the making, of rows that are not deltas."""

    __slots__ = ("_bodies", "_log_id", "_place", "_private", "count", "size")

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id
        self._clear()

    def _clear(self) -> None:
        self._bodies: list[bytes] = []
        self._private: list[bytes] = []
        self._place = (0, 0)
        self.count = self.size = 0

    def add(self, row: LogRow) -> None:
        self._place = row.seq, row.sub
        self.count += 1
        if row.event is not None:
            body = to_json_bytes(row.event)
            self._bodies.append(body)
            self.size += len(body)
        if row.private is not None:
            private = to_json_bytes((row.seq, row.sub, row.private))
            self._private.append(private)
            self.size += len(private)

    def close(self) -> PackedRow:
        """Return the pack and begin another."""
        body = b"[%b]" % b",".join(self._bodies) if self._bodies else None
        private = b"[%b]" % b",".join(self._private) if self._private else None
        seq, sub = self._place
        packed = (self._log_id, seq, sub, ROWS_KIND, len(self._bodies), body, private)
        self._clear()
        return packed


def _pack_deltas(log_id: str, deltas: list[Event]) -> PackedRow:
    body = to_json_bytes(_as_message(deltas) or deltas)
    return (log_id, deltas[-1].seq, 0, DELTAS_KIND, len(deltas), body, None)


def _as_message(deltas: Sequence[Any]) -> _Message | None:
    """Return deltas as those of one message, if they are."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1 or not isinstance(first, _TEXTS) or len({event.__class__ for event in deltas}) > 1:
        return None
    if last.seq - first.seq != len(deltas) - 1 or (last.agent, last.ns) != (first.agent, first.ns):
        return None
    if len({event.message_id for event in deltas}) > 1 or len({event.run_id for event in deltas}) > 1:
        return None
    return _Message(first, [event.delta for event in deltas], [event.at for event in deltas])


def unpack_events(body: bytes) -> list[Event]:
    """Return the events of a pack; raises where it cannot be read. Unknown kinds read as UnknownEvent."""
    if body[: len(_MESSAGE)] == _MESSAGE:
        return _decode_message(body).events
    try:
        return _decode_events(body)
    except msgspec.ValidationError:
        return [event_from_bytes(bytes(part)) for part in _decode_parts(body)]


def unpack_rows(seq: int, sub: int, held: int, body: bytes | None, private: bytes | None) -> list[LogRow]:
    """Return the rows of a pack; ValueError says what is wrong with it."""
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
    """Give each event its private part, and the parts without an event rows of their own."""
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
