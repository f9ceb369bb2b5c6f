"""Trees under stress: cancelled at every point, and writing to one key."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from retinue import Agent, Plugin, Registrar, Run, RunStatus, Runtime, StateKey, ToolContext, ToolOutput, tool
from retinue.testing import ScriptedModel, call, say

best: StateKey[str, str] = StateKey("best", str, persistent=True)


class Best(Plugin):
    name = "best"

    def register(self, r: Registrar) -> None:
        r.key(best)


async def test_two_exports_to_one_exclusive_key_name_both_calls() -> None:
    child = Agent("child", ScriptedModel(lambda r: say(f"{r.messages[-1].text} wins")))

    @tool
    async def delegate(who: str, ctx: ToolContext) -> ToolOutput:
        """Delegate and export."""
        outcome = await ctx.run_child(child, who)
        return ToolOutput(outcome.response, update={best: outcome.response or ""})

    script = [[call("delegate", {"who": w}, id=f"call_{w}") for w in ("ann", "bob")], say("done")]
    agent = Agent("parent", ScriptedModel(script), tools=[delegate], plugins=[Best()])
    result = await Runtime([agent]).run("parent", "go")
    first, second = [m.text for m in result.messages if m.role == "tool"]
    assert (first, result.state[best]) == ("ann wins", "ann wins")
    assert "'best' was already written by parallel call 'call_ann'; the write of call 'call_bob'" in second


def three_levels(alive: Counter[str]) -> Runtime:
    """Parent, two children, and a grandchild each, with async and blocking tools on the way."""

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work in small steps."""
        alive["tools"] += 1
        try:
            for _ in range(4):
                await asyncio.sleep(0)
            return "worked"
        finally:
            alive["tools"] -= 1

    def steps(name: str, *asks: Any) -> Any:
        def answer(request: Any) -> Any:
            return say(f"{name} done") if request.messages[-1].role == "tool" else list(asks)

        return ScriptedModel(answer)

    leaf = Agent("leaf", steps("leaf", call("work"), call("work")), tools=[work])
    down = call("task", {"subagent_type": "leaf", "description": "x"})
    middle = Agent("middle", steps("middle", down, call("work")), tools=[work], subagents=[leaf])
    fan_out = [call("task", {"subagent_type": "middle", "description": str(n)}) for n in range(2)]
    return Runtime([Agent("top", steps("top", *fan_out), subagents=[middle])])


async def ticks(run: Run, n: int) -> None:
    """Let the event loop turn n times."""
    for _ in range(n):
        if run.ended:
            return
        await asyncio.sleep(0)


async def test_cancelled_at_every_point_every_run_that_began_has_ended() -> None:
    n = 0
    while True:
        alive: Counter[str] = Counter()
        runtime = three_levels(alive)
        run = runtime.stream("top", "go", thread_id="t")
        await ticks(run, n)
        over = run.ended
        result = await asyncio.wait_for(run.cancel(), 90)
        assert result.status in (
            RunStatus.COMPLETED,
            RunStatus.CANCELLED,
        )
        events: list[Any] = [e async for e in runtime.events(run.run_id)]
        begun = Counter(e.run_id for e in events if e.kind == "run_started")
        ended = Counter(e.run_id for e in events if e.kind == "run_finished")
        assert begun == ended
        assert set(begun.values()) <= {1}
        assert events[-1].kind == "run_finished"
        assert events[-1].ns == ()
        ready = Counter(e.call_id for e in events if e.kind == "tool_call_ready")
        closed = Counter(e.call_id for e in events if e.kind == "tool_call_finished")
        assert all(closed[call_id] >= count for call_id, count in ready.items())
        assert alive["tools"] == 0
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []
        if over:
            break
        n += 1
    assert n > 10
