"""The resources of the HTTP interface as JSON, and the bodies that it takes. Pure; server, client and CLI share them."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from math import floor
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from ..core.concurrency import GRACE
from ..core.content import record_json
from ..core.decisions import Decision
from ..core.messages import InputPart, Message, Role, TextPart, Visibility
from ..core.runs import Limits, RunResult
from ..core.stores import TITLE, Place, RunRecord, ThreadSummary
from .shapes import MessageShape

ID = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^(?!\.{1,2}$)[^\x00-\x20\x7f/]+(?!\n)$")]
"""An id that a client chooses. `$` alone would allow a newline at the end."""
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class InputMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of the input: `content` is text or a list of parts; a stored message, with `parts`, fits too."""

    role: Role = Role.USER
    content: str | list[InputPart] | None = None
    parts: list[InputPart] | None = None
    text: str | None = None
    id: str | None = None
    name: str | None = None
    visibility: Visibility = Visibility.ALL

    def as_message(self) -> Message:
        given = next((one for one in (self.content, self.parts, self.text) if one is not None), "")
        if self.role is Role.TOOL:
            raise ValueError("a message of the input cannot have the role 'tool'")
        parts = (TextPart(given),) if isinstance(given, str) and given else tuple(given)
        return Message(
            role=self.role,
            parts=parts,  # pyright: ignore[reportArgumentType]
            id=self.id,
            name=self.name,
            visibility=self.visibility,
        )


RunInput = str | list[InputMessage]


class StartRun(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST runs`: start a run of an agent."""

    agent: Name
    input: RunInput
    thread_id: ID | None = None
    context: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    """Values of state keys to begin with, by the names of the keys."""
    limits: Limits | None = None
    """They narrow those of the agent. What the agent leaves unset is depth 3, 256 children and 32 parallel calls."""
    when_busy: Literal["reject", "enqueue", "interrupt"] = "reject"
    queue: Name | None = None
    """On a server with an engine: the queue whose workers do the work."""
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] = 0
    """With an engine: runs of a higher priority come first."""
    delay: Annotated[float, Meta(ge=0)] = 0.0
    """With an engine: seconds until the run may start."""


class DecisionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """One decision. The same `id` twice is one decision. A field that the action does not use is refused."""

    action: Literal["resume", "cancel", "answer", "approve", "reject"]
    payload: Any = None
    """Of `approve` and `reject` an object; `cancel` has none."""
    reason: str | None = None
    """Of `cancel` and `reject`: the model reads it."""
    id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None

    def __post_init__(self) -> None:
        if self.reason is not None and self.action not in ("cancel", "reject"):
            raise ValueError(f"the action {self.action!r} has no reason: leave it out")
        given: Any = self.payload
        if given is None:
            return
        if self.action == "cancel":
            raise ValueError("the action 'cancel' has no payload: give a reason, or leave it out")
        if self.action in ("approve", "reject") and not isinstance(given, dict):
            raise ValueError(f"the payload of the action {self.action!r} is an object, or is left out")
        if self.reason is not None and "message" in given:
            raise ValueError("the action 'reject' has a reason or a message in its payload, not both")

    def as_decision(self) -> Decision:
        if self.action == "cancel":
            return Decision.cancel(self.reason, id=self.id)
        if self.action == "approve":
            made = Decision.approve(id=self.id)
            return replace(made, payload={**(self.payload or {}), **made.payload})
        if self.action == "reject":
            made = Decision.reject(self.reason, id=self.id)
            return replace(made, payload={**(self.payload or {}), **made.payload})
        make = Decision.resume if self.action == "resume" else Decision.answer
        return make(self.payload, id=self.id)


class Decisions(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST runs/{id}/decisions`: keys are call ids, ticket ids, or paths of call ids joined by `/`."""

    decisions: dict[str, DecisionBody]

    def as_decisions(self) -> dict[str, Decision]:
        return {name: one.as_decision() for name, one in self.decisions.items()}


class CancelRun(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST runs/{id}/cancel`: with `ns`, only the run at that namespace below it is stopped; background tasks only with
    `tasks`. `grace` is in seconds."""

    ns: tuple[str, ...] = ()
    tasks: bool = False
    reason: str = "cancelled"
    grace: Annotated[float, Meta(ge=0, le=300)] = GRACE


class SendMessages(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST runs/{id}/messages`: messages for a run at work; with `ns`, for the run at that namespace below it."""

    input: RunInput
    ns: tuple[str, ...] = ()


class CancelTask(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST tasks/{id}/cancel`: `run_id` is its root run; without it, the task is looked for."""

    run_id: ID | None = None


class ForkRun(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST runs/{id}/fork`: continue a run as it was after event number `after`, or at a message, on a new thread."""

    after: Count | None = None
    message_id: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    """A message of the run: the fork continues after an answer of the model, and replaces a message of the user."""
    input: RunInput | None = None
    decisions: dict[str, DecisionBody] | None = None

    def __post_init__(self) -> None:
        if (self.after is None) == (self.message_id is None):
            raise ValueError("give either after or message_id")


class CreateThread(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST threads`: make a conversation; with messages, it begins with them."""

    thread_id: ID | None = None
    messages: list[InputMessage] = []


class PatchThread(Struct, frozen=True, forbid_unknown_fields=True):
    """`PATCH threads/{id}`: give a conversation another title."""

    title: Annotated[str, Meta(min_length=1, max_length=TITLE)]


def as_input(given: RunInput) -> str | list[Message]:
    return given if isinstance(given, str) else [message.as_message() for message in given]


_EPOCH = datetime.fromtimestamp(0, UTC)


def iso(at: float | datetime | None) -> str | None:
    """Return a time as JSON has it: ISO 8601, UTC. `clients/ts` rounds to microseconds in the same way."""
    if at is None:
        return None
    when = at if isinstance(at, datetime) else _EPOCH + timedelta(microseconds=floor(at * 1e6 + 0.5))
    return when.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def run_json(record: RunRecord, ended_at: float | None = None, *, orphaned: bool = False) -> dict[str, Any]:
    """Return a run as lists show it; `orphaned`: no process works on it."""
    result = record.result
    return {
        **fields_of(record.identity, "run_id", "agent", "thread_id", "user_id", "parent_run_id"),
        "log_id": record.log_id or record.identity.run_id,
        "status": record.status,
        "orphaned": orphaned,
        "lost": record.lost,
        "started_at": iso(record.started_at),
        "ended_at": iso(ended_at),
        **fields_of(result, "steps", "response", "error", "termination"),
        "usage": None if result is None else msgspec.structs.asdict(result.usage),
        "waits_for": {} if result is None else msgspec.to_builtins(result.suspended),
    }


def fields_of(thing: object, *names: str) -> dict[str, Any]:
    """Return attributes by their names; None for those that are not there."""
    return {name: getattr(thing, name, None) for name in names}


def result_json(result: RunResult) -> dict[str, Any]:
    """Return the fields of a result, with its messages as `message_json`."""
    shown: dict[str, Any] = record_json(result)
    return {**shown, "messages": [message_json(one) for one in result.messages if one.visibility is Visibility.ALL]}


def message_json(message: Message) -> dict[str, Any]:
    """Return a message with all its fields, and its text."""
    return fields_of(message, *MessageShape.__annotations__)


def thread_json(thread: ThreadSummary) -> dict[str, Any]:
    """Return a thread as lists show it."""
    shown = fields_of(thread, "thread_id", "user_id", "title", "status", "questions", "children")
    return {**shown, "used_at": iso(thread.used_at), "usage": msgspec.structs.asdict(thread.usage)}


def thread_from_json(shown: Mapping[str, Any]) -> ThreadSummary:
    """Return a thread that `thread_json` has made."""
    used_at = datetime.fromisoformat(shown["used_at"]).timestamp()
    return msgspec.convert({**shown, "used_at": used_at}, ThreadSummary)


def page_json(items: list[Any], next_cursor: str | None) -> dict[str, Any]:
    return {"items": items, "next_cursor": next_cursor}


def encode_cursor(place: Place) -> str:
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def decode_cursor(cursor: str) -> Place:
    """Return the place that a cursor names. Raise ValueError if it is none of ours."""
    try:
        at, name = msgspec.json.decode(
            base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)),
            type=tuple[Annotated[float, Meta(ge=0)], Annotated[str, Meta(pattern=r"^[^\x00]*$")]],
        )
    except (ValueError, TypeError) as exc:
        raise ValueError(
            f"cursor {cursor[:40]!r} is not one of ours: leave it out to begin with the first page"
        ) from exc
    return at, name


def decisions_json(given: Mapping[str, Decision]) -> dict[str, Any]:
    """Return decisions as `Decisions` reads them: without the user, whom the server knows."""
    return {
        name: {k: v for k, v in msgspec.structs.asdict(one).items() if v is not None and k != "by"}
        for name, one in given.items()
    }
