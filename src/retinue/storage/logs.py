"""Logs in a store: written while runs go on, and read by whoever comes later or from another process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from ..core.errors import UnknownRun
from ..core.events import Event
from ..core.stores import EventStore

_log = logging.getLogger(__name__)

LOOK_EVERY = 0.1
"""Seconds between two looks at a log that another process writes."""
BATCH = 1000


class GrowingLog(Protocol):
    """A log that events are added to."""

    events: list[Event]

    @property
    def closed(self) -> bool: ...

    def changed(self) -> asyncio.Future[None]:
        """Done when something is added, or it is closed."""
        ...


class LogWriter:
    """Writes a log as it grows. Whoever adds events waits for nothing; what came during a write is written next."""

    def __init__(self, log_id: str, log: GrowingLog, store: EventStore) -> None:
        self._log_id, self._log, self._store = log_id, log, store
        self._written = 0
        self._flushing: list[tuple[int, asyncio.Future[None]]] = []
        self._job: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, or go on with a log that was closed and has been opened again."""
        if self._job is None or self._job.done():
            self._job = asyncio.create_task(self._write(), name=f"log-{self._log_id}")

    async def flush(self) -> None:
        """Return when everything that is there has been written, or cannot be."""
        if self._written < len(self._log.events) and self._job is not None and not self._job.done():
            done = asyncio.get_running_loop().create_future()
            self._flushing.append((len(self._log.events), done))
            await done

    async def finish(self) -> None:
        """Return when the log has been closed and everything is written."""
        if self._job is not None:
            await asyncio.shield(self._job)

    async def _write(self) -> None:
        log = self._log
        try:
            while True:
                while self._written < len(log.events):
                    batch = log.events[self._written : self._written + BATCH]
                    await self._store.append_events(self._log_id, batch)
                    self._written += len(batch)
                    self._tell(self._written)
                if log.closed:
                    break
                await log.changed()
            await self._store.append_events(self._log_id, (), ended=True)
        except Exception:
            _log.exception("the events of log %s can no longer be stored", self._log_id)
        finally:
            self._tell(len(log.events))

    def _tell(self, written: int) -> None:
        waiting, self._flushing = self._flushing, []
        for place, done in waiting:
            if place > written:
                self._flushing.append((place, done))
            elif not done.done():
                done.set_result(None)


async def stored_events(store: EventStore, log_id: str, after: int = 0) -> AsyncIterator[Event]:
    """A stored log after event number `after`: what is there, then what comes, until it has ended."""
    known = False
    while True:
        found = await store.read_events(log_id, after, BATCH)
        if found is None and not known:
            raise UnknownRun(log_id)
        events, ended = found or ((), False)
        known = True
        for event in events:
            after = event.seq
            yield event
        if ended:
            return
        if len(events) < BATCH:
            await asyncio.sleep(LOOK_EVERY)
