"""A task: the record of a background child, with which any process can see, await and cancel it."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum

import msgspec
from msgspec import Struct

from ..core.content import clean_text

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
    status: TaskStatus = TaskStatus.PENDING
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
