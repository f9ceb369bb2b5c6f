"""The writer of a log in a store, for its owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from math import inf

from ..core.concurrency import Backoff
from ..core.errors import OwnershipLost, RetinueError, StoreError
from ..core.events import Event, RunFinished, RunStarted, TaskUpdated, ToolCallFinished, ToolCallResumed
from ..core.processes import boot_seconds
from ..core.rows import LogRow
from ..core.stores import DurableStore, LogBatch, Reply, RunRecord, SummaryUpdate, ThreadUpdate
from .state import LogState

_log = logging.getLogger(__name__)

GATHER, GATHER_FOR_EACH, LONGEST_GATHER = 0.02, 0.0005, 0.1
"""Seconds for which rows are gathered if no barrier waits for them: at least, for each log that gathers, and at
most. Many logs are thus written in fewer, larger transactions."""
CHANGING: frozenset[type[Event]] = frozenset({RunStarted, RunFinished, ToolCallFinished, ToolCallResumed, TaskUpdated})
"""The events that can change how a log stands, but for its usage."""
MOST_TOGETHER = 500
"""Logs that are written in one turn of the event loop."""


class Gathering:
    """The logs of one event loop that gather rows. They are written together, so they share transactions."""

    def __init__(self) -> None:
        self._writers: dict[LogWriter, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._together = 0
        """The number of logs that were written together the last time."""

    def add(self, writer: LogWriter) -> None:
        self._writers[writer] = None
        if self._timer is None:
            seconds = min(max(GATHER, self._together * GATHER_FOR_EACH), LONGEST_GATHER)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._write)

    def discard(self, writer: LogWriter) -> None:
        self._writers.pop(writer, None)

    def _write(self) -> None:
        """Write the gathered rows; in several turns of the event loop if there are many."""
        self._timer, self._together = None, len(self._writers)
        for writer in list(self._writers)[:MOST_TOGETHER]:
            self.discard(writer)  # reset here: the writer may be in another gathering by now
            writer.write()
        if self._writers:
            self._timer = asyncio.get_running_loop().call_later(0, self._write)


class LogWriter:
    """Stores the rows of a log as its owner, in order, one transaction at a time.

    Rows are added without waiting; `flush` returns when all of them are stored. A transient error is retried. When
    another process owns the log, it calls `on_lost` and writes nothing more.

    A write starts in a callback of the event loop, not in a task: all calls of one turn share it.
    """

    def __init__(self, log_id: str, store: DurableStore, epoch: int = 1) -> None:
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
        self.gathering = Gathering()
        self.problem: Exception | None = None
        """The reason why nothing more can be stored."""
        self._backoff: Backoff | None = None
        """The pauses between attempts, while the store cannot be written."""
        self.is_released = self.is_leaving = False
        """The log was released; it is being released."""
        self.stored_seq = 0
        """The number of the last event that this process has stored."""
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

    async def settle(
        self,
        *,
        runs: Sequence[RunRecord] = (),
        threads: Sequence[ThreadUpdate] = (),
        replies: Sequence[Reply] = (),
        left: Sequence[str] = (),
        released: bool = False,
        ended: bool = False,
        rests: bool = False,
    ) -> None:
        """Flush, with these records in the same transaction; with `released` or `ended` it is the last write."""
        extra = self._extra = self._extra or LogBatch(log_id=self.log_id, epoch=self.epoch)
        extra.runs, extra.threads = (*extra.runs, *runs), (*extra.threads, *threads)
        extra.replies, extra.left = (*extra.replies, *replies), (*extra.left, *left)
        extra.released |= released
        extra.ended |= ended
        extra.rests |= rests
        self.is_leaving |= released or ended
        await self.flush()

    def stop(self, problem: Exception) -> None:
        """Store nothing more; every waiting `flush` raises the problem."""
        self.problem = self.problem or problem
        self._stop_gathering()
        _settle(self._waiting, self.problem)

    def _stop_gathering(self) -> None:
        if self._is_gathering:
            self._is_gathering = False
            self.gathering.discard(self)

    def write(self) -> None:
        """Start to store all rows."""
        self._is_due = False
        self._stop_gathering()
        if self._is_writing or self.problem is not None:
            return
        if not self.rows and self._extra is None:
            _settle(self._waiting)
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
        written.add_done_callback(lambda done: self._written(batch, waiting, done))

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
        _settle(waiting)
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
        _settle(waiting, self.problem)
        _settle(self._waiting, self.problem)
        if first and self.on_lost is not None:
            self.on_lost(self.problem)


def _settle(waiting: list[asyncio.Future[None]], problem: Exception | None = None) -> None:
    for done in waiting:
        if done.done():
            continue
        if problem is None:
            done.set_result(None)
        else:
            done.set_exception(problem)
            done.exception()  # mark the exception as retrieved
    waiting.clear()
