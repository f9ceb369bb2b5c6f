"""A program on a disk that stalls. It runs in a mount namespace of its own, so nothing of it stays."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

from ..waiting import let_others_run, until

FREEZE = (
    'fsfreeze --freeze "$0" && echo frozen && { timeout 30 head -n 1 || echo "not told"; }; fsfreeze --unfreeze "$0"'
)
"""Freezes a disk until it reads a line, which it repeats; or for 30 s, so that nothing hangs for ever."""


def waits_for_the_disk() -> bool:
    """Return whether a thread of this process waits in the kernel and cannot be interrupted."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path("/proc/self/task").glob("*/stat")]
    return "D" in states


async def run_while_frozen(image: str, disk: str) -> tuple[str, str]:
    """Run an agent on a frozen disk. The event loop thaws it when a thread waits for it; what the disk was told, and
    how the run ended."""
    from retinue import Agent, Runtime, tool
    from retinue.testing import ScriptedModel, call, say

    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    frozen = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait until the disk is frozen."""
        await frozen.wait()
        return "waited"

    @tool
    async def work() -> str:
        """Work."""
        return "worked"

    def turn(request: Any) -> Any:
        match sum(message.role == "assistant" for message in request.messages):
            case 0:
                return call("wait", {})
            case 1:
                return call("work", {})
        return say("done", chunks=["do", "ne"])

    async with Runtime.open(
        f"sqlite:///{disk}/app.db", [Agent("a", ScriptedModel(turn), tools=[wait, work])]
    ) as runtime:
        run = runtime.stream("a", "go", thread_id="t")
        pipes: Any = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        freezer = await asyncio.create_subprocess_exec("sh", "-c", FREEZE, disk, **pipes)
        assert freezer.stdin is not None
        assert freezer.stdout is not None
        assert (await freezer.stdout.readline()).strip() == b"frozen"
        frozen.set()
        await until(waits_for_the_disk)
        await let_others_run()
        freezer.stdin.write(b"thaw\n")
        told = (await freezer.stdout.readline()).decode().strip()
        await freezer.wait()
        return told, (await run.result()).status.value
