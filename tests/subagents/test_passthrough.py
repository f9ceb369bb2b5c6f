"""A child's text through the parent's call, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import (
    Agent,
    ChildErrorForwarding,
    RunStatus,
    Runtime,
    StreamingPassthroughSink,
    ToolContext,
    run_streaming_subagent,
    tool,
)
from retinue.core.events import ErrorRaised, RunFinished, RunStarted, TextDelta, ToolCallReady
from retinue.testing import RecordingSink, ScriptedModel, call, fail, say

CHILD_EVENTS = [
    RunStarted(run_id="child", thread_id="t"),
    TextDelta(run_id="child", delta="one "),
    ToolCallReady(run_id="child", call_id="x", tool_name="t", args={}),
    ErrorRaised(run_id="child", message="oops", code="E1"),
    TextDelta(run_id="child", delta="two"),
    RunFinished(run_id="child", status=RunStatus.FAILED, termination="error"),
]


@pytest.mark.parametrize(
    ("errors", "passed"),
    [
        ("wrap", ["one ", "[child error E1: oops]", "two"]),
        (ChildErrorForwarding.RAW, ["one ", "error: oops", "two"]),
        (ChildErrorForwarding.DROP, ["one ", "two"]),
    ],
)
def test_only_text_passes_and_errors_as_asked(errors: Any, passed: list[str]) -> None:
    parent = RecordingSink()
    sink = StreamingPassthroughSink("c1", "draw", parent, errors=errors)
    for event in CHILD_EVENTS:
        sink(event)
    assert sink.buffer == "one two"
    seen: list[Any] = parent.events
    assert [e.delta if e.kind == "tool_call_stream_delta" else f"error: {e.message}" for e in seen] == passed
    assert {(e.call_id, e.tool_name) for e in parent.of("tool_call_stream_delta")} == {("c1", "draw")}


def drawing(child: Agent) -> tuple[Runtime, list[Any]]:
    streamed: list[Any] = []

    @tool
    async def draw(ctx: ToolContext) -> str:
        """Draw."""
        result = await run_streaming_subagent(ctx, child, "stream it")
        streamed.append(result)
        return result.content

    parent = Agent("parent", ScriptedModel([call("draw", id="c1"), say("done")]), tools=[draw])
    return Runtime([parent]), streamed


async def test_a_streamed_child_is_the_output_of_the_call() -> None:
    child = Agent("child", ScriptedModel([say("<svg/>", chunks=["<svg", "/>"])]))
    runtime, streamed = drawing(child)
    run = runtime.stream("parent", "go")
    events: list[Any] = [e async for e in run]
    assert [e.delta for e in events if e.kind == "tool_call_stream_delta"] == ["<svg", "/>"]
    assert {e.ns for e in events if e.kind == "tool_call_stream_delta"} == {()}
    assert [e.delta for e in events if e.kind == "text_delta" and e.ns == ()] == ["done"]
    assert (streamed[0].content, streamed[0].steps) == ("<svg/>", 1)


async def test_anything_but_completed_fails_the_call() -> None:
    for child, problem in (
        (Agent("child", ScriptedModel([fail(OSError("gone"))])), "sub-agent did not complete: failed"),
        (Agent("child", "nowhere:x"), "sub-agent failed: agent 'child' could not be run: "),
    ):
        runtime, _ = drawing(child)
        result = await runtime.run("parent", "go")
        (text,) = [m.text for m in result.messages if m.role == "tool"]
        assert text.startswith(f"execution_failed: {problem}")
