"""Programs that tests run in processes of their own: `python -m tests.durability.programs NAME ARGS…`.

Each prints lines to say how far it is, and reads a line where it must wait for the test.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def tell(*words: object) -> None:
    sys.stdout.write(" ".join([str(word) for word in words]) + "\n")
    sys.stdout.flush()


async def told() -> str:
    """Wait for a line from the test."""
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


def stage(node: str, gate: Path) -> Any:
    """An agent whose tool waits for a file. Its answer names the node that ran the tool last."""
    from retinue import Agent, ToolContext, tool
    from retinue.testing import ScriptedModel, call, say

    @tool(idempotent=True)
    async def work(ctx: ToolContext) -> str:
        """Wait for the gate."""
        tell("entered", ctx.run.run_id)
        try:
            while not gate.exists():  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            tell("stopped", ctx.run.run_id)
            raise
        return node

    def turn(request: Any) -> Any:
        last = request.messages[-1]
        return say(f"by {last.text}") if last.role == "tool" else call("work", {})

    return Agent("a", ScriptedModel(turn), tools=[work])


async def crowd(url: str, folder: str, size: str) -> None:
    """Start many runs that wait in a tool, and print their ids when all of them do."""
    from retinue import Runtime

    async with Runtime.open(url, [stage("first", Path(folder) / "never")]) as runtime:
        runs = [runtime.stream("a", "go") for _ in range(int(size))]
        await asyncio.gather(*[run.result() for run in runs])


async def taker(url: str, folder: str, name: str) -> None:
    """Open the store when told to, go on with what others left, and stay until told to end."""
    from retinue import Runtime

    Path(folder, "open").touch()
    agent = stage(name, Path(folder) / "open")
    tell("ready")
    await told()
    async with Runtime.open(url, [agent]):
        tell("open")
        await told()


async def owner(url: str, folder: str, name: str, lease: str) -> None:
    """Start one run that waits for the gate, and say how it ended."""
    from retinue import RetinueError, Runtime

    async with Runtime.open(url, [stage(name, Path(folder) / "gate")], lease=float(lease)) as runtime:
        run = runtime.stream("a", "go", thread_id="t")
        tell("run", run.run_id)
        try:
            result = await run.result()
            tell("ended", result.status, result.response)
        except RetinueError as exc:
            tell("error", type(exc).__name__)
        await told()


async def looker(url: str, folder: str, name: str, ahead: str) -> None:
    """Open a store that another node works in, with a clock that may be ahead, and stay until told to end."""
    if float(ahead):
        real = time.time
        time.time = lambda: real() + float(ahead)
    from retinue import Runtime

    async with Runtime.open(url, [stage(name, Path(folder) / "gate")]):
        tell("open")
        await told()


async def half_answered(url: str, folder: str) -> None:
    """Suspend a run with two tickets, answer one, and wait for the end."""
    from retinue import Decision, Runtime

    from ..payers import Effects, payers, ticket_of

    async with Runtime.open(url, payers(Effects(Path(folder, "effects.txt")))) as runtime:
        waiting = await runtime.run("boss", "go", thread_id="t")
        half = await runtime.resume(waiting.run_id, {ticket_of(waiting.suspended, "p-ann"): Decision.resume("yes")})
        tell("half", half.run_id)
        await told()


async def dies_in_tool(url: str, folder: str, calls: str) -> None:
    """Start a run whose process is killed by the first tool that begins."""
    from retinue import Runtime

    from ..payers import Effects, lookers

    agent = lookers(Effects(Path(folder, "effects.txt")), int(calls), die)
    async with Runtime.open(url, [agent]) as runtime:
        run = runtime.stream("a", "go", thread_id="t")
        tell("run", run.run_id)
        await run.result()


async def forgets_to_close(url: str, folder: str, turns: str) -> None:
    """Start a background sub-agent and return some turns of the event loop later, without closing the runtime."""
    from retinue import Agent, HarnessAgent, Runtime, tool
    from retinue.testing import ScriptedModel, call, say

    @tool
    async def work() -> str:
        """Work for ever."""
        await asyncio.Event().wait()
        return "never"

    def lead(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("started")
        return call("agent_spawn", {"agent_id": "worker", "task": "work", "timeout_seconds": 0}, id="c1")

    worker = Agent("worker", ScriptedModel(lambda request: call("work", {})), tools=[work])
    boss = HarnessAgent(
        "boss", ScriptedModel(lead), subagents=[worker], workspace=Path(folder, "ws"), general_purpose=False
    )
    runtime = Runtime.open(url, [boss])
    await runtime.__aenter__()
    await runtime.run("boss", "go", thread_id="t")
    for _ in range(int(turns)):
        await asyncio.sleep(0)
    tell("main returns")


async def on_a_frozen_disk(image: str, disk: str) -> None:
    """Say whether the event loop went on while the disk stalled."""
    from .disks import run_while_frozen

    told, status = await run_while_frozen(image, disk)
    tell("disk", told)
    tell("ended", status)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
