"""A server that has its runs done by workers."""

from __future__ import annotations

from retinue import Decision, RunStatus
from retinue.client import Client

from ..server.serving import TOKEN, serving
from ..story import check_order
from .crew import crew
from .team import Site


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
