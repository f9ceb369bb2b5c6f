"""Follows the A2A task of a run: projects its log to task updates."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ..core.stores import RunRecord
from ..wire.a2a import INTERRUPTED, Json, TaskProjection
from .queries import EventsQuery
from .service import Service
from .streams import ServerCloses, open_run


def project_of(record: RunRecord) -> TaskProjection:
    return TaskProjection(record.identity.run_id, record.identity.thread_id, record.started_at)


async def read_task(service: Service, record: RunRecord) -> TaskProjection:
    """Return the task of a run as it is stored now."""
    projection = project_of(record)
    for event in await service.runtime.log(record.identity.run_id).so_far():
        projection(event)
    projection.settle(record.result)
    if projection.state in INTERRUPTED and record.result is not None:
        projection.ask(record.result.suspended)
    return projection


async def follow_task(
    service: Service, record: RunRecord, projection: TaskProjection
) -> AsyncGenerator[tuple[int, list[Json]]]:
    """Project a log from its beginning; yield the number of each event and what it changes, until the log or the
    server ends. From time to time without an event, yield the number of the last one and no change."""
    last = 0
    try:
        async for batch in await open_run(service, record, EventsQuery()):
            for frame in batch.frames:
                last = frame.seq or last
                updates = projection(frame.event)
                if updates and projection.state in INTERRUPTED:
                    updates = await _ask(service, record.identity.run_id, last, projection) or updates
                yield last, updates
            if not batch.frames:
                yield last, []
        ended = await service.runtime.store.load_run(record.identity.run_id)
        if ended is not None and (updates := projection.settle(ended.result)):
            yield 0, updates
    except ServerCloses:
        return


async def _ask(service: Service, run_id: str, seq: int, projection: TaskProjection) -> list[Json]:
    """Return the updates for the run's question, if the run waits for it now; empty if it was answered since."""
    if await service.runtime.log(run_id).last() != seq:
        return []
    record = await service.runtime.store.load_run(run_id)
    if record is None or record.result is None or record.result.status.is_terminal:
        return []
    return [projection.ask(record.result.suspended)]
