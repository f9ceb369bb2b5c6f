"""Slots: at most so many legs work at once, and one that waits for other workers has none meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from math import inf

import pytest

from retinue import Agent, RunStatus, tool
from retinue.backends import foreign, mirror
from retinue.core.engine import LegSlots
from retinue.core.messages import Role
from retinue.core.model import ModelRequest
from retinue.models import RetryPolicy, gates
from retinue.models.resilience import ResilientModel
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from ..models.gated import Provider
from ..remote.open_server import open_server
from ..waiting import until
from .crew import Gate, asked, results
from .team import Site


class Machine:
    """What works at once in a process with the agents `boss`, `middle` (queue gpu) and `last` (queue default)."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def agents(self) -> list[Agent]:
        async def be_busy() -> str:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.01)
            self.now -= 1
            return "worked"

        @tool
        async def work() -> str:
            """Work for a while."""
            return await be_busy()

        @tool(queue="gpu")
        async def compute() -> str:
            """Work for a while, with a GPU."""
            return await be_busy()

        def turn(*calls: str) -> ScriptedModel:
            def model(request: ModelRequest) -> ScriptedTurn:
                done = len(results(request))
                if done == len(calls):
                    return say(" ".join([m.text for m in request.messages if m.role is Role.TOOL]) or asked(request))
                name = calls[done]
                if name in ("work", "compute"):
                    return call(name, {}, id=f"{name}_{done}")
                return call("task", {"subagent_type": name, "description": asked(request)}, id=f"task_{done}")

            return ScriptedModel(model)

        last = Agent("last", turn("work"), tools=[work], queue="default")
        middle = Agent("middle", turn("work", "last", "work"), tools=[work], subagents=[last], queue="gpu")
        boss = Agent("boss", turn("work", "middle", "work"), tools=[work], subagents=[middle])
        caller = Agent("caller", turn("work", "compute", "work"), tools=[work, compute])
        lone = Agent("lone", turn("work"), tools=[work], queue="gpu")
        pair = Agent("pair", turn("lone", "work"), tools=[work], subagents=[lone])
        return [boss, middle, last, caller, pair]


@asynccontextmanager
async def two_machines(site: Site) -> AsyncGenerator[tuple[Machine, Machine]]:
    """A worker of queue "default" and one of queue "gpu", with one slot each."""
    near, far = Machine(), Machine()
    async with (
        site.worker(near.agents(), slots=1) as here,
        site.worker(far.agents(), queues=["gpu"], slots=1) as there,
    ):
        yield near, far
        for slots in (here.info.slots, there.info.slots):
            await until(lambda slots=slots: slots.free == 1 and not slots.lent)


async def test_a_chain_that_comes_back_to_its_queue_ends(site: Site) -> None:
    async with two_machines(site) as (near, far), site.client() as client:
        result = await client.run("boss", "go")
        assert (result.status, result.response) == (RunStatus.COMPLETED, "worked worked worked worked worked")
        assert (near.most, far.most) == (1, 1)


async def test_two_queues_whose_agents_place_on_each_other_do_not_wait_for_each_other(site: Site) -> None:
    async with two_machines(site) as (near, far), site.client() as client:
        runs = [client.stream("boss", "go", queue="default") for _ in range(3)]
        runs += [client.stream("middle", "go", queue="gpu") for _ in range(3)]
        runs += [client.stream("caller", "go", queue="default") for _ in range(3)]
        said = {(await run.result()).response for run in runs}
        assert said == {" ".join(["worked"] * number) for number in (3, 5)}
        assert (near.most, far.most) == (1, 1), "more legs were at work than there are slots"


async def test_a_parent_without_a_slot_is_cancelled_at_once(site: Site) -> None:
    near = Machine()
    async with site.worker(near.agents(), slots=1) as worker, site.client() as client:
        run = client.stream("boss", "go")
        async for event in run:
            if event.kind == "run_started" and event.ns:
                break
        await until(lambda: worker.info.slots.lent)
        assert (await run.cancel("enough")).status is RunStatus.CANCELLED


async def test_a_parent_that_waits_for_a_slot_is_cancelled_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "GRACE", 3600.0)
    gate = Gate()
    near, far = Machine(), Machine()
    async with site.worker([*near.agents(), gate.agent()], slots=1) as worker, site.client() as client:
        slots = worker.info.slots
        run = client.stream("pair", "go")
        await until(lambda: slots.lent)
        held = client.stream("held", "go")
        await gate.entered.wait()
        async with site.worker(far.agents(), queues=["gpu"]):
            await until(lambda: not slots.lent)  # the child has ended
        assert (await run.cancel("enough", grace=3600)).status is RunStatus.CANCELLED
        gate.go.set()
        assert (await held.result()).status is RunStatus.COMPLETED


# --- the slots themselves


async def test_a_leg_that_goes_on_comes_before_new_ones() -> None:
    slots, freed = LegSlots(2), list[str]()
    slots.on_free = lambda: freed.append("free")
    assert slots.reserve() == 2
    slots.take("a", "b")
    assert slots.free == 0
    slots.lend("a")
    assert (slots.free, freed) == (1, ["free"])
    assert slots.reserve() == 1
    going_on = asyncio.create_task(slots.take_again("a"))
    await asyncio.sleep(0)
    assert not going_on.done(), "the slot is reserved for a leg that is being claimed"
    slots.take("c")
    await asyncio.sleep(0)
    assert (going_on.done(), slots.free) == (False, 0)
    slots.release("b")
    await going_on
    assert (slots.working, slots.free, freed) == ({"a", "c"}, 0, ["free"])


async def test_a_slot_that_was_reserved_for_nothing_goes_to_a_leg_that_waits() -> None:
    slots = LegSlots(1)
    slots.take("a")
    slots.lend("a")
    slots.reserve()
    going_on = [asyncio.create_task(slots.take_again("a")) for _ in range(2)]
    await asyncio.sleep(0)
    slots.take()
    await asyncio.gather(*going_on)
    assert slots.working == {"a"}


async def test_a_leg_that_ends_while_it_waits_for_a_slot_needs_none() -> None:
    slots = LegSlots(1)
    slots.take("a")
    slots.lend("a")
    slots.take("b")
    going_on = asyncio.create_task(slots.take_again("a"))
    await asyncio.sleep(0)
    slots.release("a")
    slots.release("b")
    with pytest.raises(asyncio.CancelledError):
        await going_on
    assert slots.free == 1


@pytest.mark.parametrize("far_status", ["success", "running"])
async def test_a_leg_that_waits_for_a_server_needs_no_slot(
    site: Site, far_status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says for ever that its task works, or that a background task of it is open."""
    for module in (foreign, mirror):
        monkeypatch.setattr(module, "GRACE", 0.2)
    model = ScriptedModel(lambda request: say("Done.") if results(request) else delegated("far"))
    quick = Agent("quick", ScriptedModel([say("Quick.")]))
    async with open_server(far_status) as server:
        near = Agent("near", model, subagents=[RemoteSubagentStub("far", url=server.url)])
        async with site.worker([near, quick], slots=1) as worker, site.client() as client:
            waiting = [client.stream("near", "go") for _ in range(2)]
            await until(lambda: len(worker.info.slots.lent) == 2)
            assert (await client.run("quick", "go")).response == "Quick."
            for run in waiting:
                await client.cancel(run.run_id, tasks=True)
                assert [event.kind async for event in client.events(run.run_id)][-1] != "run_started"
            await until(lambda: worker.info.slots.free == 1 and not worker.info.slots.lent)


async def test_a_leg_goes_on_with_a_slot_after_a_server_that_was_not_there(site: Site) -> None:
    far = RemoteSubagentStub("far", url="http://127.0.0.1:9")
    model = ScriptedModel(lambda request: say("Done.") if results(request) else delegated("far"))
    async with site.worker([Agent("near", model, subagents=[far])], slots=1) as worker, site.client() as client:
        assert (await client.run("near", "go")).response == "Done."
        await until(lambda: worker.info.slots.free == 1 and not worker.info.slots.lent)


def delegated(name: str) -> ScriptedTurn:
    return call("task", {"subagent_type": name, "description": "go"}, id="task_1")


async def test_runs_at_the_gate_of_a_provider_lend_their_slots_up_to_a_number(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "SHOWN_AFTER", 0.02)
    provider = Provider(rate=None, down=(0.0, inf), seconds=0.0)
    model = ResilientModel(provider, RetryPolicy(first_delay=0.01, max_delay=0.03))
    async with site.worker([Agent("a", model)], slots=1) as worker, site.client() as client:
        slots = worker.info.slots
        runs = [client.stream("a", "go") for _ in range(7)]
        await until(lambda: len(slots.lent) == 4 and len(slots.working) == 1)
        await until(lambda: len(worker.at_work) == 5)
        provider.down = (0.0, 0.0)
        assert {(await run.result()).status for run in runs} == {RunStatus.COMPLETED}
        await until(lambda: slots.free == 1 and not slots.lent)
