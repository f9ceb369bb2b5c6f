"""Spans are made of events: one trace a tree, right parents, names as the conventions have them, nothing left open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from inline_snapshot import snapshot
from msgspec.structs import replace
from opentelemetry import trace

from retinue import (
    Agent,
    Child,
    Limits,
    Message,
    ParentContext,
    RunStatus,
    Runtime,
    ToolCallStatus,
    ToolContext,
    ToolResult,
    run_child_agent,
    tool,
)
from retinue.core.events import ChildStarted, RunFinished, RunStarted, StepStarted, ToolCallFinished, ToolCallReady
from retinue.events import event_from_json, event_to_json
from retinue.testing import RecordingSink, ScriptedModel, call, say
from tests.telemetry.agents import leaf, run_tree, spent, tree
from tests.telemetry.collector import Collector, attributes, every, span_id, trace_id

from ..waiting import let_others_run, until


async def test_three_levels_are_one_trace() -> None:
    got, _ = await run_tree()
    assert got.tree() == snapshot(
        [
            "invoke_agent root",
            "  chat scripted",
            "  execute_tool task",
            "    invoke_agent middle",
            "      chat scripted",
            "      execute_tool task",
            "        invoke_agent leaf",
            "          chat small",
            "          execute_tool look",
            "          chat small",
            "      chat scripted",
            "  chat scripted",
        ]
    )
    assert len({trace_id(span) for span in got.spans}) == 1
    assert got.open == 0


async def test_attributes_are_as_the_conventions_name_them() -> None:
    got, result = await run_tree()
    root, model, call_, child = (
        got.span("invoke_agent root"),
        got.span("chat scripted", -1),
        got.span("execute_tool look"),
        got.span("invoke_agent leaf"),
    )
    assert attributes(root) == snapshot(
        {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": "root",
            "retinue.run.is_child": False,
            "retinue.run.status": "completed",
            "retinue.run.termination": "natural",
            "gen_ai.usage.input_tokens": 300,
            "gen_ai.usage.output_tokens": 60,
            "gen_ai.usage.cache_read.input_tokens": 120,
            "gen_ai.usage.reasoning.output_tokens": 15,
            "retinue.usage.cost": 0.75,
            "gen_ai.provider.name": "testing",
            "gen_ai.request.model": "scripted",
        }
    )
    assert attributes(model) == snapshot(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.agent.name": "root",
            "retinue.step": 2,
            "gen_ai.request.stream": True,
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.usage.cache_read.input_tokens": 40,
            "gen_ai.usage.reasoning.output_tokens": 5,
            "retinue.usage.cost": 0.25,
            "gen_ai.provider.name": "testing",
            "gen_ai.request.model": "scripted",
            "gen_ai.response.model": "scripted",
            "gen_ai.response.finish_reasons": ("stop",),
        }
    )
    assert attributes(call_) == snapshot(
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.agent.name": "leaf",
            "gen_ai.tool.name": "look",
            "gen_ai.tool.type": "function",
            "gen_ai.tool.call.id": "call_1_1_00c857ef",
            "retinue.tool.status": "succeeded",
        }
    )
    assert attributes(child) == snapshot(
        {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": "leaf",
            "retinue.run.is_child": True,
            "retinue.run.namespace": "tools:call_1_1/tools:call_1_1_e7680d5e",
            "retinue.run.status": "completed",
            "retinue.run.termination": "natural",
            "gen_ai.usage.input_tokens": 100,
            "gen_ai.usage.output_tokens": 20,
            "gen_ai.usage.cache_read.input_tokens": 40,
            "gen_ai.usage.reasoning.output_tokens": 5,
            "retinue.usage.cost": 0.25,
            "gen_ai.provider.name": "testing",
            "gen_ai.request.model": "small",
        }
    )
    assert [span.kind.name for span in (root, model, call_)] == ["INTERNAL", "CLIENT", "INTERNAL"]
    assert every(root)["retinue.run.id"] == result.run_id
    assert every(root)["gen_ai.conversation.id"] == "t1"
    assert every(root)["retinue.usage.cost"] == result.usage.cost
    assert every(root)["gen_ai.usage.input_tokens"] == result.usage.input_tokens
    assert every(call_)["retinue.run.id"] == every(child)["retinue.run.id"]


async def test_failed_calls() -> None:
    @tool
    async def bad(how: str) -> Any:
        """Fail."""
        if how == "error":
            return ToolResult.error("no such city", code="no_city")
        if how == "plain":
            return ToolResult.error("no")
        raise ValueError(how)

    calls = [call("bad", {"how": how}) for how in ("error", "plain", "raise")]
    model = ScriptedModel([[*calls, call("bad", {"how": 3}), call("made_up_by_the_model")], say("ok")])
    got = Collector()
    await Runtime([Agent("a", model, tools=[bad])], sinks=[got.sink]).run("a", "go")
    assert got.tree() == snapshot(
        [
            "invoke_agent a",
            "  chat scripted",
            "  execute_tool bad [ERROR: no_city]",
            "  execute_tool bad [ERROR: tool_error]",
            "  execute_tool bad [ERROR: internal]",
            "  execute_tool bad [ERROR: invalid_arguments]",
            "  execute_tool made_up_by_the_model [ERROR: not_found]",
            "  chat scripted",
        ]
    )
    assert [p[0].get("gen_ai.tool.name") for p in got.points("gen_ai.execute_tool.duration")] == snapshot(
        ["bad", "bad", "bad", "bad", "_OTHER"]
    )


async def test_cancelled_runs_end_their_spans_and_are_no_errors() -> None:
    started = asyncio.Event()

    @tool
    async def wait() -> None:
        """Wait."""
        started.set()
        await asyncio.sleep(60)

    child = Agent("child", ScriptedModel([[call("wait"), call("wait")]]), tools=[wait])
    root = Agent(
        "root", ScriptedModel([call("task", {"subagent_type": "child", "description": "x"})]), subagents=[child]
    )
    got = Collector()
    run = Runtime([root], sinks=[got.sink]).stream("root", "go")
    await started.wait()
    await run.cancel()
    assert got.open == 0
    assert got.tree() == snapshot(
        [
            "invoke_agent root",
            "  chat scripted",
            "  execute_tool task",
            "    invoke_agent child",
            "      chat scripted",
            "      execute_tool wait",
            "      execute_tool wait",
        ]
    )
    assert {every(span).get("error.type") for span in got.spans} == {None, "cancelled"}


async def test_a_tool_that_does_not_stop_leaves_no_span_open() -> None:
    started, may_stop, stopped = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @tool
    async def stubborn() -> None:
        """Does not stop."""
        started.set()
        while not may_stop.is_set():
            try:
                await may_stop.wait()
            except asyncio.CancelledError:
                pass
        stopped.set()

    got = Collector()
    run = Runtime([Agent("a", ScriptedModel([call("stubborn")]), tools=[stubborn])], sinks=[got.sink]).stream("a", "go")
    await started.wait()
    await run.cancel(grace=0.01)
    assert got.open == 0
    may_stop.set()
    await stopped.wait()
    await let_others_run()
    assert (got.open, len(got.spans)) == (0, 3)


async def test_a_timeout_and_a_limit_are_errors() -> None:
    slow = Agent("slow", ScriptedModel(lambda r: asyncio.sleep(60)))  # pyright: ignore[reportArgumentType]

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        return (await ctx.run_child("slow", "x", timeout=0.02)).status

    spender = ScriptedModel([[say(text, usage=spent), call("delegate")] for text in ("x", "y", "z")])
    got = Collector()
    runtime = Runtime([Agent("a", spender, tools=[delegate]), slow], sinks=[got.sink])
    await runtime.run("a", "go", limits=Limits(cost=0.95))
    assert got.tree() == snapshot(
        [
            "invoke_agent a [ERROR: limit:cost]",
            "  chat scripted",
            "  execute_tool delegate",
            "    invoke_agent slow [ERROR: timeout]",
            "      chat scripted [ERROR: timeout]",
            "  chat scripted",
            "  execute_tool delegate [ERROR: limit:cost]",
        ]
    )


async def test_parallel_and_repeated_children_hang_under_their_calls() -> None:
    @tool
    async def fan(tag: str, ctx: ToolContext) -> str:
        """Fan out."""
        await ctx.run_children([Child("leaf", tag), Child("leaf", tag)])
        await ctx.run_child("leaf", tag)
        return tag

    model = ScriptedModel([[call("fan", {"tag": "a"}, id="fa"), call("fan", {"tag": "b"}, id="fb")], say("ok")])
    got = Collector()
    await Runtime([Agent("root", model, tools=[fan]), leaf()], sinks=[got.sink]).run("root", "go")
    calls = {span_id(s): every(s)["gen_ai.tool.call.id"] for s in got.spans if s.name == "execute_tool fan"}
    children = [s for s in got.spans if s.name == "invoke_agent leaf"]
    placed = sorted((every(s)["retinue.run.namespace"], calls[s.parent.span_id]) for s in children if s.parent)
    assert placed == snapshot(
        [
            ("tools:fa", "fa"),
            ("tools:fa~2", "fa"),
            ("tools:fa~3", "fa"),
            ("tools:fb", "fb"),
            ("tools:fb~2", "fb"),
            ("tools:fb~3", "fb"),
        ]
    )
    assert len({trace_id(span) for span in got.spans}) == 1
    assert got.open == 0


async def test_the_callers_span_is_the_parent_and_stays_current() -> None:
    got = Collector()
    tracer = got.tracer_provider.get_tracer("app")
    runtime = Runtime([leaf()], sinks=[got.sink])
    with tracer.start_as_current_span("request") as mine:
        result = await runtime.run("leaf", "x")
        assert trace.get_current_span() is mine
    assert result.status is RunStatus.COMPLETED
    assert got.tree() == snapshot(
        ["request", "  invoke_agent leaf", "    chat small", "    execute_tool look", "    chat small"]
    )
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_the_span_that_was_current_when_a_run_was_asked_for_is_its_parent() -> None:
    got = Collector()
    with got.tracer_provider.get_tracer("app").start_as_current_span("request"):
        run = Runtime([leaf()], sinks=[got.sink]).stream("leaf", "x")
    await run.result()
    assert got.tree()[:2] == ["request", "  invoke_agent leaf"]


async def test_what_a_tool_records_hangs_under_its_call() -> None:
    got = Collector()
    tracer = got.tracer_provider.get_tracer("app")

    @tool
    async def fetch(n: int) -> str:
        """Fetch."""
        with tracer.start_as_current_span(f"async {n}"):
            await asyncio.sleep(0.001 * n)
        return "ok"

    @tool
    def compute(n: int) -> str:
        """Compute in a thread."""
        with tracer.start_as_current_span(f"thread {n}"):
            return "ok"

    async def answer(request: Any) -> Any:
        with tracer.start_as_current_span("POST"):
            await asyncio.sleep(0)
        if len(request.messages) == 1:
            return [call("fetch", {"n": 2}), call("fetch", {"n": 1}), call("compute", {"n": 3})]
        return call("fetch", {"n": 4}) if len(request.messages) == 5 else say("ok")

    agent = Agent("a", ScriptedModel(answer), tools=[fetch, compute])
    await Runtime([agent], sinks=[got.sink]).run("a", "go")
    assert got.tree() == snapshot(
        [
            "invoke_agent a",
            "  chat scripted",
            "    POST",
            "  execute_tool fetch",
            "    async 2",
            "  execute_tool fetch",
            "    async 1",
            "  execute_tool compute",
            "    thread 3",
            "  chat scripted",
            "    POST",
            "  execute_tool fetch",
            "    async 4",
            "  chat scripted",
            "    POST",
        ]
    )


async def test_a_run_without_lineage_hangs_under_the_call_that_started_it() -> None:
    @tool
    async def start(ctx: ToolContext) -> str:
        """Start a run of its own."""
        result = await run_child_agent(ctx.resolver, "leaf", "x", parent=ParentContext())
        return result.status

    got = Collector()
    runtime = Runtime([Agent("a", ScriptedModel([call("start"), say("ok")]), tools=[start]), leaf()], sinks=[got.sink])
    await runtime.run("a", "go")
    assert got.tree() == snapshot(
        [
            "invoke_agent a",
            "  chat scripted",
            "  execute_tool start",
            "    invoke_agent leaf",
            "      chat small",
            "      execute_tool look",
            "      chat small",
            "  chat scripted",
        ]
    )


async def test_a_stored_log_gives_the_same_spans() -> None:
    got, heard = Collector(), RecordingSink()
    await Runtime([tree()], sinks=[got.sink, heard]).run("root", "go")
    again = Collector()
    for event in heard.events:
        again.sink(event_from_json(event_to_json(event)))
    assert again.tree() == got.tree()
    assert [(s.name, s.start_time, s.end_time, attributes(s)) for s in again.spans] == [
        (s.name, s.start_time, s.end_time, attributes(s)) for s in got.spans
    ]
    assert trace.get_current_span() is trace.INVALID_SPAN


async def test_interleaved_calls_of_a_stored_log_leave_no_span_current() -> None:
    heard = RecordingSink()

    ended: list[int] = []

    @tool
    async def wait(place: int) -> str:
        """End after others."""
        await until(lambda: len(ended) == place)
        ended.append(place)
        return "ok"

    calls = [call("wait", {"place": 1}), call("wait", {"place": 2}), call("wait", {"place": 0})]
    await Runtime([Agent("a", ScriptedModel([calls, say("ok")]), tools=[wait])], sinks=[heard]).run("a", "go")
    again = Collector()
    for event in heard.events:
        again.sink(event)
    assert again.tree() == snapshot(
        [
            "invoke_agent a",
            "  chat scripted",
            "  execute_tool wait",
            "  execute_tool wait",
            "  execute_tool wait",
            "  chat scripted",
        ]
    )
    assert trace.get_current_span() is trace.INVALID_SPAN


@pytest.mark.parametrize("early", [True, False], ids=["before its parent ends", "after"])
def test_a_background_child_hangs_under_the_call_that_started_it_also_when_that_has_ended(early: bool) -> None:
    done = ToolCallFinished(
        call_id="c1",
        tool_name="spawn",
        status=ToolCallStatus.SUCCEEDED,
        result=ToolResult.success("started"),
        message=Message.tool("started", tool_call_id="c1"),
    )
    parent = [
        RunStarted(thread_id="t"),
        ToolCallReady(call_id="c1", tool_name="spawn", args={}),
        ChildStarted(call_id="c1", child_run_id="r2", child_agent="worker", child_ns=("tools:c1",)),
        done,
        RunFinished(status=RunStatus.COMPLETED, termination="natural"),
    ]
    child = [
        RunStarted(thread_id="t2", parent_tool_call_id="c1"),
        StepStarted(step=1, model="testing:x"),
        RunFinished(status=RunStatus.COMPLETED, termination="natural"),
    ]
    lead = [replace(event, run_id="r1", agent="lead") for event in parent]
    worker = [replace(e, run_id="r2", parent_run_id="r1", agent="worker", ns=("tools:c1",)) for e in child]
    order = [*lead[:4], worker[0], lead[4], *worker[1:]] if early else [*lead, *worker]
    got = Collector()
    for seq, event in enumerate(order, 1):
        got.sink(replace(event, seq=seq, at=float(seq)))
    assert got.tree() == ["invoke_agent lead", "  execute_tool spawn", "    invoke_agent worker", "      chat x"]
    assert got.span("invoke_agent worker").start_time == (5_000_000_000 if early else 6_000_000_000)
    assert len({trace_id(span) for span in got.spans}) == 1
    assert got.open == 0


async def test_a_handoff_is_noted_and_later_model_calls_are_the_new_agents() -> None:
    second = Agent("second", ScriptedModel([say("mine")], name="other"))
    first = Agent("first", ScriptedModel([call("transfer_to_second")]), handoffs=[second])
    got = Collector()
    result = await Runtime([first], sinks=[got.sink]).run("first", "go")
    if result.status is not RunStatus.COMPLETED:
        pytest.fail(str(result.error))
    root = got.span("invoke_agent first")
    assert [(event.name, dict(event.attributes or {})) for event in root.events] == snapshot(
        [("retinue.handoff", {"retinue.to_agent": "second"})]
    )
    assert every(got.span("chat other"))["gen_ai.agent.name"] == "second"


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_whenever_a_tree_is_cancelled_every_span_ends_under_its_parent(turns: int) -> None:
    @tool
    async def fan(ctx: ToolContext) -> str:
        """Fan out."""
        await ctx.run_children([Child("leaf", "a"), Child("leaf", "b", timeout=9)])
        return "ok"

    got, heard = Collector(), RecordingSink()
    model = ScriptedModel([[call("fan"), call("fan")], say("ok")])
    run = Runtime([Agent("root", model, tools=[fan]), leaf()], sinks=[got.sink, heard]).stream("root", "go")
    for _ in range(turns):
        await asyncio.sleep(0)
    await run.cancel()
    assert got.open == 0
    assert len(got.spans) == sum(e.kind in ("run_started", "step_started", "tool_call_ready") for e in heard.events)
    spans = {span_id(span): span for span in got.spans}
    for span in spans.values():
        if span.parent is not None:
            above = spans[span.parent.span_id]
            assert (above.start_time or 0) <= (span.start_time or 0)
            assert (span.end_time or 0) <= (above.end_time or 0)
    assert sum(span.parent is None for span in spans.values()) == 1
    assert trace.get_current_span() is trace.INVALID_SPAN
