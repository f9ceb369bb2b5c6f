"""The task protocol of remote sub-agents: the messages between client and server. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_type_hints
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.events import Custom, ErrorRaised, Event, UnknownEvent, event_from_bytes
from ..core.receipts import Receipt
from ..core.results import SuspendTicket
from ..core.runs import Limits, Usage

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
    limits: Limits | None = None
    """What the tree of the parent has left: the depth below this task, children, steps, tokens, cost, seconds."""


class RemoteTask(Struct, frozen=True, omit_defaults=True):
    """The state of a task: pending, running, success, error, cancelled, or something newer."""

    status: str = "pending"
    result: str | None = None
    error: str | None = None
    task_id: str = ""
    awaiting: dict[str, SuspendTicket] = {}
    """The questions to humans that a running task waits for, each with its path of call ids."""
    usage: Usage = Usage()
    steps: int = 0
    output: Any = None
    termination: str = ""
    run_id: str = ""
    seq: int = 0
    """The number of the last event of its log; 0 if the server has no events."""
    open: bool = False
    """True if it has ended and background tasks under it are at work: more events come."""
    receipt: Receipt | None = None
    """What the run did, as its server says."""

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @property
    def is_settled(self) -> bool:
        """True if it has ended, or waits for a human."""
        return self.has_ended or bool(self.awaiting)


_OPTIONAL = {
    name: kind for name, kind in get_type_hints(RemoteTask).items() if name not in RemoteTask.__match_args__[:4]
}


class TaskCancel(Struct, frozen=True):
    """`POST /tasks/{id}/cancel`: with `tasks`, its background tasks are stopped, too."""

    tasks: bool = False


def task_path(task_id: str, action: str = "") -> str:
    """Return `/tasks/{id}`, with `wait`, `cancel`, `events` or `resume` after it if given."""
    return f"{TASKS_PATH}/{quote(task_id, safe='')}" + (f"/{action}" if action else "")


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
    known = RemoteTask(_ALIASES.get(plain, plain), result, error, str(fields.get("task_id") or ""))
    return replace(known, **_more(fields))


def _more(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optional fields. What does not fit is left out: a server may mean something else by the name."""
    found: dict[str, Any] = {}
    for name, kind in _OPTIONAL.items():
        with suppress(msgspec.ValidationError):
            if fields.get(name) is not None:
                found[name] = msgspec.convert(fields[name], kind)
    tickets: dict[str, SuspendTicket] = found.get("awaiting", {})
    paths = {key: ticket.path or tuple(key.split("/")) for key, ticket in tickets.items()}
    found["awaiting"] = {key: replace(ticket, path=paths[key]) for key, ticket in tickets.items() if all(paths[key])}
    return found


def is_notice(event: Event) -> bool:
    """Return whether an event is a notice to those who wait: the log does not have it, so it has no number."""
    return event.seq == 0 and isinstance(event, ErrorRaised) and not event.fatal


def decode_event(data: bytes) -> Event:
    """Raise ValueError if it is no event. One of an unknown kind becomes a `custom` event with the whole as its data."""
    try:
        event = event_from_bytes(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if event.seq < 1 and not is_notice(event):
        raise ValueError("it has no number")
    if isinstance(event, UnknownEvent):  # a log must not hold what its own version cannot read
        stamp: dict[str, Any] = {name: getattr(event, name) for name in Event.__struct_fields__}
        return Custom(**stamp, data=event.original)
    return event


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
