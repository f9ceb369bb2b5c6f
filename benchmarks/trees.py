"""Delegation: a parent, its children and what they stream, on both sides."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.floor import FloorRun
from benchmarks.floor import lookup as floor_lookup
from benchmarks.ours import Counting, lookup
from retinue import Agent, CallChunk, Limits, ModelRequest, Runtime, TextChunk, TurnEnd
from retinue.models import ModelChunk

WIDE = Limits(children=1_000_000)
KEPT = 1_000


class Script:
    """What both sides' models do: the parent asks `k` children at once, a child may look something up, and answers."""

    def __init__(self, k: int = 1, lookups: bool = False, latency: float = 0.0, deltas: int = 1) -> None:
        self.k, self.lookups, self.latency, self.deltas = k, lookups, latency, deltas


class ParentModel:
    name = "bench:parent"

    def __init__(self, script: Script) -> None:
        self.script = script

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if self.script.latency:
            await asyncio.sleep(self.script.latency)
        if request.messages[-1].role == "tool":
            yield TextChunk("done")
        else:
            for n in range(self.script.k):
                arguments = f'{{"subagent_type":"child","description":"item {n}"}}'
                yield CallChunk(n, f"call_{n}", "task", arguments)
        yield TurnEnd()


class ChildModel:
    name = "bench:child"

    def __init__(self, script: Script) -> None:
        self.script = script

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        script = self.script
        if script.latency:
            await asyncio.sleep(script.latency)
        if script.lookups and request.messages[-1].role == "user":
            yield CallChunk(0, "call_x", "lookup", '{"q":"item","limit":3}')
        else:
            for _ in range(script.deltas):
                yield TextChunk("tok ")
        yield TurnEnd()


def make_ours(script: Script) -> Runtime:
    child = Agent("child", ChildModel(script), "You look things up.", [lookup], [Counting()])
    return Runtime([Agent("parent", ParentModel(script), "You delegate.", subagents=[child])])


async def run_ours(runtime: Runtime) -> int:
    """One run, its events counted by a consumer; returns the deltas that were attributed to a child."""
    seen = 0
    run = runtime.stream("parent", "go", limits=WIDE)
    async for event in run:
        if event.kind == "text_delta" and event.ns:
            seen += 1
    result = await run.result()
    assert result.status == "completed", result.error
    return seen


class FloorTree:
    """The same by hand: children in a gather, events in one list."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def parent_model(self, messages: list[Any]) -> AsyncIterator[tuple[str, Any]]:
        if self.script.latency:
            await asyncio.sleep(self.script.latency)
        yield "text", "done"

    async def child_model(self, messages: list[Any]) -> AsyncIterator[tuple[str, Any]]:
        script = self.script
        if script.latency:
            await asyncio.sleep(script.latency)
        if script.lookups and messages[-1]["role"] == "user":
            yield "call", ("call_x", "lookup", '{"q":"item","limit":3}')
        else:
            for _ in range(script.deltas):
                yield "text", "tok "

    async def run(self) -> int:
        events: list[Any] = []
        if self.script.latency:
            await asyncio.sleep(self.script.latency)
        runs = [FloorRun(self.child_model, {"lookup": floor_lookup}, events.append) for _ in range(self.script.k)]
        await asyncio.gather(*[run.run("item") for run in runs])
        await FloorRun(self.parent_model, {}, events.append).run("go")
        return sum(event.kind == "text_delta" for event in events) - 1


async def cpu(work: Any, times: int) -> float:
    """CPU seconds of one call, over several."""
    gc.collect()
    began = time.process_time()
    for _ in range(times):
        await work()
    return (time.process_time() - began) / times


async def wall(work: Any) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def measure(side: str, script: Script, times: int = 1, clock: str = "cpu", before: int = 0) -> float:
    """Seconds of one run on one side, after so many others."""
    if side == "ours":
        runtime = make_ours(script)

        async def work() -> int:
            return await run_ours(runtime)
    else:
        tree = FloorTree(script)

        async def work() -> int:
            return await tree.run()

    seen = await work()  # warm
    assert seen >= script.k * script.deltas - 1
    for _ in range(before):
        await work()
    return await (wall(work) if clock == "wall" else cpu(work, times))


def peak_per_child(k: int) -> float:
    """KB of memory a child takes at the peak of a run with k of them, in a fresh process."""
    import subprocess
    import sys

    code = f"""
import asyncio, gc
from benchmarks import trees
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
async def main():
    await trees.measure("ours", trees.Script(k=3, lookups=True))
    runtime = trees.make_ours(trees.Script(k={k}, lookups=True))
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    await trees.run_ours(runtime)
    print((peak() - before) / {k})
asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(out.stdout)


def one_round(side: str) -> dict[str, float]:
    """One measurement of everything, on one side."""

    def run(script: Script, times: int = 1, clock: str = "cpu") -> float:
        return asyncio.run(measure(side, script, times, clock))

    found = {"parent → child → answer": run(Script(), 200) * 1e6}
    found[f"the same, {KEPT:,} ended runs kept"] = asyncio.run(measure(side, Script(), 200, before=KEPT)) * 1e6
    for k, times in ((1, 100), (10, 20), (100, 3), (1_000, 1), (10_000, 1)):
        found[f"a child of {k:,} with a tool call"] = run(Script(k=k, lookups=True), times) / k * 1e6
    found["1,000 children, model takes 50 ms"] = run(Script(k=1_000, lookups=True, latency=0.05), clock="wall") * 1e3
    found["a child's delta to the parent's consumer"] = run(Script(deltas=5_000)) / 5_000 * 1e6
    return found


GOALS = {
    "parent → child → answer": (100, "µs"),
    f"the same, {KEPT:,} ended runs kept": (100, "µs"),
    "a child of 1 with a tool call": (100, "µs"),
    "a child of 10 with a tool call": (100, "µs"),
    "a child of 100 with a tool call": (100, "µs"),
    "a child of 1,000 with a tool call": (100, "µs"),
    "a child of 10,000 with a tool call": (100, "µs"),
    "1,000 children, model takes 50 ms": (1.7, "x"),
    "a child's delta to the parent's consumer": (5, "µs"),
}
