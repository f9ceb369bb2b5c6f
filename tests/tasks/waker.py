"""A process whose boss is woken by its task, and which kills itself at one of its writes: python -m tests.tasks.waker
<folder> <url> <engine or -> <before|after|never> <number of the write>

It prints how often each thing happened, once all is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retinue import Runtime
from retinue.runtime.worker import Worker
from retinue.storage.database import Database
from retinue.stores import SqlTaskRepository
from tests.tasks.house import NEWS, House, runs_of, told_of
from tests.waiting import until


def kill_at(when: str, number: int) -> None:
    """Have this process killed before, or right after, one of its writes."""
    write: Callable[..., Any] = Database.write
    count = 0

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: Database, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == number and when == "before":
            die()
        made = write(self, *args, **options)
        if count == number and when == "after":
            made.add_done_callback(die)
        return made

    Database.write = counted  # type: ignore[method-assign]


async def live(url: str, agents: Any, engine: str | None, house: House) -> None:
    """Do all that is to be done, and print what has come of it."""
    async with Runtime.open(url, agents, engine=engine, on_close="leave", lease=1.0) as runtime:
        stop, ready, working = asyncio.Event(), asyncio.Event(), None
        if engine is not None:
            working = asyncio.create_task(Worker(runtime).run(stop, ready.set))
            await ready.wait()
        if await runtime.store.load_run("run_first") is None:
            runtime.stream("boss", "do a", thread_id="t", run_id="run_first")
        await until(lambda: _has_ended(runtime, "run_first"))
        house.gates["a"].set()
        await until(lambda: _is_told(runtime))
        await until(lambda: _is_quiet(runtime))
        runs = [record.status for record in await runs_of(runtime)]
        told = [told_of(message.text) for message in await runtime.messages("t") if message.text.startswith(NEWS)]
        sys.stdout.write(json.dumps({"runs": runs, "told": told}) + "\n")
        stop.set()
        if working is not None:
            await working


async def _has_ended(runtime: Runtime, run_id: str) -> bool:
    record = await runtime.store.load_run(run_id)
    return record is not None and record.has_ended


async def _is_told(runtime: Runtime) -> bool:
    return any(message.text.startswith(NEWS) for message in await runtime.messages("t"))


async def _is_quiet(runtime: Runtime) -> bool:
    return not await runtime.store.open_logs()  # type: ignore[attr-defined]


async def main(folder: Path, url: str, engine: str, when: str, number: str) -> None:
    if when != "never":
        kill_at(when, int(number))
    async with SqlTaskRepository(url) as tasks:
        house = House(workspace=folder, task_repository=tasks)
        await live(url, house.agents, None if engine == "-" else engine, house)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
