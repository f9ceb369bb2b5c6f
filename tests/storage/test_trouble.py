"""Trouble with a database of any kind: what is stored stays whole, and the error says what is wrong."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from retinue.core.errors import LogUnreadable
from retinue.core.stores import LogBatch, ThreadUpdate, Wish
from retinue.errors import StoreError
from retinue.storage import schema
from retinue.storage.postgres import PostgresStore
from retinue.storage.sql import SqlStore
from retinue.storage.sqlite import BootClock, SqliteDatabase, SqliteStore
from retinue.testing.stores import stored_run, stored_thread
from retinue.testing.threads import LONG, begin, ended_run, full_batch, public, step_rows, text_rows

from ..databases import TestServer

Place = tuple[str, str]
"""The name of a module, and a path or URL."""


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return "sqlite", str(tmp_path / "app.db")
    return "postgres", request.getfixturevalue("postgres_url")


@pytest.fixture(params=["sqlite", "postgres"])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place without tables."""
    if request.param == "sqlite":
        return "sqlite", str(tmp_path / "app.db")
    return "postgres", request.getfixturevalue("new_postgres_url")


def store_at(place: Place) -> SqliteStore | PostgresStore:
    return SqliteStore(place[1]) if place[0] == "sqlite" else PostgresStore(place[1])


async def do(place: Place, statement: str, *values: Any) -> None:
    """Do something behind the back of whoever uses a store."""
    store = store_at(place)
    await store.database.write(lambda link: link.run(statement, *values))
    await store.close()


async def tables(place: Place, server: TestServer | None) -> list[str]:
    if server is None:
        with sqlite3.connect(place[1]) as file:
            found = file.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        file.close()
    else:
        query = b"SELECT tablename FROM pg_tables WHERE schemaname = %s ORDER BY 1"
        with server.connect() as connection:
            found = connection.execute(query, (place[1].rpartition("=")[2],)).fetchall()
    return [name for (name,) in found]


def use_steps(monkeypatch: pytest.MonkeyPatch, place: Place, steps: Any) -> None:
    """Have the schema consist of these steps."""
    monkeypatch.setattr(schema, "MIGRATIONS", steps)


def fail(link: Any) -> None:
    raise RuntimeError("the lights went out")


STEPS = (("CREATE TABLE one (a TEXT)", "CREATE TABLE two (a TEXT)"), ("CREATE TABLE three (a TEXT)",))


@pytest.mark.parametrize("bad", [fail, "CREATE TABLE one (a TEXT)"])
@pytest.mark.parametrize("version", [0, 1])
async def test_an_interrupted_migration_changes_nothing(
    request: pytest.FixtureRequest, new_place: Place, monkeypatch: pytest.MonkeyPatch, version: int, bad: Any
) -> None:
    server = None if new_place[0] == "sqlite" else request.getfixturevalue("postgres_server")
    if version:
        use_steps(monkeypatch, new_place, STEPS[:version])
        await open_and_close(new_place)
    before = await tables(new_place, server)
    use_steps(monkeypatch, new_place, (*STEPS[:version], (*STEPS[version], bad)))
    with pytest.raises((StoreError, RuntimeError)):
        await open_and_close(new_place)
    assert await tables(new_place, server) == before
    use_steps(monkeypatch, new_place, STEPS)
    await open_and_close(new_place)
    assert await tables(new_place, server) == ["one", "schema_info", "three", "two"]
    store = store_at(new_place)
    assert await store.database.version() == 2
    await store.close()


async def open_and_close(place: Place) -> None:
    store = store_at(place)
    try:
        await store.open()
    finally:
        await store.close()


async def test_what_an_older_version_wrote_is_kept(new_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(link: Any) -> None:
        link.run("UPDATE one SET a = a || ?", "!")

    use_steps(monkeypatch, new_place, STEPS[:1])
    await do(new_place, "INSERT INTO one VALUES (?)", "kept")
    use_steps(monkeypatch, new_place, (*STEPS[:1], (fill,)))
    store = store_at(new_place)
    assert await store.database.read(lambda link: link.run("SELECT a FROM one")) == [("kept!",)]
    await store.close()


async def test_a_newer_schema_is_refused(place: Place) -> None:
    await do(place, "UPDATE schema_info SET version = 999")
    with pytest.raises(StoreError) as refused:
        await open_and_close(place)
    known = f"written by a newer version (schema 999, known {schema.newest_version()}): upgrade"
    assert known in str(refused.value)
    assert not refused.value.transient


OLD = (
    "CREATE TABLE threads (thread_id TEXT PRIMARY KEY)",
    "CREATE TABLE logs (log_id TEXT PRIMARY KEY)",
    "CREATE TABLE format (version INTEGER NOT NULL)",
    "INSERT INTO format VALUES (7)",
)


async def test_a_database_of_a_development_version_is_refused_and_left_alone(
    request: pytest.FixtureRequest, new_place: Place
) -> None:
    if new_place[0] == "sqlite":
        with sqlite3.connect(new_place[1]) as file:
            for statement in (*OLD, "PRAGMA user_version = 6"):
                file.execute(statement)
        file.close()
        before = Path(new_place[1]).read_bytes()
    else:
        name = new_place[1].rpartition("=")[2]
        with request.getfixturevalue("postgres_server").connect() as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
            connection.execute(f"SET search_path = {name}".encode())
            for statement in OLD:
                connection.execute(statement.encode())
    with pytest.raises(StoreError, match=r"development version before the first release .* delete it") as refused:
        await open_and_close(new_place)
    assert not refused.value.transient
    if new_place[0] == "sqlite":
        assert Path(new_place[1]).read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE runs SET result = ? WHERE run_id = 'r1'", "run 'r1'"),
        ("UPDATE runs SET identity = ? WHERE run_id = 'r1'", "run 'r1'"),
        ("UPDATE threads SET state = ? WHERE thread_id = 't1'", "thread 't1'"),
        ("UPDATE messages SET body = ? WHERE thread_id = 't1'", "thread 't1'"),
        ("UPDATE events SET body = ? WHERE seq = 3", "an event of run 'r1' after number 0"),
    ],
)
@pytest.mark.parametrize("bad", [b'{"', b"[1]", b"\xff\x00", b""])
async def test_what_cannot_be_read_is_named(place: Place, statement: str, named: str, bad: bytes) -> None:
    store = store_at(place)
    await begin(store, stored_run("r1"))
    await store.write(full_batch())
    await begin(store, stored_run("r2", thread_id="t2"))
    await do(place, statement, bad)
    with pytest.raises(StoreError) as refused:
        await read_all(store)
    assert f"what is stored of {named} cannot be read" in str(refused.value)
    assert store.place in str(refused.value)
    assert not refused.value.transient
    assert await store.load_run("r2") == stored_run("r2", thread_id="t2")
    await store.close()


@pytest.mark.parametrize("column", ["identity", "result"])
async def test_a_run_that_cannot_be_read_does_not_hide_the_others(
    place: Place, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_at(place)
    for number in (1, 2, 3):
        await begin(store, stored_run(f"r{number}", float(number), thread_id=f"t{number}"))
    await do(place, f"UPDATE runs SET {column} = ? WHERE run_id = 'r2'", b"[1]")
    refused: list[StoreError] = []
    listed = await store.list_runs(on_unreadable=refused.append)
    assert [record.identity.run_id for record in listed] == ["r3", "r1"]
    assert ["what is stored of run 'r2' cannot be read" in str(exc) for exc in refused] == [True]
    assert await store.list_runs() == listed
    assert "run 'r2' cannot be read" in caplog.text
    await store.close()


async def read_all(store: SqlStore) -> None:
    await store.load_run("r1")
    await store.load_thread("t1")
    await store.read_events("r1")


@pytest.mark.parametrize(
    ("statement", "seq", "problem"),
    [
        ("DELETE FROM events WHERE seq = 3", 1, "events 1 to 3 are missing"),
        ("DELETE FROM events WHERE seq = 20", 4, "events 4 to 20 are missing"),
        ("DELETE FROM events WHERE seq = 23 AND sub = 1", 24, "the private row 23.1 is missing"),
        ("UPDATE events SET held = 16 WHERE seq = 20", 4, "event 4 is missing"),
        ("UPDATE events SET held = 18 WHERE seq = 20", 4, "it is stored twice, from event 3 on"),
        ("UPDATE events SET body = '[{' WHERE seq = 3", 1, "truncated"),
        ("UPDATE events SET body = '[]' WHERE seq = 3", 1, "it holds 0 events, not 3"),
        ("UPDATE events SET private = '[[1' WHERE seq = 3", 1, "truncated"),
        ('UPDATE events SET private = \'[[1, 2, {"kind": "odd"}]]\' WHERE seq = 3', 1, "Invalid enum value"),
        ('UPDATE events SET body = \'[{"kind": "odd", "seq": 24}]\' WHERE seq = 24', 24, "the kind 'odd'"),
    ],
)
async def test_a_log_that_cannot_be_folded_says_where(place: Place, statement: str, seq: int, problem: str) -> None:
    store = store_at(place)
    await begin(store, stored_run("r1"))
    last = step_rows(24, "last")[0]
    commits = [(23, 1), (23, 2)]
    batches = [[*step_rows(1), *text_rows(4, 20)], step_rows(21)]
    for rows in (*batches, *[[_commit(*at)] for at in commits], [last], text_rows(25, 30)):
        await store.write(LogBatch(log_id="r1", epoch=1, rows=rows))
    assert await store.read_log("r1") is not None
    await do(place, statement)
    with pytest.raises(LogUnreadable) as refused:
        await store.read_log("r1")
    assert refused.value.seq == seq
    assert problem in refused.value.reason
    assert str(refused.value).startswith(f"{store.place}: the log of run 'r1' cannot be read at event {seq}: ")
    assert not refused.value.transient
    await store.close()


def _commit(seq: int, sub: int) -> Any:
    from retinue.core.rows import LogRow, Private

    return LogRow(seq, sub, None, Private(kind="commit"))


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
async def test_what_is_no_text_is_refused_before_anything_is_written(place: Place, text: str) -> None:
    store = store_at(place)
    await begin(store, stored_run("r1"))
    for wrong in (
        store.put_wish(Wish(log_id="r1", wish_id="w1", run_id=text, kind="cancel")),
        store.claim("r1", text, LONG, gone="p1"),
    ):
        with pytest.raises(StoreError, match=r"cannot.* store.*surrogates not allowed") as refused:
            await wrong
        assert not refused.value.transient
    assert await store.owner_of("r1") == "p1"
    await store.write(LogBatch(log_id="r1", epoch=1, rows=text_rows(1, 1)))
    assert await store.read_events("r1") == (public(text_rows(1, 1)), False)
    await store.close()


async def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "app.db"))
    await begin(store, stored_run("r1"))
    limit = await store.database.write(lambda link: link.run("PRAGMA page_count"))
    await store.database.write(lambda link: link.run(f"PRAGMA max_page_count = {limit[0][0] + 10}"))
    thread = ThreadUpdate(stored_thread("t1", "y" * 10_000))
    large = [row for seq in range(1, 21) for row in text_rows(seq, seq, os.urandom(5_000).hex())]
    batch = LogBatch(log_id="r1", epoch=1, rows=large, threads=[thread])
    for _ in range(3):
        with pytest.raises(StoreError, match="full") as refused:
            await store.write(batch)
        assert refused.value.transient
        assert await store.read_events("r1") == ([], False)
        assert await store.load_thread("t1") is None
    await store.write(LogBatch(log_id="r1", epoch=1, rows=text_rows(1, 1, "small")))
    await store.database.write(lambda link: link.run("PRAGMA max_page_count = 100000"))
    batch.rows = large[1:]
    await store.write(batch)
    assert await store.read_events("r1", 1) == (public(batch.rows), False)
    await store.close()


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".copy"))
    os.replace(path.with_suffix(".copy"), path)


@pytest.mark.parametrize("spoil", [delete, replace])
async def test_a_file_that_is_deleted_or_replaced_is_not_written_silently(tmp_path: Path, spoil: Any) -> None:
    path = tmp_path / "app.db"
    store = SqliteStore(str(path))
    await begin(store, stored_run("r1"))
    await store.write(LogBatch(log_id="r1", epoch=1, rows=text_rows(1, 1)))
    spoil(path)
    for rows in (text_rows(2, 2), text_rows(2, 2, "x" * 1_000_000)):
        with pytest.raises(StoreError, match="was deleted or replaced while it was open") as refused:
            await store.write(LogBatch(log_id="r1", epoch=1, rows=rows))
        assert not refused.value.transient
    with pytest.raises(StoreError, match="was deleted or replaced while it was open"):
        await store.load_run("r1")
    await store.close()
    assert path.exists() == (spoil is replace)


class Clock:
    """A machine whose time is set by hand."""

    def __init__(self, boot: str = "boot-1", seconds: float = 100.0) -> None:
        self.boot, self.seconds = boot, seconds

    def store(self, path: Path) -> SqlStore:
        return SqlStore(SqliteDatabase(str(path), "process", BootClock(self.boot, lambda: self.seconds)))


async def test_leases_on_a_file_are_measured_by_the_clock_of_one_boot(tmp_path: Path) -> None:
    clock = Clock()
    store = clock.store(tmp_path / "app.db")
    await begin(store, stored_run("r1"), "p1", 30.0)
    clock.seconds = 129.0
    assert await store.claim("r1", "p2", 30.0) is None
    clock.seconds = 131.0
    (log,) = await store.open_logs()
    assert (log.lease_until, log.expired) == (130.0, True)
    assert await store.renew("p1", 30.0) == {"r1"}
    assert await store.claim("r1", "p2", 30.0) is None
    clock.seconds = 162.0
    assert await store.claim("r1", "p2", 30.0) == 2
    await store.close()


async def test_a_lease_of_another_boot_is_over_only_where_it_does_not_change(tmp_path: Path) -> None:
    before, after = Clock("boot-1", 1_000_000.0), Clock("boot-2", 5.0)
    store, other = before.store(tmp_path / "app.db"), after.store(tmp_path / "app.db")
    await begin(store, stored_run("r1"), "p1", 30.0)
    for seconds in (5.0, 9_000_000.0):
        after.seconds = seconds
        (log,) = await other.open_logs()
        assert log.expired is None
        assert await other.claim("r1", "p2", LONG) is None
    before.seconds += 1
    await store.renew("p1", 30.0)
    assert await other.claim("r1", "p2", LONG, gone="p1", seen=log.lease_until) is None
    (log,) = await other.open_logs()
    assert await other.claim("r1", "p2", LONG, gone="p1", seen=log.lease_until) == 2
    (log,) = await store.open_logs()
    assert (log.owner, log.expired) == ("p2", None)
    await other.write(LogBatch(log_id="r1", epoch=2, released=True))
    assert await store.claim("r1", "p1", LONG) == 3
    for one in (store, other):
        await one.close()


async def test_a_claim_whose_outcome_is_unknown_succeeds_again(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "app.db"))
    await begin(store, stored_run("r1"))
    await store.write(LogBatch(log_id="r1", epoch=1, released=True))
    write = store.database.write

    async def deaf(*args: Any, **options: Any) -> Any:
        await write(*args, **options)
        raise StoreError(store.place, "the answer was lost", transient=True)

    vars(store.database)["write"] = deaf
    with pytest.raises(StoreError, match="lost"):
        await store.claim("r1", "p1", LONG)
    del vars(store.database)["write"]
    assert await store.claim("r1", "p1", LONG) == 3
    assert await store.claim("r1", "p1", LONG) is None
    await store.write(LogBatch(log_id="r1", epoch=3, rows=text_rows(1, 1)))
    await store.close()


async def test_a_million_deltas_cost_next_to_nothing_to_read(tmp_path: Path) -> None:
    """What is read of deltas grows with their packs, not with their bytes."""
    store = SqliteStore(str(tmp_path / "app.db"))
    await begin(store, stored_run("r1"))
    await store.write(LogBatch(log_id="r1", epoch=1, rows=[*step_rows(1), *text_rows(4, 50_000), *step_rows(50_001)]))
    read: list[str] = []
    connection = sqlite3.connect(tmp_path / "app.db")
    connection.set_trace_callback(read.append)

    class Traced:
        def run(self, sql: str, *values: Any) -> list[Any]:
            found = connection.execute(sql, values).fetchall()
            size = sum(len(value) for row in found for value in row if isinstance(value, bytes))
            assert size < 3_000, sql
            assert len(found) < 5, sql
            return found

    from retinue.storage.reads import read_log
    from retinue.storage.references import Cache

    link: Any = Traced()
    found = read_log(link, "r1", "here", Cache())
    assert found is not None
    assert found.rows == [*step_rows(1), *step_rows(50_001)]
    connection.close()
    await store.close()


async def test_a_run_that_ends_twice_frees_the_thread_of_nobody_else(place: Place) -> None:
    store = store_at(place)
    await begin(store, stored_run("r1"))
    await store.write(ended_run("r1"))
    await begin(store, stored_run("r2", 2.0))
    await store.save_run(stored_run("r1", 1.0))
    await store.write(ended_run("r1"))
    assert await begin(store, stored_run("r3", 3.0)) == "r2"
    await store.close()
