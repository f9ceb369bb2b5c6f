"""The rows of gates: one contract over memory, SQLite and PostgreSQL, and processes that share them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import Rate, Runtime
from retinue.core.gate import Account, GateTable, LocalGateTable
from retinue.storage.stores import open_store
from tests.models.gated import Process, Provider

from .. import inside
from ..databases import TestServer
from ..prepared import PYTHON
from ..waiting import until

ACCOUNT = Account("openai:m", "https://api.openai.com", "sk-very-secret")


@asynccontextmanager
async def opened(kind: str, tmp_path: Path, server: TestServer) -> AsyncIterator[tuple[str, GateTable, GateTable]]:
    """Two views of one table, as two processes have them, and the URL of their database."""
    if kind == "memory":
        table = LocalGateTable()
        yield "", table, table
        return
    with server.empty_url() as postgres:
        url = postgres if kind == "postgresql" else f"sqlite:///{tmp_path}/app.db"
        stores: list[Any] = [open_store(url), open_store(url)]
        for store in stores:
            await store.open()
        yield url, stores[0].gate_table(), stores[1].gate_table()
        for store in stores:
            await store.close()


KINDS = pytest.mark.parametrize("kind", ["memory", "sqlite", "postgresql"])


@KINDS
async def test_send_times_are_handed_out_once(kind: str, tmp_path: Path, postgres_server: TestServer) -> None:
    async with opened(kind, tmp_path, postgres_server) as (_, one, other):
        gate = await one.id_of(ACCOUNT, "openai:m")
        assert gate == await other.id_of(ACCOUNT, "openai:m")
        assert kind == "memory" or "very-secret" not in gate
        assert gate != await one.id_of(Account("openai:m", ACCOUNT.origin, "another"), "openai:m")
        rows = [await one.read(gate), await other.read(gate)]
        assert {(row.generation, row.facts) for row in rows} == {(0, b"")}
        taken = await asyncio.gather(*[table.reserve(gate, 0, 10.0, 1.0) for table in (one, other) * 10])
        ends = sorted([row.next_at for row in taken if row is not None])
        assert len(ends) == 20
        assert all(later - at >= 9.99 for at, later in zip(ends, ends[1:], strict=False))
        back = await one.reserve(gate, 0, 0.0, -5.0)
        assert back is not None
        assert back.next_at == ends[-1]


@KINDS
async def test_what_was_learned_voids_send_times(kind: str, tmp_path: Path, postgres_server: TestServer) -> None:
    async with opened(kind, tmp_path, postgres_server) as (_, one, other):
        gate = await one.id_of(ACCOUNT, "openai:m")
        await one.read(gate)
        await one.reserve(gate, 0, 1000.0, 0.0)
        row = await one.learn(gate, 0, b"slow", 5.0, 7.0, voids=True)
        assert row is not None
        assert (row.generation, row.facts) == (1, b"slow")
        assert 4.9 <= row.next_at - row.now <= 5.1
        assert row.token_next_at - row.now >= 6.9
        assert await other.reserve(gate, 0, 1.0, 0.0) is None
        assert await other.learn(gate, 0, b"fast", 0.0, 0.0, voids=True) is None
        kept = await other.learn(gate, 1, b"told", 2.0, 0.0, voids=False)
        assert kept is not None
        assert (kept.generation, kept.facts, kept.next_at) == (1, b"told", row.next_at)
        assert (await one.read(gate)).facts == b"told"


@KINDS
async def test_slots_are_counted_over_owners(kind: str, tmp_path: Path, postgres_server: TestServer) -> None:
    async with opened(kind, tmp_path, postgres_server) as (_, one, other):
        gate = await one.id_of(ACCOUNT, "openai:m")
        await one.read(gate)
        given = await asyncio.gather(*[table.hold(gate, f"p{n}", 0, 3, 8) for n, table in enumerate((one, other) * 3)])
        assert sum(given) == 8
        first = next(n for n, count in enumerate(given) if count)
        with other.watch(gate) as watch:
            await one.hold(gate, f"p{first}", 0, 0, 8)
            async with asyncio.timeout(30):
                while not (got := await other.hold(gate, "late", 0, 9, 8)):
                    await watch.wait(5)
        assert got == given[first]


WORK = """
import asyncio, sys
from retinue.core.gate import Account
from retinue.storage.stores import open_store

async def main():
    store = open_store(sys.argv[1])
    await store.open()
    table = store.gate_table()
    gate = await table.id_of(Account("openai:m", "https://api.openai.com", "sk-very-secret"), "openai:m")
    await table.read(gate)
    print(await table.hold(gate, "doomed", 0, 6, 6), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_the_slots_of_a_dead_process_come_back(kind: str, tmp_path: Path, postgres_server: TestServer) -> None:
    async with opened(kind, tmp_path, postgres_server) as (url, one, _):
        with subprocess.Popen([PYTHON, "-c", WORK, url], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "6\n"
            process.send_signal(signal.SIGKILL)
        gate = await one.id_of(ACCOUNT, "openai:m")
        assert await one.hold(gate, "heir", 0, 6, 6) == 0
        await inside.end_lease_of_slots(one, "doomed")
        assert await one.hold(gate, "heir", 0, 6, 6) == 6


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_two_processes_stay_under_the_slots_together(
    kind: str, tmp_path: Path, postgres_server: TestServer
) -> None:
    async with opened(kind, tmp_path, postgres_server) as (_, one, other):
        provider = Provider(rate=None, parallel=6, seconds=0.02)
        processes = [Process(provider, table, m=Rate(parallel=6)) for table in (one, other)]
        await asyncio.gather(*[processes[n % 2].ask() for n in range(60)])
        assert (provider.most_busy, provider.refused) == (6, 0)
        for process in processes:
            await process.gates.close()


async def test_the_gates_of_a_runtime_are_in_its_database(tmp_path: Path) -> None:
    provider = Provider(rate=None)
    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, rates={"openai:*": Rate(requests_per_minute=60_000)}) as runtime:
        store: Any = runtime.store
        gate = runtime.gates.gate_of(provider.account)
        process = Process(provider)
        process.gates = runtime.gates
        await process.ask()
        rows = await store.database.rows("SELECT gate, next_at FROM gates WHERE gate <> ''")
        assert [name.split()[0] for name, _ in rows] == ["openai:*"]
        assert rows[0][1] > 0
        await until(lambda: not gate.limits.in_flight)
