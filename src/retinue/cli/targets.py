"""Agents that a command is told of: from a folder, or from a module."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any, cast

from ..core.agents import Agent
from ..core.errors import ConfigurationError
from ..runtime import Runtime


def load_runtime(target: str, url: str) -> Runtime:
    """The runtime that `module:attribute` stands for, on a database. Others' interrupted runs are left to others."""
    found = _found(target)
    if not isinstance(cast("object", found), Agent | Runtime) and callable(found):
        found = _called(found, target, url)
    if isinstance(found, Runtime):
        return found
    agents: list[Agent] = [found] if isinstance(cast("object", found), Agent) else _as_agents(found)
    if not agents:
        raise ConfigurationError(f"--target {target}: it is {type(found).__name__}, not an agent or a list of agents")
    return Runtime.open(url, agents, recover=False)


async def workspace_runtime(workspace: str, agent: str, model: str | None, url: str) -> Runtime:
    """The runtime of a folder with the agent that `retinue run` made of it."""
    from .assistant import NAME, choose_model, make_assistant
    from .declared import looked_at, make_declared

    harness = make_assistant(workspace, choose_model(model))
    if agent != NAME and agent not in looked_at(harness).entries:
        raise ConfigurationError(
            f"the agent {agent!r} is not declared in {workspace!r}: name with --target MODULE:ATTR the one in your code, "
            "or with --workspace DIR the folder that declares it"
        )
    chosen = harness if agent == NAME else (await make_declared(harness, agent)).agent
    return Runtime.open(url, [chosen], recover=False)


def _found(target: str) -> Any:
    module, colon, path = target.partition(":")
    if not module or not colon or not path:
        raise ConfigurationError(f"--target {target!r}: write MODULE:ATTR, as in app.agents:assistant")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as exc:
        raise ConfigurationError(
            f"--target {target}: {type(exc).__name__}: {exc}: correct it, or name another"
        ) from exc
    return found


def _called(factory: Any, target: str, url: str) -> Any:
    """What a function gives; it is told the database where it asks for something."""
    try:
        return factory(url) if inspect.signature(factory).parameters else factory()
    except Exception as exc:
        raise ConfigurationError(f"--target {target}: it failed with {type(exc).__name__}: {exc}") from exc


def _as_agents(found: Any) -> list[Agent]:
    if isinstance(found, str) or not isinstance(found, Iterable):
        return []
    agents = list(cast("Iterable[Any]", found))
    return agents if all(isinstance(agent, Agent) for agent in agents) else []
