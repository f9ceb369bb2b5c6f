"""The orphan test: a process is killed that has hundreds of runs, and several nodes that start together continue them.

Each run ends once, as it would have ended; what waits for a human goes on waiting; a cancel that nobody heard is heard.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from retinue import Agent, Runtime, ToolContext, ToolResult, tool
from retinue.core.stores import Wish
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, call, fail, say

from ..databases import postgres_server
from ..prepared import PYTHON

ENDS = {
    "works": "completed",
    "fails": "failed",
    "delegates": "completed",
    "asks": "suspended",
    "goes on for ever": "failed",
    "is cancelled": "cancelled",
}
"""What runs do, and how each kind ends."""
KINDS = tuple(ENDS)
DEADLINE = 120.0


def agents(folder: Path, node: str, pause: float) -> list[Agent]:
    """One agent for each kind, and a helper."""

    @tool
    async def note(text: str, ctx: ToolContext) -> str:
        """Append a line: an effect that must not happen twice."""
        await asyncio.sleep(random.uniform(0, pause))
        with (folder / "effects.txt").open("a") as file:
            file.write(f"{ctx.run.run_id} {text} {node}\n")
        return f"noted {text}"

    @tool
    async def ask() -> ToolResult:
        """Ask a human."""
        return ToolResult.suspended("may I?")

    def turns(*said: Any) -> ScriptedModel:
        def decide(request: Any) -> Any:
            turn = sum(message.role == "assistant" for message in request.messages)
            return said[min(turn, len(said) - 1)]

        return ScriptedModel(decide)

    def notes(*texts: str) -> list[Any]:
        return [call("note", {"text": text}) for text in texts]

    helper = Agent("helper", turns(*notes("h1", "h2"), say("helped")), "You help.", [note])
    task = call("task", {"subagent_type": "helper", "description": "help"})
    scripts: dict[str, tuple[Any, ...]] = {
        "works": (*notes("w1", "w2", "w3"), say("done")),
        "fails": (*notes("f1", "f2"), fail(RuntimeError("it cannot be done"))),
        "delegates": (*notes("d1"), task, say("done")),
        "asks": (*notes("a1"), call("ask"), say("done")),
        "goes on for ever": (*notes("g1"),),
        "is cancelled": (*notes("c1", "c2"), say("done")),
    }
    return [
        Agent(
            name_of(kind),
            turns(*script),
            "You work.",
            [note, ask],
            subagents=[helper] if kind == "delegates" else [],
            max_steps=4,
        )
        for kind, script in scripts.items()
    ]


def name_of(kind: str) -> str:
    return kind.replace(" ", "-")


async def begin(folder: Path, url: str, count: int, pause: float) -> None:
    """Start the runs and be killed while they work."""
    async with Runtime.open(url, agents(folder, "first", pause)) as runtime:
        runs = [(runtime.stream(name_of(KINDS[n % len(KINDS)]), "go"), KINDS[n % len(KINDS)]) for n in range(count)]
        for run, _ in runs:
            while await runtime.store.load_run(run.run_id) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        lines = [f"{run.run_id} {kind}" for run, kind in runs]
        (folder / "runs.new").write_text("\n".join(lines))
        (folder / "runs.new").rename(folder / "runs")
        await asyncio.gather(*[run.result() for run, _ in runs])


async def work(folder: Path, url: str, node: str, pause: float) -> None:
    """Continue what can be continued, until everything has ended or waits."""
    run_ids = [line.split()[0] for line in (folder / "runs").read_text().splitlines()]
    while not (folder / "go").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    async with Runtime.open(url, agents(folder, node, pause), on_close="leave") as runtime:
        for run_id in run_ids:
            await runtime.result(run_id)
            while (await runtime.store.load_run(run_id)).result is None:  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.02)


class Broken(AssertionError):
    """A run was lost, ended twice, or ended differently."""


def start(folder: Path, *args: object) -> subprocess.Popen[bytes]:
    command = [PYTHON, "-m", "tests.durability.orphans", *map(str, args)]
    with (folder / "stderr.txt").open("ab") as said:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)


def play(folder: Path, url: str, count: int, nodes: int, seed: int) -> Counter[str]:
    """Start runs, kill their process, let nodes continue them together, and check every end."""
    chance, pause = random.Random(seed), 4.0
    first = start(folder, "begin", folder, url, count, pause)
    _wait_for(folder / "runs", first, folder)
    time.sleep(chance.uniform(0.0, 0.3))
    first.kill()
    first.wait()
    kinds = dict([line.split(" ", 1) for line in (folder / "runs").read_text().splitlines()])
    asyncio.run(_put_cancels(url, kinds))
    running = [start(folder, "work", folder, url, f"node-{number}", 0.02) for number in range(nodes)]
    time.sleep(0.5)
    began = time.monotonic()
    (folder / "go").touch()
    try:
        for process in running:
            if process.wait(DEADLINE) != 0:
                raise Broken(f"a node failed: {(folder / 'stderr.txt').read_text()[-2000:]}")
    except subprocess.TimeoutExpired:
        raise Broken(f"no end after {DEADLINE:g} s: {(folder / 'stderr.txt').read_text()[-2000:]}") from None
    finally:
        for process in running:
            process.kill()
            process.wait()
    counts = asyncio.run(check(folder, url, kinds))
    counts["milliseconds"] = int(1000 * (time.monotonic() - began))
    return counts


def _wait_for(path: Path, process: subprocess.Popen[bytes], folder: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise Broken(f"the runs did not start: {(folder / 'stderr.txt').read_text()[-2000:]}")
        time.sleep(0.002)


async def _put_cancels(url: str, kinds: dict[str, str]) -> None:
    """Ask for cancels that nobody hears yet."""
    store: Any = open_store(url)
    await store.open()
    for run_id, kind in kinds.items():
        if kind == "is cancelled":
            await store.put_wish(Wish(log_id=run_id, wish_id=f"w-{run_id}", run_id=run_id, kind="cancel", body=b""))
    await store.close()


async def check(folder: Path, url: str, kinds: dict[str, str]) -> Counter[str]:
    """Every run ended once, as it should, continued by one node, with no effect twice."""
    store: Any = open_store(url)
    await store.open()
    counts: Counter[str] = Counter(runs=len(kinds))
    lines = [line.split() for line in (folder / "effects.txt").read_text().splitlines()]
    twice = [key for key, times in Counter((run_id, text) for run_id, text, _ in lines).items() if times > 1]
    try:
        for run_id, kind in kinds.items():
            record = await store.load_run(run_id)
            stored = await store.read_log(run_id)
            events = [row.event for row in stored.rows if row.event is not None]
            ends = [event.status.value for event in events if event.kind == "run_finished" and event.run_id == run_id]
            owners = sum(row.private is not None and row.private.kind == "resumed" for row in stored.rows)
            ended_before = owners == 0
            unknown = {event.tool_name for event in events if "outcome unknown" in str(getattr(event, "result", ""))}
            wanted = {"completed"} if kind == "asks" and "ask" in unknown else {ENDS[kind]}
            if kind == "is cancelled" and ended_before:
                wanted |= {"completed"}
            _need(record.status in wanted, f"{kind} {run_id} is {record.status}")
            _need(len(ends) == 1 and ends[0] in wanted, f"{kind} {run_id} ended as {ends}")
            # A node with an old list may look at a run that waits, and leave it as it is.
            _need(owners <= 1 or kind == "asks", f"{kind} {run_id} was continued {owners} times")
            _need(stored.ended == (record.status != "suspended"), f"{kind} {run_id}: has its log ended? {stored.ended}")
            _need(await store.owner_of(run_id) is None, f"{kind} {run_id} still has an owner")
            counts.update({record.status: 1, "continued": owners})
            counts["unknown"] += sum("outcome unknown" in str(getattr(event, "result", "")) for event in events)
    finally:
        await store.close()
    repeated = [key for key in twice if kinds.get(key[0]) not in ("goes on for ever",)]
    _need(not repeated, f"happened twice: {repeated[:5]}")
    by_node = Counter(node for _, _, node in lines)
    counts.update({f"effects of {node}": times for node, times in by_node.items()})
    return counts


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/orphan-test", description=__doc__)
    parser.add_argument("--runs", type=int, default=500, metavar="N", help="orphaned runs (500)")
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes that start together (3)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often, on each kind of store (1)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="for the moment of the kill")
    asked = parser.parse_args()
    sys.stdout.write(f"seed {asked.seed}\n")
    try:
        with postgres_server() as server:
            for number in range(asked.rounds):
                for name in ("SQLite", "PostgreSQL"):
                    with tempfile.TemporaryDirectory(prefix="retinue-orphans-") as folder:
                        url = f"sqlite:///{folder}/app.db" if name == "SQLite" else server.url()
                        counts = play(Path(folder), url, asked.runs, asked.nodes, asked.seed + number)
                        sys.stdout.write(f"{name}: {dict(counts)}\n")
                        sys.stdout.flush()
    except Broken as exc:
        sys.stdout.write(f"BROKEN: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in ("begin", "work"):
        logging.disable(logging.ERROR if os.environ.get("QUIET") else logging.NOTSET)
        _, role, where, at, given, takes = sys.argv
        job = (
            begin(Path(where), at, int(given), float(takes))
            if role == "begin"
            else work(Path(where), at, given, float(takes))
        )
        asyncio.run(job)
    else:
        sys.exit(main())
