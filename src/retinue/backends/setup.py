"""Set-up of runs: combines agent, plugins, tools, model and state into an `Execution`, and encodes requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec import UNSET

from ..core.agents import Agent, Toolbox, linked_agents
from ..core.backend import Resolver, RunRequest
from ..core.content import to_json_bytes, to_json_value
from ..core.errors import ConfigurationError, ExecutionBackendError, RecordUnreadable, UnknownAgent, UnknownKey
from ..core.events import ChildStarted, Namespace, Sink
from ..core.hooks import Registrar, registered
from ..core.messages import Role
from ..core.model import Model
from ..core.rows import Ending, StoredRequest
from ..core.runs import DEFAULT_LIMITS, NO_LIMITS, Limits, RunResult, RunStatus
from ..core.state import UnknownKeyPolicy
from ..core.statestore import StateStore
from ..core.stores import Store, ThreadRecord
from ..core.tools import Tool
from ..log.owned import LiveLog
from ..log.state import NO_REQUEST, RunState
from ..loop.calls import context_for
from ..loop.execution import Equipment, Execution, Slots, result_of
from ..loop.phases import HookTable, shown
from ..loop.run import SUSPENDED, begin_run

DESCRIPTION = 2_000
"""Characters of a child's task in the event of its start."""


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
        x = self._execution(request, RunState(request.identity, ns, _stored(request, log, parent is None)), log, parent)
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
    parallel = (limits or NO_LIMITS).with_defaults().parallel
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


def begin(x: Execution, thread: ThreadRecord | None) -> None:
    """Append the first rows of a new run, with the conversation of its thread if there is one."""
    if thread is None:
        begin_run(x, x.request.messages)
        return
    store = x.store
    store.apply_seed(thread.state, UnknownKeyPolicy.SKIP)
    store.apply_seed(x.request.seed)
    foreign = {name: value for name, value in thread.state.extensions.items() if store.key(name) is None}
    begin_run(x, x.request.messages, thread.messages, foreign)


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


async def continue_tasks(x: Execution) -> None:
    """Continue the background tasks that a run had when its process died."""
    for agent in dict.fromkeys(x.agents):
        await agent.resume_tasks(x.identity, partial(context_for, x))


def thread_after(x: Execution) -> ThreadRecord:
    """Return the thread as this run leaves it."""
    state, identity = x.store.export_scope("thread"), x.identity
    state.extensions = {**x.state.foreign, **state.extensions}
    return ThreadRecord(
        thread_id=identity.thread_id, user_id=identity.user_id, messages=tuple(x.state.messages), state=state
    )


def restore_text(sink: Sink | None, state: RunState) -> None:
    """Replay the earlier text of a child to its sink, when the child is found again."""
    restore_text = getattr(sink, "restore_text", None)
    if restore_text is None:
        return
    for message in state.messages[state.own_from :]:
        if message.role is Role.ASSISTANT and message.text:
            restore_text(message.text)


def result_again(x: Execution) -> RunResult:
    """Return the result of an ended or suspended run, from its state."""
    state, form = x.state, x.agent.output_format
    output = state.output if form is None or state.output is None else form.decode(state.output)
    ending = SUSPENDED if state.status is RunStatus.SUSPENDED else state.ending or Ending(state.status, "error")
    return result_of(x.log, state, ending, state.response(), x.store, output)


def _stored(request: RunRequest, log: LiveLog, is_root: bool) -> StoredRequest:
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
    """Return the part of a root run's request that is stored before it starts. `problem` as in `_stored`."""
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


def child_started(request: RunRequest, ns: Namespace) -> ChildStarted:
    """Return the event of a child's start. It describes what the child is asked: its last user message, or the beginning."""
    identity = request.identity
    said = next((message.text for message in reversed(request.messages) if message.role is Role.USER), "")
    return ChildStarted(
        call_id=identity.parent_tool_call_id or "",
        child_run_id=identity.run_id,
        child_agent=identity.agent,
        child_ns=ns,
        description=said if len(said) <= DESCRIPTION else f"{said[: DESCRIPTION - 1]}…",
    )


def asked_for(request: RunRequest, *, stored: bool) -> Any:
    """Return the key that distinguishes the children of one call: agent, messages and seed."""
    said = tuple([(message.role, message.parts) for message in request.messages])
    asked = request.identity.agent, said, request.seed.extensions
    return hashlib.blake2b(to_json_bytes(asked), digest_size=8).hexdigest() if stored else asked
