"""A PostgreSQL server that stops, connections that break, and what must not be shown."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from retinue import ConfigurationError, RunStatus, StoreError
from retinue.core.stores import LogBatch
from retinue.storage.postgres import PostgresLink, PostgresStore
from retinue.storage.urls import open_store
from retinue.testing.durable import LONG, begin, journal_entries, text_events
from retinue.testing.stores import stored_run, stored_thread

from ..databases import LOCKED, LOCKED_PASSWORD, TestServer


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    made = PostgresStore(postgres_url)
    await made.open()
    yield made
    await made.close()


def cut(server: TestServer, matching: str = "%") -> int:
    """End the connections of everybody else."""
    query = (
        b"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'retinue' AND query LIKE %s"
    )
    with server.connect() as connection:
        return len(connection.execute(query, (matching,)).fetchall())


async def keep_writing(store: PostgresStore, enough: asyncio.Event, refusals: list[StoreError]) -> int:
    """Write events one by one, each until it is there; how many it were."""
    seq = 0
    while not enough.is_set():
        try:
            await store.write(LogBatch(log_id="r1", epoch=1, events=text_events(seq + 1, seq + 1)))
            seq += 1
        except StoreError as exc:
            if not exc.passes:
                raise
            refusals.append(exc)
            await asyncio.sleep(0.02)
    return seq


async def test_a_server_that_stops_is_waited_for(store: PostgresStore, postgres_server: TestServer) -> None:
    await begin(store, stored_run("r1"))
    refusals: list[StoreError] = []
    enough = asyncio.Event()
    with store.watch("r1") as watch:
        writing = asyncio.create_task(keep_writing(store, enough, refusals))
        for _ in range(2):
            await asyncio.sleep(0.1)
            await asyncio.to_thread(postgres_server.stop)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(postgres_server.start)
        await asyncio.sleep(0.1)
        enough.set()
        last = await writing
        assert await store.read_events("r1", 0, last + 1) == (text_events(1, last), False)
        assert refusals
        assert "is the server up" in str(refusals[0])
        await heard_again(store, watch)


async def heard_again(store: PostgresStore, watch: Any) -> None:
    """The watch hears of what is written, after it was woken for what it may have missed."""
    await asyncio.sleep(0.5)
    await watch.wait(0)
    began = time.monotonic()
    await store.write(LogBatch(log_id="r1", epoch=1, entries=journal_entries("again"), first_entry=1))
    await watch.wait(20)
    assert time.monotonic() - began < 10


async def test_connections_that_were_cut_are_not_noticed(store: PostgresStore, postgres_server: TestServer) -> None:
    await begin(store, stored_run("r1"))
    for seq in range(1, 6):
        assert cut(postgres_server) > 0
        await store.write(LogBatch(log_id="r1", epoch=1, events=text_events(seq, seq)))
        assert await store.read_events("r1") == (text_events(1, seq), False)


async def test_work_that_was_cut_is_done_again(store: PostgresStore, postgres_server: TestServer) -> None:
    await begin(store, stored_run("r1"))
    schema = store.place.rpartition("=")[2]
    with postgres_server.connect() as holder:
        with holder.transaction():
            holder.execute(f"SELECT FROM {schema}.logs FOR UPDATE".encode())
            batches = [LogBatch(log_id="r1", epoch=1, events=text_events(seq, seq)) for seq in (1, 2, 3)]
            writing = asyncio.gather(*[store.write(batch) for batch in batches])
            await asyncio.sleep(0.2)
            assert cut(postgres_server, "SELECT epoch%") == 1
            await asyncio.sleep(0.2)
        await writing
    assert await store.read_events("r1") == (text_events(1, 3), False)


async def test_a_listener_that_was_cut_listens_again(store: PostgresStore, postgres_server: TestServer) -> None:
    await begin(store, stored_run("r1"))
    with store.watch("r1") as watch, store.watch("another") as other:
        await other.wait(20)  # it listens
        await watch.wait(0)
        began = time.monotonic()
        assert cut(postgres_server, "LISTEN%") == 1
        await watch.wait(20)
        await other.wait(20)
        assert time.monotonic() - began < 10
        await heard_again(store, watch)


class Unsure:
    """Commits, and lets the answer be lost: once for each time it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, commit = 0, PostgresLink.commit

        def lossy(link: PostgresLink) -> None:
            commit(link)
            if self.left:
                self.left -= 1
                link.connection.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(PostgresLink, "commit", lossy)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_commit_of_which_nobody_heard_is_not_done_twice(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    unsure = Unsure(monkeypatch)

    async def do(work: Any) -> Any:
        unsure.left = times
        try:
            return await work()
        except StoreError as exc:
            if times == 1 or not exc.passes:
                raise
            return await work()

    everything = LogBatch(
        log_id="r1",
        epoch=1,
        events=text_events(1, 3),
        entries=journal_entries("a", "b"),
        first_entry=1,
        thread=stored_thread("t1", "one"),
        run=stored_run("r1", 1.0, RunStatus.COMPLETED),
    )
    done = LogBatch(log_id="r1", epoch=1, events=text_events(4, 4), ended=True, released=True, done=True)
    queued = stored_run("r2", 2.0, queued=True)
    assert await do(lambda: begin(store, stored_run("r1"))) is None
    assert await do(lambda: begin(store, queued)) == "r1"
    await do(lambda: store.ask_cancel("r1", "why"))
    assert await do(lambda: store.renew("p1", LONG)) == {"r1", "r2"}
    await do(lambda: store.write(everything))
    await do(lambda: store.write(done))
    assert await do(lambda: store.take_thread(queued)) is None
    assert await do(lambda: store.claim("r1", "p2", LONG)) > 1
    assert await do(lambda: store.claim("r2", "p2", LONG, after="p1")) > 1
    assert await store.read_events("r1") == (text_events(1, 4), True)
    assert await store.read_journal("r1") == []
    assert await store.load_thread("t1") == stored_thread("t1", "one")
    assert sorted((log.log_id, log.owner) for log in await store.owned_logs()) == [("r1", "p2"), ("r2", "p2")]


async def test_many_may_make_the_schema_at_once(postgres_url: str) -> None:
    stores = [PostgresStore(postgres_url) for _ in range(6)]
    await asyncio.gather(*[store.open() for store in stores])
    await asyncio.gather(*[store.save_thread(stored_thread(f"t{n}")) for n, store in enumerate(stores)])
    for store in stores:
        assert await store.load_thread("t5") == stored_thread("t5")
        await store.close()


async def refusal(url: str) -> StoreError:
    store = PostgresStore(url)
    with pytest.raises(StoreError) as refused:
        await store.open()
    await store.close()
    shown = "\n".join([str(refused.value), repr(refused.value), repr(store), store.place, repr(store.database)])
    assert "secret" not in shown
    assert "\n" not in str(refused.value)
    return refused.value


async def test_what_keeps_a_store_from_being_opened_is_said(postgres_server: TestServer) -> None:
    with postgres_server.connect() as connection:
        connection.execute(b"DROP ROLE IF EXISTS crowded")
        connection.execute(b"CREATE ROLE crowded LOGIN CONNECTION LIMIT 0")
        connection.execute(b"DROP ROLE IF EXISTS poor")
        connection.execute(b"CREATE ROLE poor LOGIN")
    lasting = {
        postgres_server.url(user=f"{LOCKED}:secret"): "password authentication failed",
        postgres_server.url(user=LOCKED): "no password supplied",
        postgres_server.url(database="nowhere"): 'database "nowhere" does not exist',
        postgres_server.url(user="nobody"): 'role "nobody" does not exist',
        postgres_server.url(user="poor"): "permission denied",
    }
    for url, said in lasting.items():
        error = await refusal(url)
        assert (said in str(error), error.passes) == (True, False), error
    passing = {
        "postgresql://u:secret@127.0.0.1:1/x": "Connection refused",
        postgres_server.url(user="crowded"): "too many connections",
    }
    for url, said in passing.items():
        error = await refusal(url)
        assert (said in str(error), error.passes) == (True, True), error


async def test_a_password_opens_and_is_not_shown(postgres_server: TestServer) -> None:
    url = postgres_server.url(user=f"{LOCKED}:open%20sesame%2F%40")
    store = open_store(url.replace("postgresql:", "postgres:"))
    assert isinstance(store, PostgresStore)
    await store.open()
    for shown in (repr(store), store.place, repr(store.database)):
        assert "sesame" not in shown
    assert LOCKED_PASSWORD not in store.place
    await store.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:sec@ret@h/x",
        "postgresql://u:sec%zzret@h/x",
        "postgresql://u:secret@h/x?sslmdoe=require",
        "postgresql://u:secret@h/x?schema=Bad-Name",
        "postgresql://u:secret@h/x?schema=pg_x",
        "postgresql+driver://u:secret@h/x",
    ],
)
def test_a_url_that_cannot_be_read_is_not_quoted(url: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_store(url)
    assert "sec" not in str(refused.value)
    assert "ret@" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_without_the_driver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "retinue.storage.postgres", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'retinue\[postgres\]'"):
        open_store("postgresql://u@h/x")


async def test_schemas_do_not_see_each_other(postgres_server: TestServer) -> None:
    one, two = PostgresStore(postgres_server.url()), PostgresStore(postgres_server.url())
    await one.save_thread(stored_thread())
    assert await two.load_thread("t1") is None
    await one.close()
    await two.close()
