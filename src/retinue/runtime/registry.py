"""The registry of a runtime: agents, their models, and the backends that run them as children."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..backends.background import LocalBackground
from ..backends.capabilities import can_stop
from ..backends.foreign import ForeignBackend
from ..backends.http_client import HttpClient
from ..backends.langgraph import LangGraphBackend
from ..backends.local import LocalBackend
from ..backends.mirror import close, give_up
from ..backends.tasks_http import HttpTaskClient, TaskHttpBackend
from ..core.agents import Agent, agent_name, check_model, linked_agents
from ..core.backend import Backend, ExecutionPlan, RunRequest
from ..core.budgets import Budgets
from ..core.concurrency import GRACE, CancellationToken, join
from ..core.context import ToolContext
from ..core.errors import ConfigurationError, UnknownAgent
from ..core.messages import ToolCall
from ..core.model import Model
from ..core.runs import REMOTE_KEY, Child, RunResult, Usage
from ..core.tools import Tool
from ..log.owned import LiveLog
from ..log.state import LogState, RunState
from ..models.gates import AccountGates
from ..models.prices import Price, ask_price
from ..models.profiles import UNKNOWN_WINDOW, profile
from ..models.registry import OpenModels
from ..storage.budgets import LocalBudgetTable
from ..subagents.child import run_child_agent, run_children
from ..subagents.declarations import RemoteSubagentStub, SubagentDeclaration, remote_stub

if TYPE_CHECKING:
    from .placed import Placement

_log = logging.getLogger(__name__)


def _remote_backend(stub: RemoteSubagentStub) -> Backend:
    if stub.protocol == "a2a":
        from ..backends.a2a import A2ABackend
        from ..backends.a2a_client import A2AClient

        return A2ABackend(A2AClient(stub.url, stub.headers, stub.name, stub.origins, stub.card_key))
    if stub.protocol == "langgraph":
        return LangGraphBackend(HttpClient(stub.url, stub.headers, stub.name), stub.agent or stub.name)
    return TaskHttpBackend(HttpTaskClient(stub.url, stub.headers, stub.name), stub.agent or stub.name)


class AgentRegistry:
    """The agents of a runtime, with those they name as objects, their models, and how they are run as children."""

    run_child_agent = staticmethod(run_child_agent)

    def __init__(
        self,
        price: Price | None,
        backends: Mapping[str, Backend] | None = None,
        gates: AccountGates | None = None,
        budgets: Budgets | None = None,
    ) -> None:
        if price is not None and not callable(price):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigurationError(f"Runtime: price is a function of a model and its usage, not {price!r:.80}")
        self.agents: dict[str, Agent] = {}
        self.given: set[str] = set()
        """The names of the agents that were added by themselves, not because another one names them."""
        self._backends = dict(backends or {})
        for name, backend in self._backends.items():
            if isinstance(backend, type) or not hasattr(backend, "profile"):
                problem = f"backend {name!r} is an object with profile, run and abort, not {backend!r:.80}"
                raise ConfigurationError(f"Runtime: {problem}")
        self._price, self.prices = price, price is not None
        self.gates = gates or AccountGates()
        self.budgets = budgets or Budgets((), LocalBudgetTable())
        self._unpriced: set[str] = set()
        self._unmeasured: set[str] = set()
        self.backend: LocalBackend | None = None
        self.background: LocalBackground | None = None
        self.placement: Placement | None = None
        """With an engine: executes the agents that have a queue."""
        self.served: frozenset[str] = frozenset()
        """The queues that this process serves as a worker."""
        self._foreign: dict[Any, ForeignBackend] = {}
        self._models = OpenModels()
        self._checked: WeakSet[Agent] = WeakSet()
        """Agents whose sub-agents are known to have models that can be used."""
        self.overrides: list[str | Model] = []
        """The models of `override`, the innermost last."""

    def add(self, agent: Agent) -> None:
        """Add an agent and those that it names as objects; two of one name are an error."""
        if not isinstance(agent, Agent):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"not an agent: {agent!r}")
        if self.agents.get(agent.name) is agent:
            return
        if agent.name in self.agents:
            raise ConfigurationError(f"two agents are named {agent.name!r}: rename one")
        agent.check_parts()
        if agent.backend is not None:
            self._check_backend(agent, agent.backend)
        self.agents[agent.name] = agent
        for target in linked_agents(agent):
            self.add(target)

    def find(self, agent: str | Agent) -> Agent:
        """Return the agent of that name; one given as an object need not be known."""
        return agent if isinstance(agent, Agent) else self.agent(agent)

    def named(self, agent: str | Agent) -> Agent:
        """Return an agent by name, for a run that a worker executes: an unknown agent becomes a stand-in with that name."""
        if isinstance(agent, Agent):
            return agent
        return self.agents.get(agent) or Agent(agent)

    def resolve(self, agent: str | Agent) -> ExecutionPlan:
        assert self.backend is not None
        found = self.find(agent)
        if isinstance(found, RemoteSubagentStub):
            headers = tuple((found.headers or {}).items())
            key = (found.name, found.agent, found.url, found.protocol, found.origins, found.card_key, headers)
            if key not in self._foreign:
                self._foreign[key] = ForeignBackend(_remote_backend(found), self.backend)
            return ExecutionPlan(found, self._foreign[key], is_local=False)
        if found.backend is not None:
            return ExecutionPlan(found, self._named(found.backend, found), is_local=False)
        if found.queue is not None and self.placement is not None:
            return ExecutionPlan(found, self.placement)
        return ExecutionPlan(found, self.backend)

    def is_elsewhere(self, agent: Agent, parent_run_id: str, run_id: str) -> bool:
        plan, backend = self.resolve(agent), self.backend
        parent = None if backend is None else backend.execution_of(parent_run_id)
        if parent is not None and plan.backend is self.placement and self.placement is not None:
            return self.placement.is_placed(agent, parent.log.tree, run_id)
        return not plan.is_local

    def place_call(self, run: Any, tool: Tool, state: Any, call: ToolCall, resume_input: Any) -> Any:
        placement = self.placement
        if placement is None or not placement.calls.is_placed(tool, state):
            return None
        return placement.calls.execute(run, tool, state, call, resume_input)

    async def stop_waiting(self, tree: LogState, reason: str, runs: Iterable[RunState] | None = None) -> None:
        """Ask the backends of suspended runs elsewhere to stop them: these runs of a log, or all. Errors are logged."""
        known = tree.runs.values() if runs is None else runs
        waiting = [run for run in known if run.tickets and run.waits and not run.request.detached]
        await self.stop_runs(tree, waiting, reason)

    async def stop_runs(self, tree: LogState, runs: Iterable[RunState], reason: str) -> None:
        """Ask the backends of runs elsewhere to stop them. Errors are logged."""
        stops = [self._stop(tree, run, reason) for run in runs]
        for problem in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(problem, Exception):
                _log.warning("a run elsewhere could not be stopped: %s", problem)

    async def _stop(self, tree: LogState, run: RunState, reason: str) -> None:
        if run.request.queue is not None and self.placement is not None:
            await self.placement.backend.stop(run.run_id, reason)
        elif (found := self._foreign_of(tree, run)) is None:
            _log.warning("run %s waits elsewhere and was not stopped: its agent is not known", run.run_id)
        elif not can_stop(found[1].profile()):
            _log.warning("run %s waits elsewhere and was not stopped: its backend cannot stop runs", run.run_id)
        else:
            token, (agent, foreign) = CancellationToken(), found
            token.set(reason)
            request = RunRequest(
                agent=agent,
                identity=run.identity,
                messages=(),
                cancellation=token,
                is_dispatched=True,
                remote=run.values.get(REMOTE_KEY, {}),
            )
            foreign.waiting.pop(run.run_id, None)
            await foreign.backend.run(request)

    async def stop_abandoned(self, tree: LogState) -> None:
        """Stop the runs elsewhere that have ended in this log and may go on there: placed ones, and those that waited."""
        if self.placement is not None:
            await self.placement.backend.stop_abandoned(tree)
        if not self._foreign:
            return
        known = [
            tree.runs[run_id] for one in self._foreign.values() for run_id in one.waiting.keys() & tree.runs.keys()
        ]
        stops = [self._stop(tree, run, "the run that started it has ended") for run in known if run.is_over]
        for problem in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(problem, Exception):
                _log.warning("a run elsewhere could not be stopped: %s", problem)

    async def follow_rests(self, log: LiveLog) -> None:
        """Follow, as the new owner of a log, what its ended runs have left open elsewhere; remember which runs wait there."""
        for run in log.tree.runs.values():
            if run.waits and run.tickets and (found := self._foreign_of(log.tree, run)) is not None:
                found[1].note_waiting(run.run_id, found[0])
        for run in log.tree.open_rests():
            if (found := self._foreign_of(log.tree, run)) is not None:
                agent, foreign = found
                await foreign.follow_rest(agent, log, run)
            else:
                _log.warning("run %s: what it left elsewhere is given up: its agent is not known", run.run_id)
                await give_up(log, run)
                close(log, run)

    def _foreign_of(self, tree: LogState, run: RunState) -> tuple[Agent, ForeignBackend] | None:
        """Return the agent and the backend of a child that runs elsewhere; None if its agent is not known here."""
        name, parent = run.identity.agent, tree.parent_of(run)
        if run.request.queue is not None and self.placement is not None:
            return self.named(name), self.placement.foreign
        for foreign in self._foreign.values():
            if run.run_id in foreign.waiting:  # perhaps of an agent that is known only as an object
                return foreign.waiting[run.run_id], foreign
        agent = self.agents.get(name)
        above = None if parent is None else self.agents.get(parent.identity.agent)
        for given in () if above is None else above.subagents:
            if isinstance(given, SubagentDeclaration) and given.name == name and given.url is not None:
                agent = remote_stub(given)
        plan = None if agent is None else self.resolve(agent)
        return (plan.agent, plan.backend) if plan is not None and isinstance(plan.backend, ForeignBackend) else None

    def _named(self, name: str, agent: Agent) -> ForeignBackend:
        """Return the backend that an agent names, wrapped in a ForeignBackend."""
        assert self.backend is not None
        self._check_backend(agent, name)
        if name not in self._foreign:
            self._foreign[name] = ForeignBackend(self._backends[name], self.backend)
        return self._foreign[name]

    def _check_backend(self, agent: Agent, name: str) -> None:
        if name not in self._backends:
            known = ", ".join(self._backends) or "none"
            raise ConfigurationError(f"agent {agent.name!r} runs on backend {name!r}; Runtime(backends=…) has: {known}")

    async def close(self) -> None:
        """Close the connections to servers."""
        await join(self.budgets.jobs, GRACE)
        await self.budgets.jobs.close()
        closes = [getattr(foreign.backend, "close", None) for foreign in self._foreign.values()]
        await asyncio.gather(
            self.gates.close(), self._models.close(), *[close() for close in closes if close is not None]
        )

    def price(self, model: str, usage: Usage) -> float | None:
        """Return the cost of a call. A model without a price is logged once."""
        if self._price is None:
            return None
        cost, problem = ask_price(self._price, model, usage)
        if cost is None and model not in self._unpriced:
            self._unpriced.add(model)
            advice = "its calls count as 0. Give Runtime(price=…) its price"
            _log.warning("the price of model %r is not known%s: %s", model, problem, advice)
        return cost

    def context_window(self, model: Model, used: float = 0) -> int:
        """Return the window of a model: its own word, else that of the table, else a careful guess.

        A guess is logged once, when half of it is `used`."""
        given: Any = getattr(model, "context_window", None)
        if type(given) is int and given > 0:
            return given
        known = profile(model.name).context_window
        if known is not None:
            return known
        if used > UNKNOWN_WINDOW / 2 and model.name not in self._unmeasured:
            self._unmeasured.add(model.name)
            advice = "give it with open_model(…, context_window=…) or Compaction(window=…)"
            _log.warning(
                "the context window of model %r is not known: %s tokens are assumed; %s",
                model.name,
                f"{UNKNOWN_WINDOW:,}",
                advice,
            )
        return UNKNOWN_WINDOW

    async def refuse_child(self, ctx: ToolContext) -> tuple[str, int] | None:
        assert self.backend is not None
        return await self.backend.refuse_child(ctx.run.run_id)

    def run_children(
        self, ctx: ToolContext, children: Sequence[Child], **options: Any
    ) -> Coroutine[Any, Any, list[RunResult]]:
        return run_children(ctx, children, **options)

    def agent(self, name: str) -> Agent:
        found = self.agents.get(name) or self.agents.get(agent_name(name) or "")
        if found is None:
            raise UnknownAgent(name, tuple(self.agents))
        return found

    @contextmanager
    def override(self, model: str | Model) -> Generator[None]:
        """Let `model` replace the models of all runs that are started or answered meanwhile."""
        check_model(model, "override")
        self.overrides.append(model)
        try:
            yield
        finally:
            self.overrides.remove(model)

    def check_subagents(self, agent: Agent) -> None:
        """Raise ConfigurationError if an agent below this one names a model that cannot be used; checked once."""
        if agent in self._checked:
            return
        self._checked.add(agent)
        try:
            named = [self.agents[name] for name in agent.subagents if isinstance(name, str) and name in self.agents]
            for target in (*linked_agents(agent), *named):
                if target.model is not None and target.backend is None:
                    self._models.resolve(target.model, f"agent {target.name!r}")
                self.check_subagents(target)
        except ConfigurationError:
            self._checked.discard(agent)
            raise

    def model_of(self, agent: Agent, override: str | Model | None = None) -> Model:
        if agent.backend is not None:
            where = f"agent {agent.name!r} runs on backend {agent.backend!r}"
            raise ConfigurationError(f"{where}, which executes children only: give it work from another agent's run")
        is_given = override is not None and not isinstance(agent, RemoteSubagentStub)  # that never thinks here
        return self._models.resolve(override if is_given else agent.model, f"agent {agent.name!r}")
