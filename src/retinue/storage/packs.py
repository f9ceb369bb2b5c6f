"""Events as rows: one each, but for deltas that come in a crowd, which share one.

Where a crowd is one message, what its deltas have in common is said once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

_DELTAS, _TEXTS = frozenset(DELTAS), (TextDelta, ReasoningDelta)
_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode

EventRow = tuple[str, int, str, bytes, int]
"""Log, number of the last event in it, kind, what it says, and how many events it holds."""


class _Message(msgspec.Struct, frozen=True, tag_field="kind", tag="message"):
    """Consecutive deltas of one message."""

    first: TextDelta | ReasoningDelta
    deltas: list[str]
    at: list[float]

    @property
    def events(self) -> list[Event]:
        first: Any = self.first
        own = ("seq", "at", "delta")
        shared = {name: getattr(first, name) for name in first.__struct_fields__ if name not in own}
        told = enumerate(zip(self.deltas, self.at, strict=True), first.seq)
        return [first.__class__(seq=seq, at=at, delta=delta, **shared) for seq, (delta, at) in told]


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
    return [(log_id, crowd[-1].seq, PACK, to_json_bytes(_message(crowd) or crowd), len(crowd))]


def _message(crowd: Sequence[Any]) -> _Message | None:
    """Deltas as those of one message, where they are."""
    first, last = crowd[0], crowd[-1]
    if not isinstance(first, _TEXTS) or len({event.__class__ for event in crowd}) > 1:
        return None
    if last.seq - first.seq != len(crowd) - 1 or (last.agent, last.ns) != (first.agent, first.ns):
        return None
    if len({event.message_id for event in crowd}) > 1 or len({event.run_id for event in crowd}) > 1:
        return None
    return _Message(first, [event.delta for event in crowd], [event.at for event in crowd])


def events_in(body: bytes) -> list[Event]:
    """The events of a row; raises where it cannot be read."""
    if bytes(body[:1]) != b"[":
        is_message = bytes(body[: len(_MESSAGE)]) == _MESSAGE
        return _decode_message(body).events if is_message else [event_from_bytes(body)]
    try:
        return _decode_deltas(body)
    except msgspec.ValidationError:
        return [event_from_bytes(bytes(part)) for part in _parts(body)]


_kinds: Any = TextDelta | ReasoningDelta | ToolCallArgsDelta | ToolCallStreamDelta | ActivityDelta
_decode_deltas = msgspec.json.Decoder(list[_kinds]).decode
_MESSAGE, _decode_message = b'{"kind":"message"', msgspec.json.Decoder(_Message).decode
