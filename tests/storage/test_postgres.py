"""A PostgreSQL server that stops, connections that break, and what must not be shown."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from retinue import ConfigurationError
from retinue.core.stores import LogBatch, Reply, ThreadUpdate, Wish
from retinue.errors import OwnershipLost, StoreError
from retinue.storage.postgres import PostgresLink, PostgresStore
from retinue.storage.stores import open_store
from retinue.testing.stores import stored_run, stored_thread
from retinue.testing.threads import LONG, begin, ended_run, full_batch, public, step_rows, text_rows

from .. import inside
from ..databases import LOCKED, LOCKED_PASSWORD, TestServer
from ..waiting import let_others_run, until

pytestmark = pytest.mark.usefixtures("new_connections")


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
            await store.write(LogBatch(log_id="r1", epoch=1, rows=text_rows(seq + 1, seq + 1)))
            seq += 1
        except StoreError as exc:
            if not exc.transient:
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
            refusals.clear()
            await asyncio.to_thread(postgres_server.stop)
            await until(lambda: refusals)
            assert "is the server up" in str(refusals[0])
            await asyncio.to_thread(postgres_server.start)
        enough.set()
        last = await writing
        assert await store.read_events("r1", 0, last + 1) == (public(text_rows(1, last)), False)
        await heard_again(store, postgres_server, watch)


def listeners(server: TestServer) -> int:
    query = b"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'retinue' AND query LIKE 'LISTEN%'"
    with server.connect() as connection:
        return connection.execute(query).fetchall()[0][0]


async def heard_again(store: PostgresStore, server: TestServer, watch: Any) -> None:
    """The watch hears of what is written, after it was woken for what it may have missed."""
    await until(lambda: listeners(server) == 1)
    await watch.wait(3600)  # it is woken when it listens again
    await store.put_wish(Wish(log_id="r1", wish_id="w1", run_id="r1", kind="cancel"))
    await watch.wait(3600)


async def test_connections_that_were_cut_are_not_noticed(store: PostgresStore, postgres_server: TestServer) -> None:
    await begin(store, stored_run("r1"))
    for seq in range(1, 6):
        assert cut(postgres_server) > 0
        await store.write(LogBatch(log_id="r1", epoch=1, rows=text_rows(seq, seq)))
        assert await store.read_events("r1") == (public(text_rows(1, seq)), False)


def waiting(server: TestServer) -> int:
    query = b"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'retinue' AND wait_event_type = 'Lock'"
    with server.connect() as connection:
        return connection.execute(query).fetchall()[0][0]


async def test_work_that_was_cut_is_done_again(store: PostgresStore, postgres_server: TestServer) -> None:
    await begin(store, stored_run("r1"))
    schema = store.place.rpartition("=")[2]
    with postgres_server.connect() as holder:
        with holder.transaction():
            holder.execute(f"SELECT FROM {schema}.logs FOR UPDATE".encode())
            batches = [LogBatch(log_id="r1", epoch=1, rows=step_rows(seq)) for seq in (1, 4, 7)]
            writing = asyncio.gather(*[store.write(batch) for batch in batches])
            await until(lambda: waiting(postgres_server))
            assert cut(postgres_server, "WITH %") == 1
            await until(lambda: waiting(postgres_server))
        await writing
    assert await store.read_events("r1") == (public([*step_rows(1), *step_rows(4), *step_rows(7)]), False)


async def test_a_listener_that_was_cut_listens_again(store: PostgresStore, postgres_server: TestServer) -> None:
    await begin(store, stored_run("r1"))
    with store.watch("r1") as watch, store.watch("another") as other:
        await other.wait(3600)  # it listens
        await watch.wait(0)
        assert cut(postgres_server, "LISTEN%") == 1
        await other.wait(3600)
        await heard_again(store, postgres_server, watch)


async def test_the_end_of_a_run_wakes_those_that_wait_for_its_thread(store: PostgresStore) -> None:
    await begin(store, stored_run("r1"))
    with store.watch(stored_run("r1").identity.thread_id) as watch:
        await watch.wait(3600)  # it listens
        await store.write(ended_run("r1"))
        await watch.wait(3600)


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
            if times == 1 or not exc.transient:
                raise
            return await work()

    last = LogBatch(log_id="r1", epoch=1, rows=step_rows(21), replies=[Reply("w2", b"bye")], ended=True)
    assert await do(lambda: begin(store, stored_run("r1"))) is None
    assert await do(lambda: begin(store, stored_run("r2", 2.0), when_busy="interrupt")) == "r1"
    for wish_id in ("w1", "w2"):
        await do(lambda wish_id=wish_id: store.put_wish(Wish(log_id="r1", wish_id=wish_id, run_id="r1", kind="cancel")))
    assert [wish.wish_id for wish in await store.wishes("p1")] == ["interrupt-r2", "w1", "w2"]
    assert await do(lambda: store.renew("p1", LONG)) == {"r1", "r2"}
    await do(lambda: store.write(full_batch()))
    await do(lambda: store.write(last))
    assert await do(lambda: store.take_thread("r2")) is None
    await do(lambda: store.write(LogBatch(log_id="r2", epoch=1, released=True)))
    assert await do(lambda: store.claim("r2", "p2", LONG)) > 1
    assert await do(lambda: store.claim("r1", "p2", LONG)) is None
    rows = [*step_rows(1), *text_rows(4, 20), *step_rows(21)]
    assert await store.read_events("r1") == (public(rows), True)
    assert [await store.reply_to("r1", wish_id) for wish_id in ("w1", "w2")] == [b"reply", b"bye"]
    assert await store.load_thread("t1") == stored_thread("t1", "one")
    assert [(log.log_id, log.owner) for log in await store.open_logs()] == [("r2", "p2")]


async def test_jobs_that_wait_together_are_one_round_trip(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that begin and end runs: no answer is waited for before the commit."""
    await asyncio.gather(*[begin(store, stored_run(f"r{n}", thread_id=f"t{n}")) for n in range(20)])
    commits: list[int] = []
    commit, fetch = PostgresLink.commit, psycopg.Cursor.fetchall

    def counted(link: PostgresLink) -> None:
        commits.append(1)
        commit(link)

    def early(cursor: Any) -> Any:
        assert cursor.pgresult is not None, "an answer is waited for"
        return fetch(cursor)

    monkeypatch.setattr(PostgresLink, "commit", counted)
    monkeypatch.setattr(psycopg.Cursor, "fetchall", early)
    gate = threading.Event()
    for lane in (*inside.write_lanes(store), inside.notify_lane(store)):
        lane.submit_from_thread(lambda link: gate.wait(10))  # jobs gather behind it
    jobs: list[Any] = []
    for number in range(20):
        last = ended_run(f"r{number}", thread_id=f"t{number}")
        last.rows, last.threads = step_rows(1), [ThreadUpdate(stored_thread(f"t{number}", "one"))]
        jobs += [store.write(last), begin(store, stored_run(f"s{number}", thread_id=f"s{number}"))]
    done = asyncio.gather(*jobs)
    await let_others_run()
    gate.set()
    await done
    # At most two of each lane, and some of the one that notifies: what it had begun with, and the rest.
    assert len(commits) <= 2 * len(inside.write_lanes(store)) + 3
    monkeypatch.undo()
    assert len(await store.list_runs(status="completed")) == 20
    assert len(await store.list_runs(status="running")) == 20


async def test_many_may_make_the_schema_at_once(new_postgres_url: str) -> None:
    stores = [PostgresStore(new_postgres_url) for _ in range(6)]
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
        assert (said in str(error), error.transient) == (True, False), error
    passing = {
        "postgresql://u:secret@127.0.0.1:1/x": "Connection refused",
        postgres_server.url(user="crowded"): "too many connections",
    }
    for url, said in passing.items():
        error = await refusal(url)
        assert (said in str(error), error.transient) == (True, True), error


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


async def test_runs_that_share_threads_do_not_wait_for_each_other(
    postgres_server: TestServer, postgres_url: str
) -> None:
    stores = [PostgresStore(postgres_url) for _ in range(2)]

    async def live(number: int) -> None:
        store, thread_id, run_id = stores[number % 2], f"t{number % 3}", f"r{number}"
        record = stored_run(run_id, float(number), thread_id=thread_id)
        holder = await begin(store, record, f"p{number % 2}", when_busy="enqueue")
        while holder is not None:
            await asyncio.sleep(0.05)
            holder = await store.take_thread(run_id)
        for seq in range(1, 4):
            threads = [ThreadUpdate(stored_thread(thread_id, run_id))] if seq == 2 else []
            await store.write(LogBatch(log_id=run_id, epoch=1, rows=text_rows(seq, seq), threads=threads))
        await stores[0].put_wish(Wish(log_id=run_id, wish_id="w", run_id=run_id, kind="cancel"))
        await store.write(ended_run(run_id, float(number), thread_id=thread_id))

    async def renew(number: int) -> None:
        while True:
            await stores[number].renew(f"p{number}", LONG)
            await asyncio.sleep(0.01)

    renewing = [asyncio.create_task(renew(number)) for number in range(2)]
    await asyncio.gather(*[live(number) for number in range(30)])
    for task in renewing:
        task.cancel()
    await asyncio.gather(*renewing, return_exceptions=True)
    assert await stores[0].open_logs() == []
    assert len(await stores[0].list_runs(status="completed")) == 30
    for store in stores:
        await store.close()
    assert "deadlock" not in postgres_server.log()


async def test_logs_that_are_written_together_share_a_statement(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"r{number}" for number in range(40)]
    for run_id in ids:
        await begin(store, stored_run(run_id, thread_id=f"t_{run_id}"))
    statements = inside.counted_statements(monkeypatch)
    held, is_held = threading.Event(), threading.Event()

    def hold(link: Any) -> None:
        is_held.set()
        held.wait(LONG)

    lanes = inside.write_lanes(store)
    holding = [lane.submit(hold) for lane in lanes]
    await asyncio.to_thread(is_held.wait, LONG)
    written = [store.write(LogBatch(log_id=run_id, epoch=1, rows=text_rows(1, 3))) for run_id in ids]
    held.set()
    await asyncio.gather(*holding, *written)
    appends = [statement for statement in statements if b"INSERT INTO events" in statement]
    assert 0 < len(appends) < len(ids) / 2
    for run_id in ids:
        found = await store.read_events(run_id)
        assert found is not None
        assert [event.seq for event in found[0]] == [1, 2, 3]


async def test_of_logs_that_are_written_together_only_a_lost_one_fails(store: PostgresStore) -> None:
    ids = [f"r{number}" for number in range(12)]
    for run_id in ids:
        await begin(store, stored_run(run_id, thread_id=f"t_{run_id}"))
    await store.write(LogBatch(log_id="r7", epoch=1, rows=text_rows(1, 2)))
    batches = [LogBatch(log_id=run_id, epoch=2 if run_id == "r5" else 1, rows=text_rows(1, 2)) for run_id in ids]
    outcomes = await asyncio.gather(*[store.write(batch) for batch in batches], return_exceptions=True)
    assert [type(one) for one in outcomes if one is not None] == [OwnershipLost]
    for run_id in ids:  # r7 had these rows already: a write that is repeated changes nothing
        found = await store.read_events(run_id)
        assert found is not None
        assert [event.seq for event in found[0]] == ([] if run_id == "r5" else [1, 2])
