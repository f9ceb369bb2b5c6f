"""The event log: one ordered list of events, read by as many followers as like, each at its own pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Protocol

from msgspec.structs import replace

from ..core.events import Event, Namespace, RunFinished, Sink
from ..core.runs import RunResult
from ..core.sinks import deliver
from ..core.stores import ThreadRecord


class ThreadWriter(Protocol):
    """Stores threads for the owner of a log."""

    async def save_thread(self, record: ThreadRecord) -> None: ...


class EventLog:
    """The events of a root run and of everything under it.

    Followers keep a place in the list instead of a queue, so a slow one costs nobody anything.
    """

    __slots__ = ("_sinks", "_waiting", "ended", "events", "held", "holders", "results", "told", "watched", "writer")

    def __init__(self, sinks: Iterable[Sink] = (), events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)
        self.told: Any = None
        """What was told by a process that has ended, where this one goes on; see `recovery.Told`."""
        self.writer: ThreadWriter | None = None
        """Who may store what comes of the runs in it; without one, everybody."""
        self.results: dict[str, RunResult] = {}
        """How the runs in this log ended, or where they wait."""
        self.ended = False
        self.holders: dict[str, Callable[[str], Awaitable[object]]] = {}
        """The background tasks that still write to it, by their ids: how each is cancelled."""
        self.held: set[Namespace] = set()
        """Where their children are."""
        self._sinks = list(sinks)
        self._waiting: list[asyncio.Future[None]] = []
        self.watched = bool(self._sinks)
        """Whether somebody wants to know of the next event at once."""

    def tell(self, event: Event) -> None:
        """Let sinks and waiting followers know of an event that was added."""
        if self._sinks:
            deliver(event, self._sinks)
        if self._waiting:
            self._wake()

    @property
    def closed(self) -> bool:
        """Whether nothing more will come: followers end after the last event."""
        return self.ended and not self.holders

    def close(self) -> None:
        """The root run has ended; what runs in the background goes on."""
        self.ended = True
        self._wake()

    def release(self, task_id: str) -> None:
        """A background task has ended."""
        self.holders.pop(task_id, None)
        self._wake()

    def append(self, event: Event) -> None:
        """Add an event that is stamped but for its number and time."""
        stamped = replace(event, seq=len(self.events) + 1, at=time.time())
        self.events.append(stamped)
        self.tell(stamped)

    def reopen(self) -> None:
        """More will come after all."""
        self.ended = False

    async def follow(self, after: int = 0, until_end_of: str | None = None) -> AsyncIterator[Event]:
        """Every event after number `after`, as it comes, until the log closes or that run ends."""
        place, events = after, self.events
        while True:
            # The iterator of a list goes on with what is added while it is held; it ends where the list ends.
            unread: Any = iter(events)
            unread.__setstate__(place)
            for event in unread:
                yield event
                if event.__class__ is RunFinished and event.run_id == until_end_of:
                    return
            place = max(place, len(events))
            if self.closed:
                return
            await self.changed()

    def changed(self) -> asyncio.Future[None]:
        """Done when something is added, or the log is closed."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self.watched = True
        return waiting

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        self.watched = bool(self._sinks)
        for future in waiting:
            if not future.done():
                future.set_result(None)
