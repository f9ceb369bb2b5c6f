"""Cancelling one run below the root, whatever it does: it ends as cancelled, and its parent continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    Decision,
    HarnessAgent,
    Limits,
    RunStatus,
    Runtime,
    ToolContext,
    ToolResult,
    UnknownRun,
    tool,
)
from retinue.events import ChildStarted, Event, RunFinished
from retinue.testing import ScriptedModel, call, say

from .. import inside
from ..waiting import until

Open = Callable[..., Runtime]


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "memory":
        return Runtime
    return lambda agents=(), **options: Runtime.open(f"sqlite:///{tmp_path}/app.db", agents, **options)


@tool
def ask(ctx: ToolContext) -> Any:
    """Ask."""
    return ctx.resume_input or ToolResult.suspended("sure?")


@tool
async def hang() -> None:
    """Hang."""
    await asyncio.Event().wait()


def last_texts(request: Any) -> str:
    return " | ".join(message.text for message in request.messages if message.role == "tool")


def task(name: str, id: str) -> Any:
    return call("task", {"subagent_type": name, "description": name}, id=id)


def boss(*calls: Any, children: list[Agent], **options: Any) -> Agent:
    def turn(request: Any) -> Any:
        return say(last_texts(request)) if request.messages[-1].role == "tool" else list(calls)

    return Agent("boss", ScriptedModel(turn), subagents=children, **options)


def worker(name: str, *turns: Any) -> Agent:
    def turn(request: Any) -> Any:
        return say(f"{name}: {request.messages[-1].text}") if request.messages[-1].role == "tool" else list(turns)

    return Agent(name, ScriptedModel(turn), tools=[ask, hang])


def asker() -> Agent:
    return worker("asker", call("ask", id="a1"))


def middle() -> Agent:
    """A child whose own child asks."""
    return Agent(
        "middle",
        ScriptedModel(
            lambda r: say(f"middle: {last_texts(r)}") if r.messages[-1].role == "tool" else task("asker", "m1")
        ),
        subagents=[asker()],
    )


def ends(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.agent, event.status.value) for event in events if isinstance(event, RunFinished)]


async def all_events(runtime: Runtime, run_id: str) -> list[Event]:
    return [event async for event in runtime.events(run_id)]


async def started(runtime: Runtime, run_id: str, agent: str, kind: str = "run_started") -> tuple[str, ...]:
    """Return the namespace of a run once it has an event of this kind."""
    async for event in runtime.events(run_id):
        if event.agent == agent and event.kind == kind:
            return event.ns
    raise AssertionError(agent)


async def test_one_that_works_at_any_depth(opened: Open) -> None:
    deep = Agent(
        "deep",
        ScriptedModel(
            lambda r: say(f"deep: {last_texts(r)}") if r.messages[-1].role == "tool" else task("hanger", "d1")
        ),
        subagents=[worker("hanger", call("hang", id="h1"))],
    )
    async with opened([boss(task("deep", "b1"), children=[deep])]) as runtime:
        run = runtime.stream("boss", "go")
        ns = await started(runtime, run.run_id, "hanger", "tool_call_ready")
        assert ns == ("tools:b1", "tools:d1")
        ended = await runtime.cancel(run.run_id, ns=ns, reason="not needed")
        assert (ended.status, ended.error) == (RunStatus.CANCELLED, "not needed")
        result = await run.result()
        assert result.status is RunStatus.COMPLETED
        assert "not needed" in (result.response or "")
        assert ends(await all_events(runtime, run.run_id))[:2] == [("hanger", "cancelled"), ("deep", "completed")]
        again = await runtime.cancel(run.run_id, ns=ns, reason="another")
        assert (again.status, again.error) == (RunStatus.CANCELLED, "not needed"), "it has ended"


async def test_one_that_waits_while_the_whole_run_waits(opened: Open) -> None:
    async with opened([boss(task("middle", "b1"), children=[middle()])]) as runtime:
        run = runtime.stream("boss", "go")
        assert (await run.result()).status is RunStatus.SUSPENDED
        ended = await runtime.cancel(run.run_id, ns=("tools:b1", "tools:m1"), reason="nobody knows")
        assert (ended.status, ended.error) == (RunStatus.CANCELLED, "nobody knows")
        result = await runtime.result(run.run_id)
        assert result.status is RunStatus.COMPLETED
        assert "nobody knows" in (result.response or "")
        assert (result.response or "").startswith("middle: ")
        finished = ends(await all_events(runtime, run.run_id))
        assert finished[-3:] == [("asker", "cancelled"), ("middle", "completed"), ("boss", "completed")]


async def test_a_handle_of_a_child_that_waits_cancels_it(opened: Open) -> None:
    async with opened([boss(task("asker", "b1"), children=[asker()])]) as runtime:
        run = runtime.stream("boss", "go")
        assert (await run.result()).status is RunStatus.SUSPENDED
        child = [child async for child in run.children][0]
        ended = await child.cancel("too late")
        assert (ended.status, ended.error) == (RunStatus.CANCELLED, "too late")
        assert "too late" in ((await runtime.result(run.run_id)).response or "")


async def test_one_of_two_that_wait_leaves_the_other_to_its_answer(opened: Open) -> None:
    agents = [boss(task("asker", "b1"), task("asker", "b2"), children=[asker()])]
    async with opened(agents) as runtime:
        run = runtime.stream("boss", "go")
        waiting = await run.result()
        assert {"/".join(ticket.path) for ticket in waiting.suspended.values()} == {"b1/a1", "b2/a1"}
        await runtime.cancel(run.run_id, ns=("tools:b1",), reason="this one not")
        left = await runtime.result(run.run_id)
        assert {"/".join(ticket.path) for ticket in left.suspended.values()} == {"b2/a1"}
        result = await runtime.resume(run.run_id, {"b2/a1": Decision.answer("yes")})
        assert "this one not" in (result.response or "")
        assert "asker: yes" in (result.response or "")


async def test_one_that_waits_while_others_work(opened: Open) -> None:
    gate, waits = asyncio.Event(), asyncio.Event()

    @tool
    async def slow() -> str:
        """Wait."""
        waits.set()
        await gate.wait()
        return "slow"

    agents = [boss(task("asker", "b1"), call("slow", id="b2"), children=[asker()], tools=[slow])]
    async with opened(agents) as runtime:
        run = runtime.stream("boss", "go")
        await started(runtime, run.run_id, "asker", "run_finished")
        await waits.wait()
        ended = await runtime.cancel(run.run_id, ns=("tools:b1",), reason="not now")
        assert ended.status is RunStatus.CANCELLED
        assert not run.ended
        gate.set()
        result = await run.result()
        assert (result.status, result.suspended) == (RunStatus.COMPLETED, {})
        assert "not now" in (result.response or "")
        assert "slow" in (result.response or "")
        starts = [e for e in await all_events(runtime, run.run_id) if e.kind == "run_started" and e.agent == "boss"]
        assert len(starts) == 1, "the leg that works takes the call up again"


async def test_one_that_waits_for_a_slot(opened: Open) -> None:
    agents = [
        boss(
            call("hang", id="b0"),
            task("asker", "b1"),
            children=[asker()],
            tools=[hang],
            limits=Limits(parallel=1),
        )
    ]
    async with opened(agents) as runtime:
        run = runtime.stream("boss", "go")
        await started(runtime, run.run_id, "boss", "tool_call_ready")
        cancelling = asyncio.create_task(runtime.cancel(run.run_id, ns=("tools:b1",), reason="no"))
        async for event in runtime.events(run.run_id):
            if event.kind == "tool_call_finished":
                assert (event.call_id, event.status.value) == ("b1", "cancelled")  # type: ignore[attr-defined]
                break
        cancelling.cancel()
        assert (await run.cancel()).status is RunStatus.CANCELLED
        assert not [e for e in await all_events(runtime, run.run_id) if isinstance(e, ChildStarted)]


async def test_what_is_not_there_is_refused(opened: Open) -> None:
    async with opened([boss(task("asker", "b1"), children=[asker()])]) as runtime:
        run = runtime.stream("boss", "go")
        await run.result()
        for ns in (("tools:b9",), ("tools:b1", "tools:a1"), ("tools:b1", "tools:x", "tools:y")):
            with pytest.raises(UnknownRun):
                await runtime.cancel(run.run_id, ns=ns)
        assert (await runtime.result(run.run_id)).status is RunStatus.SUSPENDED


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Runtime, Runtime]]:
    url = f"sqlite:///{tmp_path}/app.db"

    def agents() -> list[Agent]:
        return [boss(task("middle", "b1"), children=[middle(), worker("hanger", call("hang", id="h1"))])]

    async with Runtime.open(url, agents()) as first, Runtime.open(url, agents(), recover=False) as second:
        yield first, second


async def test_another_process_cancels_one_that_waits(two: tuple[Runtime, Runtime]) -> None:
    first, second = two
    run_id = (await first.run("boss", "go")).run_id
    ended = await second.cancel(run_id, ns=["tools:b1", "tools:m1"], reason="nobody knows")
    assert (ended.status, ended.error) == (RunStatus.CANCELLED, "nobody knows")
    assert (await second.result(run_id)).status is RunStatus.COMPLETED


async def test_another_process_cancels_one_that_works(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    agents = [boss(task("hanger", "b1"), children=[worker("hanger", call("hang", id="h1"))])]
    async with Runtime.open(url, agents) as first, Runtime.open(url, recover=False) as second:
        run = first.stream("boss", "go")
        ns = await started(first, run.run_id, "hanger", "tool_call_ready")
        ended = await second.cancel(run.run_id, ns=ns, reason="enough")
        assert (ended.status, ended.error) == (RunStatus.CANCELLED, "enough")
        assert (await second.result(run.run_id)).status is RunStatus.COMPLETED
        store: Any = second.store
        assert await store.wishes_for(run.run_id) == []


async def test_a_cancel_that_a_dead_owner_left_is_carried_out_by_the_next(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    agents = [boss(task("hanger", "b1"), children=[worker("hanger", call("hang", id="h1"))])]
    async with Runtime.open(url, agents) as first:
        run = first.stream("boss", "go")
        ns = await started(first, run.run_id, "hanger", "tool_call_ready")
        inside.forget_log(first, run.run_id)  # the store still names it as the owner
        async with Runtime.open(url, agents, recover=False) as second:
            from retinue.log.ask import Cancel, make_wish

            store: Any = second.store
            await store.put_wish(make_wish(run.run_id, Cancel(ns=ns, reason="enough")))
            await store.renew(await store.owner_of(run.run_id), -1.0)
            (continued,) = await second.recover()
            result = await continued.result()
            assert result.status is RunStatus.COMPLETED
            assert ends(await all_events(second, run.run_id))[0] == ("hanger", "cancelled")
            await until(lambda: _is_read(store, run.run_id))


async def _is_read(store: Any, run_id: str) -> bool:
    return not await store.wishes_for(run_id)


async def test_one_in_the_background_is_cancelled_with_its_task(opened: Open, tmp_path: Path) -> None:
    def lead(request: Any) -> Any:
        if any(message.role == "tool" for message in request.messages):
            return say("done")
        return call("agent_spawn", {"agent_id": "hanger", "task": "hang", "timeout_seconds": 0}, id="c1")

    (tmp_path / "ws").mkdir()
    agent = HarnessAgent(
        "boss",
        ScriptedModel(lead),
        subagents=[worker("hanger", call("hang", id="h1"))],
        workspace=tmp_path / "ws",
        general_purpose=False,
    )
    async with opened([agent]) as runtime:
        run = runtime.stream("boss", "go")
        ns = await started(runtime, run.run_id, "hanger", "tool_call_ready")
        assert (await run.result()).status is RunStatus.COMPLETED
        ended = await runtime.cancel(run.run_id, ns=ns)
        assert ended.status is RunStatus.CANCELLED
        updates = [event for event in await all_events(runtime, run.run_id) if event.kind == "task_updated"]
        assert updates[-1].status == "CANCELLED"  # type: ignore[attr-defined]


async def test_a_child_of_a_background_child_that_waits(opened: Open, tmp_path: Path) -> None:
    def lead(request: Any) -> Any:
        if any(message.role == "tool" for message in request.messages):
            return say("done")
        return call("agent_spawn", {"agent_id": "middle", "task": "go", "timeout_seconds": 0}, id="c1")

    (tmp_path / "ws").mkdir()
    agent = HarnessAgent(
        "boss", ScriptedModel(lead), subagents=[middle()], workspace=tmp_path / "ws", general_purpose=False
    )
    async with opened([agent]) as runtime:
        run = runtime.stream("boss", "go")
        ns = await started(runtime, run.run_id, "asker", "run_finished")
        assert (await run.result()).status is RunStatus.COMPLETED
        await started(runtime, run.run_id, "middle", "run_finished")
        ended = await runtime.cancel(run.run_id, ns=ns, reason="nobody knows")
        assert (ended.status, ended.error) == (RunStatus.CANCELLED, "nobody knows")
        finished = ends(await all_events(runtime, run.run_id))
        assert finished[-1] == ("middle", "completed"), finished


async def test_below_a_run_on_a_server_it_is_refused() -> None:
    from retinue.log.ask import Cancel
    from retinue.runtime.cancel import cancel_run

    async with Runtime([boss(task("asker", "b1"), children=[asker()])]) as runtime:
        run_id = (await runtime.run("boss", "go")).run_id
        live = inside.owned_run(runtime, run_id)
        (child,) = live.log.tree.children_of(live.state)
        child.remote_seq = 1  # as its server would have it
        reply = await cancel_run(live, Cancel(ns=("tools:b1", "tools:x")))
        assert reply.code == "not_reachable"
        with pytest.raises(ConfigurationError, match="on a server"):
            await runtime.cancel(run_id, ns=("tools:b1", "tools:x"))
