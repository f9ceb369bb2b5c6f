"""The life of a task: one table, and the only functions that move a record through it.

Each returns the next record, or None if nothing is to be written. A terminal record never changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from .task import TaskRecord, TaskStatus, at

_ENDS = frozenset({TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED})
_NOWHERE: frozenset[TaskStatus] = frozenset()

TASK_MOVES: Mapping[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.PENDING: _ENDS | {TaskStatus.RUNNING},
    TaskStatus.RUNNING: _ENDS,
    TaskStatus.COMPLETED: _NOWHERE,
    TaskStatus.FAILED: _NOWHERE,
    TaskStatus.CANCELLED: _NOWHERE,
}


def begin(record: TaskRecord, now: float, node: str) -> TaskRecord | None:
    """Begin the work, unless the task was cancelled before."""
    if record.cancel_requested or TaskStatus.RUNNING not in TASK_MOVES[record.status]:
        return None
    return _next(record, now, status=TaskStatus.RUNNING, node=node)


def finish(
    record: TaskRecord,
    status: TaskStatus,
    now: float,
    *,
    result: str | None = None,
    result_file: str | None = None,
    error: str | None = None,
) -> TaskRecord | None:
    """End the work. Only the first end is written."""
    if status not in TASK_MOVES[record.status]:
        return None
    return _next(record, now, status=status, result=result, result_file=result_file, error_message=error, awaiting=None)


def request_cancel(record: TaskRecord, now: float) -> TaskRecord | None:
    """Request that a task stops. One that nobody has begun ends at once."""
    if record.status.is_terminal or record.cancel_requested:
        return None
    if record.status is TaskStatus.PENDING and record.node is None:
        return _next(record, now, cancel_requested=True, status=TaskStatus.CANCELLED)
    # The time of the last sign of life is the executor's alone to move.
    return replace(record, cancel_requested=True, version=record.version + 1)


def beat(record: TaskRecord, now: float, node: str) -> TaskRecord | None:
    """Record that the executor is alive. A beat of another node is ignored."""
    return None if record.status.is_terminal or record.node != node else _next(record, now)


def take_over(record: TaskRecord, now: float, node: str) -> TaskRecord | None:
    """Let another node continue a task whose executor is gone."""
    return _next(record, now, node=node) if record.status is TaskStatus.RUNNING else None


def await_human(record: TaskRecord, now: float, question: str | None) -> TaskRecord | None:
    """Record the question that a task waits for, or (None) that it continues."""
    if record.status.is_terminal or record.awaiting == question:
        return None
    return _next(record, now, awaiting=question)


def sweep(record: TaskRecord, now: float, orphan_after: float, observed: float = 0.0) -> TaskRecord | None:
    """Give up on a task whose executor has been silent for too long, by the clock or as observed.

    One that waits for a human may wait on, unless it was cancelled.
    """
    if record.awaiting is not None and not record.cancel_requested:
        return None
    silent = max(now - record.last_updated_at.timestamp(), observed)
    return None if silent < orphan_after else give_up(record, now, _silence(record, silent))


def give_up_killed(record: TaskRecord, now: float) -> TaskRecord | None:
    """Give up on a task whose process is known to have ended."""
    silent = max(now - record.last_updated_at.timestamp(), 0)
    return give_up(record, now, f"{_silence(record, silent)}; its process is gone")


def _silence(record: TaskRecord, seconds: float) -> str:
    last = record.last_updated_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"no heartbeat for {seconds:.0f} seconds (last updated: {last})"


def give_up(record: TaskRecord, now: float, reason: str) -> TaskRecord | None:
    """End a task whose executor is gone; not one that a server executes."""
    if record.status.is_terminal or record.is_remote:
        return None
    status = TaskStatus.CANCELLED if record.cancel_requested else TaskStatus.FAILED
    return _next(record, now, status=status, error_message=f"executor lost: {reason}", awaiting=None)


def _next(record: TaskRecord, now: float, **changes: object) -> TaskRecord:
    # A clock that was set back must not make a record look older than it is.
    moment = max(at(now), record.last_updated_at)
    return replace(record, last_updated_at=moment, version=record.version + 1, **changes)
