"""What we parse is what they parse: the official clients and ours read the same streams of the same server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from retinue import Usage
from retinue.models.resilience import close_model
from retinue.testing import HeardTurn, KnownCall, KnownTurn, hear
from tests.models.server import serving, stream
from tests.models.streams import RENDER
from tests.models.test_conformance import connect

TURNS = {
    "text": KnownTurn(text=("Hel", "lo, ", "wörld 🦀", "\n")),
    "calls": KnownTurn(
        reasoning=("Let ", "me see."),
        text=("I look.",),
        calls=(KnownCall("call_1", "weather", ('{"city": ', '"Zürich"}')), KnownCall("call_2", "time", ("{}",))),
        stop_reason="tool_calls",
        usage=Usage(requests=1, input_tokens=4096, output_tokens=321, cached_tokens=3072),
    ),
    "cut": KnownTurn(text=("Once",), stop_reason="length"),
}

Read = tuple[str, list[tuple[str, str, str]], tuple[int, int, int], str]
"""Text, calls, tokens read, cached and written, and why it stopped, in the provider's words."""


# The clients take seconds to import, which only the process that runs these tests need spend.


async def read_chat(url: str) -> Read:
    from openai import AsyncOpenAI

    text, calls, tokens, stop = "", dict[int, list[str]](), (0, 0, 0), ""
    async with AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0) as client:
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True}
        chunks: Any = await client.chat.completions.create(**asked)
        async for chunk in chunks:
            if chunk.usage:
                used = chunk.usage
                tokens = (used.prompt_tokens, used.prompt_tokens_details.cached_tokens, used.completion_tokens)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                stop = choice.finish_reason or stop
                for call in choice.delta.tool_calls or []:
                    made = calls.setdefault(call.index, [call.id or "", call.function.name or "", ""])
                    made[2] += call.function.arguments or ""
    return text, [(a, b, c) for a, b, c in calls.values()], tokens, stop


async def read_responses(url: str) -> Read:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0) as client:
        text, response = "", None
        async with client.responses.stream(model="m", input="go") as events:
            each: Any = events
            async for event in each:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type in ("response.completed", "response.incomplete"):
                    response = event.response
                    break
    assert response is not None
    used = response.usage
    tokens = (used.input_tokens, used.input_tokens_details.cached_tokens, used.output_tokens)
    calls = [(item.call_id, item.name, item.arguments) for item in response.output if item.type == "function_call"]
    stop = response.incomplete_details.reason if response.incomplete_details else response.status
    return text, calls, tokens, stop


async def read_anthropic(url: str) -> Read:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(api_key="k", base_url=url, max_retries=0) as client:
        asked: Any = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "go"}]}
        async with client.messages.stream(**asked) as events:
            message: Any = await events.get_final_message()
    text = "".join([block.text for block in message.content if block.type == "text"])
    blocks = [block for block in message.content if block.type == "tool_use"]
    calls = [(block.id, block.name, json.dumps(block.input)) for block in blocks]
    used = message.usage
    cached = used.cache_read_input_tokens
    tokens = (used.input_tokens + cached + used.cache_creation_input_tokens, cached, used.output_tokens)
    return text, calls, tokens, message.stop_reason


SDKS: dict[str, Callable[[str], Any]] = {"chat": read_chat, "responses": read_responses, "anthropic": read_anthropic}
STOPS = {"end_turn": "stop", "completed": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
STOPS |= {"max_output_tokens": "length"}


def as_theirs(heard: HeardTurn) -> tuple[str, list[Any], tuple[int, int, int], str]:
    usage = heard.ends[0].usage
    tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    return heard.text, heard.called, tokens, heard.ends[0].stop_reason


@pytest.mark.parametrize("turn", TURNS.values(), ids=list(TURNS))
@pytest.mark.parametrize("wire", RENDER)
@pytest.mark.parametrize("size", [None, 3])
async def test_the_official_client_reads_the_same(wire: str, turn: KnownTurn, size: int | None) -> None:
    async with serving(stream(RENDER[wire](turn), size)) as server:
        theirs: Read = await SDKS[wire](server.url)
        model = connect(wire, server.url)
        ours = as_theirs(await hear(model))
        await close_model(model)
    text, calls, tokens, stop = theirs
    read = [(call_id, name, json.loads(arguments)) for call_id, name, arguments in calls]
    normal = STOPS.get(stop, stop)
    if wire == "responses" and read:
        normal = "tool_calls"  # the wire says "completed" in both cases
    assert ours == (text, read, tokens, normal)
    assert ours[0] == "".join(turn.text)


@pytest.mark.parametrize("wire", RENDER)
async def test_the_official_client_sends_what_we_send(wire: str) -> None:
    """The parts of a request that both have: the path, the key and the body they share."""
    async with serving(stream(RENDER[wire](TURNS["text"]))) as server:
        await SDKS[wire](server.url)
        model = connect(wire, server.url)
        await hear(model)
        await close_model(model)
        theirs, ours = server.asked
    assert (theirs.method, theirs.path) == (ours.method, ours.path)
    for header in ("content-type", "anthropic-version"):
        assert theirs.headers.get(header) == ours.headers.get(header)
    key = "x-api-key" if wire == "anthropic" else "authorization"
    assert ours.headers[key] == ("sk-test-key" if wire == "anthropic" else "Bearer sk-test-key")
    assert {key, "authorization"} & set(theirs.headers)
    assert set(theirs.body) <= set(ours.body) | {"text"}
