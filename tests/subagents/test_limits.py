"""A limit that an agent sets holds below a parent with wider limits, also where the limit is the default."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import Agent, Limits, RunResult, Runtime, ToolContext, tool
from retinue.errors import LimitReached
from retinue.testing import ScriptedModel, call, say

WIDE = Limits(children=2000, depth=20, parallel=500)


def limited(name: str, limits: Limits | None, turn: Any, tools: Any) -> Agent:
    """An agent with limits, or one that sets none."""
    if limits is None:
        return Agent(name, ScriptedModel(turn), tools=tools)
    return Agent(name, ScriptedModel(turn), tools=tools, limits=limits)


async def run_below(agents: list[Agent]) -> RunResult:
    """Run `middle` as the child of a root whose limits are wide."""

    def lead(request: Any) -> Any:
        last = request.messages[-1]
        return say(last.text) if last.role == "tool" else call("task", {"subagent_type": "middle", "description": "go"})

    async with Runtime([Agent("root", ScriptedModel(lead), subagents=agents)]) as runtime:
        return await runtime.run("root", "go", limits=WIDE)


def one_call(request: Any) -> Any:
    last = request.messages[-1]
    return say(last.text) if last.role == "tool" else call("work", {})


@pytest.mark.parametrize(
    ("limits", "started"),
    [(Limits(children=255), 255), (Limits(children=256), 256), (Limits(children=257), 257), (None, 300)],
)
async def test_no_more_children_start_than_the_agent_allows(limits: Limits | None, started: int) -> None:
    leaf = Agent("leaf", ScriptedModel(lambda request: say("x")))

    @tool
    async def work(ctx: ToolContext) -> str:
        """Start children until a limit is reached."""
        for number in range(300):
            try:
                await ctx.run_child(leaf, "go")
            except LimitReached:
                return str(number)
        return "300"

    assert (await run_below([limited("middle", limits, one_call, [work])])).response == str(started)


@pytest.mark.parametrize(("limits", "deepest"), [(Limits(depth=2), 2), (Limits(depth=3), 3), (None, 6)])
async def test_children_are_no_deeper_than_the_agent_allows(limits: Limits | None, deepest: int) -> None:
    """Each agent under `middle` starts one more, up to six."""

    def link(below: int) -> Agent:
        @tool
        async def work(ctx: ToolContext) -> str:
            """Start the next agent."""
            try:
                outcome = await ctx.run_child(link(below + 1), "go")
            except LimitReached:
                return str(below)
            return str(outcome.response)

        if below == 0:
            return limited("middle", limits, one_call, [work])
        if below < 6:
            return limited(f"link{below}", None, one_call, [work])
        return limited(f"link{below}", None, lambda request: say(str(below)), [])

    assert (await run_below([link(0)])).response == str(deepest)


@pytest.mark.parametrize(
    ("limits", "most"), [(Limits(parallel=31), 31), (Limits(parallel=32), 32), (Limits(parallel=33), 33), (None, 40)]
)
async def test_no_more_calls_are_at_work_than_the_agent_allows(limits: Limits | None, most: int) -> None:
    """Forty calls of one step; as many as may are at work at once."""
    at_work, seen = 0, 0

    @tool
    async def work() -> str:
        """Be at work for a moment."""
        nonlocal at_work, seen
        at_work += 1
        seen = max(seen, at_work)
        for _ in range(50):  # all that may start have started
            await asyncio.sleep(0)
        at_work -= 1
        return "worked"

    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("done")
        return [call("work", {}, id=f"c{number}") for number in range(40)]

    assert (await run_below([limited("middle", limits, turn, [work])])).response == "done"
    assert seen == most
