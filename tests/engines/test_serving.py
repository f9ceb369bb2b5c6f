"""A server that has its runs done by workers."""

from __future__ import annotations

import pytest

from retinue import ConfigurationError, Decision, RunStatus, Runtime
from retinue.client import Client
from retinue.core.errors import ServerError
from retinue.storage.depths import read_depths

from ..server.serving import TOKEN, serving
from ..story import check_order
from ..waiting import until
from .crew import Gate, crew
from .team import Site
from .workflows import has_activity


async def test_runs_of_a_server_are_done_by_workers(site: Site) -> None:
    async with serving(site.client(crew())) as server, Client(server.url, token=TOKEN) as client:
        run = client.stream("boss", "go")
        await run.stored()  # nobody works yet
        async with site.worker():
            child = await anext(aiter(run.children))
            assert child.name == "clerk"
            assert list((await run.result()).suspended) == ["pay_1"]
            assert (await client.resume(run.run_id, {"pay_1": Decision.approve()})).response == "boss: clerk: paid 3"
            events = [event async for event in client.events((await client.run("echo", "hello")).run_id)]
            check_order(events)
        waiting = client.stream("echo", "later")
        assert (await waiting.cancel()).status is RunStatus.CANCELLED


async def test_a_client_of_a_server_has_the_options_of_an_engine(site: Site) -> None:
    gate = Gate()
    async with (
        serving(site.client(crew())) as server,
        Client(server.url, token=TOKEN) as client,
        site.client() as here,
        site.worker([gate.agent(), *crew()], queues=["night"], slots=1),
    ):
        held = here.stream("held", "go", queue="night")
        await gate.entered.wait()  # it has the only slot until the others wait for it
        runs = [client.stream("echo", f"{number}", priority=number, queue="night") for number in (0, 1, 2)]
        for run in runs:
            await run.stored()
            if site.engine != "postgres":
                await until(lambda run_id=run.run_id: has_activity(here, run_id))
        later = client.stream("echo", "later", delay=3600.0, queue="day")
        await later.stored()
        day, night = await read_depths(here.store)  # type: ignore[arg-type]
        assert [(one.queue, one.ready, one.delayed) for one in (day, night)] == [("day", 0, 1), ("night", 3, 0)]
        gate.go.set()
        ends = {(await run.result()).response: await _end_of(here, run.run_id) for run in runs}
        assert sorted(ends, key=lambda said: ends[said]) == ["echo: 2", "echo: 1", "echo: 0"]
        assert (await held.result()).status is RunStatus.COMPLETED
        assert (await later.cancel()).status is RunStatus.CANCELLED
        for wrong in ({"queue": "a b"}, {"delay": -1.0}, {"delay": 1e12}, {"priority": 10**9}):
            with pytest.raises((ConfigurationError, ServerError), match="queue|delay|priority"):
                await client.run("echo", "go", **wrong)  # type: ignore[arg-type]


async def _end_of(runtime: Runtime, run_id: str) -> float:
    return (await runtime.store.ends_of([run_id]))[run_id]  # type: ignore[attr-defined]


async def test_a_server_without_an_engine_has_no_queues() -> None:
    async with serving(Runtime(crew())) as server, Client(server.url, token=TOKEN) as client:
        assert (await client.run("echo", "go", queue=None, priority=0, delay=0.0)).status is RunStatus.COMPLETED
        with pytest.raises((ConfigurationError, ServerError), match="are for runs on an engine"):
            await client.run("echo", "go", queue="gpu")
