"""The handle of a run: events as they come, parts, children, the result, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Protocol

from ..core.context import GRACE
from ..core.errors import OwnershipLost
from ..core.events import Event
from ..core.runs import RunResult
from ..loop.handles import ChildRun, children_of
from ..loop.log import LiveLog
from ..wire.parts import Mode, PartsProjection, StreamPart


class Home(Protocol):
    """The runtime of a handle."""

    async def result(self, run_id: str) -> RunResult: ...

    async def cancel(
        self, run_id: str, *, tasks: bool = False, grace: float = GRACE, reason: str = "cancelled"
    ) -> RunResult: ...


class Run:
    """A run in progress. Iterate it for events; leaving the iteration does not stop it."""

    def __init__(
        self,
        run_id: str,
        thread_id: str,
        agent: str,
        log: LiveLog,
        end: asyncio.Future[RunResult],
        home: Home,
        first: int = 0,
        opened: Callable[[], Awaitable[tuple[LiveLog, int]]] | None = None,
    ) -> None:
        self.run_id, self.thread_id, self.agent = run_id, thread_id, agent
        self._log, self._end, self._home, self._first, self._opened = log, end, home, first, opened

    def __repr__(self) -> str:
        return f"<Run {self.run_id} of {self.agent!r}>"

    @property
    def ended(self) -> bool:
        """True if it has ended, or waits for a human."""
        return self._end.done()

    async def __aiter__(self) -> AsyncIterator[Event]:
        log, first = await self._open()
        async for event in log.follow(first, self.run_id):
            yield event

    async def parts(self, modes: Mode | Iterable[Mode] = ("updates",)) -> AsyncIterator[StreamPart]:
        """Yield the events as LangGraph-shaped parts."""
        project = PartsProjection(modes)
        async for event in self:
            for part in project(event):
                yield part

    @property
    def children(self) -> AsyncIterator[ChildRun]:
        """The children of this run, as they start."""
        return self._children()

    async def _children(self) -> AsyncIterator[ChildRun]:
        log, _ = await self._open()
        async for child in children_of(log, self.run_id):
            yield child

    async def follow(self, after: int = 0) -> AsyncIterator[Event]:
        """Yield the log after event number `after`: what is there, then what comes, until every task has ended."""
        log, _ = await self._open()
        async for event in log.follow(after):
            yield event

    async def result(self) -> RunResult:
        """Wait for the end, or for where it waits. Giving up waiting does not stop the run."""
        try:
            return await asyncio.shield(self._end)
        except OwnershipLost:  # another process continues it
            return await self._home.result(self.run_id)

    async def cancel(self, reason: str = "cancelled", grace: float = GRACE, *, tasks: bool = False) -> RunResult:
        """Stop the model and the tools, and wait for the end; what does not stop in time is left behind.

        Background tasks are stopped only with `tasks`.
        """
        return await self._home.cancel(self.run_id, reason=reason, grace=grace, tasks=tasks)

    async def _open(self) -> tuple[LiveLog, int]:
        if self._opened is None:
            return self._log, self._first
        self._log, self._first = await self._opened()
        self._opened = None
        return self._log, self._first
