"""The OpenAI Responses wire. Nothing is stored at the provider: each request carries the whole conversation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..core.messages import FilePart, ImagePart, Message, ReasoningPart, Role
from ..core.model import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from ..core.runs import Usage
from ..core.tools import ToolDescriptor
from .refusals import error_in_stream
from .wire import Block, Counts, arguments_of, chosen_tool, content_of, data_url, rename_settings, sent_settings

SIGNED = "responses:"
"""The prefix of our signatures; the id of the reasoning item and its encrypted content follow."""

_NAMES = {"max_tokens": "max_output_tokens"}
_NOT_SENT = ("cache", "stop")
_REASONS = re.compile(r"(o\d|gpt-([5-9]|\d\d)|codex)")
"""The names of reasoning models: only they accept a request for encrypted reasoning."""


class ResponsesWire:
    """Builds requests and reads answers."""

    path = "/responses"

    def encode(self, request: ModelRequest, model: str) -> dict[str, Any]:
        settings = rename_settings(request.settings, _NAMES)
        effort = settings.pop("reasoning_effort", None)
        body: dict[str, Any] = {"model": model, "input": _items(request.messages), "stream": True, "store": False}
        system = "\n\n".join([message.text for message in request.messages if message.role is Role.SYSTEM])
        if system:
            body["instructions"] = system
        if request.tools:
            body["tools"] = [_tool(tool) for tool in request.tools]
        if request.output_schema is not None:
            schema = {"type": "json_schema", "name": "answer", "schema": request.output_schema, "strict": False}
            body["text"] = {"format": schema}
        if effort is not None or _REASONS.match(model):
            body["include"] = ["reasoning.encrypted_content"]
            body["reasoning"] = {"summary": "auto", **({"effort": effort} if effort is not None else {})}
        if (name := chosen_tool(settings.get("tool_choice"))) is not None:
            settings["tool_choice"] = {"type": "function", "name": name}
        return {**body, **sent_settings(settings, _NOT_SENT, has_tools=bool(request.tools))}

    def decoder(self) -> ResponsesDecoder:
        return ResponsesDecoder()


def _tool(tool: ToolDescriptor) -> Block:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": False,
    }


def _items(messages: Sequence[Message]) -> list[Block]:
    made: list[Block] = []
    for message in messages:
        match message.role:
            case Role.SYSTEM:
                continue
            case Role.USER:
                made.append({"role": "user", "content": content_of(message, _text, _file)})
            case Role.ASSISTANT:
                made += _assistant(message)
            case Role.TOOL:
                output = content_of(message, _text, _file)
                made.append({"type": "function_call_output", "call_id": message.tool_call_id, "output": output})
    return made


def _assistant(message: Message) -> list[Block]:
    made: list[Block] = []
    for part in message.parts:
        if isinstance(part, ReasoningPart) and part.signature is not None and part.signature.startswith(SIGNED):
            item_id, _, secret = part.signature.removeprefix(SIGNED).partition(":")
            summary = [{"type": "summary_text", "text": part.text}] if part.text else []
            made.append({"type": "reasoning", "id": item_id, "summary": summary, "encrypted_content": secret})
    if message.text:
        made.append({"role": "assistant", "content": message.text})
    made += [
        {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments_of(call)}
        for call in message.tool_calls
    ]
    return made


def _text(text: str) -> Block:
    return {"type": "input_text", "text": text}


def _file(part: ImagePart | FilePart) -> Block:
    if isinstance(part, ImagePart):
        return {"type": "input_image", "image_url": data_url(part), "detail": "auto"}
    if part.url is not None:
        return {"type": "input_file", "file_url": part.url}
    return {"type": "input_file", "filename": part.name or "file", "file_data": data_url(part)}


class _Item(Struct, gc=False):
    type: str = ""
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    encrypted_content: str | None = None


class _Response(Struct, gc=False):
    usage: Counts | None = None
    error: Any = None
    incomplete_details: dict[str, Any] | None = None


class _Event(Struct, gc=False):
    type: str
    delta: Any = None
    output_index: int = 0
    summary_index: int = 0
    item: _Item | None = None
    response: _Response | None = None
    code: Any = None
    message: str | None = None
    error: Any = None


_read = msgspec.json.Decoder(_Event).decode


class ResponsesDecoder:
    """Reads the events of one response."""

    def __init__(self) -> None:
        self.done = False
        self._stop: str | None = None
        self._calls: dict[int, str] = {}
        """The arguments so far, by index of the call: some servers send them only when they are complete."""
        self._refused = False
        self._usage = Usage(requests=1)

    def decode(self, data: bytes) -> Sequence[ModelChunk]:
        if data == b"[DONE]":
            return ()
        event = _read(data)
        match event.type:
            case "response.output_text.delta":
                return (TextChunk(str(event.delta)),)
            case "response.function_call_arguments.delta":
                self._calls[event.output_index] = self._calls.get(event.output_index, "") + str(event.delta)
                return (CallChunk(event.output_index, None, None, str(event.delta)),)
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                return (ReasoningChunk(str(event.delta)),)
            case "response.reasoning_summary_part.added" if event.summary_index:
                return (ReasoningChunk("\n\n"),)
            case "response.refusal.delta":
                self._refused = True
                return (TextChunk(str(event.delta)),)
            case "response.output_item.added":
                return self._call(event.output_index, event.item or _Item())
            case "response.output_item.done":
                return self._item_finished(event.output_index, event.item or _Item())
            case "response.completed" | "response.incomplete" | "response.failed":
                self._finish(event.type, event.response or _Response())
            case "error":
                raise error_in_stream(event.error or {"code": event.code, "message": event.message})
            case _:
                pass
        return ()

    def end(self) -> TurnEnd | None:
        return None if self._stop is None else TurnEnd("refusal" if self._refused else self._stop, self._usage)

    def _call(self, index: int, item: _Item) -> Sequence[ModelChunk]:
        if item.type != "function_call":
            return ()
        self._calls[index] = item.arguments or ""
        return (CallChunk(index, item.call_id, item.name, item.arguments or ""),)

    def _item_finished(self, index: int, item: _Item) -> Sequence[ModelChunk]:
        if item.type == "reasoning" and item.encrypted_content:
            return (ReasoningChunk("", f"{SIGNED}{item.id}:{item.encrypted_content}"),)
        is_told = index in self._calls and (self._calls[index] or not item.arguments)
        return () if is_told else self._call(index, item)

    def _finish(self, kind: str, response: _Response) -> None:
        self.done = True
        if response.usage is not None:
            self._usage = response.usage.total()
        if kind == "response.failed":
            raise error_in_stream(response.error or {"message": "the response failed"})
        self._stop = "tool_calls" if self._calls else "stop"
        if kind == "response.incomplete":
            why = (response.incomplete_details or {}).get("reason")
            self._stop = "refusal" if why == "content_filter" else "length"
