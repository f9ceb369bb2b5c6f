"""Live views of a run's children, made from its log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import Any

from ..core.events import ChildStarted, ErrorRaised, Event, TextDelta
from ..core.runs import RunResult
from .log import LiveLog


class TextStream:
    """A run's text: iterate it for the pieces as they come, await it for the whole of what counts."""

    def __init__(self, log: LiveLog, run_id: str) -> None:
        self._log, self._run_id = log, run_id

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self._log.feed(self._run_id).follow():
            if isinstance(event, TextDelta):
                yield event.delta

    def __await__(self) -> Generator[Any, None, str]:
        return self._whole().__await__()

    async def _whole(self) -> str:
        said: list[TextDelta] = []
        async for event in self._log.feed(self._run_id).follow():
            if isinstance(event, TextDelta):
                said.append(event)
            elif isinstance(event, ErrorRaised) and event.dropped_message_id is not None:
                said = [delta for delta in said if delta.message_id != event.dropped_message_id]
        return "".join([delta.delta for delta in said])


class ChildRun:
    """One child of a run, while it works and after. It is identified by the call that started it."""

    def __init__(self, log: LiveLog, started: ChildStarted) -> None:
        self._log = log
        self.name, self.call_id, self.run_id, self.ns = (
            started.child_agent,
            started.call_id,
            started.child_run_id,
            started.child_ns,
        )

    def __repr__(self) -> str:
        return f"<child {self.name!r} of call {self.call_id}>"

    @property
    def events(self) -> AsyncIterator[Event]:
        """Its own events, not those of its children, until it ends."""
        return self._log.feed(self.run_id).follow()

    @property
    def text(self) -> TextStream:
        return TextStream(self._log, self.run_id)

    @property
    def children(self) -> AsyncIterator[ChildRun]:
        """The children it starts, as it starts them."""
        return children_of(self._log, self.run_id)

    async def result(self) -> RunResult:
        """Return how it ended; waits for a suspended one to continue."""
        async for _ in self.events:
            pass
        return self._log.results[self.run_id]


async def children_of(log: LiveLog, run_id: str) -> AsyncIterator[ChildRun]:
    """Yield the children of a run as they start, until it ends."""
    async for event in log.feed(run_id).follow():
        if isinstance(event, ChildStarted):
            yield ChildRun(log, event)
