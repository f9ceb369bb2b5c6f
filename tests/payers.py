"""Agents that pay somebody after a human has agreed, and notes of what was done by whichever process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retinue import Agent, Child, Decision, RunStatus, ToolContext, ToolResult, Usage, tool
from retinue.testing import ScriptedModel, call, say

EACH = Usage(requests=1, input_tokens=60, output_tokens=40)
"""What each model call uses."""


def yes() -> Decision:
    return Decision.resume("yes")


class Effects:
    """Lines in a file: things that were done, by whichever process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, line: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{line}\n")

    @property
    def lines(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []


def pay_tool(effects: Effects) -> Any:
    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay somebody after a human has agreed."""
        if ctx.resume_input is None:
            return ToolResult.suspended(f"may I pay {to}?")
        effects.add(f"paid {to}")
        return f"paid {to}"

    return pay


def payer(effects: Effects, name: str = "payer") -> Agent:
    """An agent that pays whom its input names last, and answers further messages with their text."""

    def turn(request: Any) -> Any:
        last = request.messages[-1]
        if last.role == "tool":
            return say(f"done: {last.text}")
        if last.text.startswith("pay "):
            return call("pay", {"to": last.text.split()[-1]}, id="p1")
        return say(f"heard {last.text}")

    return Agent(name, ScriptedModel(turn), tools=[pay_tool(effects)])


def _using(turn: Any) -> list[Any]:
    return [say("", chunks=[], usage=EACH), turn]


def payers(effects: Effects) -> list[Agent]:
    """A boss whose one call runs two children. Each asks a human and then reports. Six model calls in all."""

    def pay_and_report(request: Any) -> Any:
        last = request.messages[-1]
        if last.role == "tool":
            return say(last.text, usage=EACH)
        return _using(call("pay", {"to": last.text}, id=f"p-{last.text}"))

    def lead(request: Any) -> Any:
        last = request.messages[-1]
        return say(last.text, usage=EACH) if last.role == "tool" else _using(call("delegate", {}, id="c1"))

    @tool
    async def delegate(ctx: ToolContext) -> Any:
        """Have ann and bob paid."""
        outcomes = await ctx.run_children([Child("payer", "ann"), Child("payer", "bob")])
        if any(outcome.status is RunStatus.SUSPENDED for outcome in outcomes):
            return ToolResult.suspended("children wait")
        return " and ".join([str(outcome.response) for outcome in outcomes])

    return [
        Agent("boss", ScriptedModel(lead), tools=[delegate]),
        Agent("payer", ScriptedModel(pay_and_report), tools=[pay_tool(effects)]),
    ]


def ticket_of(suspended: Any, call_id: str) -> str:
    """The key of a ticket, by the last call of its path."""
    (key,) = [key for key, ticket in suspended.items() if ticket.path[-1] == call_id]
    return key


def lookers(effects: Effects, calls: int, at_look: Any = None) -> Agent:
    """Makes idempotent calls at once. Notes each turn of the model and each call; `at_look` is called in a tool."""

    @tool(idempotent=True)
    async def look() -> str:
        """Look."""
        effects.add("look")
        if at_look is not None:
            at_look()
        return "looked"

    def turn(request: Any) -> Any:
        turns = 1 + sum(message.role == "assistant" for message in request.messages)
        effects.add(f"model {turns}")
        looked = sum(message.text == "looked" for message in request.messages)
        return [call("look", {}) for _ in range(calls)] if turns == 1 else say(f"looked {looked} times")

    return Agent("a", ScriptedModel(turn), tools=[look])
