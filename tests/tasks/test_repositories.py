from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from retinue import LocalFilesystem
from retinue.tasks import MemoryTaskRepository, TaskRepository, TaskSettings, TaskStatus
from retinue.tasks import WorkspaceTaskRepository as Workspace
from retinue.tasks.repository import LONGEST_RESULT
from retinue.tasks.task import finish
from retinue.testing import TaskRepositorySuite
from retinue.testing.tasks import NOW, S1, task_record


class FarFilesystem(LocalFilesystem):
    """As one that is on another machine: nobody looks at it from the event loop."""

    is_local = False


@pytest.fixture(params=["memory", "workspace", "far workspace"])
def suite(request: pytest.FixtureRequest, tmp_path: Path) -> TaskRepositorySuite:
    kind: type[LocalFilesystem] = FarFilesystem if request.param == "far workspace" else LocalFilesystem
    if request.param == "memory":
        return TaskRepositorySuite(MemoryTaskRepository)
    numbers = count()
    roots: dict[int, Path] = {}

    def make() -> TaskRepository:
        root = tmp_path / str(next(numbers))
        made = Workspace(kind(root), "boss")
        roots[id(made)] = root
        return made

    return TaskRepositorySuite(make, lambda made: Workspace(kind(roots[id(made)]), "boss"))


@pytest.mark.parametrize("check", TaskRepositorySuite.names())
async def test_contract(suite: TaskRepositorySuite, check: str) -> None:
    await getattr(suite, check)()


def test_the_suite_runs_all_of_its_checks() -> None:
    suite = TaskRepositorySuite(MemoryTaskRepository)
    assert [check.__name__ for check in suite.checks()] == TaskRepositorySuite.names()
    assert len(TaskRepositorySuite.names()) == 15


class Forgetful(MemoryTaskRepository):
    async def update(self, scope: Any, task_id: str, change: Any) -> Any:
        before = await self.get(scope, task_id)
        await super().update(scope, task_id, change)
        return before


class Mixing(MemoryTaskRepository):
    async def list(self, scope: Any) -> Any:
        return [record for session in self._sessions.values() for record in session.values()]


class Reviving(MemoryTaskRepository):
    async def update(self, scope: Any, task_id: str, change: Any) -> Any:
        record = await self.get(scope, task_id)
        if record is not None and record.status.is_terminal:
            self._sessions[scope.session_id][task_id] = task_record(task_id, scope)
        return await super().update(scope, task_id, change)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Forgetful, "check_an_update_gives_what_is_there_afterwards"),
        (Mixing, "check_sessions_and_users_see_their_own"),
        (Reviving, "check_a_terminal_record_stays"),
    ],
)
async def test_the_suite_finds_a_fault(kind: Callable[[], TaskRepository], check: str) -> None:
    with pytest.raises(AssertionError):
        await getattr(TaskRepositorySuite(kind), check)()


async def test_the_file_of_a_session(tmp_path: Path) -> None:
    repository = Workspace(LocalFilesystem(tmp_path), "boss", TaskSettings())
    await repository.add(task_record("t1", input="do it", agent_key="agent:worker:1", sub_session_id="sub-1"))
    await repository.add(task_record("t2"))
    shown = {"subAgentId": "worker", "parentAgentId": "boss", "parentSessionId": "s1"}
    times = {"createdAt": "2027-01-15T08:00:00Z", "lastUpdatedAt": "2027-01-15T08:00:00Z"}
    text = (tmp_path / "agents/boss/tasks/s1.json").read_text()
    assert json.loads(text) == {
        "t1": {
            "taskId": "t1",
            **shown,
            "status": "PENDING",
            "input": "do it",
            "agentKey": "agent:worker:1",
            "subSessionId": "sub-1",
            **times,
        },
        "t2": {"taskId": "t2", **shown, "status": "PENDING", **times},
    }
    assert [line[:6] for line in text.splitlines()] == ["{", '"t1": ', '"t2": ', "}"], (
        "a line a task, to be read by eye"
    )
    visible = [path.name for path in (tmp_path / "agents/boss/tasks").iterdir() if not path.name.startswith(".")]
    assert visible == ["s1.json"]


@pytest.mark.parametrize(("size", "apart"), [(LONGEST_RESULT, False), (LONGEST_RESULT + 1, True)])
async def test_a_long_result_is_a_file_beside_the_record(tmp_path: Path, size: int, apart: bool) -> None:
    repository = Workspace(LocalFilesystem(tmp_path), "boss")
    record = task_record("t1", status=TaskStatus.RUNNING)
    await repository.add(record)
    kept = await repository.keep_result(record, "x" * size)
    assert kept == ("agents/boss/tasks/s1.results/t1.txt" if apart else None)
    if kept is not None:
        assert (tmp_path / kept).read_text() == "x" * size


async def test_size_is_bytes_not_characters(tmp_path: Path) -> None:
    repository = Workspace(LocalFilesystem(tmp_path), "boss")
    assert await repository.keep_result(task_record("t1"), "\u017e" * (LONGEST_RESULT // 2)) is None
    assert await repository.keep_result(task_record("t1"), "\u017e" * (LONGEST_RESULT // 2 + 1)) is not None


async def test_a_result_file_that_is_gone_is_said(tmp_path: Path) -> None:
    repository = Workspace(LocalFilesystem(tmp_path), "boss")
    await repository.add(task_record("t1", status=TaskStatus.RUNNING))
    ended = await repository.update(
        S1, "t1", lambda r: finish(r, TaskStatus.COMPLETED, NOW, result="the beginning…", result_file="gone.txt")
    )
    assert ended is not None
    assert await repository.read_result(ended) == (
        "the beginning…\n[the whole result cannot be read: gone.txt: there is no such file or folder]"
    )


async def test_agents_of_one_workspace_keep_their_tasks_apart(tmp_path: Path) -> None:
    one, other = Workspace(LocalFilesystem(tmp_path), "one"), Workspace(LocalFilesystem(tmp_path), "other")
    await one.add(task_record("t1"))
    assert await other.get(S1, "t1") is None
    assert list(await other.open_scopes()) == []


async def test_updates_that_wait_are_written_together(tmp_path: Path) -> None:
    class Counting(LocalFilesystem):
        writes = 0

        def write(self, path: str, data: bytes) -> None:
            self.writes += 1
            super().write(path, data)

    files = Counting(tmp_path)
    repository = Workspace(files, "boss")
    await asyncio.gather(*[repository.add(task_record(f"t{number}")) for number in range(200)])
    assert len(await repository.list(S1)) == 200
    assert files.writes <= 3
