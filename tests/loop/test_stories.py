"""Whole event lists: what everybody who listens to a run gets to see."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from retinue import Agent, Run, RunStatus, Runtime, ToolContext, ToolOutput, tool
from retinue.events import AnyEvent
from retinue.testing import ScriptedModel, ScriptError, call, fail, say, think
from tests.story import check_order, story


async def listen(run: Run) -> list[AnyEvent]:
    events = [event async for event in run]
    check_order(events)
    return events


async def tell(script: Any, *tools: Any, **options: Any) -> list[str]:
    runtime = Runtime([Agent("a", ScriptedModel(script), tools=tools, **options)])
    return story(await listen(runtime.stream("a", "go")))


async def test_text_only() -> None:
    assert await tell([say("All done.", chunks=["All ", "done."])]) == [
        "run_started",
        "step_started 1",
        "text_delta 'All '",
        "text_delta 'done.'",
        "inference_finished stop",
        "step_finished 1",
        "run_finished completed natural 'All done.' None",
    ]


async def test_reasoning_comes_before_the_answer() -> None:
    assert await tell([[think("hm"), say("ok")]]) == [
        "run_started",
        "step_started 1",
        "reasoning_delta hm",
        "text_delta ok",
        "inference_finished stop",
        "step_finished 1",
        "run_finished completed natural ok None",
    ]


@tool
async def greet(name: str) -> dict[str, str]:
    """Greet a user by name."""
    return {"greeting": f"Hello, {name}!"}


async def test_one_call() -> None:
    assert await tell([call("greet", {"name": "Ann"}, id="c1"), say("Greeted.")], greet) == [
        "run_started",
        "step_started 1",
        "tool_call_started c1 greet",
        """tool_call_args_delta c1 '{"name":"Ann"}'""",
        "inference_finished tool_calls",
        "tool_call_ready c1 {'name': 'Ann'}",
        """tool_call_finished c1 succeeded '{"greeting":"Hello, Ann!"}'""",
        "step_finished 1",
        "step_started 2",
        "text_delta 'Greeted.'",
        "inference_finished stop",
        "step_finished 2",
        "run_finished completed natural 'Greeted.' None",
    ]


@tool
async def explode() -> None:
    """Fail."""
    raise RuntimeError("no fuel")


@tool(timeout=0.02)
async def sleep() -> None:
    """Sleep."""
    await asyncio.sleep(60)


async def test_three_parallel_calls_of_which_one_fails_and_one_times_out() -> None:
    calls = [call("sleep", id="c1"), call("explode", id="c2"), call("greet", {"name": "Bo"}, id="c3")]
    assert await tell([calls, say("ok")], greet, explode, sleep) == [
        "run_started",
        "step_started 1",
        "tool_call_started c1 sleep",
        "tool_call_args_delta c1 '{}'",
        "tool_call_started c2 explode",
        "tool_call_args_delta c2 '{}'",
        "tool_call_started c3 greet",
        """tool_call_args_delta c3 '{"name":"Bo"}'""",
        "inference_finished tool_calls",
        "tool_call_ready c1 {}",
        "tool_call_ready c2 {}",
        "tool_call_finished c2 failed 'internal: RuntimeError: no fuel'",
        "tool_call_ready c3 {'name': 'Bo'}",
        """tool_call_finished c3 succeeded '{"greeting":"Hello, Bo!"}'""",
        "tool_call_finished c1 failed 'timeout: no result after 0.02 s'",
        "step_finished 1",
        "step_started 2",
        "text_delta ok",
        "inference_finished stop",
        "step_finished 2",
        "run_finished completed natural ok None",
    ]


async def test_results_are_in_call_order_whatever_finished_first() -> None:
    @tool
    async def wait(seconds: float) -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return f"waited {seconds}"

    model = ScriptedModel([[call("wait", {"seconds": s}, id=f"c{s}") for s in (0.03, 0.02, 0.0)], say("ok")])
    result = await Runtime([Agent("a", model, tools=[wait])]).run("a", "go")
    assert [m.tool_call_id for m in result.messages if m.role == "tool"] == ["c0.03", "c0.02", "c0.0"]
    assert [m.text for m in model.requests[1].messages[-3:]] == ["waited 0.03", "waited 0.02", "waited 0.0"]


async def test_cancel_during_a_stream() -> None:
    begun = asyncio.Event()

    async def slowly(request: Any) -> Any:
        begun.set()
        await asyncio.sleep(60)

    closed = asyncio.Event()

    class Slow:
        name = "test:slow"

        async def stream(self, request: Any) -> Any:
            from retinue import TextChunk

            try:
                yield TextChunk("I was ")
                yield TextChunk("about to")
                await slowly(request)
            finally:
                closed.set()

    run = Runtime([Agent("a", cast(Any, Slow()))]).stream("a", "go")
    await begun.wait()
    result = await run.cancel()
    assert closed.is_set()
    assert result.status is RunStatus.CANCELLED
    assert result.response == "I was about to"
    assert story(await listen(run)) == [
        "run_started",
        "step_started 1",
        "text_delta 'I was '",
        "text_delta 'about to'",
        "step_finished 1",
        "run_finished cancelled cancelled 'I was about to' cancelled",
    ]


async def test_cancel_during_a_tool() -> None:
    begun = asyncio.Event()
    stopped: list[str] = []

    @tool
    async def work(ctx: ToolContext) -> None:
        """Work."""
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(str(ctx.cancellation.reason))
            raise

    model = ScriptedModel([[call("work", id="c1"), call("greet", {"name": "Al"}, id="c2")]])
    runtime = Runtime([Agent("a", model, tools=[work, greet])])
    run = runtime.stream("a", "go")
    await begun.wait()
    result = await runtime.cancel(run.run_id)
    assert stopped == ["cancelled"]
    assert (result.status, result.termination) == (RunStatus.CANCELLED, "cancelled")
    assert [m.text for m in result.messages if m.role == "tool"] == [
        "cancelled: the call was cancelled before it finished",
        '{"greeting":"Hello, Al!"}',
    ]
    assert story(await listen(run))[6:] == [
        "inference_finished tool_calls",
        "tool_call_ready c1 {}",
        "tool_call_ready c2 {'name': 'Al'}",
        """tool_call_finished c2 succeeded '{"greeting":"Hello, Al!"}'""",
        "tool_call_finished c1 cancelled 'cancelled: the call was cancelled before it finished'",
        "step_finished 1",
        "run_finished cancelled cancelled None cancelled",
    ]


async def test_a_model_that_raises() -> None:
    assert await tell([[say("Let me"), fail(ConnectionError("the line is dead"))]]) == [
        "run_started",
        "step_started 1",
        "text_delta 'Let me'",
        "step_finished 1",
        "error 'ConnectionError: the line is dead' error True",
        "run_finished failed error 'Let me' 'ConnectionError: the line is dead'",
    ]


async def test_a_model_that_emits_broken_json_is_told_and_goes_on() -> None:
    lines = await tell([call("greet", '{"name": "An', id="c1"), call("greet", "[1]", id="c2"), say("sorry")], greet)
    assert [line for line in lines if line.startswith("tool_call")] == [
        "tool_call_started c1 greet",
        """tool_call_args_delta c1 '{"name": "An'""",
        "tool_call_ready c1 {}",
        """tool_call_finished c1 failed 'invalid_arguments: the arguments are not a JSON object: {"name": "An'""",
        "tool_call_started c2 greet",
        "tool_call_args_delta c2 '[1]'",
        "tool_call_ready c2 {}",
        "tool_call_finished c2 failed 'invalid_arguments: the arguments are not a JSON object: [1]'",
    ]
    assert lines[-1] == "run_finished completed natural sorry None"


async def test_what_a_tool_reports_appears_between_its_start_and_its_end() -> None:
    @tool
    async def report(ctx: ToolContext) -> str:
        """Report."""
        ctx.report_activity("search", {"query": "x"})
        ctx.report_activity_delta("search", {"op": "add", "path": "/hits", "value": 3})
        ctx.stream_output("hit 1\n")
        ctx.emit({"colour": "red"})
        return "ok"

    lines = await tell([call("report", id="c1"), say("ok")], report)
    assert lines[5:11] == [
        "tool_call_ready c1 {}",
        "activity_snapshot c1 search {'query': 'x'}",
        "activity_delta c1 search [{'op': 'add', 'path': '/hits', 'value': 3}]",
        "tool_call_stream_delta c1 'hit 1\\n'",
        "custom {'colour': 'red'}",
        "tool_call_finished c1 succeeded ok",
    ]


async def test_a_sync_tool_reports_in_order_from_its_thread() -> None:
    @tool
    def count(ctx: ToolContext) -> str:
        """Count."""
        for i in range(50):
            ctx.stream_output(str(i))
        return "counted"

    lines = await tell([call("count", id="c1"), say("ok")], count)
    assert lines[6:56] == [f"tool_call_stream_delta c1 {i}" for i in range(50)]
    assert lines[56] == "tool_call_finished c1 succeeded counted"


async def test_max_steps_keeps_the_last_text_and_the_last_answer_counts() -> None:
    turns = [[say(f"try {i}"), call("greet", {"name": "x"})] for i in (1, 2)]
    out = await Runtime([Agent("a", ScriptedModel(turns), tools=[greet], max_steps=2)]).run("a", "go")
    assert (out.status, out.termination, out.response, out.steps) == (RunStatus.FAILED, "max_steps", "try 2", 2)
    assert "max_steps=2" in (out.error or "")
    turns = [[call("greet", {"name": "x"})], say("answer")]
    out = await Runtime([Agent("a", ScriptedModel(turns), tools=[greet], max_steps=2)]).run("a", "go")
    assert (out.status, out.response, out.steps) == (RunStatus.COMPLETED, "answer", 2)


async def test_a_script_that_runs_out_raises_out_of_the_run_and_the_run_still_ends() -> None:
    model = ScriptedModel([call("greet", {"name": "x"}, id="c1")])
    run = Runtime([Agent("a", model, tools=[greet])]).stream("a", "go")
    with pytest.raises(ScriptError, match="asked once more"):
        await run.result()
    events = await listen(run)
    assert story(events)[-1].startswith("run_finished failed error None")


async def test_a_tool_that_returns_state_commits_it_before_it_ends() -> None:
    from retinue import Plugin, StateKey

    count = StateKey("count", int, persistent=True)

    class Counting(Plugin):
        def register(self, r: Any) -> None:
            r.key(count)

    @tool
    async def add(ctx: ToolContext) -> ToolOutput:
        """Add."""
        return ToolOutput("added", update={count: ctx.state(count) + 1})

    lines = await tell([call("add", id="c1"), call("add", id="c2"), say("ok")], add, plugins=[Counting()])
    assert [line for line in lines if "state" in line] == [
        "state_delta 1 {'count': 1} c1",
        "state_delta 2 {'count': 2} c2",
    ]
    first = lines.index("state_delta 1 {'count': 1} c1")
    assert lines[first + 1] == "tool_call_finished c1 succeeded added"
