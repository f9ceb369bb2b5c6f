"""Pruning, checking and migrating a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from retinue import ConfigurationError, Message, PersistedState, Retention, RunStatus, StoreError, ThreadRecord
from retinue.storage import upkeep
from retinue.storage.logs import stored_events
from retinue.storage.schema import MIGRATIONS, SCHEMA_VERSION
from retinue.storage.sql import SqlStore
from retinue.storage.sqlite import SqliteStore
from retinue.storage.upkeep import Pruned, check, keep_pruning, migrate, prune, sql_store

from .stored import OWNER, put_run, rows_in, sql, tamper

HOUR, YEAR = 3600.0, 365 * 86_400.0


@pytest.fixture
def one_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas do not share rows."""
    monkeypatch.setattr("retinue.storage.packs._FEW", 10**9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[SqlStore]:
    made = sql_store(database_url)
    await made.open()
    yield made
    await made.close()


async def age(store: SqlStore, seconds: float) -> None:
    """Make everything so much older."""
    await tamper(store, "UPDATE runs SET ended_at = ended_at - ?", seconds)
    await tamper(store, "UPDATE threads SET saved_at = saved_at - ?", seconds)


async def test_only_what_ended_long_ago_goes(store: SqlStore) -> None:
    await put_run(store, "old", thread_id="t1")
    await put_run(store, "failed", RunStatus.FAILED, thread_id="t2")
    await put_run(store, "waits", RunStatus.SUSPENDED, thread_id="t3")
    await put_run(store, "runs", RunStatus.RUNNING, thread_id="t4")
    await age(store, HOUR * 2)
    await put_run(store, "new", thread_id="t5")
    before = await rows_in(store)
    would = await prune(store, HOUR, dry_run=True)
    assert (await rows_in(store)) == before
    assert would == Pruned(runs=2, events=2 * 11 - 2 + 2, entries=4)
    assert await prune(store, HOUR) == would
    assert {record.identity.run_id for record in await store.list_runs()} == {"waits", "runs", "new"}
    assert (await rows_in(store))["threads"] == 5
    assert await prune(store, HOUR) == Pruned()
    assert await prune(store, YEAR) == Pruned()
    assert await check(store) == []


@pytest.mark.usefixtures("one_a_row")
async def test_a_large_run_goes_in_many_small_transactions(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_MOST_ROWS", 10)
    monkeypatch.setattr(upkeep, "_PAGE", 2)
    for number in range(5):
        await put_run(store, f"r{number}", thread_id=f"t{number}", deltas=25)
    seen = list[Pruned]()
    gone = await prune(store, 0, progress=seen.append)
    assert (gone.runs, gone.events) == (5, 5 * 33)
    assert len(seen) > 10
    assert all(later.events - earlier.events <= 10 for earlier, later in zip(seen, seen[1:], strict=False))
    assert (await rows_in(store))["events"] == (await rows_in(store))["logs"] == (await rows_in(store))["journal"] == 0


async def test_a_log_with_tasks_in_progress_stays(store: SqlStore) -> None:
    await put_run(store, "r1", owned=True)
    await age(store, HOUR)
    assert await prune(store, 60) == Pruned()
    assert await prune(store, 60, deltas=True) == Pruned()
    await tamper(store, "UPDATE logs SET lease_until = lease_until - ?", 2 * HOUR)
    assert (await prune(store, 60)).runs == 1


async def test_without_deltas_the_rest_keeps_its_numbers(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_MOST_ROWS", 10)
    await put_run(store, "r1", deltas=25)
    await put_run(store, "waits", RunStatus.SUSPENDED, thread_id="t2", deltas=5)
    assert await prune(store, 0, deltas=True, dry_run=True) == Pruned(runs=1, events=25)
    assert await prune(store, 0, deltas=True) == Pruned(runs=1, events=25)
    assert await prune(store, 0, deltas=True) == Pruned()
    left = [event async for event in stored_events(store, "r1")]
    assert [event.seq for event in left] == [1, 2, 28, 29, 30, 31, 32, 33]
    assert [event.seq async for event in stored_events(store, "r1", after=30)] == [31, 32, 33]
    assert await check(store) == []
    found = await store.read_events("waits")
    assert found is not None
    assert sum(event.kind == "text_delta" for event in found[0]) == 5


@pytest.mark.usefixtures("one_a_row")
async def test_what_was_interrupted_half_way_is_no_damage(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_MOST_ROWS", 10)
    await put_run(store, "r1", deltas=25)

    def stop(gone: Pruned) -> None:
        raise KeyboardInterrupt

    for deltas in (True, False):
        with pytest.raises(KeyboardInterrupt):
            await prune(store, 0, deltas=deltas, progress=stop)
        assert await check(store) == []
    assert (await prune(store, 0)).runs == 1


async def test_deltas_that_share_a_row_are_looked_at_and_go(store: SqlStore) -> None:
    await put_run(store, "r1", deltas=600)
    rows = await tamper(store, "SELECT seq, held FROM events WHERE kind = 'deltas' ORDER BY seq")
    assert [tuple(row) for row in rows] == [(258, 256), (514, 256), (602, 88)]
    found = await store.read_events("r1", 250, 20)
    assert found is not None
    assert [event.seq for event in found[0]] == list(range(251, 271))
    assert await check(store) == []
    await tamper(store, "UPDATE events SET held = 255 WHERE seq = 258")
    assert [finding.problem for finding in await check(store)] == ["event 3 is missing", "says that it is event 3"]
    await tamper(store, "DELETE FROM events WHERE seq = 258")
    assert [finding.problem for finding in await check(store)] == ["events 3 to 258 are missing"]
    assert await prune(store, 0, deltas=True) == Pruned(runs=1, events=344)
    assert await check(store) == []


async def test_threads_go_when_nothing_needs_them(store: SqlStore) -> None:
    spawned = {"k": {"agent_key": "k", "agent_id": "reader", "session_id": "child"}}
    state = PersistedState(1, {"retinue.subagents": spawned})
    await put_run(store, "r1", thread_id="root")
    await store.save_thread(ThreadRecord(thread_id="root", state=state, messages=(Message.user("hello"),)))
    await store.save_thread(ThreadRecord(thread_id="child", messages=(Message.user("read"), Message.assistant("ok"))))
    await put_run(store, "waits", RunStatus.SUSPENDED, thread_id="held")
    await age(store, HOUR)
    await store.save_thread(ThreadRecord(thread_id="fresh"))
    await tamper(store, "UPDATE runs SET ended_at = ended_at + ? WHERE run_id = 'r1'", HOUR)
    assert await prune(store, 60, threads=True) == Pruned()
    await age(store, HOUR)
    await store.save_thread(ThreadRecord(thread_id="fresh"))
    would = await prune(store, 60, threads=True, dry_run=True)
    gone = await prune(store, 60, threads=True)
    assert gone == would
    assert (gone.runs, gone.threads, gone.messages) == (1, 2, 3)
    assert {row[0] for row in await tamper(store, "SELECT thread_id FROM threads")} == {"held", "fresh"}


async def test_what_cannot_be_meant_is_refused(store: SqlStore) -> None:
    for seconds in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigurationError, match="older_than_seconds"):
            await prune(store, seconds)
    with pytest.raises(ConfigurationError, match="nothing but deltas"):
        await prune(store, 1, deltas=True, threads=True)
    with pytest.raises(ValueError, match="deltas_days"):
        Retention(deltas_days=-1)
    with pytest.raises(ConfigurationError, match="no database"):
        await migrate("memory:")


async def test_retention_prunes_at_once_and_goes_on_after_trouble(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PRUNE_EVERY", 0.01)
    await put_run(store, "r1", deltas=5)
    await put_run(store, "r2", thread_id="t2", deltas=5)
    await tamper(store, "UPDATE runs SET ended_at = ended_at - ? WHERE run_id = 'r1'", 3 * 86_400)
    real, failed = upkeep.prune, False

    async def once_broken(*args: object, **options: object) -> Pruned:
        nonlocal failed
        if not failed:
            failed = True
            raise StoreError("app.db", "the disk is full")
        return await real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(upkeep, "prune", once_broken)
    job = asyncio.create_task(keep_pruning(store, Retention(days=2, deltas_days=0)))
    for _ in range(1_000):
        await asyncio.sleep(0.01)
        if await tamper(store, "SELECT log_id, pruned FROM logs") == [("r2", 2)]:
            break
    job.cancel()
    assert (await rows_in(store))["runs"] == 1
    assert failed
    await asyncio.wait_for(keep_pruning(store, Retention()), 1)


async def test_check_names_what_is_wrong(store: SqlStore) -> None:
    for number in range(4):
        await put_run(store, f"r{number}", thread_id=f"t{number}")
    await put_run(store, "left", RunStatus.RUNNING, thread_id="t8")
    await put_run(store, "gone", RunStatus.RUNNING, thread_id="t9")
    assert await check(store) == []
    for statement in (
        "DELETE FROM events WHERE log_id = 'r0' AND seq IN (3, 4)",
        "UPDATE events SET body = '{\"kind\": 3}' WHERE log_id = 'r1' AND seq = 2",
        "UPDATE events SET seq = 99 WHERE log_id = 'r2' AND seq = 11",
        "DELETE FROM runs WHERE run_id = 'r3'",
        "UPDATE runs SET result = 'no JSON' WHERE run_id = 'r0'",
        "UPDATE threads SET state = '[]', holder = 'r1' WHERE thread_id = 't1'",
        "UPDATE messages SET body = '{}' WHERE thread_id = 't2'",
        "UPDATE journal SET body = '{' WHERE log_id = 'r2' AND place = 1",
        "DELETE FROM logs WHERE log_id = 'r2'",
        "UPDATE logs SET owner = NULL WHERE log_id = 'left'",
        "UPDATE logs SET lease_until = 5 WHERE log_id = 'gone'",
        "INSERT INTO tasks (agent, session_id, task_id, place, is_open, body) VALUES ('a', 's', 'x', 1, 1, '{}')",
    ):
        await tamper(store, statement)
    told = list[tuple[str, int, int]]()
    found = await check(store, lambda *seen: told.append(seen))
    assert {(finding.code, finding.what) for finding in found} == {
        ("gap", "run 'r0'"),
        ("event", "event 2 of run 'r1'"),
        ("no_log", "run 'r2'"),
        ("event", "event 99 of run 'r2'"),
        ("no_run", "log 'r3'"),
        ("result", "run 'r0': its result"),
        ("state", "thread 't1': its state"),
        ("held", "thread 't1'"),
        ("message", "thread 't2': message 0"),
        ("json", "run 'r2': entry 1 of its journal"),
        ("ownerless", "run 'left'"),
        ("expired", "run 'gone'"),
        ("task", "agent 'a', session 's': task 'x'"),
    }
    assert "run 'r0': events 3 to 4 are missing" in [str(finding).partition(" ")[2] for finding in found]
    assert {finding.code for finding in found if finding.severity == "warning"} == {"ownerless", "expired"}
    assert ("events", 62, 62) in told


async def test_an_owner_that_is_known_to_be_gone_is_told_before_its_lease_is_over(store: SqlStore) -> None:
    await put_run(store, "r1", RunStatus.RUNNING)
    assert await check(store, is_gone=lambda owner: owner != OWNER) == []
    (found,) = await check(store, is_gone=lambda owner: owner == OWNER)
    assert (found.code, found.what, found.severity) == ("gone", "run 'r1'", "warning")


async def test_of_any_number_of_runs_it_is_known_when_they_ended(store: SqlStore) -> None:
    await put_run(store, "r1")
    await put_run(store, "r2", RunStatus.RUNNING, thread_id="t2")
    ends = await store.ends_of([*[f"x{number}" for number in range(70_000)], "r1", "r2"])
    assert list(ends) == ["r1"]


@pytest.mark.usefixtures("one_a_row")
async def test_many_findings_of_a_kind_are_counted(store: SqlStore) -> None:
    await put_run(store, "r1", deltas=200)
    await tamper(store, "UPDATE events SET body = 'x'")
    found = await check(store)
    assert len(found) == 101
    assert found[-1].what == "108 more"


async def test_a_damaged_file_is_told(path: Path) -> None:
    store = SqliteStore(str(path))
    for number in range(50):
        await put_run(store, f"r{number}", thread_id=f"t{number}", deltas=50)
    await store.close()
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 20_000] = b"\xff" * 20_000
    path.write_bytes(data)
    again = SqliteStore(str(path))
    codes = {finding.code for finding in await check(again)}
    await again.close()
    assert codes & {"integrity", "unreadable"}


async def test_migration_is_told(path: Path) -> None:
    url = f"sqlite:///{path}"
    planned = await migrate(url, dry_run=True)
    assert (planned.before, planned.after) == (0, SCHEMA_VERSION)
    assert not path.exists()
    for step in MIGRATIONS[0]:
        assert isinstance(step, str)
        sql(path, step)
    sql(path, "PRAGMA user_version = 1")
    sql(path, "INSERT INTO runs VALUES ('r1', 't', NULL, 'a', 'completed', 1.0, '{}', NULL)")
    assert (await migrate(url, dry_run=True)).before == 1
    store = SqliteStore(str(path))
    (finding,) = await check(store)
    await store.close()
    assert (finding.code, "retinue db migrate" in finding.problem) == ("schema", True)
    assert sql(path, "PRAGMA user_version") == [(1,)]
    assert (await migrate(url)).before == 1
    assert (await migrate(url)).before == SCHEMA_VERSION
    (ended,) = sql(path, "SELECT ended_at FROM runs")[0]
    assert ended > 1_000_000_000
    sql(path, f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreError, match="newer version"):
        await migrate(url, dry_run=True)
