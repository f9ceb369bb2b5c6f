"""A task: the record of a background child, with which any process can see, await and cancel it.

This module owns the table of transitions and the only functions that change a record. Each returns the next record, or
None if there is nothing to write. A terminal record never changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from ..core.content import clean_text
from ..core.receipts import Receipt

_encode = msgspec.json.Encoder().encode


class TaskStatus(StrEnum):
    """The status of a task."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self is not _PENDING and self is not _RUNNING  # a set would ask for the hash, which is slow


_PENDING, _RUNNING = TaskStatus.PENDING, TaskStatus.RUNNING


class TaskScope(Struct, frozen=True):
    """The tasks of one session of one user of one agent."""

    agent: str
    session_id: str
    user_id: str | None = None


class TaskRecord(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One task. It names the declaration of the child, never its headers, and holds enough to run it again."""

    task_id: str
    sub_agent_id: str
    parent_agent_id: str
    parent_session_id: str
    user_id: str | None = None
    status: TaskStatus = field(default_factory=lambda: TaskStatus.PENDING)
    """A factory and not a default, which is left out of the JSON: readers of the file look for the status."""
    input: str = ""
    agent_key: str | None = None
    sub_session_id: str | None = None
    parent_run_id: str | None = None
    parent_tool_call_id: str | None = None
    run_id: str | None = None
    """The run that does the work, once there is one."""
    log_id: str | None = None
    """The log of the run that started it, where that is stored."""
    result: str | None = None
    result_file: str | None = None
    """The place of the whole result, in the workspace or the database, if it is too long for the record."""
    error_message: str | None = None
    receipt: Receipt | None = None
    """What the child did, by the events of its log, as it was when the task ended."""
    cancel_requested: bool = False
    awaiting: str | None = None
    """The question that a human must answer before it continues."""
    transport_type: str | None = None
    """The protocol by which it is executed elsewhere; None is in the process that created it."""
    node: str | None = None
    """The process that executes it, or watches over it where it runs elsewhere."""
    created_at: datetime
    last_updated_at: datetime
    version: int = 1

    @property
    def scope(self) -> TaskScope:
        return TaskScope(self.parent_agent_id, self.parent_session_id, self.user_id)

    @property
    def is_remote(self) -> bool:
        return self.transport_type is not None


def at(seconds: float) -> datetime:
    """Return a clock reading as the time in a record."""
    return datetime.fromtimestamp(seconds, UTC)


def encoded(record: TaskRecord) -> tuple[TaskRecord, bytes]:
    """Return a record that can be stored, and its JSON."""
    try:
        return record, _encode(record)
    except UnicodeEncodeError:  # half a character, from a model or a tool: keep the rest
        fields = [(name, getattr(record, name)) for name in record.__struct_fields__]
        whole = {name: clean_text(text) for name, text in fields if type(text) is str}
        record = msgspec.structs.replace(record, **whole)
        return record, _encode(record)


_ENDS = frozenset({TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED})
TASK_MOVES: Mapping[TaskStatus, frozenset[TaskStatus]] = {
    TaskStatus.PENDING: _ENDS | {TaskStatus.RUNNING},
    TaskStatus.RUNNING: _ENDS,
    **dict.fromkeys(_ENDS, frozenset[TaskStatus]()),
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
    receipt: Receipt | None = None,
) -> TaskRecord | None:
    """End the work. Only the first end is written."""
    if status not in TASK_MOVES[record.status]:
        return None
    ended = _next(
        record, now, status=status, result=result, result_file=result_file, error_message=error, awaiting=None
    )
    return replace(ended, receipt=receipt)


def request_cancel(record: TaskRecord, now: float) -> TaskRecord | None:
    """Request that a task stops. A task that has not started ends at once."""
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
