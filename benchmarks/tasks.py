"""Background tasks: started, run and recorded in one session, and what they cost in every prompt."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from typing import Any

from retinue import Agent, CallChunk, HarnessAgent, Limits, LocalFilesystem, ModelRequest, Runtime, TextChunk, TurnEnd
from retinue.models import ModelChunk
from retinue.tasks import TaskScope, TaskStatus, WorkspaceTaskRepository
from retinue.testing.tasks import task_record

MANY, FEW = 1_000, 100
TOGETHER = "a task, 1,000 started in one step"
APART = "a task, 1,000 started a step each"
GROWTH = "a task of 1,000 over a task of 100"
PROMPT = "the prompt's part about 1,000 tasks"
GOALS = {TOGETHER: (3, "ms"), APART: (3, "ms"), GROWTH: (2, "x"), PROMPT: (1, "ms")}


class Boss:
    """Spawns `count` tasks, so many a step."""

    name = "bench:boss"

    def __init__(self, count: int, a_step: int) -> None:
        self._left, self._a_step = count, a_step

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        now = min(self._left, self._a_step)
        self._left -= now
        for index in range(now):
            task = '{"agent_id":"worker","task":"look it up","timeout_seconds":0}'
            yield CallChunk(index, f"call_{self._left}_{index}", "agent_spawn", task)
        if not now:
            yield TextChunk("done")
        yield TurnEnd("tool_calls" if now else "stop")


class Worker:
    name = "bench:worker"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("found it")
        yield TurnEnd()


async def start_and_run(count: int, a_step: int) -> float:
    """Seconds for `count` tasks, from the first call to the last record."""
    with tempfile.TemporaryDirectory() as root:
        boss = HarnessAgent(
            "boss",
            Boss(count, a_step),
            workspace=root,
            subagents=[Agent("worker", Worker(), description="Looks things up.")],
            max_steps=count + 2,
            limits=Limits(children=count),
        )
        async with Runtime([boss]) as runtime:
            began = time.process_time()
            run = runtime.stream(boss, "go", thread_id="s1")
            ended = 0
            async for event in runtime.events(run.run_id):
                ended += event.kind == "task_updated" and getattr(event, "status", "") == "COMPLETED"
            took = time.process_time() - began
        assert ended == count, f"{ended} of {count} tasks completed"
        assert boss.task_repository is not None
        records = await boss.task_repository.list(TaskScope("boss", "s1"))
        assert [record.status for record in records] == [TaskStatus.COMPLETED] * count
    return took


async def prompt_part(count: int, rounds: int = 50) -> float:
    """Seconds that a step spends on its session's tasks where there is no news of them."""
    from retinue.subagents.task_tools import ANNOUNCED, announce, task_summary

    with tempfile.TemporaryDirectory() as root:
        repository = WorkspaceTaskRepository(LocalFilesystem(root), "boss")
        ids = [f"task_{number:036}" for number in range(count)]
        await asyncio.gather(*[repository.add(task_record(one, status=TaskStatus.COMPLETED)) for one in ids])
        scope, seen = TaskScope("boss", "s1"), _Seen({ANNOUNCED: dict.fromkeys(ids, "completed")})
        taken: list[float] = []
        for _ in range(rounds):
            began = time.process_time()
            records = await repository.list(scope)
            assert await announce(seen, records, repository) is None  # pyright: ignore[reportArgumentType]
            text = task_summary(records)
            taken.append(time.process_time() - began)
            assert f"({count - 10} more - use task_list() to see all)" in text
    return statistics.median(taken)


class _Seen:
    """What a hook sees, as far as these look."""

    def __init__(self, snapshot: dict[Any, Any]) -> None:
        self.snapshot = snapshot


def one_round() -> dict[str, float]:
    few = asyncio.run(start_and_run(FEW, FEW)) / FEW
    together = asyncio.run(start_and_run(MANY, MANY)) / MANY
    apart = asyncio.run(start_and_run(MANY, 1)) / MANY
    few_apart = asyncio.run(start_and_run(FEW, 1)) / FEW
    return {
        TOGETHER: together * 1e3,
        APART: apart * 1e3,
        GROWTH: max(together / few, apart / few_apart),
        PROMPT: asyncio.run(prompt_part(MANY)) * 1e3,
    }
