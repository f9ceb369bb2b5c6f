"""Pruning, checking and migrating a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, Message, PersistedState, RunIdentity, RunResult, RunStatus
from retinue.core.events import RunFinished, RunStarted
from retinue.core.rows import LogRow, Private
from retinue.core.stores import LogBatch, StoredLog, Wish
from retinue.errors import StoreError
from retinue.storage import prune as module
from retinue.storage.check import check
from retinue.storage.prune import Pruned, keep_pruning, prune
from retinue.storage.schema import MIGRATIONS, newest_version
from retinue.storage.sql import SqlStore
from retinue.storage.sqlite import SqliteStore
from retinue.storage.stores import migrate, sql_store
from retinue.stores import Retention, RunRecord, SqlTaskRepository, ThreadRecord
from retinue.tasks import TaskStatus
from retinue.tasks.repository import LONGEST_RESULT
from retinue.tasks.task import finish
from retinue.testing.tasks import NOW, task_record

from .. import inside
from .stored import OWNER, put_run, rows_in, sql, tamper

HOUR, YEAR = 3600.0, 365 * 86_400.0


@pytest.fixture
def one_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows share a pack."""
    inside.pack_rows_by(monkeypatch, 1)


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
    assert would == Pruned(runs=2, events=2 * 11)
    assert await prune(store, HOUR) == would
    assert {record.identity.run_id for record in await store.list_runs()} == {"waits", "runs", "new"}
    assert (await rows_in(store))["threads"] == 5
    assert await prune(store, HOUR) == Pruned()
    assert await prune(store, YEAR) == Pruned()
    assert await check(store) == []


def watch_pruning(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> list[int]:
    """Note the number of events that each transaction drops; then do something."""
    seen = list[int]()
    real: Any = module.remove_runs

    def watched(*args: Any, **options: Any) -> Any:
        done = real(*args, **options)
        seen.append(done[2])
        return done

    async def pause(seconds: float) -> None:
        then()

    monkeypatch.setattr(module, "remove_runs", watched)
    monkeypatch.setattr(module.asyncio, "sleep", pause)
    return seen


@pytest.mark.usefixtures("one_a_row")
async def test_a_large_run_goes_in_many_small_transactions(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    inside.prune_by(monkeypatch, 2)
    for number in range(5):
        await put_run(store, f"r{number}", thread_id=f"t{number}", deltas=25)
        await store.put_wish(Wish(log_id=f"r{number}", wish_id="w", run_id=f"r{number}", kind="cancel"))
    seen = watch_pruning(monkeypatch)
    gone = await prune(store, 0)
    assert (gone.runs, gone.events) == (5, 5 * 33)
    assert len(seen) > 10
    assert max(seen) <= 10
    assert (await rows_in(store))["events"] == (await rows_in(store))["logs"] == (await rows_in(store))["inbox"] == 0


async def test_a_log_with_tasks_in_progress_stays(store: SqlStore) -> None:
    await put_run(store, "r1", owned=True)
    await age(store, HOUR)
    assert await prune(store, 60) == Pruned()
    assert await prune(store, 60, deltas=True) == Pruned()
    await store.write(LogBatch(log_id="r1", epoch=1, ended=True))
    assert (await prune(store, 60)).runs == 1


async def numbers(store: SqlStore, after: int = 0, limit: int = 100) -> list[int]:
    """The numbers of the public events of run r1."""
    found = await store.read_events("r1", after, limit)
    assert found is not None
    return [event.seq for event in found[0]]


async def test_without_private_parts_a_log_is_marked_and_still_read(store: SqlStore) -> None:
    await put_run(store, "r1")
    await put_run(store, "waits", RunStatus.SUSPENDED, thread_id="t2")
    alone = [LogRow(11, 1, None, Private(kind="commit"))]
    assert await store.claim("waits", OWNER, 60.0) == 2
    await store.write(LogBatch(log_id="waits", epoch=2, rows=alone, released=True))
    await put_run(store, "tail", RunStatus.RUNNING, thread_id="t3")
    await store.write(LogBatch(log_id="tail", epoch=1, rows=[LogRow(10, 1, None, Private(kind="commit"))]))
    ended = RunFinished(seq=11, run_id="tail", status=RunStatus.COMPLETED, termination="natural")
    record = await store.load_run("tail")
    assert record is not None
    record.result = RunResult(status=RunStatus.COMPLETED, run_id="tail", thread_id="t3", state=PersistedState())
    await store.write(LogBatch(log_id="tail", epoch=1, rows=[LogRow(11, 0, ended)], runs=[record], ended=True))
    public = {run_id: await store.read_events(run_id) for run_id in ("r1", "tail")}
    assert await prune(store, 0, deltas=True) == Pruned(runs=2, events=6)
    found = await tamper(store, "SELECT DISTINCT log_id FROM events WHERE private IS NOT NULL OR body IS NULL")
    assert found == [("waits",)]
    for run_id, before in public.items():
        log = await store.read_log(run_id)
        assert log is not None
        assert (log.thinned, log.ended) == (True, True)
        assert before is not None
        assert [row.event for row in log.rows] == [e for e in before[0] if e.kind != "text_delta"]
        assert all(row.private is None for row in log.rows)
    waiting = await store.read_log("waits")
    assert waiting is not None
    assert (waiting.thinned, waiting.sub) == (False, 1)
    assert await check(store) == []


async def test_a_background_child_goes_with_its_log(store: SqlStore) -> None:
    await put_run(store, "r1", owned=True)
    child = RunRecord(identity=RunIdentity("child", "t2", "reader", parent_run_id="r1"), started_at=1.0, log_id="r1")
    child.result = RunResult(status=RunStatus.COMPLETED, run_id="child", thread_id="t2", state=PersistedState())
    await store.write(LogBatch(log_id="r1", epoch=1, runs=[child]))
    await age(store, HOUR)
    assert await prune(store, 60) == Pruned()
    await store.write(LogBatch(log_id="r1", epoch=1, ended=True))
    assert (await prune(store, 60)).runs == 1
    assert await store.list_runs() == []


async def test_tasks_that_ended_long_ago_go(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 2)
    tasks = SqlTaskRepository(store)
    for number in range(7):
        status = TaskStatus.RUNNING if number == 6 else TaskStatus.PENDING
        record = task_record(f"t{number}", status=status, node="n1")
        await tasks.add(record)
        if number != 6:
            kept = await tasks.keep_result(record, "x" * (LONGEST_RESULT + 1))
            change = partial(finish, status=TaskStatus.COMPLETED, now=NOW, result_file=kept)
            await tasks.update(record.scope, record.task_id, change)
    await put_run(store, "r1", owned=True)
    await tamper(store, "UPDATE tasks SET log_id = 'r1' WHERE task_id IN ('t1', 't2')")
    await tamper(store, "UPDATE tasks SET saved_at = saved_at - ? WHERE task_id <> 't0'", 2 * HOUR)
    await age(store, 2 * HOUR)
    would = await prune(store, HOUR, dry_run=True)
    assert would == Pruned(tasks=3)
    assert await prune(store, HOUR) == would
    await store.write(LogBatch(log_id="r1", epoch=1, ended=True))
    would = await prune(store, HOUR, dry_run=True)
    assert (would.runs, would.tasks) == (1, 2)
    assert await prune(store, HOUR) == would
    left = await tasks.everything()
    assert [record.task_id for record in left] == ["t0", "t6"]
    assert len(await tamper(store, "SELECT task_id FROM task_results")) == 1


async def test_without_deltas_the_rest_keeps_its_numbers(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    await put_run(store, "r1", deltas=25)
    await put_run(store, "waits", RunStatus.SUSPENDED, thread_id="t2", deltas=5)
    assert await prune(store, 0, deltas=True, dry_run=True) == Pruned(runs=1, events=25)
    assert await prune(store, 0, deltas=True) == Pruned(runs=1, events=25)
    assert await prune(store, 0, deltas=True) == Pruned()
    assert await numbers(store) == [1, 2, 28, 29, 30, 31, 32, 33]
    assert await numbers(store, after=30) == [31, 32, 33]
    assert await numbers(store, after=2, limit=2) == [28, 29]
    assert await check(store) == []
    found = await store.read_events("waits")
    assert found is not None
    assert sum(event.kind == "text_delta" for event in found[0]) == 5


@pytest.mark.usefixtures("one_a_row")
async def test_what_was_interrupted_half_way_is_no_damage(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    await put_run(store, "r1", deltas=25)

    def stop() -> None:
        raise KeyboardInterrupt

    for deltas in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            watch_pruning(patched, stop)
            with pytest.raises(KeyboardInterrupt):
                await prune(store, 0, deltas=deltas)
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
    assert [finding.problem for finding in await check(store)] == ["event 3 is missing"]
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
    with pytest.raises(ConfigurationError, match="needs a database"):
        await migrate("memory:")


async def test_retention_prunes_at_once_and_goes_on_after_trouble(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRUNE_EVERY", 0.01)
    await put_run(store, "r1", deltas=5)
    await put_run(store, "r2", thread_id="t2", deltas=5)
    await tamper(store, "UPDATE runs SET ended_at = ended_at - ? WHERE run_id = 'r1'", 3 * 86_400)
    real, failed = module.prune, False

    async def once_broken(*args: object, **options: object) -> Pruned:
        nonlocal failed
        if not failed:
            failed = True
            raise StoreError("app.db", "the disk is full")
        return await real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "prune", once_broken)
    job = asyncio.create_task(keep_pruning(store, Retention(days=2, deltas_days=0)))
    for _ in range(1_000):
        await asyncio.sleep(0.01)
        if await tamper(store, "SELECT log_id, pruned FROM logs") == [("r2", 2)]:
            break
    job.cancel()
    assert (await rows_in(store))["runs"] == 1
    assert failed
    await asyncio.wait_for(keep_pruning(store, Retention()), 90)


async def test_check_names_what_is_wrong(store: SqlStore) -> None:
    for number in range(4):
        await put_run(store, f"r{number}", thread_id=f"t{number}")
    for name in ("odd", "newer", "cut", "empty", "wrong"):
        await put_run(store, name, thread_id=name)
    for name in ("left", "gone", "unsure"):
        await put_run(store, name, RunStatus.RUNNING, thread_id=name)
    await store.put_wish(Wish(log_id="r0", wish_id="w", run_id="r0", kind="cancel", body=b'"why"'))
    assert await check(store) == []
    for statement in (
        "DELETE FROM events WHERE log_id = 'r0' AND seq = 5",
        "UPDATE events SET body = '[{\"kind\": 3}]' WHERE log_id = 'r1' AND seq = 2",
        "UPDATE events SET seq = 99 WHERE log_id = 'r2' AND seq = 11",
        "UPDATE events SET private = '[[1, 2, 3]]' WHERE log_id = 'odd' AND seq = 11",
        """UPDATE events SET body = '[{"kind": "new", "seq": 1}, {"seq": 2}]' WHERE log_id = 'newer' AND seq = 2""",
        "DELETE FROM events WHERE log_id = 'cut' AND seq > 5",
        "DELETE FROM events WHERE log_id = 'empty'",
        "UPDATE runs SET status = 'running', ended_at = NULL WHERE run_id = 'wrong'",
        "DELETE FROM runs WHERE run_id = 'r3'",
        "UPDATE runs SET result = 'no JSON', request = '{' WHERE run_id = 'r0'",
        "UPDATE threads SET state = '[]', holder = 'r1' WHERE thread_id = 't1'",
        "UPDATE messages SET body = '{}' WHERE thread_id = 't2'",
        "UPDATE inbox SET body = '{', reply = '['",
        "DELETE FROM logs WHERE log_id = 'r2'",
        "UPDATE logs SET owner = NULL WHERE log_id = 'left'",
        "UPDATE logs SET lease_until = -5 WHERE log_id = 'gone'",
        "UPDATE logs SET lease_until = -5, boot = 'another' WHERE log_id = 'unsure'",
        """INSERT INTO tasks (agent, session_id, task_id, place, is_open, saved_at, body)
        VALUES ('a', 's', 'x', 1, 1, 0, '{}')""",
    ):
        await tamper(store, statement)
    told = list[tuple[str, int, int]]()
    found = await check(store, lambda *seen: told.append(seen))
    assert {(finding.code, finding.what) for finding in found} == {
        ("log", "event 3 of run 'r0'"),
        ("log", "event 1 of run 'r1'"),
        ("no_log", "run 'r2'"),
        ("log", "event 6 of run 'odd'"),
        ("log", "event 1 of run 'newer'"),
        ("truncated", "run 'cut'"),
        ("truncated", "run 'empty'"),
        ("ended", "run 'wrong'"),
        ("no_run", "log 'r3'"),
        ("result", "run 'r0': its result"),
        ("json", "run 'r0': what was asked of it"),
        ("state", "thread 't1': its state"),
        ("held", "thread 't1'"),
        ("message", "thread 't2': its messages"),
        ("json", "run 'r0': wish 'w'"),
        ("json", "run 'r0': the reply to wish 'w'"),
        ("ownerless", "run 'left'"),
        ("expired", "run 'gone'"),
        ("task", "agent 'a', session 's': task 'x'"),
    }
    said = [str(finding).partition(" ")[2] for finding in found]
    assert "event 3 of run 'r0': events 3 to 5 are missing" in said
    assert "run 'cut': the log is truncated: the run is completed, but its log does not end so" in said
    assert {finding.code for finding in found if finding.severity == "warning"} == {"ownerless", "expired"}
    assert told[-1][1] == told[-1][2] > 0


async def test_check_finds_the_truncated_log_of_a_run_that_waits(store: SqlStore) -> None:
    for name in ("whole", "cut", "empty", "continued"):
        await put_run(store, name, RunStatus.SUSPENDED, thread_id=name)
    started = RunStarted(seq=12, run_id="continued", agent="assistant", thread_id="continued")
    for name in ("cut", "empty"):
        await tamper(store, f"DELETE FROM events WHERE log_id = '{name}' AND seq > {5 if name == 'cut' else 0}")
    assert await store.claim("continued", OWNER, 60.0) == 2
    await store.write(LogBatch(log_id="continued", epoch=2, rows=[LogRow(12, 0, started)]))
    found = await check(store)
    assert [(finding.code, finding.what) for finding in found] == [
        ("truncated", "run 'cut'"),
        ("truncated", "run 'empty'"),
    ]
    assert found[0].problem == "the log is truncated: the run is suspended, but its log does not end so"
    await store.write(LogBatch(log_id="continued", epoch=2, released=True))
    assert ("truncated", "run 'continued'") in [(finding.code, finding.what) for finding in await check(store)]


async def test_check_folds_every_log_that_can_be_read(store: SqlStore) -> None:
    for name in ("bad", "damaged", "good", "thin"):
        await put_run(store, name, thread_id=name)
    await tamper(store, "DELETE FROM events WHERE log_id = 'damaged' AND seq = 2")
    await tamper(store, "UPDATE logs SET pruned = 2 WHERE log_id = 'thin'")
    folded: list[tuple[str, int]] = []

    def fold(log_id: str, log: StoredLog) -> str | None:
        folded.append((log_id, log.seq))
        return "it does not fold" if log_id == "bad" else None

    found = await check(store, fold=fold)
    assert [(finding.code, finding.what) for finding in found] == [
        ("fold", "run 'bad'"),
        ("log", "event 1 of run 'damaged'"),
    ]
    assert found[0].problem == "it does not fold"
    assert folded == [("bad", 11), ("good", 11)]


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
    await tamper(store, "UPDATE events SET body = 'x' WHERE body IS NOT NULL")
    found = await check(store)
    assert [finding.code for finding in found] == ["log", *["events"] * 101]
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


async def test_migration_reports_versions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = newest_version()
    url = f"sqlite:///{path}"
    planned = await migrate(url, dry_run=True)
    assert (planned.before, planned.after) == (0, known)
    assert not path.exists()
    assert (await migrate(url)).before == 0
    assert (await migrate(url)).before == known
    newer = (*MIGRATIONS, ("CREATE TABLE more (a TEXT)",))
    monkeypatch.setattr("retinue.storage.schema.MIGRATIONS", newer)
    assert (await migrate(url, dry_run=True)).before == known
    store = SqliteStore(str(path))
    (finding,) = await check(store)
    await store.close()
    assert (finding.code, "retinue db migrate" in finding.problem) == ("schema", True)
    assert sql(path, "SELECT version FROM schema_info") == [(known,)]
    assert (await migrate(url)).after == len(newer)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="newer version"):
        await migrate(url, dry_run=True)
