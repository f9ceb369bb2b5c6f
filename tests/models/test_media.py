"""Images and files that tools return: from the tool to the request of each wire, through events and a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    FilePart,
    ImagePart,
    Message,
    ModelRequest,
    RunStatus,
    Runtime,
    StateKey,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.events import ToolCallFinished, event_from_json, event_to_json
from retinue.messages import DataPart, TextPart
from retinue.models.anthropic import AnthropicWire
from retinue.models.chat import ChatWire
from retinue.models.responses import ResponsesWire
from retinue.plugins import Plugin, Registrar
from retinue.testing import ScriptedModel, call, say

IMAGE = ImagePart(data="aGk=", media_type="image/png")
PDF = FilePart(data="JVBERg==", media_type="application/pdf", name="a.pdf")
SEEN = StateKey("seen", int, default=0)


class Counting(Plugin):
    name = "counting"

    def register(self, r: Registrar) -> None:
        r.key(SEEN)


RETURNED: list[tuple[Any, tuple[Any, ...], str]] = [
    (IMAGE, (IMAGE,), ""),
    ([IMAGE, PDF], (IMAGE, PDF), ""),
    (["left:", IMAGE, "right:", PDF], (TextPart("left:"), IMAGE, TextPart("right:"), PDF), "left:right:"),
    ((IMAGE, {"width": 3}), (IMAGE, TextPart('{"width":3}')), '{"width":3}'),
    ([TextPart("a"), IMAGE, DataPart(1)], (TextPart("a"), IMAGE, DataPart(1)), "a"),
    (ToolResult.success(["dropped", IMAGE], message="A chart."), (TextPart("A chart."), IMAGE), "A chart."),
    (ToolOutput(IMAGE, update={SEEN: 1}), (IMAGE,), ""),
]


def painter(returned: Any) -> Agent:
    @tool
    async def paint() -> Any:
        """Paint."""
        return returned

    model = ScriptedModel([call("paint", id="c1"), say("Seen.")])
    return Agent("painter", model, tools=[paint], plugins=[Counting()])


@pytest.mark.parametrize(("returned", "parts", "text"), RETURNED)
async def test_the_model_reads_them_as_parts(returned: Any, parts: tuple[Any, ...], text: str) -> None:
    agent = painter(returned)
    runtime = Runtime([agent])
    run = runtime.stream("painter", "go")
    events = [event async for event in run]
    assert (await run.result()).status is RunStatus.COMPLETED
    assert isinstance(agent.model, ScriptedModel)
    message = agent.model.requests[1].messages[-1]
    assert (message.parts, message.text, message.tool_call_id) == (parts, text, "c1")
    (finished,) = [event for event in events if isinstance(event, ToolCallFinished)]
    assert finished.result.text == finished.message.text == text
    assert "aGk=" not in str(finished.result)
    assert event_from_json(event_to_json(finished)) == finished


async def test_they_are_stored_and_read_by_the_next_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with Runtime.open(url, agents=[painter(["see", IMAGE, PDF])]) as runtime:
        first = await runtime.run("painter", "go", thread_id="t")
    model = ScriptedModel([say("Again.")])
    async with Runtime.open(url, agents=[Agent("painter", model, plugins=[Counting()])]) as runtime:
        await runtime.run("painter", "And now?", thread_id="t")
        events = [event async for event in runtime.events(first.run_id)]
    (message,) = [one for one in model.requests[0].messages if one.role == "tool"]
    assert message.parts == (TextPart("see"), IMAGE, PDF)
    assert [event.message for event in events if isinstance(event, ToolCallFinished)] == [message]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (ImagePart(), "ImagePart has neither url nor data"),
        (FilePart(data="not base64!"), "data of the FilePart is not base64"),
        (ImagePart(data="aGk"), "data of the ImagePart is not base64"),
    ],
)
async def test_a_part_without_valid_data_fails_its_call(part: Any, says: str) -> None:
    agent = painter([part])
    result = await Runtime([agent]).run("painter", "go")
    assert result.status is RunStatus.COMPLETED
    assert result.messages[-2].text.startswith(f"internal: the {says}")


@pytest.mark.parametrize("value", [{"plot": IMAGE}, ["see", {"plots": [IMAGE]}], [["a", IMAGE]]])
async def test_an_image_inside_a_value_fails_its_call(value: Any) -> None:
    @tool
    async def paint() -> Any:
        """Paint."""
        return value

    model = ScriptedModel([call("paint"), say("ok")])
    result = await Runtime([Agent("painter", model, tools=[paint])]).run("painter", "go")
    told = result.messages[-2].text
    assert told.startswith("internal: an ImagePart inside a dict or an inner list cannot be shown to the model")
    assert told.endswith("return [value, ImagePart(…)]")


async def test_long_text_is_cut_and_the_image_stays() -> None:
    agent = painter(["x" * 200_000, IMAGE])
    result = await Runtime([agent]).run("painter", "go")
    cut, image = result.messages[-2].parts
    assert isinstance(cut, TextPart)
    assert "characters left out here" in cut.text
    assert image == IMAGE


RESULT = Message.tool([TextPart("see"), IMAGE, PDF], tool_call_id="c1")


def request(message: Message) -> ModelRequest:
    return ModelRequest(messages=(Message.user("go"), message))


def test_anthropic_has_them_in_the_result() -> None:
    (block,) = AnthropicWire().encode(request(RESULT), "m")["messages"][-1]["content"][1:]
    assert [one["type"] for one in block["content"]] == ["text", "image", "document"]


def test_responses_has_them_in_the_output() -> None:
    item = ResponsesWire().encode(request(RESULT), "m")["input"][-1]
    assert (item["type"], item["call_id"]) == ("function_call_output", "c1")
    assert [one["type"] for one in item["output"]] == ["input_text", "input_image", "input_file"]


def test_chat_completions_has_them_in_the_next_user_message() -> None:
    *_, result, after = ChatWire().encode(request(RESULT), "m")["messages"]
    assert (result["role"], result["content"]) == ("tool", "see")
    assert (after["role"], [one["type"] for one in after["content"]]) == ("user", ["text", "image_url", "file"])
    *_, result, after = ChatWire().encode(request(Message.tool([IMAGE], tool_call_id="c2")), "m")["messages"]
    assert result["content"] == "The result is in the next message."
    assert after["content"][0]["text"] == "The result of tool call c2:"


def test_what_a_wire_cannot_carry_is_an_error_in_its_place() -> None:
    sound = Message.tool([FilePart(data="aGk=", media_type="audio/wav")], tool_call_id="c1")
    (block,) = AnthropicWire().encode(request(sound), "m")["messages"][-1]["content"][1:]
    (shown,) = block["content"]
    assert shown["text"].startswith("[error: this part of the result cannot be shown: Anthropic reads no audio/wav;")
    linked = Message.tool([FilePart(url="https://example.com/a.pdf")], tool_call_id="c1")
    after = ChatWire().encode(request(linked), "m")["messages"][-1]
    assert "takes a file as data, not by address" in after["content"][-1]["text"]
