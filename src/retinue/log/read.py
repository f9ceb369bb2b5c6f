"""Reading a log: each event once, in order, wherever the log is.

Invariant: a reader gives the event after `seq` next. It leaves a number out only where the log does not have it. A notice
(an event with the number 0) is no part of a log: a reader has it beside the events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, cast

from msgspec import Struct, field

from ..core.engine import QUEUE_UNSERVED
from ..core.errors import UnknownRun
from ..core.events import ErrorRaised, Event, RunFinished, RunStarted
from ..core.runs import RunResult
from ..core.stores import DurableStore, Watch
from .ownership import is_orphan

LOOK_AGAIN = 5.0
"""Seconds between two reads of a log that another process writes, unless a change is notified."""
MOST = 1000
"""Events that are taken at once."""

Until = Callable[[RunFinished], bool]
"""Returns True for the end of a run after which no event is wanted."""


class Reader(Protocol):
    """A place in a log, and the way to the events after it. A cancelled `take` loses nothing."""

    @property
    def seq(self) -> int:
        """The number up to which events were given."""
        ...

    @property
    def ended(self) -> bool:
        """True if the log has ended and all of it was given."""
        ...

    @property
    def ready(self) -> bool:
        """False if everything that can be given now was given."""
        ...

    async def take(self, most: int = MOST) -> Sequence[Event]:
        """Wait for the next events and return them. The answer is empty once everything was given and something else may
        have changed: `ended`, `rests()` or `notice()`."""
        ...

    async def notice(self) -> Event | None:
        """Return why nothing comes, if that is news."""
        ...

    async def rests(self) -> bool:
        """Return whether nothing works on the log and all of it was given: its run has ended or waits for a human."""
        ...

    async def aclose(self) -> None: ...


class RunLog(Protocol):
    """A log as handles read it."""

    @property
    def log_id(self) -> str:
        """The id of its root run."""
        ...

    results: dict[str, RunResult]
    """The results of runs that are known in full."""

    def read(self, after: int = 0, *, live: bool = False, run_id: str = "") -> Reader:
        """Return a reader of what comes after a number; with `run_id`, only the events of that run.

        With `live` it also gives what is not stored yet. If the log is then lost, another process writes these numbers
        again: the reader says so by a notice and gives them again.
        """
        ...

    def thread_of(self, run_id: str) -> str:
        """Return the thread of a run; empty until its first event."""
        ...


class Queues(Protocol):
    """The queues in which stored runs wait for a worker."""

    unserved_after: float

    async def wait_until_begun(self, run_id: str) -> None: ...

    async def unserved(self, run_id: str) -> str | None: ...


class StoreLog(Struct, eq=False):
    """A log in a store, for processes that do not own it."""

    store: DurableStore
    log_id: str
    clock: Callable[[], float]
    queues: Queues | None = None
    results: dict[str, RunResult] = field(default_factory=dict[str, RunResult])
    threads: dict[str, str] = field(default_factory=dict[str, str])
    """The threads of the runs that were read."""

    def read(self, after: int = 0, *, live: bool = False, run_id: str = "") -> StoreReader:
        return StoreReader(self, after, run_id)

    def thread_of(self, run_id: str) -> str:
        return self.threads.get(run_id, "")

    async def is_settled(self, after: int) -> bool:
        """Return whether the root run has ended or waits, and no event comes after a number."""
        # In this order: what is appended after the result was read is not missed.
        record = await self.store.load_run(self.log_id)
        return record is not None and record.result is not None and await self.store.last_event(self.log_id) <= after

    async def rests(self, after: int) -> bool:
        """Return whether nothing works on the log, and no event comes after a number."""
        is_free = await self.store.owner_of(self.log_id) is None
        return is_free and await self.is_settled(after)


class StoreReader:
    """Reads a stored log page by page, and waits for changes at its end."""

    def __init__(self, log: StoreLog, after: int, run_id: str = "") -> None:
        self._log, self._run_id = log, run_id
        self.seq: int = after
        self.ended = self._is_known = False
        self.ready = True
        self._watching: AbstractContextManager[Watch] | None = None
        self._watch: Watch | None = None
        self._silence: Silence | None = None

    async def take(self, most: int = MOST) -> Sequence[Event]:
        log = self._log
        if self._watch is None or self._silence is None:
            if log.queues is not None:
                await log.queues.wait_until_begun(log.log_id)
            self._watching, self._silence = log.store.watch(log.log_id), Silence(log)
            self._watch = self._watching.__enter__()
        elif not self.ready:
            await self._watch.wait(self._silence.pause)
        found = None if self.ended else await log.store.read_events(log.log_id, self.seq, most)
        if found is None:
            if not self._is_known:
                raise UnknownRun(log.log_id)
            self.ended, self.ready = True, False
            return ()
        events, ended = found
        self._is_known, self.ready, self.ended = True, bool(events) and not ended, ended
        if not events:
            return ()
        self._silence.end()
        self.seq = events[-1].seq
        log.threads.update((event.run_id, event.thread_id) for event in events if isinstance(event, RunStarted))
        return of_run(events, self._run_id)

    async def notice(self) -> Event | None:
        if self.ready or self.ended or self._silence is None:
            return None
        return await self._silence.explain(self.seq)

    async def rests(self) -> bool:
        return await self._log.rests(self.seq)

    async def aclose(self) -> None:
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.__exit__(None, None, None)


class Silence:
    """Explains to one reader why nothing comes: the owner of the log is gone, or no worker can take its run."""

    def __init__(self, log: StoreLog) -> None:
        self._log, self._now = log, asyncio.get_running_loop().time
        self._unserved_after = float("inf") if log.queues is None else log.queues.unserved_after
        """Seconds after which the reader is told, once, that no worker can take the run."""
        self.end()

    def end(self) -> None:
        """Note that an event has come."""
        self._is_lost, self._checked = False, self._now()
        self._check_workers_at = self._checked + self._unserved_after

    @property
    def pause(self) -> float:
        """Seconds after which to read again, if no change is notified."""
        return min(LOOK_AGAIN, max(self._check_workers_at - self._now(), 0.02))

    async def explain(self, after: int) -> Event | None:
        """Return a notice if the owner is gone, if there is an owner again, or if no worker can take the run."""
        now, log = self._now(), self._log
        if log.queues is not None and now >= self._check_workers_at:
            self._check_workers_at = now + self._unserved_after
            if (problem := await log.queues.unserved(log.log_id)) is not None:
                self._unserved_after = self._check_workers_at = float("inf")
                return await self._notice(QUEUE_UNSERVED, problem)
        if after and now - self._checked > LOOK_AGAIN / 2:
            self._checked = now
            found = await log.store.open_logs(log.log_id)
            if found and is_orphan(found[0]) is not self._is_lost:
                self._is_lost = not self._is_lost
                if self._is_lost:
                    message = "the process that worked on the run is gone: the run waits for another process"
                    return await self._notice("owner_lost", message)
                return await self._notice("owner_found", "another process continues the run")
        return None

    async def _notice(self, code: str, message: str) -> Event:
        log = self._log
        record = await log.store.load_run(log.log_id)
        agent = "" if record is None else record.identity.agent
        return ErrorRaised(at=log.clock(), run_id=log.log_id, agent=agent, code=code, message=message)


class Cursor:
    """A place in a log whose events come over a connection that may break, repeat or lose some.

    Invariant: it accepts only the event after the last one. A number is skipped only where the log, asked again, does not
    have it, as after retention; from then on gaps are believed.
    """

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self._missing_before = 0
        self._has_gaps = False

    def accept(self, event: Event) -> bool:
        """Return whether an event is new. Raise ConnectionError if one before it is missing: connect again after `seq`."""
        seq = event.seq
        if seq <= self.seq:
            return False
        if seq > self.seq + 1 and not self._has_gaps:
            if self._missing_before != seq:
                self._missing_before = seq
                raise ConnectionError(f"event {self.seq + 1} is missing")
            self._has_gaps = True
        self.seq = seq
        return True


# --- filters


def of_run(events: Sequence[Event], run_id: str) -> Sequence[Event]:
    """Return the events of one run; all of them without an id."""
    return [event for event in events if event.run_id == run_id] if run_id else events


def leg_of(run_id: str) -> Until:
    """Return a test for the end of the present leg of a run."""
    return lambda event: event.run_id == run_id


def end_of(run_id: str) -> Until:
    """Return a test for the end of a run for good: not while it waits for a human."""
    return lambda event: event.run_id == run_id and not event.status.is_waiting


async def read_until(
    reader: Reader,
    stop: Until | None = None,
    idle: Callable[[], Awaitable[bool]] | None = None,
    *,
    notices: bool = False,
) -> AsyncGenerator[Event]:
    """Yield events up to the `run_finished` at which to stop, up to the end of the log, or until `idle` once all were given.

    With `notices`, also yield why nothing comes.
    """
    try:
        while not reader.ended:
            batch = await reader.take()
            for event in batch:
                yield event
                if event.__class__ is RunFinished and stop is not None and stop(cast("RunFinished", event)):
                    return
            if batch:
                continue
            if notices and (notice := await reader.notice()) is not None:
                yield notice
            # Look once more after the answer: a run may have been answered meanwhile.
            if idle is not None and not reader.ready and await idle() and not reader.ready:
                return
    finally:
        await reader.aclose()
