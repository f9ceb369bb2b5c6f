"""Every model passes the same suite, over a real connection that delivers the stream in pieces of any size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue import Model
from retinue.models import RetryPolicy, bridge_model, open_model
from retinue.models.resilience import close_model
from retinue.testing import (
    MODEL_CHECKS,
    KnownCall,
    KnownTurn,
    ModelCheck,
    ModelHarness,
    ScriptedModel,
    call,
    hear,
    say,
    think,
)
from tests.models.server import serving, split, stream
from tests.models.streams import RENDER

from ..effort import share

ONCE = RetryPolicy(attempts=1, patience=0)
NAMES = {"chat": "openai-chat:m", "responses": "openai-responses:m", "anthropic": "anthropic:m"}


def connect(wire: str, url: str, **options: Any) -> Model:
    base = url if wire == "anthropic" else f"{url}/v1"
    return open_model(NAMES[wire], base_url=base, api_key="sk-test-key", **{"retry": ONCE, **options})


def wired(wire: str, size: int | None) -> ModelHarness:
    @asynccontextmanager
    async def harness(turns: Sequence[KnownTurn]) -> AsyncIterator[Model]:
        async with serving(*[stream(RENDER[wire](turn), size) for turn in turns]) as server:
            model = connect(wire, server.url)
            yield model
            await close_model(model)

    return harness


def bridged(wire: str) -> ModelHarness:
    @asynccontextmanager
    async def harness(turns: Sequence[KnownTurn]) -> AsyncIterator[Model]:
        async with serving(*[stream(RENDER[wire](turn)) for turn in turns]) as server:
            async with their_model(wire, server.url) as model:
                yield bridge_model(model, ONCE)

    return harness


@asynccontextmanager
async def their_model(wire: str, url: str) -> AsyncIterator[Any]:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if wire == "anthropic":
        async with AsyncAnthropic(api_key="k", base_url=url, max_retries=0) as client:
            yield AnthropicModel("claude-test-1", provider=AnthropicProvider(anthropic_client=client))
    else:
        async with AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0) as client:
            yield OpenAIChatModel("gpt-4o", provider=OpenAIProvider(openai_client=client))


@asynccontextmanager
async def scripted(turns: Sequence[KnownTurn]) -> AsyncIterator[Model]:
    script: list[Any] = []
    for turn in turns:
        said = say("".join(turn.text), turn.text, turn.usage, turn.stop_reason)
        calls = [call(each.name, "".join(each.arguments), each.id) for each in turn.calls]
        script.append([*map(think, turn.reasoning), said, *calls])
    model = ScriptedModel(script)
    yield model


HARNESSES: dict[str, ModelHarness] = {
    "scripted": scripted,
    **{f"{wire}-{size or 'events'}": wired(wire, size) for wire in RENDER for size in (None, 1, 7)},
    "bridge-chat": bridged("chat"),
    "bridge-anthropic": bridged("anthropic"),
}


@pytest.mark.parametrize("check", MODEL_CHECKS.values(), ids=list(MODEL_CHECKS))
@pytest.mark.parametrize("harness", HARNESSES.values(), ids=list(HARNESSES))
async def test_conformance(harness: ModelHarness, check: ModelCheck) -> None:
    await check(harness)


@pytest.mark.parametrize("wire", RENDER)
async def test_split_at_every_position(wire: str) -> None:
    calls = (KnownCall("call_1", "f", ('{"a": "', 'é"}')),)
    turn = KnownTurn(reasoning=("hm",), text=("Zü", "ri🦀"), calls=calls, stop_reason="tool_calls")
    events = RENDER[wire](turn)
    places = range(1, len(b"".join(events)), share(1, 7))
    async with serving(*[split(events, at) for at in places]) as server:
        model = connect(wire, server.url)
        for at in places:
            heard = await hear(model)
            assert (heard.text, heard.reasoning) == ("Züri🦀", "hm"), at
            assert heard.called == [("call_1", "f", {"a": "é"})], at
            assert heard.ends[0].stop_reason == "tool_calls"
        await close_model(model)
        assert server.connections == 1, "the connection is used again"
