"""A program on a disk that stalls. It runs in a mount namespace of its own, so nothing of it stays."""

from __future__ import annotations

import asyncio
import subprocess
import time
from typing import Any

FREEZE = 'fsfreeze --freeze "$0" && echo frozen && sleep 2; fsfreeze --unfreeze "$0"'


async def longest_pause(stop: asyncio.Event) -> float:
    """Return how long the event loop did nothing, at the longest."""
    longest, last = 0.0, time.monotonic()
    while not stop.is_set():
        await asyncio.sleep(0.01)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def run_while_frozen(image: str, disk: str) -> tuple[float, str]:
    """Run an agent on a disk that is frozen for 2 s; the longest pause of the event loop, and how the run ended."""
    from retinue import Agent, Runtime, tool
    from retinue.testing import ScriptedModel, call, say

    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    frozen, stop = asyncio.Event(), asyncio.Event()

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
        freezer = await asyncio.create_subprocess_exec("sh", "-c", FREEZE, disk, stdout=asyncio.subprocess.PIPE)
        assert freezer.stdout is not None
        assert (await freezer.stdout.readline()).strip() == b"frozen"
        watch = asyncio.create_task(longest_pause(stop))
        await asyncio.sleep(0)
        frozen.set()
        result = await run.result()
        await freezer.wait()
        stop.set()
        return await watch, result.status.value
