"""The Anthropic messages wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct

from ..core.errors import ContextOverflow, ModelRequestInvalid, ModelResponseInvalid
from ..core.messages import FilePart, ImagePart, Message, ReasoningPart, Role
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage
from ..core.tools import ToolDescriptor
from .refusals import error_in_stream
from .wire import Block, blocks_of, chosen_tool, rename_settings

VERSION = "2026-10-21"

MAX_TOKENS = 16_000
"""The default limit on the answer: this API requires one."""

SIGNED, REDACTED = "anthropic:", "anthropic-redacted:"
"""The prefixes of our signatures, so that no other wire uses them."""

_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "refusal": "refusal",
}
"""Any other reason counts as a stop, except those that `end` refuses."""
_CHOICES = {"auto": "auto", "required": "any", "any": "any", "none": "none"}
_GONE = ("temperature", "top_p", "top_k", "reasoning_effort")
"""Settings that this version of the API refuses. They are hints, which an agent may have for other providers."""
_CACHED: Block = {"type": "ephemeral"}
_MEDIA = ("image/jpeg", "image/png", "image/gif", "image/webp", "application/pdf")


class AnthropicWire:
    """Builds requests and reads answers."""

    path = "/v1/messages"

    def encode(self, request: ModelRequest, model: str) -> dict[str, Any]:
        settings = rename_settings(request.settings, {"stop": "stop_sequences"})
        caches = settings.pop("cache", True)
        system = [_text(message.text) for message in request.messages if message.role is Role.SYSTEM and message.text]
        lasting = len(request.messages) - request.transient
        messages = _add_messages([], request.messages[:lasting])
        tools = [_tool(tool) for tool in request.tools]
        if caches:
            _mark_for_cache(system or tools, messages)
        _add_messages(messages, request.messages[lasting:])
        body: dict[str, Any] = {"model": model, "max_tokens": MAX_TOKENS, "messages": messages, "stream": True}
        if system:
            body["system"] = system
        if tools:
            body["tools"] = tools
        choice, parallel = settings.pop("tool_choice", None), settings.pop("parallel_tool_calls", None)
        if tools and (choice is not None or parallel is False):
            body["tool_choice"] = _tool_choice(choice, parallel)
        if isinstance(stops := settings.get("stop_sequences"), str):
            settings["stop_sequences"] = [stops]
        return {**body, **{name: value for name, value in settings.items() if name not in _GONE}}

    def decoder(self) -> AnthropicDecoder:
        return AnthropicDecoder()


def _mark_for_cache(first: list[Block], messages: list[Block]) -> None:
    """Mark the end of the fixed prefix and of the conversation that stays: the next request starts with the same blocks."""
    if first:
        first[-1]["cache_control"] = _CACHED
    for message in reversed(messages):
        if message["role"] == "user" and message["content"]:
            message["content"][-1]["cache_control"] = _CACHED
            return


def _tool(tool: ToolDescriptor) -> Block:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.parameters}


def _tool_choice(choice: Any, parallel: Any) -> Block:
    if (name := chosen_tool(choice)) is not None:
        made: Block = {"type": "tool", "name": name}
    elif isinstance(choice, dict):
        made = dict(cast("Block", choice))
    else:
        made = {"type": _CHOICES.get(str(choice or "auto"), "auto")}
    if parallel is False and made["type"] != "none":
        made["disable_parallel_tool_use"] = True
    return made


def _add_messages(made: list[Block], messages: Sequence[Message]) -> list[Block]:
    """Add messages as alternating turns: neighbours of one role are merged, as the results of a step must be in one turn."""
    for message in messages:
        if message.role is Role.SYSTEM:
            continue
        role = "assistant" if message.role is Role.ASSISTANT else "user"
        content = _assistant(message) if role == "assistant" else _user(message)
        if not content:
            continue
        if made and made[-1]["role"] == role:
            made[-1]["content"] += content
        else:
            made.append({"role": role, "content": content})
    return made


def _user(message: Message) -> list[Block]:
    content = blocks_of(message, _text, _file)
    if message.role is not Role.TOOL:
        return content
    return [{"type": "tool_result", "tool_use_id": message.tool_call_id, "content": content}]


def _assistant(message: Message) -> list[Block]:
    content: list[Block] = []
    for part in message.parts:
        if isinstance(part, ReasoningPart) and part.signature is not None:
            if part.signature.startswith(SIGNED):
                signature = part.signature.removeprefix(SIGNED)
                content.append({"type": "thinking", "thinking": part.text, "signature": signature})
            elif part.signature.startswith(REDACTED):
                content.append({"type": "redacted_thinking", "data": part.signature.removeprefix(REDACTED)})
    content += blocks_of(message, _text, _file)
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.args} for call in message.tool_calls
    ]
    return content


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def _file(part: ImagePart | FilePart) -> Block:
    if part.url is not None:
        source: Block = {"type": "url", "url": part.url}
    elif part.data is None:
        raise ModelRequestInvalid("an image or file has neither url nor data")
    elif part.media_type not in _MEDIA and not (isinstance(part, FilePart) and part.media_type.startswith("text/")):
        raise ModelRequestInvalid(f"Anthropic reads no {part.media_type}; it reads text/* and {', '.join(_MEDIA)}")
    elif isinstance(part, FilePart) and part.media_type.startswith("text/"):
        source = {"type": "text", "media_type": "text/plain", "data": _decoded(part.data)}
    else:
        source = {"type": "base64", "media_type": part.media_type, "data": part.data}
    if isinstance(part, ImagePart):
        return {"type": "image", "source": source}
    return {"type": "document", "source": source, **({"title": part.name} if part.name else {})}


def _decoded(data: str) -> str:
    from base64 import b64decode

    try:
        return b64decode(data, validate=True).decode()
    except ValueError:
        raise ModelRequestInvalid("the data of a text file is not UTF-8 in base64") from None


class _Delta(Struct, gc=False):
    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    signature: str = ""
    stop_reason: str | None = None


class _Start(Struct, gc=False):
    type: str = ""
    id: str | None = None
    name: str | None = None
    text: str = ""
    data: str = ""
    input: Any = None


class _Details(Struct, gc=False):
    thinking_tokens: int | None = None


class _Usage(Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens_details: _Details | None = None


class _Message(Struct, gc=False):
    usage: _Usage | None = None


class _Event(Struct, gc=False):
    type: str
    index: int = 0
    delta: _Delta | None = None
    content_block: _Start | None = None
    message: _Message | None = None
    usage: _Usage | None = None
    error: Any = None


_read = msgspec.json.Decoder(_Event).decode


class AnthropicDecoder:
    """Reads the events of one message."""

    def __init__(self) -> None:
        self.done = False
        self._stop: str | None = None
        self._usage: dict[str, int] = {}

    def decode(self, data: bytes) -> Sequence[ModelChunk]:
        event = _read(data)
        match event.type:
            case "content_block_delta":
                return self._delta(event.index, event.delta or _Delta())
            case "content_block_start":
                return self._start(event.index, event.content_block or _Start())
            case "message_start":
                self._count(event.message.usage if event.message else None)
            case "message_delta":
                self._count(event.usage)
                self._stop = (event.delta and event.delta.stop_reason) or self._stop
            case "message_stop":
                self.done = True
            case "error":
                raise error_in_stream(event.error)
            case _:
                pass
        return ()

    def end(self) -> TurnEnd | None:
        if self._stop is None:
            return None
        if self._stop == "model_context_window_exceeded":
            raise ContextOverflow("the answer filled what is left of the model's window")
        if self._stop == "pause_turn":
            raise ModelResponseInvalid(
                "the model paused within its turn, as it does for tools that run at the provider: "
                "these are not supported, leave them out of the agent's settings"
            )
        used = self._usage
        cached, written = used.get("cache_read_input_tokens", 0), used.get("cache_creation_input_tokens", 0)
        usage = Usage(
            requests=1,
            input_tokens=used.get("input_tokens", 0) + cached + written,
            output_tokens=used.get("output_tokens", 0),
            cached_tokens=cached,
            cache_write_tokens=written,
            reasoning_tokens=used.get("thinking_tokens", 0),
        )
        return TurnEnd(_STOPS.get(self._stop, "stop"), usage)

    def _delta(self, index: int, delta: _Delta) -> Sequence[ModelChunk]:
        match delta.type:
            case "text_delta":
                return (TextChunk(delta.text),)
            case "input_json_delta":
                return (CallChunk(index, None, None, delta.partial_json),) if delta.partial_json else ()
            case "thinking_delta":
                return (ReasoningChunk(delta.thinking),)
            case "signature_delta":
                return (ReasoningChunk("", SIGNED + delta.signature),)
            case _:
                return ()

    def _start(self, index: int, block: _Start) -> Sequence[ModelChunk]:
        match block.type:
            case "tool_use":
                given = msgspec.json.encode(block.input).decode() if block.input else ""
                return (CallChunk(index, block.id, block.name, given),)
            case "text" if block.text:
                return (TextChunk(block.text),)
            case "redacted_thinking":
                return (ReasoningChunk("", REDACTED + block.data),)
            case _:
                return ()

    def _count(self, usage: _Usage | None) -> None:
        """Update the counts; each event has those of the whole message so far."""
        if usage is None:
            return
        for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            if (count := getattr(usage, name)) is not None:
                self._usage[name] = count
        if usage.output_tokens_details is not None:
            self._usage["thinking_tokens"] = usage.output_tokens_details.thinking_tokens or 0
