"""The plug test: kill the process of a tree of agents again and again, and see that nothing was lost or done twice."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retinue.storage.urls import open_store

from ..databases import postgres_server

EFFECTS = sorted([f"{x}-{n}" for x in ("A", "B", "C", "D", "help", "boss") for n in (1, 2)])
ANSWER = "A done, B done, C done; D done"
PAUSE = 0.06
DEADLINE = 60.0
"""Seconds in which a round must have come to its end."""


class Broken(AssertionError):
    """Something was lost, or happened twice."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def start(folder: Path, url: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.durability.tree", str(folder), url, str(PAUSE)]
    with (folder / "stderr.txt").open("ab") as said:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)


def one_round(folder: Path, url: str, seed: int, nodes: int = 1) -> int:
    """Kill and restart until the tree has come to its end; how often it was killed."""
    chance, kills, deadline = random.Random(seed), 0, time.monotonic() + DEADLINE
    first = start(folder, url)
    while not (folder / "run_id").exists():
        need(first.poll() is None and time.monotonic() < deadline, f"the tree did not start: {said(folder)}")
        time.sleep(0.002)
    running = [first, *[start(folder, url) for _ in range(nodes - 1)]]
    try:
        while True:
            need(time.monotonic() < deadline, f"no end after {DEADLINE:g} s: {said(folder)}")
            victim = running[chance.randrange(len(running))]
            try:
                victim.wait(chance.uniform(0.0, 0.9) + 0.4 * bool(kills) + 0.1 * kills)
            except subprocess.TimeoutExpired:
                victim.kill()
                victim.wait()
                kills += 1
                running[running.index(victim)] = start(folder, url)
                continue
            need(victim.returncode == 0, f"a process failed: {said(folder)}")
            return kills
    finally:
        for process in running:
            if process.poll() is None and time.monotonic() < deadline:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    pass
            process.kill()
            process.wait()


def said(folder: Path) -> str:
    return (folder / "stderr.txt").read_text()[-3000:]


def check(folder: Path, url: str) -> Counter[str]:
    """Everything that must hold at the end of a round; counts of what was seen."""
    run_id = (folder / "run_id").read_text()
    lines = Counter((folder / "effects.txt").read_text().splitlines())
    need(sorted(lines) == EFFECTS and set(lines.values()) == {1}, f"effects: {dict(lines)}")
    record, events = asyncio.run(read(url, run_id))
    result = record.result
    need(record.status == "completed", f"the run is {record.status}: {result and result.error}")
    assert result is not None
    need(result.response == ANSWER, f"the answer is {result.response!r}")
    need(tuple(result.state.extensions["plug.notes"]) == ("boss-1", "boss-2"), f"state: {result.state.extensions}")
    need([event.seq for event in events] == list(range(1, len(events) + 1)), "the sequence has a hole or a repeat")
    check_runs(events)
    check_task(folder)
    counts = Counter({"events": len(events), "runs": sum(event.kind == "run_started" for event in events)})
    counts["interrupted"] = sum("outcome unknown" in str(getattr(event, "result", "")) for event in events)
    counts["asked again"] = sum(getattr(event, "code", None) == "interrupted" for event in events)
    return counts


def check_runs(events: list[Any]) -> None:
    """Every run begins once and ends once, completed; every call ends once."""
    mine: dict[str, list[Any]] = {}
    for event in events:
        if event.kind != "task_updated":
            mine.setdefault(event.run_id, []).append(event)
    need(len(mine) == 6, f"{len(mine)} runs instead of 6")
    for run_id, own in mine.items():
        kinds = Counter(event.kind for event in own)
        need(own[0].kind == "run_started" and own[-1].kind == "run_finished", f"{run_id} does not begin or end")
        need(kinds["run_started"] == kinds["run_finished"] == 1, f"{run_id}: {kinds}")
        need(own[-1].status == "completed", f"{run_id} ended as {own[-1].status}: {own[-1].error}")
        ended = Counter(event.call_id for event in own if event.kind == "tool_call_finished")
        need(set(ended.values()) <= {1}, f"{run_id}: a call ended twice: {ended}")
        steps = [event.step for event in own if event.kind == "step_started"]
        need(steps == list(range(1, len(steps) + 1)), f"{run_id}: steps {steps}")
        need(len({event.ns for event in own}) == 1, f"{run_id} changed its place")
    need(len({own[0].ns for own in mine.values()}) == 6, "two runs share a place")


def check_task(folder: Path) -> None:
    found = list(json.loads((folder / "ws/agents/boss/tasks/thread-1.json").read_text()).values())
    need([task["status"] for task in found] == ["COMPLETED"], f"tasks: {found}")
    need(found[0]["result"] == "D done", f"the task's result: {found[0]}")


async def read(url: str, run_id: str) -> tuple[Any, list[Any]]:
    store: Any = open_store(url)
    try:
        record = await store.load_run(run_id)
        events: list[Any] = []
        while batch := (await store.read_events(run_id, len(events), 10_000))[0]:
            events.extend(batch)
        need(await store.open_logs() == [], f"somebody still owns a log: {await store.open_logs()}")
        return record, events
    finally:
        await store.close()


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def rounds_on(name: str, rounds: int, seed: int, url_of: Callable[[Path], str], nodes: int) -> bool:
    """That many rounds on one kind of store; whether all of them held."""
    total: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="retinue-plug-"))
        url = url_of(folder)
        try:
            kills = one_round(folder, url, seed + number, nodes)
            total += check(folder, url)
        except Broken as exc:
            tell(f"{name}: round {number + 1} (seed {seed + number}, left in {folder}) is broken: {exc}")
            return False
        total.update(kills=kills, rounds=1)
        if (number + 1) % 10 == 0 or number + 1 == rounds:
            tell(f"{name}: {number + 1}/{rounds} rounds, {time.monotonic() - began:.0f} s: {dict(total)}")
        shutil.rmtree(folder)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/plug-test", description=__doc__)
    parser.add_argument("--sqlite", type=int, default=200, metavar="N", help="rounds on SQLite (200)")
    parser.add_argument("--postgres", type=int, default=50, metavar="N", help="rounds on PostgreSQL, two nodes (50)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="for the moments of the kills")
    asked = parser.parse_args()
    tell(f"seed {asked.seed}")
    held = rounds_on("SQLite", asked.sqlite, asked.seed, lambda folder: f"sqlite:///{folder}/app.db", 1)
    if held and asked.postgres:
        with postgres_server() as server:
            held = rounds_on("PostgreSQL, two nodes", asked.postgres, asked.seed, lambda folder: server.url(), 2)
    tell("nothing was lost, nothing happened twice" if held else "BROKEN")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
