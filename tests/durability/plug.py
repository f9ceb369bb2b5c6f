"""The plug test: disturb the processes of a tree of agents again and again, and see that nothing is lost or done twice.

The kinds of rounds: `kill` (kill -9 and restart), `humans` (the same, with two humans in processes of their own who
both answer every question), `freeze` (SIGSTOP for longer than the lease, while another node continues), `namespaces`
(as kill, with nodes that share a host name but no pid namespace), `clocks` (as kill, with one clock a minute ahead).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from retinue.storage.stores import open_store

from ..databases import postgres_server
from ..prepared import PYTHON

Kind = Literal["kill", "humans", "freeze", "namespaces", "clocks"]
KINDS: tuple[Kind, ...] = ("kill", "humans", "freeze", "namespaces", "clocks")

EFFECTS = sorted([f"{x}-{n}" for x in ("A", "B", "C", "D", "help", "boss") for n in (1, 2)])
ANSWER = "A done, B done, C done; D done"
PAUSE = 0.06
DEADLINE = 240.0
"""Seconds in which a round must have come to its end, also on a busy machine, where processes start slowly."""
SHORT_LEASE, LONG_LEASE = 1.0, 30.0
"""A lease must run out where nobody can see that an owner is gone."""


class Broken(AssertionError):
    """Something was lost, or happened twice."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


class Process(Struct, frozen=True):
    """A process of a round, the name under which it writes, and whether it is a node or a human."""

    process: subprocess.Popen[bytes]
    name: str
    role: str


class Round:
    """One round: its processes, and what is done to them."""

    def __init__(self, folder: Path, url: str, seed: int, kind: Kind = "kill", nodes: int = 1) -> None:
        self.folder, self.url, self.kind = folder, url, kind
        self.nodes = nodes if kind in ("kill", "humans") else max(nodes, 2)
        self.lease = SHORT_LEASE if kind in ("freeze", "namespaces") else LONG_LEASE
        self.says = "go, with asks" if kind == "humans" else "go"
        self.chance, self.kills, self.freezes, self._started = random.Random(seed), 0, 0, 0
        self.frozen: dict[str, float] = {}
        """The nodes that were frozen, and when."""
        self.deadline = time.monotonic() + DEADLINE

    def start(self, role: str = "node") -> Process:
        """Start a node or a human."""
        self._started += 1
        name = f"{role}{self._started}"
        ahead = "60" if self.kind == "clocks" and self._started % 2 else "0"
        env = {**os.environ, "PLUG_NODE": name, "PLUG_CLOCK_AHEAD": ahead}
        command = [PYTHON, "-m", "tests.durability.tree", str(self.folder), self.url, str(PAUSE)]
        command += [role, str(self.lease), self.says]
        if self.kind == "namespaces":
            command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
        with (self.folder / "stderr.txt").open("ab") as said:
            return Process(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=env), name, role)

    def said(self) -> str:
        return (self.folder / "stderr.txt").read_text()[-3000:]

    def play(self) -> None:
        """Disturb the processes until the tree has come to its end."""
        first = self.start()
        while not (self.folder / "run_id").exists():
            in_time = first.process.poll() is None and time.monotonic() < self.deadline
            need(in_time, f"the tree did not start: {self.said()}")
            time.sleep(0.002)
        roles = ["node"] * (self.nodes - 1) + (["human-1", "human-2"] if self.kind == "humans" else [])
        running = [first, *[self.start(role) for role in roles]]
        try:
            self._freeze(first) if self.kind == "freeze" else self._kill(running)
            for one in running:
                need(one.process.wait(self._left()) == 0, f"a process failed: {self.said()}")
        except subprocess.TimeoutExpired:
            raise Broken(f"no end after {DEADLINE:g} s: {self.said()}") from None
        finally:
            for one in running:
                one.process.kill()
                one.process.wait()

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _kill(self, running: list[Process]) -> None:
        """Kill and replace processes until one has seen the end."""
        slow = 0.3 + self.lease if self.lease < LONG_LEASE else 0.4
        while True:
            need(self._left() > 0, f"no end after {DEADLINE:g} s: {self.said()}")
            victim = self.chance.choice(running)
            try:
                victim.process.wait(self.chance.uniform(0.0, 0.9) + slow * bool(self.kills) + 0.1 * self.kills)
            except subprocess.TimeoutExpired:
                victim.process.kill()
                victim.process.wait()
                self.kills += 1
                running[running.index(victim)] = self.start(victim.role)
                continue
            need(victim.process.returncode == 0, f"a process failed: {self.said()}")
            return

    def _freeze(self, victim: Process) -> None:
        """Freeze a node for longer than its lease, while the others work, and let it go on."""
        try:
            victim.process.wait(self.chance.uniform(0.0, 1.2))
        except subprocess.TimeoutExpired:
            victim.process.send_signal(signal.SIGSTOP)
            self.frozen[victim.name] = time.monotonic()
            self.freezes += 1
            time.sleep(self.lease * self.chance.uniform(1.6, 2.6))
            victim.process.send_signal(signal.SIGCONT)


def one_round(folder: Path, url: str, seed: int, nodes: int = 1, kind: Kind = "kill") -> Round:
    """Play one round."""
    made = Round(folder, url, seed, kind, nodes)
    made.play()
    return made


def check(played: Round) -> Counter[str]:
    """Everything that must hold at the end of a round; counts of what was seen."""
    folder = played.folder
    run_id = (folder / "run_id").read_text()
    record, events, owners = asyncio.run(read(played.url, run_id))
    check_effects(played, owners)
    result = record.result
    need(record.status == "completed", f"the run is {record.status}: {result and result.error}")
    assert result is not None
    need(result.response == ANSWER, f"the answer is {result.response!r}")
    notes = ("boss-1", "boss-2", "paid") if played.kind == "humans" else ("boss-1", "boss-2")
    need(tuple(result.state.extensions["plug.notes"]) == notes, f"state: {result.state.extensions}")
    need([event.seq for event in events] == list(range(1, len(events) + 1)), "the sequence has a hole or a repeat")
    check_runs(events)
    check_task(folder)
    counts = Counter(
        {"events": len(events), "runs": len({event.run_id for event in events if event.kind == "run_started"})}
    )
    counts["interrupted"] = sum("outcome unknown" in str(getattr(event, "result", "")) for event in events)
    counts["asked again"] = sum(getattr(event, "code", None) == "interrupted" for event in events)
    if played.kind == "humans":
        counts += check_humans(folder, events)
    counts.update(kills=played.kills, freezes=played.freezes)
    return counts


def check_effects(played: Round, owners: int) -> None:
    """Every effect happened once. One that ran in a process that was frozen may have happened a second time."""
    lines = Counter((played.folder / "effects.txt").read_text().splitlines())
    wanted = sorted([*EFFECTS, "paid"]) if played.kind == "humans" else EFFECTS
    need(sorted(lines) == wanted, f"effects: {dict(lines)}")
    starts = [line.split() for line in (played.folder / "starts.txt").read_text().splitlines()]
    for text, times in lines.items():
        overlaps = [text for name, frozen in played.frozen.items() if [text, name] in [one[:2] for one in starts]]
        need(times == 1 or (times == 2 and bool(overlaps)), f"{text} happened {times} times")
    for text, name, at in starts:
        # On a busy machine the others may be too slow to take the run over, or lose it to the one that was frozen.
        late = owners == 2 and name in played.frozen and float(at) > played.frozen[name] + played.lease
        need(not late, f"{name} started {text} after it was frozen, though another node had the run")


def check_runs(events: list[Any]) -> None:
    """Every run begins and ends, completed; every call ends once; every leg has its end."""
    mine: dict[str, list[Any]] = {}
    for event in events:
        if event.kind != "task_updated":
            mine.setdefault(event.run_id, []).append(event)
    need(len(mine) == 6, f"{len(mine)} runs instead of 6")
    for run_id, own in mine.items():
        legs = [event.kind for event in own if event.kind in ("run_started", "run_finished")]
        need(legs == ["run_started", "run_finished"] * (len(legs) // 2), f"{run_id}: {legs}")
        need(own[0].kind == "run_started" and own[-1].kind == "run_finished", f"{run_id} does not begin or end")
        need(own[-1].status == "completed", f"{run_id} ended as {own[-1].status}: {own[-1].error}")
        ends = [event for event in own if event.kind == "tool_call_finished" and event.status != "suspended"]
        ended = Counter(event.call_id for event in ends)
        need(set(ended.values()) <= {1}, f"{run_id}: a call ended twice: {ended}")
        steps = [event.step for event in own if event.kind == "inference_finished"]
        need(steps == list(range(1, len(steps) + 1)), f"{run_id}: steps {steps}")
        need(len({event.ns for event in own}) == 1, f"{run_id} changed its place")
    need(len({own[0].ns for own in mine.values()}) == 6, "two runs share a place")


def check_task(folder: Path) -> None:
    found = list(json.loads((folder / "ws/agents/boss/tasks/thread-1.json").read_text()).values())
    need([task["status"] for task in found] == ["COMPLETED"], f"tasks: {found}")
    need(found[0]["result"] == "D done", f"the task's result: {found[0]}")


def check_humans(folder: Path, events: list[Any]) -> Counter[str]:
    """Of two answers to one ticket one counts, and whoever gave it was told so."""
    counted: dict[str, str] = {}
    for event in events:
        if event.kind == "tool_call_resumed" and event.decision is not None:
            name, _, ticket = event.decision.id.partition("-pay-")
            need(ticket not in counted, f"two answers to {ticket} counted")
            counted[ticket] = name
    replies = folder / "humans.txt"  # missing if every human was killed before it could write down a reply
    said = [json.loads(line) for line in replies.read_text().splitlines()] if replies.exists() else []
    for name, ticket, told in said:
        winner = counted.get(ticket.removeprefix("pay-"))
        need((told == "accepted") == (winner == name), f"{name} was told {told} on {ticket}; {winner}'s answer counted")
    return Counter({"answers": len(said), "refused": sum(told == "refused" for _, _, told in said)})


async def read(url: str, run_id: str) -> tuple[Any, list[Any], int]:
    """Read the record of a run, its events, and the number of owners it has had."""
    store: Any = open_store(url)
    await store.open()
    try:
        record = await store.load_run(run_id)
        events: list[Any] = []
        while batch := (await store.read_events(run_id, len(events), 10_000))[0]:
            events.extend(batch)
        need(await store.open_logs() == [], f"somebody still owns a log: {await store.open_logs()}")
        need((await store.read_log(run_id)).ended, "the log has not ended")
        epoch = "SELECT epoch FROM logs WHERE log_id = ?"
        return record, events, (await store.database.read(lambda link: link.run(epoch, run_id)))[0][0]
    finally:
        await store.close()


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def rounds_on(
    name: str, rounds: int, seed: int, kinds: tuple[Any, ...], play: Callable[[Path, int, Any], Round]
) -> bool:
    """Play that many rounds, each in a folder and with a seed and a kind; whether all of them held."""
    total: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="retinue-plug-"))
        kind = kinds[(seed + number) % len(kinds)]
        try:
            total += check(play(folder, seed + number, kind))
        except Broken as exc:
            tell(f"{name}: round {number + 1} ({kind}, seed {seed + number}, left in {folder}) is broken: {exc}")
            return False
        total.update({"rounds": 1, kind: 1})
        if (number + 1) % 10 == 0 or number + 1 == rounds:
            tell(f"{name}: {number + 1}/{rounds} rounds, {time.monotonic() - began:.0f} s: {dict(total)}")
        shutil.rmtree(folder)
    return True


def can_unshare() -> bool:
    """Whether this process may make pid namespaces."""
    tried = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return tried.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/plug-test", description=__doc__)
    parser.add_argument("--sqlite", type=int, default=200, metavar="N", help="rounds on SQLite (200)")
    parser.add_argument("--postgres", type=int, default=50, metavar="N", help="rounds on PostgreSQL, three nodes (50)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="for the moments of the kills")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of rounds, in turn")
    asked = parser.parse_args()
    kinds: Any = tuple([kind for kind in KINDS if kind in asked.kinds.split(",")])
    if "namespaces" in kinds and not can_unshare():
        tell("no rounds with pid namespaces: this process may not make them")
        kinds = tuple([kind for kind in kinds if kind != "namespaces"])
    tell(f"seed {asked.seed}")

    def on_sqlite(folder: Path, seed: int, kind: Kind) -> Round:
        return one_round(folder, f"sqlite:///{folder}/app.db", seed, 1, kind)

    held = rounds_on("SQLite", asked.sqlite, asked.seed, kinds, on_sqlite)
    if held and asked.postgres:
        with postgres_server() as server:

            def on_postgres(folder: Path, seed: int, kind: Kind) -> Round:
                return one_round(folder, server.url(), seed, 3, kind)

            held = rounds_on("PostgreSQL, three nodes", asked.postgres, asked.seed, kinds, on_postgres)
    tell("nothing was lost, nothing happened twice" if held else "BROKEN")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
