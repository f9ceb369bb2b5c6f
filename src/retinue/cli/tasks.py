"""`retinue tasks`: the background tasks of a workspace, whichever process runs them."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ..tasks.repository import TaskRepository
from .numbers import seconds

if TYPE_CHECKING:
    from ..tasks.task import TaskRecord
    from .interrupt import Interrupt

_WHERE = "Tasks are kept in DIR/agents/<agent>/tasks, or in a database; docs/tasks.md says how."
_STATUSES = ("running", "completed", "failed", "cancelled", "pending", "all")


class _Repository(TaskRepository, Protocol):
    async def everything(self) -> Sequence[TaskRecord]: ...


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tasks",
        help="list, show, await or cancel the background tasks of a folder or a database",
        description=f"The background tasks of a workspace, or of a database. {_WHERE}",
    )
    actions: Any = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = _action(actions, "list", "list tasks, oldest first", execute_list)
    listing.add_argument("--session", metavar="ID", help="only those of one conversation (its thread id)")
    listing.add_argument("--status", choices=_STATUSES, default="all", help="only these (default: all)")
    for name, about, execute in (
        ("show", "show a task with its result", execute_show),
        ("wait", "wait for a task to end, and show it; exit 1 unless it completed", execute_wait),
        ("cancel", "stop a task, and wait until it has stopped", execute_cancel),
    ):
        action = _action(actions, name, about, execute)
        action.add_argument("task_id", metavar="TASK_ID", help="the whole id, or enough of its end to know it by")
        if name == "wait":
            action.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up after so long")


def _action(actions: Any, name: str, about: str, execute: Any) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=about, description=f"{about}. {_WHERE}")
    where = action.add_mutually_exclusive_group()
    where.add_argument("--workspace", metavar="DIR", default=".", help="the workspace (default: this folder)")
    where.add_argument("--db", metavar="URL", help="the database, where they are in one: sqlite:///app.db")
    action.add_argument("--json", action="store_true", help="print JSON")
    action.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks")
    action.set_defaults(execute=execute)
    return action


def execute_list(args: argparse.Namespace) -> int:
    import asyncio

    from .exits import COMPLETED
    from .text import complain

    async def look() -> tuple[list[TaskRecord], set[str]]:
        async with _repositories(args) as repositories:
            found = await _everything(repositories)
            return [record for record, _ in found], await _abandoned(found)

    found, abandoned = asyncio.run(look())
    records = [
        record
        for record in found
        if args.session in (None, record.parent_session_id) and args.status in ("all", record.status.lower())
    ]
    if args.json:
        _print_json([_as_json(record) for record in records])
    else:
        _print_table(records, abandoned)
    if found and not records:
        complain(f"{_where(args)!r} has no such tasks")
    if not found:
        complain(f"{_where(args)!r} has no background tasks: agents start them with timeout_seconds=0")
    return COMPLETED


def execute_show(args: argparse.Namespace) -> int:
    import asyncio

    from .exits import COMPLETED

    async def show() -> None:
        async with _repositories(args) as repositories:
            record, repository = await _find(repositories, args)
            await _print_task(record, repository, as_json=args.json)

    asyncio.run(show())
    return COMPLETED


def execute_wait(args: argparse.Namespace) -> int:
    import asyncio

    from .interrupt import Interrupt

    with Interrupt() as interrupt:
        return asyncio.run(_wait(args, interrupt))


def execute_cancel(args: argparse.Namespace) -> int:
    import asyncio

    from ..tasks.service import TaskService
    from ..tasks.task import TaskStatus
    from .exits import COMPLETED, FAILED
    from .text import complain

    async def cancel() -> int:
        async with _repositories(args) as repositories:
            record, repository = await _find(repositories, args)
            if record.status.is_terminal:
                complain(f"task {record.task_id} has ended already: {record.status.lower()}")
                return FAILED
            after = await TaskService(repository).cancel(record.scope, record.task_id) or record
            await _print_task(after, repository, as_json=args.json)
        if not after.status.is_terminal:
            complain("it has not stopped yet; its process looks for cancels twice a second, if it lives")
        return COMPLETED if after.status is TaskStatus.CANCELLED else FAILED

    return asyncio.run(cancel())


async def _wait(args: argparse.Namespace, interrupt: Interrupt) -> int:
    async with _repositories(args) as repositories:
        return await _wait_for(*await _find(repositories, args), args, interrupt)


async def _wait_for(
    record: TaskRecord, repository: TaskRepository, args: argparse.Namespace, interrupt: Interrupt
) -> int:
    import asyncio

    from ..tasks.service import TaskService
    from ..tasks.task import TaskStatus
    from .exits import COMPLETED, FAILED
    from .text import complain

    service = TaskService(repository)
    await service.sweep(trust_clock=True)
    service.watch()  # an executor that is gone is found out
    most = args.timeout if args.timeout is not None else float("inf")
    waiting = asyncio.create_task(service.wait(record.scope, record.task_id, most))
    stopped = asyncio.create_task(interrupt.wait())
    await asyncio.wait({waiting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if interrupt.happened:
        waiting.cancel()
        return interrupt.code
    record = await waiting or record
    await service.close()
    await _print_task(record, repository, as_json=args.json)
    if not record.status.is_terminal:
        complain(f"task {record.task_id} still runs after {args.timeout:g} s")
    return COMPLETED if record.status is TaskStatus.COMPLETED else FAILED


@asynccontextmanager
async def _repositories(args: argparse.Namespace) -> AsyncGenerator[list[_Repository]]:
    """What has the tasks of a database, or of the agents of a workspace."""
    from ..tasks.files import WorkspaceTaskRepository
    from ..workspace import LocalFilesystem
    from .assistant import check_workspace
    from .database import opened

    if args.db is not None:
        from ..storage.tasks import SqlTaskRepository

        async with opened(args.db) as store:
            yield [SqlTaskRepository(store)]
        return
    check_workspace(args.workspace)
    files = LocalFilesystem(args.workspace)
    agents = [entry.path.rpartition("/")[2] for entry in files.list("agents")] if files.exists("agents") else []
    yield [WorkspaceTaskRepository(files, agent) for agent in agents]


def _where(args: argparse.Namespace) -> str:
    from ..storage.stores import without_secrets

    return args.workspace if args.db is None else without_secrets(args.db)


async def _everything(repositories: Sequence[_Repository]) -> list[tuple[TaskRecord, _Repository]]:
    """Every task with the repository it is in, oldest first."""
    from ..tasks.service import TaskService

    found: list[tuple[TaskRecord, _Repository]] = []
    for repository in repositories:
        await TaskService(repository).sweep(trust_clock=True)  # what nobody executes any more has failed
        found += [(record, repository) for record in await repository.everything()]
    return sorted(found, key=lambda each: each[0].created_at)


async def _abandoned(found: Sequence[tuple[TaskRecord, _Repository]]) -> set[str]:
    """The ids of open tasks whose process is gone. Another may continue them."""
    from ..runtime.owner import is_gone
    from ..tasks.service import is_node_gone

    abandoned: set[str] = set()
    open_ones = [each for each in found if not (each[0].status.is_terminal or each[0].is_remote)]
    for scope, repository in {(record.scope, repository) for record, repository in open_ones}:
        known = await repository.liveness(scope)
        for record in [record for record, place in open_ones if place is repository and record.scope == scope]:
            life = known.get(record.task_id)
            if life is None:
                gone = record.node is not None and is_node_gone(record.node)
            else:
                gone = life.status == "orphaned" or (life.owner is not None and is_gone(life.owner))
            if gone:
                abandoned.add(record.task_id)
    return abandoned


async def _find(repositories: Sequence[_Repository], args: argparse.Namespace) -> tuple[TaskRecord, _Repository]:
    from ..core.errors import ConfigurationError

    wanted = args.task_id.strip()
    found = [each for each in await _everything(repositories) if wanted and each[0].task_id.endswith(wanted)]
    if not found:
        raise ConfigurationError(f"there is no task {args.task_id!r} in {_where(args)!r}; see: retinue tasks list")
    if len(found) > 1:
        raise ConfigurationError(f"{len(found)} tasks end in {args.task_id!r}: give more of the id")
    return found[0]


def _print_table(records: list[TaskRecord], abandoned: set[str]) -> None:
    from .text import clean, one_line

    rows = [("task", "status", "sub-agent", "agent", "session", "started", "input")]
    for record in records:
        started = record.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        agents = (record.sub_agent_id, record.parent_agent_id)
        status = record.status.lower()
        if record.awaiting:
            status += " (waits for a human)"
        elif record.task_id in abandoned:
            status += " (its process is gone)"
        rows.append((record.task_id, status, *agents, record.parent_session_id, started, one_line(record.input, 60)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows[: len(rows) * bool(records)]:
        print(clean("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()))


async def _print_task(record: TaskRecord, repository: TaskRepository, *, as_json: bool) -> None:
    from .text import clean

    result = await repository.read_result(record)
    if as_json:
        _print_json({**_as_json(record), "result": result})
        return
    shown = {
        "task": record.task_id,
        "status": record.status.lower(),
        "sub-agent": record.sub_agent_id,
        "agent": record.parent_agent_id,
        "session": record.parent_session_id,
        "started": record.created_at.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        "updated": record.last_updated_at.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        "waits for": record.awaiting,
        "error": record.error_message,
        "input": record.input,
    }
    for name, value in shown.items():
        if value:
            print(clean(f"{name}: {value}"))
    if result:
        print(clean(f"\n{result}"))


def _as_json(record: TaskRecord) -> dict[str, Any]:
    import msgspec

    return msgspec.to_builtins(record)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))
