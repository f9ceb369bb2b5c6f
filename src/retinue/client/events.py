"""The events of a run on a server: read in order, across broken connections, for as many readers as there are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from urllib.parse import quote

from ..core.concurrency import Backoff
from ..core.errors import ServerError, UnknownRun
from ..core.events import Event, event_from_bytes
from ..runtime.followed import Progress
from .connection import PROBLEMS, Connection, Unavailable

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
        self.progress = Progress()

    async def read(self) -> AsyncGenerator[Event]:
        """Yield the events as they come until the log has ended. Reading again continues after the last one."""
        backoff, connection = Backoff(patience=self._connection.patience), self._connection
        while True:
            before, problem = self.seen, None
            events = self._attempt(backoff)
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
            await backoff.wait(problem or connection.unreachable(ConnectionError("the stream ended")), self._hint)

    async def _attempt(self, backoff: Backoff) -> AsyncGenerator[Event]:
        """Yield events until the connection ends."""
        self._hint = 0.0
        stream = self._connection.stream(f"runs/{quote(self._run_id, safe='')}/events?after={self.seen}")
        try:
            async for found, self._hint in stream:
                backoff.extend()
                for data in found:
                    event = self._decode(data)
                    if not event.seq:  # a notice, which the log does not have
                        yield event
                        continue
                    if event.seq <= self.seen:
                        continue
                    self._check_gap(event.seq)
                    self._note(event)
                    backoff.reset()
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
        self.progress.note(event)

    async def _is_over(self, *, has_progressed: bool) -> bool:
        """Return whether a stream that ended in order has given all: a proxy may have ended it, or a closing server."""
        status = self.progress.status
        if status is None:
            return await self._has_ended(self._run_id)
        return status.is_terminal and not (self.progress.tasks and has_progressed)
