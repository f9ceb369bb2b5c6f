"""Agents as steps of users' own workflows."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pydoc
import subprocess
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from temporalio import workflow
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from retinue import Agent, RunStatus, Runtime
from retinue.temporal import agent_activities
from tests.prepared import PYTHON

from .. import inside
from ..waiting import until
from .crew import Gate, crew
from .team import Site
from .temporal import TemporalServer

ROOT = Path(__file__).parents[2]


@workflow.defn(sandboxed=False)
class Steps:
    """Executes activities one after the other; what follows may use what came before."""

    @workflow.run
    async def run(self, steps: list[list[Any]]) -> list[dict[str, Any]]:
        done: list[dict[str, Any]] = []
        for name, order in steps:
            if name == "answer_agent" and "run_id" not in order:
                order["run_id"] = done[-1]["run_id"]
            done.append(
                await workflow.execute_activity(
                    name,
                    order,
                    start_to_close_timeout=timedelta(minutes=5),
                    heartbeat_timeout=timedelta(seconds=2),
                    cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                )
            )
        return done


@workflow.defn(sandboxed=False)
class Parent:
    """Has a run as a child workflow."""

    @workflow.run
    async def run(self, queue: str, order: dict[str, Any]) -> Any:
        return await workflow.execute_child_workflow("RetinueRun", order, id=f"child-{queue}", task_queue=queue)


class Steppers:
    """Workers of our own, on a queue of their own."""

    def __init__(self, client: Client) -> None:
        self.client, self.queue = client, f"steps-{uuid.uuid4()}"

    @asynccontextmanager
    async def worker(self, runtime: Runtime) -> AsyncGenerator[None]:
        activities = agent_activities(runtime)
        async with Worker(
            self.client,
            task_queue=self.queue,
            workflows=[Steps, Parent],
            activities=activities,
            max_heartbeat_throttle_interval=timedelta(seconds=0.1),
            max_cached_workflows=0,
        ):
            yield

    async def start(self, *steps: tuple[str, dict[str, Any]]) -> Any:
        given = [list(step) for step in steps]
        return await self.client.start_workflow(Steps.run, given, id=f"w-{uuid.uuid4()}", task_queue=self.queue)

    async def execute(self, *steps: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return await (await self.start(*steps)).result()


@pytest.fixture
async def steppers(temporal: TemporalServer) -> Steppers:
    return Steppers(await Client.connect(temporal.address))


async def test_an_agent_is_a_step(steppers: Steppers) -> None:
    async with Runtime(crew()) as runtime, steppers.worker(runtime):
        (said,) = await steppers.execute(("run_agent", {"agent": "echo", "input": "hello", "thread_id": "talk"}))
        assert said["response"] == "echo: hello"
        assert (said["status"], said["thread_id"], said["step"], said["questions"]) == ("completed", "talk", 1, [])
        assert (await runtime.result(said["run_id"])).response == "echo: hello"


async def test_a_step_that_waits_is_answered_by_another(steppers: Steppers) -> None:
    async with Runtime(crew()) as runtime, steppers.worker(runtime):
        waiting, done = await steppers.execute(
            ("run_agent", {"agent": "boss", "input": "go"}),
            ("answer_agent", {"decisions": {"pay_1": {"action": "approve"}}}),
        )
        assert (waiting["status"], waiting["questions"]) == ("suspended", ["pay_1"])
        assert (done["run_id"], done["response"]) == (waiting["run_id"], "boss: clerk: paid 3")


@pytest.mark.parametrize(
    ("name", "order", "kind", "reason"),
    [
        ("run_agent", {"agent": "nobody", "input": "x"}, "UnknownAgent", "unknown agent 'nobody'"),
        ("run_agent", {"agent": "echo", "input": ""}, "ConfigurationError", "the input is empty"),
        ("run_agent", {"agent": "echo", "imput": "x"}, "ValidationError", "unknown field `imput`"),
        ("answer_agent", {"run_id": "none", "decisions": {}}, "UnknownRun", "unknown run 'none'"),
    ],
)
async def test_a_mistake_fails_a_step_at_once(
    steppers: Steppers, name: str, order: dict[str, Any], kind: str, reason: str
) -> None:
    async with Runtime(crew()) as runtime, steppers.worker(runtime):
        with pytest.raises(WorkflowFailureError) as failed:
            await steppers.execute((name, order))
        error: Any = failed.value.cause.__cause__
        assert isinstance(error, ApplicationError)
        assert (error.type, error.non_retryable) == (kind, True)
        assert reason in str(error)


async def test_cancelling_a_step_cancels_its_run(steppers: Steppers) -> None:
    gate = Gate()
    async with Runtime([gate.agent()]) as runtime, steppers.worker(runtime):
        started = await steppers.start(("run_agent", {"agent": "held", "input": "go", "run_id": "mine"}))
        await gate.entered.wait()
        await started.cancel()
        with pytest.raises(WorkflowFailureError):
            await started.result()
        assert (await runtime.result("mine")).status is RunStatus.CANCELLED


async def test_a_retry_continues_the_run(steppers: Steppers, postgres_url: str) -> None:
    """A worker that stops leaves the run to the next one."""
    gate = Gate()
    async with Runtime.open(postgres_url, [gate.agent()], on_close="leave") as runtime:
        async with steppers.worker(runtime):
            started = await steppers.start(("run_agent", {"agent": "held", "input": "go", "run_id": "mine"}))
            await gate.entered.wait()
    gate.go.set()
    async with Runtime.open(postgres_url, [gate.agent()]) as runtime, steppers.worker(runtime):
        (said,) = await started.result()
        assert (said["run_id"], said["status"]) == ("mine", "completed")
        events = [event async for event in runtime.events("mine")]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert gate.entries == 1


async def test_workers_of_an_engine_do_the_step(site: Site, steppers: Steppers) -> None:
    """The activity needs no agents then: it starts the run and waits."""
    async with site.worker(), site.client() as client, steppers.worker(client):
        (said,) = await steppers.execute(("run_agent", {"agent": "echo", "input": "hello"}))
        assert said["response"] == "echo: hello"


class TestChildWorkflow:
    """A run as a child workflow, by its name."""

    @pytest.fixture
    def site(self, postgres_url: str, temporal: TemporalServer) -> Site:
        return Site(postgres_url, temporal.engine())

    def queue(self, client: Runtime) -> str:
        return inside.engine_of(client).task_queue("default")

    async def test_its_result_is_returned(self, site: Site, steppers: Steppers) -> None:
        async with site.worker(), site.client() as client, steppers.worker(client):
            queue = self.queue(client)
            said = await steppers.client.execute_workflow(
                Parent.run,
                args=[queue, {"agent": "echo", "input": "hello"}],
                id=f"parent-{queue}",
                task_queue=steppers.queue,
            )
            assert (said["run_id"], said["response"]) == (f"child-{queue}", "echo: hello")
            assert (await client.result(f"child-{queue}")).response == "echo: hello"

    async def test_it_is_cancelled_with_its_parent(self, site: Site, steppers: Steppers) -> None:
        gate = Gate()
        agents: list[Agent] = [gate.agent()]
        async with site.worker(agents), site.client() as client, steppers.worker(client):
            queue = self.queue(client)
            parent = await steppers.client.start_workflow(
                Parent.run,
                args=[queue, {"agent": "held", "input": "go"}],
                id=f"parent-{queue}",
                task_queue=steppers.queue,
            )
            await gate.entered.wait()
            await parent.cancel()
            with pytest.raises(WorkflowFailureError):
                await parent.result()
            record = await until(lambda: client.store.load_run(f"child-{queue}"))
            assert record.status == RunStatus.CANCELLED


async def test_the_example_runs(temporal: TemporalServer) -> None:
    command = [PYTHON, "-W", "error", "examples/temporal/letter.py", temporal.address]
    out = await asyncio.to_thread(subprocess.run, command, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines() == ["Dear all, the office is closed on Friday.", "It is on its way."]


def test_public_names() -> None:
    """They are sorted, they exist, and each says what it is."""
    module = importlib.import_module("retinue.temporal")
    assert module.__all__ == sorted(set(module.__all__))
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__doc__
        assert inspect.isclass(value) or inspect.isfunction(value)
        assert pydoc.render_doc(value)
