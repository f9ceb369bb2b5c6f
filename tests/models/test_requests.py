"""What goes out: each wire's body of one conversation with everything in it, whole."""

from __future__ import annotations

from typing import Any

import msgspec
from inline_snapshot import snapshot

from retinue import FilePart, ImagePart, Message, ModelRequest, ToolCall, ToolDescriptor
from retinue.messages import ReasoningPart, TextPart
from retinue.models.anthropic import AnthropicWire
from retinue.models.chat import ChatWire
from retinue.models.responses import ResponsesWire
from retinue.models.wire import Wire

CALLS = (ToolCall("call_1", "look", {"at": "sea"}), ToolCall("call_2", "look", {}, '{"at": '))
MESSAGES = (
    Message.system("Be brief."),
    Message.user(
        [
            TextPart("What is this?"),
            ImagePart(url="https://example.com/a.png"),
            ImagePart(data="aGk=", media_type="image/jpeg"),
            FilePart(data="JVBERg==", media_type="application/pdf", name="a.pdf"),
        ]
    ),
    Message.assistant(
        [
            ReasoningPart("Signed.", "anthropic:sig"),
            ReasoningPart("", "anthropic-redacted:hidden"),
            ReasoningPart("Summed up.", "responses:rs_1:secret"),
            TextPart("Let me look."),
        ],
        CALLS,
    ),
    Message.tool("waves", tool_call_id="call_1", name="look"),
    Message.tool([TextPart("a picture"), ImagePart(data="aGk=")], tool_call_id="call_2", name="look"),
)
TOOL = ToolDescriptor("look", "look", "Look at something.").with_parameters(
    {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
)
REQUEST = ModelRequest(
    messages=MESSAGES,
    tools=(TOOL,),
    settings={"temperature": 0, "max_tokens": 50, "tool_choice": "required", "seed": None},
    output_schema={"type": "object"},
)


def body(wire: Wire, request: ModelRequest = REQUEST, model: str = "m") -> Any:
    return msgspec.json.decode(msgspec.json.encode(wire.encode(request, model)))


def test_chat() -> None:
    assert body(ChatWire()) == snapshot(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,aGk="}},
                        {
                            "type": "file",
                            "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="},
                        },
                    ],
                },
                {
                    "role": "assistant",
                    "content": "Let me look.",
                    "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sea"}'}},
                        {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{}"}},
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "waves"},
                {"role": "tool", "tool_call_id": "call_2", "content": "a picture"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "The result of tool call call_2:"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
                    ],
                },
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "look",
                        "description": "Look at something.",
                        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
                    },
                }
            ],
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
            "temperature": 0,
            "max_tokens": 50,
            "tool_choice": "required",
        }
    )


def test_responses() -> None:
    assert body(ResponsesWire()) == snapshot(
        {
            "model": "m",
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "What is this?"},
                        {"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"},
                        {"type": "input_image", "image_url": "data:image/jpeg;base64,aGk=", "detail": "auto"},
                        {
                            "type": "input_file",
                            "filename": "a.pdf",
                            "file_data": "data:application/pdf;base64,JVBERg==",
                        },
                    ],
                },
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "Summed up."}],
                    "encrypted_content": "secret",
                },
                {"role": "assistant", "content": "Let me look."},
                {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at":"sea"}'},
                {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "call_1", "output": "waves"},
                {
                    "type": "function_call_output",
                    "call_id": "call_2",
                    "output": [
                        {"type": "input_text", "text": "a picture"},
                        {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"},
                    ],
                },
            ],
            "stream": True,
            "store": False,
            "instructions": "Be brief.",
            "tools": [
                {
                    "type": "function",
                    "name": "look",
                    "description": "Look at something.",
                    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
                    "strict": False,
                }
            ],
            "text": {
                "format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": False}
            },
            "temperature": 0,
            "max_output_tokens": 50,
            "tool_choice": "required",
        }
    )


def test_anthropic() -> None:
    assert body(AnthropicWire()) == snapshot(
        {
            "model": "m",
            "max_tokens": 50,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "aGk="}},
                        {
                            "type": "document",
                            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="},
                            "title": "a.pdf",
                        },
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Signed.", "signature": "sig"},
                        {"type": "redacted_thinking", "data": "hidden"},
                        {"type": "text", "text": "Let me look."},
                        {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "sea"}},
                        {"type": "tool_use", "id": "call_2", "name": "look", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_1",
                            "content": [{"type": "text", "text": "waves"}],
                        },
                        {
                            "type": "tool_result",
                            "tool_use_id": "call_2",
                            "content": [
                                {"type": "text", "text": "a picture"},
                                {
                                    "type": "image",
                                    "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                                },
                            ],
                            "cache_control": {"type": "ephemeral"},
                        },
                    ],
                },
            ],
            "stream": True,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "tools": [
                {
                    "name": "look",
                    "description": "Look at something.",
                    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
                }
            ],
            "tool_choice": {"type": "any"},
        }
    )


def test_the_same_request_twice_gives_the_same_bytes() -> None:
    """Else a provider's cache would not know it again."""
    for wire in (ChatWire(), ResponsesWire(), AnthropicWire()):
        assert msgspec.json.encode(wire.encode(REQUEST, "m")) == msgspec.json.encode(wire.encode(REQUEST, "m"))


def test_settings_by_their_names() -> None:
    bare = ModelRequest(messages=(Message.user("x"),), settings={"max_tokens": 5, "tool_choice": "auto", "stop": "."})
    assert body(ChatWire("max_completion_tokens"), bare)["max_completion_tokens"] == 5
    assert "tool_choice" not in body(ChatWire(), bare)
    assert body(ResponsesWire(), bare)["max_output_tokens"] == 5
    assert body(AnthropicWire(), bare)["stop_sequences"] == ["."]
    assert body(AnthropicWire(), bare)["max_tokens"] == 5
    thinking = ModelRequest(messages=bare.messages, settings={"reasoning_effort": "low"})
    assert body(ResponsesWire(), thinking)["reasoning"] == {"effort": "low", "summary": "auto"}
    assert body(ChatWire(), thinking)["reasoning_effort"] == "low"
    assert "reasoning_effort" not in body(AnthropicWire(), thinking)
    assert "include" in body(ResponsesWire(), bare, "gpt-5-mini")
    assert "include" not in body(ResponsesWire(), bare, "gpt-4.1")


def test_a_tool_can_be_demanded_by_name() -> None:
    for named in ({"name": "look"}, {"type": "function", "function": {"name": "look"}}):
        demanding = ModelRequest(messages=(Message.user("x"),), tools=(TOOL,), settings={"tool_choice": named})
        chosen = {"type": "function", "function": {"name": "look"}}
        assert body(ChatWire(), demanding)["tool_choice"] == chosen
        assert body(ResponsesWire(), demanding)["tool_choice"] == {"type": "function", "name": "look"}
        assert body(AnthropicWire(), demanding)["tool_choice"] == {"type": "tool", "name": "look"}


def test_the_cache_can_be_left_alone() -> None:
    asked = ModelRequest(messages=MESSAGES, tools=(TOOL,), settings={"cache": False})
    assert "cache_control" not in str(body(AnthropicWire(), asked))
    without_system = ModelRequest(messages=MESSAGES[1:], tools=(TOOL,))
    made = body(AnthropicWire(), without_system)
    assert made["tools"][-1]["cache_control"] == {"type": "ephemeral"}
    assert str(made).count("cache_control") == 2


def test_the_cache_ends_before_what_only_this_request_has() -> None:
    result = Message.tool("rain", tool_call_id="c1", name="weather")
    said = (
        Message.user("Weather?"),
        Message.assistant("", [ToolCall("c1", "weather", {})]),
        result,
        Message.user("It is noon."),
    )
    made = body(AnthropicWire(), ModelRequest(messages=said, transient=1))
    *_, turn = made["messages"]
    assert [block["type"] for block in turn["content"]] == ["tool_result", "text"]
    assert ["cache_control" in block for block in turn["content"]] == [True, False]
