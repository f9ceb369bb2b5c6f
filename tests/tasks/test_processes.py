"""Several processes on one workspace."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retinue import LocalFilesystem as Local
from retinue import Runtime
from retinue.tasks import MemoryTaskRepository, TaskScope, TaskStatus, WorkspaceTaskRepository
from retinue.tasks.service import TaskService
from retinue.tasks.sweeper import is_abandoned, is_node_gone
from retinue.testing import call, say
from retinue.testing.tasks import task_record

from ..effort import share
from ..prepared import PYTHON
from ..waiting import until
from .node import SETTINGS, harness
from .office import eventually, plain

S1 = TaskScope("boss", "s1")
HERE = Path(__file__).parent.parent.parent
WRITERS, UPDATES = share(8, 4), share(500, 60)
PRINT_IDENTITY = "from retinue.core.processes import process_identity as i; print(i())"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [PYTHON, "-m", "tests.tasks.node", str(tmp_path), *args],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """The next line of a process."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"the process ended with {process.wait()}"
    return line


def calls(root: Path) -> int:
    return len((root / "calls.txt").read_text().splitlines())


async def ask(runtime_root: Path, name: str, args: dict[str, Any] | None = None) -> str:
    """What a tool of a harness in this process answers."""
    async with Runtime([harness(runtime_root, [call(name, args or {}), say("done")])]) as runtime:
        result = await runtime.run("boss", "go", thread_id="s1")
        return next(message.text for message in result.messages if message.role == "tool")


async def test_another_process_lists_waits_and_returns_after_the_end(tmp_path: Path, node: Start) -> None:
    task_id = said(node("start", str(time.time() + 3600)))
    listed = await ask(tmp_path, "task_list")
    assert plain(listed).splitlines() == [
        "1 tracked task(s):",
        "- task_id: <task>  agent: worker  status: running  created: <time>",
    ]
    assert plain(await ask(tmp_path, "task_output", {"task_id": task_id, "block": False})) == (
        "task_id: <task>\nagent_id: worker\nstatus: Running\ncreated_at: <time>\n\nTask still running..."
    )
    assert plain(await ask(tmp_path, "task_output", {"task_id": task_id, "timeout": 100})) == (
        "task_id: <task>\nstatus: running\n"
        "note: Task is running (possibly on another node). Use task_output(block=false) to poll."
    )
    (tmp_path / "stop").touch()
    answer = await ask(tmp_path, "task_output", {"task_id": task_id})
    assert plain(answer) == (
        "task_id: <task>\nagent_id: worker\nstatus: Completed\ncreated_at: <time>\n\nResult:\nworked"
    )
    record = await WorkspaceTaskRepository(Local(tmp_path), "boss").get(S1, task_id)
    assert record is not None
    assert record.node is not None
    assert f"-{os.getpid()}-" not in record.node, "it was not the other process that did the work"


async def test_another_process_cancels_and_the_work_really_stops(tmp_path: Path, node: Start) -> None:
    process = node("start", str(time.time() + 3600))
    task_id = said(process)
    await eventually(lambda: (tmp_path / "calls.txt").exists() and calls(tmp_path) > 3)
    answer = await ask(tmp_path, "task_cancel", {"task_id": task_id})
    made = calls(tmp_path)
    assert plain(answer) == "task_id: <task>\nstatus: cancelled\nCancellation requested successfully."
    assert await asyncio.to_thread(said, process) == "idle"
    assert calls(tmp_path) == made, "a model or a tool was called after the task had stopped"
    (stored,) = json.loads((tmp_path / "agents/boss/tasks/s1.json").read_text()).values()
    assert (stored["status"], stored["cancelRequested"]) == ("CANCELLED", True)


async def test_a_killed_executor_is_found_once(tmp_path: Path, node: Start) -> None:
    process = node("start", str(time.time() + 3600))
    task_id = said(process)
    await eventually(lambda: (tmp_path / "calls.txt").exists())
    services = [TaskService(WorkspaceTaskRepository(Local(tmp_path), "boss", SETTINGS)) for _ in range(2)]
    repository = services[0].repository
    for _ in range(3):  # as long as it lives, nobody gives up on it
        before = await repository.get(S1, task_id)
        assert [await service.sweep() for service in services] == [[], []]

        async def has_beaten(before: Any = before) -> bool:
            return await repository.get(S1, task_id) != before

        await until(has_beaten)
    process.send_signal(signal.SIGKILL)
    process.wait()
    swept = [found for service in services for found in await service.sweep()]
    assert [(record.task_id, record.status) for record in swept] == [(task_id, TaskStatus.FAILED)], "at once, and once"
    error = swept[0].error_message or ""
    assert error.startswith("executor lost: no heartbeat for ")
    assert error.endswith("; its process is gone")
    assert plain(await ask(tmp_path, "task_output", {"task_id": task_id})).startswith(
        "task_id: <task>\nagent_id: worker\nstatus: Failed: executor lost: no heartbeat for "
    )


async def test_who_waits_for_a_task_learns_at_once_that_its_process_was_killed(tmp_path: Path, node: Start) -> None:
    process = node("start", str(time.time() + 3600))
    task_id = said(process)
    await eventually(lambda: (tmp_path / "calls.txt").exists())
    service = TaskService(WorkspaceTaskRepository(Local(tmp_path), "boss"))  # gives up after 10 minutes of silence
    waiting = asyncio.create_task(service.wait(S1, task_id, 3600))
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = await waiting
    assert record is not None
    assert record.status is TaskStatus.FAILED


async def test_a_killed_task_of_a_stored_run_is_left_to_whoever_continues_the_run() -> None:
    ended = subprocess.run([PYTHON, "-c", PRINT_IDENTITY], capture_output=True, text=True, check=True)
    node = f"host-1-abcd@{ended.stdout.strip()}"
    assert is_node_gone(node)
    assert is_abandoned(task_record("t", status=TaskStatus.RUNNING, node=node))
    assert not is_abandoned(task_record("t", status=TaskStatus.RUNNING, node=node, log_id="log"))
    assert not is_abandoned(task_record("t", status=TaskStatus.RUNNING, node=node, transport_type="task-protocol"))
    assert not is_abandoned(task_record("t", status=TaskStatus.RUNNING, node=TaskService(MemoryTaskRepository()).node))
    boot, _, rest = ended.stdout.strip().partition("/")
    for other in ("n1", f"host-1-abcd@{boot[:-1]}x/{rest}", f"host-1-abcd@{boot}/1{rest}"):
        assert not is_node_gone(other), "nothing is known of another machine, boot or pid namespace"


async def test_a_runtime_finds_the_orphans_of_a_downtime_by_itself(tmp_path: Path, node: Start) -> None:
    process = node("start", str(time.time() + 3600))
    task_id = said(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    boss = harness(tmp_path, [say("done")])
    assert boss.task_repository is not None
    async with Runtime([boss]) as runtime:
        await runtime.run("boss", "go", thread_id="another")
        found = await TaskService(boss.task_repository).wait(S1, task_id, 90)
    assert found is not None
    assert found.status is TaskStatus.FAILED


@pytest.mark.timeout(120)
async def test_eight_writers_lose_nothing(tmp_path: Path, node: Start) -> None:
    repository = WorkspaceTaskRepository(Local(tmp_path), "boss", SETTINGS)
    names = [f"task_{number}" for number in range(WRITERS)]
    for number, name in enumerate(names):
        await repository.add(task_record(name, status=TaskStatus.RUNNING, node=str(number)))
    await repository.add(task_record("shared", status=TaskStatus.RUNNING, node="n"))
    writers = [node("write", str(number), str(UPDATES)) for number in range(WRITERS)]
    assert [said(writer) for writer in writers] == ["ready"] * WRITERS
    ends: dict[str, Any] = {}
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    path, looks = tmp_path / "agents/boss/tasks/s1.json", 0
    while any(writer.poll() is None for writer in writers):
        stored = json.loads(path.read_text())  # never torn
        assert [*stored] == [*names, "shared"], "a record is missing"
        for name, record in stored.items():
            if record.get("status") in ("COMPLETED", "FAILED", "CANCELLED"):
                assert ends.setdefault(name, record) == record, "a terminal record changed"
        looks += 1
        await asyncio.sleep(0.001)
    assert [said(writer) for writer in writers] == ["done"] * WRITERS
    assert looks
    records = {record.task_id: record for record in await repository.list(S1)}
    own, shared = (UPDATES - 1 + 1) // 2, (UPDATES - 1) // 2
    assert [records[name].version for name in names] == [1 + own + 1] * WRITERS
    assert records["shared"].version == 1 + shared * WRITERS
    kinds = [TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED]
    assert [(records[name].status, records[name].result) for name in names] == [
        (kinds[number % 3], f"of {number}") for number in range(WRITERS)
    ]
