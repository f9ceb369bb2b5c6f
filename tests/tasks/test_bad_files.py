"""What is on disk is not what it should be, or cannot be written: a clear line, nothing lost, and the run goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, HarnessAgent, LocalFilesystem, RunStatus, Runtime
from retinue.errors import PathError, TaskStoreError
from retinue.tasks import TaskScope, TaskStatus, WorkspaceTaskRepository
from retinue.tasks.task import request_cancel
from retinue.testing import ScriptedModel, call
from retinue.testing.tasks import task_record
from tests.workspace.conftest import permissions as permissions

from .office import QUICK, Office, eventually, task_id_in, texts

S1 = TaskScope("boss", "s1")
FILE = "agents/boss/tasks/s1.json"


class Disk(LocalFilesystem):
    """A disk that can be full: nothing more is written to it."""

    full = False
    only = ""
    """Which paths are concerned."""

    def _write_new(self, folder: Any, name: str, data: bytes, mode: int | None) -> Any:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super()._write_new(folder, name, data, mode)

    def write(self, path: str, data: bytes) -> None:
        if self.only and self.only in path:
            raise PathError(path, "no space left on device")
        super().write(path, data)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
async def office(tmp_path: Path, disk: Disk) -> AsyncIterator[Office]:
    async with Office(tmp_path, filesystem=disk) as made:
        yield made


BROKEN = {
    "empty": b"",
    "truncated": b'{"t1": {"taskId": "t1", "subAg',
    "not JSON": b"hello",
    "not UTF-8": b'{"\xff\xfe": 1}',
    "a list": b"[1, 2]",
    "another shape": b'{"t1": {"name": "somebody else\'s"}}',
    "a number": b'{"t1": 5}',
    "an unknown status": b'{"t1": {"taskId": "t1", "subAgentId": "w", "parentAgentId": "boss", "parentSessionId": "s1",'
    b' "status": "PAUSED", "createdAt": "2026-01-01T00:00:00Z", "lastUpdatedAt": "2026-01-01T00:00:00Z"}}',
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
async def test_a_file_that_is_not_ours_is_named_and_left_alone(office: Office, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    error = rf"{re.escape(FILE)}: it is not a file of task records \(.+\): mend it, or move it away"
    result = await office.run(
        call("agent_spawn", {"agent_id": "worker", "task": "say hi", "timeout_seconds": 0}),
        call("task_list"),
        call("task_output", {"task_id": "t1"}),
        call("task_cancel", {"task_id": "t1"}),
        call("agent_spawn", {"agent_id": "worker", "task": "say hi"}),
    )
    assert result.status is RunStatus.COMPLETED, result.error
    *refused, answered = texts(result)
    assert len(refused) == 4
    for answer in refused:
        assert re.fullmatch(f"Error: {error}", answer, re.DOTALL), answer
    assert answered.endswith("status: ok\nreply:\nhi")
    assert path.read_bytes() == data
    assert office.begun == ["say hi"], "the task was started though it could not be written down"
    last = office.model.requests[-1].messages[-1].text
    assert re.fullmatch(rf"# Async tasks \(current session\)\n\nThey cannot be read just now: {error}", last, re.DOTALL)
    events: list[Any] = [event async for event in office.runtime.events(result.run_id)]
    told = {event.data["type"] for event in events if event.kind == "custom"}
    assert told == {"tasks_unreadable"}


async def test_a_file_that_is_mended_is_read_again(office: Office, tmp_path: Path) -> None:
    task_id = await office.start("say hi")
    await office.ended(task_id)
    path = tmp_path / FILE
    good = path.read_bytes()
    path.write_bytes(good[:-20])
    assert (await office.do("task_list")).startswith("Error: ")
    path.write_bytes(good)
    assert task_id in await office.do("task_list")


async def test_what_somebody_writes_during_an_update_is_noticed(tmp_path: Path) -> None:
    """An editor takes no lock: what it writes while a record is looked at must not pass for what was read."""
    repository = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "boss")
    await repository.add(task_record("t1"))

    def edited(record: Any) -> None:
        (tmp_path / FILE).write_bytes(b"{}")

    await repository.update(S1, "t1", edited)
    assert list(await repository.list(S1)) == []


async def test_a_broken_session_harms_no_other(office: Office, tmp_path: Path) -> None:
    """Its neighbour's tasks are still looked after: they beat, are cancelled and swept."""
    bad = await office.start("wait bad", thread="bad")
    good = await office.start("wait good", thread="good")
    await office.repository.add(task_record("lost", TaskScope("boss", "third"), status=TaskStatus.RUNNING, node="gone"))
    await eventually(lambda: len(office.begun) == 2)
    path = tmp_path / "agents/boss/tasks/bad.json"
    kept = path.read_bytes()
    path.write_bytes(b"{")
    before = await office.record(good, thread="good")
    await office.until(good, lambda record: record.version >= before.version + 3, thread="good")
    assert (await office.ended("lost", thread="third")).status is TaskStatus.FAILED
    other = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "boss", QUICK)
    await other.update(TaskScope("boss", "good"), good, lambda record: request_cancel(record, 0))
    assert (await office.ended(good, thread="good")).status is TaskStatus.CANCELLED
    office.gates["bad"].set()
    await asyncio.sleep(0.05)
    path.write_bytes(kept)
    ended = await office.ended(bad, thread="bad")
    assert (ended.status, ended.result) == (TaskStatus.COMPLETED, "waited for bad"), "the result was lost"


async def test_a_full_disk_refuses_new_tasks_in_words(office: Office, disk: Disk) -> None:
    done = await office.start("say before")
    await office.ended(done)
    disk.full = True
    result = await office.run(
        call("agent_spawn", {"agent_id": "worker", "task": "say hi", "timeout_seconds": 0}),
        call("task_list"),
        call("agent_spawn", {"agent_id": "worker", "task": "say hi"}),
    )
    assert result.status is RunStatus.COMPLETED, result.error
    refused, listed, answered = texts(result)
    assert refused == f"Error: {FILE}: no space left on device"
    assert "1 tracked task(s):" in listed
    assert answered.endswith("status: ok\nreply:\nhi")
    assert office.begun == ["say before", "say hi"]
    disk.full = False
    assert (await office.ended(await office.start("say after"))).result == "after"


@pytest.mark.parametrize("gate", ["here", "there " * 2000], ids=["short", "long"])
async def test_a_result_waits_in_memory_until_the_disk_has_room(
    office: Office, disk: Disk, gate: str, caplog: pytest.LogCaptureFixture
) -> None:
    task_id = await office.start(f"wait {gate}")
    await eventually(lambda: office.begun)
    disk.full = True
    office.gates[gate].set()
    await eventually(lambda: "cannot be written" in caplog.text)
    assert (await office.record(task_id)).status is TaskStatus.RUNNING
    answer = await office.do("task_output", {"task_id": task_id, "timeout": 20})
    assert answer.splitlines()[1] == "status: running"

    def free_disk(record: logging.LogRecord) -> bool:
        """Make room between two attempts, not in the middle of one."""
        disk.full = disk.full and "cannot be written" not in record.getMessage()
        return True

    log = logging.getLogger("retinue.tasks.service")
    log.addFilter(free_disk)
    try:
        ended = await office.ended(task_id)
    finally:
        log.removeFilter(free_disk)
    assert ended.status is TaskStatus.COMPLETED
    assert await office.repository.read_result(ended) == f"waited for {gate}"
    assert (ended.result_file is not None) == (len(gate) > 4096)


async def test_a_long_result_that_has_no_file_stays_in_its_record(office: Office, disk: Disk) -> None:
    disk.only = ".txt"
    text = "word " * 3000
    task_id = await office.start(f"say {text}")
    ended = await office.ended(task_id)
    assert (ended.status, ended.result, ended.result_file) == (TaskStatus.COMPLETED, text, None)


async def test_a_full_disk_when_work_is_promoted_stops_the_work_and_says_so(
    office: Office, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = asyncio.wait

    async def sooner(tasks: Any, *, timeout: float | None = None, **options: Any) -> Any:
        return await wait(tasks, timeout=0.05 if timeout == 1 else timeout, **options)

    monkeypatch.setattr("retinue.subagents.work.asyncio.wait", sooner)
    disk.full = True
    assert await office.spawn("wait here", 1) == f"Error: {FILE}: no space left on device"
    office.gates["here"].set()
    await asyncio.sleep(0.02)
    assert len(office.worker_model.requests) == 1
    disk.full = False
    assert list(await office.repository.list(S1)) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
async def test_a_write_that_fails_half_way_leaves_the_records_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "boss")
    await repository.add(task_record("t1"))
    before = (tmp_path / FILE).read_bytes()
    fdopen = os.fdopen

    def to_full(fd: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb":
            os.close(fd)
            fd = os.open("/dev/full", os.O_WRONLY)
        return fdopen(fd, mode, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr("retinue.workspace.local.os.fdopen", to_full)
        patched.setattr("retinue.workspace.local.os.fchmod", lambda fd, mode: None)
        with pytest.raises(Exception, match=rf"{FILE}: no space left on device"):
            await repository.add(task_record("t2"))
    assert (tmp_path / FILE).read_bytes() == before
    assert [path.name for path in (tmp_path / FILE).parent.iterdir() if not path.name.endswith(".lock")] == ["s1.json"]
    await repository.add(task_record("t2"))
    assert [record.task_id for record in await repository.list(S1)] == ["t1", "t2"]


@pytest.mark.usefixtures("permissions")
async def test_a_read_only_workspace(tmp_path: Path) -> None:
    root = tmp_path / "ws"
    (root / "agents/boss/tasks").mkdir(parents=True)
    writable = WorkspaceTaskRepository(LocalFilesystem(root), "boss", QUICK)
    await writable.add(task_record("t1", status=TaskStatus.COMPLETED, result="hi"))
    (root / FILE).chmod(0o444)
    (root / "agents/boss/tasks").chmod(0o555)
    try:
        async with Office(root) as office:
            result = await office.run(
                call("agent_spawn", {"agent_id": "worker", "task": "say hi", "timeout_seconds": 0}),
                call("task_output", {"task_id": "t1"}),
                call("agent_spawn", {"agent_id": "worker", "task": "say hi"}),
            )
            assert result.status is RunStatus.COMPLETED, result.error
            refused, output, answered = texts(result)
            assert refused == f"Error: {FILE}: permission denied"
            assert output.endswith("Result:\nhi")
            assert answered.endswith("status: ok\nreply:\nhi")
    finally:
        (root / "agents/boss/tasks").chmod(0o755)


async def test_a_folder_where_the_file_should_be(office: Office, tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir(parents=True)
    result = await office.run(
        call("agent_spawn", {"agent_id": "worker", "task": "say hi", "timeout_seconds": 0}), call("task_list")
    )
    assert result.status is RunStatus.COMPLETED, result.error
    refused, listed = texts(result)
    assert refused == f"Error: {FILE}: it is a folder, not a file"
    assert listed == "No background tasks tracked."


async def test_two_harnesses_of_one_name_in_one_runtime_are_refused(tmp_path: Path) -> None:
    agents = [HarnessAgent("boss", ScriptedModel([]), workspace=tmp_path / name) for name in ("a", "b")]
    with pytest.raises(ConfigurationError, match="boss"):
        Runtime(agents)


async def test_two_harnesses_of_one_name_share_their_records_and_lose_none(tmp_path: Path) -> None:
    async with Office(tmp_path) as one, Office(tmp_path) as other:
        spawn = call("agent_spawn", {"agent_id": "worker", "task": "say hi", "timeout_seconds": 0})
        results = await asyncio.gather(*[office.run([spawn] * 10, thread="s1") for office in (one, other)])
        ids = [task_id_in(text) for result in results for text in texts(result)]
        assert len(set(ids)) == 20
        for task_id in ids:
            assert (await one.ended(task_id)).result == "hi"
        assert {record.task_id for record in await other.repository.list(S1)} == set(ids)
        mine = await one.start("wait here")
        answer = await other.do("task_cancel", {"task_id": mine})
        assert answer.endswith("Cancellation requested successfully.")
        assert (await one.record(mine)).status is TaskStatus.CANCELLED


@pytest.mark.parametrize("thread", ["../up", "a/b", ".hidden", "a" * 200, "new\nline", "a..b", "会话1"])
async def test_a_session_that_cannot_name_a_file_has_tasks(office: Office, thread: str) -> None:
    text = "x" * 10_000
    task_id = await office.start(f"say {text}", thread=thread)
    record = await office.until(task_id, lambda record: record.status.is_terminal, thread=thread)
    assert await office.repository.read_result(record) == text
    assert f"task_id: {task_id}" in await office.do("task_list", thread=thread)


async def test_a_session_that_looks_like_a_drive_has_tasks(office: Office) -> None:
    text = "x" * 10_000
    task_id = await office.start(f"say {text}", thread="u:1")
    record = await office.until(task_id, lambda record: record.status.is_terminal, thread="u:1")
    assert await office.repository.read_result(record) == text
    assert f"task_id: {task_id}" in await office.do("task_list", thread="u:1")
    running = await office.start("wait here", thread="u:1")
    assert list(await office.repository.open_scopes()) == [TaskScope("boss", "u:1")]
    await office.do("task_cancel", {"task_id": running}, thread="u:1")


async def test_an_odd_task_id_is_only_a_key(tmp_path: Path) -> None:
    repository = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "boss")
    odd = ["../../up", 'a"b\\c', "žluť\u2028", "a\nb", "", "__proto__"]
    for task_id in odd:
        await repository.add(task_record(task_id))
    again = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "boss")
    assert [record.task_id for record in await again.list(S1)] == odd
    with pytest.raises(Exception, match=r"up"):
        await repository.keep_result(task_record("../../../../../up"), "x" * 10_000)
    assert not (tmp_path.parent / "up.txt").exists()


def test_the_error_of_a_store_says_where_and_what() -> None:
    error = TaskStoreError("a.json", "it is broken")
    assert (str(error), error.place, error.problem) == ("a.json: it is broken", "a.json", "it is broken")
