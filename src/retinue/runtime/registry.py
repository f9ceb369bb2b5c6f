"""What a runtime knows: agents, their models, and how they are run as children."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from ..backends.background import LocalBackground
from ..backends.local import LocalBackend
from ..backends.task_client import HttpTaskClient
from ..backends.tasks_http import TaskHttpBackend
from ..core.agents import Agent
from ..core.backend import ChildInput, ExecutionPlan
from ..core.children import Child, ParentContext
from ..core.context import ToolContext
from ..core.errors import ConfigurationError, UnknownAgent
from ..core.model import Model
from ..core.runs import RunResult, Usage
from ..models.prices import Price, ask_price
from ..models.registry import OpenModels
from ..subagents.child import run_child_agent, run_children
from ..subagents.remote import RemoteSubagentStub

_log = logging.getLogger(__name__)


class AgentRegistry:
    """The agents of a runtime, with those they name as objects, their models, and how they are run as children."""

    def __init__(self, price: Price | None) -> None:
        self.agents: dict[str, Agent] = {}
        self._price, self.prices = price, price is not None
        self._unpriced: set[str] = set()
        self.backend: LocalBackend | None = None
        self.background: LocalBackground | None = None
        self._remotes: dict[Any, TaskHttpBackend] = {}
        self._models = OpenModels()

    def take(self, agent: Any) -> None:
        """Add an agent; two of one name are an error."""
        if not isinstance(agent, Agent):
            raise ConfigurationError(f"not an agent: {agent!r}")
        if self.agents.get(agent.name) is agent:
            return
        if agent.name in self.agents:
            raise ConfigurationError(f"two agents are named {agent.name!r}: rename one")
        agent.check()
        self.agents[agent.name] = agent
        self._take_linked(agent)

    def _take_linked(self, agent: Agent) -> None:
        for target in agent.linked():
            if self.agents.get(target.name) is not target:
                self.take(target)

    def find(self, agent: str | Agent) -> Agent:
        """The agent of that name; one given as an object need not be known."""
        if isinstance(agent, Agent):
            return agent
        return self.agent(agent)

    def resolve(self, agent: str | Agent) -> ExecutionPlan:
        assert self.backend is not None
        found = self.find(agent)
        if isinstance(found, RemoteSubagentStub):
            return ExecutionPlan(found, self._remote(found), is_local=False)
        return ExecutionPlan(found, self.backend)

    def _remote(self, stub: RemoteSubagentStub) -> TaskHttpBackend:
        """The backend of an agent on a server; one for each, so that connections are used again."""
        assert self.backend is not None
        key = (stub.name, stub.url, tuple((stub.headers or {}).items()))
        made = self._remotes.get(key)
        if made is None:
            client = HttpTaskClient(stub.url, stub.headers, stub.name)
            made = self._remotes[key] = TaskHttpBackend(client, stub.name, self.backend)
        return made

    async def close(self) -> None:
        """Close the connections to servers."""
        await asyncio.gather(self._models.close(), *[backend.client.close() for backend in self._remotes.values()])

    def price(self, model: str, usage: Usage) -> float | None:
        """What a call costs. That a price function does not know a model, or fails for it, is told once."""
        if self._price is None:
            return None
        cost, problem = ask_price(self._price, model, usage)
        if cost is None and model not in self._unpriced:
            self._unpriced.add(model)
            told = "the price of model %r is not known%s: its calls count as 0. Give Runtime(price=…) its price"
            _log.warning(told, model, problem)
        return cost

    def refuse_child(self, ctx: ToolContext) -> tuple[str, int] | None:
        assert self.backend is not None
        return self.backend.refuse_child(ctx.run.run_id)

    def run_child(
        self, ctx: ToolContext, agent: str | Agent, input: ChildInput, **options: Any
    ) -> Coroutine[Any, Any, RunResult]:
        return run_child_agent(self, agent, input, parent=ParentContext.of(ctx), **options)

    def run_children(
        self, ctx: ToolContext, children: Sequence[Child], **options: Any
    ) -> Coroutine[Any, Any, list[RunResult]]:
        return run_children(ctx, children, **options)

    def agent(self, name: str) -> Agent:
        if name not in self.agents:
            raise UnknownAgent(name, tuple(self.agents))
        return self.agents[name]

    def model_of(self, agent: Agent, override: str | Model | None = None) -> Model:
        return self._models.resolve(agent.model if override is None else override, f"agent {agent.name!r}")
