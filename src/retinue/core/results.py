"""What a tool call gives back: results, tickets for humans, and state to commit with them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from .codec import to_json_text, to_json_value
from .schema import check_schema
from .state import StateCommand, StateKey


class ToolStatus(StrEnum):
    """What a tool says of its result."""

    SUCCESS = "success"
    PENDING = "pending"
    ERROR = "error"


class ResumeMode(StrEnum):
    """What a decision does to a suspended call."""

    REPLAY = "replay"
    """Run it again with its own arguments."""
    USE_DECISION = "use_decision"
    """Take the decision as the result; the tool does not run."""
    PASS_DECISION = "pass_decision"
    """Run it with the decision as its arguments."""


class SuspendTicket(Struct, frozen=True):
    """What a human is asked before a call can go on."""

    id: str
    action: str
    message: str = ""
    parameters: Any = None
    response_schema: dict[str, Any] | None = None
    resume_mode: ResumeMode = ResumeMode.REPLAY
    path: tuple[str, ...] = ()
    """The call ids from the root run down to the call that waits, with `~n` after one for its n-th child."""

    def __post_init__(self) -> None:
        force_setattr(self, "resume_mode", ResumeMode(self.resume_mode))
        if self.response_schema is not None:
            check_schema(self.response_schema, f"ticket {self.id!r}: its response_schema")


class ToolResult(Struct, frozen=True, gc=False, omit_defaults=True):
    """The outcome of a call as the tool tells it. `tool_name` is filled in by the runtime."""

    tool_name: str = ""
    status: ToolStatus = ToolStatus.SUCCESS
    data: Any = None
    message: str | None = None
    suspension: SuspendTicket | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if type(self.status) is not ToolStatus:
            force_setattr(self, "status", ToolStatus(self.status))

    @classmethod
    def success(cls, data: Any = None, message: str | None = None) -> ToolResult:
        """It worked. The model reads `message` where given, else the data."""
        return cls(data=data, message=message)

    @classmethod
    def error(cls, message: str, code: str | None = None) -> ToolResult:
        """It failed in a way the model should read and react to; state returned with it is still committed."""
        if code is None:
            return cls(status=ToolStatus.ERROR, message=message)
        detail = {"error": {"code": code, "message": message}}
        return cls(status=ToolStatus.ERROR, data=detail, message=f"[{code}] {message}")

    @classmethod
    def suspended(cls, message: str, ticket: SuspendTicket | None = None) -> ToolResult:
        """It waits for a human."""
        return cls(status=ToolStatus.PENDING, message=message, suspension=ticket)

    def with_ticket(self, ticket: SuspendTicket) -> ToolResult:
        """The same, waiting for this."""
        return replace(self, suspension=ticket)

    def is_success(self) -> bool:
        return self.status is ToolStatus.SUCCESS

    def is_pending(self) -> bool:
        return self.status is ToolStatus.PENDING

    def is_error(self) -> bool:
        return self.status is ToolStatus.ERROR

    def to_json(self) -> dict[str, Any]:
        """Every field as plain JSON values."""
        return {
            "tool_name": self.tool_name,
            "status": self.status.value,
            "data": to_json_value(self.data),
            "message": self.message,
            "suspension": msgspec.to_builtins(self.suspension),
            "metadata": to_json_value(self.metadata),
        }

    @property
    def text(self) -> str:
        """What the model reads: the message, else a string as it is, else compact JSON of the data."""
        if self.message is not None:
            return self.message
        data = self.data
        return data if type(data) is str else to_json_text(data)


class ToolOutput:
    """A result together with the state changes to commit with it."""

    __slots__ = ("command", "result")

    def __init__(self, data_or_result: Any = None, update: Mapping[StateKey[Any, Any], Any] | None = None) -> None:
        given: Any = data_or_result
        self.result: ToolResult = given if isinstance(given, ToolResult) else ToolResult(data=given)
        self.command = StateCommand()
        if update:
            self.command.patch.updates.extend(update.items())

    @classmethod
    def with_command(cls, result: ToolResult, command: StateCommand) -> ToolOutput:
        """The long form, for commands that do more than update keys."""
        output = cls(result)
        output.command = command
        return output

    def __repr__(self) -> str:
        return f"ToolOutput({self.result!r}, {self.command!r})"
