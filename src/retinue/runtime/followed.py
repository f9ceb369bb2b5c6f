"""A log that another process writes: one reader reads it for all handles that follow it."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from typing import Any

from ..core.errors import RetinueError
from ..core.events import Event, RunFinished, RunStarted, TaskUpdated
from ..core.runs import RunResult, RunStatus

_OPEN_TASK = ("PENDING", "RUNNING")

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Progress:
    """The status of a log's root run, from the events read so far."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        """The status with which the root run ended its last leg; None while it works, or if that is unknown."""
        self.tasks: set[str] = set()
        """The background tasks at work."""

    @property
    def rests(self) -> bool:
        """True if the root run has ended or waits, and no background task works."""
        return self.status is not None and not self.tasks

    def note(self, event: Event) -> None:
        if isinstance(event, RunStarted) and not event.ns:
            self.status = None
        elif isinstance(event, RunFinished) and not event.ns:
            self.status = event.status
        elif isinstance(event, TaskUpdated):
            change = self.tasks.add if event.status in _OPEN_TASK else self.tasks.discard
            change(event.task_id)


class FollowedLog:
    """The events of a log for its handles. One reader reads it, while it has at least one follower.

    `read` yields the events after a number. A notice is an event with the number 0, which the log does not have.
    """

    def __init__(
        self,
        read: Callable[[int], AsyncGenerator[Event]],
        first: int,
        spawn: Spawn = asyncio.create_task,
        closed: Callable[[], RetinueError] | None = None,
    ) -> None:
        self._read, self._first, self._spawn, self._closed = read, first, spawn, closed
        self._progress = Progress()
        self._events: list[Event] = []
        self._places: list[int] = []
        """The number of each event; a notice, which has none, has that of the event before it."""
        self._threads: dict[str, str] = {}
        self.results: dict[str, RunResult] = {}
        self._is_closed = False
        self._problem: RetinueError | None = None
        self._followers = 0
        self._reading: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None

    def thread_of(self, run_id: str) -> str:
        return self._threads.get(run_id, "")

    async def follow(self, after: int = 0, until_end_of: str | None = None) -> AsyncIterator[Event]:
        place = bisect_right(self._places, after)
        with self._follower():
            while True:
                while place < len(self._events):
                    event = self._events[place]
                    place += 1
                    if 0 < event.seq <= after:
                        continue
                    yield event
                    if isinstance(event, RunFinished) and event.run_id == until_end_of:
                        return
                if self._problem is not None:
                    raise self._problem
                if self._is_closed:
                    return
                await self._change()

    async def follow_run(self, run_id: str) -> AsyncIterator[Event]:
        async for event in self.follow():
            if event.run_id == run_id:
                yield event
                if isinstance(event, RunFinished) and not event.status.is_waiting:
                    return

    @contextlib.contextmanager
    def _follower(self) -> Generator[None]:
        """Read while there is a follower."""
        self._followers += 1
        if self._reading is None and not self._is_closed:
            self._reading = self._spawn(self._read_all())
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers and self._reading is not None:
                self._reading.cancel()
                self._reading = None

    async def _read_all(self) -> None:
        events = self._read(self._places[-1] if self._places else 0)
        try:
            async for event in events:
                if isinstance(event, RunStarted):
                    self._threads[event.run_id] = event.thread_id
                self._places.append(event.seq or (self._places[-1] if self._places else 0))
                self._events.append(event)
                if event.seq:
                    self._progress.note(event)
                if event.seq > self._first and self._progress.rests:
                    break
                self._wake()
        except RetinueError as exc:
            self._problem = exc
        except asyncio.CancelledError:
            if self._reading is asyncio.current_task() and self._closed is not None:
                self._problem = self._closed()
                self._wake()
            raise
        finally:
            await events.aclose()
        self._is_closed = True
        self._wake()

    def _change(self) -> asyncio.Future[None]:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._changed)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
