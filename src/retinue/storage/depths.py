"""Depths of queues: how many legs wait or work in each queue, and why legs wait."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import Struct
from msgspec.structs import replace

from ..core.probation import SUSPECT
from .legs import OURS, SeenWorker, Workers
from .sql import SqlStore
from .writes import POSTGRES


class QueueDepth(Struct, frozen=True, kw_only=True):
    """The number of legs that wait or work in a queue."""

    queue: str
    ready: int
    """Legs that wait for a worker."""
    delayed: int
    working: int
    oldest: float
    """Seconds that the oldest leg has waited."""
    reasons: tuple[str, ...] = ()
    """Why legs of it wait."""


_AT_WORK = "owner IS NOT NULL AND engine IS NOT NULL AND ended = 0"
_READY = f"owner IS NULL AND turn IS NOT NULL AND {OURS}"
_DELAYED = f"owner IS NULL AND due_at IS NOT NULL AND turn IS NULL AND {OURS}"
# Legs of other engines are not rows here: they show as unfinished runs without an owner.
_ELSEWHERE = (
    "FROM runs JOIN logs ON logs.log_id = run_id WHERE status = 'running' AND owner IS NULL AND ended = 0 "
    f"AND engine <> '{POSTGRES}'"
)


async def read_depths(store: SqlStore) -> list[QueueDepth]:
    """Return the number of waiting and working legs of each queue."""
    # Each part has its own index, so logs that have ended or wait for an answer are not read.
    each = [f"SELECT queue, owner, turn, due_at FROM logs WHERE {part}" for part in (_AT_WORK, _READY, _DELAYED)]
    turn = "CASE WHEN COALESCE(due_at, 0) > wall_seconds() THEN NULL ELSE 0 END"
    each.append(f"SELECT queue, NULL, {turn}, GREATEST(due_at, started_at) {_ELSEWHERE}")
    found = await store.database.rows(
        "SELECT queue, COUNT(*) FILTER (WHERE owner IS NULL AND turn IS NOT NULL), "
        "COUNT(*) FILTER (WHERE owner IS NULL AND turn IS NULL), COUNT(*) FILTER (WHERE owner IS NOT NULL), "
        "COALESCE(MAX(wall_seconds() - due_at) FILTER (WHERE owner IS NULL AND turn IS NOT NULL), 0) "
        f"FROM ({' UNION ALL '.join(each)}) AS legs GROUP BY queue ORDER BY queue"
    )
    return [
        QueueDepth(queue=queue, ready=ready, delayed=delayed, working=working, oldest=max(0.0, oldest))
        for queue, ready, delayed, working, oldest in found
    ]


async def explain_depths(store: SqlStore) -> tuple[list[QueueDepth], list[SeenWorker]]:
    """Return the depth of each queue, with the reasons why legs wait; and the workers."""
    workers = await Workers(store).seen()
    waiting = await store.database.rows(
        f"SELECT DISTINCT queue, engine, agent FROM logs JOIN runs ON run_id = logs.log_id WHERE {_READY} UNION "
        f"SELECT queue, engine, agent {_ELSEWHERE} AND COALESCE(due_at, 0) <= wall_seconds() ORDER BY 1, 2, 3"
    )
    delayed = await store.database.rows(
        f"SELECT queue, MIN(due_at) FROM (SELECT queue, due_at FROM logs WHERE {_DELAYED} UNION ALL "
        f"SELECT queue, due_at {_ELSEWHERE}) AS delayed WHERE due_at > wall_seconds() GROUP BY queue"
    )
    lost = await store.database.rows(
        f"SELECT queue, COUNT(*), MAX(lost) FROM logs WHERE lost >= {SUSPECT} AND owner IS NULL AND {OURS} "
        "AND (turn IS NOT NULL OR due_at IS NOT NULL) GROUP BY queue"
    )
    reasons: dict[str, dict[str, None]] = {}
    for queue, engine, agent in waiting:
        alive = [worker for worker in workers if worker.is_alive and worker.engine == engine]
        if (problem := unserved(queue, agent, alive) or _busy(queue, agent, alive)) is not None:
            reasons.setdefault(queue, {})[problem] = None
    for queue, count, most in lost:
        who = "a leg has lost its worker" if count == 1 else f"{count} legs have lost their workers, one of them"
        said = f"{who} {most} times without progress: each such leg is tried alone, after a pause"
        reasons.setdefault(queue, {})[said] = None
    for queue, due_at in delayed:
        at = datetime.fromtimestamp(due_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        reasons.setdefault(queue, {})[f"not due before {at}"] = None
    return [replace(one, reasons=tuple(reasons.get(one.queue, ()))) for one in await read_depths(store)], workers


def unserved(queue: str, agent: str, workers: Sequence[SeenWorker]) -> str | None:
    """Return why none of these workers can take a leg; None if one can."""
    serving = [worker for worker in workers if queue in worker.queues]
    if not serving:
        served = ", ".join(sorted({name for worker in workers for name in worker.queues})) or "none"
        return f"no worker serves queue {queue!r} (served: {served}): start one with retinue worker --queues {queue}"
    if not any(agent in worker.agents for worker in serving):
        return f"no worker of queue {queue!r} has agent {agent!r}: start one whose TARGET has it"
    return None


def _busy(queue: str, agent: str, workers: Sequence[SeenWorker]) -> str | None:
    able = [worker for worker in workers if queue in worker.queues and agent in worker.agents]
    slots = sum(worker.slots for worker in able)
    if any(worker.busy < worker.slots for worker in able):
        return None  # it is about to be claimed
    return f"all slots of the workers with agent {agent!r} are busy ({slots} of {slots})"
