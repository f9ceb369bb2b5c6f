"""Agents that the tests of the page serve: `retinue serve tests.page.agents:agents`.

A model or tool that must not go on before the test has looked waits for a file in the folder of the server.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

from retinue import Agent, HarnessAgent, Limits, Permissions, SuspendTicket, ToolResult, tool
from retinue.models import ModelChunk, ModelRequest, TextChunk
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from ..waiting import until

HOSTILE = "\n\n".join(
    [
        "<script>window.hacked = 1</script>",
        "<img src=x onerror='window.hacked = 2'>",
        "[click](javascript:window.hacked=3) [data](data:text/html,<script>window.hacked=4</script>)",
        "![pixel](http://tracker.example/pixel.png)",
        "![inline](data:image/svg+xml;base64,PHN2Zy8+)",
        "invoice\u202egpj.exe \u200bhidden",
        "<a href='https://evil.example' onclick='window.hacked=5'>raw</a>",
        "[real](https://example.com/page)",
        "```html\n<script>window.hacked = 6</script>\n```",
        "x" * 1_000_000,
    ]
)


def _folder() -> Path:
    return Path(os.environ["SERVED_FOLDER"])


async def gate(name: str) -> None:
    """Wait until the test opens a gate."""
    await until((_folder() / name).exists)


@tool
async def wait_at(name: str) -> str:
    """Wait until the test opens a gate."""
    await gate(name)
    return f"{name} is open"


@tool
async def pay(amount: int, to: str = "nobody") -> str:
    """Pay an amount."""
    return f"paid {amount} to {to}"


@tool
def ask_name() -> ToolResult:
    """Ask the user for a name."""
    schema = {"type": "string"}
    ticket = SuspendTicket("name", "name", "What is the name?", response_schema=schema, resume_mode="use_decision")
    return ToolResult.suspended(ticket.message, ticket)


class Talker:
    """Says numbered words, each in a chunk of its own, and delegates once if it has somebody."""

    name = "testing:talker"

    def __init__(self, prefix: str, delegate: str = "", gate: str = "") -> None:
        self._prefix, self._delegate, self._gate = prefix, delegate, gate
        self._numbers = itertools.count(1)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        is_first = request.messages[-1].role != "tool"
        number = next(self._numbers)
        for word in range(3):
            yield TextChunk(f"{self._prefix}{number}w{word} ")
            if word == 0 and self._gate and is_first:
                await gate(self._gate)
        if is_first and self._delegate:
            turn = [call("task", {"subagent_type": self._delegate, "description": "the same task"}, id="down")]
            async for chunk in ScriptedModel([turn]).stream(request):
                yield chunk


def _tool_results(request: ModelRequest) -> list[str]:
    return [message.text for message in request.messages if message.role == "tool"]


def _fan_out(children: dict[str, str], end: str) -> ScriptedModel:
    """A model that delegates each task to a child, then ends with some words."""

    def turn(request: ModelRequest) -> ScriptedTurn:
        if results := _tool_results(request):
            return say(f"{end}: {' / '.join(results)}")
        return [
            call(
                "task", {"subagent_type": agent, "description": task.partition("#")[0]}, id=f"{end.split()[0]}_{place}"
            )
            for place, (task, agent) in enumerate(children.items())
        ]

    return ScriptedModel(turn)


def _one_call(name: str, args: dict[str, object], end: str) -> ScriptedModel:
    def turn(request: ModelRequest) -> ScriptedTurn:
        if results := _tool_results(request):
            return say(f"{end}: {results[-1]}")
        return [say("I look. "), call(name, args, id=f"{name}_1")]

    return ScriptedModel(turn)


helper = Agent("helper", Talker("h"))
worker = Agent("worker", Talker("k", delegate="helper", gate="workers"), subagents=[helper])
crowd = Agent("crowd", _fan_out({f"the same task#{n}": "worker" for n in range(10)}, "all done"), subagents=[worker])

_ask = [Permissions(ask=["pay"])]
payer = Agent("payer", _one_call("pay", {"amount": 3, "to": "ann"}, "payer"), tools=[pay], plugins=_ask)
LONG = "\n".join(f"line {n}" for n in range(60))
lengthy = Agent("lengthy", _one_call("pay", {"amount": 3, "to": LONG}, "lengthy"), tools=[pay], plugins=_ask)
asker = Agent("asker", _one_call("ask_name", {}, "asker"), tools=[ask_name])
clerk = Agent("clerk", _fan_out({"pay ann": "payer"}, "clerk"), subagents=[payer])
chief = Agent(
    "chief",
    _fan_out({"see to it": "clerk", "pay too": "payer", "name": "asker"}, "chief"),
    subagents=[clerk, payer, asker],
)

stuck = Agent("stuck", _one_call("wait_at", {"name": "never"}, "stuck"), tools=[wait_at])
quick = Agent("quick", ScriptedModel(lambda request: say("quick is done")))


def _breaks(request: ModelRequest) -> ScriptedTurn:
    raise RuntimeError("the disk is full")


broken = Agent("broken", ScriptedModel(_breaks))
mixed = Agent(
    "mixed",
    _fan_out({"hang": "stuck", "break": "broken", "answer": "quick"}, "mixed"),
    subagents=[stuck, broken, quick],
)

teller = Agent("teller", Talker("t", gate="teller"))
reader = Agent("reader", _fan_out({"tell": "teller"}, "reader"), subagents=[teller])
hostile = Agent("hostile", ScriptedModel(lambda request: say(HOSTILE)))


def _spawns(request: ModelRequest) -> ScriptedTurn:
    if request.messages[-1].text == "slow work":
        return [call("wait_at", {"name": "background"}, id="w1")]
    done = _tool_results(request)
    if done and "is open" in done[-1]:
        return say("the slow work is done")
    if done:
        return say("it works in the background")
    return [call("agent_spawn", {"agent_id": "slow", "task": "slow work", "timeout_seconds": 0}, id="spawn_1")]


slow = Agent("slow", ScriptedModel(_spawns), description="Works slowly.", tools=[wait_at])


def _many(request: ModelRequest) -> ScriptedTurn:
    if request.messages[-1].role == "tool":
        return say("all have answered")
    count = int(request.messages[-1].text)
    return [call("task", {"subagent_type": "quick", "description": f"part {n}"}, id=f"m_{n}") for n in range(count)]


many = Agent("many", ScriptedModel(_many), subagents=[quick])
starter = HarnessAgent(
    "starter", ScriptedModel(_spawns), workspace=os.environ.get("SERVED_FOLDER", "."), subagents=[slow]
)


def _listens(request: ModelRequest) -> ScriptedTurn:
    if _tool_results(request):
        return say(f"heard: {request.messages[-1].text}")
    return [call("wait_at", {"name": "listened"}, id="w2")]


def _guides(request: ModelRequest) -> ScriptedTurn:
    if results := _tool_results(request):
        return say(f"{results[-1]} / told: {request.messages[-1].text}")
    return [call("task", {"subagent_type": "listener", "description": "listen"}, id="listen")]


listener = Agent("listener", ScriptedModel(_listens), tools=[wait_at])
guided = Agent("guided", ScriptedModel(_guides), subagents=[listener])


class Streamer:
    """Says a word ten times a second until the test opens a gate."""

    name = "testing:streamer"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        for number in itertools.count():
            yield TextChunk(f"s{number} ")
            if (_folder() / "streamed").exists():
                return
            await asyncio.sleep(0.1)


def _streams(request: ModelRequest) -> ScriptedTurn:
    if request.messages[-1].role == "tool":
        return say("all streams have ended")
    count = int(request.messages[-1].text)
    return [
        call("task", {"subagent_type": "streamer", "description": f"stream {n}"}, id=f"s_{n}") for n in range(count)
    ]


streamer = Agent("streamer", Streamer())
streams = Agent("streams", ScriptedModel(_streams), subagents=[streamer], limits=Limits(children=2000, parallel=2000))
agents = [streams, lengthy, guided, crowd, chief, mixed, reader, hostile, many, starter]
