"""Workflows of runs, as the tests look at them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from temporalio.client import WorkflowExecutionStatus, WorkflowHandle

from retinue import Runtime
from retinue.engines.temporal import TemporalEngine

from .. import inside
from ..waiting import until

RUNNING, CANCELED, COMPLETED = (
    WorkflowExecutionStatus.RUNNING,
    WorkflowExecutionStatus.CANCELED,
    WorkflowExecutionStatus.COMPLETED,
)


def engine_of(runtime: Runtime) -> TemporalEngine:
    engine = inside.engine_of(runtime)
    assert isinstance(engine, TemporalEngine)
    return engine


def workflow_of(runtime: Runtime, run_id: str) -> WorkflowHandle[Any, Any]:
    return engine_of(runtime).client.get_workflow_handle(run_id)


async def closed(runtime: Runtime, run_id: str) -> WorkflowExecutionStatus | None:
    """How the workflow of a run was closed, once it is."""

    async def status() -> WorkflowExecutionStatus | None:
        described = await workflow_of(runtime, run_id).describe()
        return None if described.status is RUNNING else described.status

    return await until(status)


@asynccontextmanager
async def order(client: Runtime, arguments: Any, name: str) -> AsyncGenerator[WorkflowHandle[Any, Any]]:
    """Start a run by the name of its workflow, as somebody who has only Temporal."""
    engine = engine_of(client)
    yield await engine.client.start_workflow("RetinueRun", arguments, id=name, task_queue=engine.task_queue("default"))


async def has_activity(runtime: Runtime, run_id: str) -> bool:
    """Whether the workflow of a run has an activity that has not ended."""
    return bool((await workflow_of(runtime, run_id).describe()).raw_description.pending_activities)


async def has_no_activity(runtime: Runtime, run_id: str) -> bool:
    return not await has_activity(runtime, run_id)
