"""What is left of old runs goes by itself where that is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, HarnessAgent, Runtime
from retinue.stores import MemoryStore, Retention, SqlTaskRepository
from retinue.tasks import TaskScope
from retinue.testing import ScriptedModel, call, say

from ..logs import whole_log


async def test_a_runtime_drops_what_is_left_of_old_runs(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    agent = Agent("a", ScriptedModel([say("done", chunks=["do", "ne"])]))
    async with Runtime.open(url, [agent]) as runtime:
        run_id = (await runtime.run("a", "hi", thread_id="t")).run_id
    async with Runtime.open(url, [agent], retention=Retention(deltas_days=0)) as runtime:
        async with asyncio.timeout(90):
            while any([event.kind == "text_delta" async for event in runtime.events(run_id)]):  # noqa: ASYNC110 nor here
                await asyncio.sleep(0.02)
        assert [event.kind async for event in runtime.events(run_id)][-1] == "run_finished"
    async with Runtime.open(url, [agent], retention=Retention(days=0)) as runtime:
        async with asyncio.timeout(90):
            while await runtime.store.load_run(run_id) is not None:  # noqa: ASYNC110 nobody tells
                await asyncio.sleep(0.02)
        thread = await runtime.store.load_thread("t")
        assert thread is not None
        assert [message.text for message in thread.messages] == ["hi", "done"]


async def test_what_is_in_memory_needs_no_retention() -> None:
    async with Runtime([Agent("a")], store=MemoryStore(), retention=Retention(days=1)):
        pass
    with pytest.raises(ValueError, match="days"):
        Retention(days=-1)
    with pytest.raises(ConfigurationError):
        Runtime.open("nowhere://x")


async def test_pruning_drops_the_tasks_of_old_runs(sqlite_url: str, tmp_path: Path) -> None:
    """Their records and their results: a result of this length is kept apart from its record."""
    long = "y" * 20_000
    worker = Agent("worker", ScriptedModel(lambda request: say(long)))

    def lead(request: Any) -> Any:
        if any(message.role == "tool" for message in request.messages):  # the end may be announced after it
            return say("started")
        return call("agent_spawn", {"agent_id": "worker", "task": "work", "timeout_seconds": 0}, id="c1")

    async with SqlTaskRepository(sqlite_url) as tasks:
        boss = HarnessAgent(
            "boss",
            ScriptedModel(lead),
            subagents=[worker],
            workspace=tmp_path / "ws",
            task_repository=tasks,
            general_purpose=False,
        )
        async with Runtime.open(sqlite_url, [boss]) as runtime:
            result = await runtime.run("boss", "go", thread_id="t")
            await whole_log(runtime, result.run_id)  # until the task has ended
        scope = TaskScope("boss", "t")
        (record,) = await tasks.list(scope)
        assert await tasks.read_result(record) == long
        async with Runtime.open(sqlite_url, retention=Retention(days=0)) as pruner, asyncio.timeout(90):
            while await pruner.store.load_run(result.run_id) is not None:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)
            try:
                async with asyncio.timeout(90):
                    while await tasks.list(scope):  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.02)
            except TimeoutError:
                pytest.fail("the run is gone, its task is not")
        left = await tasks.read_result(record)
        assert left is not None
        assert len(left) < len(long)
        assert "is not in" in left, "all that is left is what the record in our hands says"
