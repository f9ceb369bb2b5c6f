"""Agents that the tests of the server run."""

from __future__ import annotations

import asyncio

from retinue import Agent, Permissions, tool
from retinue.models import ModelRequest, TextChunk
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn


@tool
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


def speaker(*chunks: str) -> Agent:
    """An agent that says a few words."""
    text = "".join(chunks)
    return Agent("speaker", ScriptedModel(lambda request: say(text, chunks=list(chunks))))


def boss() -> Agent:
    """An agent that delegates to `clerk`, whose payment needs an approval."""

    def clerk_says(request: ModelRequest) -> ScriptedTurn:
        done = [m for m in request.messages if m.role == "tool"]
        return say(f"clerk: {done[-1].text}") if done else [call("pay", {"amount": 3}, id="pay_1")]

    def boss_says(request: ModelRequest) -> ScriptedTurn:
        done = [m for m in request.messages if m.role == "tool"]
        return say(f"boss: {done[-1].text}") if done else [
            call("task", {"subagent_type": "clerk", "description": "pay 3"}, id="task_1")
        ]  # fmt: skip

    clerk = Agent("clerk", ScriptedModel(clerk_says), tools=[pay], plugins=[Permissions(ask=["pay"])])
    return Agent("boss", ScriptedModel(boss_says), subagents=[clerk])


def twin_boss() -> Agent:
    """An agent that has `clerk` pay twice at once, each time in a call `pay_1`."""

    def says(request: ModelRequest) -> ScriptedTurn:
        calls = [
            call("task", {"subagent_type": "clerk", "description": "pay"}, id=name) for name in ("first", "second")
        ]
        return say("done") if request.messages[-1].role == "tool" else calls

    return Agent("boss", ScriptedModel(says), subagents=boss().subagents)


class Gate:
    """A model that says its words one by one, each when it is let through."""

    def __init__(self) -> None:
        self.gates: asyncio.Queue[str | None] = asyncio.Queue()

    def agent(self, name: str = "gated") -> Agent:
        gates = self.gates

        class Model:
            name = "testing:gated"

            async def stream(self, request: object):
                while (word := await gates.get()) is not None:
                    yield TextChunk(word)

        return Agent(name, Model())  # pyright: ignore[reportArgumentType]

    def say(self, *words: str | None) -> None:
        for word in words:
            self.gates.put_nowait(word)
