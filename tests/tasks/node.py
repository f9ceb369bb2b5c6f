"""A process that works on a workspace, for tests with several: python -m tests.tasks.node <workspace> <what> …

It prints a line when it is ready. Each model call of its children appends a line to `<workspace>/calls.txt`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from retinue import Agent, HarnessAgent, LocalFilesystem, Runtime, tool
from retinue.stores import SqlTaskRepository
from retinue.tasks import TaskRecord, TaskScope, TaskSettings, TaskStatus, WorkspaceTaskRepository
from retinue.tasks.task import beat, finish
from retinue.testing import ScriptedModel, call, say
from tests import inside
from tests.waiting import until as wait_until

LEASE = 3.0
SETTINGS = TaskSettings(heartbeat=0.2, orphan_after=3.0, sweep_every=0.2, look_every=0.05)
STORED = replace(SETTINGS, heartbeat=0.02)


def harness(root: Path, turns: list[Any], url: str = "") -> HarnessAgent:
    """A boss that says these turns, with a worker that makes model and tool calls until a time, or until a file `stop`.

    With a URL, its tasks are in that database.
    """

    @tool
    async def look_on() -> str:
        """Take a while."""
        note(root, "tool")
        await asyncio.sleep(0.02)
        return "more"

    def work(request: Any) -> Any:
        note(root, "model")
        task = next(message.text for message in request.messages if message.role == "user")
        until = float(task.removeprefix("until "))
        return say("worked") if (root / "stop").exists() or time.time() >= until else call("look_on")

    def turn(request: Any) -> Any:
        made = turns.pop(0)
        return made(request) if callable(made) else made

    files = LocalFilesystem(root)
    return HarnessAgent(
        "boss",
        ScriptedModel(turn),
        filesystem=files,
        task_repository=SqlTaskRepository(url, STORED) if url else WorkspaceTaskRepository(files, "boss", SETTINGS),
        subagents=[Agent("worker", ScriptedModel(work), tools=[look_on], description="Works.", max_steps=10_000)],
    )


def note(root: Path, what: str) -> None:
    with (root / "calls.txt").open("a") as stream:
        stream.write(f"{what} {os.getpid()}\n")


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def start(root: Path, until: str, url: str = "") -> None:
    """Start a background task that works until then, say its id, and live on. With a URL, all is in that database."""
    spawn = {"agent_id": "worker", "task": f"until {until}", "timeout_seconds": 0}
    boss = harness(root, [call("agent_spawn", spawn), say("done")], url)
    async with Runtime.open(url or "memory:", [boss], lease=LEASE) as runtime:
        result = await runtime.run("boss", "go", thread_id="s1")
        answer = next(message.text for message in result.messages if message.role == "tool")
        tell(next(line for line in answer.splitlines() if line.startswith("task_id: ")).removeprefix("task_id: "))
        service = inside.task_service(runtime)
        await wait_until(lambda: not inside.has_local_tasks(service))
        tell("idle")
        await asyncio.Event().wait()


async def write(root: Path, number: str, count: str) -> None:
    """Update the records of a session many times, each of its own and one that all share, then end its own."""
    repository = WorkspaceTaskRepository(LocalFilesystem(root), "boss", SETTINGS)
    scope, own = TaskScope("boss", "s1"), f"task_{number}"
    tell("ready")
    sys.stdin.readline()

    def beating(node: str) -> Callable[[TaskRecord], TaskRecord | None]:
        return lambda record: beat(record, time.time(), node)

    def late(record: TaskRecord) -> TaskRecord | None:
        return finish(record, TaskStatus.FAILED, time.time(), error="late")

    for turn in range(int(count) - 1):
        changed = await repository.update(scope, "shared" if turn % 2 else own, beating("n" if turn % 2 else number))
        assert changed is not None
    end = [TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED][int(number) % 3]
    ended = await repository.update(scope, own, lambda r: finish(r, end, time.time(), result=f"of {number}"))
    assert ended is not None
    for other in range(8):  # what has ended cannot be ended again, by whomever
        await repository.update(scope, f"task_{other}", lambda r: late(r) if r.status.is_terminal else None)
    tell("done")


if __name__ == "__main__":
    commands: dict[str, Any] = {"start": start, "write": write}
    asyncio.run(commands[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:]))
