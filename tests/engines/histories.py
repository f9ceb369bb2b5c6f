"""Histories of workflows, for the test that later versions replay them.

    python -m tests.engines.histories

writes them anew into `histories/`. Do that only to add some: those that are there were written by earlier versions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowFailureError, WorkflowHandle

from retinue import Decision, Runtime

from .. import inside
from ..databases import postgres_server
from ..waiting import until
from .crew import Gate, crew
from .team import Site
from .temporal import temporal_server
from .workflows import workflow_of

FOLDER = Path(__file__).parent / "histories"
Scene = Callable[[Runtime, Site], Awaitable[WorkflowHandle[Any, Any]]]


async def plain(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """A run with one leg."""
    async with site.worker():
        run = client.stream("echo", "go")
        await run.result()
        return await _closed(workflow_of(client, run.run_id))


async def approved(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """Two legs, with answers from a client and from Temporal, and a wrong one."""
    async with site.worker():
        run = client.stream("boss", "go")
        await run.result()
        workflow = workflow_of(client, run.run_id)
        for answer in ({"pay_7": {"action": "approve"}}, {"pay_1": {"action": "approve"}}):
            with suppress(Exception):
                await workflow.execute_update("answer", answer)
        return await _closed(workflow)


async def answered(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """Two legs, with an answer that came while no worker was there."""
    async with site.worker():
        run = client.stream("clerk", "go")
        await run.result()
    answering = asyncio.create_task(client.resume(run.run_id, {"pay_1": Decision.approve()}))
    async with site.worker():
        await answering
        return await _closed(workflow_of(client, run.run_id))


async def cancelled(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """A cancel in Temporal while a leg is at work."""
    gate = Gate()
    async with site.worker([gate.agent()]):
        run = client.stream("held", "go")
        await gate.entered.wait()
        workflow = workflow_of(client, run.run_id)
        await workflow.cancel()
        return await _closed(workflow)


async def given_up(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """A cancel in Temporal while the run waits."""
    async with site.worker():
        run = client.stream("boss", "go")
        await run.result()
        workflow = workflow_of(client, run.run_id)
        await workflow.cancel()
        return await _closed(workflow)


async def handed_over(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """A leg that a stopped worker has left."""
    gate = Gate()
    async with site.worker([gate.agent()], grace=0.0):
        run = client.stream("held", "go")
        await gate.entered.wait()
    gate.go.set()
    async with site.worker([gate.agent()]):
        await run.result()
        return await _closed(workflow_of(client, run.run_id))


async def ordered(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """A run that was started by the name of its workflow."""
    engine = inside.engine_of(client)
    async with site.worker(crew()):
        workflow = await engine.client.start_workflow(
            "RetinueRun", {"agent": "echo", "input": "go"}, id="ordered", task_queue=engine.task_queue("default")
        )
        return await _closed(workflow)


async def continued(client: Runtime, site: Site) -> WorkflowHandle[Any, Any]:
    """The first part of a workflow that continued as a new one while its run waited."""
    engine = inside.engine_of(client)
    async with site.worker(crew()):
        workflow = await engine.client.start_workflow(
            "RetinueRun",
            {"agent": "clerk", "input": "go", "longest": 14},
            id="continued",
            task_queue=engine.task_queue("default"),
        )
        first = engine.client.get_workflow_handle("continued", run_id=workflow.first_execution_run_id)

        async def is_over() -> bool:
            return (await first.describe()).close_time is not None

        await until(is_over)
        await client.resume("continued", {"pay_1": Decision.approve()})
        await workflow.result()
        return first


def _anonymous(value: Any) -> Any:
    """Leave out which machine and process it was."""
    if isinstance(value, list):
        return [_anonymous(one) for one in value]
    if isinstance(value, dict):
        return {name: "worker" if name == "identity" else _anonymous(one) for name, one in value.items()}
    return value


async def _closed(workflow: WorkflowHandle[Any, Any]) -> WorkflowHandle[Any, Any]:
    with suppress(WorkflowFailureError):
        await workflow.result()
    return workflow


SCENES: tuple[Scene, ...] = (plain, approved, answered, cancelled, given_up, handed_over, ordered, continued)


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with postgres_server() as postgres, temporal_server() as temporal:
        for scene in SCENES:
            site = Site(postgres.url(), temporal.engine())
            async with site.client() as client:
                history = await (await scene(client, site)).fetch_history()
                path = FOLDER / f"{scene.__name__}.json"
                path.write_text(json.dumps(_anonymous(json.loads(history.to_json())), separators=(",", ":")) + "\n")
                print(path.name, len(history.events), "events")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
