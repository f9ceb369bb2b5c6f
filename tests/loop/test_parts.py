"""Parts that a model streams: they are in its message, and stay as they are in a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from retinue import Agent, DataPart, FilePart, ImagePart, Message, ModelRequest, PartChunk, Runtime, TextChunk, TurnEnd
from retinue.events import InferenceFinished, event_from_json, event_to_json
from retinue.messages import TextPart

PARTS = [
    DataPart({"rows": [1, 2.5, None], "name": "Zoë"}),
    ImagePart(data="aGk=", media_type="image/png"),
    FilePart(url="https://example.com/a.pdf", media_type="application/pdf", name="a.pdf"),
]


class Drawing:
    """A model that streams text, one part and more text."""

    name = "test:drawing"

    def __init__(self, part: DataPart | FilePart | ImagePart) -> None:
        self.part = part
        self.requests: list[ModelRequest] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[TextChunk | PartChunk | TurnEnd]:
        self.requests.append(request)
        yield TextChunk("here ")
        yield PartChunk(self.part)
        yield TextChunk("it is")
        yield TurnEnd()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
async def test_a_streamed_part_is_in_the_answer_and_is_read_back_from_sqlite(
    part: DataPart | FilePart | ImagePart, tmp_path: Path
) -> None:
    model, url = Drawing(part), f"sqlite:///{tmp_path}/runs.db"
    async with Runtime.open(url, agents=[Agent("a", model)]) as runtime:
        result = await runtime.run("a", "draw", thread_id="t")
    expected = (part, TextPart("here it is"))
    assert (result.response, result.messages[-1].parts) == ("here it is", expected)
    async with Runtime.open(url, agents=[Agent("a", model)]) as runtime:
        stored = [event async for event in runtime.events(result.run_id)]
        [answer] = [event.message for event in stored if isinstance(event, InferenceFinished)]
        assert answer.parts == expected
        await runtime.run("a", "again", thread_id="t")
    assert model.requests[-1].messages[1].parts == expected


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_part_survives_json(part: DataPart | FilePart | ImagePart) -> None:
    event = InferenceFinished(step=1, message=Message.assistant([part, TextPart("x")]))
    assert event_from_json(event_to_json(event)) == event
    assert event.message.text == "x"
