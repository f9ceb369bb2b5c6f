"""A process of its own on a workspace in a database: python -m tests.storage.node <url> <workspace | sql>

It starts a background task, prints its id, and lets the task end when it is told to go on.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from retinue import StoreFilesystem
from retinue.stores import SqlTaskRepository
from retinue.tasks import TaskRepository, TaskSettings, WorkspaceTaskRepository
from tests.tasks.office import Office

SETTINGS = TaskSettings(heartbeat=0.2, orphan_after=3.0, sweep_every=0.2, look_every=0.05)


def task_records(kind: str, url: str, files: StoreFilesystem) -> TaskRepository:
    """Where the tasks of a node are kept: in files of the workspace, or as rows."""
    return SqlTaskRepository(url, SETTINGS) if kind == "sql" else WorkspaceTaskRepository(files, "boss", SETTINGS)


async def main(url: str, kind: str) -> None:
    with StoreFilesystem(url) as files:
        async with Office(Path(), filesystem=files, task_repository=task_records(kind, url, files)) as office:
            sys.stdout.write(f"{await office.start('wait there')}\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.readline)
            office.gates["there"].set()
            await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
