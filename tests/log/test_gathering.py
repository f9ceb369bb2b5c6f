"""Logs that gather rows are written together: one transaction for many logs, and a log that is waited for at once."""

from __future__ import annotations

import asyncio
from typing import Any

from retinue.core.rows import LogRow, Private
from retinue.log.owned import Gathering, LogWriter

from ..waiting import let_others_run, until


class Store:
    """Notes in which turn of the event loop each log is written."""

    place = "here"

    def __init__(self) -> None:
        self.turn = 0
        self.written: list[tuple[int, str, int]] = []

    def write(self, batch: Any) -> asyncio.Future[None]:
        self.written.append((self.turn, batch.log_id, len(batch.rows)))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def row(seq: int) -> LogRow:
    return LogRow(seq, 0, None, Private(kind="commit", run_id="r"))


async def test_many_logs_are_written_in_one_turn() -> None:
    store: Any = Store()
    counting, gathering = asyncio.create_task(store.count_turns()), Gathering()
    writers = [LogWriter(f"log_{number}", store) for number in range(20)]
    for writer in writers:
        writer.gathering = gathering
        await asyncio.sleep(0)  # their rows come at different moments
        writer.rows.append(row(1))
        writer.notify()
    writers[3].rows.append(row(2))
    writers[3].notify()
    await writers[7].flush()
    assert [(name, rows) for _, name, rows in store.written] == [("log_7", 1)], "who is waited for does not wait"
    await until(lambda: len(store.written) == 20)
    assert len({turn for turn, _, _ in store.written[1:]}) == 1
    assert {(name, rows) for _, name, rows in store.written if rows > 1} == {("log_3", 2)}
    counting.cancel()


async def test_very_many_logs_leave_turns_to_others(monkeypatch: Any) -> None:
    monkeypatch.setattr("retinue.log.owned.MOST_TOGETHER", 8)
    store: Any = Store()
    counting, gathering = asyncio.create_task(store.count_turns()), Gathering()
    for number in range(20):
        writer = LogWriter(f"log_{number}", store)
        writer.gathering = gathering
        writer.rows.append(row(1))
        writer.notify()
    await until(lambda: len(store.written) == 20)
    turns = [turn for turn, _, _ in store.written]
    assert sorted(turns.count(turn) for turn in set(turns)) == [4, 8, 8]
    counting.cancel()


async def test_a_log_that_is_stopped_is_not_written() -> None:
    store: Any = Store()
    gathering = Gathering()
    first, second = LogWriter("first", store), LogWriter("second", store)
    for writer in (first, second):
        writer.gathering = gathering
        writer.rows.append(row(1))
        writer.notify()
    first.stop(RuntimeError("lost"))
    await until(lambda: store.written)
    assert [name for _, name, _ in store.written] == ["second"]


async def test_a_log_that_changes_its_gathering_is_written_once_and_then_rests() -> None:
    """The rows of a log that is taken over come before it has the gathering of its runtime."""
    store: Any = Store()
    writer = LogWriter("log", store)
    writes = 0

    def count(write: Any = writer.write) -> None:
        nonlocal writes
        writes += 1
        write()

    writer.write = count
    writer.rows.append(row(1))
    writer.notify()
    writer.gathering = Gathering()
    await until(lambda: store.written)
    await let_others_run()
    assert (writes, store.written) == (1, [(0, "log", 1)])
