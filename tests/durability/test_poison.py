"""Runs that kill their processes: they are continued a few times, and end; all others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, HarnessAgent, RunResult, RunStatus, Runtime, tool
from retinue.core.stores import Losses
from retinue.tasks import TaskStatus
from retinue.testing import ScriptedModel, call, say

from .. import inside
from ..waiting import until
from . import poison


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


class Bomb:
    """An agent whose only call does not end; the test plays the deaths of its processes."""

    def __init__(self, *, idempotent: bool = True) -> None:
        @tool(idempotent=idempotent)
        async def explode() -> str:
            """Wait for good."""
            self.begun += 1
            await asyncio.Event().wait()
            return ""

        self.begun, self.tool = 0, explode
        self.agent = Agent("bomber", ScriptedModel(lambda request: call("explode")), tools=[explode], max_steps=99)

    def has_begun(self, times: int) -> Any:
        return until(lambda: self.begun == times)


async def be_claimed(runtime: Runtime, run_id: str, times: int) -> None:
    """Let processes claim a log one after the other, and die: the next claim finds the last of them."""
    store: Any = runtime.store
    owner = await store.owner_of(run_id)
    for number in range(times):
        assert await store.claim(run_id, f"dead {number}", -1.0, gone=owner) is not None
        owner = f"dead {number}"


async def died(url: str, bomb: Bomb, times: int, **options: Any) -> RunResult:
    """Return the end of a run after its processes have died so often."""
    async with Runtime.open(url, [bomb.agent], **options) as runtime:
        run_id = runtime.stream("bomber", "go").run_id
        await bomb.has_begun(1)
        await be_claimed(runtime, run_id, times - 1)
        await runtime.close(grace=0)
    async with Runtime.open(url, [bomb.agent], recover=False, **options) as runtime:
        assert await runtime.load(run_id) is not None
        return await asyncio.wait_for(runtime.result(run_id), 30)


@pytest.mark.parametrize("idempotent", [True, False])
async def test_a_run_that_was_lost_too_often_ends(url: str, idempotent: bool) -> None:
    bomb = Bomb(idempotent=idempotent)
    result = await died(url, bomb, 3, max_takeovers=2)
    assert (result.status, result.termination) == (RunStatus.FAILED, "worker_lost")
    assert result.error is not None
    assert "died 3 times in a row, each time without progress" in result.error
    assert "of tool 'explode'" in result.error
    assert bomb.begun == 1
    async with Runtime.open(url, [bomb.agent]) as runtime:
        events = [event async for event in runtime.events(result.run_id)]
        record = await runtime.store.load_run(result.run_id)
    assert [event.status for event in events if event.kind == "tool_call_finished"] == ["cancelled"]
    assert [event.code for event in events if event.kind == "error"] == ["worker_lost"]
    assert [event.termination for event in events if event.kind == "run_finished"] == ["worker_lost"]
    assert record is not None
    assert record.lost == 3


async def test_a_run_that_kills_before_its_first_event_ends_too(url: str) -> None:
    bomb = Bomb()
    async with Runtime.open(url, [bomb.agent]) as first:
        run_id = first.stream("bomber", "go").run_id
        await bomb.has_begun(1)
        await be_claimed(first, run_id, 2)
        store: Any = first.store
        await store.database.change("DELETE FROM events WHERE log_id = ?", run_id, key=run_id)
        await first.close(grace=0)
    async with Runtime.open(url, [bomb.agent], recover=False, max_takeovers=2) as second:
        assert await second.load(run_id) is not None
        result = await second.result(run_id)
    assert (result.status, result.termination) == (RunStatus.FAILED, "worker_lost")
    assert "died 3 times before it could" in (result.error or "")
    assert bomb.begun == 1


async def test_a_run_that_was_lost_less_often_goes_on_and_says_so(url: str) -> None:
    bomb = Bomb()
    async with Runtime.open(url, [bomb.agent]) as first:
        run_id = first.stream("bomber", "go").run_id
        await bomb.has_begun(1)
        await be_claimed(first, run_id, 1)
        await first.close(grace=0)
    async with Runtime.open(url, [bomb.agent], recover=False) as second:
        assert await second.load(run_id) is not None
        await bomb.has_begun(2)
        log: Any = inside.owned_run(second, run_id).log
        [notice] = [event for event in await log.history() if event.kind == "error"]
        assert (notice.code, notice.fatal) == ("worker_lost", False)
        assert "died 2 times in a row" in notice.message
        assert (await second.cancel(run_id)).status is RunStatus.CANCELLED


async def test_progress_begins_the_count_again(url: str) -> None:
    begun = asyncio.Event()

    @tool(idempotent=True)
    async def work(n: int) -> str:
        """Work, and in the fourth step for good."""
        if n == 3:
            begun.set()
            await asyncio.Event().wait()
        return "done"

    agent = Agent("worker", ScriptedModel([call("work", {"n": n}) for n in range(4)]), tools=[work])
    async with Runtime.open(url, [agent], max_takeovers=0) as first:
        run_id = first.stream("worker", "go").run_id
        await begun.wait()
        await be_claimed(first, run_id, 1)
        store: Any = first.store
        assert (await store.read_log(run_id)).losses == Losses(count=1, epoch=1)
        await first.close(grace=0)
        begun.clear()
    async with Runtime.open(url, [agent], max_takeovers=1, recover=False) as second:
        assert await second.load(run_id) is not None
        await begun.wait()
        store = second.store
        assert (await store.read_log(run_id)).losses.count == 1, "two deaths, and steps between them"
        await second.cancel(run_id)


async def test_a_cancel_is_heard_before_the_verdict(url: str) -> None:
    bomb = Bomb()
    async with Runtime.open(url, [bomb.agent], max_takeovers=0) as first:
        run_id = first.stream("bomber", "go").run_id
        await bomb.has_begun(1)
        await be_claimed(first, run_id, 1)
        await first.close(grace=0)
    async with Runtime.open(url, [bomb.agent], recover=False, max_takeovers=0) as second:
        assert (await second.cancel(run_id, reason="enough")).error == "enough"


async def test_a_background_child_that_kills_ends_with_its_task(url: str, tmp_path: Path) -> None:
    bomb = Bomb()
    spawn = call("agent_spawn", {"agent_id": "bomber", "task": "go", "timeout_seconds": 0}, id="c1")
    lead = HarnessAgent(
        "lead", ScriptedModel([spawn, say("Done.")]), subagents=[bomb.agent], workspace=tmp_path, general_purpose=False
    )
    async with Runtime.open(url, [lead]) as first:
        run_id = (await first.run("lead", "go")).run_id
        await bomb.has_begun(1)
        await be_claimed(first, run_id, 1)
        await first.close(grace=0)
    async with Runtime.open(url, [lead], recover=False, max_takeovers=0) as second:
        assert await second.load(run_id) is not None
        events = [event async for event in second.events(run_id)]
        assert (await second.result(run_id)).status is RunStatus.COMPLETED
    assert [e.status for e in events if e.kind == "task_updated"][-1] == TaskStatus.FAILED
    assert [e.termination for e in events if e.kind == "run_finished"] == ["natural", "worker_lost"]
    assert bomb.begun == 1


@pytest.mark.parametrize("count", [-1, 1.5, True, "5"])
def test_max_takeovers_is_a_number(count: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_takeovers is a number of deaths, 0 or more"):
        Runtime(max_takeovers=count)


async def test_workers_and_good_runs_outlive_poison_runs(tmp_path: Path, postgres_url: str) -> None:
    found = await asyncio.to_thread(poison.play_workers, tmp_path, postgres_url, 6, 2, max_takeovers=1)
    assert found["runs"] == 8
    assert found["deaths"] <= 1 + 2 + 1


async def test_a_server_and_good_runs_outlive_poison_runs(tmp_path: Path) -> None:
    found = await asyncio.to_thread(poison.play_server, tmp_path, 6, 2, max_takeovers=1)
    assert found["runs"] == 8
    assert found["deaths"] <= 1 + 2 + 1
