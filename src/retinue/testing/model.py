"""Test doubles: a model that follows a script and fails on an unexpected request, and a sink that keeps its events."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct

from ..core.errors import ConfigurationError, Escape, as_tuple
from ..core.events import Event
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage


class ScriptError(Escape, AssertionError):
    """The agent called the model more often than the script has turns. It is raised out of the run."""


class Say(Struct, frozen=True):
    chunks: tuple[str, ...]
    usage: Usage | None = None
    stop_reason: str | None = None


class Think(Struct, frozen=True):
    """Reasoning before the answer."""

    text: str


class Call(Struct, frozen=True):
    name: str
    arguments: str
    id: str | None


class Fail(Struct, frozen=True):
    """The model fails here, after the parts before in its turn."""

    error: BaseException

    def __post_init__(self) -> None:
        given: Any = self.error
        if not isinstance(given, BaseException):
            raise ConfigurationError(f"fail takes an exception, not {given!r:.80}: write fail(RuntimeError(…))")


Piece = Say | Think | Call | Fail
"""The parts of a turn: `say`, `think`, `call` or `fail`."""
ScriptedTurn = Piece | Sequence[Piece]
"""The values that a function of the request may return."""
ScriptFunction = Callable[[ModelRequest], ScriptedTurn | Awaitable[ScriptedTurn]]


def say(
    text: str, chunks: Iterable[str] | None = None, usage: Usage | None = None, stop_reason: str | None = None
) -> Piece:
    """Text, streamed whole or in `chunks`; `stop_reason` is "length" or "refusal" for an answer that was cut."""
    pieces = (text,) if chunks is None else tuple(chunks)
    for given in cast("Sequence[Any]", (text, *pieces)):
        if not isinstance(given, str):
            raise ConfigurationError(f"say takes text, not {given!r:.80}")
    if "".join(pieces) != text:
        raise ValueError(f"the chunks of say() join to {''.join(pieces)!r}, not to {text!r}")
    return Say(pieces, usage, stop_reason)


def call(name: str, args: dict[str, Any] | str | None = None, id: str | None = None) -> Piece:
    """A tool call; arguments given as text are sent unchanged, valid or not."""
    arguments = args if isinstance(args, str) else msgspec.json.encode(args or {}).decode()
    return Call(name, arguments, id)


think, fail = Think, Fail


def _find_wrong(turn: Any) -> str | None:
    """Return what of a turn is not a piece, and what to write instead; None if all is well."""
    pieces = (turn,) if isinstance(turn, str) or not isinstance(turn, Sequence) else cast("Sequence[Any]", turn)
    for piece in pieces:
        if not isinstance(piece, Piece):
            return f"{piece!r:.80}: write say({piece!r:.80})" if isinstance(piece, str) else f"{piece!r:.80}: {_PIECES}"
    return None


_PIECES = "use say, call, think or fail"


class ScriptedModel:
    """Answers from a list of turns, or by a function of the request. `requests` holds the requests it got."""

    def __init__(
        self,
        script: Iterable[ScriptedTurn] | ScriptFunction,
        name: str = "scripted",
        *,
        context_window: int | None = None,
    ) -> None:
        self._function: ScriptFunction | None = script if callable(script) else None
        self._turns: list[ScriptedTurn] = [] if callable(script) else list(as_tuple(script, "ScriptedModel", "script"))
        for number, turn in enumerate(self._turns, 1):
            if (wrong := _find_wrong(turn)) is not None:
                raise ConfigurationError(f"turn {number} of a ScriptedModel has {wrong}")
        self._next = 0
        self.requests: list[ModelRequest] = []
        self.name, self.context_window = f"testing:{name}", context_window

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        self.requests.append(request)
        turn = await self._turn(request)
        if (wrong := _find_wrong(turn)) is not None:
            raise ScriptError(f"turn {len(self.requests)} has {wrong}")
        pieces: Sequence[Any] = turn if isinstance(turn, Sequence) else (turn,)
        usage = Usage(requests=1)
        stop = "tool_calls" if any(isinstance(piece, Call) for piece in pieces) else "stop"
        for index, piece in enumerate(pieces):
            match piece:
                case Say():
                    usage, stop = piece.usage or usage, piece.stop_reason or stop
                    for text in piece.chunks:
                        yield TextChunk(text)
                case Think():
                    yield ReasoningChunk(piece.text)
                case Call():
                    yield CallChunk(
                        index, piece.id or f"call_{len(self.requests)}_{index + 1}", piece.name, piece.arguments
                    )
                case _:
                    raise piece.error
        yield TurnEnd(stop, usage)

    async def _turn(self, request: ModelRequest) -> ScriptedTurn:
        if self._function is not None:
            made = self._function(request)
            return await made if inspect.isawaitable(made) else made
        if self._next >= len(self._turns):
            last = request.messages[-1] if request.messages else None
            raise ScriptError(f"the script has {len(self._turns)} turns and was asked once more; last message: {last}")
        self._next += 1
        return self._turns[self._next - 1]

    def assert_consumed(self) -> None:
        """Fail if turns are left over."""
        left = len(self._turns) - self._next
        if left:
            raise ScriptError(f"{left} of {len(self._turns)} scripted turns were not asked for")


class RecordingSink:
    """Keeps every event it receives, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def of(self, *kinds: str) -> list[Any]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]
