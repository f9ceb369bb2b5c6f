"""Messages, their parts and the tool calls they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from reprlib import repr as short_repr
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from .content import MAX_BYTES, to_json_value
from .errors import ConfigurationError
from .receipts import Receipt

R = TypeVar("R", bound=Struct)


class Role(StrEnum):
    """The speaker of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Visibility(StrEnum):
    """The readers of a message: everybody, or only the model."""

    ALL = "all"
    INTERNAL = "internal"


class TextPart(Struct, frozen=True, gc=False, tag="text", tag_field="type"):
    """Text."""

    text: str


class ReasoningPart(Struct, frozen=True, gc=False, tag="reasoning", tag_field="type"):
    """Reasoning of the model, with the provider's `signature` of it."""

    text: str
    signature: str | None = None


class ImagePart(Struct, frozen=True, kw_only=True, tag="image", tag_field="type"):
    """An image by address or as base64 data."""

    url: str | None = None
    data: str | None = None
    media_type: str = "image/png"


class FilePart(Struct, frozen=True, kw_only=True, tag="file", tag_field="type"):
    """A document by address or as base64 data."""

    url: str | None = None
    data: str | None = None
    media_type: str = "application/octet-stream"
    name: str | None = None


class DataPart(Struct, frozen=True, tag="data", tag_field="type"):
    """A JSON value."""

    data: Any


class ReceiptPart(Struct, frozen=True, gc=False, omit_defaults=True, tag="receipt", tag_field="type"):
    """The receipt of a sub-agent, behind its text. Only the runtime makes one; it is not in `Message.text`."""

    receipt: Receipt
    task_id: str = ""
    """The background task that it is of, in a message about several."""

    @property
    def line(self) -> str:
        """The line that the model reads."""
        return self.receipt.line(self.task_id)


InputPart = TextPart | ReasoningPart | ImagePart | FilePart | DataPart
"""The parts of messages that anybody may write."""
Part = InputPart | ReceiptPart


class ToolCall(Struct, frozen=True, gc=False):
    """One call the model asked for. `malformed` holds its argument text where that was no JSON object, or too deep or large."""

    id: str
    name: str
    args: dict[str, Any]
    malformed: str | None = None


class Message(Struct, frozen=True, gc=False, omit_defaults=True):
    """One message of a conversation."""

    role: Role
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    id: str | None = None
    visibility: Visibility = Visibility.ALL

    def __post_init__(self) -> None:
        parts: Any = self.parts
        if parts.__class__ is tuple and self.role.__class__ is Role and self.visibility.__class__ is Visibility:
            return  # as most are
        if type(parts) is str:
            raise ConfigurationError(f"parts is a tuple of parts, not text: write Message.{self.role}({parts!r:.80})")
        if type(self.role) is not Role:
            force_setattr(self, "role", Role(self.role))
        if type(self.visibility) is not Visibility:
            force_setattr(self, "visibility", Visibility(self.visibility))

    @property
    def text(self) -> str:
        """The text parts, joined."""
        parts = self.parts
        if len(parts) == 1 and type(parts[0]) is TextPart:
            return parts[0].text
        return "".join([part.text for part in parts if type(part) is TextPart])

    def __str__(self) -> str:
        calls = "".join(f" → {call.name}({call.id})" for call in self.tool_calls)
        return f"{self.role}: {self.text}{calls}"

    @classmethod
    def system(cls, content: str | Iterable[Part], **fields: Any) -> Message:
        return cls(role=Role.SYSTEM, parts=as_parts(content), **fields)

    @classmethod
    def user(cls, content: str | Iterable[Part], **fields: Any) -> Message:
        return cls(role=Role.USER, parts=as_parts(content), **fields)

    @classmethod
    def assistant(
        cls, content: str | Iterable[Part] = "", tool_calls: Iterable[ToolCall] = (), **fields: Any
    ) -> Message:
        return cls(role=Role.ASSISTANT, parts=as_parts(content), tool_calls=tuple(tool_calls), **fields)

    @classmethod
    def tool(cls, content: str | Iterable[Part], *, tool_call_id: str, **fields: Any) -> Message:
        return cls(role=Role.TOOL, parts=as_parts(content), tool_call_id=tool_call_id, **fields)


def as_parts(content: str | Iterable[Part]) -> tuple[Part, ...]:
    """Return text or parts as a tuple of parts; empty text is no part."""
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    given: Any = content
    if not isinstance(given, Iterable):
        raise ConfigurationError(f"a message is text or a list of parts, not {short_repr(given)}")
    return tuple(content)


def as_messages(content: str | Message | Iterable[Message]) -> tuple[Message, ...]:
    """Return the input of a caller as messages."""
    if isinstance(content, str):
        return (_checked(Message(role=Role.USER, parts=(TextPart(content),) if content else ())),)
    if isinstance(content, Message):
        return (_checked(content),)
    given: list[Any] = list(content) if isinstance(cast("Any", content), Sequence | Iterator) else [content]
    for item in given:
        if not isinstance(item, str | Message):
            raise ConfigurationError(
                f'input is text, a Message or a list of them, not {short_repr(item)}: write Message.user("…")'
            )
    if not given:
        raise ConfigurationError('the input is empty: give text, such as "Hello", or at least one message')
    return tuple([_checked(Message.user(item) if isinstance(item, str) else item) for item in given])


def _checked(message: Message) -> Message:
    """Return a message that can be stored: with clean text and with JSON values only. Raise ConfigurationError if it cannot."""
    parts: Any = message.parts
    if not message.tool_calls and message.name is None and message.id is None and message.tool_call_id is None:
        if len(parts) == 1 and type(parts[0]) is TextPart and _is_plain(parts[0].text):
            return message  # the common case
    if any(isinstance(part, ReceiptPart) for part in parts):
        raise ConfigurationError("the input has a receipt: only the runtime writes receipts, so leave the part out")
    try:
        return checked_record(message)
    except (TypeError, ValueError) as exc:
        raise ConfigurationError(f"the input cannot be used: {exc}") from None


def _is_plain(text: Any) -> bool:
    return type(text) is str and text.isascii() and len(text) <= MAX_BYTES


def checked_record(record: R) -> R:
    """Return a record with clean text and JSON values only; TypeError or ValueError says what does not fit."""
    return msgspec.convert(to_json_value(record), type(record))
