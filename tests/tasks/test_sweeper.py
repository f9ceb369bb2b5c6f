from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from retinue.core.processes import process_identity
from retinue.errors import StoreError
from retinue.tasks import MemoryTaskRepository, TaskRecord, TaskScope, TaskSettings, TaskStatus
from retinue.tasks.service import TaskService
from retinue.tasks.sweeper import Sweeper
from retinue.tasks.task import beat
from retinue.testing.tasks import NOW, S1, task_record

GONE = f"{process_identity().rpartition('/')[0]}/0"
"""The identity of a process that has ended: its id was given to this one later."""


class Clocks:
    """What the wall says, and how long it has been."""

    def __init__(self) -> None:
        self.wall, self.passed = NOW, 0.0

    def wait(self, seconds: float) -> None:
        self.wall += seconds
        self.passed += seconds


async def watched() -> tuple[MemoryTaskRepository, Clocks, Sweeper]:
    repository, clocks = MemoryTaskRepository(), Clocks()
    await repository.add(task_record("t1", status=TaskStatus.RUNNING, node="n1"))
    return repository, clocks, Sweeper(repository, lambda: clocks.wall, lambda: clocks.passed)


async def test_after_a_downtime_it_takes_two_heartbeats_to_be_sure() -> None:
    _, clocks, sweeper = await watched()
    clocks.wall += 86_400
    assert await sweeper.sweep() == []
    assert sweeper.suspects
    clocks.wait(59)
    assert await sweeper.sweep() == []
    clocks.wait(1)
    assert [record.status for record in await sweeper.sweep()] == [TaskStatus.FAILED]
    assert await sweeper.sweep() == []
    assert not sweeper.suspects


async def test_a_remote_task_whose_process_is_gone_is_watched_again_once() -> None:
    repository, watched = MemoryTaskRepository(), list[TaskRecord]()
    gone: dict[str, Any] = {"status": TaskStatus.RUNNING, "node": f"host-1-2@{GONE}", "transport_type": "task-protocol"}
    await repository.add(task_record("t1", **gone))
    await repository.add(task_record("stored", **gone, log_id="r1"))
    gone["node"] = "another-1-2@another/1"
    await repository.add(task_record("other", **gone))

    async def watch(record: TaskRecord) -> None:
        watched.append(record)

    services = [TaskService(repository) for _ in range(2)]
    for service in services:
        await service.sweep()
        service.watchers["boss"] = watch
    for service in services:
        assert await service.sweep() == []
    assert [(record.task_id, record.node) for record in watched] == [("t1", services[0].node)]


async def test_a_remote_task_that_nobody_gives_a_sign_of_is_watched_again() -> None:
    repository, clocks = MemoryTaskRepository(), Clocks()
    far = task_record("t1", status=TaskStatus.RUNNING, node="another-1-2@another/1", transport_type="a2a")
    await repository.add(far)
    sweeper = Sweeper(repository, lambda: clocks.wall, lambda: clocks.passed)
    await sweeper.sweep()
    clocks.wait(599)
    await sweeper.sweep()
    assert sweeper.unwatched == []
    clocks.wait(1)
    assert await sweeper.sweep() == []
    assert sweeper.unwatched == [far]


async def test_a_clock_that_was_set_forward_or_back_ends_no_living_task() -> None:
    repository, clocks, sweeper = await watched()
    for jump in (1e8, -3e8, 86_400):
        clocks.wall += jump
        for _ in range(50):
            clocks.wait(30)
            await repository.update(S1, "t1", lambda record: beat(record, NOW, "n1"))  # an executor that is behind
            assert await sweeper.sweep() == []


async def test_silence_is_seen_whatever_the_clock_says() -> None:
    _, clocks, sweeper = await watched()
    clocks.wall = 0
    assert await sweeper.sweep() == []
    clocks.passed += 599
    assert await sweeper.sweep() == []
    clocks.passed += 1
    assert [record.status for record in await sweeper.sweep()] == [TaskStatus.FAILED]


async def test_a_command_may_trust_the_clock() -> None:
    repository, clocks, sweeper = await watched()
    assert await sweeper.sweep(trust_clock=True) == []
    clocks.wall += 601
    assert [record.task_id for record in await sweeper.sweep(trust_clock=True)] == ["t1"]
    assert await TaskService(repository).sweep(trust_clock=True) == []


async def test_a_command_leaves_the_tasks_of_a_stored_run_to_the_process_that_continues_it() -> None:
    repository, clocks, sweeper = await watched()
    stored = task_record("t2", status=TaskStatus.RUNNING, node="n2", log_id="run_1")
    await repository.add(stored)
    clocks.wall += 86_400
    assert [record.task_id for record in await sweeper.sweep(trust_clock=True)] == ["t1"]
    clocks.passed += sweeper.proof
    assert [record.task_id for record in await sweeper.sweep()] == ["t2"]


async def test_users_are_swept_too_and_what_this_process_executes_is_not() -> None:
    repository, clocks, sweeper = await watched()
    await repository.add(task_record("t2", TaskScope("boss", "s1", "ann"), status=TaskStatus.RUNNING, node="n2"))
    await sweeper.sweep()
    clocks.wait(601)
    assert [record.task_id for record in await sweeper.sweep({"t1"})] == ["t2"]


class Unreliable(MemoryTaskRepository):
    """Has outages: what becomes of one sweep after the other."""

    def __init__(self, *works: bool) -> None:
        super().__init__(TaskSettings(sweep_every=0.001))
        self._works, self.are_over = list(works), asyncio.Event()

    async def open_scopes(self) -> Sequence[TaskScope]:
        if not self._works:
            self.are_over.set()
        elif not self._works.pop(0):
            raise StoreError("app.db", "it is broken")
        return await super().open_scopes()


async def test_an_outage_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    repository = Unreliable(False, False, False, True, False, False, True)
    service = TaskService(repository)
    service.watch()
    async with asyncio.timeout(90):
        await repository.are_over.wait()
    await service.close()
    said = "lost tasks cannot be looked for, which is tried again: app.db: it is broken"
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [(said, None)] * 2
