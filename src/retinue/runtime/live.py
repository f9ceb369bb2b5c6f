"""A root run at work in this process: its legs, and what is stored of them.

A leg is the work from a start, an answer or a takeover to the end or to where the run waits. Between two legs a run
is its log; with a store, this process then knows nothing more of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from ..backends.background import LocalBackground
from ..backends.local import LocalBackend
from ..backends.setup import begin, result_again, thread_after
from ..core.backend import RunRequest
from ..core.context import GRACE
from ..core.decisions import Decision
from ..core.errors import DecisionRefused, OwnershipLost, RetinueError, ThreadBusy
from ..core.lifecycle import RunStatus
from ..core.messages import Message
from ..core.rows import Ending
from ..core.runs import RunResult
from ..core.stores import DurableStore, Reply, RunRecord, Store, ThreadUpdate, WhenBusy, Wish
from ..loop.calls import context_for
from ..loop.endings import close_run, start_leg
from ..loop.execution import Execution, result_of
from ..loop.log import LiveLog
from ..loop.run import execute_run, stop_run, stopped
from ..loop.state import RunState
from ..loop.tickets import match_decisions
from ..storage.logs import LogWriter
from .owner import Owner
from .turns import take_turn, wait_or_stop
from .wishes import Wishes

_log = logging.getLogger(__name__)


class Home(Protocol):
    """The part of a runtime that a live run uses."""

    backend: LocalBackend
    background: LocalBackground
    store: Store
    durable: DurableStore | None
    owner: Owner | None

    def leg_ended(self, run: LiveRun) -> None:
        """A leg has ended, and everything is stored; `run.is_done` where nothing is left to do here."""
        ...


class LiveRun:
    """A root run that this process owns."""

    def __init__(
        self,
        home: Home,
        request: RunRequest,
        log: LiveLog,
        record: RunRecord,
        writer: LogWriter | None,
        x: Execution | None = None,
    ) -> None:
        self._home, self.request, self.log, self.record, self.writer = home, request, log, record, writer
        self.x = x
        """Its execution, while a leg is at work."""
        self.first = log.tree.seq
        """The number of the last event before the present leg."""
        self.end: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it has left its thread to others."""
        self.is_new_thread = False
        """True if its thread is new and empty."""
        self.before: list[LiveRun] = []
        """The runs that have its thread before it, where no store decides that."""
        self._task: asyncio.Task[None] | None = None
        self._jobs: set[asyncio.Task[None]] = set()
        self._wishes: Wishes | None = None
        self._is_settling = self._is_begun = self._keeps_thread = False
        self.is_done = self.is_adopted = False
        """Nothing is left to do here; another process started it."""
        self._letting_go: asyncio.Future[None] | None = None
        """While the log is being given up."""
        log.on_idle = self._become_idle

    @property
    def run_id(self) -> str:
        return self.request.identity.run_id

    @property
    def wishes(self) -> Wishes:
        if self._wishes is None:
            self._wishes = Wishes(self, self._home)
        return self._wishes

    @property
    def state(self) -> RunState | None:
        return self.log.tree.runs.get(self.run_id)

    @property
    def is_leaving(self) -> bool:
        return self.writer is not None and self.writer.is_leaving

    @property
    def waits(self) -> bool:
        """True if it waits for a human and has no answer yet."""
        return self.end.done() and self.state is not None and self.state.waits

    # --- legs

    def start(self, when_busy: WhenBusy | None, problem: str | None = None) -> None:
        """Begin a new run or, without `when_busy`, one that another process has stored without beginning it.

        `problem` says what of the request was not stored: such a run can only fail.
        """
        self._launch(self._first_leg(when_busy, problem))

    def break_off(self, reason: str) -> None:
        """End a run that cannot be continued here or anywhere."""
        self._launch(self._failed_leg(reason))

    async def _failed_leg(self, reason: str) -> RunResult:
        return self.fail(reason)

    def proceed(self, replies: tuple[Reply, ...] = ()) -> None:
        """Continue from where its state says it stands."""
        self._launch(self._later_leg(replies))

    def _launch(self, work: Coroutine[Any, Any, RunResult]) -> None:
        if self.end.done():
            self.end = asyncio.get_running_loop().create_future()
        self._is_settling = self._is_begun = False
        self._task = asyncio.create_task(self._conduct(work), name=self.run_id)

    async def _conduct(self, work: Coroutine[Any, Any, RunResult]) -> None:
        try:
            result = await work
            try:
                await self._settle(result)
            except asyncio.CancelledError:  # too late to cancel: what there is must be stored
                await self._settle(result)
        except asyncio.CancelledError:
            if not self._is_settling:
                self._go_down()
        except OwnershipLost as exc:
            self.lose(exc)
        except Exception as exc:
            self._break_down(exc)

    async def _first_leg(self, when_busy: WhenBusy | None, problem: str | None) -> RunResult:
        x, home, store = self.x, self._home, self._home.durable
        assert x is not None
        if store is not None and home.owner is not None and problem is None:
            await take_turn(self, x, store, home.owner, when_busy)
        for run in self.before:
            await wait_or_stop(self.request.cancellation, run.left)
        if self.request.cancellation.is_set() and (self.before or self.record.queued):
            return self._stop_queued(x)
        self._keeps_thread = problem is None
        thread = None if self.is_new_thread else await home.store.load_thread(x.identity.thread_id)
        if store is None:
            await home.store.save_run(self.record)
        self._begin(x)
        begin(x, thread)
        return await execute_run(x) if problem is None else self.fail(f"it cannot be continued: {problem}")

    def _stop_queued(self, x: Execution) -> RunResult:
        """End a run that never had its thread: it tells a beginning and an end, and leaves the thread alone."""
        self._begin(x)
        begin(x, None)
        return stop_run(x)

    async def _later_leg(self, replies: tuple[Reply, ...]) -> RunResult:
        state = self.state
        assert state is not None
        self._keeps_thread = True
        if self.writer is not None:
            self.record.result = None
            await self.writer.settle(runs=(self.record,), replies=replies)
        try:
            x = self.x = self._home.backend.open(self.request, self.log, state)
        except RetinueError as exc:
            return self.fail(f"it cannot be continued: {exc}")
        self._begin(x)
        if state.awaits_history:
            await self._home.backend.tell_history(x)
        if self.log.is_resumed:
            await self._take_up_tasks(x)
        return await execute_run(x)

    def _begin(self, x: Execution) -> None:
        self._is_begun = True
        self._home.backend.enter(x)

    async def _take_up_tasks(self, x: Execution) -> None:
        for agent in dict.fromkeys(x.agents):
            await agent.take_up_tasks(x.identity, partial(context_for, x))

    async def take_up(self) -> None:
        """Continue only the background tasks under a run that has ended or waits."""
        state, known = self.state, self.record.result
        assert state is not None
        is_told = known is not None and known.status is state.status  # else its process ended before it could say so
        if self.log.tree.has_open_tasks() or not is_told:
            x = self.x = self._home.backend.open(self.request, self.log, state)
            self._home.backend.enter(x)
            await self._take_up_tasks(x)
            self._home.backend.leave(x)
            if not is_told:
                self._keeps_thread = True
                await self._settle(result_again(x), keep=True)
                return
        assert known is not None
        self.log.close()
        if state.is_over and not self.left.done():
            self.left.set_result(None)
        self.end.set_result(known)
        self._is_settling = True

    # --- the end of a leg

    async def _settle(self, result: RunResult, *, keep: bool = False) -> None:
        """Store how the leg ended, in one transaction, and tell whoever waits; with `keep`, the log stays ours."""
        self._is_settling = True
        ended, x = result.status.is_terminal, self.x
        thread = None
        if ended and self._keeps_thread and x is not None and x.state.leg:
            thread = ThreadUpdate(thread_after(x), x.state.own_from)
        self.record.result, self.record.queued = result, False
        threads = () if thread is None else (thread,)
        if self.writer is not None:
            replies = () if self._wishes is None else self._wishes.take_replies()
            idle = not (self.log.holders or keep)
            await self.writer.settle(
                runs=(self.record,), threads=threads, replies=replies, ended=ended and idle, released=idle
            )
            self.is_done = idle
        else:
            if thread is not None:
                await self._home.store.save_thread(thread.record)
            await self._home.store.save_run(self.record)
            self.is_done = ended and not self.log.holders
        if not self.end.done():
            self.end.set_result(result)
        self._close(ended)
        if not (self.log.holders or keep):  # the last task may have ended meanwhile
            self._become_idle()

    def _close(self, ended: bool) -> None:
        self.log.close()
        if self.x is not None:
            self._home.backend.leave(self.x)
        if ended and not self.left.done():
            self.left.set_result(None)
        self._home.leg_ended(self)

    def _become_idle(self) -> None:
        """The last background task has ended: the log has, too, or waits for nobody here."""
        if self._is_settling and self.end.done() and not self.is_done and not self.log.lost:
            status = RunStatus.FAILED if self.state is None else self.state.status
            self.spawn(self._let_go(status))

    async def _let_go(self, status: RunStatus) -> None:
        """Give the log up, unless somebody was quicker and continues the run."""
        if self.is_done or self.is_storing or not self.end.done() or self.log.holders:
            return
        self._letting_go = asyncio.get_running_loop().create_future()
        if self.writer is not None:
            with contextlib.suppress(RetinueError):
                await self.writer.settle(ended=status.is_terminal, released=True)
        self.is_done = self.writer is not None or status.is_terminal
        self._home.leg_ended(self)
        self._letting_go.set_result(None)
        self._letting_go = None

    @property
    def is_storing(self) -> bool:
        """Whether the end of a leg, or that the log is given up, is being stored: until then nobody can continue it."""
        return self._letting_go is not None or (self._is_settling and not self.end.done())

    async def stored(self) -> None:
        """Return when nothing of that is being stored."""
        while self.is_storing:
            await asyncio.wait({self._letting_go or self.end})

    def fail(self, reason: str) -> RunResult:
        """End a run that cannot be continued, and everything under it."""
        _log.error("run %s: %s", self.run_id, reason)
        state = self.state
        assert state is not None
        for child in self.log.tree.children_of(state):
            if not child.is_over:
                close_run(self.log, child, Ending(RunStatus.CANCELLED, "cancelled", reason))
        close_run(self.log, state, Ending(RunStatus.FAILED, "error", reason))
        return self.log.results[self.run_id]

    def _go_down(self) -> None:
        """The event loop is ending: nothing can be stored any more."""
        if not self.end.done():
            self.end.cancel()
        self.is_done = True
        self._close(True)

    def _break_down(self, exc: Exception) -> None:
        """Pass an exception that came out of the run on to everything that waits for it."""
        if not self.end.done():
            self.end.set_exception(exc)
            self.end.exception()  # nobody need be waiting
        self.is_done = True
        if self.x is not None and self.x.result is not None and not isinstance(exc, ThreadBusy):
            self.spawn(self._store_broken(self.x.result))
            return
        self._close(True)

    async def _store_broken(self, result: RunResult) -> None:
        """Store the end of a run that an exception came out of: its thread is for others."""
        self.record.result = result
        with contextlib.suppress(RetinueError):
            if self.writer is not None:
                await self.writer.settle(runs=(self.record,), ended=True)
            else:
                await self._home.store.save_run(self.record)
        self._close(True)

    def lose(self, exc: Exception | None = None) -> None:
        """Another process owns the log: drop the run, and write nothing more about it."""
        if self.log.lost:
            return
        self.log.drop()
        if self.writer is not None:
            self.writer.stop(exc or OwnershipLost("", self.run_id))
        if not self.end.done():
            self.end.set_exception(exc or OwnershipLost("", self.run_id))
            self.end.exception()
        for x in list(self.log.executions.values()):
            x.cancellation.set("another process continues this run")
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.is_done = True
        self._close(True)

    # --- what others want

    def accept(self, decisions: Mapping[str, Decision], replies: tuple[Reply, ...] = ()) -> bool:
        """Continue with decisions; False where they were accepted before. Raises DecisionRefused."""
        state = self.state
        if state is None:
            raise DecisionRefused(f"run {self.run_id!r} has not begun yet, it waits for nothing")
        answers = match_decisions(self.log.tree, state, decisions, stored=self.writer is not None)
        if not answers:
            return False
        self.log.reopen()
        self.first = self.log.tree.seq
        start_leg(self.log, state, tuple(answers))
        self.is_done = False
        self.proceed(replies)
        return True

    def go_on_with(self, messages: tuple[Message, ...]) -> None:
        """Continue a fork, with other input where there is any."""
        state = self.state
        assert state is not None
        self.first = self.log.tree.seq
        if messages:
            named = [
                replace(one, id=one.id or f"{self.run_id}-m{state.message_count + n}")
                for n, one in enumerate(messages, 1)
            ]
            start_leg(self.log, state, messages=tuple(named))
        self.proceed()

    def wish(self, wish: Wish) -> None:
        self.wishes.hear(wish)

    async def release_if_idle(self) -> None:
        """Give a log up that was claimed only for the sake of a wish."""
        state = self.state
        busy = self._jobs - {asyncio.current_task()}  # a wish that is being carried out
        if (
            self._is_settling
            and self.end.done()
            and not (busy or self.log.holders or self.is_done)
            and state is not None
        ):
            await self._let_go(state.status)

    async def cancel(self, reason: str, grace: float = GRACE) -> RunResult:
        """Stop the run and what it waits for, and wait for its end; what does not stop in time is left behind."""
        state = self.state
        if self._task is None and state is not None and not state.is_over:
            await self._give_up(reason)  # it was claimed to be cancelled
        elif self.end.done() and state is not None and state.waits:
            await self._give_up(reason)
        elif not self.end.done():
            self.wishes.note_cancel(reason)
            self.request.cancellation.set(reason)
            # Before the loop has begun it sees for itself that it need not; once it has ended there is nothing to stop.
            if self._is_begun and not self._is_settling and self._task is not None:
                self._task.cancel(reason)
            if self._task is not None:
                await asyncio.wait({self._task}, timeout=grace)
            if not self.end.done() and not self._is_settling and self.x is not None:
                await self._leave_behind(self.x)
        return await asyncio.shield(self.end)

    async def _give_up(self, reason: str) -> None:
        """End a run that waits for an answer which will not come."""
        state = self.state
        assert state is not None
        self.log.reopen()
        self.request.cancellation.set(reason)
        if self.end.done():
            self.end = asyncio.get_running_loop().create_future()
        self._keeps_thread, self.first = True, self.log.tree.seq
        try:
            self.x = self._home.backend.open(self.request, self.log, state)
            self._home.backend.enter(self.x)
            if state.awaits_history:
                await self._home.backend.tell_history(self.x)
        except RetinueError:  # its agent is not known here, or has changed: it ends all the same
            self.x = None
        close_run(self.log, state, Ending(RunStatus.CANCELLED, "cancelled", reason))
        await self._settle(self.log.results[self.run_id])

    async def _leave_behind(self, x: Execution) -> None:
        """End a run that does not stop, or whose beginning does not come."""
        if x.state.leg:
            close_run(self.log, x.state, stopped(x))
        elif self._task is not None:
            self._task.cancel()
        result = x.result or result_of(self.log, x.state, stopped(x))
        await self._settle(result)

    async def cancel_tasks(self) -> None:
        """Stop the background tasks that were started under this run."""
        await asyncio.gather(*[cancel("cancelled") for cancel in list(self.log.holders.values())])

    async def hand_over(self) -> None:
        """Store what is there and leave the run to another process, as it is."""
        if self.writer is not None and not self.writer.is_released:
            state = self.state  # where only tasks go on, the log keeps its owner, which is gone soon: so it is found
            at_work = state is None or state.status is RunStatus.RUNNING
            released = at_work or not self.log.tree.has_open_tasks()
            with contextlib.suppress(RetinueError, TimeoutError):
                await asyncio.wait_for(self.writer.settle(released=released), GRACE)
        self.lose()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._forget_job)

    def _forget_job(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (exc := job.exception()) is not None and not isinstance(exc, OwnershipLost):
            _log.error("run %s: %s", self.run_id, exc, exc_info=exc)

    def let_go_of_parts(self) -> None:
        """Drop what only a run at work needs, and what would keep it from being freed at once."""
        self.log.on_idle, self._wishes, self.x = None, None, None
        if self.writer is not None:
            self.writer.on_lost = None

    async def put_down(self) -> None:
        """Store what is left to store, and give the log up; the runtime is being closed."""
        while self._jobs:
            await asyncio.wait(set(self._jobs))
        state = self.state
        if self.writer is None or self.writer.is_released or self.log.lost or state is None:
            return
        ended = state.is_over and not self.log.tree.has_open_tasks()
        with contextlib.suppress(RetinueError):
            await self.writer.settle(released=True, ended=ended)
        self.is_done = True
