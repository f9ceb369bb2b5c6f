"""Agents for telemetry tests: a leaf that uses a tool, and a tree of three levels."""

from __future__ import annotations

from typing import Any

from retinue import Agent, RunStatus, Runtime, Usage, tool
from retinue.testing import ScriptedModel, call, say
from tests.telemetry.collector import Collector

spent = Usage(requests=1, input_tokens=100, output_tokens=20, cached_tokens=40, reasoning_tokens=5, cost=0.25)


@tool
async def look(q: str) -> str:
    """Look something up."""
    return f"found {q}"


def leaf(name: str = "leaf") -> Agent:
    return Agent(
        name,
        ScriptedModel(
            lambda r: say("read", usage=spent) if r.messages[-1].role == "tool" else call("look", {"q": "secret-q"}),
            name="small",
        ),
        tools=[look],
    )


def tree() -> Agent:
    """Root → middle → leaf, and the leaf uses a tool."""
    task = {"subagent_type": "leaf", "description": "secret-task"}
    middle = Agent("middle", ScriptedModel([call("task", task), say("ok", usage=spent)]), subagents=[leaf()])
    task = {"subagent_type": "middle", "description": "secret-task"}
    return Agent("root", ScriptedModel([call("task", task), say("done", usage=spent)]), subagents=[middle])


async def run_tree(**options: Any) -> tuple[Collector, Any]:
    """What the tree sent, and its result."""
    got = Collector(**options)
    result = await Runtime([tree()], sinks=[got.sink]).run("root", "secret-input", thread_id="t1")
    assert result.status is RunStatus.COMPLETED
    return got, result
