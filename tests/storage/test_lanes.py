"""Little work is done by the event loop itself; what could hold it up, and what comes after that, by a thread."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import StoreError
from retinue.storage import lanes
from retinue.storage.lanes import Link
from retinue.storage.sqlite import SqliteDatabase

Work = Callable[[Link], Any]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "app.db")


@pytest.fixture(autouse=True)
def nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(lanes, "SLOW", 60.0)


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
        link.run("INSERT INTO logs (log_id, ended, cancel) VALUES (?, 0, ?)", f"{number:09}", "x" * size)
        return threading.current_thread() is threading.main_thread()

    return work


async def stored(database: SqliteDatabase) -> list[int]:
    found = await database.read(lambda link: link.run("SELECT log_id FROM logs ORDER BY rowid"))
    return [int(row[0]) for row in found]


class Counting:
    """Counts transactions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        real = lanes._in_one  # pyright: ignore[reportPrivateUsage]

        def count(link: Link, works: Any) -> Any:
            self.sizes.append(len(works))
            return real(link, works)

        monkeypatch.setattr(lanes, "_in_one", count)


async def test_what_is_asked_in_one_turn_is_one_transaction_of_the_event_loop(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(monkeypatch)
    assert await asyncio.gather(*[database.write(put(n), little=True) for n in range(10)]) == [True] * 10
    assert counting.sizes == [10]
    assert await stored(database) == list(range(10))


async def test_a_crowd_goes_to_the_thread(database: SqliteDatabase) -> None:
    crowd = [database.write(put(n), little=True) for n in range(lanes.MOST_QUICK + 1)]
    assert not any(await asyncio.gather(*crowd))


async def test_work_that_is_not_little_goes_to_the_thread(database: SqliteDatabase) -> None:
    assert await database.write(put(1)) is False


async def test_the_order_stays_whoever_does_it(database: SqliteDatabase) -> None:
    little = [number % 3 != 0 for number in range(60)]
    await asyncio.gather(*[database.write(put(n), "one thing", little=little[n]) for n in range(60)])
    assert await stored(database) == list(range(60))


async def test_while_another_process_writes_the_event_loop_goes_on(path: str, database: SqliteDatabase) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    work = asyncio.create_task(database.write(put(1), little=True))
    turns, end = 0, time.monotonic() + 0.2
    while time.monotonic() < end:
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 20
    assert not work.done()
    other.execute("ROLLBACK")
    other.close()
    assert await work is False
    assert await database.write(put(2), little=True) is True
    assert await stored(database) == [1, 2]


async def test_who_fails_is_told_and_nobody_else(database: SqliteDatabase) -> None:
    def bad(link: Link) -> None:
        link.run("INSERT INTO logs (log_id, ended) VALUES ('half', 0)")
        raise RuntimeError("no")

    done = await asyncio.gather(
        *[database.write(work, little=True) for work in (put(1), bad, put(2))], return_exceptions=True
    )
    assert [done[0], str(done[1]), done[2]] == [False, "no", False]
    assert await stored(database) == [1, 2]
    assert await database.write(put(3), little=True) is True


async def test_where_each_commit_reaches_the_disk_it_is_the_threads(path: str) -> None:
    async with opened(path, "full") as database:
        assert await database.write(put(1), little=True) is False


async def test_a_slow_disk_is_the_threads_for_a_while(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(link: Link) -> bool:
        time.sleep(0.02)
        return put(1)(link)

    monkeypatch.setattr(lanes, "SLOW", 0.01)
    monkeypatch.setattr(lanes, "PAUSE", 0.2)
    assert await database.write(slow, little=True) is True
    assert await database.write(put(2), little=True) is False
    monkeypatch.setattr(lanes, "SLOW", 60.0)
    await asyncio.sleep(0.25)
    assert await database.write(put(3), little=True) is True


async def test_the_log_of_writes_is_moved_into_the_file_now_and_then(path: str, database: SqliteDatabase) -> None:
    by_loop = [await database.write(put(n, 4000), little=True) for n in range(3000)]
    assert 0.9 < sum(by_loop) / len(by_loop) < 1
    assert os.path.getsize(f"{path}-wal") < 3000 * 4096


async def test_what_was_asked_is_done_before_it_closes(path: str) -> None:
    async with opened(path) as database:
        work = asyncio.create_task(database.write(put(1), little=True))
        await asyncio.sleep(0)
    assert await work in (True, False)
    with pytest.raises(StoreError, match="closed"):
        await database.write(put(2), little=True)
    async with opened(path) as database:
        assert await stored(database) == [1]


async def test_several_event_loops_use_one_file_at_once(database: SqliteDatabase) -> None:
    async def some(first: int) -> None:
        for number in range(first, first + 200):
            await database.write(put(number), little=True)

    await asyncio.gather(
        some(0), asyncio.to_thread(asyncio.run, some(1000)), asyncio.to_thread(asyncio.run, some(2000))
    )
    found = await stored(database)
    assert sorted(found) == [first + number for first in (0, 1000, 2000) for number in range(200)]
    assert [number for number in found if number < 1000] == list(range(200))
