"""One run that executes in this process: its set-up from agent, model, plugins and state, its work, and its end."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct, to_builtins
from msgspec.structs import replace

from ..core.agents import Agent, Toolbox, linked_agents
from ..core.concurrency import CancelScope
from ..core.content import clean_text, to_json_value
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, IllegalMove, RecordUnreadable, ToolCancelled, UnknownAgent, UnknownKey
from ..core.events import (
    ChildFinished,
    ErrorRaised,
    Event,
    MessagesSnapshot,
    RunFinished,
    RunStarted,
    StepFinished,
    ToolCallFinished,
)
from ..core.hooks import CONTEXTS, HookContext, Registrar, registered
from ..core.messages import Message, ToolCall
from ..core.model import Model, ModelRequest
from ..core.plugins import Phase
from ..core.receipts import Receipt
from ..core.results import ToolCallStatus, ToolResult, ToolStatus
from ..core.rows import Answer, Ending, Private, StoredRequest
from ..core.runs import DEFAULT_LIMITS, ENDED, RUN_MOVES, Limits, RunIdentity, RunResult, RunStatus
from ..core.state import PersistedState, Snapshot
from ..core.statestore import StateStore
from ..core.stores import ThreadRecord
from ..core.tools import Tool, ToolDescriptor
from ..core.window import CONTEXT_KEY, NO_WINDOW
from ..log.owned import LiveLog
from ..log.receipts import receipt_of
from ..log.state import CALL_NEW, EMPTY, NO_REQUEST, RUNNING, CallState, ChildRef, RunState, message_id
from .budget import is_limited
from .phases import HookTable, shown
from .steering import drop_messages
from .tickets import tickets_of

if TYPE_CHECKING:
    from ..core.backend import Resolver, RunRequest
    from ..core.events import Namespace
    from .spending import Spending


class Equipment(Struct, frozen=True, gc=False):
    """The agent, model, tools and hooks of a run."""

    agent: Agent
    model: Model
    toolbox: Toolbox
    descriptors: tuple[ToolDescriptor, ...]
    hooks: HookTable


class Slots:
    """A limit on concurrent tool calls. A run with a limit of its own takes a slot here and one of the run above.

    A call that starts a child gives its slot back for good, so a tree cannot wait for itself.
    """

    __slots__ = ("_above", "_free", "_waiting", "limit")

    def __init__(self, limit: int, above: Slots | None = None) -> None:
        self.limit, self._free, self._above = limit, limit, above
        self._waiting: deque[asyncio.Future[None]] | None = None
        """Calls that wait for a slot; most trees never have any."""

    def below(self, limits: Limits | None) -> Slots:
        """The slots of a child with these limits: the same ones unless the limits are narrower."""
        if limits is None or limits.parallel is UNSET or limits.parallel >= self.limit:
            return self
        return Slots(limits.parallel, self)

    def take_now(self) -> bool:
        """Take a slot if one is free."""
        if self._free > 0 and (self._above is None or self._above.take_now()):
            self._free -= 1
            return True
        return False

    async def take(self) -> None:
        """Wait for a free slot and take it; first come, first served."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._turn()
        if self._above is not None:
            try:
                await self._above.take()
            except asyncio.CancelledError:
                self._give_own_back()
                raise

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_own_back()  # it was given a slot and cancelled before using it
            raise

    def give_back(self) -> None:
        if self._waiting:
            self._give_own_back()
        else:
            self._free += 1
        if self._above is not None:
            self._above.give_back()

    def _give_own_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


Equip = Callable[["Execution", str], Equipment]
"""Returns the equipment of the named agent, for a handoff of the run to it."""


class Execution:
    """One run that executes here. Its `state` changes only by the rows it emits."""

    snapshot: Snapshot
    """The state that the calls of this step see."""

    def __init__(
        self,
        request: RunRequest,
        state: RunState,
        equipment: Equipment,
        store: StateStore,
        log: LiveLog,
        slots: Slots,
        equip: Equip,
        resolver: Resolver,
    ) -> None:
        self.request, self.state, self.store, self.log, self.slots = request, state, store, log, slots
        self.run_id, self.is_stored = state.identity.run_id, log.writer is not None
        self.emit = partial(log.append, state)
        """Append an event of this run, and so change its state. After `run_finished` nothing is appended."""
        self.resolver, self.equip = resolver, equip
        self.cancellation = request.cancellation
        self.agents: tuple[Agent, ...] = ()
        """The agents that have had the run, with the present one."""
        self.use(equipment)
        self.is_limited = is_limited(log.tree, state)
        self.was_interrupted = state.leg > 0 and state.status is RUNNING
        """True from a recovery until the loop has handled the interrupted turn."""
        self.spending: Spending | None = None
        """What the run holds of budgets; None until it makes a model call that may be charged to one."""
        self.is_ending = False
        """True once its end is decided: it takes no more messages."""
        self.is_calling = False
        """True while the loop runs the calls of a step, and does nothing else."""
        self.holding: set[str] = set()
        """The calls that have a slot."""
        self.queued: dict[str, CancelScope] = EMPTY
        """The calls that wait for a slot."""
        self.asked_again: dict[str, set[int]] = {}
        """The children that a call has asked for in its present attempt, by number."""
        self.listing = asyncio.Lock()
        """Held while the errors in the arguments of a call are listed: that takes time, so it is done one call a turn."""
        self.kept: dict[str, str] = {}
        """For calls whose result is cut: a sentence that says where the whole result is."""
        self.reported: set[str] = set()
        """The problems of inherited hooks that were reported: each is reported once."""
        self.tools_digest: tuple[Any, str] = (None, "")
        """The tools of the last request, and their digest."""
        self.partial_text: list[str] = []
        """The text of an answer that is not finished."""
        self.output: Any = None
        self.result: RunResult | None = None
        """The result of its last leg."""
        self.halt: Callable[[str], None] | None = None
        """Stops the work of a child that is closed while it executes, by run id and reason."""
        self._own_messages: tuple[Message, ...] = ()
        self._made_call_ids = 0
        self._thread = threading.get_ident()
        self._event_loop = asyncio.get_running_loop()

    def use(self, equipment: Equipment) -> None:
        """Continue the run with another agent, model, tools and hooks."""
        self.agent, self.model, self.toolbox = equipment.agent, equipment.model, equipment.toolbox
        self.agents = (*self.agents, equipment.agent)
        self.hooks, self.has_hooks = equipment.hooks, equipment.hooks.has_any
        self.descriptors = equipment.descriptors

    @property
    def identity(self) -> RunIdentity:
        return self.state.identity

    @property
    def is_over(self) -> bool:
        """True if its leg has ended: later events are dropped."""
        return self.state.status is not RUNNING

    def report(self, event: Event) -> None:
        """Append an event of this run, from any thread."""
        if threading.get_ident() == self._thread:
            self.log.append(self.state, event)
        else:
            self._event_loop.call_soon_threadsafe(self.log.append, self.state, event)

    def emit_error(self, message: str, code: str, private: Private | None = None) -> None:
        """Emit an error event for something that does not end the run."""
        self.log.append(self.state, ErrorRaised(message=clean_text(message), code=code), private)

    def stop_if_cancelled(self) -> None:
        """Raise if the run was cancelled: a tool may have swallowed the cancellation."""
        if self.cancellation.reason is not None:
            raise asyncio.CancelledError(self.cancellation.reason)

    def now(self) -> float:
        return self.log.clock()

    def hook_context(
        self,
        phase: Phase,
        snapshot: Snapshot,
        messages: tuple[Message, ...] = (),
        request: ModelRequest | None = None,
        call: ToolCall | None = None,
        result: ToolResult | None = None,
        decision: Decision | None = None,
    ) -> HookContext:
        state = self.state
        bound = None if call is None else self.toolbox.get(call.name)
        return CONTEXTS.get(phase, HookContext)(
            phase=phase,
            run=state.identity,
            agent=self.agent,
            snapshot=snapshot,
            messages=messages,
            request=request,
            call=call,
            tool=None if bound is None else bound.tool,
            result=result,
            decision=decision,
            step=state.step,
            usage=state.total,
            compacted=state.window.count,
            elapsed=lambda: state.elapsed(self.now()),
        )

    def next_message_id(self) -> str:
        return message_id(self.state, self.state.message_count + 1)

    def answer_id(self) -> str:
        """The message id of this step's answer: a new one each time the model is called again."""
        state = self.state
        made = f"{self.run_id}-m{state.message_count + 1}"
        return f"{made}r{state.dropped}" if state.dropped else made

    def claim_call_id(self, wanted: str | None) -> str:
        """Return the id for a call that the model has just asked for; one that is taken or unsafe is replaced."""
        tree, state = self.log.tree, self.state
        call_id = tree.free_call_id(state, wanted or "")
        while call_id is None:
            self._made_call_ids += 1
            made = f"call_{self.run_id}_{self._made_call_ids}"
            call_id = None if tree.is_taken(state, made) else made
        return call_id

    def own_messages(self) -> tuple[Message, ...]:
        """Return this run's part of the conversation; cached until it grows, because hooks ask often."""
        state = self.state
        if len(self._own_messages) != len(state.messages) - state.own_from:
            self._own_messages = tuple(state.messages[state.own_from :])
        return self._own_messages

    async def wait_for_slot(self, call: CallState) -> bool:
        """Wait until a call has a slot; return False if the call was cancelled first, alone."""
        call_id = call.call.id
        if self.queued is EMPTY:
            self.queued = {}
        scope = self.queued[call_id] = CancelScope()
        try:
            with scope:
                await self.slots.take()
                return True
            return False
        finally:
            del self.queued[call_id]

    def leave_queue(self, call_id: str, reason: str) -> bool:
        """End a call that waits for a slot as cancelled; return False if it does not wait."""
        scope, call = self.queued.get(call_id), self.state.calls.get(call_id)
        if scope is None or call is None or call.message is not None:
            return False
        finish_cancelled(self.log, self.state, call.call, reason, call.message_id)
        scope.cancel()
        return True

    def give_slot_back(self, call_id: str) -> None:
        """Release the slot of a call that has started a child; the call never takes it back."""
        if call_id in self.holding:
            self.holding.discard(call_id)
            self.slots.give_back()

    def thread(self) -> ThreadRecord:
        """Return the thread as this run leaves it."""
        run, state = self.state, self.store.export_scope("thread")
        state.extensions = {**run.foreign, **state.extensions}
        if self.hooks.policy is not None and run.window is not NO_WINDOW:
            state.extensions[CONTEXT_KEY] = to_builtins(run.window)
        thread_id, user_id = run.identity.thread_id, run.identity.user_id
        return ThreadRecord(thread_id=thread_id, user_id=user_id, messages=tuple(run.messages), state=state)

    def finish(self, ending: Ending) -> RunResult:
        """End the run or the leg: append its last events and return its result."""
        state = self.state
        if ending.error is not None and (error := clean_text(ending.error)) is not ending.error:
            ending = replace(ending, error=error)
        if ending.status not in RUN_MOVES[state.status]:
            raise IllegalMove(f"run {state.run_id!r}", state.status, ending.status)
        if state.queued and ending.status in ENDED:
            drop_messages(self.log, state, ending.error or f"the run ended: {ending.termination}")
        if state.children and ending.status in ENDED:  # a tool may have left some running
            close_children(self.log, state, state.children.values(), "the run that started it has ended")
        said = "".join(self.partial_text)
        self.partial_text = []
        last = (Message.assistant(said, id=self.answer_id()),) if said else ()
        ends = Private(ending=ending) if ending.status in ENDED else None
        if state.step_open:
            if last:
                ends, last = Private(ending=ending, messages=last), ()
            self.emit(StepFinished(step=state.step), ends)
            ends = None
        if ending.status is RunStatus.FAILED and not state.has_fatal_error:
            code = ending.code or ending.termination
            self.emit(ErrorRaised(message=ending.error or ending.termination, code=code, fatal=True), ends)
        form, receipt = self.agent.output_format, receipt_of(self.log.tree, state, ending)
        finished = RunFinished(
            status=ending.status,
            termination=ending.termination,
            response=said or state.response(),
            error=ending.error,
            steps=state.step,
            usage=state.total,
            output=None if form is None else form.encode(self.output),
            receipt=receipt,
        )
        self.emit(finished, Private(messages=last) if last else None)
        result = result_of(self.log, state, ending, finished.response, self.store, self.output, receipt)
        self.result = self.log.results[state.run_id] = result
        return result


def result_of(
    log: LiveLog,
    state: RunState,
    ending: Ending,
    response: str | None,
    store: StateStore | None = None,
    output: Any = None,
    receipt: Receipt | None = None,
) -> RunResult:
    """Return the result of a run that has just ended or is suspended; without a store, it has no state."""
    return RunResult(
        status=ending.status,
        run_id=state.run_id,
        thread_id=state.identity.thread_id,
        response=response,
        output=output,
        steps=state.step,
        state=PersistedState(state.revision) if store is None else store.export_persisted(),
        usage=state.total,
        error=ending.error,
        termination=ending.termination,
        messages=state.own_messages(),
        suspended=tickets_of(log.tree, state) if state.open_calls or state.tickets else {},
        receipt=receipt or receipt_of(log.tree, state, None if state.reported is not None else ending),
    )


# --- setting a run up


class Blueprint:
    """The state keys, hooks and tools of an agent, collected from its plugins once for all its runs."""

    __slots__ = ("_resolver", "descriptors", "hooks", "is_checked", "model", "state", "toolbox")

    def __init__(self, agent: Agent, resolver: Resolver) -> None:
        self._resolver = resolver
        self.state = StateStore()
        registrars = [self.state.install(plugin) for plugin in agent.plugins]
        self.hooks = HookTable(registrars)
        self.toolbox = _toolbox(agent, registrars, resolver)
        self.descriptors = self.toolbox.descriptors
        self.is_checked = False
        """True if the agents below this one are known to have models that can be used."""
        self.model: Model | None = None
        """The agent's own model, once it was asked for."""

    def new_run(
        self, request: RunRequest, log: LiveLog, parent: Execution | None = None, ns: Namespace = ()
    ) -> Execution:
        """Set up a new run. A mistake in the request raises here, and no event exists yet."""
        x = self._execution(
            request, RunState(request.identity, ns, _stored_request(request, log, parent is None)), log, parent
        )
        if request.seed.extensions:
            x.store.apply_seed(request.seed)
        return x

    def continued_run(
        self, request: RunRequest, state: RunState, log: LiveLog, parent: Execution | None = None
    ) -> Execution:
        """Set up a run from its state, with the handoffs it made. Raises if something that it needs no longer exists."""
        x = self._execution(request, state, log, parent)
        for name in state.handoffs:
            x.use(x.equip(x, name))
        try:
            x.store.restore(state.values, state.revision, as_json=x.is_stored)
        except UnknownKey as exc:
            raise RecordUnreadable(f"state key {exc.key!r}", "no plugin of this agent registers that key now") from exc
        return x

    def _execution(self, request: RunRequest, state: RunState, log: LiveLog, parent: Execution | None) -> Execution:
        agent, limits, above = request.agent, state.request.limits, state.request.above
        inherits_hooks = parent is not None and parent.hooks.inherited
        hooks = self.hooks.below(parent.hooks) if parent and inherits_hooks else self.hooks
        if parent is not None:
            slots = parent.slots.below(limits)
        elif above is None:
            slots = _slots_of(limits)
        else:
            slots = _slots_of(above.limits).below(limits)
            hooks = hooks.below(_hooks_of(agent.name, above.hooks_of, self._resolver))
        equipment = Equipment(agent, self._model(request, parent), self.toolbox, self.descriptors, hooks)
        equip = partial(_equip, agent)  # not a method of the run: a cycle would keep it in memory for a while
        return Execution(request, state, equipment, self.state.empty_copy(), log, slots, equip, self._resolver)

    def _model(self, request: RunRequest, parent: Execution | None) -> Model:
        """Return the first model found in: `Runtime.override`, the request, the agent, the parent."""
        agent = request.agent
        if parent is not None:
            request.override = parent.request.override
        given = request.override or request.model
        if given is not None:
            return self._resolver.model_of(agent, given)
        if parent is not None and agent.model is None:
            return parent.model
        if self.model is None:
            self.model = self._resolver.model_of(agent)
        return self.model


def _slots_of(limits: Limits | None) -> Slots:
    parallel = DEFAULT_LIMITS.parallel if limits is None or limits.parallel is UNSET else limits.parallel
    assert parallel is not UNSET
    return Slots(parallel)


def _hooks_of(agent: str, names: tuple[str, ...], resolver: Resolver) -> HookTable:
    """Return the inherited hooks for a placed run, whose parents are in another log."""
    table = HookTable()
    for name in names:
        try:
            plugins = resolver.agent(name).plugins
        except UnknownAgent as exc:
            advice = f"give this worker the agent {name!r} too, or set inherited=False on plugins meant for it alone"
            problem = f"hooks of agent {name!r} hold for agent {agent!r} and this worker does not have them"
            raise ConfigurationError(f"{problem}: {advice}") from exc
        table = HookTable([registered(plugin) for plugin in plugins]).below(table)
    return table


def _toolbox(agent: Agent, registrars: list[Registrar], resolver: Resolver) -> Toolbox:
    """Return an agent's own tools, those of its plugins, and the delegation tool for its sub-agents."""
    tools: list[Tool] = [tool for registrar in registrars for tool in registrar.tools]
    for target in agent.handoffs:
        resolver.resolve(target)  # raises for an unknown name, before the model is offered the handoff
    return agent.toolbox.extended([*tools, *agent.delegation_tools(resolver)])


def _equip(first: Agent, x: Execution, name: str) -> Equipment:
    """Return the equipment for a handoff to another agent; plugins that both agents have keep their state."""
    agent = _agent_for_handoff(first, x, name)
    registrars = [x.store.install_once(plugin) for plugin in agent.plugins]
    toolbox = _toolbox(agent, registrars, x.resolver)
    made = HookTable(registrars).below(x.hooks)  # inherited hooks of all agents that had the run before stay
    keeps_model = agent.backend is None and (agent.model is None or x.request.override is not None)
    model = x.model if keeps_model else x.resolver.model_of(agent)
    return Equipment(agent, model, toolbox, toolbox.descriptors, made)


def _agent_for_handoff(first: Agent, x: Execution, name: str) -> Agent:
    """Return the handoff target: an agent object of the present agent, the run's first agent, or a registered agent."""
    for agent in (*linked_agents(x.agent), first):
        if agent.name == name:
            return agent
    return x.resolver.agent(name)


def _stored_request(request: RunRequest, log: LiveLog, is_root: bool) -> StoredRequest:
    """Return the part of a request that the log keeps. `problem` names what cannot be stored."""
    limits = request.limits
    if is_root and request.above is None:
        limits = DEFAULT_LIMITS if limits is None else limits.with_defaults()
    elif limits is None and request.timeout is None and not (is_root or request.keeps_thread or request.detached):
        return NO_REQUEST  # as of most children
    return StoredRequest(
        limits=limits,
        timeout=request.timeout,
        keeps_thread=request.keeps_thread,
        detached=request.detached,
        above=request.above,
        wakes=request.wakes,
        call=request.call,
        **(_as_json(request) if is_root and log.writer is not None else {}),
    )


def storable(request: RunRequest) -> StoredRequest:
    """Return the part of a root run's request that is stored before it starts. `problem` names what cannot be stored."""
    return StoredRequest(
        limits=request.limits,
        timeout=request.timeout,
        keeps_thread=request.keeps_thread,
        above=request.above,
        wakes=request.wakes,
        call=request.call,
        **_as_json(request),
    )


def _as_json(request: RunRequest) -> dict[str, Any]:
    """Return the stored forms of the context and the model, and why the model has none."""
    context = _checked_context(request.context)
    if request.model is None or isinstance(request.model, str):
        return {"context": context, "model": request.model}
    return {"context": context, "problem": "its model was given as an object"}


def _checked_context(context: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored form of a run's context; raise if it would not be read back as the same value."""
    checked: dict[str, Any] = {}
    for name, value in context.items():
        try:
            as_json = to_json_value({name: value})
        except Exception as exc:
            raise _not_storable(name, str(exc)) from exc
        if as_json != {name: value}:
            raise _not_storable(name, f"{shown(value)} would be read back as {shown(as_json.get(name))}")
        checked.update(as_json)
    return checked


def _not_storable(name: str, problem: str) -> ConfigurationError:
    advice = "give tools such objects in a closure"
    return ConfigurationError(f"context {name!r} cannot be stored with the run: {problem}; {advice}")


# --- closing calls and runs that will not continue, and starting another leg


def cancelled_result(call: ToolCall, reason: str) -> ToolResult:
    """Return the result of a call that was stopped or did not start."""
    error = ToolCancelled(reason)
    data = {"error": {"kind": error.kind, "message": reason}}
    return ToolResult(call.name, ToolStatus.ERROR, data, str(error))


def close_calls(log: LiveLog, run: RunState) -> None:
    """End the open calls of a run as cancelled, after the children they started."""
    for call in run.open():
        was_made = call.status is not CALL_NEW
        reason = "the call was cancelled before it finished" if was_made else "the run ended before this call was made"
        close_children(log, run, call.children.values(), reason)
        finish_cancelled(log, run, call.call, reason, call.message_id)
    drop_drafts(log, run)


def drop_drafts(log: LiveLog, run: RunState) -> None:
    """End the calls whose request the model has not finished streaming."""
    for call_id, name in list(run.drafts.items()):
        drop_draft(log, run, call_id, name)


def drop_draft(log: LiveLog, run: RunState, call_id: str, name: str) -> None:
    finish_cancelled(log, run, ToolCall(call_id, name, {}), "the model did not finish asking for it")


def finish_cancelled(log: LiveLog, run: RunState, call: ToolCall, reason: str, message_id: str = "") -> None:
    """Append the end of a call that was cancelled."""
    result = cancelled_result(call, reason)
    message = Message.tool(result.text, tool_call_id=call.id, name=call.name, id=message_id)
    status = ToolCallStatus.CANCELLED
    log.append(
        run, ToolCallFinished(call_id=call.id, tool_name=call.name, status=status, result=result, message=message)
    )


def close_children(
    log: LiveLog, run: RunState, children: Iterable[ChildRef], reason: str, *, running: bool = True
) -> None:
    """End the children that no call waits for any more, except background tasks.

    With `running=False`, children that execute in this process continue, too.
    """
    for ref in list(children):
        child = log.tree.runs.get(ref.run_id)
        if child is None or ref.ended or child.request.detached:
            continue
        if not running and not child.waits and ref.run_id in log.executions:
            continue
        if not child.is_over:
            close_run(log, child, Ending(RunStatus.CANCELLED, "cancelled", reason))
        log.append(
            run,
            ChildFinished(
                call_id=child.identity.parent_tool_call_id or "",
                child_run_id=ref.run_id,
                child_agent=child.identity.agent,
                status=child.status,
            ),
        )


def start_leg(
    log: LiveLog, run: RunState, answers: tuple[Answer, ...] = (), messages: tuple[Message, ...] = ()
) -> None:
    """Append the start of another leg: of a suspended run, with its decisions, or of a fork, with new input."""
    said = (*run.messages, *[call.message for call in run.calls.values() if call.message is not None])
    if run.remote_seq:  # the log elsewhere has that event
        said = ()
    identity = run.identity
    log.append(
        run,
        RunStarted(
            thread_id=identity.thread_id,
            parent_tool_call_id=identity.parent_tool_call_id,
            messages=messages,
            continues=bool(said),
        ),
        Private(answers=answers),
    )
    if said:
        log.append(run, MessagesSnapshot(messages=said))


def close_run(log: LiveLog, run: RunState, ending: Ending) -> Ending:
    """End a run and its descendants that are suspended or did not stop, the deepest first."""
    if run.waits:
        start_leg(log, run)
    close_calls(log, run)
    execution = log.executions.get(run.run_id)
    if execution is not None:
        execution.cancellation.set(ending.error or "cancelled")
        execution.finish(ending)
        if execution.halt is not None:
            execution.halt(run.run_id)
        return ending
    if run.queued:
        drop_messages(log, run, ending.error or f"the run ended: {ending.termination}")
    if run.step_open:
        log.append(run, StepFinished(step=run.step), Private(ending=ending))
    response, receipt = run.response(), receipt_of(log.tree, run, ending)
    log.append(
        run,
        RunFinished(
            status=ending.status,
            termination=ending.termination,
            response=response,
            error=ending.error,
            steps=run.step,
            usage=run.total,
            receipt=receipt,
        ),
    )
    log.results[run.run_id] = result_of(log, run, ending, response, receipt=receipt)
    return ending
