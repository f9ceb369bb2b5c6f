"""Several processes on one database: a task lives as long as the log of its run has an owner."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from retinue import Agent, Runtime
from retinue.storage.stores import open_store
from retinue.stores import SqlTaskRepository
from retinue.tasks import TaskRecord, TaskScope, TaskStatus
from retinue.tasks.service import TaskService
from retinue.tasks.sweeper import is_node_gone
from retinue.testing import ScriptedModel, call, say

from .node import LEASE, STORED, harness
from .office import eventually
from .test_processes import Start, calls, node, said

S1 = TaskScope("boss", "s1")
__all__ = ["node"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db"


async def found(tasks: SqlTaskRepository, task_id: str) -> TaskRecord:
    record = await tasks.get(S1, task_id)
    assert record is not None
    return record


async def at_work(root: Path, tasks: SqlTaskRepository, task_id: str) -> None:
    """Return when the other process has worked on a task for several of its heartbeats."""
    await eventually(lambda: (root / "calls.txt").exists())
    sweeping = TaskService(tasks)
    for _ in range(8):
        assert await sweeping.sweep(trust_clock=True) == []
        made = calls(root)
        await eventually(lambda made=made: calls(root) > made + 1)  # one of a tool, which takes a heartbeat
    record = await found(tasks, task_id)
    assert (record.status, record.version) == (TaskStatus.RUNNING, 2), "it was written: a heartbeat?"


def kill(process: Any) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


async def test_the_task_of_a_killed_process_continues_in_another(tmp_path: Path, node: Start, url: str) -> None:
    boss = harness(tmp_path, [], url)
    process = node("start", str(time.time() + 3600), url)
    task_id = said(process)
    tasks = boss.task_repository
    assert isinstance(tasks, SqlTaskRepository)
    async with Runtime.open(url, [boss], lease=LEASE), asyncio.timeout(90):
        await at_work(tmp_path, tasks, task_id)
        first = (await found(tasks, task_id)).node or ""
        assert not is_node_gone(first)
        kill(process)
        assert is_node_gone(first)
        made = calls(tmp_path)
        await eventually(lambda: calls(tmp_path) > made)
        (tmp_path / "stop").touch()
        while not (record := await found(tasks, task_id)).status.is_terminal:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert (record.status, record.result) == (TaskStatus.COMPLETED, "worked")
    assert record.node != first
    assert record.version == 4, "added, begun, taken over, ended: nothing else was written"
    await tasks.close()


async def test_a_task_that_nobody_continues_is_swept_after_orphan_after(tmp_path: Path, node: Start, url: str) -> None:
    process = node("start", str(time.time() + 3600), url)
    task_id = said(process)
    boss, impatient = harness(tmp_path, [], url), replace(STORED, orphan_after=0.3)
    async with (
        Runtime.open(url, [boss], lease=LEASE, recover=False),
        SqlTaskRepository(url, impatient) as tasks,
        asyncio.timeout(90),
    ):
        sweeping = TaskService(tasks)
        await at_work(tmp_path, tasks, task_id)
        kill(process)
        killed = time.monotonic()
        swept: list[TaskRecord] = []
        while not swept:
            swept = await sweeping.sweep(trust_clock=True)
            await asyncio.sleep(0.02)
        assert time.monotonic() - killed >= impatient.orphan_after
        assert [(record.task_id, record.status) for record in swept] == [(task_id, TaskStatus.FAILED)]
        assert (swept[0].error_message or "").startswith("executor lost: nobody has continued its run for ")
        assert swept[0].version == 3


async def test_a_process_that_loses_the_log_writes_nothing_of_the_task(tmp_path: Path, node: Start, url: str) -> None:
    """As one that was frozen for so long that another process has continued its run."""
    process = node("start", str(time.time() + 3600), url)
    task_id = said(process)
    store: Any = open_store(url)
    async with SqlTaskRepository(store, STORED) as tasks, asyncio.timeout(90):
        await at_work(tmp_path, tasks, task_id)
        log_id = (await found(tasks, task_id)).log_id
        assert await store.claim(log_id, "another", 60.0, gone=await store.owner_of(log_id)) == 2
        assert await asyncio.to_thread(said, process) == "idle"  # it has noticed, and works no more
        record = await found(tasks, task_id)
        assert (record.status, record.version) == (TaskStatus.RUNNING, 2)
    await store.close()


async def test_a_sub_agent_of_a_killed_process_takes_messages_when_its_task_has_ended(
    tmp_path: Path, node: Start, url: str
) -> None:
    def send(request: Any) -> Any:
        (key,) = re.findall(r"agent:worker:[0-9a-f-]+", request.messages[-1 - request.transient].text)
        return call("agent_send", {"agent_key": key, "message": "until 0"})

    boss = harness(tmp_path, [call("agent_list"), send, say("end")] * 2, url)
    process = node("start", str(time.time() + 3600), url)
    task_id = said(process)
    tasks = boss.task_repository
    assert isinstance(tasks, SqlTaskRepository)
    async with Runtime.open(url, [boss], lease=LEASE) as runtime, asyncio.timeout(90):
        refused = await runtime.run("boss", "more", thread_id="s1")
        assert " is busy: it works on an earlier message in another process" in refused.messages[-2].text
        kill(process)
        (tmp_path / "stop").touch()
        while not (await found(tasks, task_id)).status.is_terminal:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        answered = await runtime.run("boss", "more", thread_id="s1")
        assert answered.messages[-2].text.endswith("status: ok\nreply:\nworked")
        (worker,) = [one for one in boss.subagents if isinstance(one, Agent)]
        assert isinstance(worker.model, ScriptedModel)
        users = [message.text for message in worker.model.requests[-1].messages if message.role == "user"]
        assert len(users) == 2, "it remembers what the other process sent it"
        assert users[1] == "until 0"
    await tasks.close()


async def test_a_task_that_was_cancelled_when_its_process_was_gone_does_not_run_again(
    tmp_path: Path, node: Start, url: str
) -> None:
    boss = harness(tmp_path, [], url)
    process = node("start", str(time.time() + 3600), url)
    task_id = said(process)
    tasks = boss.task_repository
    assert isinstance(tasks, SqlTaskRepository)
    # A second model call comes after a tool call, before which the start of the child was stored.
    await eventually(lambda: (tmp_path / "calls.txt").exists() and calls(tmp_path) > 1)
    kill(process)
    made = calls(tmp_path)
    asked = await TaskService(tasks).cancel(S1, task_id, grace=0)
    assert asked is not None
    assert (asked.status, asked.cancel_requested) == (TaskStatus.RUNNING, True)
    async with Runtime.open(url, [boss], lease=LEASE) as runtime, asyncio.timeout(90):
        (run,) = await runtime.store.list_runs("s1")
        events = [event async for event in runtime.events(run.identity.run_id)]
    record = await found(tasks, task_id)
    assert (record.status, record.error_message) == (TaskStatus.CANCELLED, "the task was cancelled")
    assert calls(tmp_path) == made
    ends = [(event.agent, event.status) for event in events if event.kind == "run_finished"]
    assert ends == [("boss", "completed"), ("worker", "cancelled")]
    assert events[-1].kind == "task_updated"
    await tasks.close()
