"""Hostile content for `scripts/bench --pauses`: values, answers of models and decisions, each given to a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from retinue import Agent, Decision, Permissions, RunResult, Runtime, ToolContext, ToolOutput, ToolResult, tool
from retinue.core.model import CallChunk, ReasoningChunk, TextChunk
from retinue.errors import RetinueError
from retinue.models.anthropic import AnthropicWire
from retinue.models.chat import ChatWire
from retinue.models.http import Endpoint, HttpClient
from retinue.models.responses import ResponsesWire
from retinue.models.wire import WireModel
from retinue.plugins import Plugin
from retinue.state import StateKey
from retinue.subagents.markdown import read_markdown
from retinue.testing import ScriptedModel, call, say

MB = 1_000_000
Work = Callable[[Path], Awaitable[str]]
Attack = tuple[str, Work]


def _deep(levels: int) -> Any:
    made: Any = []
    for _ in range(levels):
        made = [made]
    return made


def _cycle() -> Any:
    made: list[Any] = []
    made.append({"again": made})
    return made


def _wide() -> Any:
    made: Any = "x"
    for _ in range(60):
        made = [made, made]
    return made


VALUES: dict[str, Callable[[], Any]] = {
    "100,000 deep": lambda: _deep(100_000),
    "that contains itself": _cycle,
    "of 2^60 shared lists": _wide,
    "of 3 million numbers": lambda: list(range(3_000_000)),
    "of 90,000 numbers": lambda: list(range(90_000)),
    "of 16,000 long numbers": lambda: [10**4299] * 16_000,
    "of 4 long numbers": lambda: [10**4299] * 4,
    "of 39,000 lists": lambda: [[] for _ in range(39_000)],
    "of 45,000 fields": lambda: {str(number): number for number in range(45_000)},
    "of 9,000 broken texts": lambda: ["\ud800"] * 9_000,
    "of 90,000 broken texts": lambda: ["\ud800"] * 90_000,
    "of 90,000 references to a text": lambda: ["x" * MB] * 90_000,
    "of 4 MB of text": lambda: "x" * (4 * MB),
    "of 1 MB of escapes": lambda: "\0\n" * (MB // 2),
    "of 4 MB of broken text": lambda: "\ud800" * (4 * MB),
    "of 200 MB of text": lambda: "x" * (200 * MB),
}
"""Values that a tool may return. Below the limits, they are stored and shown; above, they are refused."""

_any = StateKey("any", object, persistent=True)


class _Keys(Plugin):
    name = "keys"

    def register(self, r: Any) -> None:
        r.key(_any)


PLACES: dict[str, Callable[[ToolContext, Any], Any]] = {
    "result": lambda ctx, value: value,
    "event": lambda ctx, value: ctx.emit(value),
    "state": lambda ctx, value: ToolOutput("x", update={_any: value}),
}


async def _outcome(runtime: Runtime, *args: Any, **options: Any) -> RunResult | Exception:
    try:
        return await runtime.run(*args, **options)
    except RetinueError as exc:
        return exc


def _said(outcome: RunResult | Exception) -> str:
    if isinstance(outcome, Exception):
        return str(outcome)
    texts = [message.text for message in outcome.messages if message.role == "tool"]
    return texts[0] if texts else outcome.error or outcome.response or outcome.status


async def _run(agent: Agent, folder: Path, given: str = "go", **options: Any) -> str:
    """Run an agent on a database, as a server does; return the beginning of what it said."""
    async with Runtime.open(f"sqlite:///{folder}/pauses.db", [agent]) as runtime:
        return _said(await _outcome(runtime, agent, given, **options))[:200]


def _in_tool(place: str, make: Callable[[], Any]) -> Work:
    value: Any = make()

    @tool
    async def work(ctx: ToolContext) -> Any:
        """Work."""
        return PLACES[place](ctx, value)

    async def attack(folder: Path) -> str:
        model = ScriptedModel([call("work"), say("done")])
        return await _run(Agent("a", model, tools=[work], plugins=[_Keys()]), folder)

    return attack


class _Answering:
    """A model that sends chunks, and then ends."""

    name = "bench:hostile"

    def __init__(self, chunks: Callable[[], Any]) -> None:
        self._chunks, self._is_done = chunks, False

    async def stream(self, request: Any) -> AsyncIterator[Any]:
        if not self._is_done:
            self._is_done = True
            for chunk in self._chunks():
                yield chunk
        else:
            yield TextChunk("end")


def _answer(chunks: Callable[[], Any]) -> Work:
    @tool
    async def save(text: str = "", names: list[str | None] | None = None) -> str:
        """Save."""
        return f"saved {len(text)}"

    async def attack(folder: Path) -> str:
        rules = Permissions(deny=["save(text=/etc/*)"])
        return await _run(Agent("a", _Answering(chunks), tools=[save], plugins=[rules]), folder)

    return attack


def _arguments(text: str) -> Work:
    return _answer(lambda: [CallChunk(0, "c", "save", text)])


def _calls(count: int, text: str) -> Work:
    return _answer(lambda: [CallChunk(n, f"c{n}", "save", text) for n in range(count)])


def _structured(kind: Any, text: str) -> Work:
    async def attack(folder: Path) -> str:
        return await _run(Agent("a", _Answering(lambda: [TextChunk(text)]), output=kind), folder)

    return attack


class _Canned(HttpClient):
    """A connection on which these bytes arrive, in pieces as from a socket."""

    def __init__(self, data: bytes) -> None:
        super().__init__(Endpoint("bench:model", "http://localhost", {}))
        self.data = data

    async def post(self, path: str, body: bytes, is_done: Callable[[], bool]) -> AsyncIterator[bytes]:
        for place in range(0, len(self.data), 65_536):
            await asyncio.sleep(0)  # the client buffers no more than that
            yield self.data[place : place + 65_536]
            if is_done():
                return


def _bytes(wire: Callable[[], Any], data: bytes) -> Work:
    async def attack(folder: Path) -> str:
        return await _run(Agent("a", WireModel("bench:model", wire(), _Canned(data))), folder)

    return attack


def _decide(payload: Callable[[], Any]) -> Work:
    made = payload()

    async def attack(folder: Path) -> str:
        @tool
        async def ask(ctx: ToolContext) -> Any:
            """Ask."""
            return ToolResult.suspended("?") if ctx.resume_input is None else "answered"

        agent = Agent("a", ScriptedModel([call("ask", id="c1"), say("done")]), tools=[ask])
        async with Runtime.open(f"sqlite:///{folder}/pauses.db", [agent]) as runtime:
            waiting = await runtime.run(agent, "go")
            try:
                return _said(await runtime.resume(waiting.run_id, {"c1": Decision.resume(made)}))
            except RetinueError as exc:
                await runtime.cancel(waiting.run_id)
                return str(exc)

    return attack


def _declaration(data: bytes) -> Work:
    async def attack(folder: Path) -> str:
        loaded = read_markdown("evil", data, "subagents/evil.md")
        return str(loaded.problems[0]) if loaded.problems else "read"

    return attack


def _input(text: str) -> Work:
    async def attack(folder: Path) -> str:
        return await _run(Agent("a", ScriptedModel([say("read")])), folder, text)

    return attack


def _event(wire: str, text: str) -> bytes:
    """An answer of one event that says this."""
    said = json.dumps(text)
    chat = f'data: {{"choices": [{{"delta": {{"content": {said}}}, "finish_reason": "stop"}}]}}\n\n'
    responses = f'data: {{"type": "response.output_text.delta", "delta": {said}}}\n\n'
    return {"chat": chat, "responses": responses}.get(wire, chat).encode()


_BOMB = b"---\na: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    [b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9)]
)


def large_values() -> list[Attack]:
    """Make the largest texts that are accepted. Each is one piece of JSON, so there is no goal for them."""
    return [
        ("large: a result of 60 MB of text", _in_tool("result", lambda: "x" * (60 * MB))),
        ("large: a result of 60 MB of escapes", _in_tool("result", lambda: "\0\n" * (30 * MB))),
        ("large: an input of 60 MB of text", _input("x" * (60 * MB))),
    ]


def content_attacks() -> list[Attack]:
    """Make the attacks. Their values exist before anything is measured."""
    found = [(f"{place}: a value {title}", _in_tool(place, make)) for title, make in VALUES.items() for place in PLACES]
    found += [
        ("input: 4 MB of text", _input("x" * 4 * MB)),
        ("input: 4 MB of broken text", _input("\ud800" * 4 * MB)),
        ("input: 200 MB of text", _input("x" * 200 * MB)),
        ("answer: 4 MB in one piece", _answer(lambda: [TextChunk("x" * (4 * MB))])),
        ("answer: text without end", _answer(lambda: (TextChunk("x" * 1000) for _ in range(10**9)))),
        ("answer: pieces of one letter without end", _answer(lambda: (TextChunk("x") for _ in range(10**9)))),
        ("answer: empty pieces without end", _answer(lambda: (TextChunk("") for _ in range(10**9)))),
        ("answer: reasoning without end", _answer(lambda: (ReasoningChunk("x" * 1000) for _ in range(10**9)))),
        ("answer: calls without end", _answer(lambda: (CallChunk(n, f"c{n}", "save", "{}") for n in range(10**9)))),
        ("answer: an id of 1 MB", _answer(lambda: [CallChunk(0, "x" * MB, "save", "{}")])),
        ("answer: 9,999 calls", _answer(lambda: (CallChunk(n, f"c{n}", "save", "{}") for n in range(9_999)))),
        ("answer: 9,999 unknown calls", _answer(lambda: (CallChunk(n, f"c{n}", f"n{n}", "{}") for n in range(9_999)))),
        ("answer: 8 MB in large pieces", _answer(lambda: (TextChunk("x" * 100_000) for _ in range(83)))),
        ("arguments: 1 MB of text", _arguments(json.dumps({"text": "x" * MB}))),
        ("arguments: 1 MB of path", _arguments(json.dumps({"text": "/." * (MB // 2)}))),
        ("arguments: 1 MB of escapes", _arguments('{"text": "' + "\\n" * (MB // 2) + '"}')),
        ("arguments: 1 MB of brackets", _arguments("[" * MB)),
        ("arguments: 1 MB of empty lists", _arguments('{"a": [' + ",".join(["[]"] * (MB // 3)) + "]}")),
        ("arguments: 1 MB of numbers", _arguments('{"a": [' + "1," * (MB // 2) + "1]}")),
        ("arguments: 1 MB of long numbers", _arguments('{"a": [' + ",".join(["9" * 4000] * (MB // 4001)) + "]}")),
        ("arguments: 1 MB of short texts", _arguments('{"a": [' + ",".join(['"xy"'] * (MB // 5)) + "]}")),
        ("arguments: 1 MB of fields", _arguments("{" + ",".join([f'"{n}":1' for n in range(105_000)]) + "}")),
        ("arguments: 2 MB", _arguments(json.dumps({"text": "x" * (2 * MB)}))),
        ("arguments: 79,000 lists", _arguments('{"a": [' + ",".join(["[]"] * 79_000) + "]}")),
        ("arguments: 90,000 unknown fields", _arguments("{" + ",".join([f'"{n}":1' for n in range(90_000)]) + "}")),
        ("arguments: 90,000 wrong items", _arguments('{"names": [' + "1," * 90_000 + "1]}")),
        ("arguments: 500 calls of 1,000 wrong items", _calls(500, '{"names": [' + "1," * 980 + "1]}")),
        ("arguments: 4,000 calls of 100 wrong items", _calls(4_000, '{"names": [' + "1," * 98 + "1]}")),
        ("arguments: 9,000 calls of 4 wrong items", _calls(9_000, '{"names": [1,1,1,1]}')),
        ("arguments: 3,000 calls of 100 lists", _calls(3_000, '{"a": [' + ",".join(["[]"] * 100) + "]}")),
        ("arguments: 10 calls of 9,000 fields", _calls(10, "{" + ",".join([f'"{n}":1' for n in range(9_000)]) + "}")),
        ("arguments: pieces without end", _answer(lambda: (CallChunk(0, "c", "save", "[") for _ in range(10**9)))),
        (
            "output: 90,000 fields",
            _structured(dict[str, int], "{" + ",".join([f'"{n}":1' for n in range(90_000)]) + "}"),
        ),
        ("output: 90,000 wrong items", _structured(list[str], json.dumps([1] * 90_000))),
        ("decision: 8 MB of text", _decide(lambda: "x" * (8 * MB))),
        ("decision: 3 million numbers", _decide(lambda: list(range(3_000_000)))),
        ("decision: 100,000 deep", _decide(lambda: _deep(100_000))),
        ("declaration: 10 MB", _declaration(b"---\ndescription: x\n---\n" + b"x" * (10 * MB))),
        ("declaration: a bomb of references", _declaration(_BOMB + b"---\n")),
        ("declaration: 100,000 brackets", _declaration(b"---\na: " + b"[" * 100_000 + b"\n---\n")),
    ]
    for name, wire in {"chat": ChatWire, "responses": ResponsesWire, "anthropic": AnthropicWire}.items():
        found += [
            (f"{name}: an event of 200 MB", _bytes(wire, b"data: " + b"x" * (200 * MB))),
            (f"{name}: an event with 4 MB of text", _bytes(wire, _event(name, "x" * (4 * MB)))),
            (f"{name}: an event 1 million deep", _bytes(wire, b'data: {"a":' + b"[" * MB + b"\n\n")),
            (f"{name}: 10 million empty lines", _bytes(wire, b"\n" * (10 * MB))),
            (f"{name}: a million small events", _bytes(wire, b"data: {}\n\n" * MB)),
        ]
    return found
