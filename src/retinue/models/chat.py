"""The OpenAI chat-completions wire, which most servers speak: Ollama, vLLM, llama.cpp, OpenRouter and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.errors import ModelRequestInvalid, ModelUnavailable
from ..core.messages import FilePart, ImagePart, Message, Role, TextPart
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage
from ..core.tools import ToolDescriptor
from .refusals import error_in_stream
from .wire import (
    Block,
    Counts,
    arguments_of,
    blocks_of,
    chosen_tool,
    content_of,
    data_url,
    is_text_only,
    rename_settings,
    sent_settings,
)

_STOPS = {
    "stop": "stop",
    "eos": "stop",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "length": "length",
    "content_filter": "refusal",
}
"""Any other reason counts as a stop, because servers name it differently."""
_FAILED = ("error", "abort", "network_error", "insufficient_system_resource")
"""The finish reasons of answers that the server could not complete."""
_NOT_SENT = ("cache",)


class ChatWire:
    """Builds requests and reads answers. `max_tokens` is the server's name for the limit on the answer."""

    path = "/chat/completions"

    def __init__(self, max_tokens: str = "max_tokens") -> None:
        self._names = {"max_tokens": max_tokens}

    def encode(self, request: ModelRequest, model: str) -> dict[str, Any]:
        settings = rename_settings(request.settings, self._names)
        body: dict[str, Any] = {
            "model": model,
            "messages": _messages(request.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        if request.output_schema is not None:
            schema = {"name": "answer", "schema": request.output_schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if (name := chosen_tool(settings.get("tool_choice"))) is not None:
            settings["tool_choice"] = {"type": "function", "function": {"name": name}}
        return {**body, **sent_settings(settings, _NOT_SENT, has_tools=bool(request.tools))}

    def decoder(self) -> ChatDecoder:
        return ChatDecoder()


def _tool(tool: ToolDescriptor) -> Block:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _messages(messages: Sequence[Message]) -> list[Block]:
    made: list[Block] = []
    seen: list[Block] = []  # images and files of tools, for the next user message: a tool message cannot hold them
    for message in messages:
        if message.role is not Role.TOOL and seen:
            made.append({"role": "user", "content": seen})
            seen = []
        match message.role:
            case Role.SYSTEM:
                made.append({"role": "system", "content": message.text})
            case Role.USER:
                made.append({"role": "user", "content": content_of(message, _text, _file)})
            case Role.ASSISTANT:
                made.append(_assistant(message))
            case Role.TOOL:
                made.append(tool := {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.text})
                if not is_text_only(message):
                    tool["content"] = message.text or "The result is in the next message."
                    media = [part for part in message.parts if not isinstance(part, TextPart)]
                    seen.append(_text(f"The result of tool call {message.tool_call_id}:"))
                    seen += blocks_of(replace(message, parts=tuple(media)), _text, _file)
    if seen:
        made.append({"role": "user", "content": seen})
    return made


def _assistant(message: Message) -> Block:
    made: Block = {"role": "assistant", "content": message.text or None}
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
            for call in message.tool_calls
        ]
    elif not message.text:
        made["content"] = ""
    return made


def _text(text: str) -> Block:
    return {"type": "text", "text": text}


def _file(part: ImagePart | FilePart) -> Block:
    if isinstance(part, ImagePart):
        return {"type": "image_url", "image_url": {"url": data_url(part)}}
    if part.data is None:
        raise ModelRequestInvalid(
            "the chat-completions wire takes a file as data, not by address: give FilePart(data=…)"
        )
    return {"type": "file", "file": {"filename": part.name or "file", "file_data": data_url(part)}}


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Part(Struct, gc=False):
    text: str | None = None


class _Delta(Struct, gc=False):
    content: str | list[_Part] | None = None
    """A list of parts at some servers."""
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None
    index: int = 0


class _Chunk(Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Counts | None = None
    error: Any = None


_read = msgspec.json.Decoder(_Chunk).decode


class ChatDecoder:
    """Reads `chat.completion.chunk` events, of the first choice."""

    def __init__(self) -> None:
        self.done = False
        self._finish: str | None = None
        self._refused = False
        self._usage = Usage(requests=1)
        self._cost_known = False
        self._last_call = -1

    def decode(self, data: bytes) -> Sequence[ModelChunk]:
        if data == b"[DONE]":
            self.done = True
            return ()
        chunk = _read(data)
        if chunk.usage is not None:
            self._usage, self._cost_known = chunk.usage.total(), chunk.usage.cost is not None
        if chunk.error is not None:
            raise error_in_stream(chunk.error)
        if not chunk.choices:
            return ()
        choice = chunk.choices[0]
        if choice.index:
            return ()
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            if self._finish in _FAILED:
                raise ModelUnavailable(f"the server could not finish its answer ({self._finish}): try again later")
        delta = choice.delta
        if delta is None:
            return ()
        content = delta.content
        if type(content) is str and content and delta.tool_calls is None and delta.reasoning_content is None:
            return (TextChunk(content),)
        return self._rest_of(delta)

    def end(self) -> TurnEnd | None:
        if self._finish is None:  # also after [DONE]: a proxy sends that for half an answer too
            return None
        stop = _STOPS.get(self._finish, "stop")
        if self._refused:
            stop = "refusal"
        elif stop == "stop" and self._last_call >= 0:
            stop = "tool_calls"
        return TurnEnd(stop, self._usage, cost_known=self._cost_known)

    def _rest_of(self, delta: _Delta) -> list[ModelChunk]:
        made: list[ModelChunk] = []
        thought = delta.reasoning_content or delta.reasoning
        if thought and isinstance(thought, str):
            made.append(ReasoningChunk(thought))
        content = delta.content
        if text := "".join([part.text or "" for part in content]) if isinstance(content, list) else content:
            made.append(TextChunk(text))
        if delta.refusal:
            self._refused = True
            made.append(TextChunk(delta.refusal))
        for call in delta.tool_calls or ():
            made.append(self._call(call))
        return made

    def _call(self, call: _Call) -> CallChunk:
        function = call.function or _Function()
        # Some servers leave out the index and send each call complete: then a new id is a new call.
        index = call.index
        if index is None:
            index = self._last_call + 1 if call.id or self._last_call < 0 else self._last_call
        self._last_call = max(self._last_call, index)
        arguments = function.arguments or ""
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        return CallChunk(index, call.id or None, function.name or None, arguments)
