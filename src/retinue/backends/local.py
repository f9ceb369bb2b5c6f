"""Runs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import BackendProfile, Resolver, RunRequest
from ..core.context import GRACE, TIMED_OUT, CancellationToken
from ..core.decisions import Decision
from ..core.errors import ExecutionBackendError, LimitReached, RetinueError
from ..core.events import ChildStarted, Namespace, Sink
from ..core.journal import Journal
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..core.stores import Store, ThreadRecord
from ..loop import children
from ..loop.children import (
    child_ns,
    enter_child,
    find_again,
    give_slot_back,
    next_number,
    same_child,
    tell_child_finished,
)
from ..loop.limits import child_refusal
from ..loop.log import EventLog
from ..loop.scope import RunScope
from .local_run import Blueprint, LocalRun

Work = Callable[[], Coroutine[Any, Any, RunResult]]


class LocalBackend:
    """The backend for agents that run here. Agents, models and journals come from outside."""

    def __init__(
        self, resolver: Resolver, make_journal: Callable[[], Journal], store: Store, sinks: Iterable[Sink] = ()
    ) -> None:
        self._resolver, self._make_journal, self._store = resolver, make_journal, store
        self.sinks = tuple(sinks)
        """Hear also of runs without lineage, which have logs of their own."""
        self._scopes: dict[str, RunScope] = {}
        self._tasks: dict[str, asyncio.Task[RunResult]] = {}
        self._hosts: dict[str, asyncio.Task[Any]] = {}
        """The tasks of calls in which children run alongside."""
        self._kept: dict[str, LocalRun] = {}
        """Children that keep their threads, while they work or, detached, wait for a human."""
        self._held: dict[str, int] = {}
        """Runs that may have children after their end, and how many tasks want that."""
        self._blueprints: WeakKeyDictionary[Agent, Blueprint] = WeakKeyDictionary()

    def _blueprint(self, agent: Agent) -> Blueprint:
        made = self._blueprints.get(agent)
        if made is None:
            made = self._blueprints[agent] = Blueprint(agent, self._resolver)
        return made

    def profile(self) -> BackendProfile:
        return BackendProfile.full_local()

    def open(self, request: RunRequest, journal: Journal, log: EventLog) -> LocalRun:
        """Set a root run up without starting it; raises where it cannot be."""
        return LocalRun(request, journal, self._resolver, self._blueprint(request.agent), log)

    def begin(self, run: LocalRun, thread: ThreadRecord | None = None) -> None:
        """Make a run known, so that it can have children."""
        scope = run.begin(thread)
        self._scopes[scope.run_id] = scope

    def forget(self, run_id: str) -> None:
        if run_id not in self._held:
            self._scopes.pop(run_id, None)

    def run(self, request: RunRequest) -> Coroutine[Any, Any, RunResult]:
        """A child run, or a run without lineage. What is wrong with it raises here, before anything happens."""
        return self._run_on_thread(request) if request.keeps_thread else self._run(request)

    async def _run_on_thread(self, request: RunRequest) -> RunResult:
        return await self._run(request, await self._store.load_thread(request.identity.thread_id))

    def _run(self, request: RunRequest, thread: ThreadRecord | None = None) -> Coroutine[Any, Any, RunResult]:
        identity = request.identity
        if identity.parent_run_id is None:
            return self._start(request, None, thread)
        parent = self._scopes.get(identity.parent_run_id)
        if parent is None:
            raise ExecutionBackendError(identity.agent, "the run that asks for it has ended")
        open_call = parent.open_calls.get(identity.parent_tool_call_id or "")
        if open_call is not None and open_call.resumes:
            earlier = find_again(open_call, children.asked_for(request))
            if isinstance(earlier, LocalRun):
                return self._go_on(earlier, parent, request)
        return self._start(request, parent, thread)

    def refuse_child(self, run_id: str) -> tuple[str, int] | None:
        """The limit that stands in the way of a child of a run, and its value; or None."""
        scope = self._scopes.get(run_id)
        return None if scope is None else scope.budget.refuse_child(scope.identity.depth + 1)

    async def close(self, grace: float) -> None:
        """Stop the children whose parents have ended."""
        tasks: set[asyncio.Task[Any]] = {*self._tasks.values(), *self._hosts.values()}
        for task in tasks:
            task.cancel("the runtime was closed")
        if tasks:
            await asyncio.wait(tasks, timeout=grace)

    async def abort(self, run_id: str) -> None:
        if (task := self._tasks.get(run_id)) is not None:
            task.cancel("aborted")
            await asyncio.wait({task}, timeout=GRACE)
        elif (scope := self._scopes.get(run_id)) is not None:
            scope.cancellation.set("aborted")  # it shares a task with its call: it stops with its present step

    def _start(
        self, request: RunRequest, parent: RunScope | None, thread: ThreadRecord | None
    ) -> Coroutine[Any, Any, RunResult]:
        given, request.cancellation = request.cancellation, CancellationToken()
        if parent is None:
            child = self._open_child(request, None, ())
            self.begin(child, thread)
            return self._conduct(child, self._keeping(child, child.execute), given)
        call_id = request.identity.parent_tool_call_id or ""
        if parent.journal.keeps:
            number = same_child(parent, call_id, request)
        else:
            number = next_number(parent, call_id)
        ns = child_ns(parent, call_id, number)
        child = self._open_child(request, parent, ns)
        self.begin(child, thread)
        enter_child(parent, call_id, number, child)
        parent.budget.count_child()
        identity = request.identity
        parent.emit(
            ChildStarted(call_id=call_id, child_run_id=identity.run_id, child_agent=identity.agent, child_ns=ns)
        )
        work = self._keeping(child, child.execute)
        if request.detached:
            return self._apart(child, parent, work, given)
        return self._as_child(child, parent, work, given)

    def _keeping(self, child: LocalRun, work: Work) -> Work:
        """The work of a child, with its thread stored at the end where it keeps one."""
        return partial(self._keep, child, work) if child.request.keeps_thread else work

    async def _keep(self, child: LocalRun, work: Work) -> RunResult:
        run_id = child.identity.run_id
        self._kept[run_id] = child
        result = await work()
        if result.status is not RunStatus.SUSPENDED:
            await self._save_thread(child)
        if result.status is not RunStatus.SUSPENDED or not child.request.detached:
            self._kept.pop(run_id, None)
        return result

    async def _apart(self, child: LocalRun, parent: RunScope | None, work: Work, given: CancellationToken) -> RunResult:
        """Run a child that nobody need wait for; its parent is told of its end while it is still there."""
        assert child.scope is not None
        used, before = child.scope.usage, child.result
        try:
            if parent is None:
                return await self._conduct(child, work, given)
            key, name = f"child:{child.scope.ns[-1]}:{child.scope.step}", child.identity.agent
            result = await parent.journal.record("child", key, name, self._conduct, child, work, given)
            return result if child.result is not None else child.take_result(result)
        finally:
            if parent is not None and child.result is not None and child.result is not before:
                parent.usage += child.result.usage - used
                tell_child_finished(parent, child.identity, child.result)

    def detach(self, run_id: str) -> None:
        """Let a child outlive its call."""
        if (child := self._kept.get(run_id)) is not None:
            child.request.detached = True

    def scope_of(self, run_id: str) -> RunScope | None:
        return self._scopes.get(run_id)

    def hold(self, run_id: str) -> RunScope | None:
        """The scope of a run in progress, which can then have children until it is released, even after its end."""
        scope = self._scopes.get(run_id)
        if scope is not None:
            self._held[run_id] = self._held.get(run_id, 0) + 1
        return scope

    def release(self, run_id: str) -> None:
        self._held[run_id] -= 1
        if not self._held[run_id]:
            del self._held[run_id]
            if (scope := self._scopes.get(run_id)) is not None and scope.sealed:
                del self._scopes[run_id]

    def waiting_child(self, run_id: str) -> LocalRun | None:
        """The detached child of that id that waits for a human."""
        child = self._kept.get(run_id)
        return child if child is not None and child.request.detached else None

    async def go_on(self, run_id: str, decisions: Mapping[str, Decision], given: CancellationToken) -> RunResult:
        """Go on with a detached child, with decisions that fit."""
        child = self._kept[run_id]
        assert child.scope is not None
        self._scopes[child.scope.run_id] = child.scope
        parent = self._scopes.get(child.identity.parent_run_id or "")
        return await self._apart(child, parent, self._keeping(child, partial(child.resume, decisions)), given)

    async def give_up(self, run_id: str) -> RunResult | None:
        """End a detached child that waits for an answer which will not come; its conversation stays."""
        if (child := self._kept.pop(run_id, None)) is None:
            return None
        result = child.abandoned()
        if (parent := self._scopes.get(child.identity.parent_run_id or "")) is not None:
            tell_child_finished(parent, child.identity, result)
        await self._save_thread(child)
        return result

    def _save_thread(self, child: LocalRun) -> Coroutine[Any, Any, None]:
        """Store a child's conversation, as the owner of its log where that is asked for."""
        writer = child.log.writer
        return (self._store if writer is None else writer).save_thread(child.thread_after())

    def _open_child(self, request: RunRequest, parent: RunScope | None, ns: Namespace) -> LocalRun:
        """Set a child up; whatever is wrong is one kind of error, and has left no trace."""
        name = request.agent.name
        if parent is not None:
            depth = parent.identity.depth + 1
            refusal = parent.budget.refuse_child(depth)
            if refusal is not None:
                raise LimitReached(name, refusal[0], child_refusal(*refusal))
            if request.identity.depth != depth:
                request.identity = replace(request.identity, depth=depth)
        try:
            request.agent.check_thread(request.identity.thread_id)
            blueprint = self._blueprint(request.agent)
            if parent is None:
                return LocalRun(request, self._make_journal(), self._resolver, blueprint, EventLog(self.sinks))
            journal = parent.journal.child(request.identity.run_id)
            return LocalRun(request, journal, self._resolver, blueprint, parent.log, parent, ns)
        except RetinueError as exc:
            raise ExecutionBackendError(name, str(exc)) from exc

    async def _go_on(self, child: LocalRun, parent: RunScope, request: RunRequest) -> RunResult:
        """What a child that was started before has to say: its result, or how it goes on with what was decided."""
        assert child.scope is not None
        assert child.result is not None
        if child.scope.status is not RunStatus.SUSPENDED or not child.scope.pending:
            return child.result
        pending, child.scope.pending = child.scope.pending, {}
        child.scope.sink = request.sink
        self._scopes[child.scope.run_id] = child.scope
        work = self._keeping(child, partial(child.resume, pending))
        return await self._as_child(child, parent, work, request.cancellation)

    async def _as_child(
        self,
        child: LocalRun,
        parent: RunScope,
        work: Work,
        given: CancellationToken,
    ) -> RunResult:
        """Run a child for a call: the call's slot is for others now, and what the child uses counts for its parent."""
        scope = child.scope
        assert scope is not None
        used, before = scope.usage, scope.result
        give_slot_back(parent, child.identity.parent_tool_call_id or "")
        key, name = f"child:{scope.ns[-1]}:{scope.step}", child.identity.agent
        host = asyncio.current_task()
        try:
            if host is None or given is not parent.cancellation or child.request.timeout is not None:
                result = await parent.journal.record("child", key, name, self._conduct, child, work, given)
                return result if scope.result is not None else child.take_result(result)
            # In the task of its call: it lives and is cancelled with it, and costs no task of its own.
            run_id, pass_on = scope.run_id, given.pass_on_to(scope.cancellation)
            self._hosts[run_id] = host
            try:
                result = await parent.journal.record("child", key, name, work)
                if scope.result is None:
                    result = child.take_result(result)
            finally:
                given.forget(pass_on)
                del self._hosts[run_id]
                self.forget(run_id)
            if host.cancelling():  # the child was cancelled with its call, and ended with a result; the call ends too
                raise asyncio.CancelledError
            return result
        finally:
            # Also when the call was cancelled: the child has ended, and what it used was used.
            if scope.result is not None and scope.result is not before:
                parent.usage += scope.result.usage - used
                tell_child_finished(parent, child.identity, scope.result)

    async def _conduct(self, child: LocalRun, work: Work, given: CancellationToken) -> RunResult:
        """Run a child in a task of its own, so that cancelling it is not cancelling its parent."""
        request = child.request
        run_id = request.identity.run_id
        loop = asyncio.get_running_loop()
        task = self._tasks[run_id] = loop.create_task(work(), name=run_id)

        def stop() -> None:
            request.cancellation.set(given.reason or "cancelled")
            loop.call_soon_threadsafe(task.cancel)

        given.on_set(stop)
        try:
            result = await task if request.timeout is None else await _within(child, task, child.time_left())
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            result = child.abandoned()  # it was stopped before it came to its beginning
        finally:
            given.forget(stop)
            del self._tasks[run_id]
            self.forget(run_id)
        if _is_cancelled():
            raise asyncio.CancelledError
        return result


def _is_cancelled() -> bool:
    """Whether somebody wants the present task to stop."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _within(child: LocalRun, task: asyncio.Task[RunResult], timeout: float) -> RunResult:
    """The result of a child that may take so long; one that does not stop then is given up on."""
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            child.request.cancellation.set(TIMED_OUT)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=GRACE)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE)
        raise
    return task.result() if done else child.abandoned()
