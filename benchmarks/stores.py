"""What keeping everything costs: runs a second, a step, a stream of tokens, and reading it all back.

A durable step is one that is stored before the next begins; PostgreSQL waits for the disk (fsync), SQLite only with
durability="full".
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import crowd, killed
from benchmarks.models import serving
from benchmarks.stream_server import EVENTS
from retinue import Agent, CallChunk, ModelRequest, Runtime, TextChunk, TurnEnd, tool
from retinue.core.events import TextDelta
from retinue.core.rows import LogRow
from retinue.core.runs import RunIdentity
from retinue.core.stores import Durability, LogBatch, RunRecord
from retinue.models import ModelChunk, open_model
from retinue.storage.stores import open_store

RUNS, AT_ONCE, CALLS = 640, 32, 3
STEPS, DELTAS = 200, 200_000
LONG, MANY = 100_000, 1_000_000

GOALS = {"runs a second, memory": 5_000, "runs a second, SQLite": 1_000, "runs a second, PostgreSQL": 400}
"""At least so many; and at most so many milliseconds:"""
LIMITS = {f"a killed run continued, {name}, ms": 1_000 for name in ("SQLite", "PostgreSQL")}

Url = Callable[[], str]


class Caller:
    """Asks for so many tool calls, one a step, and then answers."""

    name = "bench:caller"

    def __init__(self, calls: int) -> None:
        self._calls = calls

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        made = sum(message.role == "tool" for message in request.messages)
        if made < self._calls:
            yield CallChunk(0, f"call_{made}", "look", '{"key":"a"}')
            yield TurnEnd("tool_calls")
        else:
            yield TextChunk("done")
            yield TurnEnd()


class Talker:
    """Says a lot, in small pieces, as a network would bring them."""

    name = "bench:talker"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        for number in range(DELTAS):
            if number % 10 == 0:
                await asyncio.sleep(0)
            yield TextChunk("token ")
        yield TurnEnd()


@tool
async def look(key: str) -> dict[str, str]:
    """Look something up."""
    return {"found": key}


def caller(calls: int) -> Agent:
    return Agent("caller", Caller(calls), tools=[look], max_steps=calls + 2)


async def runs_a_second(url: str) -> float:
    """Whole runs of three calls each, 32 at once, by the wall clock."""
    agent = caller(CALLS)
    async with Runtime.open(url, [agent], recover=False) as runtime:
        await asyncio.gather(*[runtime.run("caller", "go") for _ in range(AT_ONCE)])
        left = iter(range(RUNS))

        async def work() -> None:
            for _ in left:
                result = await runtime.run("caller", "go")
                assert result.response == "done"

        began = time.perf_counter()
        await asyncio.gather(*[work() for _ in range(AT_ONCE)])
        return RUNS / (time.perf_counter() - began)


async def a_step(url: str, durability: Durability = "process") -> float:
    """Microseconds a step takes where nothing else goes on, by the wall clock."""
    async with Runtime.open(url, [caller(STEPS)], durability=durability, recover=False) as runtime:
        await runtime.run("caller", "go")
        began = time.perf_counter()
        await runtime.run("caller", "go")
        return (time.perf_counter() - began) / STEPS * 1e6


async def a_token(url: str) -> float:
    """Microseconds a streamed token takes to a consumer, by the wall clock."""
    async with Runtime.open(url, [Agent("talker", Talker())], recover=False) as runtime:
        began = time.perf_counter()
        run = runtime.stream("talker", "go")
        seen = [event async for event in run]
        took = time.perf_counter() - began
        assert len(seen) > DELTAS
        await run.result()
    return took / DELTAS * 1e6


async def a_token_from_afar(url: str, server: str) -> float:
    """Microseconds a token takes that a model streams over HTTP, by the wall clock."""
    model: Any = open_model("openai-chat:m", base_url=f"{server}/v1", api_key="k")

    @tool
    def note(text: str) -> str:
        """Take a note."""
        return "ok"

    async with Runtime.open(url, [Agent("a", model, tools=[note], max_steps=1)], recover=False) as runtime:
        began = 0.0
        for number in range(4):
            if number == 1:  # the first fills caches
                began = time.perf_counter()
            assert len([event async for event in runtime.stream("a", "go")]) > EVENTS
        took = time.perf_counter() - began
    await model.aclose()
    return took / 3 / EVENTS * 1e6


async def fill(url: str, logs: int, events: int) -> list[str]:
    """Logs of so many events each, written as a runtime writes them."""
    store: Any = open_store(url)
    await store.open()
    for number in range(logs):
        identity = RunIdentity(f"run_{number}", f"thread_{number}", "talker")
        record = RunRecord(identity=identity, started_at=time.time())
        await store.begin_run(record, b"{}", "bench", 1e6)
        for first in range(0, events, 10_000):
            last = min(first + 10_000, events)
            batch = [
                TextDelta(delta="token ", message_id="m1", seq=seq + 1, at=1.0, run_id=identity.run_id, agent="talker")
                for seq in range(first, last)
            ]
            rows = [LogRow(event.seq, 0, event) for event in batch]
            await store.write(LogBatch(log_id=identity.run_id, epoch=1, rows=rows, ended=last == events))
    await store.close()
    return [f"run_{number}" for number in range(logs)]


async def replay(url: str) -> float:
    """Events a second, of a long log, through the same door as a user's."""
    (run_id,) = await fill(url, 1, LONG)
    async with Runtime.open(url) as runtime:
        began = time.perf_counter()
        seen = 0
        async for _ in runtime.events(run_id):
            seen += 1
        took = time.perf_counter() - began
    assert seen == LONG
    return LONG / took


async def taken_up(url: str) -> float:
    """Milliseconds to continue a run of a thousand children, of which half had worked when it was killed."""
    died = subprocess.run(
        [sys.executable, "-m", "benchmarks.crowd", url], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    began = time.perf_counter()
    async with Runtime.open(url, crowd.agents()) as runtime:
        result = await runtime.result(died.stdout.strip())
        took = time.perf_counter() - began
    assert result.response == "done", result
    return took * 1e3


async def large(url: str) -> tuple[float, float]:
    """Milliseconds to open a database of a million events, and to list its newest runs."""
    await fill(url, 1_000, MANY // 1_000)
    began = time.perf_counter()
    async with Runtime.open(url) as runtime:
        opened = time.perf_counter()
        assert len(await runtime.store.list_runs(limit=50)) == 50
        return (opened - began) * 1e3, (time.perf_counter() - opened) * 1e3


@contextmanager
def stores() -> Iterator[dict[str, Url]]:
    """How to get an empty store of each kind."""
    from tests.databases import postgres_server

    with tempfile.TemporaryDirectory() as root, postgres_server(fsync=True) as server:
        count = iter(range(10_000))
        yield {
            "memory": lambda: "memory:",
            "SQLite": lambda: f"sqlite:///{Path(root) / str(next(count))}.db",
            "PostgreSQL": lambda: server.url(),
        }


def show(rounds: int) -> None:
    """Measure everything, and print it with what it is held against."""
    told: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        told.setdefault(what, []).append(value)

    with stores() as kinds, serving() as server:
        for number in range(rounds):
            sys.stderr.write(f"round {number + 1} of {rounds}\n")
            for name, url in kinds.items():
                note(f"runs a second, {name}", asyncio.run(runs_a_second(url())))
                note(f"a step, {name}, µs", asyncio.run(a_step(url())))
                note(f"a token, {name}, µs", asyncio.run(a_token(url())))
                for pace in ("burst", "paced"):
                    told_by = f"{server}/{pace}"
                    note(f"a token over HTTP, {pace}, {name}, µs", asyncio.run(a_token_from_afar(url(), told_by)))
            note("a step, SQLite, durability=full, µs", asyncio.run(a_step(kinds["SQLite"](), "full")))
        for name in ("SQLite", "PostgreSQL"):
            note(f"events a second read back, {name}", asyncio.run(replay(kinds[name]())))
            note(f"{crowd.CHILDREN:,} children continued, {name}, ms", asyncio.run(taken_up(kinds[name]())))
            note(f"a killed run continued, {name}, ms", asyncio.run(killed.resumed(kinds[name]())))
        opened, listed = asyncio.run(large(kinds["SQLite"]()))
        note("a million events opened, SQLite, ms", opened)
        note("and its runs listed, ms", listed)
    middle = {what: statistics.median(values) for what, values in told.items()}
    for what, values in told.items():
        each = ", ".join([f"{value:,.0f}" for value in values])
        goal = f"  goal: {GOALS[what]:,} or more" if what in GOALS else ""
        goal = f"  goal: {LIMITS[what]:,} or less" if what in LIMITS else goal
        print(f"{what:44} {middle[what]:12,.1f}   ({each}){goal}")
    bare = middle["a step, memory, µs"]
    for name in ("SQLite", "SQLite, durability=full", "PostgreSQL"):
        kept = middle[f"a step, {name}, µs"]
        waits = ", with fsync" if name != "SQLite" else ""
        print(f"{name}: a durable step takes {kept / 1e3:.2f} ms{waits} ({kept / bare:.1f}x of one in memory)")
    for name in ("SQLite", "PostgreSQL"):
        for what in ("a token", "a token over HTTP, burst", "a token over HTTP, paced"):
            print(f"{name}: {what} takes {middle[f'{what}, {name}, µs'] / middle[f'{what}, memory, µs']:.2f}x")
