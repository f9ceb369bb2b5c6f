"""Runs that wait: following them past the suspension, two humans, cancels without the agent."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Decision,
    DecisionRefused,
    Event,
    RunStatus,
    Runtime,
    ToolContext,
    ToolResult,
    UnknownRun,
    tool,
)
from retinue.events import RunFinished, ToolCallFinished
from retinue.testing import ScriptedModel, call, say

from .. import inside

Open = Callable[..., Runtime]


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "memory":
        return Runtime
    return lambda agents=(): Runtime.open(f"sqlite:///{tmp_path}/app.db", agents)


@tool
def ask(ctx: ToolContext) -> Any:
    """Ask."""
    return ctx.resume_input or ToolResult.suspended("sure?")


def asking(*tools: Any) -> Agent:
    turns = [[call("ask", {}, id="one"), call("ask", {}, id="two")], say("done")]
    return Agent("a", ScriptedModel(turns), tools=tools or (ask,))


async def test_events_follow_a_run_past_its_suspension(opened: Open) -> None:
    async with opened([asking()]) as runtime:
        waiting = await runtime.run("a", "go")
        assert waiting.status is RunStatus.SUSPENDED
        seen: list[Event] = []
        at_suspension = asyncio.Event()

        async def follow() -> None:
            async for event in runtime.events(waiting.run_id):
                seen.append(event)
                if event.kind == "run_finished":
                    at_suspension.set()

        following = asyncio.create_task(follow())
        await at_suspension.wait()
        assert not following.done()
        await runtime.resume(waiting.run_id, {"one": Decision.resume("yes"), "two": Decision.resume("yes")})
        await following
        assert [event.status.value for event in seen if isinstance(event, RunFinished)] == ["suspended", "completed"]
        assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
        # The handle of a leg ends where the leg does.
        assert [event async for event in runtime.events(waiting.run_id)] == seen


async def test_events_end_when_a_waiting_run_is_cancelled(opened: Open) -> None:
    async with opened([asking()]) as runtime:
        waiting = await runtime.run("a", "go")
        following = asyncio.create_task(_kinds(runtime, waiting.run_id))
        await runtime.cancel(waiting.run_id)
        assert (await following)[-1] == "run_finished"


async def _kinds(runtime: Runtime, run_id: str) -> list[str]:
    return [event.kind async for event in runtime.events(run_id)]


async def test_a_second_answer_waits_for_the_leg_that_works_on_the_first(opened: Open) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    @tool(name="ask")
    async def slow(ctx: ToolContext) -> Any:
        """Ask."""
        if ctx.resume_input is None:
            return ToolResult.suspended("sure?")
        if ctx.call_id == "one":
            begun.set()
            await gate.wait()
        return ctx.resume_input

    async with opened([asking(slow)]) as runtime:
        waiting = await runtime.run("a", "go")
        first = asyncio.create_task(runtime.resume(waiting.run_id, {"one": Decision.resume("yes")}))
        await begun.wait()
        second = runtime.stream_resume(waiting.run_id, {"two": Decision.resume("of course")})
        with pytest.raises(DecisionRefused, match="waits for nothing"):
            await runtime.resume(waiting.run_id, {"three": Decision.resume("what?")})
        assert not second.ended
        gate.set()
        assert (await first).status in (RunStatus.SUSPENDED, RunStatus.COMPLETED)  # a store may show the second leg
        result = await second.result()
        assert [message.text for message in result.messages if message.role == "tool"] == ["yes", "of course"]
        assert (second.thread_id, second.agent) == (waiting.thread_id, "a")
        events = [event async for event in second]
        assert (events[0].kind, events[-1].kind) == ("run_started", "run_finished")


async def test_an_unknown_run_cannot_be_answered() -> None:
    with pytest.raises(UnknownRun):
        Runtime().stream_resume("run_x", {"c": Decision.resume(1)})


async def test_a_run_is_cancelled_by_a_process_without_its_agent(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, [asking()]) as runtime:
        waiting = await runtime.run("a", "go", thread_id="t")
    async with Runtime.open(url) as other:
        cancelled = await other.cancel(waiting.run_id, reason="nobody answers")
        assert (cancelled.status, cancelled.error) == (RunStatus.CANCELLED, "nobody answers")
        events = [event async for event in other.events(waiting.run_id)]
        ends = [
            event.call_id for event in events if isinstance(event, ToolCallFinished) and event.status == "cancelled"
        ]
        assert ends == ["one", "two"]
    again = Agent("a", ScriptedModel([say("next")]))
    async with Runtime.open(url, [again]) as runtime:
        assert (await runtime.run("a", "again", thread_id="t")).response == "next"


async def test_a_handle_of_an_answer_in_another_process_knows_its_thread(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, [asking()]) as runtime:
        waiting = await runtime.run("a", "go", thread_id="t")
    after = Agent("a", ScriptedModel([say("done")]), tools=[ask])
    async with Runtime.open(url, [after]) as other:
        run = other.stream_resume(waiting.run_id, {"one": Decision.resume(1), "two": Decision.resume(2)})
        events = [event async for event in run]
        assert (run.thread_id, run.agent) == ("t", "a")
        assert (events[0].kind, events[-1].kind) == ("run_started", "run_finished")
        assert (await run.result()).response == "done"


async def test_following_a_stored_run_ends_where_it_waits(tmp_path: Path) -> None:
    """A handle that reads through the store while another process settles the leg must not wait for the next answer."""
    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, [asking()]) as first, Runtime.open(url, [asking()], recover=False) as second:
        waiting = await first.run("a", "go")
        rests = [event.kind for event in await inside.events_to_rest(second, waiting.run_id)]
        assert (rests[0], rests[-1]) == ("run_started", "run_finished")
        assert await inside.rest_of_last_leg(second, waiting.run_id) == []
