"""`retinue tasks` on a workspace whose tasks this process and others run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from retinue import HarnessAgent, LocalFilesystem, Runtime, StoreFilesystem
from retinue.storage.stores import open_store
from retinue.storage.tasks import SqlTaskRepository
from retinue.tasks import WorkspaceTaskRepository
from retinue.tasks.service import TaskService
from retinue.tasks.task import TaskRecord, TaskStatus
from retinue.testing import ScriptedModel, call, say
from retinue.testing.stores import stored_run
from retinue.testing.threads import begin

from .conftest import Cli, finished, started
from .test_process import after_line


async def with_tasks(workspace: Path, *tasks: str) -> None:
    """Run tasks in the background, to their ends."""
    asked = 0

    async def model(request: Any) -> Any:
        nonlocal asked
        if "Subagent Context" in request.messages[0].text:
            if "fail" in request.messages[-1].text:
                raise RuntimeError("it broke")
            return say(f"did: {request.messages[-1].text}")
        asked += 1
        spawns = [
            call("agent_spawn", {"agent_id": "general-purpose", "task": task, "timeout_seconds": 0}) for task in tasks
        ]
        return spawns if asked == 1 else say("ok")

    agent = HarnessAgent("orch", ScriptedModel(model), workspace=workspace)
    async with Runtime([agent]) as runtime:
        run = runtime.stream("orch", "go", thread_id="monday")
        _ = [event async for event in runtime.events(run.run_id)]


def records(workspace: Path) -> list[dict[str, Any]]:
    return list(json.loads((workspace / "agents/orch/tasks/monday.json").read_text()).values())


def test_list_and_show(cli: Cli, tmp_path: Path) -> None:
    asyncio.run(with_tasks(tmp_path, "count the words", "fail now"))
    done, failed = records(tmp_path)
    listed = cli("tasks", "list", "--workspace", str(tmp_path))
    assert listed.code == 0
    lines = listed.out.splitlines()
    assert lines[0].split() == ["task", "status", "sub-agent", "agent", "thread", "started", "input"]
    assert lines[1].startswith(f"{done['taskId']}  completed  general-purpose  orch   monday")
    assert lines[2].startswith(f"{failed['taskId']}  failed     general-purpose  orch   monday")
    only = cli("tasks", "list", "--workspace", str(tmp_path), "--status", "failed", "--json")
    assert [record["task_id"] for record in json.loads(only.out)] == [failed["taskId"]]
    none = cli("tasks", "list", "--workspace", str(tmp_path), "--thread", "tuesday")
    assert (none.code, none.out) == (0, "")
    shown = cli("tasks", "show", done["taskId"][-8:], "--workspace", str(tmp_path))
    assert shown.code == 0
    assert "status: completed" in shown.out
    assert shown.out.endswith("\ndid: count the words\n")
    assert "error: RuntimeError: it broke" in cli("tasks", "show", failed["taskId"], "--workspace", str(tmp_path)).out


def test_wait_tells_by_its_exit_code_how_it_ended(cli: Cli, tmp_path: Path) -> None:
    asyncio.run(with_tasks(tmp_path, "count the words", "fail now"))
    done, failed = records(tmp_path)
    assert cli("tasks", "wait", done["taskId"], "--workspace", str(tmp_path)).code == 0
    assert cli("tasks", "wait", failed["taskId"], "--workspace", str(tmp_path)).code == 1
    late = cli("tasks", "cancel", done["taskId"], "--workspace", str(tmp_path))
    assert late.code == 1
    assert "has ended already: completed" in late.err


def test_wait_gives_up_on_a_task_that_goes_on(cli: Cli, tmp_path: Path) -> None:
    asyncio.run(with_tasks(tmp_path, "count the words"))
    path = tmp_path / "agents/orch/tasks/monday.json"
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = path.read_text().replace('"COMPLETED"', '"RUNNING"')
    (record,) = json.loads(text).values()
    path.write_text(json.dumps({record["taskId"]: {**record, "lastUpdatedAt": now}}))
    waited = cli("tasks", "wait", record["taskId"], "--workspace", str(tmp_path), "--timeout", "0.3")
    assert waited.code == 1
    assert "still runs after 0.3 s" in waited.err
    path.write_text(json.dumps({record["taskId"]: {**record, "lastUpdatedAt": "2020-01-01T00:00:00Z"}}))
    lost = cli("tasks", "wait", record["taskId"], "--workspace", str(tmp_path), "--timeout", "20")
    assert lost.code == 1
    assert "executor lost: no heartbeat" in lost.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list"], "has no background tasks"),
        (["show", "task_1"], "there is no task 'task_1'"),
        (["wait", "task_1", "--timeout", "soon"], "'soon' is not a number of seconds"),
        (["wait", "task_1", "--timeout", "-1"], "'-1' is not a number of seconds"),
        (["show"], "see retinue tasks show --help"),
        (["list", "--db", "sqlite:///app.db"], "argument --workspace: not allowed with argument --db"),
        (["list", "--status", "odd"], "unknown value 'odd'; choose from pending"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, tmp_path: Path, words: list[str], said: str) -> None:
    answer = cli("tasks", *words, "--workspace", str(tmp_path))
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert answer.code == (0 if words == ["list"] else 2)


def test_a_file_that_is_no_record_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "agents/orch/tasks").mkdir(parents=True)
    (tmp_path / "agents/orch/tasks/monday.json").write_text('{"a": ')
    answer = cli("tasks", "list", "--workspace", str(tmp_path))
    assert answer.code == 1
    assert "agents/orch/tasks/monday.json: it is not a file of task records" in answer.err


def test_tasks_of_a_database(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    now = datetime.now(UTC)

    def task(number: int, **fields: Any) -> TaskRecord:
        return TaskRecord(
            task_id=f"task_{number}",
            sub_agent_id="reader",
            parent_agent_id="orch",
            parent_session_id="monday",
            created_at=now + timedelta(milliseconds=number),
            last_updated_at=now,
            **fields,
        )

    async def put() -> None:
        async with SqlTaskRepository(url) as repository:
            await repository.add(task(1, status=TaskStatus.COMPLETED, result="It is read."))
            await repository.add(task(2, node="elsewhere"))

    asyncio.run(put())
    listed = cli("tasks", "list", "--db", url)
    assert listed.code == 0
    assert [line.split()[:2] for line in listed.out.splitlines()[1:]] == [
        ["task_1", "completed"],
        ["task_2", "pending"],
    ]
    none = cli("tasks", "list", "--status", "failed", "--db", url)
    assert none == (0, "", f"retinue: {url!r} has no such tasks\n")
    assert cli("tasks", "show", "1", "--db", url).out.endswith("\nIt is read.\n")
    assert cli("tasks", "wait", "task_1", "--db", url).code == 0
    unknown = cli("tasks", "show", "task_9", "--db", url)
    assert (unknown.code, f"there is no task 'task_9' in {url!r}" in unknown.err) == (2, True)
    missing = cli("tasks", "list", "--db", f"sqlite:///{tmp_path}/other.db")
    assert (missing.code, "there is no Retinue database" in missing.err) == (2, True)


def open_task(name: str, **fields: Any) -> TaskRecord:
    now = datetime.now(UTC)
    return TaskRecord(
        task_id=name,
        sub_agent_id="reader",
        parent_agent_id="orch",
        parent_session_id="monday",
        status=TaskStatus.RUNNING,
        created_at=now,
        last_updated_at=now,
        **fields,
    )


def listed_status(cli: Cli, *where: str) -> list[str]:
    return [re.split(r"\s\s+", line)[1] for line in cli("tasks", "list", *where).out.splitlines()[1:]]


def test_a_task_whose_process_is_gone_is_told_as_such(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"

    async def put() -> None:
        store: Any = open_store(url)
        await store.open()
        tasks = SqlTaskRepository(store)
        for run_id, lease in (("kept", 60.0), ("left", -1.0)):
            await begin(store, stored_run(run_id, thread_id=run_id), lease=lease)
            await tasks.add(open_task(f"task_{run_id}", log_id=run_id))
        await store.close()

    asyncio.run(put())
    assert listed_status(cli, "--db", url) == ["running", "running (its process is gone)"]
    assert listed_status(cli, "--db", url) == ["running", "running (its process is gone)"], "it may be continued"


def test_a_task_in_a_workspace_whose_process_is_gone_is_told_as_such(cli: Cli, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()

    async def put() -> None:
        tasks = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "orch")
        for name, node in (("mine", f"{host}-{os.getpid()}-0a"), ("gone", f"{host}-{ended.pid}-0a"), ("far", "h-1-0a")):
            await tasks.add(open_task(f"task_{name}", node=node))

    asyncio.run(put())
    assert listed_status(cli, "--workspace", str(tmp_path)) == ["running", "failed", "running"]


@pytest.mark.parametrize("base", ["", "deep/er"])
def test_tasks_in_files_of_a_database_are_found(
    cli: Cli, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TaskService, "cancel", partialmethod(TaskService.cancel, grace=0.0))
    url = f"sqlite:///{tmp_path}/app.db"

    async def put() -> None:
        files = StoreFilesystem(url, space="team a")
        await WorkspaceTaskRepository(files.below(base), "orch").add(open_task("task_1", node="h-1-0a"))
        await asyncio.to_thread(files.write, "notes/tasks/x.md", b"not one")
        await asyncio.to_thread(files.close)

    asyncio.run(put())
    assert listed_status(cli, "--db", url) == ["running"]
    cancelled = cli("tasks", "cancel", "task_1", "--db", url)
    assert json.loads(cli("tasks", "show", "task_1", "--db", url, "--json").out)["cancel_requested"] is True
    assert "it has not stopped yet" in cancelled.err


def test_a_remote_task_that_no_process_watches_is_told_as_such(cli: Cli, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    node = f"{socket.gethostname()}-{ended.pid}-0a"
    tasks = WorkspaceTaskRepository(LocalFilesystem(tmp_path), "orch")
    asyncio.run(tasks.add(open_task("task_far", node=node, transport_type="task-protocol")))
    where = ("--workspace", str(tmp_path))
    assert listed_status(cli, *where) == ["running (its process is gone)"]
    waited = cli("tasks", "wait", "task_far", *where)
    assert waited.code == 1
    again = "task task_far: its process is gone; a process that runs agent 'orch' here asks its server for it again"
    assert again in waited.err
    cancelled = cli("tasks", "cancel", "task_far", *where)
    assert cancelled.code == 1
    asked = "its process is gone; its server is asked to stop it when a process runs agent 'orch' here again"
    assert asked in cancelled.err


@pytest.mark.parametrize("has_database", [True, False])
def test_a_killed_task_is_reported_at_once(cli: Cli, folder: Path, has_database: bool) -> None:
    url = f"sqlite:///{folder}/app.db"
    where = ("--db", url) if has_database else ("--workspace", str(folder))
    agent = ("--workspace", str(folder), "--model", "test:delegating")
    run = started("run", "do it slowly", *agent, *where)
    after_line(run, b"waiting for 1 background task")
    while (alive := json.loads(cli("tasks", "list", *where, "--json").out)[0])["status"] == "pending":
        continue  # its process announces it first, then begins it
    assert (alive["status"], alive["orphaned"], alive["sub_agent_id"]) == ("running", False, "general-purpose")
    run.kill()
    run.communicate()
    (gone,) = json.loads(cli("tasks", "list", *where, "--json").out)
    waited = finished("tasks", "wait", gone["task_id"], *where)
    assert waited.code == 1
    if has_database:
        assert (gone["status"], gone["orphaned"]) == ("running", True)
        assert f"its process is gone; retinue runs resume {gone['log_id']} continues its run" in waited.err
        cancelled = cli("tasks", "cancel", gone["task_id"], *where)
        assert (cancelled.code, "ends when a process resumes its run" in cancelled.err) == (1, True)
        resume = ("runs", "resume", gone["log_id"], *agent, *where)
        assert "waits for nothing" in finished(*resume, "--approve", "c1").err
        resumed = finished(*resume)
        # It was killed before or after its sub-agent began.
        assert re.fullmatch(r"background task of general-purpose cancelled(: the task was cancelled)?\n", resumed.out)
        assert resumed.err == "retinue: 1 background task did not complete; see: retinue tasks list\n"
        assert resumed.code == 1
        assert listed_status(cli, *where) == ["cancelled"]
        assert "has ended already: completed; it waits for nothing" in finished(*resume).err
    else:
        assert gone["status"] == "failed"
        assert gone["error_message"].startswith("executor lost: ")
        assert gone["error_message"].endswith("its process is gone")
        assert "status: failed" in waited.out


def test_tasks_of_a_run_in_a_database_are_listed_there(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{folder}/app.db"
    args = ("run", "do it", "--workspace", str(folder), "--model", "test:delegating")
    failed = cli(*args, "--db", url)
    assert failed.err == f"retinue: 1 background task did not complete; see: retinue tasks list --db {url}\n"
    (record,) = json.loads(cli("tasks", "list", "--db", url, "--json").out)
    assert (record["status"], record["parent_agent_id"]) == ("failed", "assistant")
    assert datetime.fromisoformat(record["created_at"]).tzinfo is not None
    assert not (folder / "agents").exists()
    monkeypatch.setenv("RETINUE_DB", url)
    assert json.loads(cli("tasks", "list", "--json").out) == [record]
    assert cli(*args).code == 1
    assert len(json.loads(cli("tasks", "list", "--json").out)) == 2
    assert json.loads(cli("tasks", "list", "--workspace", str(folder), "--json").out) == []
