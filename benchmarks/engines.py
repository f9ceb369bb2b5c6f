"""What workers cost: runs a second, the first token, the lag of tokens, and a tree of 1,000 children.

Side by side on one PostgreSQL (without fsync): one process without an engine, one and three workers of the PostgreSQL
engine, and three of Temporal if its server is installed. The client is a process without agents.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from retinue import Agent, Runtime, TextChunk
from retinue.models import CallChunk, ModelChunk, ModelRequest, TurnEnd

ROOT = Path(__file__).resolve().parent.parent
RUNS, FIRST, TICKING, WORDS, CHILDREN = 600, 40, 20, 100, 1_000
TICK = 0.02


class Answer:
    """Answers at once."""

    name = "bench:answer"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        yield TextChunk("done")


class Ticking:
    """Says a word every 20 ms."""

    name = "bench:ticking"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        due = time.monotonic()
        for _ in range(WORDS):
            due += TICK
            await asyncio.sleep(max(due - time.monotonic(), 0))
            yield TextChunk("word ")


class FanOut:
    """Gives work to 1,000 children at once."""

    name = "bench:fan-out"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if any(message.role == "tool" for message in request.messages):
            yield TextChunk("done")
            return
        for number in range(CHILDREN):
            yield CallChunk(number, f"c{number}", "task", '{"subagent_type":"answer","description":"go"}')
        yield TurnEnd("tool_calls")


_answer = Agent("answer", Answer())
agents = [_answer, Agent("ticking", Ticking()), Agent("root", FanOut(), subagents=[_answer])]


@asynccontextmanager
async def workers(number: int, url: str, engine: str) -> AsyncGenerator[None]:
    """Start worker processes."""
    started: list[Process] = []
    command = [sys.executable, "-m", "retinue", "worker", "benchmarks.engines:agents", "--db", url, "--engine", engine]
    try:
        for _ in range(number):
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = await asyncio.create_subprocess_exec(*command, "--slots", "32", stdout=PIPE, env=env, cwd=ROOT)
            started.append(process)
            assert process.stdout is not None
            while (line := await process.stdout.readline()) != b"ready\n":
                if not line:
                    raise RuntimeError("a worker did not start")
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            await process.wait()


async def measure(runtime: Runtime) -> dict[str, float]:
    """Measure through one runtime, which starts the runs and follows them."""
    await asyncio.gather(*[runtime.run("answer", "warm up") for _ in range(32)])
    began, slots = time.perf_counter(), asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with slots:
            await runtime.run("answer", "go", user_id=f"u{number % 5}")

    await asyncio.gather(*[one(number) for number in range(RUNS)])
    found = {"runs a second": RUNS / (time.perf_counter() - began)}
    first: list[float] = []
    for _ in range(FIRST):
        began = time.perf_counter()
        run = runtime.stream("answer", "go")
        async for event in run:
            if event.kind == "text_delta":
                first.append(time.perf_counter() - began)
        await run.result()
    found["first token, ms"] = 1000 * statistics.median(first)
    lags: list[float] = []

    async def follow() -> None:
        async for event in runtime.stream("ticking", "go"):
            if event.kind == "text_delta":
                lags.append(time.time() - event.at)

    await asyncio.gather(*[follow() for _ in range(TICKING)])
    lags.sort()
    found["token lag p50, ms"] = 1000 * lags[len(lags) // 2]
    found["token lag p99, ms"] = 1000 * lags[int(len(lags) * 0.99)]
    began = time.perf_counter()
    await runtime.run("root", "go")
    found[f"{CHILDREN:,} children, s"] = time.perf_counter() - began
    return found


@asynccontextmanager
async def temporal_server() -> AsyncGenerator[str | None]:
    """Start a Temporal server, if one is installed; yield its address."""
    if not (Path(sys.executable).parent / "temporal").exists():
        yield None
        return
    environment: Any = import_module("temporalio.testing").WorkflowEnvironment

    limits = [f"history.{name}ProcessorMaxPollRPS=2000" for name in ("transfer", "timer", "visibility")]
    options = [word for limit in limits for word in ("--dynamic-config-value", limit)]
    path = str(Path(sys.executable).parent / "temporal")
    async with await environment.start_local(
        dev_server_existing_path=path, dev_server_log_level="error", dev_server_extra_args=options
    ) as server:
        yield f"temporal://{server.client.service_client.config.target_host}/default"


async def _collect(make_url: Callable[[], str]) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    async with Runtime.open(make_url(), agents) as runtime:
        rows["one process"] = await measure(runtime)
    for number in (1, 3):
        url = make_url()
        async with Runtime.open(url, engine="postgres") as runtime, workers(number, url, "postgres"):
            rows[f"PostgreSQL, workers: {number}"] = await measure(runtime)
    async with temporal_server() as address:
        if address is not None:
            url = make_url()
            async with Runtime.open(url, engine=address) as runtime, workers(3, url, address):
                rows["Temporal, workers: 3"] = await measure(runtime)
    return rows


def show() -> None:
    """Print a table."""
    from tests.databases import postgres_server

    with postgres_server() as server:
        rows = asyncio.run(_collect(server.url))
    names = list(next(iter(rows.values())))
    width = max(map(len, names))
    print(" " * width, *[f"{name:>24}" for name in rows])
    for name in names:
        print(f"{name:<{width}}", *[f"{found[name]:>24,.2f}" for found in rows.values()])
