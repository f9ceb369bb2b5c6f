"""Span names and attributes by the OpenTelemetry GenAI semantic conventions, and our own where those have none.

The conventions are in development and have moved to a repository of their own; the names are written out here, so that no
version of a package decides what is sent, and a test compares them with the installed one. `retinue.*` is ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ..core.content import to_json_text
from ..core.messages import DataPart, FilePart, ImagePart, Message, Part, ReasoningPart, ReceiptPart, Role, TextPart
from ..core.runs import Usage
from ..wire.tree import CANCELLED, CallNode, Node, RunNode, StepNode

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
AGENT_NAME = "gen_ai.agent.name"
CONVERSATION_ID = "gen_ai.conversation.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
TOKEN_TYPE = "gen_ai.token.type"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
TOOL_CALL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_CALL_RESULT = "gen_ai.tool.call.result"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
ERROR_TYPE = "error.type"

RUN_ID = "retinue.run.id"
PARENT_RUN_ID = "retinue.run.parent_id"
RUN_NAMESPACE = "retinue.run.namespace"
RUN_STATUS = "retinue.run.status"
RUN_TERMINATION = "retinue.run.termination"
RUN_IS_CHILD = "retinue.run.is_child"
STEP = "retinue.step"
TOOL_STATUS = "retinue.tool.status"
COST = "retinue.usage.cost"

OTHER = "_OTHER"
"""Replaces a value that a model made up, so that it cannot create a new time series."""

_PROVIDERS = {
    "openai-chat": "openai",
    "openai-responses": "openai",
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "google": "gcp.gemini",
    "google-gla": "gcp.gemini",
    "gemini": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "mistral": "mistral_ai",
    "grok": "x_ai",
    "xai": "x_ai",
}
"""Providers that have another name in the conventions."""


@lru_cache(maxsize=256)
def provider_and_model(name: str) -> tuple[str, str]:
    """Return the conventions' name of the provider, and the model, of a "provider:model"."""
    provider, colon, model = name.partition(":")
    if not colon:
        return OTHER, name
    return _PROVIDERS.get(provider, provider), model


KINDS: dict[type[Node], str] = {RunNode: "invoke_agent", StepNode: "chat", CallNode: "execute_tool"}
"""The operation that each node is."""


def span_name(node: Node) -> str:
    """Return the operation and its target."""
    match node:
        case RunNode():
            target = node.agent
        case StepNode():
            target = provider_and_model(node.model)[1]
        case CallNode():
            target = node.tool
    return f"{KINDS[type(node)]} {target}".rstrip()


def first_attributes(node: Node) -> dict[str, Any]:
    """Return the attributes at the beginning; samplers decide by them."""
    known: dict[str, Any] = {
        OPERATION_NAME: KINDS[type(node)],
        AGENT_NAME: node.agent,
        RUN_ID: node.run_id,
    }
    match node:
        case RunNode():
            known[CONVERSATION_ID] = node.thread_id
            known[RUN_IS_CHILD] = bool(node.ns)
            if node.ns:
                known[RUN_NAMESPACE] = "/".join(node.ns)
            if node.parent is not None:
                known[PARENT_RUN_ID] = node.parent.run_id
        case StepNode():
            known[STEP], known[REQUEST_STREAM] = node.number, True
            known[PROVIDER_NAME], known[REQUEST_MODEL] = provider_and_model(node.model)
        case CallNode():
            known[TOOL_NAME], known[TOOL_TYPE] = node.tool, "function"
            known[TOOL_CALL_ID] = node.call_id
    return known


def last_attributes(node: Node) -> dict[str, Any]:
    """Return the attributes at the end, with content if the tree keeps it."""
    match node:
        case RunNode():
            known = _of_run(node)
        case StepNode():
            known = _of_chat(node)
        case CallNode():
            known = _of_tool(node)
    if node.error_type is not None:
        known[ERROR_TYPE] = node.error_type
    return known


def is_failure(node: Node) -> bool:
    """Return True for an error; a cancelled node is not one."""
    return node.error_type is not None and node.error_type != CANCELLED


def _of_run(run: RunNode) -> dict[str, Any]:
    known: dict[str, Any] = {RUN_STATUS: run.status.value, RUN_TERMINATION: run.termination, **_usage(run.leg_usage)}
    if run.model:
        known[PROVIDER_NAME], known[REQUEST_MODEL] = provider_and_model(run.model)
    if run.messages:
        known[INPUT_MESSAGES] = input_messages(run.messages)
    if run.response is not None:
        known[OUTPUT_MESSAGES] = output_message(Message.assistant(run.response), run.termination)
    return known


def _of_chat(chat: StepNode) -> dict[str, Any]:
    known = _usage(chat.usage)
    known[PROVIDER_NAME], known[REQUEST_MODEL] = provider_and_model(chat.model)
    if chat.answered_by:
        known[RESPONSE_MODEL] = provider_and_model(chat.answered_by)[1]
        known[RESPONSE_FINISH_REASONS] = (chat.stop_reason,)
    if chat.first_chunk is not None:
        known[RESPONSE_TIME_TO_FIRST_CHUNK] = chat.first_chunk - chat.began
    if chat.messages:
        known[INPUT_MESSAGES] = input_messages(chat.messages)
    if chat.message is not None:
        known[OUTPUT_MESSAGES] = output_message(chat.message, chat.stop_reason)
    return known


def _of_tool(tool: CallNode) -> dict[str, Any]:
    known: dict[str, Any] = {TOOL_STATUS: tool.status.value}
    if tool.args is not None:
        known[TOOL_CALL_ARGUMENTS] = to_json_text(tool.args)
    if tool.result is not None:
        known[TOOL_CALL_RESULT] = tool.result
    return known


def _usage(usage: Usage) -> dict[str, Any]:
    counted: dict[str, Any] = {
        INPUT_TOKENS: usage.input_tokens,
        OUTPUT_TOKENS: usage.output_tokens,
        CACHE_READ_TOKENS: usage.cached_tokens,
        CACHE_WRITE_TOKENS: usage.cache_write_tokens,
        REASONING_TOKENS: usage.reasoning_tokens,
        COST: usage.cost,
    }
    return {name: value for name, value in counted.items() if value}


def input_messages(messages: Iterable[Message]) -> str:
    """Return the input messages of a model call."""
    return to_json_text([{"role": message.role.value, "parts": _parts(message)} for message in messages])


def output_message(message: Message, finish_reason: str) -> str:
    """Return the answer of a model call."""
    answer = {"role": "assistant", "parts": _parts(message), "finish_reason": finish_reason}
    return to_json_text([answer])


def _parts(message: Message) -> list[dict[str, Any]]:
    if message.role is Role.TOOL:
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.text}]
    said = [_part(part) for part in message.parts]
    calls = [
        {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.args} for call in message.tool_calls
    ]
    return said + calls


def _part(part: Part) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "content": part.text}
        case ReasoningPart():
            return {"type": "reasoning", "content": part.text}
        case ImagePart() | FilePart():
            modality = "image" if isinstance(part, ImagePart) else "file"
            kind = {"type": "uri", "uri": part.url} if part.url is not None else {"type": "blob"}
            return {**kind, "modality": modality, "mime_type": part.media_type}
        case DataPart():
            return {"type": "data", "content": part.data}
        case ReceiptPart():
            return {"type": "text", "content": part.line}
