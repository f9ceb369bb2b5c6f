"""The names we send are the ones the conventions have."""

from __future__ import annotations

import re
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

from retinue import FilePart, ImagePart, Message, ToolCall
from retinue.messages import ReasoningPart, TextPart
from retinue.telemetry import conventions, spans
from retinue.telemetry.conventions import input_messages, provider_and_model

from .. import inside

KNOWN = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
REMOVED = {"gen_ai.system", "gen_ai.prompt", "gen_ai.completion", "gen_ai.usage.prompt_tokens"}
AGENT_METRICS = {
    "gen_ai.invoke_agent.duration",
    "gen_ai.invoke_agent.inference_calls",
    "gen_ai.invoke_agent.tool_calls",
    "gen_ai.execute_tool.duration",
}
"""Metrics that came after the conventions had left the package."""


def test_attribute_names_are_those_of_the_installed_conventions() -> None:
    ours = {value for value in vars(conventions).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    assert len(ours) > 20
    assert ours <= KNOWN - REMOVED
    assert conventions.ERROR_TYPE == error_attributes.ERROR_TYPE


def test_operations_are_called_as_the_conventions_call_them() -> None:
    known = {it.value for it in gen_ai_attributes.GenAiOperationNameValues}  # pyright: ignore[reportDeprecated]
    assert set(conventions.KINDS.values()) <= known


def test_providers_are_called_as_the_conventions_call_them() -> None:
    known = {it.value for it in gen_ai_attributes.GenAiProviderNameValues}  # pyright: ignore[reportDeprecated]
    assert inside.provider_names() <= known


def test_metric_names_are_those_of_the_conventions() -> None:
    class Meter:
        def __getattr__(self, name: str) -> Any:
            return lambda metric, *args, **options: made.append(metric)

    made: list[str] = []
    spans.Metrics(Meter())  # pyright: ignore[reportArgumentType]
    known = {value for name, value in vars(gen_ai_metrics).items() if re.match("GEN_AI_CLIENT", name)}
    assert {name for name in made if name.startswith("gen_ai.")} <= known | AGENT_METRICS
    assert [name for name in made if not name.startswith("gen_ai.")] == [
        "retinue.runs",
        "retinue.runs.active",
        "retinue.steps",
        "retinue.inference.wait",
        "retinue.cost",
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai:gpt-5", ("openai", "gpt-5")),
        ("bedrock:anthropic.claude:v1", ("aws.bedrock", "anthropic.claude:v1")),
        ("ollama:llama3", ("ollama", "llama3")),
        ("bare", ("_OTHER", "bare")),
    ],
)
def test_a_model_name_is_a_provider_and_a_model(name: str, expected: tuple[str, str]) -> None:
    assert provider_and_model(name) == expected


def test_every_part_of_a_message_has_its_form_and_no_file_is_sent() -> None:
    parts = [
        TextPart("look"),
        ReasoningPart("hm"),
        ImagePart(data="QUJD", media_type="image/png"),
        FilePart(url="https://example.com/a.pdf", media_type="application/pdf"),
    ]
    said = Message.assistant(parts, [ToolCall("c1", "look", {"q": 1})])
    answered = Message.tool("found", tool_call_id="c1")
    assert input_messages([said, answered]) == (
        '[{"role":"assistant","parts":[{"type":"text","content":"look"},{"type":"reasoning","content":"hm"},'
        '{"type":"blob","modality":"image","mime_type":"image/png"},'
        '{"type":"uri","uri":"https://example.com/a.pdf","modality":"file","mime_type":"application/pdf"},'
        '{"type":"tool_call","id":"c1","name":"look","arguments":{"q":1}}]},'
        '{"role":"tool","parts":[{"type":"tool_call_response","id":"c1","response":"found"}]}]'
    )
