"""Agents whose tools have a queue. Each worker gives its tools a label, by which calls say who made them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from retinue import (
    Agent,
    Denied,
    HarnessAgent,
    ImagePart,
    Permissions,
    Plugin,
    Registrar,
    StateKey,
    Tool,
    ToolContext,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.core.messages import Role
from retinue.core.model import ModelRequest
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from ..waiting import until
from .crew import asked, echo, results

TOTAL: StateKey[int, int] = StateKey(
    "total", int, reduce=lambda old, new: old + new, merge="commutative", persistent=True
)
SEEN: StateKey[list[str], str] = StateKey(
    "seen", list[str], update=str, reduce=lambda old, new: [*old, new], default=list[str], persistent=True
)


class Sums(Plugin):
    """Brings state keys, and a tool with a queue."""

    name = "sums"

    def __init__(self, label: str) -> None:
        self._label = label

    def register(self, r: Registrar) -> None:
        r.key(TOTAL)
        r.key(SEEN)
        label = self._label

        @tool(queue="gpu")
        async def add(number: int, ctx: ToolContext) -> ToolOutput:
            """Add a number to the total."""
            ctx.stream_output(f"adding {number}")
            ctx.report_progress("running", progress=0.5)
            ctx.emit({"number": number})
            said = f"{label} adds {number} to {ctx.state(TOTAL)} for {ctx.run.agent} of {ctx.context.get('tenant')}"
            return ToolOutput(said, {TOTAL: number})

        r.tool(add)


def tools(label: str, folder: Path | None) -> list[Tool]:
    count = 0

    @tool(queue="gpu", retries=2)
    async def stumble(times: int) -> str:
        """Fail a number of times, then work."""
        nonlocal count
        count += 1
        if count <= times:
            raise RuntimeError("stumbled")
        return f"{label} worked at try {count}"

    @tool(queue="gpu")
    def refuse(kind: str) -> str:
        """Fail in a certain way."""
        raise Denied("not you") if kind == "denied" else ValueError("broken")

    @tool(queue="gpu", timeout=0.01)
    async def linger() -> str:
        """Take too long."""
        await until(lambda: False)
        return "late"

    @tool(queue="gpu")
    async def question(ctx: ToolContext) -> ToolResult | str:
        """Ask a human."""
        return ToolResult.suspended("well?") if ctx.resume_input is None else f"{label} heard {ctx.resume_input}"

    @tool(queue="gpu")
    async def breed(ctx: ToolContext) -> str:
        """Start a child, which is not possible."""
        return (await ctx.run_child("echo", "hello")).response or ""

    @tool(queue="gpu")
    def paint() -> list[Any]:
        """Return an image."""
        return ["a picture", ImagePart(data="aGVsbG8=", media_type="image/png")]

    def hold(name: str, idempotent: bool) -> Tool:
        @tool(queue="gpu", name=name, idempotent=idempotent)
        async def work(ctx: ToolContext) -> str:
            """Work while there is a file `hold`, and leave a mark."""
            assert folder is not None
            gate = folder / "hold"
            with (folder / "made").open("a") as file:
                file.write(f"{os.getpid()}\n")
            ctx.stream_output("one ")
            await until(lambda: not gate.exists())
            ctx.stream_output("two")
            return "held"

        return work

    return [stumble, refuse, linger, question, breed, paint, hold("once", False), hold("again", True)]


def user(request: ModelRequest) -> ScriptedTurn:
    """Makes the calls it is asked to, `name key=value` each, all at once, then says what they said."""
    said = [message.text for message in request.messages if message.role is Role.TOOL]
    if said and results(request):
        return say(" | ".join(results(request)))
    calls: list[Any] = []
    for place, text in enumerate(asked(request).split("; "), 1):
        name, *given = text.split()
        args = {key: int(value) if value.isdigit() else value for key, value in (one.split("=") for one in given)}
        calls.append(call(name, args, id=f"call_{place}"))
    return calls


def helper(request: ModelRequest) -> ScriptedTurn:
    """The boss has a sub-agent do its work, which has the tools of the boss."""
    if "Subagent Context" in request.messages[0].text:
        return user(request)
    said = results(request)
    if said:
        return say(said[-1])
    return call("agent_spawn", {"agent_id": "general-purpose", "task": asked(request)}, id="spawn_1")


def team(label: str = "near", folder: Path | None = None, workspace: Path | None = None) -> list[Agent]:
    made = tools(label, folder)
    agents = [
        Agent("user", ScriptedModel(user), tools=made, plugins=[Sums(label)]),
        Agent("careful", ScriptedModel(user), tools=made, plugins=[Permissions(ask=["paint"])]),
        Agent("echo", ScriptedModel(echo)),
    ]
    if workspace is not None:
        agents.append(HarnessAgent("boss", ScriptedModel(helper), tools=made, workspace=workspace))
    return agents


def agents_of_process() -> list[Agent]:
    """The agents of a worker process. $CREW_FOLDER is where calls leave marks."""
    return team("far", Path(os.environ["CREW_FOLDER"]) if "CREW_FOLDER" in os.environ else None)
