"""What a database can suffer, whichever it is: what is stored stays whole, and the error says what it is."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from retinue import Message, PersistedState, StoreError, ThreadRecord
from retinue.core.stores import LogBatch
from retinue.storage import schema
from retinue.storage.postgres import PostgresStore
from retinue.storage.sqlite import SqliteStore
from retinue.testing.durable import begin, text_events
from retinue.testing.stores import stored_run, stored_thread

from ..databases import TestServer

Place = tuple[str, str]
"""The name of a module, and a path or URL."""


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return "sqlite", str(tmp_path / "app.db")
    return "postgres", request.getfixturevalue("postgres_url")


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
    module = f"retinue.storage.{place[0]}"
    monkeypatch.setattr(f"{module}.MIGRATIONS", steps)
    monkeypatch.setattr(f"{module}.SCHEMA_VERSION", len(steps))


def fail(link: Any) -> None:
    raise RuntimeError("the lights went out")


@pytest.mark.parametrize("bad", [fail, "CREATE TABLE threads (thread_id TEXT)"])
@pytest.mark.parametrize("version", [0, 1])
async def test_an_interrupted_migration_changes_nothing(
    request: pytest.FixtureRequest, place: Place, monkeypatch: pytest.MonkeyPatch, version: int, bad: Any
) -> None:
    server = None if place[0] == "sqlite" else request.getfixturevalue("postgres_server")
    if version:
        use_steps(monkeypatch, place, schema.MIGRATIONS[:version])
        store = store_at(place)
        await store.open()
        await store.close()
    before = await tables(place, server)
    steps = schema.MIGRATIONS
    use_steps(monkeypatch, place, (*steps[:version], (*steps[version][:3], bad, *steps[version][3:])))
    store = store_at(place)
    with pytest.raises((StoreError, RuntimeError)):
        await store.open()
    await store.close()
    assert await tables(place, server) == before
    monkeypatch.undo()
    store = store_at(place)
    await store.open()
    await store.save_thread(stored_thread())
    assert await store.load_thread("t1") == stored_thread()
    await store.close()


async def test_what_an_older_version_wrote_is_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    use_steps(monkeypatch, place, schema.MIGRATIONS[:1])
    said = (Message.user("hi", id="m1"), Message.assistant("ho", id="m2"))
    body = msgspec.json.encode({"thread_id": "t1", "messages": said, "state": PersistedState(2, {"k": 1})})
    await do(place, "INSERT INTO threads (thread_id, user_id, body) VALUES (?, ?, ?)", "t1", "u1", body)
    monkeypatch.undo()
    store = store_at(place)
    expected = ThreadRecord(thread_id="t1", user_id="u1", messages=said, state=PersistedState(2, {"k": 1}))
    assert await store.load_thread("t1") == expected
    await store.close()


async def test_a_newer_schema_is_refused(place: Place) -> None:
    change = "PRAGMA user_version = 999" if place[0] == "sqlite" else "UPDATE schema_version SET version = 999"
    await do(place, change)
    store = store_at(place)
    with pytest.raises(StoreError) as refused:
        await store.open()
    await store.close()
    said = f"written by a newer version (schema 999, known {schema.SCHEMA_VERSION}): upgrade"
    assert said in str(refused.value)
    assert not refused.value.passes


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("UPDATE runs SET result = ? WHERE run_id = 'r1'", "run 'r1'"),
        ("UPDATE runs SET identity = ? WHERE run_id = 'r1'", "run 'r1'"),
        ("UPDATE threads SET state = ? WHERE thread_id = 't1'", "thread 't1'"),
        ("UPDATE messages SET body = ? WHERE place = 1", "thread 't1'"),
        ("UPDATE events SET body = ? WHERE seq = 2", "an event of run 'r1' after number 0"),
    ],
)
@pytest.mark.parametrize("bad", [b'{"', b"[1]", b"\xff\x00", b""])
async def test_what_cannot_be_read_is_named(place: Place, statement: str, named: str, bad: bytes) -> None:
    store = store_at(place)
    await begin(store, stored_run("r1"))
    await store.write(LogBatch(log_id="r1", epoch=1, events=text_events(1, 3), thread=stored_thread("t1", "one")))
    await begin(store, stored_run("r2", thread_id="t2"))
    await do(place, statement, bad)
    with pytest.raises(StoreError) as refused:
        await read_all(store)
    assert f"what is stored of {named} cannot be read" in str(refused.value)
    assert store.place in str(refused.value)
    assert not refused.value.passes
    assert await store.load_run("r2") == stored_run("r2", thread_id="t2")
    await store.close()


async def read_all(store: SqliteStore | PostgresStore) -> None:
    await store.load_run("r1")
    await store.load_thread("t1")
    await store.read_events("r1")


async def test_a_full_disk_is_waited_out(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "app.db"))
    await begin(store, stored_run("r1"))
    limit = await store.database.write(lambda link: link.run("PRAGMA page_count"))
    await store.database.write(lambda link: link.run(f"PRAGMA max_page_count = {limit[0][0] + 10}"))
    batch = LogBatch(
        log_id="r1", epoch=1, events=text_events(1, 20, "x" * 10_000), thread=stored_thread("t1", "y" * 10_000)
    )
    for _ in range(3):
        with pytest.raises(StoreError, match="full") as refused:
            await store.write(batch)
        assert refused.value.passes
        assert await store.read_events("r1") == ([], False)
        assert await store.load_thread("t1") is None
    await store.write(LogBatch(log_id="r1", epoch=1, events=text_events(1, 1, "small")))
    await store.database.write(lambda link: link.run("PRAGMA max_page_count = 100000"))
    batch.events = text_events(2, 20, "x" * 10_000)
    await store.write(batch)
    assert await store.read_events("r1", 1) == (batch.events, False)
    await store.close()
