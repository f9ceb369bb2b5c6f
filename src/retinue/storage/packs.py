"""Events as rows: one each, but for deltas that come in a crowd, which share one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ..core.codec import to_json_bytes
from ..core.events import (
    ActivityDelta,
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallStreamDelta,
    event_from_bytes,
)

DELTAS = (TextDelta, ReasoningDelta, ToolCallArgsDelta, ToolCallStreamDelta, ActivityDelta)
"""Events that say piece by piece what another says as a whole."""
PACK = "deltas"
"""The kind of a row that holds several deltas, under the number of the last."""
KINDS = ", ".join(f"'{kind}'" for kind in (*[delta.kind for delta in DELTAS], PACK))

_FEW, _MANY = 4, 256

_DELTAS = frozenset(DELTAS)
_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode

EventRow = tuple[str, int, str, bytes, int]
"""Log, number of the last event in it, kind, what it says, and how many events it holds."""


def rows_of(log_id: str, events: Iterable[Event]) -> list[EventRow]:
    """The rows for consecutive events."""
    rows: list[EventRow] = []
    crowd: list[Event] = []
    for event in events:
        if event.__class__ in _DELTAS:
            crowd.append(event)
            if len(crowd) == _MANY:
                rows += _crowd(log_id, crowd)
                crowd = []
            continue
        if crowd:
            rows += _crowd(log_id, crowd)
            crowd = []
        rows.append((log_id, event.seq, event.kind, to_json_bytes(event), 1))
    return rows + _crowd(log_id, crowd)


def _crowd(log_id: str, crowd: list[Event]) -> list[EventRow]:
    if len(crowd) < _FEW:
        return [(log_id, event.seq, event.kind, to_json_bytes(event), 1) for event in crowd]
    return [(log_id, crowd[-1].seq, PACK, to_json_bytes(crowd), len(crowd))]


def events_in(body: bytes) -> list[Event]:
    """The events of a row; raises where it cannot be read."""
    if bytes(body[:1]) != b"[":
        return [event_from_bytes(body)]
    try:
        return _decode_deltas(body)
    except msgspec.ValidationError:
        return [event_from_bytes(bytes(part)) for part in _parts(body)]


_kinds: Any = TextDelta | ReasoningDelta | ToolCallArgsDelta | ToolCallStreamDelta | ActivityDelta
_decode_deltas = msgspec.json.Decoder(list[_kinds]).decode
