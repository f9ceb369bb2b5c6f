"""The harness: declarations in files, and what a spawn costs beside `ctx.run_child` of the same child."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from retinue import CallChunk, HarnessAgent, Limits, ModelRequest, Runtime, TextChunk, ToolContext, TurnEnd, tool
from retinue.models import ModelChunk

FILES, CALLS = 1_000, 50

_DECLARATION = """---
description: Reviews things of kind {n} and gives back a list of what is wrong with them.
workspace:
  mode: isolated
maxIters: 8
---

You review things of kind {n}. Give back a list.
"""

SPAWN = '{"agent_id":"reviewer0","task":"look"}'


def workspace(folder: str, files: int) -> Path:
    root = Path(folder)
    (root / "AGENTS.md").write_text("Be brief.\n")
    (root / "subagents").mkdir()
    for n in range(files):
        (root / "subagents" / f"reviewer{n}.md").write_text(_DECLARATION.format(n=n))
    return root


class Model:
    """The parent makes one call a step, so many times; a child answers at once."""

    name = "bench:harness"

    def __init__(self, tool_name: str, arguments: str, calls: int) -> None:
        self._tool_name, self._arguments, self._left = tool_name, arguments, calls

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if not any(offered.name == "nothing" for offered in request.tools):
            yield TextChunk("found nothing")
        elif self._left:
            self._left -= 1
            yield CallChunk(0, f"call_{self._left}", self._tool_name, self._arguments)
        else:
            yield TextChunk("done")
        yield TurnEnd()


async def step(root: Path, tool_name: str, arguments: str) -> float:
    """Seconds of CPU for a step with one call."""

    @tool
    async def nothing() -> str:
        """Do nothing."""
        return "nothing"

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Run the child that agent_spawn would run."""
        assert agent.catalog is not None
        child = await agent.catalog.entries["reviewer0"].agent(ctx)
        return (await ctx.run_child(child, "look")).response or ""

    agent = HarnessAgent(
        "boss", Model(tool_name, arguments, CALLS), tools=[nothing, delegate], workspace=root, max_steps=CALLS + 1
    )
    # A child inherits no tool of its parent's here: that is how the model knows it.
    object.__setattr__(agent, "own_tools", ())
    async with Runtime([agent]) as runtime:
        assert agent.catalog is not None
        agent.catalog.refresh()
        began = time.process_time()
        await runtime.run(agent, "go", limits=Limits(children=1_000_000))
        return (time.process_time() - began) / CALLS


def loading(root: Path) -> tuple[float, float, float]:
    """Seconds to read every declaration, to look again when nothing has changed, and to do so after a second."""
    agent: Any = HarnessAgent("boss", "offline:rules", workspace=root)
    began = time.perf_counter()
    agent.catalog.refresh()
    first = time.perf_counter() - began
    again: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        agent.catalog.refresh()
        again.append(time.perf_counter() - began)
    time.sleep(1.1)
    began = time.perf_counter()
    agent.catalog.refresh()
    whole = time.perf_counter() - began
    assert len(agent.catalog.entries) == FILES + 1
    return first, statistics.median(again), whole


def show(rounds: int) -> None:
    firsts: list[float] = []
    agains: list[float] = []
    wholes: list[float] = []
    ratios: list[float] = []
    costs: list[tuple[float, float]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            first, again, whole = loading(workspace(folder, FILES))
        wholes.append(whole)
        firsts.append(first)
        agains.append(again)
        with tempfile.TemporaryDirectory() as folder:
            root = workspace(folder, 3)
            bare = asyncio.run(step(root, "nothing", "{}"))
            direct = asyncio.run(step(root, "delegate", "{}")) - bare
            spawned = asyncio.run(step(root, "agent_spawn", SPAWN)) - bare
        costs.append((direct * 1e6, spawned * 1e6))
        ratios.append(spawned / direct)
    direct, spawned = (statistics.median(side) for side in zip(*costs, strict=True))
    print(f"{FILES:,} declarations, read for the first time   {statistics.median(firsts) * 1e3:8.1f} ms  (goal 1,000)")
    print(f"{FILES:,} declarations, looked at again           {statistics.median(agains) * 1e3:8.1f} ms  (goal 2)")
    print(
        f"{FILES:,} declarations, once in a second             {statistics.median(wholes) * 1e3:8.1f} ms  (beside the loop)"
    )
    print(f"a call of ctx.run_child                     {direct:8.0f} µs")
    print(f"a call of agent_spawn, same child           {spawned:8.0f} µs")
    print(f"agent_spawn over ctx.run_child              {statistics.median(ratios):8.2f} x   (goal 2)")
