"""`retinue tasks`: the background tasks of a folder or a database, whichever process runs them."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol

import msgspec

from ..core.concurrency import until_stopped
from ..core.errors import ConfigurationError
from ..log.ownership import is_gone
from ..storage.files import folders_with_tasks
from ..storage.stores import without_secrets
from ..storage.tasks import SqlTaskRepository
from ..tasks.files import WorkspaceTaskRepository
from ..tasks.repository import TaskRepository
from ..tasks.service import TaskService
from ..tasks.sweeper import is_node_gone
from ..tasks.task import TaskRecord, TaskStatus
from ..wire.resources import iso
from ..workspace import LocalFilesystem
from .agents import check_folder
from .database import open_database, optional_url
from .interrupt import Interrupt
from .parsers import COMPLETED, FAILED
from .text import clean, complain, moment, one_line, print_fields, print_json, table

_GONE = "its process is gone"
_LOOK_EVERY = 1.0
"""Seconds between two looks at whether the process of a task lives."""


class _Repository(TaskRepository, Protocol):
    async def everything(self) -> Sequence[TaskRecord]: ...


class _Task(NamedTuple):
    """A task, the repository that has it, and whether its process is gone."""

    record: TaskRecord
    repository: _Repository
    is_orphaned: bool = False
    """No process works on it or, if a server does, watches it."""

    @property
    def is_open(self) -> bool:
        return not self.record.status.is_terminal

    @property
    def status(self) -> str:
        """The status in words."""
        status = self.record.status.lower()
        if self.record.awaiting and self.is_open:
            return f"{status} (waits for a human)"
        return f"{status} ({_GONE})" if self.is_orphaned else status

    def to_json(self) -> dict[str, Any]:
        record = self.record
        times = {"created_at": iso(record.created_at), "last_updated_at": iso(record.last_updated_at)}
        return {
            **msgspec.structs.asdict(record),
            "status": record.status.lower(),
            "orphaned": self.is_orphaned,
            **times,
        }


async def list_tasks(args: argparse.Namespace) -> int:
    """List tasks, oldest first."""
    async with _open_repositories(args) as (repositories, place):
        found = await _all_tasks(repositories)
    tasks = [
        task
        for task in found
        if args.thread in (None, task.record.parent_session_id) and args.status in ("all", task.record.status.lower())
    ]
    if args.json:
        print_json([task.to_json() for task in tasks])
    elif tasks:
        rows = [("task", "status", "sub-agent", "agent", "thread", "started", "input")]
        for task in tasks:
            record = task.record
            agents = (record.sub_agent_id, record.parent_agent_id, record.parent_session_id)
            rows.append((record.task_id, task.status, *agents, moment(record.created_at), one_line(record.input, 60)))
        print("\n".join(table(rows)))
    if found and not tasks:
        complain(f"{place!r} has no such tasks")
    if not found:
        complain(f"{place!r} has no background tasks: agents start them with timeout_seconds=0")
    return COMPLETED


async def show_task(args: argparse.Namespace) -> int:
    """Show a task with its result."""
    async with _open_repositories(args) as (repositories, place):
        await _print_task(await _find(repositories, args.task_id, place), as_json=args.json)
    return COMPLETED


async def cancel_task(args: argparse.Namespace) -> int:
    """Stop a task and wait until it has stopped; one whose process is gone ends at once."""
    async with _open_repositories(args) as (repositories, place):
        task = await _find(repositories, args.task_id, place)
        record, repository = task.record, task.repository
        if not task.is_open:
            complain(f"task {record.task_id} has ended already: {record.status.lower()}")
            return FAILED
        grace = {"grace": 0.0} if task.is_orphaned else {}
        after = await TaskService(repository).cancel(record.scope, record.task_id, **grace) or record
        task = task._replace(record=after)
        await _print_task(task, as_json=args.json)
    if task.is_open and task.is_orphaned:
        again = f"its server is asked to stop it when a process runs agent {after.parent_agent_id!r} here again"
        resume = f"the task ends when a process resumes its run {after.log_id}"
        complain(f"{_GONE}; {again if after.log_id is None else resume}")
    elif task.is_open:
        complain("it has not stopped yet; its process looks for cancels twice a second")
    return COMPLETED if after.status is TaskStatus.CANCELLED else FAILED


async def wait_task(args: argparse.Namespace, interrupt: Interrupt) -> int:
    """Wait for a task to end, or for its process to be gone, and show it."""
    async with _open_repositories(args) as (repositories, place):
        task = await _find(repositories, args.task_id, place)
        async with until_stopped(_wait_for(task), interrupt.wait(), args.timeout) as waiting:
            task = waiting.result() if waiting.done() else await _look_again(task)
        if interrupt.happened:
            return interrupt.code
        await _print_task(task, as_json=args.json)
    record = task.record
    if task.is_orphaned:
        again = f"a process that runs agent {record.parent_agent_id!r} here asks its server for it again"
        resume = f"retinue runs resume {record.log_id} continues its run"
        complain(f"task {record.task_id}: {_GONE}; {again if record.log_id is None else resume}")
    elif task.is_open:
        complain(f"task {record.task_id} still runs after {args.timeout:g} s")
    return COMPLETED if record.status is TaskStatus.COMPLETED else FAILED


async def _wait_for(task: _Task) -> _Task:
    """Wait until a task has ended or is orphaned."""
    service = TaskService(task.repository)
    while task.is_open and not task.is_orphaned:
        await service.wait(task.record.scope, task.record.task_id, _LOOK_EVERY)
        task = await _look_again(task)
    return task


async def _look_again(task: _Task) -> _Task:
    found = await _all_tasks([task.repository])
    return next((one for one in found if one.record.task_id == task.record.task_id), task)


@asynccontextmanager
async def _open_repositories(args: argparse.Namespace) -> AsyncGenerator[tuple[list[_Repository], str]]:
    """Open the tasks of a database, as rows and as files in it, or those of a folder; with the name of the place."""
    url = optional_url(args) if args.workspace is None else None
    if url is not None:
        async with open_database(url) as store:
            in_files = [WorkspaceTaskRepository(*found) for found in await folders_with_tasks(store)]
            yield [SqlTaskRepository(store), *in_files], without_secrets(url)
        return
    folder = args.workspace or "."
    check_folder(folder)
    files = LocalFilesystem(folder)
    agents = [entry.path.rpartition("/")[2] for entry in files.list("agents")] if files.exists("agents") else []
    yield [WorkspaceTaskRepository(files, agent) for agent in agents], folder


async def _all_tasks(repositories: Sequence[_Repository]) -> list[_Task]:
    """Return every task, oldest first. One whose process is gone and whose run is not stored ends as failed first."""
    found: list[_Task] = []
    for repository in repositories:
        await TaskService(repository).sweep(trust_clock=True)
        records = await repository.everything()
        scopes = {one.scope for one in records if not one.status.is_terminal}
        known = {scope: await repository.liveness(scope) for scope in scopes}
        for record in records:
            is_open = not record.status.is_terminal
            life = known[record.scope].get(record.task_id) if is_open else None
            if life is not None:
                gone = life.status == "orphaned" or (life.owner is not None and is_gone(life.owner))
            else:
                gone = is_open and record.node is not None and is_node_gone(record.node)
            found.append(_Task(record, repository, gone))
    return sorted(found, key=lambda task: task.record.created_at)


async def _find(repositories: Sequence[_Repository], task_id: str, place: str) -> _Task:
    wanted = task_id.strip()
    found = [task for task in await _all_tasks(repositories) if wanted and task.record.task_id.endswith(wanted)]
    if not found:
        raise ConfigurationError(f"there is no task {task_id!r} in {place!r}; see: retinue tasks list")
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} tasks end in {task_id!r}: give more of the id")
    return found[0]


async def _print_task(task: _Task, *, as_json: bool) -> None:
    record = task.record
    result = await task.repository.read_result(record)
    if as_json:
        print_json({**task.to_json(), "result": result})
        return
    fields = {
        "task": record.task_id,
        "status": task.status,
        "sub-agent": record.sub_agent_id,
        "agent": record.parent_agent_id,
        "thread": record.parent_session_id,
        "started": moment(record.created_at),
        "updated": moment(record.last_updated_at),
        "waits for": record.awaiting,
        "error": record.error_message,
        "input": record.input,
    }
    print_fields(fields)
    if result:
        print(clean(f"\n{result}"))
