"""The task protocol of remote sub-agents: the messages between client and server. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Struct

ENDED = frozenset({"success", "error", "cancelled"})
TASKS_PATH = "/tasks"
_STATUS = re.compile(r"[A-Za-z_-]{1,40}")
_ALIASES = {"failed": "error", "canceled": "cancelled", "completed": "success"}


class TaskSubmission(Struct, frozen=True):
    """`POST /tasks`: have an agent work on an input. The client chooses the id, so a repeated request changes nothing."""

    task_id: str
    agent_id: str
    input: str
    context: dict[str, Any] = {}
    """`user_id`, `session_id` (the conversation that this continues) and `parent_session_id`."""


class RemoteTask(Struct, frozen=True, omit_defaults=True):
    """The state of a task: pending, running, success, error, cancelled, or something newer."""

    status: str = "pending"
    result: str | None = None
    error: str | None = None
    task_id: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def task_path(task_id: str, action: str = "") -> str:
    """Return `/tasks/{id}`, with `wait` or `cancel` after it if given."""
    return f"{TASKS_PATH}/{quote(task_id, safe='')}" + (f"/{action}" if action else "")


def encode(message: TaskSubmission | RemoteTask) -> bytes:
    return msgspec.json.encode(message)


def decode_submission(data: bytes) -> TaskSubmission:
    """Raise ValueError, which says what is wrong."""
    submission = msgspec.json.decode(data, type=TaskSubmission)
    if not submission.task_id.strip():
        raise ValueError("task_id is required")
    return submission


def decode_task(data: bytes) -> RemoteTask:
    """Raise ValueError if it is not a task. A result that is not text becomes JSON."""
    try:
        given: Any = msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(given, Mapping):
        raise ValueError("it is not an object")
    fields: Mapping[str, Any] = msgspec.convert(given, dict[str, Any])
    status = fields.get("status")
    if not isinstance(status, str) or not status:
        raise ValueError("it has no status")
    plain = status.lower() if _STATUS.fullmatch(status) else "unknown"
    result, error = _text(fields.get("result")), _text(fields.get("error"))
    return RemoteTask(_ALIASES.get(plain, plain), result, error, str(fields.get("task_id") or ""))


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
