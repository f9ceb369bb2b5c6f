"""The spans of a run on another server hang under the span of the call that asked for it, whatever the protocol."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from retinue import A2AAgent, Agent, Runtime, ToolContext, tool
from retinue.client import Client
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from tests.server.serving import TOKEN, serving
from tests.telemetry.collector import Collector

HEADERS = {"authorization": f"Bearer {TOKEN}"}


def far(seen: list[Any]) -> Agent:
    @tool
    def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append(ctx.context.get("traceparent"))
        return "nothing"

    def turn(request: Any) -> Any:
        return say("Looked.") if request.messages[-1].role == "tool" else call("look", {}, id="look_1")

    return Agent("far", ScriptedModel(turn), tools=[look])


def span_of(spans: list[ReadableSpan], name: str) -> tuple[int, int, int | None]:
    """The trace, the id and the parent of a span."""
    (span,) = [span for span in spans if span.name == name]
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id, None if span.parent is None else span.parent.span_id


@pytest.mark.parametrize("protocol", ["tasks", "a2a"])
async def test_the_run_there_hangs_under_the_call_here(protocol: str) -> None:
    here, there, seen = Collector(), Collector(), list[Any]()
    async with serving(Runtime([far(seen)], sinks=[there.sink])) as site:
        remote = (
            RemoteSubagentStub("far", url=site.url, headers=HEADERS)
            if protocol == "tasks"
            else A2AAgent("far", f"{site.url}/a2a/far", headers=HEADERS)
        )
        turns = [call("task", {"subagent_type": "far", "description": "go"}, id="c1"), say("Done.")]
        async with Runtime([Agent("near", ScriptedModel(turns), subagents=[remote])], sinks=[here.sink]) as runtime:
            await runtime.run("near", "go")
    asking, working = span_of(here.spans, "execute_tool task"), span_of(there.spans, "invoke_agent far")
    assert working[0] == asking[0], "it is another trace"
    assert working[2] in (asking[1], span_of(here.spans, "invoke_agent far")[1])
    assert [text.split("-")[1] for text in seen] == [f"{asking[0]:032x}"]


async def test_a_client_sends_its_span_and_nothing_without_one() -> None:
    here, there = Collector(), Collector()
    async with serving(Runtime([far([])], sinks=[there.sink])) as site:
        async with Client(site.url, token=TOKEN) as client:
            with here.tracer_provider.get_tracer("test").start_as_current_span("asking"):
                await client.run("far", "go")
            await client.run("far", "go")
    asking = span_of(here.spans, "asking")
    runs = [span for span in there.spans if span.name == "invoke_agent far"]
    traces = [span.get_span_context().trace_id for span in runs]  # pyright: ignore[reportOptionalMemberAccess]
    assert runs[0].parent is not None
    assert (traces[0], runs[0].parent.span_id) == asking[:2]
    assert runs[1].parent is None
    assert traces[1] != traces[0]
