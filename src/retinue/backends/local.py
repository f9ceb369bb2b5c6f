"""The local backend: sets up runs in this process, and starts, finds, continues and ends child runs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ..core.agents import Agent, Toolbox
from ..core.backend import BackendProfile, Resolver, RunRequest
from ..core.concurrency import GRACE, CancellationToken, CancelScope, Cause, Jobs, cancel_all, join, supervise
from ..core.content import to_json_bytes
from ..core.context import OUT_OF_TIME, TIMED_OUT
from ..core.errors import ExecutionBackendError, LimitReached, RetinueError
from ..core.events import ChildFinished, ChildStarted, MessagesSnapshot, Namespace, Sink
from ..core.messages import Role
from ..core.rows import Ending, Private
from ..core.runs import RunResult, RunStatus
from ..core.stores import RunRecord, Store, ThreadRecord, ThreadUpdate
from ..log.owned import LiveLog
from ..log.state import ChildRef, RunState
from ..loop.budget import child_refusal, refuse_child, time_left
from ..loop.execution import Blueprint, Execution, close_run, start_leg
from ..loop.grants import widen_for_child
from ..loop.run import begin_run, execute_run, result_again, stopped

DESCRIPTION = 2_000
"""Characters of a child's task in the event of its start."""
_LEAST_SECONDS = 1.0
"""The least number of seconds for a run that continues after its time is up."""


class LocalBackend:
    """The backend for agents that run here. Agents and models come from outside."""

    def __init__(self, resolver: Resolver, store: Store, sinks: Iterable[Sink], clock: Callable[[], float]) -> None:
        self._resolver, self.store, self._clock = resolver, store, clock
        self.sinks = tuple(sinks)
        self.run_alone = self.start_alone  # a runtime replaces it, to store runs without lineage as its own
        self._executions: dict[str, Execution] = {}
        self._tasks: dict[str, asyncio.Task[RunResult]] = {}
        """The children that run in asyncio tasks of their own."""
        self._scopes: dict[str, CancelScope] = {}
        """The children that run in the asyncio tasks of their calls."""
        self.elsewhere: dict[str, tuple[CancellationToken, Callable[[], None] | None]] = {}
        """The tokens of children that another backend executes, and functions that let them outlive their calls."""
        self.rests = Jobs("following the background tasks of an ended run failed")
        """They follow the background tasks that ended runs have on other servers and workers."""
        self._held: dict[str, int] = {}
        """Runs that may have children after their end, with the number of background tasks that hold each."""
        self._blueprints: WeakKeyDictionary[Agent, Blueprint] = WeakKeyDictionary()

    def profile(self) -> BackendProfile:
        return BackendProfile.full_local()

    def _blueprint(self, agent: Agent) -> Blueprint:
        if (made := self._blueprints.get(agent)) is None:
            made = self._blueprints[agent] = Blueprint(agent, self._resolver)
        return made

    def toolbox_of(self, agent: Agent) -> Toolbox:
        """Return all tools of an agent, also those of its plugins."""
        return self._blueprint(agent).toolbox

    def open(self, request: RunRequest, log: LiveLog, state: RunState | None = None) -> Execution:
        """Set up a root run: a new one or, with `state`, one to continue. Raises if it cannot be set up."""
        if self._resolver.overrides:
            request.override = self._resolver.overrides[-1]
        blueprint = self._blueprint(request.agent)
        if state is not None:
            return blueprint.continued_run(request, state, log)
        x = blueprint.new_run(request, log)
        if request.override is None and not blueprint.is_checked:
            self._resolver.check_subagents(request.agent)
            blueprint.is_checked = True
        return x

    def enter(self, x: Execution) -> None:
        """Register a run at work, so that it can have children."""
        self._executions[x.run_id] = x.log.executions[x.run_id] = x
        x.halt = self._halt

    def leave(self, x: Execution) -> None:
        """Forget a run whose leg has ended, unless background tasks may still start children of it."""
        if x.run_id not in self._held:
            self._executions.pop(x.run_id, None)
            x.log.executions.pop(x.run_id, None)

    def execution_of(self, run_id: str) -> Execution | None:
        return self._executions.get(run_id)

    def hold(self, run_id: str) -> Execution | None:
        """Keep a run at work registered until `release`, so that it can have children even after its end."""
        x = self._executions.get(run_id)
        if x is not None:
            self._held[run_id] = self._held.get(run_id, 0) + 1
        return x

    def release(self, run_id: str) -> None:
        self._held[run_id] -= 1
        if not self._held[run_id]:
            del self._held[run_id]
            if (x := self._executions.get(run_id)) is not None and x.is_over:
                self.leave(x)

    async def refuse_child(self, run_id: str) -> tuple[str, int] | None:
        """Return the name and value of the limit that forbids a child of a run; None if it is allowed."""
        x = self._executions.get(run_id)
        if x is None:
            return None
        await widen_for_child(x)
        return refuse_child(x.log.tree, x.state, x.log.dispatching)

    async def close(self, grace: float) -> None:
        """Stop the children whose parents have ended."""
        calls = [scope.task for scope in self._scopes.values()]
        await cancel_all([*self._tasks.values(), *calls, *self.rests], grace)

    async def abort(self, run_id: str, reason: str = "aborted") -> None:
        """Stop one child that works here; its call gets a cancelled result and continues."""
        if (x := self._executions.get(run_id)) is not None:
            await self.stop(x.log, run_id, reason)

    async def stop(self, log: LiveLog, run_id: str, reason: str) -> None:
        """Stop one child of a log, here or elsewhere, now or as soon as it begins; its call gets a cancelled result."""
        if run_id in self.elsewhere:
            self.elsewhere[run_id][0].set(reason)
            return
        x, task = self._executions.get(run_id), self._tasks.get(run_id)
        if x is None or (task is None and run_id not in self._scopes):
            log.stops = {**log.stops, run_id: reason}
            return
        x.cancellation.set(reason)
        self._halt(run_id)
        if task is not None:
            await join([task], GRACE)

    def begin_elsewhere(
        self, run_id: str, token: CancellationToken, detach: Callable[[], None] | None, log: LiveLog | None
    ) -> None:
        """Note a child that another backend executes, to stop it through its token."""
        self.elsewhere[run_id] = (token, detach)
        if log is not None:
            self.stop_if_told(log, run_id, token)

    def stop_if_told(self, log: LiveLog, run_id: str, token: CancellationToken) -> None:
        """Stop a child that begins, if it was cancelled before."""
        if (reason := log.stops.get(run_id)) is not None:
            log.stops = {name: why for name, why in log.stops.items() if name != run_id}
            token.set(reason)
            asyncio.get_running_loop().call_soon(self._halt, run_id)

    def _halt(self, run_id: str) -> None:
        """Cancel the work of a child, not of its call; the code that awaits the child gets its result."""
        work = self._tasks.get(run_id) or self._scopes.get(run_id)
        if work is not None:
            work.cancel()

    def run(self, request: RunRequest) -> Coroutine[Any, Any, RunResult]:
        """Run a child, or a run without lineage. A mistake raises before anything happens."""
        identity = request.identity
        if identity.parent_run_id is None:
            return self.run_alone(request)
        parent = self._executions.get(identity.parent_run_id)
        if parent is None:
            raise ExecutionBackendError(identity.agent, "the run that asks for it has ended")
        inherit(parent, request)
        ref = self.find(parent, request)
        state = None if ref is None else parent.log.tree.runs.get(ref.run_id)
        if state is not None:
            return self._continue(request, parent, state)
        if request.keeps_thread or parent.log.widen is not None:
            return self._start_later(request, parent, ref)
        return self._start(request, parent, ref, None)

    # --- finding a child that was started before

    def find(self, parent: Execution, request: RunRequest) -> ChildRef | None:
        """Return the child that was started before with this id or else with the same request; None if there is none.

        The request then gets the run id of that child, which may not have started yet."""
        identity = request.identity
        if (known := parent.state.children.get(identity.run_id)) is not None:
            return known
        call_id = identity.parent_tool_call_id or ""
        call = parent.state.calls.get(call_id)
        if call is None or not call.children:
            return None
        asked_again = parent.asked_again.get(call_id, ())
        asked = _asked_for(request, stored=parent.is_stored)
        for number, ref in call.children.items():
            if not ref.abandoned and number not in asked_again and ref.asked == asked:
                parent.asked_again.setdefault(call_id, set()).add(number)
                request.identity = replace(identity, run_id=ref.run_id)
                return ref
        return None

    def announce(self, parent: Execution, request: RunRequest, *, reserve: bool = False) -> ChildRef:
        """Append `child_started`; with `reserve`, store only the id of the child and its number under the call."""
        identity, state = request.identity, parent.state
        known = state.children.get(identity.run_id)
        if known is not None and (known.is_announced or reserve):
            return known
        call_id = identity.parent_tool_call_id or ""
        number = state.child_counts.get(call_id, 0) + 1 if known is None else known.number
        ns = (*state.ns, f"tools:{call_id}" if number == 1 else f"tools:{call_id}~{number}")
        started = _child_started(request, ns)
        asked = _asked_for(request, stored=parent.is_stored)
        if parent.is_over or reserve:
            row = Private(kind="commit", run_id=state.run_id, child=started, asked=asked, reserved=reserve)
            parent.log.append_private(row)
        else:
            parent.emit(started, Private(asked=asked))
        parent.asked_again.setdefault(call_id, set()).add(number)
        ref = state.children.get(identity.run_id)
        return ref or ChildRef(number, identity.run_id, identity.agent, ns, asked)

    # --- starting one

    async def start_alone(self, request: RunRequest) -> RunResult:
        given, request.cancellation = request.cancellation, CancellationToken()
        try:
            x = self.open(request, LiveLog(self.sinks, clock=self._clock))
        except RetinueError as exc:
            raise ExecutionBackendError(request.agent.name, str(exc)) from exc
        self.enter(x)
        return await self._conduct(x, self._leg(x, None), given)

    async def _start_later(self, request: RunRequest, parent: Execution, ref: ChildRef | None) -> RunResult:
        """Read the child's thread, ask for a larger grant if one is needed for another child, then start it."""
        thread = await held_thread(self.store, request, parent.log)
        try:
            if ref is None:
                await widen_for_child(parent)
            started = self._start(request, parent, ref, thread)
        except BaseException:
            parent.log.leave_thread(request.identity)
            raise
        return await started

    def _start(
        self, request: RunRequest, parent: Execution, ref: ChildRef | None, thread: ThreadRecord | None
    ) -> Coroutine[Any, Any, RunResult]:
        if ref is None:
            check_child(parent, request)
        given, request.cancellation = request.cancellation, CancellationToken()
        ns = (*parent.state.ns, "") if ref is None else ref.ns
        try:
            x = self._blueprint(request.agent).new_run(request, parent.log, parent, ns)
        except RetinueError as exc:
            raise ExecutionBackendError(request.agent.name, str(exc)) from exc
        if ref is None:
            x.state.ns = self.announce(parent, request).ns
        self.enter(x)
        return self._as_child(x, parent, self._leg(x, thread), given)

    async def _leg(self, x: Execution, thread: ThreadRecord | None) -> RunResult:
        """Run one leg of a child from its present state."""
        request, log = x.request, x.log
        if request.sink is not None:
            log.listen(x.run_id, request.sink)
        if x.state.leg:
            await hold_thread(request, log)
        if x.state.leg == 0:
            begin_run(x, thread)
        elif x.state.waits:
            start_leg(log, x.state)
        elif x.state.awaits_history:
            await self.append_history(x)
        result = await execute_run(x, resumed=log.is_resumed)
        if request.keeps_thread or request.detached:
            await self._save(x, result)
        return result

    async def append_history(self, x: Execution) -> None:
        """Append the conversation that a run continues: its process died before it could."""
        thread = await self.store.load_thread(x.identity.thread_id)
        x.emit(MessagesSnapshot(messages=() if thread is None else thread.messages))

    def _save(self, x: Execution, result: RunResult) -> Coroutine[Any, Any, None]:
        thread = x.thread() if x.request.keeps_thread and result.status.is_terminal else None
        return self.save_child(x.request, x.log, x.state, result, thread, x.state.own_from)

    async def save_child(
        self,
        request: RunRequest,
        log: LiveLog,
        state: RunState,
        result: RunResult,
        thread: ThreadRecord | None,
        kept: int,
    ) -> None:
        """Store the conversation of a child that keeps one, and the status of a detached one.

        `kept` is the number of messages that the conversation had before.
        """
        writer = log.writer
        log_id = next(iter(log.tree.runs)) if writer is None else writer.log_id
        record = RunRecord(identity=state.identity, started_at=state.since, result=result, log_id=log_id)
        if writer is None:
            if thread is not None:
                await self.store.save_thread(thread)
            if request.detached and not hasattr(self.store, "begin_run"):  # else its log could not be found
                await self.store.save_run(record)
        elif thread is not None or request.detached:
            threads, left = ((), ()) if thread is None else ((ThreadUpdate(thread, kept),), (thread.thread_id,))
            await writer.settle(runs=(record,) if request.detached else (), threads=threads, left=left)

    def detach(self, run_id: str) -> None:
        """Let a child outlive its call."""
        if run_id in self.elsewhere and (detach := self.elsewhere[run_id][1]) is not None:
            detach()
        if (x := self._executions.get(run_id)) is not None and not x.request.detached:
            x.request.detached = True
            x.log.append_private(Private(kind="commit", run_id=run_id, detached=True))

    def _continue(self, request: RunRequest, parent: Execution, state: RunState) -> Coroutine[Any, Any, RunResult]:
        """Continue a child that was started before, and return its result."""
        given, request.cancellation = request.cancellation, CancellationToken()
        request.identity, log = state.identity, parent.log
        request.detached |= state.request.detached
        try:
            x = self._blueprint(request.agent).continued_run(request, state, log, parent)
        except RetinueError as exc:
            raise ExecutionBackendError(request.agent.name, str(exc)) from exc
        _restore_text(request.sink, state)
        if state.is_over or (state.waits and not state.pending):
            return self._result_again(x, parent)
        self.enter(x)
        return self._as_child(x, parent, self._leg(x, None), given)

    async def give_up(self, parent: Execution, agent: Agent, run_id: str, reason: str) -> RunResult:
        """End a suspended child whose answer will not come. Its conversation is kept."""
        state = parent.log.tree.runs[run_id]
        token = CancellationToken()
        request = RunRequest(
            agent=agent,
            identity=state.identity,
            messages=(),
            cancellation=token,
            keeps_thread=state.request.keeps_thread,
            detached=True,
        )
        x = self._blueprint(agent).continued_run(request, state, parent.log, parent)
        self.enter(x)
        token.set(reason)
        try:
            result = _give_up(x)
            await self._save(x, result)
        finally:
            self.leave(x)
        append_child_finished(parent, x.state, result)
        return result

    async def _result_again(self, x: Execution, parent: Execution) -> RunResult:
        result = x.log.results.get(x.run_id) or result_again(x)
        ref = parent.state.children.get(x.run_id)
        if x.state.waits and x.request.detached:
            await self._save(x, result)  # its process may have died before it stored the suspension
        if x.state.is_over and ref is not None and not ref.ended:
            on_thread = [run for run in x.log.tree.runs.values() if run.identity.thread_id == x.identity.thread_id]
            if on_thread[-1] is x.state:  # its process may have died before it stored the conversation
                await self._save(x, result)
            append_child_finished(parent, x.state, result)
        return result

    # --- running one

    async def _as_child(
        self, x: Execution, parent: Execution, work: Coroutine[Any, Any, RunResult], given: CancellationToken
    ) -> RunResult:
        """Run a child for a call, after releasing the call's slot; emit `child_finished` at the end."""
        try:
            if x.request.detached:
                return await self._conduct(x, work, given)
            parent.give_slot_back(x.identity.parent_tool_call_id or "")
            if given is not parent.cancellation or _time_left(x) is not None:
                return await self._conduct(x, work, given)
            return await self._run_in_call(x, work, given)
        finally:
            # Also if the call was cancelled, because the child has ended.
            if x.result is not None:
                append_child_finished(parent, x.state, x.result)

    async def _run_in_call(
        self, x: Execution, work: Coroutine[Any, Any, RunResult], given: CancellationToken
    ) -> RunResult:
        """Run a child in the asyncio task of its call: both are cancelled together. A task of its own would cost a third
        more with 1,000 children."""
        scope, pass_on = CancelScope(), given.pass_on_to(x.cancellation)
        self._scopes[x.run_id] = scope
        if x.log.stops:
            self.stop_if_told(x.log, x.run_id, x.cancellation)
        try:
            with scope:
                return await work
            return _give_up(x)  # only the child was aborted, not the call
        finally:
            given.forget(pass_on)
            del self._scopes[x.run_id]
            self.leave(x)

    async def _conduct(self, x: Execution, work: Coroutine[Any, Any, RunResult], given: CancellationToken) -> RunResult:
        """Run a child in its own asyncio task, so that it can be cancelled without its parent. Without a time limit it is
        waited for until it stops: the grace of its root counts."""
        run_id, loop = x.run_id, asyncio.get_running_loop()
        seconds, late = _time_left(x) or (None, "")
        task = self._tasks[run_id] = loop.create_task(work, name=run_id)  # `stop` finds it by its run
        if x.log.stops:
            self.stop_if_told(x.log, run_id, x.cancellation)

        def stop() -> None:
            x.cancellation.set(given.reason or "cancelled")
            loop.call_soon_threadsafe(task.cancel)

        def end_late(_: asyncio.Task[RunResult], cause: Cause) -> None:
            if cause == "deadline":
                x.cancellation.set(late)
            task.cancel()

        try:
            with given.calling(stop):
                grace = None if seconds is None else GRACE
                end = await supervise(task, deadline=seconds, grace=grace, stop=end_late)
            if end.has_no_outcome:
                return _give_up(x)
            if end.error is not None and x.state.leg:  # it has begun, and failed before its loop
                _give_up(x, Ending(RunStatus.FAILED, "error", str(end.error)))
            return end.result()
        except asyncio.CancelledError:
            if not x.log.lost:  # it may have been cancelled before it began, with its call
                _give_up(x)
            raise
        finally:
            del self._tasks[run_id]
            self.leave(x)


async def hold_thread(request: RunRequest, log: LiveLog) -> None:
    """Hold the thread of a child in the store, unless its log holds it already.

    Invariant: a thread has one run at a time, across processes. The store holds the thread for the child's log from
    before it is read until it is saved, also while the child waits for a human. The next owner of the log inherits the
    hold. So no run can overwrite a conversation that another run has changed meanwhile.
    """
    identity, held = request.identity, log.held_threads
    if not request.keeps_thread or log.writer is None or held.get(identity.thread_id) == identity.run_id:
        return
    held[identity.thread_id] = identity.run_id  # before the hold: a leg that ends meanwhile must not release it
    holder = await log.writer.hold_thread(identity.thread_id, identity.user_id)
    if holder is not None:
        del held[identity.thread_id]
        raise ExecutionBackendError(request.agent.name, f"its conversation is busy, in run {holder!r}")


async def held_thread(store: Store, request: RunRequest, log: LiveLog) -> ThreadRecord | None:
    """Hold the thread that a child continues, and return it; None if it has none."""
    if not request.keeps_thread:
        return None
    await hold_thread(request, log)
    return await store.load_thread(request.identity.thread_id)


def _restore_text(sink: Sink | None, state: RunState) -> None:
    """Replay the earlier text of a child to its sink, when the child is found again."""
    restore_text = getattr(sink, "restore_text", None)
    if restore_text is None:
        return
    for message in state.messages[state.own_from :]:
        if message.role is Role.ASSISTANT and message.text:
            restore_text(message.text)


def _child_started(request: RunRequest, ns: Namespace) -> ChildStarted:
    """Return the event of a child's start. It describes what the child is asked: its last user message, or the beginning."""
    identity = request.identity
    said = ""
    for message in reversed(request.messages):
        if message.role is Role.USER:
            said = message.text
            break
    return ChildStarted(
        call_id=identity.parent_tool_call_id or "",
        child_run_id=identity.run_id,
        child_agent=identity.agent,
        child_ns=ns,
        description=said if len(said) <= DESCRIPTION else f"{said[: DESCRIPTION - 1]}…",
    )


def _asked_for(request: RunRequest, *, stored: bool) -> Any:
    """Return the key that distinguishes the children of one call: agent, messages and seed."""
    said = tuple([(message.role, message.parts) for message in request.messages])
    asked = request.identity.agent, said, request.seed.extensions
    return hashlib.blake2b(to_json_bytes(asked), digest_size=8).hexdigest() if stored else asked


def check_child(parent: Execution, request: RunRequest) -> None:
    """Raise LimitReached if a limit forbids a child."""
    refusal = refuse_child(parent.log.tree, parent.state, parent.log.dispatching)
    if refusal is not None:
        raise LimitReached(request.agent.name, refusal[0], child_refusal(*refusal))


def inherit(parent: Execution, request: RunRequest) -> None:
    """Fill in the depth, user, parent thread and context that a child gets from its parent."""
    own, above = request.identity, parent.identity
    depth, user_id = above.depth + 1, own.user_id or above.user_id
    if own.depth != depth or own.user_id != user_id or own.parent_thread_id is None:
        thread_id = own.parent_thread_id or above.thread_id
        request.identity = replace(own, depth=depth, user_id=user_id, parent_thread_id=thread_id)
    request.context = request.context or parent.request.context


def seconds_left(timeout: float | None, state: RunState | None) -> float | None:
    if timeout is None or state is None or not state.worked:
        return timeout
    return max(timeout - state.worked, _LEAST_SECONDS)


def _time_left(x: Execution) -> tuple[float, str] | None:
    """Return the seconds that a child may still work, and the reason code when they are over; None if unlimited."""
    timeout = seconds_left(x.request.timeout, x.state)
    limit = time_left(x.log.tree, x.state, x.now()) if x.is_limited else None
    if limit is not None and (timeout is None or limit < timeout):
        return limit, OUT_OF_TIME
    return None if timeout is None else (timeout, TIMED_OUT)


def _give_up(x: Execution, ending: Ending | None = None) -> RunResult:
    """End a child whose work has no result, with all runs under it; return the child's result. By default it was stopped.

    The child must be registered: a run that is unknown here is closed without its execution."""
    if x.result is None:
        if x.state.leg == 0:
            begin_run(x, None)
        close_run(x.log, x.state, ending or stopped(x))
    assert x.result is not None
    return x.result


def append_child_finished(parent: Execution, child: RunState, result: RunResult) -> None:
    identity = child.identity
    if result.status.is_terminal:
        parent.log.leave_thread(identity)
    ref = parent.state.children.get(identity.run_id)
    if ref is not None and ref.ended:
        return
    parent.emit(
        ChildFinished(
            call_id=identity.parent_tool_call_id or "",
            child_run_id=identity.run_id,
            child_agent=identity.agent,
            status=result.status,
        )
    )
