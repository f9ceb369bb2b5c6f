"""The stored events of a log, and what the store knows of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from ..core.errors import ConfigurationError
from ..core.events import AnyEvent, Event, InferenceFinished, StateDelta, StateSnapshot, TaskUpdated
from ..core.messages import Message
from ..core.runs import Usage
from ..core.state import PersistedState
from ..core.stores import StoredLog
from ..log.ownership import is_orphan
from ..log.read import Reader
from ..log.state import with_ids
from ..tasks.task import TaskStatus
from .stored_start import decode_start

if TYPE_CHECKING:
    from ..wire.snapshot import SnapshotTree
    from .runs import LocalRuns


class StoredEvents:
    """Reads only events that the store has, so a crash cannot change what was read.

    Without a store, the events in memory count as stored.
    """

    def __init__(self, runs: LocalRuns, log_id: str) -> None:
        self._runs, self.log_id = runs, log_id

    def follow(self, after: int = 0) -> AsyncIterator[AnyEvent]:
        """Yield the events after a number, each once it is stored, until the run and every task under it have ended."""
        return cast("AsyncIterator[AnyEvent]", self._runs.events(self.log_id, after))

    def read(self, after: int = 0) -> Reader:
        """Return a reader of the events after a number, each once it is stored."""
        return self._runs.log(self.log_id).read(after)

    async def so_far(self) -> list[AnyEvent]:
        """Return the events that are stored now. Deltas are left out where the log is in a database."""
        if self._runs.owner is None:
            run = self._runs.get(self.log_id)
            return [] if run is None else cast("list[AnyEvent]", list(run.log.events))
        stored = await self._runs.owner.store.read_log(self.log_id) or StoredLog()
        return cast("list[AnyEvent]", [row.event for row in stored.rows if row.event is not None])

    async def page(self, after: int, limit: int) -> list[AnyEvent]:
        """Return up to so many of the stored events after a number, deltas too; none if there is no such log."""
        if self._runs.owner is None:
            run = self._runs.get(self.log_id)
            start = 0 if run is None else max(after - run.log.first, 0)
            return [] if run is None else cast("list[AnyEvent]", run.log.events[start : start + limit])
        found = await self._runs.owner.store.read_events(self.log_id, after, limit)
        return [] if found is None else cast("list[AnyEvent]", list(found[0]))

    async def tree(self) -> SnapshotTree:
        """Return the tree that all stored events describe."""
        from ..wire.snapshot import SnapshotTree

        tree = SnapshotTree()
        tree.seq = await self.fold(tree)
        return tree

    async def usage(self, run_id: str, also: Callable[[Event], object]) -> tuple[Usage, bool]:
        """Return what a run and the runs below it have used so far, and whether the price of all of it is known. `also` gets
        the same events."""
        total, is_known, family = Usage(), True, {run_id}
        for event in await self.so_far():
            also(event)
            if event.parent_run_id in family:
                family.add(event.run_id)
            if isinstance(event, InferenceFinished) and event.run_id in family:
                total += event.usage
                has_tokens = event.usage.input_tokens or event.usage.output_tokens
                if has_tokens and not event.usage.cost and is_known:
                    is_known = self._runs.registry.price(event.model, event.usage) is not None
        return total, is_known

    async def state_after(self, run_id: str, seq: int | None) -> PersistedState:
        """Return the persistent state of a run after an event, or now. Values that never leave the run are not in it."""
        if seq is not None and not await self.has_event(seq):
            raise ConfigurationError(f"the log of run {self.log_id!r} has no event {seq}")
        state = PersistedState()
        for event in await self.so_far():
            if event.run_id == run_id and (seq is None or event.seq <= seq):
                if isinstance(event, StateSnapshot):
                    state = PersistedState(event.revision, dict(event.state))
                elif isinstance(event, StateDelta):
                    state = PersistedState(event.revision, {**state.extensions, **event.delta})
        return state

    async def input(self) -> tuple[Message, ...]:
        """Return the input that the root run was started with; empty if it is not kept."""
        if (run := self._runs.get(self.log_id)) is not None:
            return with_ids(run.request.messages, self.log_id)
        body = None if self._runs.owner is None else await self._runs.owner.store.read_request(self.log_id)
        return () if body is None else with_ids(decode_start(body).messages, self.log_id)

    async def fold(self, read: Callable[[Event], object]) -> int:
        """Give a reader all stored events, without deltas that no longer count, and return the number of the last one.

        From a database this reads the rows, then the deltas that count. Both reads stop at one number, so the events after
        it continue what was read, whichever process asks.
        """
        from ..wire.snapshot import first_open

        if self._runs.owner is None:
            found: Sequence[Event] = await self.so_far()
            last = found[-1].seq if found else 0
        else:
            store = self._runs.owner.store
            stored = await store.read_log(self.log_id) or StoredLog()
            rows, last = [row.event for row in stored.rows if row.event is not None], stored.seq
            since = first_open(rows)
            deltas = () if since is None else await store.read_deltas(self.log_id, since, last)
            found = list(merge(rows, deltas, key=attrgetter("seq")))
        for event in found:
            read(event)
        return last

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

    async def is_settled(self, after: int) -> bool:
        """Return whether the root run has ended or waits, and no event comes after a number."""
        # In this order: what is appended after the result was read is not missed.
        record = await self._runs.store.load_run(self.log_id)
        return record is not None and record.result is not None and not await self.has_event(after + 1)

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
