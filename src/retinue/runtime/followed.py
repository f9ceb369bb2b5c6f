"""A log that another process writes: one reader reads it for all handles that follow it."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

from ..core.errors import RetinueError
from ..core.events import Event, RunFinished, RunStarted, TaskUpdated
from ..core.runs import RunResult, RunStatus
from ..log.read import MOST, of_run

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
        log_id: str,
        read: Callable[[int], AsyncGenerator[Event]],
        first: int,
        spawn: Spawn = asyncio.create_task,
        closed: Callable[[], RetinueError] | None = None,
    ) -> None:
        self.log_id, self._read, self._first, self._spawn, self._closed = log_id, read, first, spawn, closed
        self._progress = Progress()
        self.events: list[Event] = []
        self.places: list[int] = []
        """The number of each event; a notice, which has none, has that of the event before it."""
        self._threads: dict[str, str] = {}
        self.results: dict[str, RunResult] = {}
        self.is_closed = False
        self.problem: RetinueError | None = None
        self._followers = 0
        self._reading: asyncio.Task[None] | None = None
        self._changed: asyncio.Future[None] | None = None

    def thread_of(self, run_id: str) -> str:
        return self._threads.get(run_id, "")

    def read(self, after: int = 0, *, live: bool = False, run_id: str = "") -> FollowedReader:
        return FollowedReader(self, after, run_id)

    def join(self) -> None:
        """Read while there is a follower."""
        self._followers += 1
        if self._reading is None and not self.is_closed:
            self._reading = self._spawn(self._read_all())

    def leave(self) -> None:
        self._followers -= 1
        if not self._followers and self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read_all(self) -> None:
        events = self._read(self.places[-1] if self.places else 0)
        try:
            async for event in events:
                if isinstance(event, RunStarted):
                    self._threads[event.run_id] = event.thread_id
                self.places.append(event.seq or (self.places[-1] if self.places else 0))
                self.events.append(event)
                if event.seq:
                    self._progress.note(event)
                if event.seq > self._first and self._progress.rests:
                    break
                self._wake()
        except RetinueError as exc:
            self.problem = exc
        except asyncio.CancelledError:
            if self._reading is asyncio.current_task() and self._closed is not None:
                self.problem = self._closed()
                self._wake()
            raise
        finally:
            await events.aclose()
        self.is_closed = True
        self._wake()

    def change(self) -> asyncio.Future[None]:
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        return asyncio.shield(self._changed)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


class FollowedReader:
    """A place in a followed log. Notices are among the events."""

    def __init__(self, log: FollowedLog, after: int, run_id: str) -> None:
        self._log, self.seq, self._after, self._run_id = log, after, after, run_id
        self._place = bisect_right(log.places, after)
        self._is_follower = False

    @property
    def ready(self) -> bool:
        return self._place < len(self._log.events)

    @property
    def ended(self) -> bool:
        return self._log.is_closed and self._log.problem is None and not self.ready

    async def take(self, most: int = MOST) -> Sequence[Event]:
        log = self._log
        if not self._is_follower:
            self._is_follower = True
            log.join()
        while not self.ready and not log.is_closed:
            if log.problem is not None:
                raise log.problem
            await log.change()
        if not self.ready and log.problem is not None:
            raise log.problem
        events = log.events[self._place : self._place + most]
        self._place += len(events)
        self.seq = max([self.seq, *[event.seq for event in events]])
        return of_run([event for event in events if not 0 < event.seq <= self._after], self._run_id)

    async def notice(self) -> Event | None:
        return None

    async def rests(self) -> bool:
        return self.ended

    async def aclose(self) -> None:
        if self._is_follower:
            self._is_follower = False
            self._log.leave()
