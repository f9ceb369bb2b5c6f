"""Agents for the tests of `retinue runs`, as a module that --target can name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from retinue import (
    Agent,
    CallChunk,
    ModelRequest,
    Permissions,
    ResumeMode,
    Runtime,
    SuspendTicket,
    TextChunk,
    ToolResult,
    TurnEnd,
    tool,
)
from retinue.models import ModelChunk

NOT_AN_AGENT = 3


@tool
def sign(paper: str) -> ToolResult:
    """Have a paper signed by a human."""
    schema = {"type": "object", "required": ["approved"]}
    ticket = SuspendTicket("ticket_1", "signature", f"Sign {paper}?", {"paper": paper}, schema, ResumeMode.USE_DECISION)
    return ToolResult.suspended(f"Sign {paper}?", ticket)


class Clerk:
    """Has a paper signed, and says what came of it."""

    name = "test:clerk"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        last = request.messages[-1]
        if last.role == "tool":
            yield TextChunk(f"It said: {last.text}")
        else:
            yield CallChunk(0, "call_sign", "sign", '{"paper": "lease"}')
        yield TurnEnd()


class Slow:
    """Begins to speak, and then takes an hour, unless it is told to hurry."""

    name = "test:slow"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("I begin. ")
        await asyncio.sleep(0 if "HURRY" in os.environ else 3600)
        yield TextChunk("I end.")
        yield TurnEnd()


class Manager:
    """Has two clerks at work at once."""

    name = "test:manager"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if request.messages[-1].role == "tool":
            yield TextChunk("Both are done.")
        else:
            for number, call in enumerate(("first", "second")):
                yield CallChunk(number, call, "task", '{"subagent_type": "clerk", "description": "Sign"}')
        yield TurnEnd()


@tool
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


class Cashier:
    """Pays, and says what came of it."""

    name = "test:cashier"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        last = next((said for said in reversed(request.messages) if said.role == "tool"), None)
        if last is not None:
            yield TextChunk(f"It said: {last.text}")
        else:
            yield CallChunk(0, "call_pay", "pay", '{"amount": 1000}')
        yield TurnEnd()


cashier = Agent("cashier", Cashier(), tools=[pay], plugins=[Permissions(ask=["pay"])])
clerk = Agent("clerk", Clerk(), tools=[sign])
manager = Agent("manager", Manager(), subagents=[clerk])
slow = Agent("slow", Slow())
everyone = [clerk, slow, manager, cashier]


def on(url: str) -> Runtime:
    return Runtime.open(url, everyone, recover=False)


def broken() -> Runtime:
    raise RuntimeError("no staff today")


async def ask(url: str, agent: str, question: str) -> str:
    """Run an agent until it ends or waits; its run id."""
    async with on(url) as runtime:
        return (await runtime.run(agent, question, thread_id=f"thread-of-{agent}")).run_id
