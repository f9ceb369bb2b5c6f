"""A sub-agent on a server that only a tool knows, as an object: it waits, and is stopped there when nobody waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Decision, RunStatus, Runtime, ToolContext, tool
from retinue.core.tools import answer_of
from retinue.plugins import Permissions
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from tests.remote.test_remote_events import far, helper, researcher

from ..waiting import until
from .server import TaskServer


class Scene:
    """A parent whose tool starts a sub-agent on a server. With `passes_on` it gives the suspended result to the model."""

    def __init__(self, url: str, *, passes_on: bool = False, has_other_work: bool = False) -> None:
        self.has_asked, self.is_working = asyncio.Event(), asyncio.Event()
        stub = RemoteSubagentStub("researcher", url=url)

        @tool(idempotent=True)
        async def delegate(ctx: ToolContext) -> Any:
            """Delegate."""
            outcome = await ctx.run_child(stub, "look")
            self.has_asked.set()
            return f"it is {outcome.status}" if passes_on else answer_of(outcome, "researcher", ctx)

        @tool
        async def work() -> str:
            """Work for ever."""
            self.is_working.set()
            await asyncio.Event().wait()
            return ""

        def turn(request: Any) -> Any:
            if request.messages[-1].role == "tool":
                return say("Done.")
            calls = [call("delegate", {}, id="d1")]
            return [*calls, call("work", {}, id="w1")] if has_other_work else calls

        self.agent = Agent("boss", ScriptedModel(turn), tools=[delegate, work])


def asking() -> Agent:
    return researcher(helper(plugins=[Permissions(ask=["look"])]))


async def is_stopped(server: TaskServer) -> None:
    (there,) = server.runs.values()
    assert (await server.runtime.result(there.run_id)).status is RunStatus.CANCELLED


def url_of(store: str, folder: Path) -> str:
    return store if store == "memory:" else f"sqlite:///{folder}/near.db"


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_it_is_stopped_when_its_waiting_parent_is_cancelled(store: str, tmp_path: Path) -> None:
    async with far(asking()) as server:
        scene = Scene(server.url)
        async with Runtime.open(url_of(store, tmp_path), [scene.agent]) as runtime:
            run = runtime.stream("boss", "go")
            assert (await run.result()).status is RunStatus.SUSPENDED
            assert (await runtime.cancel(run.run_id)).status is RunStatus.CANCELLED
        await is_stopped(server)


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_it_is_stopped_when_its_parent_ends_without_it(store: str, tmp_path: Path) -> None:
    async with far(asking()) as server:
        scene = Scene(server.url, passes_on=True)
        async with Runtime.open(url_of(store, tmp_path), [scene.agent]) as runtime:
            assert (await runtime.run("boss", "go")).response == "Done."
        await is_stopped(server)


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_it_is_stopped_when_its_parent_is_cancelled_at_other_work(store: str, tmp_path: Path) -> None:
    async with far(asking()) as server:
        scene = Scene(server.url, has_other_work=True)
        async with Runtime.open(url_of(store, tmp_path), [scene.agent]) as runtime:
            run = runtime.stream("boss", "go")
            await asyncio.gather(scene.has_asked.wait(), scene.is_working.wait())
            await until(lambda: _waits(runtime, run.run_id))
            assert (await run.cancel()).status is RunStatus.CANCELLED
        await is_stopped(server)


async def _waits(runtime: Runtime, run_id: str) -> bool:
    events = await runtime.log(run_id).so_far()
    return any(event.kind == "run_finished" and event.ns for event in events)


async def test_it_goes_on_in_the_next_process_and_is_not_stopped(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/near.db"
    async with far(asking()) as server:
        async with Runtime.open(url, [Scene(server.url).agent]) as first:
            run = first.stream("boss", "go")
            waiting = await run.result()
        async with Runtime.open(url, [Scene(server.url).agent]) as second:
            (path,) = waiting.suspended
            result = await second.resume(run.run_id, {path: Decision.approve()})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "Done.")
        (there,) = server.runs.values()
        assert (await server.runtime.result(there.run_id)).status is RunStatus.COMPLETED
