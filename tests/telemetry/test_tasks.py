"""Background children outlive the call and the run that started them, and stay in their trace."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from retinue import Agent, Decision, HarnessAgent, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.testing import RecordingSink, ScriptedModel, call, say
from tests.telemetry.collector import Collector, every, span_id, trace_id


async def run_with_background_child(worker: Agent, folder: Path, got: Collector, heard: RecordingSink) -> Runtime:
    """A lead that spawns the worker, does not wait for it, and ends."""
    spawn = call("agent_spawn", {"agent_id": "worker", "task": "work", "timeout_seconds": 0}, id="s1")
    lead = HarnessAgent(
        name="lead",
        model=ScriptedModel([spawn, say("It is under way.")]),
        workspace=folder,
        subagents=[worker],
        disable_filesystem=True,
    )
    runtime = Runtime([lead], sinks=[got.sink, heard])
    result = await runtime.run("lead", "go")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "It is under way."), result.error
    return runtime


async def until(heard: RecordingSink, kind: str, status: str) -> Any:
    """Return the event of the worker with this kind and status, when it was heard."""
    while True:
        for event in heard.events:
            if event.kind == kind and event.agent == "worker" and event.status == status:  # pyright: ignore[reportAttributeAccessIssue]
                return event
        await asyncio.sleep(0.002)


async def test_a_task_hangs_under_the_call_that_spawned_it(tmp_path: Path) -> None:
    at_work, gate = asyncio.Event(), asyncio.Event()

    @tool
    async def work() -> str:
        """Work until told."""
        at_work.set()
        await gate.wait()
        return "ok"

    got, heard = Collector(), RecordingSink()
    worker = Agent("worker", ScriptedModel([call("work"), say("done")]), tools=[work], description="Works.")
    runtime = await run_with_background_child(worker, tmp_path, got, heard)
    await at_work.wait()
    assert got.open == 2  # the run of the lead has ended; the worker and its call have not
    gate.set()
    await until(heard, "run_finished", "completed")
    assert got.open == 0
    child, spawned = got.span("invoke_agent worker"), got.span("execute_tool agent_spawn")
    assert child.parent is not None
    assert child.parent.span_id == span_id(spawned)
    assert (child.end_time or 0) > (got.span("invoke_agent lead").end_time or 0)
    assert len({trace_id(span) for span in got.spans}) == 1
    await runtime.close()


async def test_a_task_that_waited_goes_on_in_its_trace(tmp_path: Path) -> None:
    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return ToolResult.suspended("may I?") if ctx.resume_input is None else "thanks"

    got, heard = Collector(), RecordingSink()
    worker = Agent("worker", ScriptedModel([call("ask", id="a1"), say("done")]), tools=[ask], description="Works.")
    runtime = await run_with_background_child(worker, tmp_path, got, heard)
    waiting = await until(heard, "run_finished", "suspended")
    assert got.open == 0
    await asyncio.sleep(0.05)
    await runtime.resume(waiting.run_id, {"a1": Decision.resume({"yes": True})})
    await until(heard, "run_finished", "completed")
    assert got.open == 0
    first, second = [span for span in got.spans if span.name == "invoke_agent worker"]
    assert [link.context.span_id for link in second.links] == [span_id(first)]
    assert first.parent is not None
    assert second.parent is not None
    assert second.parent.span_id == first.parent.span_id == span_id(got.span("execute_tool agent_spawn"))
    assert every(second)["retinue.run.id"] == every(first)["retinue.run.id"]
    again = Collector()
    for event in heard.events:
        again.sink(event)
    assert again.tree() == got.tree()
    await runtime.close()
