"""Agents that the processes of the tests serve: `retinue serve tests.server.served:agents`."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from retinue import Agent, Permissions, Runtime, tool
from retinue.models import ModelRequest
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from ..waiting import until
from .agents import boss, pay, speaker


def _folder() -> Path:
    return Path(os.environ["SERVED_FOLDER"])


@tool(idempotent=True)
async def wait_for(name: str) -> str:
    """Wait until a file is there."""
    with (_folder() / f"{name}.pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    await until((_folder() / name).exists)
    return f"{name} came"


@tool
async def die() -> str:
    """End the process at once."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@tool
async def ignore_cancels() -> str:
    """Wait until a file is there, whatever is cancelled."""
    (_folder() / "begun").touch()
    while not (_folder() / "ended").exists():
        with suppress(asyncio.CancelledError):
            await until((_folder() / "ended").exists)
    return "ended"


def _waits(request: ModelRequest) -> ScriptedTurn:
    done = [m for m in request.messages if m.role == "tool"]
    return say(f"done: {done[-1].text}") if done else [call("wait_for", {"name": request.messages[-1].text}, id="w1")]


def _asks(request: ModelRequest) -> ScriptedTurn:
    done = [m for m in request.messages if m.role == "tool"]
    return say(f"done: {done[-1].text}") if done else [call("pay", {"amount": 3}, id="pay_1")]


agents = [
    speaker("a", "b", "c"),
    boss(),
    Agent("waiter", ScriptedModel(_waits), tools=[wait_for]),
    Agent("payer", ScriptedModel(_asks), tools=[pay], plugins=[Permissions(ask=["pay"])]),
    Agent("deaf", ScriptedModel(lambda request: [call("ignore_cancels", {}, id="i1")]), tools=[ignore_cancels]),
    Agent("dying", ScriptedModel(lambda request: [call("die", {}, id="d1")]), tools=[die]),
]


async def start_agents() -> list[Agent]:
    """A mistake: a function that is served returns its agents at once."""
    return agents


def runtime(url: str) -> Runtime:
    """Return a runtime, or end this process if a file says so; only once."""
    with suppress(FileNotFoundError):
        (_folder() / "dies").unlink()
        os._exit(7)
    return Runtime.open(url, agents, on_close="leave", lease=8.0)


def open_runtime(url: str) -> Runtime:
    """Return a runtime as most programs make it."""
    return Runtime.open(url, agents)
