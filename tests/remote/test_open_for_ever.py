"""A server that says for ever that a run there is open: a cancel and the tree's time end the log here, and give that up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from retinue import Limits, RunStatus, Runtime
from retinue.events import AnyEvent
from retinue.testing import say

from ..waiting import until
from .open_server import open_server
from .test_remote import orchestrator, spawn
from .test_remote_rest import near, statuses


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("foreign", "mirror"):
        monkeypatch.setattr(f"retinue.backends.{module}.GRACE", 0.5)
    monkeypatch.setattr("retinue.backends.tasks_http.STOP_SECONDS", 0.05)


async def _open_tasks(runtime: Runtime, run_id: str) -> list[AnyEvent]:
    return [event for event in await runtime.log(run_id).so_far() if event.kind == "task_updated"]


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_a_cancel_with_tasks_gives_up_what_does_not_end(store: str, tmp_path: Path) -> None:
    url = "memory:" if store == "memory:" else f"sqlite:///{tmp_path}/near.db"
    async with open_server() as server, Runtime.open(url, [near(server.url)]) as runtime:
        run = runtime.stream("near", "go")
        assert (await run.result()).status is RunStatus.COMPLETED
        assert not await runtime.log(run.run_id).has_ended()
        await runtime.cancel(run.run_id, tasks=True)
        events = [event async for event in runtime.events(run.run_id)]
        assert statuses(events) == ["RUNNING", "FAILED"]
        assert server.cancels == [{"tasks": True}]
        await until(runtime.log(run.run_id).has_ended)


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_what_is_open_only_after_the_cancel_is_given_up_too(store: str, tmp_path: Path) -> None:
    """A background child is cancelled, and leaves a task there."""
    url = "memory:" if store == "memory:" else f"sqlite:///{tmp_path}/near.db"
    async with open_server("running", "cancelled") as server:
        agent = orchestrator(
            server.url, tmp_path, lambda told: say("done") if told else spawn("look", timeout_seconds=0)
        )
        async with Runtime.open(url, [agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            await run.result()
            await server.has_streamed.wait()
            await runtime.cancel(run.run_id, tasks=True)
            events = [event async for event in runtime.events(run.run_id)]
            left = [event for event in events if event.kind == "task_updated" and event.task_id == "t9"]
            assert [event.status for event in left] == ["RUNNING", "FAILED"]
            assert {"tasks": True} in server.cancels
            await until(runtime.log(run.run_id).has_ended)


async def test_the_time_of_the_tree_ends_it_also_in_the_next_process(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/near.db"
    async with open_server() as server:
        async with Runtime.open(url, [near(server.url)], on_close="leave") as first:
            run = first.stream("near", "go", limits=Limits(seconds=1000))
            assert (await run.result()).status is RunStatus.COMPLETED
        assert server.cancels == []
        async with Runtime.open(url, [near(server.url)], clock=lambda: time.time() + 900) as second:
            await until(lambda: _open_tasks(second, run.run_id))
            assert not await second.log(run.run_id).has_ended()
            await second.close()
        async with Runtime.open(url, [near(server.url)], clock=lambda: time.time() + 1001) as third:
            events = [event async for event in third.events(run.run_id)]
            assert statuses(events)[-1] == "FAILED"
            assert server.cancels == [{"tasks": True}]
            await until(third.log(run.run_id).has_ended)
