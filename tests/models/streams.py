"""Known turns as the streams of the three wires, with all that real servers send around them."""

from __future__ import annotations

import json
from typing import Any

from retinue.testing import KnownTurn


def event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


# --- chat completions

_CHAT_STOPS = {"refusal": "content_filter"}


def chat_chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return event({**_CHAT, "choices": [choice], "usage": None})


_CHAT = {
    "id": "chatcmpl-B9MHDbslfkBeAs8l4bebGdFOJ6PeG",
    "object": "chat.completion.chunk",
    "created": 1741570283,
    "model": "gpt-test-2025-01-01",
    "service_tier": "default",
    "system_fingerprint": "fp_fc9f1d7035",
}


def chat(turn: KnownTurn) -> list[bytes]:
    made = [b": keep-alive\n\n", chat_chunk({"role": "assistant", "content": "", "refusal": None})]
    made += [chat_chunk({"reasoning_content": piece}) for piece in turn.reasoning]
    made += [chat_chunk({"content": piece}) for piece in turn.text]
    for index, call in enumerate(turn.calls):
        function = {"name": call.name, "arguments": ""}
        first = {"index": index, "id": call.id, "type": "function", "function": function}
        made.append(chat_chunk({"tool_calls": [first]}))
        for piece in call.arguments:
            made.append(chat_chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    made.append(chat_chunk({}, _CHAT_STOPS.get(turn.stop_reason, turn.stop_reason)))
    usage = {
        "prompt_tokens": turn.usage.input_tokens,
        "completion_tokens": turn.usage.output_tokens,
        "total_tokens": turn.usage.tokens,
        "prompt_tokens_details": {
            "cached_tokens": turn.usage.cached_tokens,
            "cache_write_tokens": turn.usage.cache_write_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": turn.usage.reasoning_tokens, "audio_tokens": 0},
    }
    return [*made, event({**_CHAT, "choices": [], "usage": usage}), b"data: [DONE]\n\n"]


# --- responses


def responses(turn: KnownTurn) -> list[bytes]:
    return _Responses(turn).events


class _Responses:
    def __init__(self, turn: KnownTurn) -> None:
        self.events: list[bytes] = []
        self._output: list[dict[str, Any]] = []
        self._put("response.created", response=self._response("in_progress"))
        self._put("response.in_progress", response=self._response("in_progress"))
        if turn.reasoning:
            self._reasoning("".join(turn.reasoning), turn.reasoning)
        if turn.text:
            self._message("".join(turn.text), turn.text)
        for call in turn.calls:
            self._call(call.id, call.name, call.arguments)
        details = None if turn.stop_reason in ("stop", "tool_calls") else {"reason": "max_output_tokens"}
        if turn.stop_reason == "refusal":
            details = {"reason": "content_filter"}
        usage = {
            "input_tokens": turn.usage.input_tokens,
            "input_tokens_details": {
                "cached_tokens": turn.usage.cached_tokens,
                "cache_write_tokens": turn.usage.cache_write_tokens,
            },
            "output_tokens": turn.usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": turn.usage.reasoning_tokens},
            "total_tokens": turn.usage.tokens,
        }
        status = "incomplete" if details else "completed"
        done = {**self._response(status), "output": self._output, "usage": usage, "incomplete_details": details}
        self._put(f"response.{status}", response=done)

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": "resp_67c9fdcecf488190bdd9a0409de3a1ec07b8b0ad4e5eb654",
            "object": "response",
            "created_at": 1741487325,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": "Be brief.",
            "model": "gpt-test-2025-01-01",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "metadata": {},
            "temperature": 1.0,
            "top_p": 1.0,
            "usage": None,
        }

    def _put(self, kind: str, **fields: Any) -> None:
        self.events.append(event({"type": kind, "sequence_number": len(self.events), **fields}, kind))

    def _item(self, started: dict[str, Any], finished: dict[str, Any], between: Any) -> None:
        index = len(self._output)
        self._put("response.output_item.added", output_index=index, item=started)
        between(index)
        self._put("response.output_item.done", output_index=index, item=finished)
        self._output.append(finished)

    def _reasoning(self, text: str, pieces: tuple[str, ...]) -> None:
        where = {"item_id": "rs_1", "summary_index": 0}

        def between(index: int) -> None:
            part = {"type": "summary_text", "text": ""}
            self._put("response.reasoning_summary_part.added", output_index=index, part=part, **where)
            for piece in pieces:
                self._put("response.reasoning_summary_text.delta", output_index=index, delta=piece, **where)
            self._put("response.reasoning_summary_text.done", output_index=index, text=text, **where)

        summary = [{"type": "summary_text", "text": text}]
        done = {"id": "rs_1", "type": "reasoning", "summary": summary, "encrypted_content": "gAAAAsecret"}
        self._item({"id": "rs_1", "type": "reasoning", "summary": []}, done, between)

    def _message(self, text: str, pieces: tuple[str, ...]) -> None:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        where = {"item_id": "msg_1", "content_index": 0}

        def between(index: int) -> None:
            self._put("response.content_part.added", output_index=index, part=part, **where)
            for piece in pieces:
                fields = {"delta": piece, "logprobs": [], "obfuscation": "aB3xY"}
                self._put("response.output_text.delta", output_index=index, **where, **fields)
            self._put("response.output_text.done", output_index=index, text=text, logprobs=[], **where)
            self._put("response.content_part.done", output_index=index, part={**part, "text": text}, **where)

        item = {"id": "msg_1", "type": "message", "role": "assistant"}
        done = {**item, "status": "completed", "content": [{**part, "text": text}]}
        self._item({**item, "status": "in_progress", "content": []}, done, between)

    def _call(self, call_id: str, name: str, pieces: tuple[str, ...]) -> None:
        item = {"id": f"fc_{call_id}", "type": "function_call", "call_id": call_id, "name": name}
        arguments = "".join(pieces) or "{}"

        def between(index: int) -> None:
            where = {"output_index": index, "item_id": item["id"]}
            for piece in pieces:
                self._put("response.function_call_arguments.delta", delta=piece, **where)
            self._put("response.function_call_arguments.done", arguments=arguments, name=name, **where)

        self._item(
            {**item, "status": "in_progress", "arguments": ""},
            {**item, "status": "completed", "arguments": arguments},
            between,
        )


# --- anthropic

_ANTHROPIC_STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "refusal": "refusal"}


def anthropic(turn: KnownTurn) -> list[bytes]:
    cached = turn.usage.cached_tokens
    usage = {
        "input_tokens": turn.usage.input_tokens - cached - turn.usage.cache_write_tokens,
        "cache_creation_input_tokens": turn.usage.cache_write_tokens,
        "cache_read_input_tokens": cached,
        "output_tokens": 1,
        "service_tier": "standard",
    }
    message = {
        "id": "msg_4QpJur2dWWDjF6C758FbBw5vm12BaVipnK",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "claude-test-20250101",
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    made = [_named({"type": "message_start", "message": message})]
    index = 0
    if turn.reasoning:
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in turn.reasoning]
        signed = {"type": "signature_delta", "signature": "EqQBsigned"}
        made += _block(index, {"type": "thinking", "thinking": "", "signature": ""}, [*deltas, signed])
        index += 1
    if turn.text:
        made += _block(
            index, {"type": "text", "text": ""}, [{"type": "text_delta", "text": text} for text in turn.text]
        )
        index += 1
    made.append(_named({"type": "ping"}))
    for call in turn.calls:
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", *call.arguments)]
        made += _block(index, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}, deltas)
        index += 1
    delta = {"stop_reason": _ANTHROPIC_STOPS[turn.stop_reason], "stop_sequence": None}
    made.append(_named({"type": "message_delta", "delta": delta, "usage": {"output_tokens": turn.usage.output_tokens}}))
    return [*made, _named({"type": "message_stop"})]


def _named(data: dict[str, Any]) -> bytes:
    return event(data, data["type"])


def _block(index: int, start: dict[str, Any], deltas: list[dict[str, Any]]) -> list[bytes]:
    return [
        _named({"type": "content_block_start", "index": index, "content_block": start}),
        *[_named({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas],
        _named({"type": "content_block_stop", "index": index}),
    ]


RENDER = {"chat": chat, "responses": responses, "anthropic": anthropic}
