"""Messages as the GenAI conventions write them: JSON text, in which images and files are named and not included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.content import to_json_text
from ..core.messages import DataPart, FilePart, ImagePart, Message, Part, ReasoningPart, Role, TextPart

json_text = to_json_text


def input_messages(messages: Iterable[Message]) -> str:
    """Return the input messages of a model call."""
    return json_text([{"role": message.role.value, "parts": _parts(message)} for message in messages])


def output_message(message: Message, finish_reason: str) -> str:
    """Return the answer of a model call."""
    answer = {"role": "assistant", "parts": _parts(message), "finish_reason": finish_reason}
    return json_text([answer])


def output_text(text: str, finish_reason: str) -> str:
    """Return the response of a run."""
    return output_message(Message.assistant(text), finish_reason)


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
