"""A run that waits for a human has not ended, and a child whose call has ended does not wait any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, DecisionRefused, HarnessAgent, RunStatus, Runtime, ToolContext, tool
from retinue.testing import ScriptedModel, call, say

from ..logs import ends_of, events_so_far, whole_log
from ..payers import Effects, payer, yes


def spawn(agent: str, task: str, seconds: int, id: str) -> Any:
    return call("agent_spawn", {"agent_id": agent, "task": task, "timeout_seconds": seconds}, id=id)


def boss(folder: Path, effects: Effects, gate: asyncio.Event) -> Agent:
    """Starts a background task that waits for the gate, and a child that asks a human, in one step."""

    @tool
    async def wait() -> str:
        """Wait for the gate."""
        await gate.wait()
        return "the gate is open"

    def background(request: Any) -> Any:
        return say("task done") if request.messages[-1].role == "tool" else call("wait", {})

    def lead(request: Any) -> Any:
        if not any(message.role == "tool" for message in request.messages):
            return [spawn("helper", "help", 0, "b1"), spawn("payer", "pay ann", 600, "b2")]
        (paid,) = [message.text for message in request.messages if message.tool_call_id == "b2"]
        return say("paid" if "paid ann" in paid else f"not paid: {paid}")

    helper = Agent("helper", ScriptedModel(background), tools=[wait])
    return HarnessAgent(
        "boss", ScriptedModel(lead), subagents=[helper, payer(effects)], workspace=folder, general_purpose=False
    )


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_an_approved_call_is_made_though_a_task_ended_meanwhile(
    kind: str, sqlite_url: str, tmp_path: Path, effects: Effects
) -> None:
    gate = asyncio.Event()
    url = "memory:" if kind == "memory" else sqlite_url
    async with Runtime.open(url, [boss(tmp_path / "ws", effects, gate)]) as runtime, asyncio.timeout(90):
        waiting = await runtime.run("boss", "go", thread_id="t")
        assert waiting.status is RunStatus.SUSPENDED
        (ticket,) = waiting.suspended
        gate.set()
        ended = ("completed", "COMPLETED")
        await events_so_far(runtime, waiting.run_id, lambda e: e.kind == "task_updated" and e.status in ended)
        result = await runtime.resume(waiting.run_id, {ticket: yes()})
        assert effects.lines == ["paid ann"]
        assert (result.status, result.response) == (RunStatus.COMPLETED, "paid")
        events = await whole_log(runtime, waiting.run_id)
    assert sorted(ends_of(events).values()) == [["completed"]] * 3


def careless(effects: Effects) -> Agent:
    """Its tool starts a child that asks a human, and goes on without waiting for the answer."""

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Have somebody paid."""
        outcome = await ctx.run_child("payer", "pay ann")
        return f"the child is {outcome.status.value}"

    def turn(request: Any) -> Any:
        last = request.messages[-1]
        return say(last.text) if last.role == "tool" else call("delegate", {}, id="c1")

    return Agent("careless", ScriptedModel(turn), tools=[delegate])


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_child_that_waits_is_cancelled_when_its_call_ends(kind: str, sqlite_url: str, effects: Effects) -> None:
    url = "memory:" if kind == "memory" else sqlite_url
    async with Runtime.open(url, [careless(effects), payer(effects)]) as runtime, asyncio.timeout(90):
        result = await runtime.run("careless", "go")
        told = "the child is suspended\n[Cancelled at the end of this call, still waiting for a human: 'payer'. Nobody can answer any more.]"
        assert (result.status, result.response) == (RunStatus.COMPLETED, told)
        assert not result.suspended
        events = await whole_log(runtime, result.run_id)
        (child,) = [event.child_run_id for event in events if event.kind == "child_started"]
        assert ends_of(events) == {result.run_id: ["completed"], child: ["cancelled"]}
        assert [event.status for event in events if event.kind == "child_finished"][-1] == RunStatus.CANCELLED
        last = max(event.seq for event in events if event.run_id == child)
        (call_end,) = [event.seq for event in events if event.kind == "tool_call_finished" and event.call_id == "c1"]
        assert last < call_end
        with pytest.raises(DecisionRefused):
            await runtime.resume(result.run_id, {"p1": yes()})
    assert effects.lines == []
