"""The task protocol of remote sub-agents: what client and server send each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

ENDED = frozenset({"success", "error", "cancelled"})
_ALIASES = {"failed": "error", "canceled": "cancelled", "completed": "success"}


class TaskSubmission(Struct, frozen=True):
    """`POST /tasks`: have an agent work on an input. The client chooses the id, so that asking twice is asking once."""

    task_id: str
    agent_id: str
    input: str
    context: dict[str, Any] = {}
    """Who asks: `user_id`, `session_id` (the conversation this goes on with) and `parent_session_id`."""


class RemoteTask(Struct, frozen=True, omit_defaults=True):
    """What a server says of a task: pending, running, success, error, cancelled, or something newer."""

    task_id: str = ""
    status: str = "pending"
    result: str | None = None
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def tasks_path() -> str:
    return "/tasks"


def task_path(task_id: str, action: str = "") -> str:
    """`/tasks/{id}`, or with `wait` or `cancel` after it."""
    return f"/tasks/{quote(task_id, safe='')}" + (f"/{action}" if action else "")


def encode_submission(submission: TaskSubmission) -> bytes:
    return msgspec.json.encode(submission)


def decode_submission(data: bytes) -> TaskSubmission:
    """Raises ValueError, which says what is wrong."""
    submission = msgspec.json.decode(data, type=TaskSubmission)
    if not submission.task_id.strip():
        raise ValueError("task_id is required")
    return submission


def encode_task(task: RemoteTask) -> bytes:
    return msgspec.json.encode(task)


def decode_task(data: bytes) -> RemoteTask:
    """Raises ValueError where it is not a task. A result that is no text is kept as JSON."""
    given: Any = msgspec.json.decode(data)
    if not isinstance(given, Mapping):
        raise ValueError("it is not an object")
    fields: Mapping[str, Any] = msgspec.convert(given, dict[str, Any])
    status = fields.get("status")
    if not isinstance(status, str) or not status:
        raise ValueError("it has no status")
    plain = status.lower()
    return RemoteTask(
        str(fields.get("task_id") or ""),
        _ALIASES.get(plain, plain),
        _text(fields.get("result")),
        _text(fields.get("error")),
    )


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
