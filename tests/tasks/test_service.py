from __future__ import annotations

import asyncio
from typing import Any

from retinue import RunResult, RunStatus
from retinue.core.state import PersistedState
from retinue.tasks import MemoryTaskRepository, TaskStatus
from retinue.tasks.service import TaskService
from retinue.testing.tasks import S1, task_record

from .office import QUICK


def outcome(status: RunStatus = RunStatus.COMPLETED, **fields: Any) -> RunResult:
    return RunResult(status=status, run_id="r", thread_id="t", state=PersistedState(), **fields)


async def until_stopped(token: Any, waits: Any) -> RunResult:
    await token.wait()
    return outcome(RunStatus.CANCELLED)


async def test_one_that_only_looks_on_leaves_a_remote_task_alone_when_it_closes() -> None:
    repository = MemoryTaskRepository(QUICK)
    record = task_record("t1", status=TaskStatus.RUNNING, node="n1", transport_type="task-protocol")
    await repository.add(record)
    looker = TaskService(repository)
    looker.attach(record, until_stopped)
    looker.attach(record, until_stopped)
    await asyncio.sleep(0.01)
    await looker.close(grace=1)
    assert await repository.get(S1, "t1") == record


async def test_one_that_looks_on_writes_the_end_it_saw_and_passes_a_cancel_on() -> None:
    repository = MemoryTaskRepository(QUICK)

    async def seen(token: Any, waits: Any) -> RunResult:
        return outcome(response="from afar")

    for task_id, work in (("t1", seen), ("t2", until_stopped)):
        record = task_record(task_id, status=TaskStatus.RUNNING, node="n1", transport_type="task-protocol")
        await repository.add(record)
        looker = TaskService(repository)
        looker.attach(record, work)
        if task_id == "t2":
            await looker.cancel(S1, task_id)
        ended = await looker.wait(S1, task_id, 5)
        assert ended is not None
        assert (ended.status, ended.result) == (
            (TaskStatus.COMPLETED, "from afar") if task_id == "t1" else (TaskStatus.CANCELLED, None)
        )
        await looker.close(grace=1)


async def test_every_end_of_a_child_is_an_end_of_its_task() -> None:
    repository = MemoryTaskRepository(QUICK)
    service = TaskService(repository)
    ends = {
        "t1": (outcome(response="done"), (TaskStatus.COMPLETED, "done", None)),
        "t2": (outcome(RunStatus.FAILED, response="half", error="no luck"), (TaskStatus.FAILED, "half", "no luck")),
        "t3": (outcome(RunStatus.TIMEOUT, termination="timeout"), (TaskStatus.FAILED, None, "timeout")),
        "t4": (outcome(RunStatus.CANCELLED, error="stop"), (TaskStatus.CANCELLED, None, "stop")),
    }
    for task_id, (result, expected) in ends.items():

        async def work(token: Any, waits: Any, result: RunResult = result) -> RunResult:
            return result

        await service.start(task_record(task_id), work)
        record = await service.wait(S1, task_id, 5)
        assert record is not None
        assert (record.status, record.result, record.error_message) == expected
    await service.close(grace=1)


async def test_work_that_raises_has_failed_with_its_error() -> None:
    repository = MemoryTaskRepository(QUICK)
    service = TaskService(repository)

    async def work(token: Any, waits: Any) -> RunResult:
        raise KeyError("lost")

    await service.start(task_record("t1"), work)
    record = await service.wait(S1, "t1", 5)
    assert record is not None
    assert (record.status, record.error_message) == (TaskStatus.FAILED, "KeyError: 'lost'")
    await service.close(grace=1)
