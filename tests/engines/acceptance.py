"""The Temporal engine at size, with worker processes: what the suite tests with a few runs, and how long it takes.

Three workers on a Temporal server and a PostgreSQL of its own. Each part prints what it found and fails if something does
not hold. The plug test and the storm are `scripts/plug-workers --engine temporal` and `scripts/worker-storm --engine temporal`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from retinue import Decision, Limits, RunStatus, Runtime

from ..databases import TestServer, postgres_server
from ..durability.plug import need, tell
from ..waiting import until
from .crew import is_marked
from .processes import ROOT, holder, start_worker, workers
from .temporal import TemporalServer, temporal_server
from .workflows import closed, workflow_of

LEASE = ("--lease", "5", "--slots", "16")
CLIENT = """
import asyncio, sys
from retinue import Runtime

async def main():
    async with Runtime.open(sys.argv[1], engine=sys.argv[2]) as client:
        result = await client.run("echo", "hello")
        assert result.response == "echo: hello"

asyncio.run(main())
"""


class Place:
    """A database, an engine and a folder for marks."""

    def __init__(self, postgres: TestServer, temporal: TemporalServer) -> None:
        self.postgres, self.temporal = postgres, temporal
        self.url, self.engine = postgres.url(), temporal.engine()
        self.folder = Path(tempfile.mkdtemp(prefix="retinue-temporal-"))

    def client(self) -> Runtime:
        return Runtime.open(self.url, engine=self.engine)

    def workers(self, number: int = 3) -> Any:
        return workers(number, self.url, self.folder, *LEASE, engine=self.engine)


async def check(client: Runtime, run_id: str) -> None:
    """The run completed, its log has no gap, and one end."""
    events = [event async for event in client.events(run_id)]
    need([event.seq for event in events] == list(range(1, len(events) + 1)), f"{run_id} has a gap")
    ends = [event for event in events if event.kind == "run_finished" and not event.ns]
    need([end.status for end in ends] == [RunStatus.COMPLETED], f"{run_id} ended as {ends}")


async def many_runs(place: Place) -> str:
    """A client without agents; each worker does some of 100 runs."""
    async with place.workers() as started, place.client() as client:
        began = time.perf_counter()
        runs = [client.stream("walker", "2") for _ in range(100)]
        for run in runs:
            need((await run.result()).response == "2 steps", "a run has another answer")
        took = time.perf_counter() - began
        for run in runs:
            await check(client, run.run_id)
        done = Counter((place.folder / "step-0").read_text().split())
        need({int(pid) for pid in done} == {worker.pid for worker in started}, f"not every worker did some: {done}")
        return f"100 runs of 3 steps in {took:.1f} s, by worker: {sorted(done.values())}"


async def long_run(place: Place) -> str:
    """600 steps."""
    async with place.workers(1), place.client() as client:
        began = time.perf_counter()
        run = client.stream("walker", "600")
        need((await run.result()).response == "600 steps", "not all steps were made")
        took = time.perf_counter() - began
        await closed(client, run.run_id)
        history = await workflow_of(client, run.run_id).fetch_history()
        need(len(history.events) < 100, f"a history of {len(history.events)} events")
        size = sum(event.ByteSize() for event in history.events)
        return f"600 steps in {took:.1f} s; history: {len(history.events)} events, {size:,} bytes"


async def large_tree(place: Place) -> str:
    """A tree of 1,000 children in one leg."""
    target = "benchmarks.engines:agents"
    worker = await start_worker(place.url, None, *LEASE, engine=place.engine, target=target)
    try:
        async with place.client() as client:
            await client.run("answer", "warm up")
            began = time.perf_counter()
            run = client.stream("root", "go", limits=Limits(children=1_000))
            need((await run.result()).status is RunStatus.COMPLETED, "the tree did not complete")
            took = time.perf_counter() - began
            kinds = Counter([event.kind async for event in run])
            need(kinds["child_finished"] == 1_000, f"{kinds['child_finished']} children finished")
            return f"1,000 children in {took:.2f} s"
    finally:
        await worker.end()


async def questions(place: Place) -> str:
    """A nested question; all workers are replaced before the answer."""
    async with place.client() as client:
        async with place.workers():
            run = client.stream("boss", "go")
            need((await run.result()).status is RunStatus.SUSPENDED, "it does not wait")
        answering = asyncio.create_task(client.resume(run.run_id, {"pay_1": Decision.approve()}))
        async with place.workers():
            began = time.perf_counter()
            need((await answering).response == "boss: clerk: paid 3", "the answer was lost")
            return f"answered {time.perf_counter() - began:.2f} s after new workers were there"


async def cancels(place: Place) -> str:
    """From the client, and in Temporal alone."""
    (place.folder / "hold-0").touch()
    found: list[str] = []
    async with place.workers(1), place.client() as client:
        for what in ("client", "Temporal"):
            run = client.stream("walker", "1")
            await until(lambda: (place.folder / "step-0").exists())
            began = time.perf_counter()
            await (client.cancel(run.run_id) if what == "client" else workflow_of(client, run.run_id).cancel())
            need((await client.result(run.run_id)).status is RunStatus.CANCELLED, "it was not cancelled")
            found.append(f"by the {what} {time.perf_counter() - began:.2f} s")
            await closed(client, run.run_id)
            (place.folder / "step-0").unlink()
    return ", ".join(found)


async def damage(place: Place, strike: Callable[[], Awaitable[None]]) -> None:
    """Have 30 runs at work while something happens to what they stand on."""
    (place.folder / "hold-3").touch()
    async with place.workers() as started, place.client() as client:
        runs = [client.stream("walker", "6") for _ in range(30)]
        await until(lambda: (place.folder / "step-3").exists())
        await strike()
        (place.folder / "hold-3").unlink()
        for run in runs:
            record = await until(lambda run_id=run.run_id: _ended(client, run_id))
            need(record.status == "completed", f"{run.run_id} is {record.status}")
            await check(client, run.run_id)
            await closed(client, run.run_id)
        for worker in started:
            worker.send(signal.SIGTERM)
        codes = [await worker.process.wait() for worker in started]
        need(set(codes) == {0}, f"workers ended with {codes}")


async def _ended(client: Runtime, run_id: str) -> Any:
    try:
        record = await client.store.load_run(run_id)
    except Exception:  # the database is away
        return None
    return record is not None and record.has_ended and record


async def temporal_killed(place: Place) -> str:
    """The Temporal server is killed for 3 s, then for 6 s."""
    for seconds in (3.0, 6.0):

        async def strike(seconds: float = seconds) -> None:
            place.temporal.kill()
            await asyncio.sleep(seconds)
            place.temporal.start()

        await damage(place, strike)
    return "30 runs each: all completed, workers ended with 0"


async def postgres_restarted(place: Place) -> str:
    async def strike() -> None:
        await asyncio.to_thread(place.postgres.stop)
        await asyncio.to_thread(place.postgres.start)

    await damage(place, strike)
    return "30 runs: all completed, workers ended with 0"


async def worker_killed(place: Place) -> str:
    """The time from kill -9 to the next step, with a lease of 5 s."""
    (place.folder / "hold-1").touch()
    async with place.workers(2) as started, place.client() as client:
        run = client.stream("walker", "3")
        await until(lambda: (place.folder / "step-1").exists())
        victim = await holder(started, client, run.run_id)
        assert victim is not None
        await victim.end(signal.SIGKILL)
        began = time.perf_counter()
        (place.folder / "hold-1").unlink()
        await until(lambda: is_marked(place.folder, 2))
        took = time.perf_counter() - began
        await run.result()
        await check(client, run.run_id)
        need(took < 6.0, f"the next step came after {took:.1f} s")
        return f"the next step {took:.1f} s later"


async def clients(place: Place) -> str:
    """50 clients that start a run, wait for it and exit."""
    async with place.workers(1):
        turns, codes = asyncio.Semaphore(4), Counter[Any]()

        async def one() -> None:
            async with turns:
                command = [sys.executable, "-c", CLIENT, place.url, place.engine]
                process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
                codes[await asyncio.wait_for(process.wait(), 120)] += 1

        await asyncio.gather(*[one() for _ in range(50)])
        need(dict(codes) == {0: 50}, f"clients ended with {dict(codes)}")
        return "50 clients ended with 0"


PARTS: tuple[Callable[[Place], Awaitable[str]], ...] = (
    many_runs,
    long_run,
    large_tree,
    questions,
    cancels,
    worker_killed,
    temporal_killed,
    postgres_restarted,
    clients,
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/temporal-test", description=__doc__)
    parser.add_argument("parts", nargs="*", help="some of: " + ", ".join(part.__name__ for part in PARTS))
    asked = parser.parse_args().parts
    for part in PARTS:
        if asked and part.__name__ not in asked:
            continue
        with postgres_server() as postgres, temporal_server() as temporal:
            tell(f"{part.__name__}: {asyncio.run(part(Place(postgres, temporal)))}")  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main())
