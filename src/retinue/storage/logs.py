"""Logs in a store: written by their owner while runs go on, read by anybody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from ..core.errors import OwnershipLost, RetinueError, StoreError, UnknownRun
from ..core.events import Event
from ..core.rows import LogRow
from ..core.stores import DurableStore, EventStore, LogBatch, Reply, RunRecord, ThreadUpdate

_log = logging.getLogger(__name__)

LOOK_AGAIN = 5.0
"""Seconds after which a log that another process writes is looked at, if nobody tells of a change before."""
GATHER = 0.02
"""Seconds for which rows are gathered where nobody waits for them to be stored."""
BATCH = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0


class LogWriter:
    """Stores the rows of a log as its owner, in order, one transaction at a time.

    The log adds rows and waits for nothing; `flush` returns when everything is stored that is there. A transient
    error is retried. When another process owns the log, `on_lost` is called and nothing more is written.

    No task is needed: a write begins in a callback of the event loop, so that all calls of one turn share it.
    """

    def __init__(
        self, log_id: str, store: DurableStore, epoch: int = 1, on_lost: Callable[[Exception], None] | None = None
    ) -> None:
        self.log_id, self._store, self.epoch, self.on_lost = log_id, store, epoch, on_lost
        self.is_fresh: Callable[[], bool] | None = None
        """Whether the lease cannot have run out."""
        self.rows: list[LogRow] = []
        self._extra: LogBatch | None = None
        """Runs, threads and replies for the next write."""
        self._waiting: list[asyncio.Future[None]] = []
        self._is_due = self._is_writing = False
        self._timer: asyncio.TimerHandle | None = None
        self._problem: Exception | None = None
        self._pause = 0.0
        self.is_released = self.is_leaving = False
        """The log was given up; it is being given up."""

    @property
    def problem(self) -> Exception | None:
        """Why nothing more can be stored, where that is so."""
        return self._problem

    def notify(self) -> None:
        """Store what is there before long; nobody waits for it."""
        if self._timer is None and not self._is_writing:
            self._timer = asyncio.get_running_loop().call_later(GATHER, self._write)

    def flush(self) -> asyncio.Future[None]:
        """Done when every row is stored that is there now."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        if self._problem is not None:
            done.set_exception(self._problem)
            return done
        if not self.rows and self._extra is None and not self._is_writing:
            done.set_result(None)
            return done
        self._waiting.append(done)
        if not self._is_writing and not self._is_due:
            self._is_due = True
            loop.call_soon(self._write)
        return done

    async def confirm(self) -> None:
        """Make sure that the log is still ours, where its lease may have run out: a process that was frozen starts nothing."""
        if self.is_fresh is not None and not self.is_fresh():
            await self._store.write(LogBatch(log_id=self.log_id, epoch=self.epoch))

    async def settle(
        self,
        *,
        runs: Sequence[RunRecord] = (),
        threads: Sequence[ThreadUpdate] = (),
        replies: Sequence[Reply] = (),
        released: bool = False,
        ended: bool = False,
    ) -> None:
        """As `flush`, with more in the same transaction; with `released` or `ended` it is the last one."""
        extra = self._extra or LogBatch(log_id=self.log_id, epoch=self.epoch)
        extra.runs, extra.threads = (*extra.runs, *runs), (*extra.threads, *threads)
        extra.replies = (*extra.replies, *replies)
        extra.released, extra.ended = extra.released or released, extra.ended or ended
        self.is_leaving = self.is_leaving or released or ended
        self._extra = extra
        await self.flush()

    def stop(self, problem: Exception) -> None:
        """Store nothing more; every waiting `flush` raises the problem."""
        self._problem = self._problem or problem
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        _fail(self._waiting, self._problem)

    def _write(self) -> None:
        """Begin to store what is there."""
        self._is_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_writing or self._problem is not None:
            return
        if not self.rows and self._extra is None:
            self._wake()
            return
        batch, self._extra = self._extra or LogBatch(log_id=self.log_id, epoch=self.epoch), None
        batch.rows = self.rows[:]
        self.rows.clear()
        self._begin(batch, self._waiting)
        self._waiting = []

    def _begin(self, batch: LogBatch, waiting: list[asyncio.Future[None]]) -> None:
        self._is_writing = True
        try:
            written = self._store.write(batch)
        except RetinueError as exc:
            written = asyncio.get_running_loop().create_future()
            written.set_exception(exc)
        written.add_done_callback(lambda done: self._written(batch, waiting, done))

    def _written(self, batch: LogBatch, waiting: list[asyncio.Future[None]], done: asyncio.Future[None]) -> None:
        error = StoreError(self._store.place, "it was closed") if done.cancelled() else done.exception()
        if isinstance(error, StoreError) and error.transient and self._problem is None:
            self._retry(batch, waiting, error)
            return
        self._is_writing = False
        if error is not None:
            self._fail_for_good(error, waiting)
            return
        if self._pause:
            self._pause = 0.0
            _log.warning("run %s goes on: its store can be written again", self.log_id)
        self.is_released = self.is_leaving = batch.released or batch.ended
        for one in waiting:
            _wake(one)
        if self._waiting or self._extra is not None:
            self._write()
        elif self.rows:
            self.notify()

    def _retry(self, batch: LogBatch, waiting: list[asyncio.Future[None]], error: StoreError) -> None:
        if not self._pause:
            _log.error("run %s waits for its store: %s", self.log_id, error)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE) or _FIRST_PAUSE
        asyncio.get_running_loop().call_later(self._pause, self._begin, batch, waiting)

    def _fail_for_good(self, error: BaseException, waiting: list[asyncio.Future[None]]) -> None:
        problem = error if isinstance(error, Exception) else StoreError(self._store.place, "it was closed")
        first, self._problem = self._problem is None, self._problem or problem
        if first and not isinstance(problem, OwnershipLost):
            _log.error("the log of run %s can no longer be stored: %s", self.log_id, problem)
        _fail(waiting, self._problem)
        _fail(self._waiting, self._problem)
        if first and self.on_lost is not None:
            self.on_lost(self._problem)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            _wake(one)


def _wake(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _fail(waiting: list[asyncio.Future[None]], exc: Exception) -> None:
    for done in waiting:
        if not done.done():
            done.set_exception(exc)
            done.exception()  # nobody may be waiting any more
    waiting.clear()


async def stored_events(
    store: EventStore, log_id: str, after: int = 0, until: int | None = None
) -> AsyncIterator[Event]:
    """Yield a stored log after event number `after`: what is there, then what comes, until it ends or is pruned.

    With `until`, only up to that number.
    """
    known = False
    with store.watch(log_id) as watch:
        while True:
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
            if ended or (until is not None and after >= until):
                return
            if not events:
                await watch.wait(LOOK_AGAIN)
