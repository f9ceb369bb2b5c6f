"""Port: a language model, and the chunks it streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from .messages import DataPart, FilePart, ImagePart, Message, Part, ReceiptPart, Role, TextPart
from .receipts import escape_frames
from .runs import Usage
from .tools import ToolDescriptor

CHARACTERS_PER_TOKEN = 4
"""A rule of thumb: counting exactly would need every model's own tokenizer."""


class ModelRequest(Struct, frozen=True, gc=False, kw_only=True):
    """One question to the model. It never changes after it is sent."""

    messages: tuple[Message, ...]
    """The conversation, the system message first where the agent has instructions."""
    tools: tuple[ToolDescriptor, ...] = ()
    settings: Mapping[str, Any] = {}
    output_schema: dict[str, Any] | None = None
    """The JSON Schema of the answer, where the agent has an output type; providers that can, enforce it."""
    transient: int = 0
    """The number of messages at the end that only this request has. A cache of the conversation ends before them."""

    def rendered(self) -> ModelRequest:
        """Return the request as a provider reads it: a receipt is a line below its text, and no text looks like one.

        A model sends this one. Stored messages stay as they were said."""
        said = tuple([rendered(message) for message in self.messages])
        same = all(one is other for one, other in zip(said, self.messages, strict=True))
        return self if same else replace(self, messages=said)

    def estimate_tokens(self) -> int:
        """Estimate the tokens that the request has at least: images, files and schemas do not count."""
        described = sum([len(tool.name) + len(tool.description) for tool in self.tools])
        return sum(map(estimate_tokens, self.messages)) + described // CHARACTERS_PER_TOKEN


def rendered(message: Message) -> Message:
    """Return a message as a model reads it: with the lines of its receipts, and no forged ones."""
    is_result = message.role is Role.TOOL
    if not is_result and not any(type(part) is ReceiptPart for part in message.parts):
        return message
    parts: list[Part] = []
    is_changed = False
    for part in message.parts:
        if type(part) is ReceiptPart:
            is_changed = True
            if parts and type(last := parts[-1]) is TextPart:
                parts[-1] = TextPart(f"{last.text}\n{part.line}")
            else:
                parts.append(TextPart(part.line))
        elif is_result and type(part) is TextPart and (text := escape_frames(part.text)) is not part.text:
            is_changed = True
            parts.append(TextPart(text))
        else:
            parts.append(part)
    return replace(message, parts=tuple(parts)) if is_changed else message


def estimate_tokens(message: Message) -> int:
    """Estimate the tokens of a message. Images and files do not count."""
    text = message.text
    size = len(text) if text.isascii() else len(text.encode(errors="replace"))
    calls = sum([len(call.name) + len(str(call.args)) for call in message.tool_calls])
    return (size + calls) // CHARACTERS_PER_TOKEN + 4


class TextChunk(Struct, frozen=True, gc=False):
    """A piece of the answer."""

    text: str


class ReasoningChunk(Struct, frozen=True, gc=False):
    """A piece of the model's reasoning."""

    text: str
    signature: str | None = None
    """The provider's signature, after the name of its wire; it ends this piece of reasoning."""


class PartChunk(Struct, frozen=True, gc=False):
    """A file, an image or data that the model produced; it comes before the text in the message."""

    part: FilePart | ImagePart | DataPart


class CallChunk(Struct, frozen=True, gc=False):
    """A piece of a tool call. Chunks of one `index` make one call; id and name come with the first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """JSON text, or a piece of it."""


class TurnEnd(Struct, frozen=True, gc=False):
    """The last chunk. A stream without one counts as stopped, with no usage."""

    stop_reason: str = "stop"
    """stop, tool_calls, length (the answer was cut at its limit) or refusal."""
    usage: Usage = Usage(requests=1)
    model: str = ""
    """The model that answered, where it is not the one that was asked."""
    cost_known: bool = False
    """True if the provider reported the cost in `usage`, so that 0 means free."""


class Retrying(Struct, frozen=True, gc=False, kw_only=True):
    """An attempt failed and another follows. With `restarts`, the chunks so far are void."""

    code: str
    message: str
    model: str = ""
    """The model that is asked next."""
    delay: float = 0.0
    restarts: bool = False


ModelChunk = TextChunk | ReasoningChunk | PartChunk | CallChunk | TurnEnd | Retrying


@runtime_checkable
class Model(Protocol):
    """Contract: `stream` yields chunks as they arrive, raises on failure, and stops work when it is closed."""

    @property
    def name(self) -> str:
        """The "provider:model" it answers as."""
        ...

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]: ...
