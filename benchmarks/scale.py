"""What each part of the PostgreSQL engine costs with 10,000 and with 1,000,000 threads in the database.

Every thread has one run that has ended. 100 logs are owned by a worker, 100 legs wait, 100 workers are alive.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from retinue.core.engine import LegSlots, WorkerInfo
from retinue.core.runs import unique
from retinue.core.stores import LEGS, Placement
from retinue.storage.depths import read_depths
from retinue.storage.legs import Legs, Workers
from retinue.storage.sql import SqlStore
from retinue.storage.stores import open_store
from retinue.testing.stores import stored_run

SIZES = (10_000, 1_000_000)
OWNER, TIMES = "bench/1", 15
LISTENERS, NOTES = 20, 2_000


def _fill(link: Any, first: int, last: int) -> None:
    """Insert threads whose runs have ended."""
    numbers = f"generate_series({first}, {last}) AS n"
    link.run(
        "INSERT INTO logs (log_id, epoch, lease_until, boot, ended, engine, queue, flow, level) SELECT 'run_' || n, 1, 0, "
        f"'server', 1, 'postgres', 'default', 'u' || n % 1000, 0 FROM {numbers}"
    )
    link.run(
        "INSERT INTO runs (run_id, log_id, thread_id, user_id, agent, status, started_at, ended_at, request, identity, "
        "result) SELECT 'run_' || n, 'run_' || n, 'thread_' || n, 'u' || n % 1000, 'agent', 'completed', n, n, '{}', "
        f"'{{}}', '{{}}' FROM {numbers}"
    )
    link.run(
        "INSERT INTO threads (thread_id, user_id, saved_at, state) SELECT 'thread_' || n, 'u' || n % 1000, n, '{}' "
        f"FROM {numbers}"
    )


async def _begin(store: SqlStore) -> None:
    made = unique()
    record = stored_run(f"run_{made}", started_at=time.time(), user_id="u7", thread_id=f"thread_{made}")
    await store.begin_run(record, b"{}", None, 0.0, "enqueue", Placement(engine="postgres"))


async def _time(work: Callable[[], Awaitable[object]]) -> float:
    """Return the median of several times, in ms."""
    taken: list[float] = []
    for _ in range(TIMES):
        began = time.perf_counter()
        await work()
        taken.append(time.perf_counter() - began)
    return 1000 * statistics.median(taken)


async def _operations(store: SqlStore) -> dict[str, float]:
    legs, workers = Legs(store), Workers(store)
    for _ in range(300):
        await _begin(store)
    await legs.claim("default", ["agent"], OWNER, 3600.0, 100)

    async def claim() -> None:
        found = await legs.claim("default", ["agent"], OWNER, 3600.0, 8)
        await legs.release_lost([], [leg.log_id for leg in found])

    return {
        "store a run": await _time(lambda: _begin(store)),
        "claim 8 legs, and release them": await _time(claim),
        "renew 100 leases": await _time(lambda: store.renew(OWNER, 3600.0)),
        "sweep: lost legs": await _time(lambda: legs.release_lost([], [])),
        "sweep: delays": await _time(legs.end_delays),
        "sweep: queued runs": await _time(legs.free_queued),
        "sweep: unscheduled runs (every 30 s)": await _time(legs.find_unscheduled),
        "sweep: workers": await _time(workers.seen),
        "depths of queues": await _time(lambda: read_depths(store)),
        "threads of a user": await _time(lambda: store.list_threads("u7", limit=50)),
    }


async def _notify(url: str) -> float:
    """Return the microseconds that one notification takes for each process that listens."""
    stores: list[Any] = [open_store(url) for _ in range(LISTENERS)]
    for store in stores:
        await store.open()
    with_watch = [store.watch(LEGS) for store in stores]
    watches = [watch.__enter__() for watch in with_watch]
    await asyncio.gather(*[watch.wait(5.0) for watch in watches])  # all of them listen
    await asyncio.sleep(1.0)

    def send(link: Any) -> None:
        link.run(
            "SELECT COUNT(pg_notify(?, 'log_' || n)) FROM generate_series(1, ?) AS n", url.rpartition("=")[2], NOTES
        )
        link.run("SELECT pg_notify(?, ?)", url.rpartition("=")[2], LEGS)

    waits = [asyncio.create_task(watch.wait(60.0)) for watch in watches]
    began = time.perf_counter()
    await stores[0].database.write(send)
    await asyncio.gather(*waits)
    taken = time.perf_counter() - began
    for watch in with_watch:
        watch.__exit__(None, None, None)
    for store in stores:
        await store.close()
    return 1e6 * taken / (LISTENERS * NOTES)


async def _collect(url: str) -> tuple[dict[int, dict[str, float]], float, int]:
    found: dict[int, dict[str, float]] = {}
    store: Any = open_store(url)
    await store.open()
    workers, filled = Workers(store), 0
    for number in range(100):
        info = WorkerInfo(owner=f"w/{number}", lease=3600.0, queues=["default"], agents=["agent"], slots=LegSlots(16))
        await workers.beat(info, "postgres", 0)
    for size in SIZES:
        for first in range(filled + 1, size + 1, 100_000):
            last = min(first + 99_999, size)
            await store.database.write(lambda link, first=first, last=last: _fill(link, first, last))
        filled = size
        for table in ("logs", "runs", "threads"):
            await store.database.write(lambda link, table=table: link.run(f"ANALYZE {table}"))
        found[size] = await _operations(store)
    query = "SELECT COUNT(*) FROM pg_stat_activity WHERE application_name = 'retinue'"
    connections = (await store.database.read(lambda link: link.run(query)))[0][0]
    await store.close()
    return found, await _notify(url), connections


def show() -> None:
    """Print a table."""
    from tests.databases import postgres_server

    with postgres_server() as server:
        found, note, connections = asyncio.run(_collect(server.url()))
    print(f"{'ms':<38}", *[f"{size:>12,}" for size in found])
    for name in next(iter(found.values())):
        print(f"{name:<38}", *[f"{rows[name]:>12.2f}" for rows in found.values()])
    print(f"a notification costs {note:.1f} µs for each process that listens ({LISTENERS} listened)")
    print(f"connections of this process: {connections}, and one more where it listens")
