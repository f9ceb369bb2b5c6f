"""The stored events of a log: read by the process that works on it, by others that follow it, and by servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from ..core.engine import QUEUE_UNSERVED
from ..core.errors import ConfigurationError, UnknownRun
from ..core.events import AnyEvent, ErrorRaised, Event, TaskUpdated
from ..core.stores import DurableStore, StoredLog
from ..log.ownership import is_orphan
from ..tasks.task import TaskStatus
from .inbox import decode_start

if TYPE_CHECKING:
    from ..wire.snapshot import SnapshotTree
    from .runs import LocalRuns

LOOK_AGAIN = 5.0
"""Seconds between two reads of a log that another process writes, unless a change is notified."""
BATCH = 1000


async def read_events(
    runs: LocalRuns,
    store: DurableStore,
    log_id: str,
    after: int = 0,
    until: int | None = None,
    past_waits: bool = True,
    *,
    until_result: bool = False,
) -> AsyncGenerator[Event]:
    """Yield the events of a stored log after number `after`, old and new, until it ends or is pruned.

    With `until`, up to that number. Without `past_waits`, also until nobody works on it because its run waits. With
    `until_result`, also until its run has ended or is suspended, whatever its tasks do.

    Between the events come notices, with the number 0, that say why nothing has come for a while.
    """
    if runs.dispatcher is not None:
        await runs.dispatcher.wait_until_begun(log_id)
    known, silence = False, _Silence(runs, store, log_id)
    with store.watch(log_id) as watch:
        while True:
            rests = False
            if until_result or not past_waits:  # before the read, to miss no events
                record = await store.load_run(log_id)
                rests = record is not None and record.result is not None
                rests = rests and (until_result or await store.owner_of(log_id) is None)
            found = await store.read_events(log_id, after, BATCH)
            if found is None:
                if known:
                    return
                raise UnknownRun(log_id)
            known = True
            events, ended = found
            for event in events:
                if until is not None and event.seq > until:
                    return
                after = event.seq
                yield event
            if ended or (until is not None and after >= until) or (rests and not events):
                return
            if events:
                silence.end()
                continue
            if (notice := await silence.explain(after)) is not None:
                yield notice
            await watch.wait(silence.pause)


class _Silence:
    """Explains to one reader why nothing comes: the owner of the log is gone, or no worker can take its run."""

    def __init__(self, runs: LocalRuns, store: DurableStore, log_id: str) -> None:
        self._runs, self._store, self._log_id = runs, store, log_id
        self._now = asyncio.get_running_loop().time
        self._unserved_after = float("inf") if runs.dispatcher is None else runs.dispatcher.unserved_after
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
        now, dispatcher = self._now(), self._runs.dispatcher
        if dispatcher is not None and now >= self._check_workers_at:
            self._check_workers_at = now + self._unserved_after
            if (problem := await dispatcher.unserved(self._log_id)) is not None:
                self._unserved_after = self._check_workers_at = float("inf")
                return await self._notice(QUEUE_UNSERVED, problem)
        if after and now - self._checked > LOOK_AGAIN / 2:
            self._checked = now
            found = await self._store.open_logs(self._log_id)
            if found and is_orphan(found[0]) is not self._is_lost:
                self._is_lost = not self._is_lost
                if self._is_lost:
                    message = "the process that worked on the run is gone: the run waits for another process"
                    return await self._notice("owner_lost", message)
                return await self._notice("owner_found", "another process continues the run")
        return None

    async def _notice(self, code: str, message: str) -> Event:
        record = await self._store.load_run(self._log_id)
        agent = "" if record is None else record.identity.agent
        return ErrorRaised(at=self._runs.clock(), run_id=self._log_id, agent=agent, code=code, message=message)


class StoredEvents:
    """Reads only events that the store has, so a crash cannot change what was read.

    Without a store, the events in memory count as stored.
    """

    def __init__(self, runs: LocalRuns, log_id: str) -> None:
        self._runs, self.log_id = runs, log_id

    def follow(self, after: int = 0) -> AsyncIterator[AnyEvent]:
        """Yield the events after a number, each once it is stored, until the run and every task under it have ended."""
        return cast("AsyncIterator[AnyEvent]", self._runs.events(self.log_id, after, stored=True))

    async def so_far(self) -> list[AnyEvent]:
        """Return the events that are stored now. Deltas are left out where the log is in a database."""
        if self._runs.owner is None:
            run = self._runs.get(self.log_id)
            return [] if run is None else cast("list[AnyEvent]", list(run.log.events))
        stored = await self._runs.owner.store.read_log(self.log_id) or StoredLog()
        return cast("list[AnyEvent]", [row.event for row in stored.rows if row.event is not None])

    async def tree(self) -> SnapshotTree:
        """Return the tree that all stored events describe. From a database it reads the rows, then the deltas that count.

        Both reads stop at one number, so the events after the tree's `seq` continue it, whichever process asks.
        """
        from ..wire.snapshot import SnapshotTree, first_open

        if self._runs.owner is None:
            return SnapshotTree(await self.so_far())
        store = self._runs.owner.store
        stored = await store.read_log(self.log_id) or StoredLog()
        events = [row.event for row in stored.rows if row.event is not None]
        since = first_open(events)
        deltas = () if since is None else await store.read_deltas(self.log_id, since, stored.seq)
        tree = SnapshotTree(merge(events, deltas, key=attrgetter("seq")))
        tree.seq = stored.seq
        return tree

    async def digest(self) -> str | None:
        """Return the digest that the root run was started with; None if it is not kept."""
        if (run := self._runs.get(self.log_id)) is not None and run.request.digest:
            return run.request.digest
        body = None if self._runs.owner is None else await self._runs.owner.store.read_request(self.log_id)
        return None if body is None else decode_start(body).digest or None

    async def task_status(self, task_id: str) -> TaskStatus:
        """Return the status of a background task, as it is stored. Raise ConfigurationError if the log has none."""
        for event in reversed(await self.so_far()):
            if isinstance(event, TaskUpdated) and event.task_id == task_id:
                return TaskStatus(event.status)
        raise ConfigurationError(f"run {self.log_id!r} has no background task {task_id!r}")

    async def has_event(self, seq: int) -> bool:
        """Return whether the log has an event of this number, or a later one."""
        return await self.last() >= seq

    async def last(self) -> int:
        """Return the number of the last event that is stored; 0 if there is none."""
        if self._runs.owner is None:
            run = self._runs.get(self.log_id)
            return 0 if run is None else run.log.tree.seq
        return await self._runs.owner.store.last_event(self.log_id)

    async def has_ended(self) -> bool:
        """Return whether the log is complete: the root run and every background task under it have ended."""
        if self._runs.owner is None:
            run = self._runs.get(self.log_id)
            return run is None or (run.log.closed and not run.log.waits)
        found = await self._runs.owner.store.read_events(self.log_id, await self.last(), 1)
        return found is None or (found[1] and not found[0])

    async def is_open(self) -> bool:
        """Return whether a process works on the log: on its root run, or on tasks under it."""
        if self._runs.owner is not None:
            return await self._runs.owner.store.owner_of(self.log_id) is not None
        run = self._runs.get(self.log_id)
        return run is not None and not run.log.closed

    async def is_orphaned(self) -> bool:
        """Return whether a log that should have an owner has none alive. Its run waits until a process claims it."""
        if self._runs.owner is None:
            return False
        return any(map(is_orphan, await self._runs.owner.store.open_logs(self.log_id)))
