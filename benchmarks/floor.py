"""The floor: the least Python that does the same duties, with no library and no product around it.

It parses and validates arguments, runs the tool, commits two typed values to a copied map and appends an event
object for everything that happens. Nothing is cancelled, limited, folded, stored or refused.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import jsonschema_rs

SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["q"],
    "additionalProperties": False,
}


@dataclass(slots=True)
class FloorEvent:
    seq: int
    at: float
    run: str
    kind: str
    data: Any


class FloorRun:
    ids = itertools.count(1)

    def __init__(
        self, model: Any, tools: dict[str, Callable[..., Awaitable[Any]]], sink: Callable[[Any], None]
    ) -> None:
        self.model, self.tools, self.sink = model, tools, sink
        self.check = {name: jsonschema_rs.validator_for(SCHEMA).is_valid for name in tools}
        self.id = f"run-{next(self.ids)}"
        self.seq, self.state, self.revision = 0, dict[str, Any](), 0

    def emit(self, kind: str, data: Any) -> None:
        self.seq += 1
        self.sink(FloorEvent(self.seq, time.time(), self.id, kind, data))

    async def run(self, prompt: str) -> str:
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        self.emit("run_started", prompt)
        while True:
            self.emit("step_started", None)
            text, calls = "", list[Any]()
            async for kind, data in self.model(messages):
                if kind == "text":
                    text += data
                    self.emit("text_delta", data)
                else:
                    calls.append(data)
            self.emit("inference_finished", text)
            messages.append({"role": "assistant", "content": text, "tool_calls": calls})
            if not calls:
                self.emit("run_finished", text)
                return text
            for call in calls:
                messages.append({"role": "tool", "id": call[0], "content": await self.call(*call)})
            self.emit("step_finished", None)

    async def call(self, call_id: str, name: str, raw: str) -> str:
        args = json.loads(raw)
        if not self.check[name](args):
            raise ValueError(name)
        self.emit("tool_call_ready", (call_id, name, args))
        result, update = await self.tools[name](**args)
        state = dict(self.state)
        for key, value in update.items():
            if type(value) not in (int, str):
                raise TypeError(key)
            state[key] = value
        self.state, self.revision = state, self.revision + 1
        self.emit("state_delta", (self.revision, update))
        self.emit("tool_call_finished", (call_id, result))
        return result


class FloorModel:
    def __init__(self, calls: int = 0, deltas: int = 1) -> None:
        self.left, self.deltas = calls, deltas
        self.stamps: list[float] = []

    async def __call__(self, messages: list[dict[str, Any]]) -> AsyncIterator[tuple[str, Any]]:
        self.stamps.append(time.process_time())
        if self.left:
            self.left -= 1
            yield "call", (f"call_{self.left}", "lookup", '{"q":"item","limit":3}')
            return
        for _ in range(self.deltas):
            yield "text", "tok "


async def lookup(q: str, limit: int = 3) -> tuple[str, dict[str, Any]]:
    return f"{limit} hits for {q}", {"calls": limit, "last": q}


async def steps(calls: int) -> list[float]:
    """Seconds of CPU between model calls."""
    model = FloorModel(calls)
    await FloorRun(model, {"lookup": lookup}, list[Any]().append).run("go")
    return [b - a for a, b in itertools.pairwise(model.stamps)]


async def deltas(count: int) -> float:
    """Seconds of CPU for `count` deltas to a consumer."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    began = time.process_time()
    task = asyncio.create_task(FloorRun(FloorModel(0, count), {}, queue.put_nowait).run("go"))
    seen = 0
    while (event := await queue.get()).kind != "run_finished":
        seen += event.kind == "text_delta"
    await task
    assert seen == count
    return time.process_time() - began


async def build_and_run(rounds: int) -> float:
    """Seconds of CPU to make an agent with five tools and run it once."""
    began = time.process_time()
    for _ in range(rounds):
        tools: dict[str, Any] = dict.fromkeys(("lookup", "add", "weather", "search", "save"), lookup)
        await FloorRun(FloorModel(), tools, list[Any]().append).run("go")
    return (time.process_time() - began) / rounds
