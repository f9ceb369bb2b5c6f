"""Lanes: a thread does the work, in order; work that waits together is one transaction."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from retinue.errors import StoreError
from retinue.storage.database import Link
from retinue.storage.sqlite import SqliteDatabase, SqliteStore
from retinue.testing.stores import stored_run
from retinue.testing.threads import begin

from .. import inside

Work = Callable[[Link], Any]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@pytest.fixture
async def database(path: str) -> AsyncIterator[SqliteDatabase]:
    async with opened(path) as made:
        yield made


class opened:
    def __init__(self, path: str, durability: Any = "process") -> None:
        self._made = SqliteDatabase(path, durability)

    async def __aenter__(self) -> SqliteDatabase:
        await self._made.open()
        return self._made

    async def __aexit__(self, *exc: object) -> None:
        await self._made.close()


def put(number: int, size: int = 1) -> Callable[[Link], bool]:
    """Work that stores a number; whether the event loop's thread does it."""

    def work(link: Link) -> bool:
        link.insert("logs (log_id, epoch, lease_until, boot)", [(f"{number:09}", 1, 0.0, "x" * size)])
        return threading.current_thread() is threading.main_thread()

    return work


async def stored(database: SqliteDatabase) -> list[int]:
    found = await database.read(lambda link: link.run("SELECT log_id FROM logs ORDER BY rowid"))
    return [int(row[0]) for row in found]


async def test_what_waits_together_is_one_transaction(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    first = database.write(lambda link: gate.wait(10))
    await asyncio.sleep(0)
    sizes = inside.counted_transactions(monkeypatch)
    works = [database.write(put(n)) for n in range(10)]
    gate.set()
    await first
    assert await asyncio.gather(*works) == [False] * 10, "the event loop does nothing itself"
    assert sizes[-1] >= 9
    assert await stored(database) == list(range(10))


async def test_the_order_stays(database: SqliteDatabase) -> None:
    await asyncio.gather(*[database.write(put(n), "one thing") for n in range(60)])
    assert await stored(database) == list(range(60))


async def test_runs_that_begin_together_get_their_thread_in_the_order_of_the_calls(path: str) -> None:
    store = SqliteStore(path)
    await store.open()
    gate = threading.Event()
    first = store.database.write(lambda link: gate.wait(10))
    await asyncio.sleep(0)
    ids = ["z", "m", "a"]  # not in the order of their names
    begins = [asyncio.create_task(begin(store, stored_run(run_id), when_busy="enqueue")) for run_id in ids]
    await asyncio.sleep(0)
    gate.set()
    await first
    assert (await asyncio.gather(*begins))[0] is None
    await store.close()


async def test_while_another_process_writes_the_event_loop_goes_on(path: str, database: SqliteDatabase) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    work = database.write(put(1))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not work.done()
    other.execute("ROLLBACK")
    other.close()
    await work
    await database.write(put(2))
    assert await stored(database) == [1, 2]


async def test_who_fails_is_told_and_nobody_else(database: SqliteDatabase) -> None:
    def bad(link: Link) -> None:
        link.insert("logs (log_id, epoch, lease_until, boot)", [("half", 1, 0.0, "")])
        raise RuntimeError("no")

    done = await asyncio.gather(*[database.write(work) for work in (put(1), bad, put(2))], return_exceptions=True)
    assert [done[0], str(done[1]), done[2]] == [False, "no", False]
    assert await stored(database) == [1, 2]
    assert await database.write(put(3)) is False


async def test_a_disk_that_stalls_holds_nobody_else(database: SqliteDatabase) -> None:
    gate = threading.Event()
    stalled = database.write(lambda link: gate.wait(10))
    for _ in range(3):  # the event loop turns, and readers read
        assert await stored(database) == []
    assert not stalled.done()
    gate.set()
    await stalled


async def test_the_log_of_writes_is_moved_into_the_file_now_and_then(path: str, database: SqliteDatabase) -> None:
    for number in range(3000):
        await database.write(put(number, 4000))
    assert os.path.getsize(f"{path}-wal") < 3000 * 4096


async def test_what_was_asked_is_done_before_it_closes(path: str) -> None:
    async with opened(path) as database:
        work = database.write(put(1))
        await asyncio.sleep(0)
    assert await work in (True, False)
    with pytest.raises(StoreError, match="closed"):
        await database.write(put(2))
    async with opened(path) as database:
        assert await stored(database) == [1]


async def test_several_event_loops_use_one_file_at_once(database: SqliteDatabase) -> None:
    async def some(first: int) -> None:
        for number in range(first, first + 200):
            await database.write(put(number))

    await asyncio.gather(
        some(0), asyncio.to_thread(asyncio.run, some(1000)), asyncio.to_thread(asyncio.run, some(2000))
    )
    found = await stored(database)
    assert sorted(found) == [first + number for first in (0, 1000, 2000) for number in range(200)]
    assert [number for number in found if number < 1000] == list(range(200))
