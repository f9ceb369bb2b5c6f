"""Task records in a database: the contract of all repositories, and what only this one is asked."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, RunStatus
from retinue.core.stores import LogBatch
from retinue.errors import TaskStoreError
from retinue.storage.prune import prune
from retinue.storage.sql import SqlStore
from retinue.storage.sqlite import BootClock, SqliteDatabase, SqliteStore
from retinue.storage.stores import open_store
from retinue.stores import MemoryStore, SqlTaskRepository
from retinue.tasks import TaskRecord, TaskRepository, TaskScope, TaskSettings, TaskStatus
from retinue.tasks.repository import LONGEST_RESULT
from retinue.tasks.sweeper import Sweeper
from retinue.tasks.task import await_human, beat, begin, finish, request_cancel
from retinue.testing import TaskRepositorySuite
from retinue.testing.stores import stored_run
from retinue.testing.tasks import NOW, S1, task_record
from retinue.testing.threads import begin as begin_run
from retinue.testing.threads import ended_run

from .. import inside
from ..effort import share
from ..prepared import PYTHON

ROOT = Path(__file__).parents[2]
WRITERS, UPDATES = share(4, 3), share(250, 60)

Open = Callable[..., SqlTaskRepository]


@pytest.fixture
async def open_tasks(database_url: str) -> AsyncIterator[Open]:
    """Opens the tasks of one database, each time as another process does."""
    opened: list[SqlTaskRepository] = []

    def open_one(settings: TaskSettings | None = None) -> SqlTaskRepository:
        opened.append(SqlTaskRepository(database_url, settings))
        return opened[-1]

    yield open_one
    for one in opened:
        await one.close()


@pytest.mark.parametrize("check", TaskRepositorySuite.names())
async def test_contract(open_tasks: Open, check: str) -> None:
    await getattr(TaskRepositorySuite(open_tasks, lambda made: open_tasks()), check)()


async def test_making_one_does_nothing(tmp_path: Path) -> None:
    made: TaskRepository = SqlTaskRepository(f"sqlite:///{tmp_path}/app.db")
    assert isinstance(made, SqlTaskRepository)
    await made.close()
    assert not list(tmp_path.iterdir())
    assert repr(made) == f"SqlTaskRepository('{tmp_path}/app.db')"


@pytest.mark.parametrize("store", ["memory:", "tasks", MemoryStore()])
def test_it_needs_a_database(store: str | MemoryStore) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:///"):
        SqlTaskRepository(store)


async def test_agents_keep_their_tasks_apart(open_tasks: Open) -> None:
    tasks = open_tasks()
    scopes = [TaskScope("one", "s1"), TaskScope("other", "s1")]
    for scope in scopes:
        await tasks.add(task_record("t1", scope, input=scope.agent))
    for scope in scopes:
        assert [record.input for record in await tasks.list(scope)] == [scope.agent]
        await tasks.update(scope, "t1", lambda record: begin(record, NOW, record.parent_agent_id))
    assert [(await tasks.list(scope))[0].node for scope in scopes] == ["one", "other"]
    assert await tasks.open_scopes() == scopes


@pytest.mark.parametrize("bad", ["\0", "a\0b", "\ud800"])
async def test_what_no_database_takes_is_not_there(open_tasks: Open, bad: str) -> None:
    tasks = open_tasks()
    await tasks.add(task_record("t1"))
    assert await tasks.get(S1, bad) is None
    assert await tasks.update(S1, bad, lambda record: record) is None
    assert await tasks.list(TaskScope("boss", bad)) == []
    assert await tasks.list(TaskScope("boss", "s1", bad)) == []
    with pytest.raises(TaskStoreError, match="not text"):
        await tasks.add(task_record(bad))


async def test_half_a_character_costs_nothing_else(open_tasks: Open) -> None:
    tasks = open_tasks()
    await tasks.add(task_record("t1", input="a\ud800b", node="n1", status=TaskStatus.RUNNING))
    ended = await tasks.update(S1, "t1", lambda r: finish(r, TaskStatus.COMPLETED, NOW, result="c\ud800d"))
    assert ended is not None
    assert (ended.input, ended.result) == ("a\ufffdb", "c\ufffdd")
    assert await tasks.get(S1, "t1") == ended


async def test_a_terminal_record_stays_whatever_a_change_says(open_tasks: Open) -> None:
    tasks = open_tasks()
    await tasks.add(task_record("t1", status=TaskStatus.COMPLETED, result="kept"))
    asked: list[TaskRecord] = []

    def revive(record: TaskRecord) -> TaskRecord:
        asked.append(record)
        return task_record("t1")

    assert await tasks.update(S1, "t1", revive) == task_record("t1", status=TaskStatus.COMPLETED, result="kept")
    assert not asked


async def test_a_late_result_does_not_take_the_place_of_the_first(open_tasks: Open) -> None:
    tasks = open_tasks()
    record = task_record("t1", node="n1", status=TaskStatus.RUNNING)
    await tasks.add(record)
    assert await tasks.keep_result(record, "x" * LONGEST_RESULT) is None
    first = await tasks.keep_result(record, "1" * (LONGEST_RESULT + 1))
    ended = await tasks.update(S1, "t1", lambda r: finish(r, TaskStatus.COMPLETED, NOW, result_file=first))
    assert ended is not None
    assert await tasks.keep_result(record, "2" * (LONGEST_RESULT + 1)) == first
    assert await open_tasks().read_result(ended) == "1" * (LONGEST_RESULT + 1)


async def test_a_result_that_is_gone_is_said(open_tasks: Open) -> None:
    said = await open_tasks().read_result(task_record("t1", result="the beginning…", result_file="task_results/t1"))
    assert said is not None
    assert said.startswith("the beginning…\n[the whole result is not in ")


async def test_a_database_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "app.db").write_bytes(b"not a database" * 100)
    async with SqlTaskRepository(f"sqlite:///{tmp_path}/app.db") as tasks:
        for work in (tasks.list(S1), tasks.get(S1, "t1"), tasks.add(task_record("t1")), tasks.open_scopes()):
            with pytest.raises(TaskStoreError, match=r"app\.db"):
                await work


async def test_a_record_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "app.db"))
    tasks = SqlTaskRepository(store)
    await tasks.add(task_record("t1"))
    await tasks.add(task_record("t1", TaskScope("boss", "s2")))
    with sqlite3.connect(tmp_path / "app.db") as connection:
        connection.execute("UPDATE tasks SET body = '{' WHERE session_id = 's1'")
    connection.close()
    for work in (tasks.list(S1), tasks.get(S1, "t1"), tasks.update(S1, "t1", lambda record: None)):
        with pytest.raises(TaskStoreError, match="a task of session 's1' cannot be read"):
            await work
    assert len(await tasks.list(TaskScope("boss", "s2"))) == 1
    assert len(await tasks.open_scopes()) == 2
    await store.close()


async def test_many_sweepers_give_up_on_each_orphan_once(open_tasks: Open) -> None:
    nodes = [open_tasks() for _ in range(4)]
    for number in range(40):
        scope = TaskScope("boss", f"s{number % 4}", "ann")
        await nodes[0].add(task_record(f"t{number}", scope, node="gone", status=TaskStatus.RUNNING))
    sweepers = [Sweeper(node, lambda: NOW + 3600, lambda: 0.0) for node in nodes]
    found = await asyncio.gather(*[sweeper.sweep(trust_clock=True) for sweeper in sweepers])
    swept = [record.task_id for records in found for record in records]
    assert sorted(swept) == sorted([f"t{number}" for number in range(40)])
    assert await nodes[0].open_scopes() == []


class Logs:
    """A store with one run, `r1`, and a repository on the same database that another process has opened."""

    def __init__(self, url: str, tasks: SqlTaskRepository, clocks: list[float]) -> None:
        self.store: Any = open_store(url)
        self.tasks, self.clocks = tasks, clocks
        self.sweeper = Sweeper(tasks, lambda: clocks[0], lambda: clocks[1])

    async def status(self) -> str:
        (life,) = (await self.tasks.liveness(S1)).values()
        return life.status

    async def sweep_after(self, seconds: float) -> list[str]:
        self.clocks[:] = [clock + seconds for clock in self.clocks]
        return [str(record.error_message) for record in await self.sweeper.sweep(trust_clock=True)]


@pytest.fixture
async def logs(database_url: str, open_tasks: Open) -> AsyncIterator[Logs]:
    logs = Logs(database_url, open_tasks(), [NOW, 0.0])
    await logs.store.open()
    await begin_run(logs.store, stored_run("r1"))
    await logs.tasks.add(task_record("t1", node="n1", status=TaskStatus.RUNNING, log_id="r1"))
    yield logs
    await logs.store.close()


async def test_a_task_lives_while_its_log_has_an_owner(logs: Logs) -> None:
    assert await logs.status() == "alive"
    assert await logs.sweep_after(100_000) == []
    before = (await logs.tasks.liveness(S1))["t1"]
    assert before.owner == "p1"
    await logs.store.renew("p1", 100.0)
    assert (await logs.tasks.liveness(S1))["t1"].mark != before.mark
    assert await logs.sweep_after(100_000) == []


async def test_an_orphaned_task_is_given_up_on_when_it_was_watched_for_long_enough(logs: Logs) -> None:
    await logs.store.renew("p1", -1.0)
    assert await logs.status() == "orphaned"
    for seconds in (100_000, 599):  # no clock counts, only what was seen
        assert await logs.sweep_after(seconds) == []
    assert await logs.store.claim("r1", "p2", -1.0) == 2
    assert await logs.sweep_after(1) == [], "somebody had continued it in between"
    assert await logs.sweep_after(599) == []
    assert await logs.sweep_after(1) == ["executor lost: nobody has continued its run for 600 seconds"]
    assert await logs.tasks.liveness(S1) == {}


async def test_a_released_log_is_taken_over_sooner_or_later(logs: Logs) -> None:
    await logs.store.write(LogBatch(log_id="r1", epoch=1, released=True))
    assert await logs.status() == "orphaned"
    assert await logs.sweep_after(0) == []
    assert await logs.store.claim("r1", "p2", 60.0) == 2
    assert await logs.status() == "alive"
    assert await logs.sweep_after(1000) == []


@pytest.mark.parametrize("status", [RunStatus.SUSPENDED, RunStatus.WAITING_INPUT, RunStatus.WAITING_AUTH])
async def test_a_task_whose_run_waits_may_wait_on_unless_somebody_wants_it_to_stop(
    logs: Logs, status: RunStatus
) -> None:
    waits = stored_run("r1", 1.0, status)
    await logs.store.write(LogBatch(log_id="r1", epoch=1, runs=[waits], released=True))
    assert await logs.status() == "waiting"
    assert await logs.sweep_after(0) == await logs.sweep_after(100_000) == []
    await logs.tasks.update(S1, "t1", lambda record: request_cancel(record, NOW))
    assert await logs.sweep_after(0) == await logs.sweep_after(599) == []
    assert len(await logs.sweep_after(1)) == 1
    (record,) = await logs.tasks.list(S1)
    assert record.status is TaskStatus.CANCELLED


async def test_a_task_that_waits_for_a_human_outlives_its_process(logs: Logs) -> None:
    await logs.tasks.update(S1, "t1", lambda record: await_human(record, NOW, "may I?"))
    await logs.store.renew("p1", -1.0)
    assert await logs.sweep_after(0) == await logs.sweep_after(100_000) == []


@pytest.mark.parametrize("pruned", [False, True])
async def test_a_task_of_an_ended_log_is_lost(logs: Logs, pruned: bool) -> None:
    await logs.tasks.update(S1, "t1", lambda record: await_human(record, NOW, "may I?"))
    await logs.store.write(ended_run("r1"))
    if pruned:
        assert (await prune(logs.store, 0)).runs == 1
    assert await logs.status() == "lost"
    assert await logs.sweep_after(0) == ["executor lost: its run has ended without it"]


async def test_a_remote_task_is_never_given_up_on(logs: Logs) -> None:
    await logs.tasks.add(task_record("t2", status=TaskStatus.RUNNING, log_id="r1", transport_type="task-protocol"))
    await logs.store.write(ended_run("r1"))
    assert len(await logs.sweep_after(0)) == 1
    assert [record.status for record in await logs.tasks.list(S1)] == [TaskStatus.FAILED, TaskStatus.RUNNING]


async def test_each_user_is_told_of_their_own_tasks(logs: Logs) -> None:
    ann = TaskScope("boss", "s1", "ann")
    await logs.tasks.add(task_record("t2", ann, status=TaskStatus.RUNNING, log_id="r1"))
    assert [*await logs.tasks.liveness(S1)] == ["t1"]
    assert [*await logs.tasks.liveness(ann)] == ["t2"]
    assert await logs.tasks.liveness(TaskScope("boss", "s1", "a\0b")) == {}


async def test_a_lease_of_another_boot_counts_until_it_was_seen_unchanged(tmp_path: Path) -> None:
    def opened(boot: str) -> SqlStore:
        return SqlStore(SqliteDatabase(f"{tmp_path}/app.db", "process", BootClock(boot, lambda: 1000.0)))

    before, now = opened("before"), opened("now")
    await before.open()
    await begin_run(before, stored_run("r1"))
    clocks, tasks = [NOW, 0.0], SqlTaskRepository(now)
    await tasks.add(task_record("t1", node="n1", status=TaskStatus.RUNNING, log_id="r1"))
    sweeper = Sweeper(tasks, lambda: clocks[0], lambda: clocks[1])
    for seconds in (0, 599):
        clocks[1] += seconds
        assert await sweeper.sweep(trust_clock=True) == []
    await before.renew("p1", 61.0)
    clocks[1] += 1
    assert await sweeper.sweep() == [], "it has shown life"
    clocks[1] += 600
    assert len(await sweeper.sweep()) == 1
    await before.close()
    await now.close()


WRITE = """
import asyncio, sys
from retinue.stores import SqlTaskRepository
from retinue.tasks import TaskScope
from retinue.tasks.task import beat

async def main():
    async with SqlTaskRepository(sys.argv[1]) as tasks:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(int(sys.argv[2])):
            task = "shared" if number % 2 else f"own {sys.argv[3]}"
            await tasks.update(TaskScope("boss", "s1"), task, lambda record: beat(record, 1_800_000_001, "n1"))

asyncio.run(main())
"""


@pytest.mark.timeout(120)
async def test_four_processes_lose_nothing(database_url: str, open_tasks: Open) -> None:
    tasks = open_tasks()
    names = ["shared", *[f"own {number}" for number in range(WRITERS)]]
    for name in names:
        await tasks.add(task_record(name, node="n1", status=TaskStatus.RUNNING))
    writers: list[subprocess.Popen[bytes]] = [
        subprocess.Popen(
            [PYTHON, "-c", WRITE, database_url, str(UPDATES), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for number in range(WRITERS)
    ]
    assert [writer.stdout.readline() for writer in writers if writer.stdout] == [b"ready\n"] * WRITERS
    ends: list[Any] = await asyncio.gather(*[asyncio.to_thread(writer.communicate, b"go\n") for writer in writers])
    assert [writer.returncode for writer in writers] == [0] * WRITERS, ends
    versions = {record.task_id: record.version for record in await tasks.list(S1)}
    assert versions.pop("shared") == 1 + WRITERS * UPDATES // 2
    assert versions == {f"own {number}": 1 + UPDATES // 2 for number in range(WRITERS)}


async def test_work_that_is_done_twice_is_done_once(open_tasks: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a connection that broke when all was written: it is tried again."""
    tasks = open_tasks()
    database: Any = inside.database_of(tasks)
    write = database.write

    async def twice(work: Callable[[Any], Any], about: str = "") -> Any:
        await write(work, about)
        return await write(work, about)

    monkeypatch.setattr(database, "write", twice)
    await tasks.add(task_record("t1", node="n1", status=TaskStatus.RUNNING))
    with pytest.raises(TaskStoreError, match="there is a task t1 already"):
        await tasks.add(task_record("t1"))
    after = await tasks.update(S1, "t1", lambda record: beat(record, NOW + 1, "n1"))
    assert after is not None
    assert after.version == 2
    assert await tasks.get(S1, "t1") == after
