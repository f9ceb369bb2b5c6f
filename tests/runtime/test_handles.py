"""`Run` and `ChildRun` have one interface."""

import asyncio
from typing import Any

from retinue import Agent, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.runtime.run import ChildRun, Run, RunHandle
from retinue.testing import ScriptedModel, call, say

PUBLIC = {"agent", "cancel", "children", "events", "parts", "result", "run_id", "send", "text", "thread_id"}


def team(*turns: Any, **child: Any) -> Runtime:
    worker = Agent(
        "child", ScriptedModel(list(turns) or [say("from the child", chunks=["from ", "the child"])]), **child
    )
    boss = ScriptedModel([call("task", {"subagent_type": "child", "description": "work"}, id="c1"), say("end")])
    return Runtime([Agent("boss", boss, subagents=[worker])])


def names(handle: RunHandle) -> set[str]:
    return {name for name in dir(handle) if not name.startswith("_")}


async def test_both_handles_show_the_same_names_and_no_internals() -> None:
    run = team().stream("boss", "go")
    child = [child async for child in run.children][0]
    assert isinstance(run, Run)
    assert isinstance(child, ChildRun)
    assert names(run) - PUBLIC == {"ended", "follow", "place", "stored"}
    assert names(child) - PUBLIC == {"call_id", "name", "ns"}
    assert {name for name in dir(Runtime) if not name.startswith("_")} == {
        "agents", "cancel", "cancel_task", "close", "events", "fork", "load", "log", "messages", "name_thread", "open", "override", "parts", "recover", "result", "resume", "resume_sync",
        "run", "run_sync", "schedule", "schedules", "send", "state_at", "store", "stream", "stream_resume", "stream_sync", "threads", "unschedule",
        "watch_threads",
    }  # fmt: skip


async def test_a_child_is_watched_as_a_run_is() -> None:
    run = team().stream("boss", "go")
    async for child in run.children:
        everything = [event async for event in child]
        assert {event.run_id for event in everything} == {child.run_id}
        assert [event async for event in child.events] == everything
        assert (everything[0].kind, everything[-1].kind) == ("run_started", "run_finished")
        assert await child.text == "from the child"
        assert [piece async for piece in child.text] == ["from ", "the child"]
        parts = [part async for part in child.parts("updates")]
        assert {tuple(part["ns"]) for part in parts} == {("tools:c1",)}
        assert [inner async for inner in child.children] == []
        assert (await child.result()).response == "from the child"
        assert child.thread_id == (await child.result()).thread_id
    assert await run.text == "end"
    assert {event.run_id for event in [event async for event in run.events]} == {run.run_id}


@tool
async def hang() -> None:
    """Hang."""
    await asyncio.Event().wait()


async def test_cancelling_a_child_lets_its_parent_continue() -> None:
    run = team(call("hang"), tools=[hang]).stream("boss", "go")
    async for child in run.children:
        async for event in child.events:
            if event.kind == "tool_call_ready":
                break
        cancelled = await child.cancel("not needed")
        assert (cancelled.status, cancelled.error) == (RunStatus.CANCELLED, "not needed")
    result = await run.result()
    assert (result.status, result.response) == (RunStatus.COMPLETED, "end")


async def test_a_run_cancelled_while_it_waits_has_a_cancelled_result() -> None:
    @tool
    def ask() -> Any:
        """Ask."""
        return ToolResult.suspended("sure?")

    run = Runtime([Agent("a", ScriptedModel([call("ask")]), tools=[ask])]).stream("a", "go")
    assert (await run.result()).status is RunStatus.SUSPENDED
    cancelled = await run.cancel("not needed")
    assert cancelled.status is RunStatus.CANCELLED
    assert await run.result() == cancelled


async def test_a_child_that_waits_is_cancelled_and_its_parent_continues() -> None:
    @tool
    def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return ToolResult.suspended("sure?")

    run = team(call("ask"), tools=[ask]).stream("boss", "go")
    assert (await run.result()).status is RunStatus.SUSPENDED
    child = [child async for child in run.children][0]
    assert (await child.cancel("not needed")).status is RunStatus.CANCELLED
    continued = [event async for event in run.follow()][-1]
    assert (continued.kind, continued.run_id) == ("run_finished", run.run_id)
    assert continued.status is RunStatus.COMPLETED  # type: ignore[attr-defined]
