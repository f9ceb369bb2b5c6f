"""Runs in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..core.agents import Agent
from ..core.backend import BackendProfile, Resolver, RunRequest
from ..core.decisions import Decision
from ..core.events import Sink
from ..core.journal import Journal
from ..core.model import Model
from ..core.runs import RunResult
from ..core.state import UnknownKeyPolicy
from ..core.statestore import StateStore
from ..core.stores import ThreadRecord
from ..loop.decide import match_decisions
from ..loop.handoff import Equipment
from ..loop.limits import Budget
from ..loop.log import EventLog
from ..loop.phases import HookTable
from ..loop.run import abandon_run, execute_run, resume_run
from ..loop.scope import RunScope


class LocalRun:
    """A run that is set up: whatever is wrong with the request has been found by now, and no event exists yet."""

    def __init__(
        self,
        request: RunRequest,
        journal: Journal,
        resolver: Resolver,
        sinks: Iterable[Sink] = (),
    ) -> None:
        self.request, self.journal, self.log = request, journal, EventLog(sinks)
        self._resolver = resolver
        self._state = StateStore()
        self._equipment = self._equip(request.agent, request.model)
        self._state.apply_seed(request.seed)
        self.scope: RunScope | None = None
        self._thread: ThreadRecord | None = None

    def _equip(self, agent: Agent, override: str | Model | None = None) -> Equipment:
        """What an agent brings to this run; plugins that are already in it keep their state."""
        model = self._resolver.model_of(agent, override)
        registrars = [self._state.install_once(plugin) for plugin in agent.plugins]
        tools = [tool for registrar in registrars for tool in registrar.tools]
        return Equipment(agent, model, agent.toolbox.extended(tools), HookTable(registrars))

    def _equip_by_name(self, name: str) -> Equipment:
        return self._equip(self._resolver.agent(name))

    async def execute(self, thread: ThreadRecord | None = None) -> RunResult:
        """Run to the end, continuing the thread where there is one."""
        request, history = self.request, ()
        self._thread = thread
        if thread is not None:
            history = thread.messages
            self._state.apply_seed(thread.state, UnknownKeyPolicy.SKIP)
            self._state.apply_seed(request.seed)
        self.scope = RunScope(
            agent=request.agent,
            identity=request.identity,
            model=self._equipment.model,
            toolbox=self._equipment.toolbox,
            state=self._state,
            journal=self.journal,
            log=self.log,
            hooks=self._equipment.hooks,
            equip=self._equip_by_name,
            budget=Budget(request.limits, self.journal.now()),
            cancellation=request.cancellation,
            history=history,
            context=request.context,
        )
        return await execute_run(self.scope, request.messages)

    def match(self, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
        """The decisions that are new, by call id; raises where one does not fit."""
        assert self.scope is not None
        return match_decisions(self.scope, decisions)

    async def resume(self, decisions: Mapping[str, Decision]) -> RunResult:
        """Go on with decisions that `match` has passed."""
        assert self.scope is not None
        return await resume_run(self.scope, decisions)

    def abandon(self) -> RunResult | None:
        """Give up on a run that does not stop; None where it had not begun."""
        return None if self.scope is None else abandon_run(self.scope)

    def thread_after(self) -> ThreadRecord:
        """The thread as this run leaves it."""
        identity, before = self.request.identity, self._thread
        history = before.messages if before else ()
        kept = dict(before.state.extensions) if before else {}
        state = self._state.export_scope("thread")
        state.extensions = {**kept, **state.extensions}
        said = self.scope.own_messages if self.scope else ()
        return ThreadRecord(
            thread_id=identity.thread_id, user_id=identity.user_id, messages=(*history, *said), state=state
        )


class LocalBackend:
    """The backend for agents that run here. Models and journals come from outside."""

    def __init__(self, resolver: Resolver, make_journal: Callable[[], Journal]) -> None:
        self._resolver, self.make_journal = resolver, make_journal
        self._running: dict[str, RunRequest] = {}

    def profile(self) -> BackendProfile:
        return BackendProfile.full_local()

    def open(self, request: RunRequest, journal: Journal, sinks: Iterable[Sink] = ()) -> LocalRun:
        """Set a run up without starting it; raises where it cannot be."""
        return LocalRun(request, journal, self._resolver, sinks)

    async def run(self, request: RunRequest) -> RunResult:
        opened = self.open(request, self.make_journal())
        self._running[request.identity.run_id] = request
        try:
            return await opened.execute()
        finally:
            del self._running[request.identity.run_id]

    async def abort(self, run_id: str) -> None:
        if (request := self._running.get(run_id)) is not None:
            request.cancellation.set("aborted")
