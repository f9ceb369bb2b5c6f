"""The log of a run on a server: read in order, across broken connections, and once for all handles of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from urllib.parse import quote

from ..core.concurrency import Backoff
from ..core.errors import ServerError, UnknownRun
from ..core.events import Event, RunFinished, RunStarted, TaskUpdated, event_from_bytes
from ..core.runs import RunResult, RunStatus
from ..log.fanout import Budget, Fanout, Follower
from ..log.read import MOST, Cursor, of_run
from .connection import PROBLEMS, Connection, Received, Unavailable

_MOST_UNREADABLE = 5
_OPEN_TASK = ("PENDING", "RUNNING")


class _Progress:
    """The status of a log's root run, from the events read so far."""

    def __init__(self) -> None:
        self.seq = 0
        self.status: RunStatus | None = None
        """The status with which the root run ended its last leg; None while it works, or if that is unknown."""
        self.tasks: set[str] = set()
        """The background tasks at work."""

    @property
    def rests(self) -> bool:
        """True if the root run has ended or waits, and no background task works."""
        return self.status is not None and not self.tasks

    def note(self, event: Event) -> None:
        if event.seq <= self.seq:
            return
        self.seq = event.seq
        if isinstance(event, RunStarted) and not event.ns:
            self.status = None
        elif isinstance(event, RunFinished) and not event.ns:
            self.status = event.status
        elif isinstance(event, TaskUpdated):
            change = self.tasks.add if event.status in _OPEN_TASK else self.tasks.discard
            change(event.task_id)


class HttpLog:
    """The log of a run on a server. Each reader has a connection of its own; handles share one through `RemoteLog`."""

    def __init__(self, connection: Connection, run_id: str, has_ended: Callable[[str], Awaitable[bool]]) -> None:
        self.connection, self.run_id, self.has_ended = connection, run_id, has_ended
        self.progress = _Progress()
        self.threads: dict[str, str] = {}

    def read(self, after: int = 0) -> HttpReader:
        return HttpReader(self, after)

    def note(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.threads[event.run_id] = event.thread_id
        self.progress.note(event)


class HttpReader:
    """Reads the events after a number, and connects again where the connection breaks. A cancelled `take` loses nothing."""

    def __init__(self, log: HttpLog, after: int) -> None:
        self._log, self._cursor, self.seq = log, Cursor(after), after
        self.ended = False
        self._found: list[Event] = []
        """Events that were received and not given."""
        self._news: Event | None = None
        self._stream: AsyncGenerator[Received] | None = None
        self._first = after
        """The place at which the connection began."""
        self._has_caught_up = False
        self._unreadable, self._hint = 0, 0.0
        self._backoff = Backoff(patience=log.connection.patience)

    @property
    def ready(self) -> bool:
        return not self.ended and (bool(self._found) or not self._has_caught_up)

    async def take(self, most: int = MOST) -> Sequence[Event]:
        while not self._found and not self.ended:
            had_caught_up = self._has_caught_up
            await self._receive()
            if self._news is not None or (self._has_caught_up and not had_caught_up):
                break
        events, self._found = self._found[:most], self._found[most:]
        for event in events:
            self._log.note(event)
        if events:
            self.seq = events[-1].seq
        return events

    async def _receive(self) -> None:
        """Wait until something comes, the log has ended, or the next attempt may begin. Raise what cannot be repaired."""
        connection, problem = self._log.connection, None
        try:
            self._stream = self._stream or self._open()
            self._note(await anext(self._stream))
        except StopAsyncIteration:
            await self._close()
            if await self._is_over():
                self.ended = True
                return
            problem = connection.unreachable(ConnectionError("the stream ended"))
        except ServerError as exc:
            await self._close()
            if exc.code == "not_found":
                raise UnknownRun(self._log.run_id) from None
            raise
        except Unavailable as exc:
            problem = exc.problem
        except PROBLEMS as exc:
            problem = connection.unreachable(exc)
        except asyncio.CancelledError:
            self._stream = None  # the cancel has closed it
            if not connection.is_closed:
                raise
            raise connection.closed() from None
        if problem is not None:
            await self._close()
            await self._backoff.wait(problem, self._hint)

    def _open(self) -> AsyncGenerator[Received]:
        self._hint, self._first, self._has_caught_up = 0.0, self._cursor.seq, False
        path = f"runs/{quote(self._log.run_id, safe='')}/events?after={self._cursor.seq}"
        return self._log.connection.stream(path)

    def _note(self, received: Received) -> None:
        self._hint = received.pause
        self._backoff.extend()
        for data in received.data:
            event = self._decode(data)
            if not event.seq:  # a notice, which the log does not have
                self._news = event
            elif self._cursor.accept(event):
                self._found.append(event)
                self._news, self._unreadable = None, 0
                self._backoff.reset()
        self._has_caught_up |= received.is_caught_up

    def _decode(self, data: bytes) -> Event:
        try:
            return event_from_bytes(data)
        except ValueError as exc:
            self._unreadable += 1
            if self._unreadable < _MOST_UNREADABLE:
                raise ConnectionError("an event is broken") from None
            problem = f"sends an event after number {self._cursor.seq} that cannot be read: {exc}"
            raise ServerError(self._log.connection.url, 200, "unreadable", problem) from None

    async def _is_over(self) -> bool:
        """Return whether a stream that ended in order has given all: a proxy may have ended it, or a closing server."""
        for event in self._found:
            self._log.note(event)
        progress = self._log.progress
        if progress.seq > self._cursor.seq:  # another reader is ahead
            return False
        if progress.status is None:
            return await self._log.has_ended(self._log.run_id)
        return progress.status.is_terminal and not (progress.tasks and self._cursor.seq > self._first)

    async def notice(self) -> Event | None:
        found, self._news = self._news, None
        return found

    async def rests(self) -> bool:
        return not self.ready and self._log.progress.rests

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()

    async def aclose(self) -> None:
        await self._close()


class RemoteLog:
    """The log of a run on a server, for its handles: one connection reads it while at least one of them is read."""

    def __init__(self, log: HttpLog, first: int, budget: Budget) -> None:
        """`first`: the last event before the leg that the handle shows. What ran before counts too, such as tasks."""
        self.log_id, self._log, self.first = log.run_id, log, first
        self.results: dict[str, RunResult] = {}
        self.fanout = Fanout(log, 0, budget, log.connection.spawn)

    def read(self, after: int = 0, *, live: bool = False, run_id: str = "") -> RemoteReader:
        return RemoteReader(self, after, run_id)

    def thread_of(self, run_id: str) -> str:
        return self._log.threads.get(run_id, "")


class RemoteReader:
    """A place in the log of a run on a server. It follows from its first `take` on."""

    def __init__(self, log: RemoteLog, after: int, run_id: str) -> None:
        self._log, self._after, self._run_id = log, after, run_id
        self._follower: Follower | None = None

    @property
    def seq(self) -> int:
        return self._after if self._follower is None else self._follower.seq

    @property
    def ready(self) -> bool:
        return self._follower is None or self._follower.ready

    @property
    def ended(self) -> bool:
        return self._follower is not None and self._follower.ended

    async def take(self, most: int = MOST) -> Sequence[Event]:
        self._follower = self._follower or self._log.fanout.attach(self._after)
        return of_run(await self._follower.take(most), self._run_id)

    async def notice(self) -> Event | None:
        return None if self._follower is None else await self._follower.notice()

    async def rests(self) -> bool:
        return self._follower is not None and self.seq > self._log.first and await self._follower.rests()

    async def aclose(self) -> None:
        if self._follower is not None:
            await self._follower.aclose()
