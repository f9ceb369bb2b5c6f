"""Running commands as an agent would."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import which
from typing import Any

from retinue.core.agents import Agent
from retinue.core.concurrency import CancellationToken
from retinue.core.context import ToolContext
from retinue.core.events import Event
from retinue.core.filesystem import Command, Filesystem
from retinue.core.runs import RunIdentity
from retinue.core.state import Snapshot
from retinue.workspace import shell_tool
from retinue.workspace.containers import ENGINES

IMAGES = ("debian:stable-slim", "debian:bookworm-slim", "busybox:latest", "alpine:latest")


@cache
def usable_image() -> str | None:
    """An image that an engine of this machine has and can run."""
    for engine in filter(which, ENGINES):
        for image in IMAGES:
            tried = subprocess.run(
                [engine, "run", "--rm", "--pull", "never", image, "true"], capture_output=True, check=False
            )
            if tried.returncode == 0:
                return image
    return None


class Shell:
    """Calls the tool as an agent would, and keeps what it shows meanwhile."""

    def __init__(self, filesystem: Filesystem, thread_id: str = "t", user_id: str | None = None) -> None:
        self._tool = Agent("a", tools=[shell_tool(filesystem)]).toolbox["shell"]
        self._run = RunIdentity(run_id="r", thread_id=thread_id, agent="a", user_id=user_id)
        self.events: list[Event] = []

    async def __call__(self, command: str, **args: Any) -> str:
        given = {"command": command, **args}
        assert self._tool.check.problems(given) == []
        ctx = ToolContext(
            call_id="c",
            tool_name="shell",
            run=self._run,
            agent=Agent("a"),
            snapshot=Snapshot({}, {}, 0),
            emit=self.events.append,
            cancellation=CancellationToken(),
        )
        answer: Any = await self._tool.tool.execute(given, ctx)
        return answer

    @property
    def shown(self) -> str:
        return "".join([getattr(event, "delta", "") for event in self.events])


def processes_with(mark: str) -> list[str]:
    """The processes of this machine whose command line has a word."""
    found: list[str] = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "cmdline").read_text().split("\0"):
                found.append(folder.name)
        except OSError:
            continue
    return found


def is_alive(pid: int) -> bool:
    """Whether a process does anything: one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(holds: Callable[[], bool], seconds: float = 90) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:  # noqa: ASYNC110 - nobody tells when a process has ended
        await asyncio.sleep(0.01)
    return holds()


def begin(command: Command) -> subprocess.Popen[str]:
    """Start a command that waits, and let it begin."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            command.argv,
            cwd=command.folder,
            env=dict(command.environment),
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        assert ours.recv(1) == b"\n"
        ours.sendall(b"\n")
    return process
