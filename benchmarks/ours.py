"""The same work through Retinue's public surface."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from retinue import (
    Agent,
    CallChunk,
    HookContext,
    ModelRequest,
    Plugin,
    Registrar,
    Runtime,
    StateKey,
    TextChunk,
    ToolOutput,
    TurnEnd,
    tool,
)
from retinue.models import ModelChunk
from retinue.plugins import PHASES

calls_made: StateKey[int, int] = StateKey("calls", int, persistent=True)
last_query: StateKey[str, str] = StateKey("last", str, persistent=True)


class Counting(Plugin):
    name = "counting"

    def register(self, r: Registrar) -> None:
        r.key(calls_made)
        r.key(last_query)


class BenchModel:
    name = "bench:model"

    def __init__(self, calls: int = 0, deltas: int = 1) -> None:
        self.left, self.deltas = calls, deltas
        self.stamps: list[float] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        self.stamps.append(time.process_time())
        if self.left:
            self.left -= 1
            yield CallChunk(0, f"call_{self.left}", "lookup", '{"q":"item","limit":3}')
        else:
            for _ in range(self.deltas):
                yield TextChunk("tok ")
        yield TurnEnd()


@tool
async def lookup(q: str, limit: int = 3) -> ToolOutput:
    """Look a term up in the index."""
    return ToolOutput(f"{limit} hits for {q}", update={calls_made: limit, last_query: q})


class Watching(Plugin):
    """A hook in every phase."""

    def __init__(self, number: int) -> None:
        self.name, self.seen = f"watching-{number}", 0

    def register(self, r: Registrar) -> None:
        for phase in PHASES:
            r.hook(phase, self.watch)

    def watch(self, ctx: HookContext) -> None:
        self.seen += 1


async def hooked_steps(calls: int) -> list[float]:
    """As `steps`, with ten plugins that have a hook in every phase."""
    return await steps(calls, [Watching(number) for number in range(10)])


async def steps(calls: int, plugins: Sequence[Plugin] = ()) -> list[float]:
    """Seconds of CPU between model calls."""
    model = BenchModel(calls)
    agent = Agent("bench", model, "Look things up.", [lookup], [Counting(), *plugins], max_steps=calls + 1)
    result = await Runtime([agent]).run("bench", "go")
    assert result.status == "completed", result.error
    return [b - a for a, b in itertools.pairwise(model.stamps)]


async def deltas(count: int) -> float:
    """Seconds of CPU for `count` deltas to a consumer."""
    runtime = Runtime([Agent("bench", BenchModel(0, count))])
    began = time.process_time()
    seen = 0
    async for event in runtime.stream("bench", "go"):
        seen += event.kind == "text_delta"
    assert seen == count
    return time.process_time() - began


def make_tools() -> list[Callable[..., Any]]:
    """Five fresh functions, so that nothing is remembered from the last time."""

    async def lookup(q: str, limit: int = 3) -> str:
        """Look a term up in the index.

        Args:
            q: The term to look up.
            limit: How many hits to return.
        """
        return q

    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    async def weather(city: str, units: str = "C") -> str:
        """Say what the weather is."""
        return city + units

    async def search(query: str, tags: list[str], top_k: int = 5) -> str:
        """Search the documents."""
        return query

    async def save(title: str, body: str, pinned: bool = False) -> str:
        """Save a note."""
        return title

    return [lookup, add, weather, search, save]


async def build_and_run(rounds: int) -> float:
    """Seconds of CPU to make an agent with five tools and run it once."""
    began = time.process_time()
    for _ in range(rounds):
        result = await Runtime([Agent("bench", BenchModel(), "Help.", make_tools())]).run("bench", "go")
        assert result.status == "completed", result.error
    return (time.process_time() - began) / rounds
