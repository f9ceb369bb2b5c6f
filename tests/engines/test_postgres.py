"""The queue in PostgreSQL: who comes first, and how nothing that should be worked on is forgotten."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retinue import RunStatus, Runtime
from retinue.core.engine import Leg
from retinue.core.runs import unique
from retinue.core.stores import LogBatch, Placement, Wish
from retinue.storage.depths import explain_depths, read_depths
from retinue.storage.legs import Legs
from retinue.storage.schedules import next_time
from retinue.storage.sql import SqlStore
from retinue.storage.stores import open_store
from retinue.testing.stores import stored_run

from ..databases import TestServer
from ..prepared import PYTHON
from ..waiting import until
from .crew import crew
from .team import Site

HERE, THERE, LONG = "me/1", "you/1", 60.0


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[SqlStore]:
    made = open_store(url)
    assert isinstance(made, SqlStore)
    await made.open()
    yield made
    await made.close()


@pytest.fixture
async def store(postgres_url: str) -> AsyncGenerator[SqlStore]:
    async with opened(postgres_url) as made:
        yield made


@pytest.fixture
def site(postgres_url: str) -> Site:
    return Site(postgres_url, "postgres")


async def begin(store: SqlStore, run_id: str, **options: Any) -> None:
    """Store a run that waits for a worker."""
    user, thread = options.pop("user", "ann"), options.pop("thread", f"t-{run_id}")
    record = stored_run(run_id, user_id=user, thread_id=thread, started_at=options.pop("at", 1.0))
    placement = Placement(engine="postgres", **options)
    await store.begin_run(record, b"{}", None, 0.0, "enqueue", placement)


async def claim(store: SqlStore, most: int = 1, owner: str = HERE, queue: str = "default") -> list[Leg]:
    return await Legs(store).claim(queue, ["agent"], owner, LONG, most)


async def drain(store: SqlStore) -> list[str]:
    """Claim everything, one by one."""
    order: list[str] = []
    while legs := await claim(store):
        order += [leg.log_id for leg in legs]
    return order


# --- the order


async def test_users_take_turns(store: SqlStore) -> None:
    for number in range(4):
        await begin(store, f"a{number}", user="ann")
    for number in range(2):
        await begin(store, f"b{number}", user="bob")
    await begin(store, "c0", user="cyd")
    assert await drain(store) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_one_who_comes_later_need_not_wait_for_all(store: SqlStore) -> None:
    for number in range(20):
        await begin(store, f"a{number}", user="ann")
    assert {leg.log_id for leg in await claim(store, 5)} == {"a0", "a1", "a2", "a3", "a4"}
    await begin(store, "b0", user="bob")
    assert {leg.log_id for leg in await claim(store, 2)} == {"a5", "b0"}


async def test_a_second_crowd_does_not_push_the_first_back(store: SqlStore) -> None:
    for number in range(6):
        await begin(store, f"a{number}", user="ann")
    await claim(store, 3)
    for number in range(3):
        await begin(store, f"b{number}", user="bob")
    assert await drain(store) == ["a3", "b0", "a4", "b1", "a5", "b2"]


async def test_without_users_threads_take_turns(store: SqlStore) -> None:
    await begin(store, "a0", user=None, thread="t1")
    await begin(store, "b0", user=None, thread="t2")
    assert await drain(store) == ["a0", "b0"]


async def test_a_higher_priority_comes_first(store: SqlStore) -> None:
    await begin(store, "low", priority=-1)
    await begin(store, "plain")
    await begin(store, "high", priority=5)
    assert await drain(store) == ["high", "plain", "low"]


async def test_what_was_handed_over_comes_first_and_what_was_lost_waits_its_turn(store: SqlStore) -> None:
    for name in ("left", "lost"):
        await begin(store, name)
    for leg in await claim(store, 2):
        assert leg.epoch == 1
        if leg.log_id == "left":
            await store.write(LogBatch(log_id="left", epoch=1, released=True))
    await begin(store, "new")
    await begin(store, "high", priority=100)
    await Legs(store).release_lost([HERE], [])
    assert await drain(store) == ["left", "high", "new", "lost"]


async def test_a_leg_that_was_lost_twice_waits_and_is_claimed_alone(store: SqlStore) -> None:
    await begin(store, "lost")
    for epoch in (1, 2):
        (leg,) = await claim(store)
        assert leg.epoch == epoch
        await Legs(store).release_lost([HERE], [])
    assert await Legs(store).claim("default", ["agent"], HERE, LONG, 1, suspects=True) == [], "its pause is not over"
    await until_due(store, "lost")
    assert await claim(store) == []
    (leg,) = await Legs(store).claim("default", ["agent"], HERE, LONG, 1, suspects=True)
    assert (leg.log_id, leg.epoch) == ("lost", 3)
    assert [(run.identity.run_id, run.lost) for run in await store.list_runs()] == [("lost", 2)]


async def test_queues_and_lists_say_what_was_lost(store: SqlStore, postgres_url: str) -> None:
    await begin(store, "lost")
    for _ in range(2):
        await claim(store)
        await Legs(store).release_lost([HERE], [])
    [depth], _ = await explain_depths(store)
    reason = "a leg has lost its worker 2 times without progress: each such leg is tried alone, after a pause"
    assert reason in depth.reasons
    command = [PYTHON, "-m", "retinue", "runs", "list", "--db", postgres_url]
    listed = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert b"running, lost 2 times" in (await listed.communicate())[0]


async def until_due(store: SqlStore, log_id: str) -> None:
    """Let the pause of a leg be over."""
    await store.database.change("UPDATE logs SET due_at = wall_seconds() WHERE log_id = ?", log_id, key=log_id)
    await Legs(store).end_delays()


async def test_delays_that_end_together_take_turns(store: SqlStore) -> None:
    for number in range(20):
        await begin(store, f"a{number:02}", user="ann", delay=3600.0)
    await store.database.write(lambda link: link.run("UPDATE logs SET due_at = due_at - 7200"))
    await Legs(store).end_delays()
    await begin(store, "b0", user="bob")
    await begin(store, "b1", user="bob")
    assert set((await drain(store))[:4]) == {"a00", "b0", "a01", "b1"}


async def test_a_delay_holds_behind_a_busy_thread(store: SqlStore) -> None:
    await begin(store, "r1", thread="t", at=1.0)
    await begin(store, "r2", thread="t", at=2.0, delay=3600.0)
    await claim(store, 5)
    ended = stored_run("r1", status=RunStatus.COMPLETED, thread_id="t")
    await store.write(LogBatch(log_id="r1", epoch=1, runs=(ended,), ended=True))
    await Legs(store).free_queued()
    assert await claim(store, 5) == []
    await store.database.write(lambda link: link.run("UPDATE logs SET due_at = due_at - 7200"))
    await Legs(store).free_queued()
    assert [leg.log_id for leg in await claim(store, 5)] == ["r2"]


async def test_a_delay_that_ends_while_the_thread_is_busy(store: SqlStore) -> None:
    await begin(store, "r1", thread="t", at=1.0)
    await begin(store, "r2", thread="t", at=2.0, delay=3600.0)
    await claim(store, 5)
    await store.database.write(lambda link: link.run("UPDATE logs SET due_at = due_at - 7200"))
    await Legs(store).end_delays()
    assert await claim(store, 5) == []


async def test_queues_are_apart(store: SqlStore) -> None:
    await begin(store, "g", queue="gpu")
    await begin(store, "d")
    assert [leg.log_id for leg in await claim(store, 9)] == ["d"]
    assert [leg.log_id for leg in await claim(store, 9, queue="gpu")] == ["g"]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(users=st.lists(st.sampled_from("abcd"), min_size=1, max_size=25))
def test_users_who_wait_are_served_alike(postgres_server: TestServer, users: list[str]) -> None:
    """While two users wait, neither is ahead of the other by more than one leg."""

    async def play() -> None:
        store: Any = open_store(postgres_server.url("fairness"))
        await store.open()
        try:
            await store.database.write(lambda link: link.run("DELETE FROM logs"))
            waiting = {f"{unique()}-{number}": user for number, user in enumerate(users)}
            for run_id, user in waiting.items():
                await begin(store, run_id, user=user)
            served: Counter[str] = Counter()
            while waiting:
                (leg,) = await claim(store)
                served[waiting.pop(leg.log_id)] += 1
                counts = [served[user] for user in set(waiting.values())]
                assert not counts or max(counts) - min(counts) <= 1
        finally:
            await store.close()

    asyncio.run(play())


# --- claims


async def test_a_leg_is_claimed_once(store: SqlStore, postgres_url: str) -> None:
    for number in range(40):
        await begin(store, f"r{number}", user=f"u{number}")
    other: Any = open_store(postgres_url)
    await other.open()
    try:
        claims = [claim(*who) for _ in range(10) for who in ((store, 3, HERE), (other, 3, THERE))]
        found = [leg.log_id for legs in await asyncio.gather(*claims) for leg in legs]
    finally:
        await other.close()
    assert sorted(found) == sorted(f"r{number}" for number in range(40))


async def test_only_agents_that_are_known_are_claimed(store: SqlStore) -> None:
    await begin(store, "r1")
    assert await Legs(store).claim("default", ["other"], HERE, LONG, 1) == []
    assert [leg.log_id for leg in await claim(store)] == ["r1"]


async def test_a_run_that_waits_for_its_thread_is_not_claimed(store: SqlStore) -> None:
    await begin(store, "r1", thread="t", at=1.0)
    await begin(store, "r2", thread="t", at=2.0)
    (leg,) = await claim(store, 5)
    assert leg.log_id == "r1"
    ended = stored_run("r1", status=RunStatus.COMPLETED, thread_id="t")
    await store.write(LogBatch(log_id="r1", epoch=1, runs=(ended,), ended=True))
    assert await claim(store, 5) == []
    assert [leg.log_id for leg in await Legs(store).claim("default", ["agent"], HERE, LONG, 5, ["t"])] == ["r2"]


# --- answers


async def rest(store: SqlStore, run_id: str) -> None:
    """End a leg: the run waits for an answer."""
    waits = stored_run(run_id, status=RunStatus.SUSPENDED, thread_id=f"t-{run_id}")
    await store.write(LogBatch(log_id=run_id, epoch=1, runs=(waits,), released=True, rests=True))


def wish(run_id: str) -> Wish:
    return Wish(log_id=run_id, wish_id="w1", run_id=run_id, kind="decide", body=b"{}")


async def test_an_answer_makes_a_leg(store: SqlStore) -> None:
    await begin(store, "r1")
    await claim(store)
    await rest(store, "r1")
    assert await claim(store) == []
    await store.put_wish(wish("r1"))
    assert await claim(store) == [Leg(log_id="r1", epoch=2)]


async def test_an_answer_that_comes_before_the_log_is_released_makes_one_too(store: SqlStore) -> None:
    await begin(store, "r1")
    await claim(store)
    await store.put_wish(wish("r1"))
    assert await claim(store) == []  # its owner reads it, unless it releases the log first
    await rest(store, "r1")
    assert await claim(store) == [Leg(log_id="r1", epoch=2)]


async def test_answers_and_releases_at_once(store: SqlStore, postgres_url: str) -> None:
    """Whichever of the two is first: after both, somebody can claim the log."""
    other: Any = open_store(postgres_url)
    await other.open()
    try:
        for number in range(40):
            await begin(store, f"r{number}")
            await claim(store)
            await asyncio.gather(rest(store, f"r{number}"), other.put_wish(wish(f"r{number}")))
            assert await claim(store) == [Leg(log_id=f"r{number}", epoch=2)]
    finally:
        await other.close()


# --- what is found again


async def test_an_expired_lease_is_released(store: SqlStore) -> None:
    await begin(store, "r1")
    await Legs(store).claim("default", ["agent"], THERE, -1.0, 1)
    assert await claim(store) == []
    assert await Legs(store).release_lost([], []) == 1
    assert await claim(store) == [Leg(log_id="r1", epoch=2)]


async def test_a_living_owner_keeps_its_leg(store: SqlStore) -> None:
    await begin(store, "r1")
    await claim(store, owner=THERE)
    assert await Legs(store).release_lost(["somebody/else"], []) == 0
    assert await claim(store) == []


async def test_a_claim_whose_answer_was_lost_is_released(store: SqlStore) -> None:
    await begin(store, "r1")
    await claim(store)
    assert await Legs(store).owned_by(HERE) == {"r1"}
    await Legs(store).release_lost([], ["r1"])
    assert await claim(store) == [Leg(log_id="r1", epoch=2)]


async def test_a_delay_ends(store: SqlStore) -> None:
    await begin(store, "r1", delay=3600.0)
    await Legs(store).end_delays()
    assert await claim(store) == []
    (depth,) = await read_depths(store)
    assert (depth.ready, depth.delayed) == (0, 1)
    await store.database.write(lambda link: link.run("UPDATE logs SET due_at = due_at - 7200"))
    await Legs(store).end_delays()
    assert [leg.log_id for leg in await claim(store)] == ["r1"]


async def test_a_leg_that_failed_is_tried_later(store: SqlStore) -> None:
    await begin(store, "r1")
    await claim(store)
    await store.write(LogBatch(log_id="r1", epoch=1, released=True, rests=True))
    await Legs(store).postpone("r1", 3600.0)
    await Legs(store).find_unscheduled()
    assert await claim(store) == []
    await Legs(store).postpone("r1", -1.0)
    await Legs(store).end_delays()
    assert [leg.log_id for leg in await claim(store)] == ["r1"]


async def test_a_run_that_nobody_scheduled_is_found(store: SqlStore) -> None:
    await begin(store, "r1")
    await begin(store, "r2")
    await store.database.write(lambda link: link.run("UPDATE logs SET turn = NULL, due_at = NULL"))
    assert await claim(store, 5) == []
    await Legs(store).find_unscheduled()
    assert sorted(leg.log_id for leg in await claim(store, 5)) == ["r1", "r2"]


async def test_what_no_engine_has_is_left_alone(store: SqlStore) -> None:
    await store.begin_run(stored_run("r1"), b"{}", HERE, -1.0)
    await store.put_wish(wish("r1"))
    assert await Legs(store).release_lost([HERE], ["r1"]) == 0
    await Legs(store).find_unscheduled()
    assert await claim(store, 5) == []


# --- the figures


async def test_depths(store: SqlStore) -> None:
    await begin(store, "r1")
    await begin(store, "r2")
    await begin(store, "g1", queue="gpu")
    await claim(store)
    found = {depth.queue: (depth.ready, depth.delayed, depth.working) for depth in await read_depths(store)}
    assert found == {"default": (1, 0, 1), "gpu": (1, 0, 0)}


async def test_what_has_ended_is_not_looked_at(new_postgres_url: str) -> None:
    """A claim reads an index of what waits, however much has ended.

    In tables of its own: the choice between two indexes without rows depends on how large others have left them.
    """

    def plan(link: Any) -> str:
        link.run(
            "INSERT INTO logs (log_id, epoch, lease_until, boot, ended, engine, queue, flow, level) "
            "SELECT 'x' || n, 1, 0, 'server', 1, 'postgres', 'default', 'u', 0 FROM generate_series(1, 20000) AS n"
        )
        link.run("ANALYZE logs")
        cursor = link.connection.execute(
            b"EXPLAIN SELECT log_id FROM logs WHERE queue = 'default' AND owner IS NULL AND turn IS NOT NULL "
            b"AND engine = 'postgres' AND ended = 0 ORDER BY level, turn, due_at LIMIT 1"
        )
        return str(cursor.fetchall())

    async with opened(new_postgres_url) as store:
        assert "logs_ready" in await store.database.write(plan)


# --- schedules


async def test_a_cron_schedule_starts_each_time_once(site: Site) -> None:
    async with site.client() as client:
        await client.schedule("echo", "nightly", cron="0 3 * * *")
        database = client.store.database  # type: ignore[attr-defined]
        async with site.worker(), site.worker():
            for expected in (1, 2):
                await database.write(lambda link: link.run("UPDATE schedules SET next_at = 1000"))

                async def started(expected: int = expected) -> bool:
                    return len(await client.store.list_runs()) == expected

                await until(started)
                (schedule,) = await client.schedules()
                assert datetime.fromtimestamp(schedule.next_at, UTC) > datetime.now(UTC)
                for record in await client.store.list_runs():  # the next time is skipped while one works
                    assert (await client.result(record.identity.run_id)).response == "echo: nightly"
        threads = {record.identity.thread_id for record in await client.store.list_runs()}
        assert len(threads) == 2


async def test_a_schedule_on_a_busy_thread_waits(site: Site) -> None:
    async with site.client() as client:
        async with site.worker():
            waiting = client.stream("clerk", "go", thread_id="talk")
            await waiting.result()
        await client.schedule("echo", "then", at=datetime.now(UTC) - timedelta(seconds=1), thread_id="talk")
        async with site.worker():

            async def both() -> bool:
                return len(await client.store.list_runs("talk")) == 2

            await until(both)
            await waiting.cancel()

            async def done() -> bool:
                return all(record.has_ended for record in await client.store.list_runs("talk"))

            await until(done)
        newest, _ = await client.store.list_runs("talk")
        assert newest.result is not None
        assert newest.result.response == "echo: then"


def test_times_of_cron() -> None:
    three = next_time("0 3 * * *", datetime(2026, 1, 1, 2, 59, tzinfo=UTC).timestamp())
    assert datetime.fromtimestamp(three, UTC) == datetime(2026, 1, 1, 3, tzinfo=UTC)
    assert datetime.fromtimestamp(next_time("0 3 * * *", three), UTC) == datetime(2026, 1, 2, 3, tzinfo=UTC)


# --- two versions of an agent


async def test_two_versions_of_an_agent_at_once(site: Site) -> None:
    """A run that an older version suspended is continued by the newer one, with its conversation."""
    from retinue import Agent, Decision
    from retinue.testing import ScriptedModel, say

    async with site.client() as client:
        async with site.worker():
            run = client.stream("clerk", "go")
            await run.result()
        old = next(agent for agent in crew() if agent.name == "clerk")
        newer = Agent("clerk", ScriptedModel(lambda request: say("newer")), tools=old.tools, plugins=old.plugins)
        async with site.worker([newer]):
            assert (await client.resume(run.run_id, {"pay_1": Decision.approve()})).response == "newer"


async def test_a_runtime_with_agents_is_a_client_too(site: Site) -> None:
    async with Runtime.open(site.url, crew(), engine=site.engine) as client, site.worker([crew()[0]]):
        assert (await client.run("echo", "go")).response == "echo: go"
