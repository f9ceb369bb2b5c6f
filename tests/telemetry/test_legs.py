"""Runs that wait and go on: each leg is a span, linked to the one before, and little is remembered."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

from inline_snapshot import snapshot
from opentelemetry.sdk.trace import SpanProcessor

from retinue import Agent, Decision, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say
from retinue.wire.tree import RunNode
from tests.telemetry.agents import look
from tests.telemetry.collector import Collector, every, span_id, trace_id


async def test_legs_of_a_suspended_tree_are_linked() -> None:
    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return ToolResult.suspended("may I?") if ctx.resume_input is None else "thanks"

    child = Agent(
        "child", ScriptedModel([[call("ask", id="c1"), call("look", {"q": "x"})], say("ok")]), tools=[ask, look]
    )
    root = Agent(
        "root",
        ScriptedModel([call("task", {"subagent_type": "child", "description": "x"}, id="r1"), say("done")]),
        subagents=[child],
    )
    got = Collector()
    runtime = Runtime([root], sinks=[got.sink])
    first = await runtime.run("root", "go")
    assert first.status is RunStatus.SUSPENDED
    assert got.open == 0
    before = {span.name: span for span in got.spans}
    result = await runtime.resume(first.run_id, {"c1": Decision.resume({"yes": True})})
    assert result.status is RunStatus.COMPLETED
    assert got.open == 0
    assert got.tree() == snapshot(
        [
            "invoke_agent root",
            "  chat scripted",
            "  execute_tool task",
            "    invoke_agent child",
            "      chat scripted",
            "      execute_tool ask",
            "      execute_tool look",
            "invoke_agent root",
            "  execute_tool task",
            "    invoke_agent child",
            "      execute_tool ask",
            "      chat scripted",
            "  chat scripted",
        ]
    )
    after = {span.name: span for span in got.spans}  # the later ones
    for name in ("invoke_agent root", "invoke_agent child", "execute_tool task", "execute_tool ask"):
        assert [link.context.span_id for link in after[name].links] == [span_id(before[name])], name
    assert not after["chat scripted"].links
    assert trace_id(after["invoke_agent root"]) != trace_id(before["invoke_agent root"])


async def test_content_of_a_resumed_leg_is_the_whole_conversation_and_is_not_kept() -> None:
    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return ToolResult.suspended("may I?") if ctx.resume_input is None else "thanks"

    calls = [call("ask", id="c1"), call("look", {"q": "x"}, id="c2")]
    agent = Agent("a", ScriptedModel([calls, say("ok")]), tools=[ask, look])
    got = Collector(content=True)
    runtime = Runtime([agent], sinks=[got.sink])
    first = await runtime.run("a", "secret-input")
    await runtime.resume(first.run_id, {"c1": Decision.resume({"yes": True})})
    told = json.loads(every(got.span("chat scripted", -1))["gen_ai.input.messages"])
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "tool"]
    assert [p["response"] for m in told for p in m["parts"] if p["type"] == "tool_call_response"] == [
        "thanks",
        "found x",
    ]


async def test_a_run_that_waits_again_and_again_remembers_its_last_leg_only() -> None:
    @tool
    async def ask() -> Any:
        """Ask, and never be content."""
        return ToolResult.suspended("may I?")

    got = Collector()
    runtime = Runtime([Agent("again", ScriptedModel([call("ask", id="c1")]), tools=[ask])], sinks=[got.sink])
    run_id = (await runtime.run("again", "go")).run_id
    for _ in range(5):
        assert (await runtime.resume(run_id, {"c1": Decision.resume({})})).status is RunStatus.SUSPENDED
    gc.collect()
    assert sum(isinstance(it, RunNode) and it.run_id == run_id for it in gc.get_objects()) == 1
    assert len([span for span in got.spans if span.name == "execute_tool ask" and span.links]) == 5


async def test_legs_that_wait_keep_no_spans_alive() -> None:
    @tool
    async def ask() -> Any:
        """Ask."""
        return ToolResult.suspended("may I?")

    got = Collector(content=True)
    ended: list[weakref.ref[Any]] = []

    class Watching(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            ended.append(weakref.ref(span))

    got.tracer_provider.add_span_processor(Watching())
    runtime = Runtime([Agent("a", ScriptedModel([call("ask")]), tools=[ask])], sinks=[got.sink])
    assert (await runtime.run("a", "go")).status is RunStatus.SUSPENDED
    await asyncio.sleep(0.01)
    gc.collect()
    assert len(ended) == 3
    assert [span for span in ended if span() is not None] == []


async def test_a_suspended_run_that_is_given_up_has_a_last_span() -> None:
    @tool
    async def ask() -> Any:
        """Ask."""
        return ToolResult.suspended("may I?")

    got = Collector()
    runtime = Runtime([Agent("a", ScriptedModel([call("ask")]), tools=[ask])], sinks=[got.sink])
    run_id = (await runtime.run("a", "go")).run_id
    await runtime.cancel(run_id)
    assert got.open == 0
    assert [every(s).get("retinue.run.status") for s in got.spans if "invoke" in s.name] == [
        "suspended",
        "cancelled",
    ]
