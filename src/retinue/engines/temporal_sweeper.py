"""Finds in the store what Temporal may have missed: runs that are due, lost or without a workflow, and unread wishes.

Invariant: every worker may sweep at any time, and sweeping is idempotent. A workflow has the id of its run. A wake only
makes a worker look at a log. If two workers get the same leg, one can claim it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.field_mask_pb2 import FieldMask
from temporalio.api.activity.v1 import ActivityOptions
from temporalio.api.common.v1 import Priority, WorkflowExecution
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo, WorkflowExecutionOptions
from temporalio.api.workflowservice.v1 import UpdateActivityOptionsRequest, UpdateWorkflowExecutionOptionsRequest
from temporalio.client import WorkflowExecutionDescription, WorkflowExecutionStatus, WorkflowHandle

from ..core.engine import WorkerInfo
from ..core.errors import EngineError, RetinueError
from ..core.processes import has_process_ended
from ..core.stores import RunRecord
from ..storage.legs import Found, PlacedLogs, Workers
from ..storage.schedules import Schedules
from .temporal_workflow import LEG, WORKFLOW

if TYPE_CHECKING:
    from .temporal import TemporalEngine

_log = logging.getLogger(__name__)

SCHEDULED = PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED
FIRST = 3.0
"""Seconds at most in which a new worker sees to lost runs before it asks for work."""
SWEEP_EVERY = 0.5
"""Seconds between two looks for schedules that are due, threads that are free, and workers that are gone."""
RECONCILE_EVERY = 5.0
"""Seconds between two comparisons of the store with Temporal, by all workers together."""
UNREAD = 2.0
"""Seconds after which a wish in an inbox counts as overlooked."""
_TICK = 0.05
_AGAIN = 30.0
"""Seconds before a worker acts on the same run again."""


class Sweeper:
    """Looks at the store for one worker."""

    def __init__(self, engine: TemporalEngine, info: WorkerInfo) -> None:
        self._engine, self._info, self._store = engine, info, engine.store
        self._logs = PlacedLogs(engine.store, engine.name)
        self._workers, self._schedules = Workers(engine.store), Schedules(engine.store)
        self._done: dict[str, float] = {}
        """When this worker last acted on each run."""
        self._missing: set[str] = set()
        self._stale: set[str] = set()
        """The logs without a workflow, and the workflows without a log, at the last comparison."""

    async def keep_sweeping(self) -> None:
        due, failed = 0.0, ""
        while True:
            try:
                await self._sweep()
                if (began := time.monotonic()) >= due:
                    due = began + RECONCILE_EVERY
                    others = await self._reconcile()
                    due = began + max(RECONCILE_EVERY * others, 20 * (time.monotonic() - began))
                failed = ""
            except RetinueError as exc:
                if failed != str(exc):
                    _log.error("looking for lost runs failed, and is tried again: %s", exc)
                failed = str(exc)
            await asyncio.sleep(SWEEP_EVERY)

    async def hand_on_first(self) -> None:
        """Hand on the legs of workers that are gone before this one asks for work: they come before new runs.

        Returns when Temporal has them in its queues, but does not wait for long.
        """
        with contextlib.suppress(RetinueError, TimeoutError):
            async with asyncio.timeout(FIRST):
                lost = await self._sweep()
                for log_id, _ in lost:
                    while not await self._is_queued(log_id):  # noqa: ASYNC110, no event says so
                        await asyncio.sleep(_TICK)
                if lost:
                    await asyncio.sleep(4 * _TICK)  # Temporal says so a moment before the queue has it

    async def _is_queued(self, log_id: str) -> bool:
        """Return whether the next leg of a run waits in a queue; also if the run has ended or nothing is known of it."""
        described, legs = await self._describe(log_id)
        waits = [one.state == SCHEDULED and one.next_attempt_schedule_time.ToSeconds() <= time.time() for one in legs]
        return described.status is not WorkflowExecutionStatus.RUNNING or any(waits)

    async def _describe(self, log_id: str) -> tuple[WorkflowExecutionDescription, list[PendingActivityInfo]]:
        """Return the workflow of a run as Temporal knows it, and those of its activities that are legs."""
        workflow: WorkflowHandle[Any, Any] = self._engine.client.get_workflow_handle(log_id)
        described = await self._engine.call(workflow.describe)
        return described, [one for one in described.raw_description.pending_activities if one.activity_type.name == LEG]

    async def start(self, found: Found) -> None:
        """Start or wake the workflows of runs."""
        for run_id, placement in found:
            record = await self._store.load_run(run_id) if self._is_new(run_id) else None
            if record is not None:
                await self._engine.start_workflow(record, placement, "wake")

    async def _sweep(self) -> list[tuple[str, str]]:
        """Start the runs that are due and those whose thread is free; hand on the legs of workers that are gone."""
        now = time.monotonic()
        self._done = {name: at for name, at in self._done.items() if at + _AGAIN > now}
        await self.start(await self._schedules.fire(self._engine.name))
        await self.start(await self._logs.freed())
        owners = await self._logs.owners()
        gone = [owner for owner in owners if has_process_ended(owner.rpartition("/")[0])]
        lost = [(log_id, owner) for log_id, owner in await self._logs.lost(gone) if owner != self._info.owner]
        await asyncio.gather(*[self._hand_on_lost(log_id, owner) for log_id, owner in lost])
        return lost

    async def _hand_on_lost(self, log_id: str, owner: str) -> None:
        name = f"{log_id} {owner}"
        if self._is_new(name):
            try:
                await self._hand_on(log_id, owner)
            except RetinueError:
                self._done.pop(name, None)
                raise

    def _is_new(self, run_id: str) -> bool:
        """Return whether nothing was done about a run from here for a while, and note it."""
        is_new = run_id not in self._done
        self._done.setdefault(run_id, time.monotonic())
        return is_new

    async def _hand_on(self, log_id: str, owner: str | None = None) -> None:
        """End the activity of a worker that is gone, instead of waiting until Temporal misses its heartbeat.

        If Temporal has missed it already, the activity waits in a queue again: it is put before those of new runs.

        Without an owner: nobody has the log, and an activity that seems to be at work has ended without Temporal.
        """
        described, legs = await self._describe(log_id)
        started = PendingActivityState.PENDING_ACTIVITY_STATE_STARTED
        for one in legs:
            worker = one.last_worker_identity
            if one.state == started and worker == (owner or worker):
                _log.warning("run %s: worker %s does not work on it any more, and another looks at it", log_id, worker)
                activity = self._engine.client.get_async_activity_handle(
                    workflow_id=log_id, run_id=described.run_id, activity_id=one.activity_id
                )
                await self._put_first(log_id, described.run_id)
                left = {"end": "left", **standing(await self._store.load_run(log_id))}
                await self._engine.call(lambda activity=activity, left=left: activity.complete(left))
            elif one.state == SCHEDULED and owner is not None and one.priority.priority_key != 1:
                await self._put_first(log_id, described.run_id, one.activity_id)

    async def _put_first(self, log_id: str, run_id: str | None, activity_id: str | None = None) -> None:
        """Have a leg that waits in a queue again, or the next tasks of a workflow, come before those of runs that have not
        begun, if the server can."""
        service, namespace = self._engine.client.workflow_service, self._engine.namespace
        execution = WorkflowExecution(workflow_id=log_id, run_id=run_id or "")
        first, mask = Priority(priority_key=1), FieldMask(paths=["priority.priority_key"])
        if activity_id is None:
            change = UpdateWorkflowExecutionOptionsRequest(
                namespace=namespace,
                workflow_execution=execution,
                workflow_execution_options=WorkflowExecutionOptions(priority=first),
                update_mask=mask,
            )
            request = partial(service.update_workflow_execution_options, change)
        else:
            options = ActivityOptions(priority=first)
            leg = UpdateActivityOptionsRequest(
                namespace=namespace, execution=execution, id=activity_id, activity_options=options, update_mask=mask
            )
            request = partial(service.update_activity_options, leg)
        try:
            await self._engine.call(request)
        except EngineError as exc:
            _log.debug("run %s waits for its turn: %s", log_id, exc)

    async def _reconcile(self) -> int:
        """Compare the store with Temporal; return how many workers there are to do it."""
        for log_id, _ in await self._logs.unread(UNREAD):
            if self._is_new(log_id):
                await self._engine.wake(log_id)
                await self._hand_on(log_id)
        running = await self._running()
        at_work = dict(await self._logs.at_work())
        missing, stale = set(at_work) - running, await self._logs.ended(sorted(running - set(at_work)))
        # Twice in a row: what begins or ends at this moment is left alone.
        for log_id in filter(self._is_new, missing & self._missing):
            _log.warning("run %s has no workflow, and gets one", log_id)
            await self._engine.wake(log_id)
        for log_id in filter(self._is_new, stale & self._stale):
            handle = self._engine.client.get_workflow_handle(log_id)
            await self._engine.call(lambda handle=handle: handle.signal("wake"))
            await self._hand_on(log_id)
        self._missing, self._stale = missing, stale
        return max(1, sum(worker.is_alive for worker in await self._workers.seen(self._engine.name)))

    async def _running(self) -> set[str]:
        """Return the ids of the workflows that have not ended."""
        queues = f"TaskQueue STARTS_WITH '{self._engine.task_queue('')}'"
        query = f"WorkflowType = '{WORKFLOW}' AND ExecutionStatus = 'Running' AND {queues}"

        async def read() -> set[str]:
            return {found.id async for found in self._engine.client.list_workflows(query, page_size=1_000)}

        return await self._engine.call(read)


def standing(record: RunRecord | None) -> dict[str, Any]:
    """Return the status of a run that its workflow shows."""
    result = None if record is None else record.result
    return {
        "agent": "" if record is None else record.identity.agent,
        "status": "unknown" if record is None else str(record.status),
        "step": 0 if result is None else result.steps,
        "questions": [] if result is None else sorted(result.suspended),
    }
