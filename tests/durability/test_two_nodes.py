"""What another node did with a run counts, whatever this node has in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from retinue import RunResult, RunStatus, Runtime
from retinue.core.stores import LogBatch
from retinue.storage.sql import SqlStore

from .. import inside
from ..logs import ends_of, whole_log
from ..payers import Effects, payer, yes
from ..waiting import let_others_run


@asynccontextmanager
async def answered_elsewhere(url: str, effects: Effects) -> AsyncIterator[tuple[Runtime, Runtime, RunResult]]:
    """Node 1 suspends a run and node 2 answers it: both nodes and the result of node 2."""
    async with (
        Runtime.open(url, [payer(effects)]) as one,
        Runtime.open(url, [payer(effects)]) as two,
        asyncio.timeout(90),
    ):
        waiting = await one.run("payer", "pay ann", thread_id="t")
        assert waiting.status is RunStatus.SUSPENDED
        result = await two.resume(waiting.run_id, {"p1": yes()})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "done: paid ann")
        yield one, two, result


async def test_the_first_node_gives_the_result_of_the_second(url: str, effects: Effects) -> None:
    async with answered_elsewhere(url, effects) as (one, _, result):
        assert (await one.result(result.run_id)).status is RunStatus.COMPLETED
        assert await one.result(result.run_id) == result


async def test_a_node_is_never_too_slow_for_itself(url: str, effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only another node can keep an answer waiting: here one that nobody waits for would be given up at once."""
    inside.set_patience(monkeypatch, 0.0)
    async with answered_elsewhere(url, effects):
        pass


async def test_a_node_waits_for_its_own_writes(url: str, effects: Effects, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply is stored with the beginning of the new leg. The database takes longer for that than a node has patience."""
    inside.set_patience(monkeypatch, 0.0)
    inside.look_for_replies_every(monkeypatch, 0.001)
    write, reply_to, asked = SqlStore.write, SqlStore.reply_to, list[str]()

    def write_late(store: SqlStore, batch: LogBatch) -> asyncio.Future[None]:
        async def late() -> None:
            await let_others_run(200)
            await write(store, batch)

        return asyncio.create_task(late()) if batch.replies else write(store, batch)

    async def note(store: SqlStore, log_id: str, wish_id: str) -> bytes | None:
        asked.append(wish_id)
        return await reply_to(store, log_id, wish_id)

    monkeypatch.setattr(SqlStore, "write", write_late)
    monkeypatch.setattr(SqlStore, "reply_to", note)
    async with answered_elsewhere(url, effects):
        assert asked == [], "the reply is in memory"


async def test_the_first_node_gives_the_whole_log(url: str, effects: Effects) -> None:
    async with answered_elsewhere(url, effects) as (one, two, result):
        events = await whole_log(one, result.run_id)
        assert ends_of(events) == {result.run_id: ["completed"]}
        assert events == await whole_log(two, result.run_id)


@pytest.mark.parametrize("when_busy", ["reject", "enqueue", "interrupt"])
async def test_the_thread_is_free_on_the_first_node(url: str, effects: Effects, when_busy: str) -> None:
    async with answered_elsewhere(url, effects) as (one, two, result):
        more = await one.run("payer", "thanks", thread_id="t", when_busy=when_busy)  # type: ignore[arg-type]
        assert (more.status, more.response) == (RunStatus.COMPLETED, "heard thanks")
        assert (await two.result(result.run_id)).status is RunStatus.COMPLETED


async def test_a_waiting_run_that_another_node_cancelled_is_cancelled_here(url: str, effects: Effects) -> None:
    async with Runtime.open(url, [payer(effects)]) as one, Runtime.open(url, [payer(effects)]) as two:
        for thread in [f"t{number}" for number in range(6)]:
            async with asyncio.timeout(90):
                waiting = await one.run("payer", "pay ann", thread_id=thread)
                assert (await two.cancel(waiting.run_id)).status is RunStatus.CANCELLED
                assert (await two.result(waiting.run_id)).status is RunStatus.CANCELLED
                assert (await one.result(waiting.run_id)).status is RunStatus.CANCELLED
                assert ends_of(await whole_log(one, waiting.run_id)) == {waiting.run_id: ["cancelled"]}
                more = await one.run("payer", "thanks", thread_id=thread)
                assert more.response == "heard thanks"
    assert effects.lines == []


async def test_cancelling_a_run_that_was_left_suspended_ends_it(url: str, effects: Effects) -> None:
    """The node that suspended it is gone."""
    for number in range(6):
        async with Runtime.open(url, [payer(effects)]) as one:
            run_id = (await one.run("payer", "pay ann", thread_id=f"t{number}")).run_id
        async with Runtime.open(url, [payer(effects)]) as two, asyncio.timeout(90):
            result = await two.cancel(run_id, reason="not wanted")
            assert (result.status, result.error) == (RunStatus.CANCELLED, "not wanted")
            assert not result.suspended
            assert (await two.run("payer", "thanks", thread_id=f"t{number}")).response == "heard thanks"
        async with Runtime.open(url, [payer(effects)]) as three:
            assert (await three.result(run_id)).status is RunStatus.CANCELLED
            assert ends_of(await whole_log(three, run_id)) == {run_id: ["cancelled"]}
    assert effects.lines == []
