"""A task that ended after its run wakes its conversation through the engine, on any worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from retinue.stores import SqlTaskRepository

from ..tasks.house import House, answers, runs_of
from ..waiting import until
from .team import Site, is_quiet


@pytest.fixture
async def house(site: Site, tmp_path: Path) -> AsyncIterator[House]:
    async with SqlTaskRepository(site.url) as tasks:
        yield House(workspace=tmp_path, task_repository=tasks)


async def test_a_worker_with_one_slot_wakes_the_conversation(site: Site, house: House) -> None:
    async with site.worker(house.agents, slots=1, queues=["night"]), site.client() as client:
        first = await client.run("boss", "do a", thread_id="t", queue="night")
        assert first.response == "begun"
        await house.end("a")
        assert await answers(client, 2) == ["begun", "told of a"]
        assert (await client.run("boss", "news?", thread_id="t", queue="night")).response == "nothing new"
        assert len(await runs_of(client)) == 3


async def test_another_worker_tells_of_a_task_that_it_took_over(site: Site, house: House) -> None:
    async with site.client() as client:
        async with site.worker(house.agents, grace=0.0):
            await client.run("boss", "do a", thread_id="t")
        async with site.worker(house.agents), site.worker(house.agents):
            await house.end("a")
            assert await answers(client, 2) == ["begun", "told of a"]


async def test_a_run_on_another_worker_tells_of_it_itself(site: Site, house: House) -> None:
    async with site.worker(house.agents), site.worker(house.agents), site.client() as client:
        first = client.stream("boss", "do a", thread_id="t")
        await first.result()
        second = client.stream("boss", "look", thread_id="t")
        await house.thinking.wait()
        await house.end("a")
        house.gates["looked"].set()
        assert (await second.result()).response == "told of a"
        for run in (first, second):
            async for _ in client.events(run.run_id):  # until their logs have ended
                pass
        assert len(await runs_of(client)) == 2
        await until(lambda: is_quiet(client))
