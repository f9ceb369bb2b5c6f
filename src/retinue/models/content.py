"""Helpers that the wires share: parts as blocks, tool choices, settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec

from ..core.content import to_json_text
from ..core.errors import ModelRequestInvalid
from ..core.messages import DataPart, FilePart, ImagePart, Message, Role, TextPart, ToolCall

Block = dict[str, Any]


def data_url(part: ImagePart | FilePart) -> str:
    """Return the URL of a part, or its data as a data URL."""
    if part.url is not None:
        return part.url
    if part.data is not None:
        return f"data:{part.media_type};base64,{part.data}"
    raise ModelRequestInvalid(f"an {part.__struct_config__.tag} part has neither url nor data")


def blocks_of(
    message: Message, text: Callable[[str], Block], other: Callable[[ImagePart | FilePart], Block]
) -> list[Block]:
    """Return the parts that a provider reads, as its blocks; reasoning is not one of them.

    A part of a tool result that the provider cannot read becomes an error in its place, which model and author see.
    """
    made: list[Block] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            if part.text:
                made.append(text(part.text))
        elif isinstance(part, ImagePart | FilePart):
            try:
                made.append(other(part))
            except ModelRequestInvalid as exc:
                if message.role is not Role.TOOL:
                    raise
                made.append(text(f"[error: this part of the result cannot be shown: {exc}]"))
        elif isinstance(part, DataPart):
            made.append(text(to_json_text(part.data)))
    return made


def is_text_only(message: Message) -> bool:
    return all(isinstance(part, TextPart) for part in message.parts)


def arguments_of(call: ToolCall) -> str:
    """Return the arguments as JSON text. Malformed ones are left out: servers refuse them, and the result quotes them."""
    return msgspec.json.encode(call.args).decode()


def chosen_tool(choice: Any) -> str | None:
    """Return the tool that a `tool_choice` setting names, in our form {"name": …} or that of a provider."""
    if not isinstance(choice, dict):
        return None
    fields = cast("dict[str, Any]", choice)
    function: dict[str, Any] = fields.get("function") or {}
    name = fields.get("name") or function.get("name")
    return name if isinstance(name, str) else None


def rename_settings(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings under the provider's names, without those that are None; unknown ones pass unchanged."""
    return {names.get(name, name): value for name, value in settings.items() if value is not None}


def sent_settings(settings: Mapping[str, Any], left_out: tuple[str, ...], *, has_tools: bool) -> dict[str, Any]:
    """Return the settings that go into a request: those on tools only if there are some."""
    if not has_tools:
        left_out = (*left_out, "tool_choice", "parallel_tool_calls")
    return {name: value for name, value in settings.items() if name not in left_out}
