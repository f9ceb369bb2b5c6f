"""Events that wait to be sent to one reader, who may ask for fewer and larger pieces (`?merge=`).

Such a reader gets the deltas of a message joined, and none of a message whose whole is sent with them. Gathering waits only
where the reader has caught up with its log, so it never slows a replay.
"""

from __future__ import annotations

from collections import defaultdict

from msgspec.structs import replace

from ..core.events import (
    InferenceFinished,
    ReasoningDelta,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallStreamDelta,
)
from ..log.fanout import AT_ONCE, Frame, make_frame

_DELTAS = (TextDelta, ReasoningDelta, ToolCallArgsDelta, ToolCallStreamDelta)
_Delta = TextDelta | ReasoningDelta | ToolCallArgsDelta | ToolCallStreamDelta


class _Piece:
    """An event to send, or deltas to send as one."""

    __slots__ = ("event", "frame", "is_dropped", "texts")

    def __init__(self, frame: Frame) -> None:
        self.frame, self.event, self.is_dropped = frame, frame.event, False
        self.texts: list[str] = []

    def made(self) -> Frame:
        """Return the event; joined deltas have the number of the last of them."""
        if len(self.texts) < 2:
            return self.frame
        return make_frame(replace(self.event, delta="".join(self.texts)))


class Gathering:
    """The events of one log that were read and not sent."""

    def __init__(self, merge: float = 0.0, *, has_answers: bool = True) -> None:
        """`merge`: seconds for which deltas are joined. `has_answers`: the reader gets `inference_finished`, which has the whole
        message, so no delta of that message is needed beside it."""
        self._merge, self._has_answers = merge, has_answers
        self._plain: list[Frame] = []
        """The events of a reader that wants each as it is."""
        self._pieces: list[_Piece] = []
        self._open: defaultdict[str, dict[object, _Piece]] = defaultdict(dict)
        """The deltas of each run that the next one may join."""
        self._of_messages: defaultdict[str, list[_Piece]] = defaultdict(list)
        """The deltas of each run since its last answer."""
        self._size = 0
        self._since: float | None = None

    def __bool__(self) -> bool:
        return bool(self._plain or self._pieces)

    def add(self, frames: list[Frame], now: float) -> None:
        if not self._merge:
            self._plain = self._plain + frames if self._plain else frames
            return
        if frames and self._since is None:
            self._since = now
        for frame in frames:
            self._add(frame)

    def _add(self, frame: Frame) -> None:
        event = frame.event
        if not isinstance(event, _DELTAS):
            self._open.pop(event.run_id, None)
            if isinstance(event, InferenceFinished) and self._has_answers:
                self._drop_deltas(event)
            self._pieces.append(_Piece(frame))
            self._size += len(frame.data)
            return
        key = event.__class__, _subject(event)
        piece = self._open[event.run_id].get(key)
        if piece is None:
            piece = self._open[event.run_id][key] = _Piece(frame)
            self._pieces.append(piece)
            self._of_messages[event.run_id].append(piece)
        piece.event = event
        piece.texts.append(event.delta)
        self._size += len(event.delta)

    def _drop_deltas(self, answer: InferenceFinished) -> None:
        calls = {call.id for call in answer.message.tool_calls}
        for piece in self._of_messages.pop(answer.run_id, ()):
            event = piece.event
            if isinstance(event, ToolCallArgsDelta):
                piece.is_dropped = event.call_id in calls
            elif isinstance(event, TextDelta | ReasoningDelta):
                piece.is_dropped = event.message_id == answer.message.id
            if piece.is_dropped:
                self._size -= sum(map(len, piece.texts))

    def seconds_left(self, now: float) -> float:
        """Return for how long to wait for more before these events are sent; 0 if they are due."""
        if self._since is None or self._size >= AT_ONCE:
            return 0.0
        return max(self._since + self._merge - now, 0.0)

    def take(self) -> list[Frame]:
        """Return the events to send, in order, and forget them."""
        if not self._merge:
            plain, self._plain = self._plain, []
            return plain
        frames = [piece.made() for piece in self._pieces if not piece.is_dropped]
        self._pieces, self._size, self._since = [], 0, None
        self._open.clear()
        self._of_messages.clear()
        return sorted(frames, key=lambda frame: frame.seq)


def _subject(event: _Delta) -> str:
    """Return the message or call that a delta belongs to."""
    if isinstance(event, TextDelta | ReasoningDelta):
        return event.message_id
    return event.call_id
