"""Whole event lists of runs under control."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from inline_snapshot import snapshot

from retinue import Agent, Block, Decision, Runtime, SetResult, Suspend, SuspendTicket, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say
from tests.control.test_hooks import Hooks
from tests.story import story


@tool
async def ask(what: str, ctx: ToolContext) -> Any:
    """Ask a human."""
    return ToolResult.suspended(f"{what}?") if ctx.resume_input is None else f"{what}: {ctx.resume_input}"


@tool
async def explode() -> None:
    """Fail."""
    raise RuntimeError("boom")


@tool(timeout=0.01)
async def sleep() -> None:
    """Sleep."""
    await asyncio.sleep(60)


async def told(runtime: Runtime, agent: str, *decisions: dict[str, Decision]) -> list[str]:
    """Everything that is heard of a run, answered step by step."""
    result = await runtime.run(agent, "go")
    for decision in decisions:
        result = await runtime.resume(result.run_id, decision)
    return story([e async for e in runtime.events(result.run_id)])


async def test_one_fails_one_times_out_one_suspends_then_resumes() -> None:
    calls = [call("explode", id="c1"), call("sleep", id="c2"), call("ask", {"what": "pay"}, id="c3")]
    agent = Agent("a", ScriptedModel([calls, say("done")]), tools=[ask, explode, sleep])
    assert await told(Runtime([agent]), "a", {"c3": Decision.resume("yes")}) == snapshot(
        [
            "run_started",
            "step_started 1",
            "tool_call_started c1 explode",
            "tool_call_args_delta c1 '{}'",
            "tool_call_started c2 sleep",
            "tool_call_args_delta c2 '{}'",
            "tool_call_started c3 ask",
            'tool_call_args_delta c3 \'{"what":"pay"}\'',
            "inference_finished tool_calls",
            "tool_call_ready c1 {}",
            "tool_call_finished c1 failed 'internal: RuntimeError: boom'",
            "tool_call_ready c2 {}",
            "tool_call_ready c3 {'what': 'pay'}",
            "tool_call_finished c3 suspended 'pay?'",
            "tool_call_finished c2 failed 'timeout: no result after 0.01 s'",
            "step_finished 1",
            "run_finished suspended suspended None None",
            "run_started",
            "messages_snapshot",
            "step_started 1",
            "tool_call_resumed c3",
            "tool_call_finished c3 succeeded 'pay: yes'",
            "step_finished 1",
            "step_started 2",
            "text_delta done",
            "inference_finished stop",
            "step_finished 2",
            "run_finished completed natural done None",
        ]
    )


async def test_two_suspended_calls_answered_out_of_order() -> None:
    calls = [call("ask", {"what": what}, id=what) for what in ("one", "two")]
    runtime = Runtime([Agent("a", ScriptedModel([calls, say("done")]), tools=[ask])])
    decisions = ({"two": Decision.resume(2)}, {"one": Decision.cancel("no")})
    assert await told(runtime, "a", *decisions) == snapshot(
        [
            "run_started",
            "step_started 1",
            "tool_call_started one ask",
            'tool_call_args_delta one \'{"what":"one"}\'',
            "tool_call_started two ask",
            'tool_call_args_delta two \'{"what":"two"}\'',
            "inference_finished tool_calls",
            "tool_call_ready one {'what': 'one'}",
            "tool_call_finished one suspended 'one?'",
            "tool_call_ready two {'what': 'two'}",
            "tool_call_finished two suspended 'two?'",
            "step_finished 1",
            "run_finished suspended suspended None None",
            "run_started",
            "messages_snapshot",
            "step_started 1",
            "tool_call_resumed two",
            "tool_call_finished two succeeded 'two: 2'",
            "step_finished 1",
            "run_finished suspended suspended None None",
            "run_started",
            "messages_snapshot",
            "step_started 1",
            "tool_call_resumed one",
            "tool_call_finished one cancelled 'cancelled: no'",
            "step_finished 1",
            "step_started 2",
            "text_delta done",
            "inference_finished stop",
            "step_finished 2",
            "run_finished completed natural done None",
        ]
    )


async def test_block_set_result_and_suspend_fight_over_one_call() -> None:
    returned = [
        SetResult(ToolResult.success("set")),
        Suspend(SuspendTicket("t", "ask", "?")),
        Block("no"),
        Block("no again"),
    ]
    plugin = Hooks(*[("before_tool", lambda ctx, r=r: r) for r in returned])
    agent = Agent("a", ScriptedModel([call("ask", {"what": "x"}, id="c1"), say("done")]), "", [ask], [plugin])
    assert await told(Runtime([agent]), "a") == snapshot(
        [
            "run_started",
            "step_started 1",
            "tool_call_started c1 ask",
            'tool_call_args_delta c1 \'{"what":"x"}\'',
            "inference_finished tool_calls",
            "tool_call_ready c1 {'what': 'x'}",
            "error \"hook '<lambda>' of plugin 'hooks' also asked for Block; the first is kept\" intercept_tie False",
            "tool_call_finished c1 failed 'blocked: no'",
            "step_finished 1",
            "step_started 2",
            "text_delta done",
            "inference_finished stop",
            "step_finished 2",
            "run_finished completed natural done None",
        ]
    )


async def test_handoff_there_and_back() -> None:
    b = Agent("b", ScriptedModel([call("transfer_to_a", {}, id="h2")]), handoffs=["a"])
    a = Agent("a", ScriptedModel([call("transfer_to_b", {"reason": "money"}, id="h1"), say("bye")]), handoffs=[b])
    assert await told(Runtime([a]), "a") == snapshot(
        [
            "run_started",
            "step_started 1",
            "tool_call_started h1 transfer_to_b",
            'tool_call_args_delta h1 \'{"reason":"money"}\'',
            "inference_finished tool_calls",
            "tool_call_ready h1 {'reason': 'money'}",
            "tool_call_finished h1 succeeded 'b goes on from here.'",
            "handoff b money",
            "step_finished 1",
            "step_started 2",
            "tool_call_started h2 transfer_to_a",
            "tool_call_args_delta h2 '{}'",
            "inference_finished tool_calls",
            "tool_call_ready h2 {}",
            "tool_call_finished h2 succeeded 'a goes on from here.'",
            "handoff a ''",
            "step_finished 2",
            "step_started 3",
            "text_delta bye",
            "inference_finished stop",
            "step_finished 3",
            "run_finished completed natural bye None",
        ]
    )


@dataclass
class Verdict:
    guilty: bool


async def test_structured_output_wrong_twice_then_right() -> None:
    model = ScriptedModel([say("hm"), say('{"guilty": 1}'), say('{"guilty": true}')])
    assert await told(Runtime([Agent("a", model, output=Verdict)]), "a") == snapshot(
        [
            "run_started",
            "step_started 1",
            "text_delta hm",
            "inference_finished stop",
            "error 'the answer does not fit the output type: it is not JSON: JSON is malformed: invalid character (byte 0)' output_invalid False",
            "step_finished 1",
            "step_started 2",
            "text_delta '{\"guilty\": 1}'",
            "inference_finished stop",
            "error 'the answer does not fit the output type: Expected `bool`, got `int` - at `$.guilty`' output_invalid False",
            "step_finished 2",
            "step_started 3",
            "text_delta '{\"guilty\": true}'",
            "inference_finished stop",
            "step_finished 3",
            "run_finished completed natural '{\"guilty\": true}' None",
        ]
    )
