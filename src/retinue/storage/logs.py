"""Logs in a store: written while runs go on, and read by whoever comes later or from another process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

from ..core.errors import OwnershipLost, RetinueError, StoreError, UnknownRun
from ..core.events import Event
from ..core.stores import DurableStore, EventStore, JournalEntry, LogBatch, RunRecord, ThreadRecord

_log = logging.getLogger(__name__)

LOOK_AGAIN = 5.0
"""Seconds after which a log that another process writes is looked at, if nobody tells of a change before."""
GATHER = 0.02
"""Seconds for which events are gathered where nobody waits for them to be written."""
BATCH = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_LAST_WORDS = 2.0
"""Seconds in which the last of a log that is left to others should be written."""


class GrowingLog(Protocol):
    """A log that events are added to."""

    events: list[Event]

    @property
    def closed(self) -> bool: ...

    def changed(self) -> asyncio.Future[None]:
        """Done when something is added, or it is closed."""
        ...


class LogWriter:
    """Writes a log and its journal as they grow, in one order, as the owner of that log.

    Whoever adds events waits for nothing; whoever records an entry waits until it is there, with every event before.
    Trouble that may pass is waited out.
    """

    def __init__(
        self, log_id: str, log: GrowingLog, store: DurableStore, epoch: int = 1, *, written: int = 0, entries: int = 1
    ) -> None:
        self.log_id, self._log, self._store, self.epoch = log_id, log, store, epoch
        self._written, self._recorded = written, entries
        self._entries: list[JournalEntry] = []
        self._last: LogBatch | None = None
        """What is to be written of the run itself, with the next batch."""
        self._waiting: list[asyncio.Future[None]] = []
        self._sleeping: asyncio.Future[None] | None = None
        self._job: asyncio.Task[None] | None = None
        self._problem: Exception | None = None
        self._letting_go = self._released = False
        self.done = self.is_cut = False
        """Whether the run has ended for good; whether it is left to others."""

    def start(self) -> None:
        """Begin, or go on with a log that was closed and has been opened again."""
        if self._job is None or self._job.done():
            self._job = asyncio.create_task(self._write(), name=f"log-{self.log_id}")

    @property
    def problem(self) -> Exception | None:
        """Why nothing more can be written, where that is so."""
        return self._problem

    def add(self, entry: JournalEntry) -> None:
        """Record an entry with whatever is written next."""
        self._entries.append(entry)

    async def record(self, entry: JournalEntry) -> None:
        """Record an entry, and return when it is there."""
        self._entries.append(entry)
        await self.flush()

    async def settle(self, run: RunRecord, thread: ThreadRecord | None, thread_from: int) -> None:
        """Write everything that is there, with how the run stands and, where given, its thread."""
        self.done = run.result is not None and run.result.status.is_terminal
        self._last = LogBatch(log_id=self.log_id, epoch=self.epoch, run=run, thread=thread, thread_from=thread_from)
        await self.flush()

    async def save_thread(self, record: ThreadRecord) -> None:
        """Store the thread of a run in this log, as its owner."""
        await self._put(LogBatch(log_id=self.log_id, epoch=self.epoch, thread=record))

    async def finish(self) -> None:
        """Return when the log has been closed and everything is written."""
        if self._job is not None and not self.is_cut:
            await asyncio.shield(self._job)

    async def has_let_go(self) -> bool:
        """Whether the log may be another's by now; waits where that is just being written."""
        if self._letting_go and self._job is not None:
            await asyncio.shield(self._job)
        return self._released

    def own_again(self, epoch: int) -> None:
        """Go on as the owner of that epoch."""
        self.epoch, self._released = epoch, False
        self.start()

    async def cut(self) -> None:
        """Write what is there, and nothing more: somebody else goes on with it."""
        if self._released:
            return
        with suppress(RetinueError, TimeoutError):
            await asyncio.wait_for(self.flush(), _LAST_WORDS)
        self.is_cut, self._problem = True, OwnershipLost(self._store.place, self.log_id)
        if self._job is not None:
            self._job.cancel()
        _fail(self._waiting, self._problem)

    async def give_back(self) -> None:
        """Let go of a log that is not written to."""
        await self._put(LogBatch(log_id=self.log_id, epoch=self.epoch, ended=True, released=True))

    async def flush(self) -> None:
        """Return when everything is written that is there."""
        if self._problem is not None:
            raise self._problem
        self.start()
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(done)
        if self._sleeping is not None and not self._sleeping.done():
            self._sleeping.set_result(None)
        await done

    async def _write(self) -> None:
        log = self._log
        try:
            while True:
                await self._until_needed()
                if self._waiting or self._written < len(log.events):
                    await self._write_once()
                elif log.closed:
                    await self._let_go()
                    if not self._waiting:
                        return
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            self._problem = exc
            _log.error("the events of run %s can no longer be stored: %s", self.log_id, exc)
            _fail(self._waiting, exc)

    async def _let_go(self) -> None:
        self._letting_go = True
        end = LogBatch(log_id=self.log_id, epoch=self.epoch, ended=True, released=True, done=self.done)
        end.first_entry = self._recorded
        await self._put(end)
        self._letting_go, self._released = False, True

    async def _until_needed(self) -> None:
        """Sleep until there is something to write; where nobody waits for it, until some has gathered."""
        log = self._log
        if not self._waiting and not log.closed and self._written == len(log.events):
            self._sleeping = log.changed()
            await self._sleeping
        if not self._waiting and not log.closed:
            loop = asyncio.get_running_loop()
            self._sleeping = loop.create_future()
            timer = loop.call_later(GATHER, _wake, self._sleeping)
            await self._sleeping
            timer.cancel()

    async def _write_once(self) -> None:
        waiting, self._waiting = self._waiting, []
        entries, self._entries = self._entries, []
        last, self._last = self._last, None
        batch = last or LogBatch(log_id=self.log_id, epoch=self.epoch)
        batch.events = self._log.events[self._written :]
        batch.entries, batch.first_entry = entries, self._recorded
        try:
            await self._put(batch)
        except BaseException as exc:
            closed = self._problem or StoreError(self._store.place, "it was closed")
            _fail(waiting, exc if isinstance(exc, Exception) else closed)
            raise
        self._written += len(batch.events)
        self._recorded += len(entries)
        for done in waiting:
            _wake(done)

    async def _put(self, batch: LogBatch) -> None:
        """Write a batch, again and again where that fails for a reason that may pass."""
        pause, told = _FIRST_PAUSE, False
        while True:
            try:
                await self._store.write(batch)
            except StoreError as exc:
                if not exc.passes:
                    raise
                if not told:
                    _log.error("run %s waits for its store: %s", self.log_id, exc)
                    told = True
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
                continue
            if told:
                _log.warning("run %s goes on: its store can be written again", self.log_id)
            return


def _wake(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(waiting: list[asyncio.Future[None]], exc: Exception) -> None:
    for done in waiting:
        if not done.done():
            done.set_exception(exc)
            done.exception()  # whoever waited may have gone
    waiting.clear()


async def stored_events(store: EventStore, log_id: str, after: int = 0) -> AsyncIterator[Event]:
    """A stored log after event number `after`: what is there, then what comes, until it has ended."""
    known = False
    with store.watch(log_id) as watch:
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
            if not events:
                await watch.wait(LOOK_AGAIN)
