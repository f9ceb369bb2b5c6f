"""The Temporal engine: slots, priorities, addresses, and runs that are started by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import Client, WorkflowFailureError

from retinue import Agent, RunStatus, Runtime, tool
from retinue.core.errors import ConfigurationError, EngineError
from retinue.core.model import ModelRequest
from retinue.engines.temporal import TemporalEngine, parse, priority_of
from retinue.storage.depths import read_depths
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from ..waiting import until
from .crew import Gate, asked, crew, results
from .team import Site
from .temporal import TemporalServer, free_port
from .workflows import (
    has_activity,
    order,
    workflow_of,
)


@pytest.fixture
def site(postgres_url: str, temporal: TemporalServer) -> Site:
    """An empty database and task queues that nobody else has."""
    return Site(postgres_url, temporal.engine())


# --- slots, priorities, addresses


async def test_queues_of_a_worker_share_its_slots(site: Site) -> None:
    gate = Gate()
    async with site.worker([*crew(), gate.agent()], queues=["a", "b", "c"], slots=2) as worker, site.client() as client:
        assert [(await client.run("echo", name, queue=name)).response for name in "abc"] == [
            "echo: a",
            "echo: b",
            "echo: c",
        ]
        held = [client.stream("held", "go", queue=name) for name in "abcabc"]
        await until(lambda: len(worker.at_work) == 2)
        most = 0
        for _ in range(50):
            await asyncio.sleep(0.002)
            most = max(most, len(worker.at_work))
        gate.go.set()
        assert {(await run.result()).response for run in held} == {"let go"}
        assert (most, gate.entries) == (2, 6)


def test_priorities() -> None:
    assert [priority_of(number, "ann").priority_key for number in (-9, -1, 0, 1, 2, 9)] == [5, 4, 3, 2, 1, 1]
    assert priority_of(0, "ann").fairness_key == "ann"
    long = priority_of(0, "é" * 200).fairness_key
    assert long is not None
    assert len(long.encode()) == 64


async def test_priority_reaches_temporal(site: Site) -> None:
    async with site.client() as client:
        run = client.stream("echo", "go", priority=2, user_id="ann")
        await run.stored()
        (first, *_) = (await workflow_of(client, run.run_id).fetch_history()).events
        priority = first.workflow_execution_started_event_attributes.priority
        assert (priority.priority_key, priority.fairness_key) == (1, "ann")
        await run.cancel()


async def test_priorities_come_first_and_users_take_turns(site: Site) -> None:
    gate, done = Gate(), list[str]()

    @tool
    def note(name: str) -> str:
        """Note."""
        done.append(name)
        return name

    def turn(request: ModelRequest) -> ScriptedTurn:
        return say("noted") if results(request) else call("note", {"name": asked(request)})

    agents = [gate.agent(), Agent("noting", ScriptedModel(turn), tools=[note])]
    async with site.worker(agents, slots=1), site.client() as client:
        held = client.stream("held", "go")
        await gate.entered.wait()
        runs: list[Any] = []
        for name, priority in [
            *[(f"many {n}", 0) for n in range(6)],
            ("few 0", 0),
            ("few 1", 0),
            ("low", -2),
            ("high", 2),
        ]:
            run = client.stream("noting", name, user_id=name.split()[0], priority=priority)
            runs.append(run)

            await run.stored()
            await until(lambda run_id=run.run_id: has_activity(client, run_id))
        (depth,) = await read_depths(client.store)  # type: ignore[arg-type]
        assert (depth.queue, depth.ready, depth.delayed, depth.working) == ("default", 10, 0, 1)
        gate.go.set()
        for run in (held, *runs):
            assert (await run.result()).status is RunStatus.COMPLETED
    assert (done[0], done[-1]) == ("high", "low")
    assert set(done[1:5]) == {"many 0", "few 0", "many 1", "few 1"}
    assert sorted(done[5:-1]) == ["many 2", "many 3", "many 4", "many 5"]


async def test_keys_come_from_the_environment(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    async def connect(address: str = "", **settings: Any) -> Client:
        given.update(settings, address=address)
        raise RuntimeError("Failed client connect: Server connection error: Unauthenticated")

    monkeypatch.setattr(Client, "connect", connect)
    monkeypatch.setenv("TEMPORAL_API_KEY", "secret")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "elsewhere:1")
    with pytest.raises(EngineError, match="no Temporal server can be reached there .unauthenticated.") as failed:
        async with Runtime.open(postgres_url, engine="temporal://cloud:7233/prod"):
            pass
    assert (given["target_host"], given["namespace"], given["api_key"]) == ("cloud:7233", "prod", "secret")
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("temporal://host", ("host:7233", "default", "retinue")),
        ("temporal://host:17/prod?queue=x", ("host:17", "prod", "x")),
        ("temporal://[::1]:17/prod", ("[::1]:17", "prod", "retinue")),
    ],
)
def test_addresses(url: str, found: tuple[str, str, str]) -> None:
    assert parse(url) == found


@pytest.mark.parametrize(
    "url", ["temporal://", "temporal:host", "temporal://me:secret@host", "temporal://host:x", "temporal://host?tls=1"]
)
def test_addresses_that_are_none(url: str, postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match="is named temporal://host:port/namespace") as refused:
        Runtime.open(postgres_url, engine=url)
    assert "secret" not in str(refused.value)


async def test_a_server_that_cannot_be_reached(postgres_url: str, temporal: TemporalServer) -> None:
    port = free_port()
    for url, said in (
        (
            f"temporal://127.0.0.1:{port}/default",
            f"temporal://127.0.0.1:{port}/default: no Temporal server can be reached",
        ),
        (f"temporal://{temporal.address}/nowhere", "/nowhere: Namespace nowhere is not found"),
    ):
        with pytest.raises(EngineError) as failed:
            async with Runtime.open(postgres_url, engine=url):
                pass
        assert said in str(failed.value)
        assert "\n" not in str(failed.value)


async def test_a_client_of_your_own(site: Site, temporal: TemporalServer) -> None:
    mine = await Client.connect(temporal.address)
    engine = TemporalEngine(f"temporal://x/y?queue={parse(site.engine)[2]}", client=mine)
    assert (engine.place, engine.client) == (f"temporal://{temporal.address}/default", mine)
    async with site.worker(), Runtime.open(site.url, engine=engine) as client:
        assert (await client.run("echo", "go")).response == "echo: go"


# --- by name


async def test_a_run_can_be_started_by_name(site: Site) -> None:
    async with site.worker(), site.client() as client:
        given = {"agent": "echo", "input": "hello", "user_id": "ann", "thread_id": "talk"}
        async with order(client, given, "mine") as workflow:
            found = await workflow.result()
        assert (found["run_id"], found["thread_id"], found["response"]) == ("mine", "talk", "echo: hello")
        assert (found["status"], found["is_cut"], found["questions"]) == ("completed", False, [])
        record = await client.store.load_run("mine")
        assert record is not None
        assert record.identity.user_id == "ann"
        async with order(client, {"agent": "echo", "input": "again", "thread_id": "talk"}, "next") as workflow:
            assert (await workflow.result())["response"] == "echo: again"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"agent": "nobody", "input": "x"}, "unknown agent 'nobody'"),
        ({"agent": "echo", "input": 7}, "Expected `str`, got `int` - at `$.input`"),
        ({"input": "x"}, "missing required field `agent`"),
    ],
)
async def test_a_wrong_order_fails_at_once(site: Site, arguments: Any, reason: str) -> None:
    async with site.worker(), site.client() as client, order(client, arguments, "wrong") as workflow:
        with pytest.raises(WorkflowFailureError) as failed:
            await workflow.result()
        assert reason in str(failed.value.cause.cause)  # type: ignore[union-attr]
        assert await client.store.load_run("wrong") is None


async def test_a_queued_run_by_name_holds_no_slot(site: Site) -> None:
    gate = Gate()
    async with site.worker([*crew(), gate.agent()], slots=2), site.client() as client:
        first = client.stream("held", "go", thread_id="talk")
        await gate.entered.wait()
        for number in range(3):
            async with order(client, {"agent": "echo", "input": f"{number}", "thread_id": "talk"}, f"n{number}"):
                await until(lambda number=number: client.store.load_run(f"n{number}"))
        assert (await client.run("echo", "another")).response == "echo: another"
        gate.go.set()
        assert (await first.result()).response == "let go"
        assert [(await workflow_of(client, f"n{number}").result())["response"] for number in range(3)] == [
            "echo: 0",
            "echo: 1",
            "echo: 2",
        ]
