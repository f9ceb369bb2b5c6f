"""A root run that this process executes: runs its legs and stores their ends.

A leg lasts from a start, an answer or a takeover until the run ends or is suspended. Between two legs a run is its log;
with a store, this process then keeps nothing of it in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import GRACE, CancellationToken, Jobs, join, wait_for_first
from ..core.context import OUT_OF_TIME
from ..core.decisions import Decision
from ..core.errors import DecisionRefused, OwnershipLost, RetinueError, ThreadBusy
from ..core.events import ErrorRaised
from ..core.rows import Answer, Ending
from ..core.runs import RunIdentity, RunResult, RunStatus
from ..core.stores import Losses, Reply, RunRecord, ThreadRecord, ThreadUpdate, WhenBusy, Wish
from ..log.ask import Cancel
from ..log.owned import LiveLog, LogWriter
from ..log.ownership import Owner
from ..log.state import RunState
from ..loop.execution import Execution, close_run, result_of, start_leg
from ..loop.leaving import is_idle
from ..loop.placed_call import execute_call
from ..loop.run import begin_run, continue_tasks, execute_run, result_again, stop_run, stopped
from ..loop.tickets import match_decisions, waits_for
from .inbox import Inbox
from .stored_start import encode_start

if TYPE_CHECKING:
    from .runs import LocalRuns

_log = logging.getLogger(__name__)

WORKER_LOST = "worker_lost"
"""The termination of a run that is given up because its processes die, and the code of the events that tell so."""
_LOOK_AGAIN = 0.1
"""Seconds between two looks of a run that waits for its turn to begin."""


def wake_id(task_id: str) -> str:
    """Return the id of the run that the end of a task starts."""
    return f"run_{hashlib.blake2b(f'wake/{task_id}'.encode(), digest_size=10).hexdigest()}"


async def _has_news(x: Execution, thread: ThreadRecord | None) -> bool:
    """Return whether a run that was started by waking still has ended tasks to report."""
    try:
        return bool(await x.agent.ended_tasks(x.identity, {} if thread is None else thread.state.extensions))
    except RetinueError:
        return True  # its first step reports that they cannot be read


def _length(thread: ThreadRecord | None) -> int:
    return 0 if thread is None else len(thread.messages)


class LiveRun:
    """A root run that this process owns.

    Invariant: one leg runs at a time, in `_task`, and one event loop uses this object. `end` belongs to the present leg
    and is done once the end of the leg is stored. `is_done` is set once, when this process has released the log: then
    nothing is written any more.
    """

    def __init__(
        self,
        home: LocalRuns,
        request: RunRequest,
        log: LiveLog,
        record: RunRecord,
        writer: LogWriter | None,
        x: Execution | None = None,
    ) -> None:
        self.home, self.request, self.log, self.record, self.writer, self.x = home, request, log, record, writer, x
        """Its execution, while a leg is at work."""
        self.run_id = request.identity.run_id
        self.first = log.tree.seq
        """The number of the last event before the present leg."""
        self._loop = asyncio.get_running_loop()
        self.end: asyncio.Future[RunResult] = self._loop.create_future()
        self.left = asyncio.Event()
        """Set when it has released its thread."""
        self.is_new_thread = False
        """True if its thread is new and empty."""
        self.thread_saved_at: float | None = None
        """If set, the run is refused if its thread was saved after this time."""
        self.before: list[LiveRun] = []
        """Without a store: the runs that have its thread before it."""
        self._task: asyncio.Task[None] | None = None
        self._jobs = Jobs(report=self._report_failure)
        self._inbox: Inbox | None = None
        """Made for the first command; most runs get none."""
        self.replies: list[Reply] = []
        """Replies to wishes, for the next transaction."""
        self.losses = Losses()
        """The deaths of its earlier owners, as the store has them."""
        self._is_settling = self._is_begun = self._keeps_thread = False
        self.is_done = self.is_adopted = False
        """`is_done`: this process has no more work on the run. `is_adopted`: another process started it."""
        self.on_done: Callable[[], None] | None = None
        """Called when `is_done` is set."""
        self.begun: asyncio.Future[None] = self._loop.create_future()
        """Done when a database has the start of the run."""
        self._releasing: asyncio.Future[None] | None = None
        """Done when the release in progress is stored; None if there is none."""
        self._is_release_due = False
        self.may_wake = False
        """True if its conversation may have to be woken before the log ends."""
        log.on_release = self._task_ended

    @property
    def state(self) -> RunState | None:
        return self.log.tree.runs.get(self.run_id)

    @property
    def waits(self) -> bool:
        """True if it waits for a human."""
        return self.end.done() and self.state is not None and self.state.waits

    @property
    def inbox(self) -> Inbox:
        """The commands to this run."""
        if self._inbox is None:
            self._inbox = Inbox(self)
        return self._inbox

    @property
    def is_given_up(self) -> bool:
        """True if this process does not own its log any more."""
        return self.log.lost or (self.is_done and self.writer is not None)

    @property
    def is_at_work(self) -> bool:
        """True if a leg of it has begun here and has not ended, or tasks of it are at work."""
        return not self.is_done and ((self._is_begun and not self.end.done()) or bool(self.log.holders))

    def is_of_this_loop(self) -> bool:
        """Return whether the present event loop works on it, or may do so."""
        return self.end.done() or self._loop is asyncio.get_running_loop()

    # --- legs

    def start(self, when_busy: WhenBusy | None, problem: str | None = None, termination: str = "error") -> None:
        """Start a new run or, without `when_busy`, a run that another process has stored and not started.

        `problem` says which part of the request was not stored, or why no process can begin the run: it fails at once.
        """
        self._launch(self._first_leg(when_busy, problem, termination))

    def proceed(self, replies: tuple[Reply, ...] = ()) -> None:
        """Continue the run from its state."""
        self._launch(self._later_leg(replies))

    def break_off(self, reason: str) -> None:
        """Fail a run that no process can continue."""
        self._launch(self._fail(reason))

    def _launch(self, work: Coroutine[Any, Any, RunResult]) -> None:
        self._loop = asyncio.get_running_loop()
        if self.end.done():
            self.end = self._loop.create_future()
        self._is_settling = self._is_begun = False
        self._task = asyncio.create_task(self._conduct(work), name=self.run_id)

    async def _conduct(self, work: Coroutine[Any, Any, RunResult]) -> None:
        try:
            result = await work
            try:
                await self._settle(result)
            except asyncio.CancelledError:  # too late to cancel: the result must be stored
                await self._settle(result)
        except asyncio.CancelledError:
            if not self._is_settling:  # the event loop is ending: nothing can be stored any more
                self.end.cancel()
                self.is_done = True
                self._close(True)
        except OwnershipLost as exc:
            self.lose(exc)
        except Exception as exc:
            self._break_down(exc)

    async def _first_leg(self, when_busy: WhenBusy | None, problem: str | None, termination: str) -> RunResult:
        x, home, token = self.x, self.home, self.request.cancellation
        assert x is not None
        if home.owner is not None and problem is None:
            await self._take_thread(home.owner, when_busy)
        for run in self.before:
            await wait_for_first(run.left.wait(), token.wait())
        is_stopped = token.is_set() and bool(self.before or self.record.queued)
        thread, self.record.queued = None, False
        if not is_stopped:
            self._keeps_thread = problem is None
            thread = None if self.is_new_thread else await home.store.load_thread(x.identity.thread_id)
            if home.owner is None:
                await home.store.save_run(self.record)
            if self.request.wakes and not await _has_news(x, thread):
                token.set("what it was started to tell was told meanwhile")
                is_stopped = True
            if self.home.probation.is_active:
                await self._enter_probation()
                is_stopped |= token.is_set()
        self._is_begun = True
        home.backend.enter(x)
        begin_run(x, thread)
        if problem is not None and not is_stopped:
            return await self._fail(f"it cannot be continued: {problem}", termination)
        return stop_run(x) if is_stopped else await self._execute(x)

    async def _take_thread(self, owner: Owner, when_busy: WhenBusy | None) -> None:
        """Store a new run and take its thread when it is free; `when_busy` is None for a run that is stored already."""
        store, token = owner.store, self.request.cancellation
        if when_busy is not None:
            assert self.x is not None
            owner.register()
            request = encode_start(self.request, self.x.state.request)
            begun = store.begin_run(
                self.record, request, owner.id, owner.lease, when_busy, saved_at=self.thread_saved_at
            )
            if self.is_new_thread:
                # No other run can have a new thread, so do not wait: later writes are ordered after this one.
                self.spawn(self._store_start(begun, owner))
                return
            holder = await begun
            if holder is not None and when_busy == "reject":
                raise ThreadBusy(self.record.identity.thread_id, holder)
            self.begun.set_result(None)
            owner.add(self.run_id, self)  # only once it is stored, else a heartbeat would treat it as lost
            if holder is None:
                return
        elif not self.record.queued:
            return  # it has had its thread from the start
        self.record.queued = True
        owner.check_inboxes()
        while not token.is_set():
            with store.watch(self.record.identity.thread_id) as watch:
                if await store.take_thread(self.run_id) is None:
                    self.record.queued = False
                    return
                await wait_for_first(watch.wait(1.0), token.wait())

    async def _store_start(self, begun: asyncio.Future[str | None], owner: Owner) -> None:
        try:
            await begun
            self.begun.set_result(None)
            if not self.is_done:
                owner.add(self.run_id, self)
        except RetinueError as exc:
            self.begun.set_exception(exc)
            self.begun.exception()  # mark the exception as retrieved
            if self.writer is not None:
                self.writer.stop(exc)

    def _execute(self, x: Execution, *, resumed: bool = False) -> Coroutine[Any, Any, RunResult]:
        """Run the agent or, if the run is a placed call, make that call."""
        if (call := self.request.call) is not None:
            return execute_call(x, call, self.home.registry.agents.get(x.identity.agent, x.agent))
        return execute_run(x, lambda: self.spawn(self.cancel(OUT_OF_TIME)), resumed=resumed)

    async def _enter_probation(self) -> None:
        """Begin at once or, while processes of the store die, when it is the turn of this run."""
        if self.writer is None:
            return
        probation, token = self.home.probation, self.request.cancellation
        is_suspect = self.losses.count >= probation.suspect_from
        while not probation.may_begin(self.run_id, is_suspect=is_suspect) and not token.is_set():
            await wait_for_first(token.wait(), seconds=_LOOK_AGAIN)
        is_watched = probation.begin(self.run_id, self._steps, is_suspect=is_suspect)
        if probation.alone:
            await self.home.end_solitude()
        if is_watched and not self.home.has_others_at_work(self.run_id):
            probation.alone.add(self.run_id)
            await self.writer.settle(losses=replace(self.losses, is_alone=True))

    async def end_solitude(self) -> None:
        """Note that this run is alone in its process no more: another one is about to begin."""
        alone = self.home.probation.alone
        if self.run_id in alone and self.writer is not None:
            alone.discard(self.run_id)
            with contextlib.suppress(RetinueError):
                await self.writer.settle(losses=replace(self.losses, is_alone=False))

    def _steps(self) -> int:
        """Return the steps of the run and of everything under it."""
        return 0 if self.state is None else self.state.total_steps

    async def _later_leg(self, replies: tuple[Reply, ...]) -> RunResult:
        self._keeps_thread = True
        self.record.result = None
        if self.writer is not None:
            await self.writer.settle(runs=(self.record,), replies=replies)
        if self.losses.count or self.home.probation.is_active:
            await self._enter_probation()
        try:
            x = await self._open()
        except RetinueError as exc:
            return await self._fail(f"it cannot be continued: {exc}")
        self._is_begun = True
        return await self._execute(x, resumed=self.log.is_resumed)

    async def _open(self) -> Execution:
        """Set up a run that has a state, so that the loop can continue it."""
        state, backend = self.state, self.home.backend
        assert state is not None
        x = self.x = backend.open(self.request, self.log, state)
        backend.enter(x)
        if state.awaits_history:
            await backend.append_history(x)
        return x

    async def resume_tasks(self) -> None:
        """Continue only the background tasks under a run that has ended or is suspended."""
        state, known = self.state, self.record.result
        assert state is not None
        is_stored = known is not None and known.status is state.status  # else its process ended before it was
        if self.log.tree.has_open_tasks() or not is_stored:
            x = await self._open()
            await continue_tasks(x)
            self.home.backend.leave(x)
            if not is_stored:
                self._keeps_thread = True
                await self._settle(result_again(x), keep=True)
                return
        assert known is not None
        self.log.close()
        if state.is_over:
            self.left.set()
            self.may_wake = bool(self._waking_agents())
        self.end.set_result(known)
        self._is_settling = True
        if self._inbox is not None:
            self._inbox.go_on()

    # --- the end of a leg

    async def _settle(self, result: RunResult, *, keep: bool = False) -> None:
        """Store the end of the leg in one transaction, then set `end`. With `keep`, this process keeps the log."""
        self._is_settling = True
        ended, x = result.status.is_terminal, self.x
        threads: tuple[ThreadUpdate, ...] = ()
        keeps_thread = self._keeps_thread and (self.request.above is None or self.request.keeps_thread)
        if ended and keeps_thread and x is not None and x.state.leg:
            threads = (ThreadUpdate(x.thread(), x.state.own_from),)
        self.record.result, self.record.queued = result, False
        self.may_wake = ended and bool(self._waking_agents())
        await self.home.registry.stop_abandoned(self.log.tree)
        idle = not (self.log.holders or keep or self.may_wake)
        await self._store(idle, (self.record,), threads)
        self.is_done = idle and (ended or self.writer is not None)
        if not self.end.done():
            self.end.set_result(result)
        self._close(ended)
        if self.may_wake or not (self.log.holders or keep):  # the last task may have ended meanwhile
            self._task_ended()

    async def _store(
        self,
        idle: bool,
        runs: tuple[RunRecord, ...] = (),
        threads: tuple[ThreadUpdate, ...] = (),
        *,
        rests: bool = True,
    ) -> None:
        """Store these records and all rows. If nothing is at work any more (`idle`), release the log, for good if the run
        has ended; with `rests`, until a wish is put into its inbox."""
        if self.writer is None:
            for thread in threads:
                await self.home.store.save_thread(thread.record)
            for run in runs:
                await self.home.store.save_run(run)
            return
        ended = idle and (self.state is None or self.state.is_over)
        if idle:  # what the runs hold of budgets is void once the log is released
            await self.home.registry.budgets.counted()
        await self.writer.settle(
            runs=runs,
            threads=threads,
            replies=self.pop_replies(),
            left=self.log.left_threads(ended=ended),
            ended=ended,
            released=idle,
            rests=idle and rests,  # one write may also hand the log over
        )

    def _close(self, ended: bool) -> None:
        self.log.close()
        if self.x is not None:
            self.home.backend.leave(self.x)
        if ended:
            self.left.set()
        self.home.leg_ended(self)
        if self._inbox is not None:
            self._inbox.go_on()

    def _task_ended(self) -> None:
        """Release the log if the last background task has ended after the leg."""
        if self._is_settling and self.end.done() and not self.is_done and not self.log.lost:
            self._is_release_due = True
            self.spawn(self._release())

    async def _release(self) -> None:
        """Wake the conversation if needed, then release the log, unless the run or a task is still working."""
        if self.is_done or self.is_storing or not self.end.done() or (self.log.holders and not self.may_wake):
            return
        self._is_release_due = False
        ended = self.state is None or self.state.is_over
        self._releasing = asyncio.get_running_loop().create_future()
        try:
            may_end = not self.may_wake or await self._wake()
            if may_end and not (self.log.holders or self._is_release_due or self.log.lost):
                with contextlib.suppress(RetinueError):
                    await self._store(True)
                self.is_done, self.may_wake = self.writer is not None or ended, False
            self.home.leg_ended(self)
        finally:
            self._releasing.set_result(None)
            self._releasing = None
            if self._inbox is not None:
                self._inbox.go_on()
        if self._is_release_due:  # another task has ended meanwhile
            await self._release()

    async def release_if_idle(self) -> None:
        """Release a log that was claimed only to carry out a wish."""
        busy = set(self._jobs) - {asyncio.current_task()}  # the present one carries out a wish
        if self._is_settling and not busy and self.state is not None:
            await self._release()

    @property
    def is_storing(self) -> bool:
        """True while the end of a leg or the release of the log is being stored: no process can continue it yet."""
        return self._releasing is not None or (self._is_settling and not self.end.done())

    async def stored(self) -> None:
        """Wait until `is_storing` is false."""
        while self.is_storing:
            await join([self._releasing or self.end])

    async def _fail(self, reason: str, termination: str = "error") -> RunResult:
        """End a run that cannot be continued, and everything under it."""
        _log.error("run %s: %s", self.run_id, reason)
        state = self.state
        assert state is not None
        for child in self.log.tree.children_of(state):
            if not child.is_over:
                close_run(self.log, child, Ending(RunStatus.CANCELLED, "cancelled", reason))
        close_run(self.log, state, Ending(RunStatus.FAILED, termination, reason))
        return self.log.results[self.run_id]

    def close_lost(self, reason: str) -> None:
        """End what is at work in a log that is continued no more. What waits for a human stays, and tasks end with their
        runs."""
        _log.error("run %s: %s", self.run_id, reason)
        tree, ending = self.log.tree, Ending(RunStatus.FAILED, WORKER_LOST, reason)
        for state in list(tree.runs.values())[::-1]:  # the deepest first
            if state.status is RunStatus.RUNNING:
                self.log.append(state, ErrorRaised(message=reason, code=WORKER_LOST, fatal=True))
                close_run(self.log, state, ending)

    def _break_down(self, exc: Exception) -> None:
        """Pass an exception that escaped from the run to everything that waits for it."""
        self._set_exception(exc)
        self.is_done = True
        if not isinstance(exc, ThreadBusy):
            _log.error("run %s broke down: %s", self.run_id, exc)
            if self.x is not None and self.x.result is not None:
                return self.spawn(self._store_broken(self.x.result))
        self._close(True)

    def _set_exception(self, exc: Exception) -> None:
        if not self.end.done():
            self.end.set_exception(exc)
            self.end.exception()  # mark the exception as retrieved

    async def _store_broken(self, result: RunResult) -> None:
        """Store the end of a run from which an exception escaped, so that its thread is released."""
        self.record.result = result
        with contextlib.suppress(RetinueError):
            await self._store(True, (self.record,))
        self._close(True)

    def lose(self, exc: Exception | None = None) -> None:
        """Drop the run and write nothing more about it: another process owns the log."""
        if self.log.lost:
            return
        self.log.drop()
        lost = exc or OwnershipLost("", self.run_id)
        if self.writer is not None:
            self.writer.stop(lost)
        self._set_exception(lost)
        for x in list(self.log.executions.values()):
            x.cancellation.set("another process continues this run")
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.is_done = True
        self._close(True)

    # --- waking: a run for background tasks that ended when no run was there to report them
    #
    # Invariant: ended tasks are looked up after a task's record has ended, and after the last run has left the thread. So
    # the later lookup finds the task. The log ends only after that: if its process dies first, the next owner looks again.
    # The id of the new run is derived from the task, so it is started once.

    def _waking_agents(self) -> list[Agent]:
        """Return the agents of this run that want to be woken."""
        state, known, own = self.state, self.home.registry.agents, self.request.agent
        if state is None or self.request.above is not None:  # the parent reports the tasks of a placed child
            return []
        if not state.handoffs:
            return [own] if own.is_woken else []
        names = dict.fromkeys((state.first_agent, *state.handoffs))
        agents = [own if name == own.name else known.get(name) for name in names]
        return [agent for agent in agents if agent is not None and agent.is_woken]

    async def _wake(self) -> bool:
        """Start a run for each agent that has unreported ended tasks. Return False if that must wait."""
        try:
            done = [await self._wake_agent(agent) for agent in self._waking_agents()]
            return all(done)
        except OwnershipLost:
            raise
        except RetinueError as exc:
            _log.error("run %s: its conversation cannot be woken, and learns of its tasks later: %s", self.run_id, exc)
        return True

    async def _wake_agent(self, agent: Agent) -> bool:
        home, identity = self.home, self.record.identity
        store, thread_id = home.store, identity.thread_id
        of_agent = RunIdentity(self.run_id, thread_id, agent.name, user_id=identity.user_id)
        while True:
            saved_at = None if home.owner is None else await home.owner.store.saved_at(thread_id)
            thread = await store.load_thread(thread_id)
            tasks = await agent.ended_tasks(of_agent, {} if thread is None else thread.state.extensions)
            ids = [wake_id(task_id) for task_id in tasks]
            new = [run_id for run_id in ids if home.get(run_id) is None and await store.load_run(run_id) is None]
            if not new:
                return True
            if home.is_closing and home.dispatcher is None:
                return False
            if home.owner is None and _length(await store.load_thread(thread_id)) != _length(thread):
                continue  # another run has ended on the thread meanwhile; a database checks that itself
            if await self._start_waking(agent, new[0], saved_at):  # one run reports all tasks
                return True

    async def _start_waking(self, agent: Agent, run_id: str, saved_at: float | None) -> bool:
        """Start a run on the thread of this one; return False if another run has ended on the thread since `saved_at`.

        If a run of the same agent has the thread, that run reports the tasks itself.
        """
        try:
            await self._begin_waking(agent, run_id, "reject", saved_at)
        except ThreadBusy as exc:
            if not exc.run_id:
                return False
            holder = await self.home.store.load_run(exc.run_id)
            if holder is not None and holder.identity.agent != agent.name:
                await self._begin_waking(agent, run_id, "enqueue", None)
        return True

    async def _begin_waking(self, agent: Agent, run_id: str, when_busy: WhenBusy, saved_at: float | None) -> None:
        """Store the new run, and start it here unless an engine does that."""
        identity, dispatcher = self.record.identity, self.home.dispatcher
        request = RunRequest(
            agent=agent,
            identity=RunIdentity(run_id, identity.thread_id, agent.name, user_id=identity.user_id),
            messages=(),
            limits=self.request.limits,
            cancellation=CancellationToken(),
            context=self.request.context,
            model=self.request.model,
            wakes=True,
        )
        if dispatcher is None:
            await self.home.start(request, (), when_busy, new_thread=False, saved_at=saved_at).stored()
        else:
            await dispatcher.begin_placed(request, await dispatcher.placement_of(self.run_id), when_busy, saved_at)

    # --- answers, input and cancels

    def is_queueing(self, decisions: Mapping[str, Decision]) -> bool:
        """Return whether decisions must wait for the end of the present leg, because it does not touch their calls."""
        state = self.state
        if self.end.done() or state is None:
            return False
        return waits_for(self.log.tree, state, decisions)

    def accept(self, decisions: Mapping[str, Decision], replies: tuple[Reply, ...] = ()) -> bool:
        """Start a leg with decisions; return False if they were accepted before. Raises DecisionRefused."""
        state = self.state
        if state is None:
            raise DecisionRefused(f"run {self.run_id!r} has not begun yet, it waits for nothing")
        answers = match_decisions(self.log.tree, state, decisions)
        if not answers:
            return False
        self.begin_leg(tuple(answers), replies)
        return True

    def begin_leg(self, answers: tuple[Answer, ...] = (), replies: tuple[Reply, ...] = ()) -> None:
        """Start a leg of the run, which waits: with decisions, or because a run that it waits for has ended."""
        assert self.state is not None
        self.log.ended = False
        self.first = self.log.tree.seq
        start_leg(self.log, self.state, answers)
        self.is_done, self.record.result = False, None
        self.proceed(replies)

    def receive(self, wish: Wish) -> None:
        """Carry out a wish from the inbox."""
        self.inbox.deliver(wish)

    def pop_replies(self) -> tuple[Reply, ...]:
        """Return and clear the replies that are still to be stored."""
        replies, self.replies = tuple(self.replies), []
        return replies

    def cancel(self, reason: str, grace: float = GRACE) -> Coroutine[Any, Any, RunResult]:
        """Stop the run and the work it waits for, now. Return what waits for its end, and abandons work that does not stop
        in time."""
        state, task = self.state, self._task
        is_claimed_for_this = task is None and state is not None and not state.is_over
        if self.waits or is_claimed_for_this:
            return self._give_up(reason)
        if not self.end.done():
            if self.home.owner is not None and not self.request.cancellation.is_set():
                self.inbox.store_cancel(self.home.owner.store, Cancel(reason=reason, grace=grace))
            self.request.cancellation.set(reason)
            # A loop that has not started checks the token itself; one that has ended needs no cancel.
            if self._is_begun and not self._is_settling and task is not None:
                task.cancel(reason)
        return self._stopped(task, grace)

    async def _stopped(self, task: asyncio.Task[None] | None, grace: float) -> RunResult:
        """Return the result of a run that was told to stop."""
        if not self.end.done():
            if task is not None:
                await join([task], grace)
            if not self.end.done() and not self._is_settling and self.x is not None:
                await self._leave_behind(self.x)
        return await asyncio.shield(self.end)

    async def _give_up(self, reason: str) -> RunResult:
        """End a run that has no leg at work as cancelled."""
        state = self.state
        assert state is not None
        self.log.ended = False
        self.request.cancellation.set(reason)
        if self.end.done():
            self.end = asyncio.get_running_loop().create_future()
        self._keeps_thread, self.first = True, self.log.tree.seq
        try:
            await self._open()
        except RetinueError:  # its agent is unknown here, or has changed: end it anyway
            self.x = None
        await self.home.registry.stop_waiting(self.log.tree, reason)
        close_run(self.log, state, Ending(RunStatus.CANCELLED, "cancelled", reason))
        await self._settle(self.log.results[self.run_id])
        return await asyncio.shield(self.end)

    async def _leave_behind(self, x: Execution) -> None:
        """End a run that does not stop, or that waits for its start."""
        if x.state.leg:
            close_run(self.log, x.state, stopped(x))
        elif self._task is not None:
            self._task.cancel()
        await self._settle(x.result or result_of(self.log, x.state, stopped(x), x.state.response()))

    async def cancel_tasks(self) -> None:
        """Stop the background tasks that were started under this run, also those that become known meanwhile."""
        holders, asked = self.log.holders, set[str]()
        self.log.are_tasks_cancelled = True
        while new := holders.keys() - asked:
            asked |= new
            await asyncio.gather(*[holders[task_id]("cancelled") for task_id in new])

    # --- jobs and closing

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        self._jobs.start(work)

    def _report_failure(self, problem: BaseException) -> None:
        if not isinstance(problem, OwnershipLost):
            _log.error("run %s: %s", self.run_id, problem, exc_info=problem)

    def drop_parts(self) -> None:
        """Drop the objects that only a running leg needs, and reference cycles that delay freeing them."""
        self.log.on_release, self.x = None, None
        if self.writer is not None:
            self.writer.on_lost = self.writer.on_stored = None

    async def leave(self, grace: float) -> None:
        """Begin nothing more, let what runs finish for `grace` seconds, and hand the run over as soon as nothing runs."""
        log = self.log
        log.is_leaving = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while not self.is_done and not is_idle(log):
                    await log.changed()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stored(), GRACE)  # a run that has just ended is not handed over
        if not self.is_done:
            self.home.background.leave({self.run_id})
            await self.hand_over()

    async def hand_over(self) -> None:
        """Store all rows so far, stop, and release the log for the next owner, with its open tasks."""
        if self.writer is not None and not self.writer.is_released:
            with contextlib.suppress(RetinueError, TimeoutError):
                await asyncio.wait_for(self.writer.settle(released=True), GRACE)
        self.lose()

    async def put_down(self) -> None:
        """Store the remaining rows and release the log, because the runtime closes."""
        while self._jobs:
            await join(self._jobs)
        state = self.state
        if self.writer is None or self.writer.is_released or self.log.lost or state is None:
            return
        with contextlib.suppress(RetinueError):
            if self.log.tree.has_open_tasks() or self.may_wake:  # the next owner continues them
                await self.writer.settle(replies=self.pop_replies(), released=True)
            else:
                await self._store(True, rests=state.waits)
        self.is_done = True
