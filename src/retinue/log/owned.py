"""The live log: it appends and folds rows, and lets any number of followers read the events, each at its own pace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..core.events import DELTAS, Event, RunFinished, RunStarted, Sink, deliver
from ..core.rows import LogRow, Private
from ..core.runs import RunIdentity, RunResult
from .ask import Wanted
from .call_ids import as_local
from .fold import CHANGES, fold_event, fold_private
from .state import EMPTY, RUNNING, LogState, RunState
from .writer import LogWriter

if TYPE_CHECKING:
    from ..loop.execution import Execution

_log = logging.getLogger(__name__)

Earlier = Callable[[int, int | None, bool], AsyncIterator[Event]]
"""Reads stored events after one number, up to another; with None, until the log has ended. With False as the third
argument it also stops when the run waits and no process works on the log."""


Widen = Callable[[Callable[[], "Wanted"]], Awaitable[bool]]
"""Asks for the grant that the function returns; returns whether more was granted."""


LendSlot = Callable[["LiveLog", str, Callable[[], bool]], AbstractAsyncContextManager[None]]
"""Notes, within its block, that the leg of a log waits for a run or call elsewhere, by id. At the end of the block the last
argument tells whether the leg goes on because of that."""


class LiveLog:
    """The log of a root run and of everything under it, while this process owns it.

    `events` holds what this process appended; `earlier` reads what previous owners appended. Followers keep a place in
    the list instead of a queue, so a slow one delays nobody.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        tree: LogState | None = None,
        writer: LogWriter | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tree = LogState() if tree is None else tree
        self.is_resumed = tree is not None
        """True if an earlier process or leg has started the log."""
        self.first = self.tree.seq
        """The number of the last event before `events`."""
        self.events: list[Event] = []
        self.privates: list[LogRow] = []
        """The rows with a private part, where no writer stores them."""
        self.writer, self.clock = writer, clock
        self.earlier: Earlier | None = None
        self.executions: dict[str, Execution] = {}
        """The runs at work here, and ended ones that may still have children."""
        self.dispatching: list[RunState] = []
        """Runs that are starting a child elsewhere, once for each child that is not accepted yet."""
        self.widen: Widen | None = None
        """Of a placed run: asks the owner of the parent's log for a larger grant."""
        self.lend_slot: LendSlot | None = None
        """Of a leg of a worker: lends its slot while it only waits for work elsewhere."""
        self.results: dict[str, RunResult] = {}
        """The results of runs that worked here and ended or wait."""
        self.ended = self.lost = False
        self.is_leaving = False
        """True if nothing may begin here any more: another process continues the log (`leaving.py`)."""
        self.held: dict[tuple[str, str], asyncio.Future[None]] = {}
        """The runs, and calls of runs, that wait for the next owner, by run id and call id."""
        self.holders: dict[str, Callable[[str], Awaitable[object]]] = {}
        """The background tasks at work here, by id, each with the function that cancels it."""
        self.are_tasks_cancelled = False
        """True if the background tasks are to stop, also one that becomes known later."""
        self.on_release: Callable[[], None] | None = None
        """Called when a background task has ended."""
        self.held_threads: dict[str, str | None] = {}
        """The threads that the store holds for children, each with the run that uses it; None if the run has ended."""
        self._sinks = list(sinks)
        self._waiting: list[asyncio.Future[None]] = []
        self._waiting_for_store: list[asyncio.Future[None]] = []
        """Followers that want stored events only: they are not woken when an event is appended."""
        self._run_sinks: dict[str, Sink] = EMPTY
        """Sinks that get the events of one run only."""
        self._feeds: defaultdict[str, Feed] | None = None
        """The events of each run, filled when the first follower of a single run comes."""
        if writer is not None:
            writer.on_stored, writer.tree = self._wake_stored, self.tree
        self.watched = bool(self._sinks) or writer is not None
        """True if the writer, a sink or a follower must get the next event at once."""

    def leave_thread(self, identity: RunIdentity) -> None:
        """Note that a child has ended or did not start: its held thread is released when the leg or the log ends."""
        if self.held_threads.get(identity.thread_id) == identity.run_id:
            self.held_threads[identity.thread_id] = None

    def left_threads(self, *, ended: bool) -> list[str]:
        """Return the held threads that no child needs any more; all of them if the log has `ended`."""
        runs, held = self.tree.runs.values(), self.held_threads
        if ended:
            return [*{run.identity.thread_id for run in runs if run.request.keeps_thread} | held.keys()]
        return [thread_id for thread_id, run_id in held.items() if run_id is None]

    def append(self, run: RunState, event: Event, private: Private | None = None) -> Event | None:
        """Append an event of a run and fold it; return it with its number and time.

        Return None, and append nothing, if the run has ended or another process owns the log.
        """
        kind = event.__class__
        if self.lost or (run.status is not RUNNING and kind is not RunStarted):
            return None
        tree, identity = self.tree, run.identity
        tree.seq = seq = tree.seq + 1
        tree.sub = 0
        tree.last_at = at = self.clock()
        stamped = replace(
            event,
            seq=seq,
            at=at,
            run_id=identity.run_id,
            parent_run_id=identity.parent_run_id,
            agent=identity.agent,
            ns=run.ns,
        )
        if kind in CHANGES:
            CHANGES[kind](tree, run, stamped, private)
        self.events.append(stamped)
        if private is not None or self.watched:
            self._pass_on(stamped, private)
        return stamped

    def append_stamped(self, event: Event, private: Private | None = None) -> None:
        """Append an event that names its run; fill in its number and time."""
        if self.lost:
            return
        tree = self.tree
        tree.seq, tree.sub = tree.seq + 1, 0
        stamped = replace(event, seq=tree.seq, at=self.clock())
        fold_event(tree, tree.runs.get(stamped.run_id), stamped, private)
        self.events.append(stamped)
        if private is not None or self.watched:
            self._pass_on(stamped, private)

    def append_remote(self, run: RunState, event: Event) -> None:
        """Append an event from the log of a run elsewhere, under the namespace that the run has here.

        Deltas get no private part, so they can be packed; the numbers of the other events tell how many deltas there were.
        """
        local, renamed = as_local(self.tree, run, event)
        private = Private(run_id=run.run_id, remote=event.seq, renamed=renamed)
        self.append_stamped(local, None if event.__class__ in DELTAS else private)

    def append_private(self, private: Private) -> None:
        """Append a row without an event and fold it."""
        if self.lost:
            return
        tree = self.tree
        tree.sub += 1
        fold_private(tree, private)
        self._keep(LogRow(tree.seq, tree.sub, None, private))

    def _keep(self, row: LogRow) -> None:
        if self.writer is None:
            self.privates.append(row)
            return
        self.writer.rows.append(row)
        if len(self.writer.rows) == 1:
            self.writer.notify()

    def rows(self) -> list[LogRow]:
        """Return all rows appended here, in order; only for a log without a writer."""
        private = {(row.seq, row.sub): row for row in self.privates}
        rows = [private.pop((event.seq, 0), None) or LogRow(event.seq, 0, event) for event in self.events]
        return sorted([*rows, *private.values()], key=lambda row: (row.seq, row.sub))

    def _pass_on(self, event: Event, private: Private | None) -> None:
        """Give an event to the writer, to sinks and to followers."""
        if private is not None or self.writer is not None:
            self._keep(LogRow(event.seq, 0, event, private))
        if self._sinks:
            deliver(event, self._sinks)
        if self._run_sinks and event.run_id in self._run_sinks:
            self._tell_sink(event)
        if self._feeds is not None:
            self._feeds[event.run_id].add(event)
        if self._waiting:
            self._wake()

    def listen(self, run_id: str, sink: Sink) -> None:
        """Call a sink with the events of one run only."""
        self._run_sinks = {**self._run_sinks, run_id: sink}
        self.watched = True

    def _tell_sink(self, event: Event) -> None:
        try:
            self._run_sinks[event.run_id](event)
        except Exception:
            _log.exception("the sink of run %s failed at event %d and is not called again", event.run_id, event.seq)
            self._run_sinks = {name: sink for name, sink in self._run_sinks.items() if name != event.run_id}

    def waiting_for(self, run_id: str, goes_on: Callable[[], bool] = lambda: True) -> AbstractAsyncContextManager[None]:
        """Note, within the block, that this log waits for a run or call elsewhere, so that it needs no slot of a worker."""
        return nullcontext() if self.lend_slot is None else self.lend_slot(self, run_id, goes_on)

    @property
    def closed(self) -> bool:
        """True if no more events will come: followers end after the last one."""
        return self.ended and not self.holders

    @property
    def waits(self) -> bool:
        """True if the root run waits for a human."""
        root = next(iter(self.tree.runs.values()), None)
        return root is not None and root.waits

    def close(self) -> None:
        """End or pause the log: the root run has ended or waits. Background tasks continue."""
        self.ended = True
        self._wake_followers()

    async def hold(self, run_id: str, call_id: str = "") -> None:
        """Let a run, or one call of it, wait for the next owner of the log. It ends only by a cancel."""
        place = run_id, call_id
        waiting = self.held[place] = asyncio.get_running_loop().create_future()
        self._wake()
        try:
            await waiting
        finally:
            del self.held[place]

    def drop(self) -> None:
        """Stop appending: another process owns the log now."""
        self.lost = True
        for waiting in self.held.values():
            waiting.cancel()
        self.close()

    def release(self, task_id: str) -> None:
        """Note that a background task has ended, and wake the followers."""
        self.holders.pop(task_id, None)
        self._wake_followers()
        if self.on_release is not None:
            self.on_release()

    def _wake_followers(self) -> None:
        self._wake()
        self._wake_stored()
        if self.closed and self._feeds is not None:
            for feed in self._feeds.values():
                _wake_all(feed.waiting)

    def _ready(self, stored: bool) -> int:
        """Return how many of `events` a follower may read."""
        if not stored or self.writer is None:
            return len(self.events)
        return min(max(self.writer.stored_seq - self.first, 0), len(self.events))

    async def follow(
        self, after: int = 0, until_end_of: str | None = None, *, past_waits: bool = False, stored: bool = False
    ) -> AsyncIterator[Event]:
        """Yield every event after number `after` as it comes, until the log closes or that run ends its leg.

        With `past_waits` it also waits while the root run waits for a human. With `stored` it yields an event only
        once it is stored.
        """
        if after < self.first and self.earlier is not None:
            async for event in self.earlier(after, self.first, True):
                yield event
        place, events = max(after - self.first, 0), self.events
        while True:
            # More may come while these are read.
            while place < (ready := self._ready(stored)):
                for event in events[place:ready]:
                    yield event
                    if event.__class__ is RunFinished and event.run_id == until_end_of:
                        return
                place = ready
            waits = past_waits and self.waits
            if self.earlier is not None and (self.lost or (self.closed and waits)):  # any process may continue it
                async for event in self.earlier(self.first + place, None, past_waits or until_end_of is not None):
                    yield event
                    if event.__class__ is RunFinished and event.run_id == until_end_of:
                        return
                return
            is_due = stored and self.writer is not None and self.writer.problem is None and place < len(events)
            if self.closed and not waits and not is_due:
                return
            if stored and self.writer is not None:
                await _wait_in(self._waiting_for_store)
            else:
                await self.changed()

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done when something is appended, or the log is closed."""
        self.watched = True
        return _wait_in(self._waiting)

    def feed(self, run_id: str) -> Feed:
        """Return the events of one run. The first call sorts the events of all runs, once."""
        self.watched = True
        if self._feeds is None:
            self._feeds = defaultdict(partial(Feed, self))
            for event in self.events:
                self._feeds[event.run_id].add(event)
        return self._feeds[run_id]

    def follow_run(self, run_id: str) -> AsyncIterator[Event]:
        """Yield the events of one run until it ends for good or the log closes."""
        if self.earlier is not None and (self.first or self.lost):  # some of them are only in the store
            return self._follow_stored(run_id)
        return self.feed(run_id).follow()

    async def _follow_stored(self, run_id: str) -> AsyncIterator[Event]:
        async for event in self.follow():
            if event.run_id == run_id:
                yield event
                if isinstance(event, RunFinished) and not event.status.is_waiting:
                    return

    def thread_of(self, run_id: str) -> str:
        """Return the thread of a run; empty until its first event."""
        state = self.tree.runs.get(run_id)
        return "" if state is None else state.identity.thread_id

    def _wake_stored(self) -> None:
        _wake_all(self._waiting_for_store)

    def _wake(self) -> None:
        self.watched = bool(self.writer or self._sinks or self._run_sinks or self._feeds is not None)
        _wake_all(self._waiting)


class Feed:
    """The events of one run, for followers of that run only."""

    __slots__ = ("_events", "_log", "waiting")

    def __init__(self, log: LiveLog) -> None:
        self._log = log
        self._events: list[Event] = []
        self.waiting: list[asyncio.Future[None]] = []

    def add(self, event: Event) -> None:
        self._events.append(event)
        _wake_all(self.waiting)

    async def follow(self) -> AsyncIterator[Event]:
        """Yield the run's events until it ends for good or the log closes."""
        place = 0
        while True:
            while place < len(self._events):
                event = self._events[place]
                place += 1
                yield event
                if isinstance(event, RunFinished) and not event.status.is_waiting:
                    return
            if self._log.closed:
                return
            await _wait_in(self.waiting)


def _wait_in(waiting: list[asyncio.Future[None]]) -> asyncio.Future[None]:
    future = asyncio.get_running_loop().create_future()
    waiting.append(future)
    return future


def _wake_all(waiting: list[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()
