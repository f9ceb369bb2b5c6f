"""Runs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from ..core.agents import Agent, Toolbox
from ..core.backend import BackendProfile, Resolver, RunRequest
from ..core.context import GRACE, TIMED_OUT, CancellationToken
from ..core.decisions import Decision
from ..core.errors import ExecutionBackendError, LimitReached, RetinueError
from ..core.events import ChildStarted, Namespace, Sink
from ..core.journal import Journal
from ..core.lifecycle import RunStatus
from ..core.plugins import Registrar
from ..core.runs import RunResult
from ..core.state import UnknownKeyPolicy
from ..core.statestore import StateStore
from ..core.stores import Store, ThreadRecord
from ..core.tools import Tool
from ..loop import children
from ..loop.children import child_ns, enter_child, find_again, give_slot_back, next_number, tell_child_finished
from ..loop.decide import match_decisions
from ..loop.handoff import Equipment
from ..loop.limits import Budget, child_refusal
from ..loop.log import EventLog
from ..loop.phases import HookTable
from ..loop.run import abandon_run, execute_run, resume_run
from ..loop.scope import RunScope

Work = Callable[[], Coroutine[Any, Any, RunResult]]


class Blueprint:
    """What an agent needs for every run of it, asked of its plugins once."""

    __slots__ = ("hooks", "state", "toolbox")

    def __init__(self, agent: Agent, resolver: Resolver) -> None:
        self.state = StateStore()
        registrars = [self.state.install(plugin) for plugin in agent.plugins]
        self.hooks = HookTable(registrars)
        self.toolbox = _toolbox(agent, registrars, resolver)


def _toolbox(agent: Agent, registrars: list[Registrar], resolver: Resolver) -> Toolbox:
    """An agent's tools, those of its plugins, and the one for its sub-agents."""
    tools: list[Tool] = [tool for registrar in registrars for tool in registrar.tools]
    return agent.toolbox.extended([*tools, *agent.delegation_tools(resolver)])


class LocalRun:
    """A run that is set up: whatever is wrong with the request has been found by now, and no event exists yet."""

    __slots__ = (
        "_blueprint",
        "_hooks",
        "_model",
        "_ns",
        "_parent_budget",
        "_resolver",
        "_state",
        "_thread",
        "identity",
        "journal",
        "log",
        "request",
        "scope",
    )

    def __init__(
        self,
        request: RunRequest,
        journal: Journal,
        resolver: Resolver,
        blueprint: Blueprint,
        sinks: Iterable[Sink] = (),
        parent: RunScope | None = None,
        ns: Namespace = (),
    ) -> None:
        self.request, self.identity = request, request.identity
        self.journal, self._resolver, self._ns = journal, resolver, ns
        if parent is None:
            self.log, self._parent_budget, self._hooks = EventLog(sinks), None, blueprint.hooks
        else:
            self.log, self._parent_budget = parent.log, parent.budget
            self._hooks = blueprint.hooks.below(parent.hooks)
        self._state = blueprint.state.empty_copy()
        # An agent without a model of its own runs, as a child, on its parent's.
        inherits = parent is not None and request.agent.model is None and request.model is None
        self._model = parent.model if parent and inherits else resolver.model_of(request.agent, request.model)
        self._blueprint = blueprint
        if request.seed.extensions:
            self._state.apply_seed(request.seed)
        self.scope: RunScope | None = None
        self._thread: ThreadRecord | None = None

    def begin(self, thread: ThreadRecord | None = None) -> RunScope:
        """Make the scope of the run, continuing the thread where there is one."""
        request, history = self.request, ()
        self._thread = thread
        if thread is not None:
            history = thread.messages
            self._state.apply_seed(thread.state, UnknownKeyPolicy.SKIP)
            self._state.apply_seed(request.seed)
        started_at, above = self.journal.now(), self._parent_budget
        self.scope = scope = RunScope(
            request,
            self._model,
            self._blueprint.toolbox,
            self._state,
            self.journal,
            self.log,
            Budget(request.limits, started_at)
            if above is None
            else above.below(request.limits, started_at, self.identity.depth),
            started_at,
            self._hooks,
            partial(_equip, request.agent, self._hooks),  # not of this object: a cycle would keep every run for a while
            self._resolver,
            history,
            self._ns,
        )
        return scope

    @property
    def result(self) -> RunResult | None:
        """How it ended, or where it waits."""
        return None if self.scope is None else self.scope.result

    def execute(self) -> Coroutine[Any, Any, RunResult]:
        """Run to the end."""
        return execute_run(self.scope or self.begin(), self.request.messages)

    def match(self, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        """The decisions that are new, by call id; raises where one does not fit."""
        assert self.scope is not None
        return match_decisions(self.scope, decisions)

    def resume(self, decisions: Mapping[str, Decision]) -> Coroutine[Any, Any, RunResult]:
        """Go on with decisions that `match` has passed."""
        assert self.scope is not None
        return resume_run(self.scope, decisions)

    def abandon(self) -> RunResult | None:
        """Give up on a run that waits or does not stop, and on its children; None where it had not begun."""
        scope = self.scope
        if scope is not None and scope.status in (RunStatus.RUNNING, RunStatus.SUSPENDED):
            abandon_run(scope)
        return self.result

    @property
    def asked_for(self) -> Any:
        return children.asked_for(self.request)

    def abandoned(self) -> RunResult:
        """As `abandon`, of a run that had begun."""
        result = self.abandon()
        assert result is not None
        return result

    def thread_after(self) -> ThreadRecord:
        """The thread as this run leaves it."""
        identity, before = self.request.identity, self._thread
        history = before.messages if before else ()
        kept = dict(before.state.extensions) if before else {}
        state = self._state.export_scope("thread")
        state.extensions = {**kept, **state.extensions}
        said = self.scope.own_messages() if self.scope else ()
        return ThreadRecord(
            thread_id=identity.thread_id, user_id=identity.user_id, messages=(*history, *said), state=state
        )


def _equip(first: Agent, hooks: HookTable, run: RunScope, name: str) -> Equipment:
    """What another agent brings to a run; plugins that are already in it keep their state."""
    agent = _agent_for_handoff(first, run, name)
    agent.check_thread(run.identity.thread_id)
    registrars = [run.state.install_once(plugin) for plugin in agent.plugins]
    toolbox = _toolbox(agent, registrars, run.resolver)
    made = HookTable(registrars).below(hooks)  # what was handed down stays, whoever goes on
    return Equipment(agent, run.resolver.model_of(agent), toolbox, made)


def _agent_for_handoff(first: Agent, run: RunScope, name: str) -> Agent:
    """One that the present agent names as an object, the one the run began with, or one the runtime knows."""
    for agent in (*run.agent.linked(), first):
        if agent.name == name:
            return agent
    return run.resolver.agent(name)


class LocalBackend:
    """The backend for agents that run here. Agents, models and journals come from outside."""

    def __init__(
        self, resolver: Resolver, make_journal: Callable[[], Journal], store: Store, sinks: Iterable[Sink] = ()
    ) -> None:
        self._resolver, self._make_journal, self._store = resolver, make_journal, store
        self._sinks = tuple(sinks)
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

    def open(self, request: RunRequest, journal: Journal, sinks: Iterable[Sink] = ()) -> LocalRun:
        """Set a root run up without starting it; raises where it cannot be."""
        return LocalRun(request, journal, self._resolver, self._blueprint(request.agent), sinks)

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
            await self._store.save_thread(child.thread_after())
        if result.status is not RunStatus.SUSPENDED or not child.request.detached:
            self._kept.pop(run_id, None)
        return result

    async def _apart(self, child: LocalRun, parent: RunScope | None, work: Work, given: CancellationToken) -> RunResult:
        """Run a child that nobody need wait for; its parent is told of its end while it is still there."""
        assert child.scope is not None
        used, before = child.scope.usage, child.result
        try:
            return await self._conduct(child, work, given)
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
        await self._store.save_thread(child.thread_after())
        return result

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
            return LocalRun(request, self._make_journal(), self._resolver, blueprint, self._sinks, parent, ns)
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
                return await parent.journal.record("child", key, name, self._conduct, child, work, given)
            # In the task of its call: it lives and is cancelled with it, and costs no task of its own.
            run_id, pass_on = scope.run_id, given.pass_on_to(scope.cancellation)
            self._hosts[run_id] = host
            try:
                result = await parent.journal.record("child", key, name, work)
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
            result = await task if request.timeout is None else await _within(child, task, request.timeout)
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
