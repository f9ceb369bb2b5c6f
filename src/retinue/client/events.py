"""The events of a run on a server: read in order, across broken connections, for as many readers as there are."""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from urllib.parse import quote

from ..core.errors import RetinueError, ServerError, UnknownRun
from ..core.events import Event, RunFinished, RunStarted, TaskUpdated, event_from_bytes
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from .connection import PROBLEMS, Connection, Patience, Unavailable

_OPEN = ("PENDING", "RUNNING")
"""The status of tasks that have not ended."""
_MOST_UNREADABLE = 5


class EventReader:
    """Reads the log of a run after a number.

    Invariant: an event is passed on only if it is the one after `seen`, so none is lost or repeated, whatever the
    connection does. A number is skipped only where the server, asked again, does not have it.
    """

    def __init__(
        self, connection: Connection, run_id: str, after: int, has_ended: Callable[[str], Awaitable[bool]]
    ) -> None:
        self._connection, self._run_id, self._has_ended = connection, run_id, has_ended
        self.seen = after
        self._missing_before, self._unreadable, self._hint = 0, 0, 0.0
        self._has_gaps = False
        self._root: RunStatus | None = None
        """The status with which the root run ended its last leg; None while it works, or is not known to."""
        self._tasks: set[str] = set()
        """The background tasks at work."""

    @property
    def rests(self) -> bool:
        """True if the root run has ended or waits, and no background task works."""
        return self._root is not None and not self._tasks

    async def read(self) -> AsyncGenerator[Event]:
        """Yield the events as they come until the log has ended. Reading again continues after the last one."""
        patience, connection = Patience(self._connection.patience), self._connection
        while True:
            before, problem = self.seen, None
            events = self._attempt(patience)
            try:
                async for event in events:
                    yield event
                if await self._is_over(has_progressed=self.seen > before):
                    return
            except ServerError as exc:
                if exc.code == "not_found":
                    raise UnknownRun(self._run_id) from None
                raise
            except Unavailable as exc:
                problem = exc.problem
            except PROBLEMS as exc:
                problem = connection.unreachable(exc)
            finally:
                await events.aclose()
            await patience.wait(problem or connection.unreachable(ConnectionError("the stream ended")), self._hint)

    async def _attempt(self, patience: Patience) -> AsyncGenerator[Event]:
        """Yield events until the connection ends."""
        self._hint = 0.0
        stream = self._connection.stream(f"runs/{quote(self._run_id, safe='')}/events?after={self.seen}")
        try:
            async for found, self._hint in stream:
                patience.extend()
                for data in found:
                    event = self._decode(data)
                    if not event.seq:  # a notice, which the log does not have
                        yield event
                        continue
                    if event.seq <= self.seen:
                        continue
                    self._check_gap(event.seq)
                    self._note(event)
                    patience.reset()
                    yield event
        finally:
            await stream.aclose()

    def _decode(self, data: bytes) -> Event:
        try:
            return event_from_bytes(data)
        except ValueError as exc:
            self._unreadable += 1
            if self._unreadable < _MOST_UNREADABLE:
                raise ConnectionError("an event is broken") from None
            problem = f"sends an event after number {self.seen} that cannot be read: {exc}"
            raise ServerError(self._connection.url, 200, "unreadable", problem) from None

    def _check_gap(self, seq: int) -> None:
        """Ask again at the first gap. If it is the same, the server has dropped events, as retention does."""
        if seq == self.seen + 1 or self._has_gaps:
            return
        if self._missing_before != seq:
            self._missing_before = seq
            raise ConnectionError(f"event {self.seen + 1} is missing")
        self._has_gaps = True

    def _note(self, event: Event) -> None:
        self.seen, self._unreadable = event.seq, 0
        if isinstance(event, RunStarted) and not event.ns:
            self._root = None
        elif isinstance(event, RunFinished) and not event.ns:
            self._root = event.status
        elif isinstance(event, TaskUpdated):
            change = self._tasks.add if event.status in _OPEN else self._tasks.discard
            change(event.task_id)

    async def _is_over(self, *, has_progressed: bool) -> bool:
        """Return whether a stream that ended in order has given all: a proxy may have ended it, or a closing server."""
        if self._root is None:
            return await self._has_ended(self._run_id)
        return self._root.is_terminal and not (self._tasks and has_progressed)


class RemoteLog:
    """The events of a run on a server, for its handles. It is read while somebody follows, over one connection."""

    def __init__(self, connection: Connection, reader: EventReader, first: int) -> None:
        self._connection, self._reader, self._first = connection, reader, first
        self._events: list[Event] = []
        self._places: list[int] = []
        """The number of each event; a notice has that of the event before it."""
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
            self._reading = self._connection.spawn(self._read())
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers and self._reading is not None:
                self._reading.cancel()
                self._reading = None

    async def _read(self) -> None:
        events = self._reader.read()
        try:
            async for event in events:
                if isinstance(event, RunStarted):
                    self._threads[event.run_id] = event.thread_id
                self._events.append(event)
                self._places.append(event.seq or self._reader.seen)
                if event.seq > self._first and self._reader.rests:
                    break
                self._wake()
        except RetinueError as exc:
            self._problem = exc
        except asyncio.CancelledError:
            if self._reading is asyncio.current_task():
                self._problem = self._connection.closed()
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
