"""A thousand runs on three workers, one of which is killed every five seconds.

One user has 900 of the runs, ten others have ten each. Each run must end once; what a killed worker had must be taken over
within lease + 1 s; no worker may have more runs than slots; and the ten must not wait for the 900.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from retinue import Agent, RunStatus, Runtime, TextChunk, tool
from retinue.core.model import CallChunk, ModelChunk, ModelRequest, TurnEnd

from ..databases import postgres_server
from ..durability.plug import tell
from .processes import WorkerProcess, start_worker
from .temporal import engine_named

STEPS, STEP = 3, 0.05
LEASE, SLOTS, WORKERS, KILL_EVERY = 3.0, 8, 3, 5.0


class Walks:
    """Makes a few calls, and takes its time for each."""

    name = "testing:walks"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        await asyncio.sleep(STEP)
        made = sum(message.role == "tool" for message in request.messages)
        if made >= STEPS:
            yield TextChunk("done")
        else:
            yield CallChunk(0, f"c{made}", "look", "{}")
            yield TurnEnd("tool_calls")


@tool(idempotent=True)
async def look() -> str:
    """Look."""
    await asyncio.sleep(STEP)
    return "seen"


agents = [Agent("walks", Walks(), tools=[look])]


class Storm:
    """The workers, what is done to them, and what is seen meanwhile."""

    def __init__(self, url: str, engine: str, seed: int) -> None:
        self.url, self.engine, self.chance = url, engine, random.Random(seed)
        self.workers: list[WorkerProcess] = []
        self.kills, self.taken_over, self.most = 0, 0, 0
        self.waits: list[float] = []
        self.problems: list[str] = []
        self.is_over = False

    async def start(self) -> WorkerProcess:
        options = ("--slots", str(SLOTS), "--lease", str(LEASE))
        return await start_worker(self.url, None, *options, engine=self.engine, target="tests.engines.storm:agents")

    async def kill(self, store: Any) -> None:
        """Kill one worker every few seconds; see how long what it had waits for another."""
        while not self.is_over:
            await asyncio.sleep(KILL_EVERY)
            victim = self.chance.choice(self.workers)
            await victim.end()
            self.kills += 1
            at = time.monotonic()
            had = await _owned(store, victim.pid)
            self.workers[self.workers.index(victim)] = await self.start()
            self.taken_over += len(had)
            while left := await _owned(store, victim.pid):
                if time.monotonic() - at > LEASE + 1.0:
                    self.problems.append(f"{len(left)} runs wait longer than lease + 1 s for another worker")
                    break
                await asyncio.sleep(0.05)
            self.waits.append(time.monotonic() - at)

    async def count(self, store: Any) -> None:
        """See that no worker has more than its slots."""
        while not self.is_over:
            owners = Counter([log.owner for log in await store.open_logs() if log.owner is not None])
            self.most = max(self.most, *owners.values(), 0)
            await asyncio.sleep(0.2)


async def _owned(store: Any, pid: int) -> list[str]:
    """The logs that a process has."""
    logs = await store.open_logs()
    return [log.log_id for log in logs if log.owner is not None and int(log.owner.split("/")[2]) == pid]


async def play(url: str, engine: str, runs: int, seed: int) -> bool:
    storm = Storm(url, engine, seed)
    async with Runtime.open(url, engine=engine) as client:
        storm.workers = list(await asyncio.gather(*[storm.start() for _ in range(WORKERS)]))
        users = ["many"] * (runs * 9 // 10) + [f"few-{number % 10}" for number in range(runs // 10)]
        began = time.monotonic()
        started = [client.stream("walks", "go", user_id=user) for user in users]
        ends: dict[str, list[float]] = {"many": [], "few": []}

        async def wait(run: Any, user: str) -> RunStatus:
            result = await run.result()
            ends["many" if user == "many" else "few"].append(time.monotonic() - began)
            return result.status

        jobs = [asyncio.create_task(storm.kill(client.store)), asyncio.create_task(storm.count(client.store))]
        try:
            statuses = await asyncio.gather(*[wait(run, user) for run, user in zip(started, users, strict=True)])
        finally:
            storm.is_over = True
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await asyncio.gather(*[worker.end() for worker in storm.workers])
        took = time.monotonic() - began
        if set(statuses) != {RunStatus.COMPLETED}:
            storm.problems.append(f"not all completed: {Counter(statuses)}")
        for run in started:
            events = [event async for event in client.events(run.run_id)]
            ended = sum(event.kind == "run_finished" for event in events)
            if [event.seq for event in events] != list(range(1, len(events) + 1)) or ended != 1:
                storm.problems.append(f"{run.run_id}: {ended} ends in {len(events)} events")
    if storm.most > SLOTS:
        storm.problems.append(f"a worker had {storm.most} runs, and has {SLOTS} slots")
    few, many = max(ends["few"]), statistics.median(ends["many"])
    if few > many:
        storm.problems.append(f"the few waited {few:.1f} s, half of the many {many:.1f} s")
    tell(
        f"{engine.partition(':')[0]}: {runs} runs in {took:.1f} s, {storm.kills} kills, {storm.taken_over} runs taken over, the "
        f"slowest after {max(storm.waits, default=0):.1f} s; at most {storm.most} of {SLOTS} slots; the last of the few "
        f"users after {few:.1f} s, the median of the user with {runs * 9 // 10} runs {many:.1f} s"
    )
    for problem in storm.problems[:10]:
        tell(f"BROKEN: {problem}")
    return not storm.problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/worker-storm", description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000, metavar="N", help="runs (1000)")
    parser.add_argument(
        "--engine",
        default="postgres",
        help="postgres, temporal (a server of its own), or temporal://host:port/namespace",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="for the choice of victims")
    asked = parser.parse_args()
    with postgres_server() as server, engine_named(asked.engine) as engine:
        held = asyncio.run(play(server.url(), engine, asked.runs, asked.seed))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
