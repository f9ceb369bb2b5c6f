"""Outcomes: how a call went, before its state is committed."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.codec import to_json_value
from ..core.errors import InternalError, ToolCancelled, ToolError
from ..core.lifecycle import ToolCallStatus
from ..core.messages import ToolCall
from ..core.plugins import Block
from ..core.results import ToolOutput, ToolResult, ToolStatus
from ..core.state import StateCommand

_STATUS = {
    ToolStatus.SUCCESS: ToolCallStatus.SUCCEEDED,
    ToolStatus.ERROR: ToolCallStatus.FAILED,
    ToolStatus.PENDING: ToolCallStatus.SUSPENDED,
}
_PLAIN = ToolResult()
"""What is said of a result by a tool that returns just a value."""


class CallOutcome(Struct, frozen=True, gc=False):
    """The status a call will have, its result, and the state it asks to change."""

    status: ToolCallStatus
    result: ToolResult
    command: StateCommand | None = None

    def with_command(self, command: StateCommand) -> CallOutcome:
        return replace(self, command=command)

    def with_command_before(self, command: StateCommand) -> CallOutcome:
        """The same, with what hooks asked for earlier in front."""
        if not command:
            return self
        return replace(self, command=command.extend(self.command) if self.command is not None else command)


def outcome_of(call: ToolCall, returned: Any) -> CallOutcome:
    """What a tool returned, as an outcome; raises InternalError for a value that has no JSON form."""
    command = None
    if isinstance(returned, ToolOutput):
        command, returned = returned.command, returned.result
    result = returned if isinstance(returned, ToolResult) else _PLAIN
    data = returned if result is _PLAIN else result.data
    if type(data) is not str:
        try:
            data = to_json_value(data)
        except (TypeError, ValueError) as exc:
            raise InternalError(f"tool {call.name!r} returned a value that cannot be written as JSON: {exc}") from exc
    named = ToolResult(call.name, result.status, data, result.message, result.suspension, result.metadata)
    return CallOutcome(_STATUS[result.status], named, command)


def failed(call: ToolCall, error: ToolError | Block) -> CallOutcome:
    """The outcome of a call that ended by an error: the model reads kind and message, its state is dropped."""
    kind, message = ("blocked", error.reason) if isinstance(error, Block) else (error.kind, error.message)
    data = {"error": {"kind": kind, "message": message}}
    return CallOutcome(ToolCallStatus.FAILED, ToolResult(call.name, ToolStatus.ERROR, data, f"{kind}: {message}"))


def cancelled(call: ToolCall, reason: str) -> CallOutcome:
    """The outcome of a call that was stopped, or never came to its turn."""
    error = ToolCancelled(reason)
    data = {"error": {"kind": error.kind, "message": reason}}
    return CallOutcome(ToolCallStatus.CANCELLED, ToolResult(call.name, ToolStatus.ERROR, data, str(error)))


def interrupted(call: ToolCall) -> CallOutcome:
    """The outcome of a call whose process ended while it ran, and which may not be run twice."""
    message = (
        "interrupted, outcome unknown: the process ended while this call ran. It may have done its work, a part of it "
        "or nothing: find out before you make it again"
    )
    data = {"error": {"kind": "interrupted", "message": message}}
    return CallOutcome(ToolCallStatus.FAILED, ToolResult(call.name, ToolStatus.ERROR, data, message))


def cut(text: str, limit: int, kept: str = "") -> str:
    """Text within the limit: the beginning and the end, with a line between that says what is missing, and where it is."""
    head = limit * 3 // 4
    tail = limit - head
    missing = len(text) - head - tail
    note = f"{missing:,} of {len(text):,} characters left out here{'; ' + kept if kept else ''}"
    return f"{text[:head]}\n[… {note} …]\n{text[len(text) - tail :]}"
