"""The log in the process that owns it: it appends and folds rows, and lets any number of readers follow, each at its own pace."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from ..core.concurrency import Backoff
from ..core.errors import OwnershipLost, RetinueError, StoreError
from ..core.events import (
    DELTAS,
    ErrorRaised,
    Event,
    MessagesSnapshot,
    RunFinished,
    RunStarted,
    Sink,
    TaskUpdated,
    ToolCallFinished,
    ToolCallResumed,
    deliver,
)
from ..core.processes import boot_seconds
from ..core.rows import LogRow, Private
from ..core.runs import RunIdentity, RunResult
from ..core.stores import DurableStore, LogBatch, Losses, Reply, RunRecord, SummaryUpdate, ThreadUpdate
from .ask import Wanted
from .call_ids import as_local
from .fold import CHANGES, fold_event, fold_private
from .read import MOST, StoreLog, StoreReader, of_run
from .state import EMPTY, RUNNING, LogState, RunState

if TYPE_CHECKING:
    from ..loop.execution import Execution

_log = logging.getLogger(__name__)
_SEQ = attrgetter("seq")

GATHER, GATHER_FOR_EACH, LONGEST_GATHER = 0.02, 0.0005, 0.1
"""Seconds for which rows are gathered if no barrier waits for them: at least, for each log that gathers, and at
most. Many logs are thus written in fewer, larger transactions."""
CHANGING: frozenset[type[Event]] = frozenset({RunStarted, RunFinished, ToolCallFinished, ToolCallResumed, TaskUpdated})
"""The events that can change how a log stands, but for its usage."""
MOST_TOGETHER = 500
"""Logs that are written in one turn of the event loop."""

Widen = Callable[[Callable[[], "Wanted"]], Awaitable[bool]]
"""Asks for the grant that the function returns; returns whether more was granted."""


class LendSlot(Protocol):
    """Notes, within its block, that the leg of a log waits for a run or call elsewhere, by id, or a run of it at the gate of
    a provider. At the end of the block `goes_on` tells whether the leg goes on because of that."""

    def __call__(
        self, log: LiveLog, run_id: str, goes_on: Callable[[], bool], *, at_gate: bool = False
    ) -> AbstractAsyncContextManager[None]: ...


class LiveLog:
    """The log of a root run and of everything under it, while this process owns it.

    `events` holds what this process appended; `store` has what previous owners appended. A reader keeps a place in the
    list instead of a queue, so a slow one delays nobody.
    """

    def __init__(
        self,
        sinks: Iterable[Sink] = (),
        tree: LogState | None = None,
        writer: LogWriter | None = None,
        clock: Callable[[], float] = time.time,
        store: StoreLog | None = None,
    ) -> None:
        self.tree = LogState() if tree is None else tree
        self.is_resumed = tree is not None
        """True if an earlier process or leg has started the log."""
        self.first = self.tree.seq
        """The number of the last event before `events`."""
        self.events: list[Event] = []
        self.privates: list[LogRow] = []
        """The rows with a private part, where no writer stores them."""
        self.writer, self.clock, self.store = writer, clock, store
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
        self.stops: dict[str, str] = EMPTY
        """Why children that have not begun here are to stop as soon as they begin, by run id."""
        self.are_tasks_cancelled = False
        """True if the background tasks are to stop, also one that becomes known later."""
        self.on_release: Callable[[], None] | None = None
        """Called when a background task has ended."""
        self.held_threads: dict[str, str | None] = {}
        """The threads that the store holds for children, each with the run that uses it; None if the run has ended."""
        self._sinks = list(sinks)
        self.waiting: Waiting = {}
        self.waiting_for_store: Waiting = {}
        """Readers that want stored events only: they are not woken when an event is appended."""
        self._run_sinks: dict[str, Sink] = EMPTY
        """Sinks that get the events of one run only."""
        self._of_runs: defaultdict[str, OfRun] | None = None
        """The events of each run, filled when the first reader of a single run comes."""
        if writer is not None:
            writer.on_stored, writer.tree = partial(_wake_all, self.waiting_for_store), self.tree
        self.watched = bool(self._sinks) or writer is not None
        """True if the writer, a sink or a reader must get the next event at once."""

    @property
    def log_id(self) -> str:
        """The id of its root run."""
        return next(iter(self.tree.runs), "") if self.writer is None else self.writer.log_id

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
            # A run continues a conversation that it has loaded from the store.
            history = (identity.thread_id, run.own_from) if kind is MessagesSnapshot and run.own_from else None
            self._pass_on(stamped, private, history)
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

    def _pass_on(self, event: Event, private: Private | None, history: tuple[str, int] | None = None) -> None:
        """Give an event to the writer, to sinks and to readers."""
        if private is not None or self.writer is not None:
            self._keep(LogRow(event.seq, 0, event, private, history))
        if self._sinks:
            deliver(event, self._sinks)
        if self._run_sinks and event.run_id in self._run_sinks:
            self._tell_sink(event)
        if self._of_runs is not None:
            self._of_runs[event.run_id].add(event)
        if self.waiting:
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

    def waiting_at_gate(self, run_id: str) -> AbstractAsyncContextManager[None]:
        """Note, within the block, that a run of this log waits at the gate of a provider's account."""
        return nullcontext() if self.lend_slot is None else self.lend_slot(self, run_id, lambda: True, at_gate=True)

    @property
    def closed(self) -> bool:
        """True if nothing works on the log now: its run has ended or waits, and its background tasks have ended."""
        return self.ended and not self.holders

    @property
    def waits(self) -> bool:
        """True if the root run waits for a human."""
        root = next(iter(self.tree.runs.values()), None)
        return root is not None and root.waits

    def close(self) -> None:
        """End or pause the log: the root run has ended or waits. Background tasks continue."""
        self.ended = True
        self._wake_readers()

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
        """Note that a background task has ended, and wake the readers."""
        self.holders.pop(task_id, None)
        self._wake_readers()
        if self.on_release is not None:
            self.on_release()

    @property
    def is_over(self) -> bool:
        """True if no more events will come."""
        return self.closed and not self.waits

    @property
    def stored_seq(self) -> int:
        """The number of the last event that is stored; without a store, memory counts as one."""
        return self.tree.seq if self.writer is None else self.writer.stored_seq

    def read(self, after: int = 0, *, live: bool = False, run_id: str = "") -> OwnedReader:
        return OwnedReader(self, after, run_id, is_live=live or self.writer is None)

    async def history(self, after: int = 0) -> list[Event]:
        """Return the events so far after a number, also deltas, and also those that previous owners appended."""
        reader, events = self.read(after, live=True), list[Event]()
        while self.store is not None and reader.seq < self.first and not self.lost:
            events += await reader.take()
        await reader.aclose()
        return events + self.events[max(after - self.first, 0) :]

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done when something is appended, or the log is closed."""
        self.watched = True
        future = self.waiting[future] = asyncio.get_running_loop().create_future()
        return future

    def of_run(self, run_id: str) -> OfRun:
        """Return the events of one run. The first call sorts the events of all runs, once."""
        self.watched = True
        if self._of_runs is None:
            self._of_runs = defaultdict(OfRun)
            for event in self.events:
                self._of_runs[event.run_id].add(event)
        return self._of_runs[run_id]

    def thread_of(self, run_id: str) -> str:
        """Return the thread of a run; empty until its first event."""
        state = self.tree.runs.get(run_id)
        return "" if state is None else state.identity.thread_id

    def _wake_readers(self) -> None:
        self._wake()
        _wake_all(self.waiting_for_store)
        if (self.closed or self.lost) and self._of_runs is not None:
            for events in self._of_runs.values():
                _wake_all(events.waiting)

    def _wake(self) -> None:
        self.watched = bool(self.writer or self._sinks or self._run_sinks or self._of_runs is not None)
        _wake_all(self.waiting)


class OfRun:
    """The events of one run."""

    __slots__ = ("events", "waiting")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.waiting: Waiting = {}

    def add(self, event: Event) -> None:
        self.events.append(event)
        if self.waiting:
            _wake_all(self.waiting)


class OwnedReader:
    """Reads a log of this process, and continues in the store where the log continues elsewhere.

    Invariant: what another process may write again is never skipped. A reader of stored events is never beyond them. A
    live one goes back to the last stored event when the log is lost, and says so.
    """

    def __init__(self, log: LiveLog, after: int, run_id: str, *, is_live: bool) -> None:
        self._log, self._after, self._run_id, self._is_live = log, after, run_id, is_live
        self.seq = after
        self.ended = False
        self._own = log.of_run(run_id) if run_id and is_live else None
        """The events of one run, of a live reader of that run; else the list of the log is read."""
        self._place = 0 if self._own is None else bisect_right(self._own.events, after, key=_SEQ)
        """The place in that list."""
        if self._own is not None:
            self._waiting = self._own.waiting
        else:
            self._waiting = log.waiting if is_live else log.waiting_for_store
        self._store: StoreReader | None = None
        """Reads what previous owners appended and, once this reader has left the list, what the next ones append."""
        self._has_paused = self._has_left = self._is_busy = False
        self._notice: Event | None = None

    @property
    def ready(self) -> bool:
        if self._has_left and self._store is not None:
            return self._store.ready
        is_before_list = self.seq < self._log.first and self._log.store is not None
        return not self.ended and (is_before_list or bool(self._next(1)))

    async def take(self, most: int = MOST) -> Sequence[Event]:
        if self._is_busy:  # more is there than was taken: let others have their turn
            self._is_busy = False
            await asyncio.sleep(0)
        log, has_waited = self._log, False
        while not self.ended:
            if self._has_left and self._store is not None:
                return await self._take_stored(self._store, most)
            # Before anything is read from the list: another process may have written its last events again.
            if log.lost and log.store is not None:
                await self._leave(log.store)
                return ()
            if self.seq < log.first and log.store is not None:
                return await self._take_earlier(log.store, most)
            if events := self._next(most):
                self.seq, self._place = events[-1].seq, self._place + len(events)
                self._is_busy, self._has_paused = len(events) == most, False
                return of_run(events, self._run_id) if self._run_id and self._own is None else events
            if log.closed and (self._is_live or log.stored_seq >= log.tree.seq or self._is_broken):
                self.ended = not log.waits or log.lost
                if not self._has_paused:
                    self._has_paused = True
                    break
                if log.store is not None and log.stored_seq >= log.tree.seq:  # any process may continue it
                    await self._leave(log.store)
                    break
            if has_waited:
                break
            log.watched = has_waited = True
            future = self._waiting[future] = asyncio.get_running_loop().create_future()
            try:
                await future
            finally:
                self._waiting.pop(future, None)
        return ()

    def _next(self, most: int) -> list[Event]:
        """Return the next events of the list, as far as this reader may see them."""
        log = self._log
        if self._own is not None:
            return self._own.events[self._place : self._place + most]
        first = max(self.seq - log.first, 0)
        last = first + most if self._is_live else min(log.stored_seq - log.first, first + most)
        return log.events[first : max(last, 0)]

    @property
    def _is_broken(self) -> bool:
        """True if the rest of the list will not be stored."""
        return self._log.writer is not None and self._log.writer.problem is not None

    async def _take_earlier(self, store: StoreLog, most: int) -> Sequence[Event]:
        """Return events that previous owners appended."""
        first = self._log.first
        reader = self._store = self._store or store.read(self.seq)
        events = [event for event in await reader.take(most) if event.seq <= first]
        is_all = reader.seq >= first or (not reader.ready and self._log.stored_seq >= first)
        self.seq = first if is_all else reader.seq
        if is_all:
            await self.aclose()
        return of_run(events, self._run_id)

    async def _take_stored(self, reader: StoreReader, most: int) -> Sequence[Event]:
        events = await reader.take(most)
        self.seq, self.ended = reader.seq, reader.ended
        return events

    async def _leave(self, store: StoreLog) -> None:
        """Continue in the store. If the log is lost, what this process had not stored is read again."""
        log, stored = self._log, self._log.stored_seq
        await self.aclose()
        if log.lost and self.seq > stored >= self._after:
            root = next(iter(log.tree.runs.values()), None)
            message = f"another process continues the run: what comes after event {stored} happens again"
            agent = "" if root is None else root.identity.agent
            self._notice = ErrorRaised(
                at=log.clock(), run_id=store.log_id, agent=agent, code="owner_lost", message=message
            )
        if log.lost:
            self.seq = max(min(self.seq, stored), self._after)
        self._store, self._has_left = store.read(self.seq, run_id=self._run_id), True

    async def notice(self) -> Event | None:
        if self._notice is not None:
            found, self._notice = self._notice, None
            return found
        return await self._store.notice() if self._has_left and self._store is not None else None

    async def rests(self) -> bool:
        if self._has_left and self._store is not None:
            return await self._store.rests()
        return self._log.closed and not self._log.lost and not self.ready

    async def aclose(self) -> None:
        if self._store is not None:
            await self._store.aclose()
            self._store = None


Waiting = dict[asyncio.Future[None], object]
"""Futures of readers, in the order in which they came."""


def _wake_all(waiting: Waiting) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()


# --- storing


class Gathering:
    """The logs of one event loop that gather rows. They are written together, so they share transactions."""

    def __init__(self) -> None:
        self.writers: dict[LogWriter, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._together = 0
        """The number of logs that were written together the last time."""

    def add(self, writer: LogWriter) -> None:
        self.writers[writer] = None
        if self._timer is None:
            seconds = min(max(GATHER, self._together * GATHER_FOR_EACH), LONGEST_GATHER)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._write)

    def _write(self) -> None:
        """Write the gathered rows; in several turns of the event loop if there are many."""
        self._timer, self._together = None, len(self.writers)
        for writer in list(self.writers)[:MOST_TOGETHER]:
            del self.writers[writer]  # reset here: the writer may be in another gathering by now
            writer.write()
        if self.writers:
            self._timer = asyncio.get_running_loop().call_later(0, self._write)


class LogWriter:
    """Stores the rows of a log as its owner, in order, one transaction at a time.

    Rows are added without waiting; `flush` returns when all of them are stored. A transient error is retried. When
    another process owns the log, it calls `on_lost` and writes nothing more.

    A write starts in a callback of the event loop, not in a task: all calls of one turn share it.
    """

    def __init__(self, log_id: str, store: DurableStore, epoch: int = 1, gathering: Gathering | None = None) -> None:
        self.log_id, self._store, self.epoch = log_id, store, epoch
        self.on_lost: Callable[[Exception], None] | None = None
        self.fresh_until = inf
        """The boot-clock time until which the lease is certain to hold; each renewal moves it."""
        self.rows: list[LogRow] = []
        self._extra: LogBatch | None = None
        """Runs, threads and replies for the next write."""
        self._waiting: list[asyncio.Future[None]] = []
        self._is_due = self._is_writing = False
        self._is_gathering = False
        self.gathering = gathering or Gathering()
        self.problem: Exception | None = None
        """The reason why nothing more can be stored."""
        self._backoff: Backoff | None = None
        """The pauses between attempts, while the store cannot be written."""
        self.is_released = self.is_leaving = False
        """The log was released; it is being released."""
        self.stored_seq = 0
        """The number of the last event that is stored."""
        self.on_stored: Callable[[], None] | None = None
        self.tree: LogState | None = None
        """The state after all rows so far."""
        self._counts: tuple[str, int, int] | None = ("running", 0, 0) if epoch == 1 else None
        """The status, the questions and the children that are stored, if this process knows them. A run begins as running."""

    def notify(self) -> None:
        """Store the rows soon, without waiting."""
        if not self._is_gathering and not self._is_writing:
            self._is_gathering = True
            self.gathering.add(self)

    def flush(self) -> asyncio.Future[None]:
        """Return a future that is done when all rows appended so far are stored."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if self.problem is not None:
            done.set_exception(self.problem)
            return done
        if not self.rows and self._extra is None and not self._is_writing:
            done.set_result(None)
            return done
        self._waiting.append(done)
        if not self._is_writing and not self._is_due:
            self._is_due = True
            loop.call_soon(self.write)
        return done

    async def confirm(self) -> None:
        """Raise OwnershipLost if the lease has run out and another process owns the log, so that a process that was frozen
        starts no work."""
        if boot_seconds() >= self.fresh_until:
            await self._store.write(LogBatch(log_id=self.log_id, epoch=self.epoch))

    async def hold_thread(self, thread_id: str, user_id: str | None) -> str | None:
        """Hold a thread for a child in the store; if another run has it, return that run."""
        return await self._store.hold_thread(self.log_id, self.epoch, thread_id, user_id)

    async def holder_of(self, thread_id: str) -> str | None:
        return await self._store.holder_of(thread_id)

    def settle(
        self,
        *,
        runs: Sequence[RunRecord] = (),
        threads: Sequence[ThreadUpdate] = (),
        replies: Sequence[Reply] = (),
        losses: Losses | None = None,
        left: Sequence[str] = (),
        released: bool = False,
        ended: bool = False,
        rests: bool = False,
    ) -> asyncio.Future[None]:
        """Flush, with these records in the same transaction as the rows so far; with `released` or `ended` it is the last
        write. The transaction is fixed at the call, as with `flush`."""
        extra = self._extra = self._extra or LogBatch(log_id=self.log_id, epoch=self.epoch)
        extra.runs, extra.threads = (*extra.runs, *runs), (*extra.threads, *threads)
        extra.replies, extra.left = (*extra.replies, *replies), (*extra.left, *left)
        extra.losses = losses or extra.losses
        extra.released |= released
        extra.ended |= ended
        extra.rests |= rests
        self.is_leaving |= released or ended
        return self.flush()

    def stop(self, problem: Exception) -> None:
        """Store nothing more; every waiting `flush` raises the problem."""
        self.problem = self.problem or problem
        self._stop_gathering()
        _resolve(self._waiting, self.problem)

    def _stop_gathering(self) -> None:
        if self._is_gathering:
            self._is_gathering = False
            self.gathering.writers.pop(self, None)

    def write(self) -> None:
        """Start to store all rows."""
        self._is_due = False
        self._stop_gathering()
        if self._is_writing or self.problem is not None:
            return
        if not self.rows and self._extra is None:
            _resolve(self._waiting)
            return
        batch, self._extra = self._extra or LogBatch(log_id=self.log_id, epoch=self.epoch), None
        batch.rows = self.rows[:]
        self.rows.clear()
        batch.summary = self._changed_summary(batch)
        waiting, self._waiting = self._waiting, []
        self._send(batch, waiting)

    def _changed_summary(self, batch: LogBatch) -> SummaryUpdate | None:
        """Return how the log stands after a batch; None if that is as before, but for usage, or the root has not begun."""
        if self.tree is None or not self.tree.runs or not any(row.event.__class__ in CHANGING for row in batch.rows):
            return None
        summary = self.tree.summary()
        counts = summary.status, summary.questions, summary.children
        if counts == self._counts:
            return None
        self._counts = counts
        identity = next(iter(self.tree.runs.values())).identity
        return SummaryUpdate(identity.thread_id, identity.user_id, summary)

    def _send(self, batch: LogBatch, waiting: list[asyncio.Future[None]]) -> None:
        self._is_writing = True
        try:
            written = self._store.write(batch)
        except RetinueError as exc:
            written = asyncio.get_running_loop().create_future()
            written.set_exception(exc)
        written.add_done_callback(partial(self._written, batch, waiting))

    def _written(self, batch: LogBatch, waiting: list[asyncio.Future[None]], done: asyncio.Future[None]) -> None:
        error = StoreError(self._store.place, "it was closed") if done.cancelled() else done.exception()
        if isinstance(error, StoreError) and error.transient and self.problem is None:
            if self._backoff is None:
                _log.error("run %s waits for its store: %s", self.log_id, error)
                self._backoff = Backoff()
            asyncio.get_running_loop().call_later(self._backoff.next(), self._send, batch, waiting)
            return
        self._is_writing = False
        if error is not None:
            self._fail(error, waiting)
            return
        if self._backoff is not None:
            self._backoff = None
            _log.warning("run %s continues: its store can be written again", self.log_id)
        self.is_released = self.is_leaving = batch.released or batch.ended
        if batch.rows:
            self.stored_seq = batch.rows[-1].seq
            if self.on_stored is not None:
                self.on_stored()
        _resolve(waiting)
        if self._waiting or self._extra is not None:
            self.write()
        elif self.rows:
            self.notify()

    def _fail(self, error: BaseException, waiting: list[asyncio.Future[None]]) -> None:
        """Stop for good, and report the first problem."""
        problem = error if isinstance(error, Exception) else StoreError(self._store.place, "it was closed")
        first, self.problem = self.problem is None, self.problem or problem
        if first:
            level = logging.INFO if isinstance(problem, OwnershipLost) else logging.ERROR
            _log.log(level, "the log of run %s can no longer be stored: %s", self.log_id, problem)
        _resolve(waiting, self.problem)
        _resolve(self._waiting, self.problem)
        if first and self.on_lost is not None:
            self.on_lost(self.problem)


def _resolve(waiting: list[asyncio.Future[None]], problem: Exception | None = None) -> None:
    for done in waiting:
        if done.done():
            continue
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)
            done.exception()  # mark the exception as retrieved
    waiting.clear()
