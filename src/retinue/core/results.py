"""Results of tool calls: their life cycle, the result, tickets for humans, and state to commit with them."""

from __future__ import annotations

import re
from binascii import a2b_base64
from collections.abc import Mapping
from enum import StrEnum
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from .content import to_json_text, to_json_value
from .errors import ConfigurationError, InternalError
from .messages import FilePart, ImagePart, InputPart, Part, ReceiptPart, TextPart
from .schema import check_schema
from .state import StateCommand, StateKey, as_key, key_items


class ToolCallStatus(StrEnum):
    """The status of a tool call."""

    NEW = "new"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    CANCELLED = "cancelled"


_CALL_ENDED = frozenset({ToolCallStatus.SUCCEEDED, ToolCallStatus.FAILED, ToolCallStatus.CANCELLED})
CALL_MOVES: Mapping[ToolCallStatus, frozenset[ToolCallStatus]] = {
    ToolCallStatus.NEW: frozenset({ToolCallStatus.RUNNING}),
    ToolCallStatus.RUNNING: _CALL_ENDED | {ToolCallStatus.SUSPENDED},
    ToolCallStatus.SUSPENDED: frozenset({ToolCallStatus.RESUMING, ToolCallStatus.CANCELLED}),
    ToolCallStatus.RESUMING: frozenset({ToolCallStatus.RUNNING, ToolCallStatus.CANCELLED}),
    **dict.fromkeys(_CALL_ENDED, frozenset[ToolCallStatus]()),
}


class ToolStatus(StrEnum):
    """The status of a result."""

    SUCCESS = "success"
    PENDING = "pending"
    ERROR = "error"


class ResumeMode(StrEnum):
    """The effect of a decision on a suspended call."""

    REPLAY = "replay"
    """Run it again with its own arguments."""
    USE_DECISION = "use_decision"
    """Take the decision as the result; the tool does not run."""
    PASS_DECISION = "pass_decision"
    """Run it with the decision as its arguments."""


class SuspendTicket(Struct, frozen=True):
    """A question to a human, which a suspended call waits for."""

    id: str
    action: str
    message: str = ""
    parameters: Any = None
    response_schema: dict[str, Any] | None = None
    resume_mode: ResumeMode = ResumeMode.REPLAY
    editable: bool = False
    """True if `args` in the payload of the decision replaces the arguments of the call."""
    path: tuple[str, ...] = ()
    """The call ids from the root run down to the call that waits, with `~n` after one for its n-th child."""

    if TYPE_CHECKING:  # the mode may be written as a word

        def __init__(
            self,
            id: str,
            action: str,
            message: str = "",
            parameters: Any = None,
            response_schema: dict[str, Any] | None = None,
            resume_mode: ResumeMode | Literal["replay", "use_decision", "pass_decision"] = ResumeMode.REPLAY,
            editable: bool = False,
            path: tuple[str, ...] = (),
        ) -> None: ...

    @property
    def is_approval(self) -> bool:
        """True if it asks for permission: `Decision.approve` and `Decision.reject` answer it."""
        schema = self.response_schema or {}
        return "approved" in (*schema.get("properties", ()), *schema.get("required", ()))

    @property
    def takes_arguments(self) -> bool:
        """True if a decision may give the call other arguments."""
        return self.editable or self.resume_mode is ResumeMode.PASS_DECISION

    def with_arguments(self, parameters: dict[str, Any]) -> SuspendTicket:
        """The same where an answer may give the arguments of the call: those must fit the schema of its tool."""
        schema = self.response_schema
        if self.resume_mode is ResumeMode.PASS_DECISION and schema is None:
            return replace(self, response_schema=parameters)
        if not self.editable or schema is None:
            return self
        # With an id of its own, references within it stay valid.
        properties = {**schema.get("properties", {}), "args": {"$id": "retinue:args", **parameters}}
        return replace(self, response_schema={**schema, "properties": properties})

    def __post_init__(self) -> None:
        force_setattr(self, "resume_mode", ResumeMode(self.resume_mode))
        for name in ("id", "action", "message"):
            value: Any = getattr(self, name)
            if not isinstance(value, str):
                advice = "write SuspendTicket(id, action, message, parameters)"
                raise ConfigurationError(f"SuspendTicket: {name} is text, not {short_repr(value)}: {advice}")
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
        name, message, suspension = cast("tuple[Any, Any, Any]", (self.tool_name, self.message, self.suspension))
        if not isinstance(name, str):
            raise TypeError(f"ToolResult: tool_name is text, not {_kind(name)}: write ToolResult.success(data)")
        if message is not None and not isinstance(message, str):
            raise TypeError(f"ToolResult: the message is text, not {_kind(message)}: write str(…)")
        if suspension is not None and not isinstance(suspension, SuspendTicket):
            raise TypeError(f"ToolResult: the suspension is a SuspendTicket, not {_kind(suspension)}")

    @classmethod
    def success(cls, data: Any = None, message: str | None = None) -> ToolResult:
        """It worked. The model reads `message` where given, else the data."""
        given: Any = message
        if given is not None and not isinstance(given, str):
            advice = f"write ToolResult.success({short_repr(given)}). {_NAMELESS}"
            raise TypeError(f"ToolResult.success(data, message): the message is text, not {_kind(given)}: {advice}")
        return cls(data=data, message=message)

    @classmethod
    def error(cls, message: str, code: str | None = None) -> ToolResult:
        """It failed in a way the model should read and react to; state returned with it is still committed.

        A code is for programs: lower-case letters, digits and `_ . : / -`, a letter first."""
        _check_message(message, "error")
        if code is None:
            return cls(status=ToolStatus.ERROR, message=message)
        given: Any = code
        if not isinstance(given, str) or not _CODE.fullmatch(given):
            rule = "the code is a word of lower-case letters, digits and _ . : / -"
            advice = f"write ToolResult.error({short_repr(given)}, code='not_found'). {_NAMELESS}"
            raise ConfigurationError(f"ToolResult.error(message, code): {rule}, not {short_repr(given)}: {advice}")
        return error_with_code(message, code)

    @classmethod
    def suspended(cls, message: str, ticket: SuspendTicket | None = None) -> ToolResult:
        """It waits for a human."""
        _check_message(message, "suspended")
        given: Any = ticket
        if given is not None and not isinstance(given, SuspendTicket):
            advice = f"write ToolResult.suspended({short_repr(given)}). {_NAMELESS}"
            raise TypeError(
                f"ToolResult.suspended(message, ticket): the ticket is a SuspendTicket, not {_kind(given)}: {advice}"
            )
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
        """The text that the model reads: the message, else a string as it is, else compact JSON of the data."""
        if self.message is not None:
            return self.message
        data = self.data
        return data if type(data) is str else to_json_text(data)


def error_with_code(message: str, code: str) -> ToolResult:
    """Return an error with a code that a name may be part of, such as that of a limit."""
    detail = {"error": {"code": code, "message": message}}
    return ToolResult(status=ToolStatus.ERROR, data=detail, message=f"[{code}] {message}")


_CODE = re.compile(r"[a-z][a-z0-9_.:/-]*")
_NAMELESS = "A result does not name its tool"


def _check_message(given: Any, method: str) -> None:
    if not isinstance(given, str):
        raise TypeError(f"ToolResult.{method}: the message is text, not {_kind(given)}: write str(…)")


def _kind(given: Any) -> str:
    return type(given).__name__


class ToolOutput:
    """A result together with the state changes to commit with it."""

    __slots__ = ("command", "receipts", "result")

    def __init__(self, data_or_result: Any = None, update: Mapping[StateKey[Any, Any], Any] | None = None) -> None:
        given, changes = cast("tuple[Any, Any]", (data_or_result, update))
        if isinstance(given, ToolOutput | StateCommand):
            advice = "write ToolOutput.with_command(result, command)"
            raise TypeError(f"ToolOutput takes data or a ToolResult, not {_kind(given)}: {advice}")
        if isinstance(changes, StateCommand):
            raise TypeError("ToolOutput: update is {key: value}, not StateCommand: write ToolOutput.with_command(…)")
        self.result: ToolResult = given if isinstance(given, ToolResult) else ToolResult(data=given)
        self.command = StateCommand()
        self.receipts: tuple[ReceiptPart, ...] = ()
        """The receipts of background tasks that the result is about."""
        if update:
            self.command.patch.updates.extend([(as_key(key), value) for key, value in key_items(update)])

    @classmethod
    def with_command(cls, result: ToolResult, command: StateCommand) -> ToolOutput:
        """The long form, for commands that do more than update keys."""
        given: Any = command
        if not isinstance(given, StateCommand):
            raise TypeError(
                f"with_command takes a StateCommand, not {type(given).__name__}: StateCommand().update(key, value)"
            )
        output = cls(result)
        output.command = command
        return output

    def __repr__(self) -> str:
        return f"ToolOutput({self.result!r}, {self.command!r})"


def media_parts(data: Any) -> tuple[Part, ...]:
    """Return the parts of a result that is an image or a file, or a list with one of them; () for any other result.

    Raise InternalError for a part without an address or valid base64 data: providers refuse it, and with it the
    conversation. Also for a part inside a dict or an inner list: the model would read its data as text.
    """
    items = cast("list[Any]", data) if isinstance(data, list | tuple) else [data]
    for item in items:
        if isinstance(item, dict | list | tuple) and (hidden := _find_media(item)) is not None:
            raise InternalError(
                f"an {hidden} inside a dict or an inner list cannot be shown to the model: return [value, {hidden}(…)]"
            )
    media = [item for item in items if isinstance(item, ImagePart | FilePart)]
    for part in media:
        if part.url is None and not part.data:
            raise InternalError(f"the {type(part).__name__} has neither url nor data")
        try:
            a2b_base64(part.data or "", strict_mode=True)
        except ValueError as exc:
            raise InternalError(f"the data of the {type(part).__name__} is not base64: {exc}") from None
    return tuple([_part(item) for item in items]) if media else ()


def _find_media(value: Any) -> str | None:
    """Return the name of the first image or file somewhere in a value."""
    if isinstance(value, ImagePart | FilePart):
        return type(value).__name__
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if not isinstance(value, list | tuple):
        return None
    return next((found for item in cast("list[Any]", value) if (found := _find_media(item)) is not None), None)


def _part(item: Any) -> Part:
    if isinstance(item, InputPart):
        return item
    return TextPart(item if isinstance(item, str) else to_json_text(item))


def media_json(part: Part) -> Any:
    """Return a part as `ToolResult.data` has it: text as it is, images and files without their data."""
    if not isinstance(part, ImagePart | FilePart):
        return part.text if isinstance(part, TextPart) else to_json_value(part)
    return {name: value for name, value in to_json_value(part).items() if name != "data" and value is not None}
