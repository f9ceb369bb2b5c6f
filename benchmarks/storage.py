"""Bytes that a database keeps for each byte said, once all logs are packed, and how long it takes to read a log.

All text is random base85, of which no coder keeps less than 0.80 bytes a byte. A message that a model reads counts once.
Each case is measured at a size and at four times that size: the slope between both shows whatever grows with the square.
"""

from __future__ import annotations

import asyncio
import base64
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from retinue import Agent, CallChunk, Child, Limits, ModelRequest, Runtime, TextChunk, ToolContext, TurnEnd, tool
from retinue.models import ModelChunk
from retinue.storage.packer import Packer
from retinue.storage.postgres import PostgresStore
from retinue.storage.sql import SqlStore

PIECE, PAUSE = 4, 0.010
"""The characters of a piece, and the longest pause between two pieces of a child."""
HISTORY, RESULT, QUESTION, ANSWER, TASK = 400_000, 5_000, 500, 4_500, 100
MOST, MOST_OF_TURNS = 1.5, {"PostgreSQL": 2.0}
"""The goals: bytes for a byte said."""


def text(size: int) -> str:
    return base64.b85encode(random.randbytes(size * 4 // 5)).decode()


class Talker:
    """Makes so many calls, one a step, and then says something in small pieces."""

    name = "bench:talker"

    def __init__(self, calls: int = 0, pause: float = 0.0, size: int = ANSWER, tool: str = "look") -> None:
        self._calls, self._pause, self._size, self._tool = calls, pause, size, tool

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        made = sum(message.role == "tool" for message in request.messages)
        if made < self._calls:
            yield CallChunk(0, f"call_{made}", self._tool, "{}")
            yield TurnEnd("tool_calls")
            return
        said = text(self._size)
        for first in range(0, len(said), PIECE):
            yield TextChunk(said[first : first + PIECE])
            if self._pause:
                await asyncio.sleep(random.uniform(0.0, self._pause))
        yield TurnEnd()


@tool
def look() -> str:
    """Look."""
    return text(RESULT)


async def calls(runtime: Runtime, count: int) -> int:
    """Many calls in one run, after a long message."""
    agent = Agent("a", Talker(count, size=TASK), tools=[look], max_steps=count + 1)
    await runtime.run(agent, text(HISTORY))
    return HISTORY + count * RESULT + TASK


async def only_calls(runtime: Runtime, count: int) -> int:
    """Many calls in one run, after a short message."""
    agent = Agent("a", Talker(count, size=TASK), tools=[look], max_steps=count + 1)
    await runtime.run(agent, text(TASK))
    return TASK + count * RESULT + TASK


async def turns(runtime: Runtime, count: int) -> int:
    """Many runs on one thread, streamed."""
    agent = Agent("a", Talker())
    for _ in range(count):
        await runtime.run(agent, text(QUESTION), thread_id="t")
    return count * (QUESTION + ANSWER)


async def children(runtime: Runtime, count: int) -> int:
    """Many children that talk at the same time, their pieces in random order."""
    child = Agent("child", Talker(pause=PAUSE, size=RESULT))

    @tool
    async def ask(ctx: ToolContext) -> list[str]:
        """Ask many."""
        found = await ctx.run_children([Child(child, text(TASK)) for _ in range(count)])
        return [result.response or "" for result in found]

    agent = Agent("a", Talker(1, size=TASK, tool="ask"), tools=[ask], limits=Limits(children=count, parallel=count))
    await runtime.run(agent, text(TASK))
    return count * (TASK + RESULT) + 2 * TASK


Case = Callable[[Runtime, int], Awaitable[int]]
CASES: dict[str, tuple[Case, int]] = {
    "100 calls of 5 KB after 400 KB": (calls, 100),
    "200 calls of 5 KB": (only_calls, 200),
    "50 turns on a thread": (turns, 50),
    "100 children at the same time": (children, 100),
}


class Kept(NamedTuple):
    """What one database keeps of one case."""

    said: int
    kept: int
    hot: float
    """Seconds to read all logs as they were written, and packed."""
    packed: float


async def measure(url: str, case: Case, count: int) -> Kept:
    async with Runtime.open(url) as runtime:
        store: Any = runtime.store
        assert isinstance(store, SqlStore)
        vars(runtime)["_packing"][1].cancel()  # what was written is read first
        said = await case(runtime, count)
        hot = await read_all(store)
        await Packer(store).sweep()
        return Kept(said, await size_of(store), hot, await read_all(store))


async def read_all(store: SqlStore) -> float:
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for (log_id,) in await store.database.rows("SELECT log_id FROM logs"):
            last = 0
            while (page := await store.read_events(log_id, last)) is not None and page[0]:
                last = page[0][-1].seq
        best = min(best, time.perf_counter() - began)
    return best


async def size_of(store: SqlStore) -> int:
    """Return the bytes that a database takes, without those that are free in it."""
    if isinstance(store, PostgresStore):
        address: Any = vars(store.database)["_address"]
        with address.connect() as connection:
            connection.execute("VACUUM FULL")
            query = "SELECT SUM(pg_total_relation_size(c.oid)) FROM pg_class c WHERE relnamespace = to_regnamespace(%s)"
            row: Any = connection.execute(f"{query} AND relkind = 'r'".encode(), [address.schema]).fetchone()
            return int(row[0])
    parts = [await store.database.value(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size")]
    return (parts[0] - parts[1]) * parts[2]


async def _nothing(runtime: Runtime, count: int) -> int:
    return 0


async def _collect(new_url: Callable[[], str], name: str) -> None:
    empty = (await measure(new_url(), _nothing, 0)).kept
    for what, (case, count) in CASES.items():
        random.seed(what)
        sys.stderr.write(f"{name}: {what}\n")
        small, large = await measure(new_url(), case, count), await measure(new_url(), case, 4 * count)
        slope = (large.kept - small.kept) / (large.said - small.said)
        goal = MOST_OF_TURNS.get(name, MOST) if case is turns else MOST
        print(
            f"{name:11}{what:32}{small.said / 1e6:8.2f} MB{small.kept / small.said:9.2f}"
            f"{(small.kept - empty) / small.said:12.2f}{slope:9.2f}   (at most {goal}){small.hot * 1e3:10.0f}{small.packed * 1e3:10.0f}"
        )


def show() -> None:
    """Measure both databases, and print bytes kept for a byte said."""
    from tests.databases import postgres_server

    print(f"{'':43}{'said':>11}{'bytes/B':>9}{'less empty':>12}{'slope':>9}{'':18}{'read, ms':>10}{'packed':>10}")
    with tempfile.TemporaryDirectory() as root, postgres_server() as server:
        count = iter(range(10_000))
        asyncio.run(_collect(lambda: f"sqlite:///{Path(root) / str(next(count))}.db", "SQLite"))
        asyncio.run(_collect(server.url, "PostgreSQL"))
