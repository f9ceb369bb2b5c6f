"""A run in this process: how it is set up, begun and gone on with."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.agents import Agent, Toolbox
from ..core.backend import Resolver, RunRequest
from ..core.decisions import Decision
from ..core.events import Namespace
from ..core.journal import Journal
from ..core.lifecycle import RunStatus
from ..core.plugins import Registrar
from ..core.runs import RunResult
from ..core.state import PersistedState, UnknownKeyPolicy
from ..core.statestore import StateStore
from ..core.stores import ThreadRecord
from ..core.tools import Tool
from ..loop import children
from ..loop.decide import Answer, decode_answers, encode_answers, match_decisions, take_answers
from ..loop.execute import context_for
from ..loop.handoff import Equipment
from ..loop.limits import Budget
from ..loop.log import EventLog
from ..loop.phases import HookTable
from ..loop.recovery import RecoveredScope
from ..loop.run import abandon_run, execute_run, resume_run
from ..loop.scope import RunScope

_LAST_MOMENT = 1.0
"""Seconds in which a run that has used up its time can at least be found again as it was."""
_THREAD = "thread"
"""Where a journal says how the thread stood."""


class _Mark(Struct, frozen=True):
    messages: int
    state: PersistedState


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
        "_legs",
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
        "used",
    )

    def __init__(
        self,
        request: RunRequest,
        journal: Journal,
        resolver: Resolver,
        blueprint: Blueprint,
        log: EventLog,
        parent: RunScope | None = None,
        ns: Namespace = (),
    ) -> None:
        self.request, self.identity = request, request.identity
        self.journal, self._resolver, self._ns = journal, resolver, ns
        self._legs, self.used = 0, 0.0
        if parent is None:
            self.log, self._parent_budget, self._hooks = log, None, blueprint.hooks
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
        if self.journal.keeps:
            thread = _as_it_was(self.journal, thread, request)
        self._thread = thread
        if thread is not None:
            history = thread.messages
            self._state.apply_seed(thread.state, UnknownKeyPolicy.SKIP)
            self._state.apply_seed(request.seed)
        started_at, above, made = self.journal.now(), self._parent_budget, RunScope
        if self.log.told is not None:
            self.used, made = self.log.told.clock.used(self.identity.run_id, started_at), RecoveredScope
            started_at -= self.used
        self.scope = scope = made(
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
        if self.log.told is not None:
            scope.used_call_ids |= self.log.told.calls_of(scope.run_id)
        self.journal.bind(scope)
        return scope

    def take_result(self, result: RunResult) -> RunResult:
        """End without having run: it did, in a process that has ended, and this is what came of it."""
        scope, output_format = self.scope, self.request.agent.output_format
        assert scope is not None
        if output_format is not None and result.output is not None:
            result = replace(result, output=output_format.decode(result.output))
        scope.take_result(result)
        return result

    @property
    def result(self) -> RunResult | None:
        """How it ended, or where it waits."""
        return None if self.scope is None else self.scope.result

    def time_left(self) -> float:
        """Seconds that are left of its timeout, in its first leg here: it may have worked in another process."""
        used, self.used = self.used, 0.0
        return max((self.request.timeout or 0.0) - used, _LAST_MOMENT if used else 0.0)

    def execute(self) -> Coroutine[Any, Any, RunResult]:
        """Run to the end."""
        scope = self.scope or self.begin()
        return execute_run(scope, self.request.messages) if self.log.told is None else self._execute_again(scope)

    async def _execute_again(self, scope: RunScope) -> RunResult:
        await self.take_up_tasks()
        return await execute_run(scope, self.request.messages)

    async def take_up_tasks(self) -> None:
        """Go on with the background tasks that this run had when its process ended."""
        scope = self.scope
        assert scope is not None
        await self.request.agent.take_up_tasks(scope.identity, partial(context_for, scope))

    @property
    def history(self) -> int:
        """How many messages its thread had when it began."""
        return 0 if self._thread is None else len(self._thread.messages)

    def decided(self) -> tuple[tuple[str, str], ...]:
        """The decisions that were taken in."""
        return () if self.scope is None else tuple(self.scope.decided)

    def match(self, decisions: Mapping[str, Decision]) -> list[Answer]:
        """The decisions that are new; raises where one does not fit."""
        assert self.scope is not None
        return match_decisions(self.scope, decisions)

    def take(self, answers: Iterable[Answer]) -> dict[str, Decision]:
        """Take decisions in that `match` has passed; what the run is to go on with, by call id."""
        assert self.scope is not None
        return take_answers(self.scope, answers)

    def note_answers(self, answers: Sequence[Answer]) -> None:
        """Have it recorded, before anything that follows, what a child goes on with that nobody waits for."""
        if self.journal.keeps:
            self.journal.note(f"decisions:{self._legs + 1}", encode_answers(answers))
        self._legs += 1

    def answers_before(self) -> list[Answer]:
        """What it went on with from here in a process that has ended."""
        body = self.journal.recall(f"decisions:{self._legs + 1}")
        if body is None:
            return []
        self._legs += 1
        return decode_answers(body)

    def resume(self, decisions: Mapping[str, Decision]) -> Coroutine[Any, Any, RunResult]:
        """Go on with decisions that were taken in."""
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


def _as_it_was(journal: Journal, thread: ThreadRecord | None, request: RunRequest) -> ThreadRecord | None:
    """The thread as it was when the run first began: since then it may have been stored with what this run added."""
    noted = journal.recall(_THREAD)
    if noted is None:
        mark = _Mark(0, PersistedState()) if thread is None else _Mark(len(thread.messages), thread.state)
        journal.note(_THREAD, msgspec.json.encode(mark))
        return thread
    mark, identity = msgspec.json.decode(noted, type=_Mark), request.identity
    said = thread.messages[: mark.messages] if thread is not None else ()
    return ThreadRecord(thread_id=identity.thread_id, user_id=identity.user_id, messages=said, state=mark.state)


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
