"""The stop test: a process that has many runs is told to end, and another process continues them.

No run is lost or cancelled, no tool runs twice, no model call is made twice, and nothing begins in the process that stops.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retinue import Agent, Runtime, ToolContext, tool
from retinue.core.model import ModelRequest
from retinue.runtime.worker import Worker
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, ScriptedTurn, call, say

from ..databases import postgres_server
from ..prepared import PYTHON

STEPS = 6
LEASE = 3600.0
"""Nobody waits for the end of a lease, nor for a look that comes every half lease."""
DEADLINE = 100.0


def agent(folder: Path, node: str, seconds: float) -> Agent:
    """An agent whose model and tools take their time, and write down that they begin."""

    def note(what: str) -> None:
        with (folder / "begun").open("a") as file:
            file.write(f"{time.time():.4f} {node} {what}\n")

    @tool
    async def step(n: int, ctx: ToolContext) -> str:
        """Make a step."""
        note(f"tool {ctx.run.run_id} {n}")
        await asyncio.sleep(seconds)
        return f"step {n}"

    async def turn(request: ModelRequest) -> ScriptedTurn:
        made = sum(message.role == "assistant" for message in request.messages)
        note(f"model {request.messages[0].text} {made}")
        await asyncio.sleep(seconds / 2)
        return say("done") if made == STEPS else call("step", {"n": made}, id=f"c{made}")

    return Agent("walker", ScriptedModel(turn), tools=[step], max_steps=STEPS + 2)


async def work(folder: Path, url: str, node: str, count: int, engine: str | None, seconds: float) -> None:
    """Work on runs until SIGTERM comes."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    ready = (folder / f"ready-{node}").touch
    async with Runtime.open(url, [agent(folder, node, seconds)], lease=LEASE, engine=engine) as runtime:
        runs = [runtime.stream("walker", f"go-{n}", queue=None) for n in range(count)]
        for run in runs:
            await run.stored()
        (folder / f"runs-{node}").write_text("\n".join(run.run_id for run in runs))
        if engine is None:
            ready()
            await stop.wait()
        else:
            await Worker(runtime, slots=1000).run(stop, ready)


class Broken(AssertionError):
    """A run was lost, or something happened twice."""


def start(folder: Path, url: str, node: str, count: int, engine: str | None, seconds: float) -> subprocess.Popen[bytes]:
    given = [str(folder), url, node, str(count), engine or "-", str(seconds)]
    command = [PYTHON, "-m", "tests.durability.stops", "work", *given]
    with (folder / "stderr.txt").open("ab") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
    until(folder, [process], (folder / f"ready-{node}").exists)
    return process


def until(folder: Path, processes: Sequence[subprocess.Popen[bytes]], holds: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not holds():
        ended = [process.poll() for process in processes if process.poll() is not None]
        if ended or time.monotonic() > end:
            raise Broken(f"{ended or 'no end'}: {(folder / 'stderr.txt').read_text()[-2000:]}")
        time.sleep(0.01)


def begun(folder: Path) -> list[list[str]]:
    path = folder / "begun"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def play(folder: Path, url: str, count: int, engine: str | None = None, seconds: float = 0.3) -> dict[str, Any]:
    """Stop the first process when every run has made a step, and check what the second has made of the runs."""
    processes = [start(folder, url, "first", count, engine, seconds)]
    run_ids = (folder / "runs-first").read_text().split()
    try:
        until(folder, processes, lambda: len({line[3] for line in begun(folder) if line[2] == "tool"}) == count)
        processes.append(start(folder, url, "second", 0, engine, seconds))
        told = time.time()
        processes[0].send_signal(signal.SIGTERM)
        if (code := processes[0].wait(DEADLINE)) != 0:
            raise Broken(f"it ended with {code}: {(folder / 'stderr.txt').read_text()[-2000:]}")
        ended = time.time()
        found = asyncio.run(results(url, run_ids, folder, processes[1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = begun(folder)
    twice = [
        what for what, times in Counter(tuple(line[2:]) for line in lines if line[2] == "tool").items() if times > 1
    ]
    need(not twice, f"ran twice: {twice[:5]}")
    late = [float(line[0]) - told for line in lines if line[1] == "first" and float(line[0]) > told]
    calls = sum(line[2] == "model" for line in lines)
    need(calls == count * (STEPS + 1), f"{calls} model calls for {count * (STEPS + 1)} answers")
    return {**found, "stopped_after": ended - told, "last_begin_after": max(late, default=0.0)}


async def results(url: str, run_ids: list[str], folder: Path, second: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Wait for the ends, and return how many runs moved and after how many seconds they were continued."""
    store: Any = open_store(url)
    await store.open()
    waits, moved = list[float](), 0
    try:
        end = time.monotonic() + DEADLINE
        for run_id in run_ids:
            while (record := await store.load_run(run_id)).result is None:
                need(second.poll() is None, (folder / "stderr.txt").read_text()[-2000:])
                need(time.monotonic() < end, f"run {run_id} is lost")
                await asyncio.sleep(0.05)
            need(record.status == "completed", f"run {run_id} is {record.status}: {record.result.error}")
            rows, before = (await store.read_log(run_id)).rows, 0.0
            for row in rows:
                if row.private is not None and row.private.kind == "resumed" and row.private.at and before:
                    moved += 1
                    waits.append(row.private.at - before)
                if row.event is not None:
                    need(row.event.kind != "error", f"run {run_id}: {row.event}")
                    before = row.event.at
    finally:
        await store.close()
    ordered = sorted(waits) or [0.0]
    return {"runs": len(run_ids), "moved": moved, "median": ordered[len(ordered) // 2], "longest": ordered[-1]}


def need(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/stop-test", description=__doc__)
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="runs at work (200)")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="how long a tool takes (1)")
    asked = parser.parse_args()
    try:
        with postgres_server() as server:
            for name, engine in (("SQLite", None), ("PostgreSQL", None), ("engine in PostgreSQL", "postgres")):
                with tempfile.TemporaryDirectory(prefix="retinue-stops-") as folder:
                    url = f"sqlite:///{folder}/app.db" if name == "SQLite" else server.url()
                    found = play(Path(folder), url, asked.runs, engine, asked.seconds)
                    sys.stdout.write(f"{name}: { ({key: round(value, 2) for key, value in found.items()}) }\n")
                    sys.stdout.flush()
    except Broken as exc:
        sys.stdout.write(f"BROKEN: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        where, at, name_, number, scheduler, takes = sys.argv[2:]
        asyncio.run(work(Path(where), at, name_, int(number), None if scheduler == "-" else scheduler, float(takes)))
    else:
        sys.exit(main())
