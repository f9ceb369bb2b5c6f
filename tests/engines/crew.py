"""Agents whose answers follow from the conversation alone, so that any worker can go on with them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from retinue import Agent, Permissions, Tool, tool
from retinue.core.messages import Role
from retinue.core.model import ModelRequest
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from ..waiting import until


def asked(request: ModelRequest) -> str:
    """The input of the run."""
    return [message.text for message in request.messages if message.role is Role.USER][-1]


def results(request: ModelRequest) -> list[str]:
    """What the tools have said since the last input."""
    last = max(place for place, message in enumerate(request.messages) if message.role is Role.USER)
    return [message.text for message in request.messages[last:] if message.role is Role.TOOL]


class Gate:
    """A tool that waits until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = asyncio.Event(), asyncio.Event()
        self.entries = 0

    def agent(self, name: str = "held", queue: str | None = None) -> Agent:
        @tool
        async def hold() -> str:
            """Wait."""
            self.entries += 1
            self.entered.set()
            await self.go.wait()
            return "let go"

        def turn(request: ModelRequest) -> ScriptedTurn:
            said = results(request)
            return say(said[-1]) if said else call("hold", {}, id="hold_1")

        return Agent(name, ScriptedModel(turn), tools=[hold], queue=queue)


def echo(request: ModelRequest) -> ScriptedTurn:
    return say(f"echo: {asked(request)}")


def clerk(request: ModelRequest) -> ScriptedTurn:
    """Pays once, which needs an approval."""
    said = results(request)
    return say(f"clerk: {said[-1]}") if said else call("pay", {"amount": 3}, id="pay_1")


def boss(request: ModelRequest) -> ScriptedTurn:
    """Gives its work to a clerk."""
    said = results(request)
    if said:
        return say(f"boss: {said[-1]}")
    return call("task", {"subagent_type": "clerk", "description": asked(request)}, id="task_1")


def walker(request: ModelRequest) -> ScriptedTurn:
    """Makes as many steps as it is asked to."""
    done, wanted = len(results(request)), int(asked(request))
    return say(f"{done} steps") if done >= wanted else call("mark", {"step": done}, id=f"mark_{done}")


@tool
def pay(amount: int) -> str:
    """Pay."""
    return f"paid {amount}"


def is_marked(folder: Path, step: int) -> bool:
    """Return whether a step has left its whole mark."""
    path = folder / f"step-{step}"
    return path.exists() and path.read_text().endswith("\n")


def make_mark(folder: Path | None) -> Tool:
    @tool
    async def mark(step: int) -> str:
        """Leave a mark, once for each step."""
        if folder is not None:
            hold = folder / f"hold-{step}"
            with (folder / f"step-{step}").open("a") as file:
                file.write(f"{os.getpid()}\n")
            await until(lambda: not hold.exists())
        return f"step {step}"

    return mark


def crew(folder: Path | None = None) -> list[Agent]:
    """All agents. With a folder, steps leave files in it, and wait while there is a file `hold-<step>`."""
    permissions = Permissions(ask=["pay"])
    cleric = Agent("clerk", ScriptedModel(clerk), tools=[pay], plugins=[permissions])
    return [
        Agent("echo", ScriptedModel(echo)),
        cleric,
        Agent("boss", ScriptedModel(boss), subagents=[cleric]),
        Agent("walker", ScriptedModel(walker), tools=[make_mark(folder)], max_steps=1_000),
    ]
