"""The conformance suite of the `Model` port: run it over a model of your own.

A harness makes models that give known turns; how is up to it: a script, or a server that replays a stream.

    def harness(turns): ...            # an async context manager that gives a model which answers with these, in order

    @pytest.mark.parametrize("check", MODEL_CHECKS.values(), ids=list(MODEL_CHECKS))
    async def test_my_model(check):
        await check(harness)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from msgspec import Struct

from ..core.agents import Agent
from ..core.concurrency import cancel_all, running
from ..core.functions import tool
from ..core.messages import FilePart, ImagePart, Message, ReasoningPart, TextPart, ToolCall
from ..core.model import CallChunk, Model, ModelRequest, ReasoningChunk, Retrying, TextChunk, TurnEnd
from ..core.runs import RunStatus, Usage
from ..core.tools import ToolDescriptor
from ..runtime import Runtime


class KnownCall(Struct, frozen=True):
    """A call of a known turn; `arguments` are the pieces of its JSON."""

    id: str
    name: str
    arguments: tuple[str, ...] = ()

    @property
    def args(self) -> Any:
        text = "".join(self.arguments)
        return msgspec.json.decode(text) if text else {}


class KnownTurn(Struct, frozen=True, kw_only=True):
    """The answer that a model is made to give. A provider without reasoning may leave that out."""

    reasoning: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    calls: tuple[KnownCall, ...] = ()
    stop_reason: str = "stop"
    usage: Usage = Usage(requests=1, input_tokens=12, output_tokens=5)


ModelHarness = Callable[[Sequence[KnownTurn]], AbstractAsyncContextManager[Model]]
ModelCheck = Callable[[ModelHarness], Awaitable[None]]


class HeardTurn:
    """The answer of a model, assembled as the loop does it."""

    def __init__(self) -> None:
        self.text, self.reasoning, self.calls = "", "", dict[int, dict[str, Any]]()
        self.ends: list[TurnEnd] = []
        self.retries: list[Retrying] = []

    def add(self, chunk: Any) -> None:
        assert not self.ends, f"{chunk!r} came after the end of the turn"
        match chunk:
            case TextChunk():
                self.text += chunk.text
            case ReasoningChunk():
                self.reasoning += chunk.text
            case CallChunk():
                call = self.calls.setdefault(chunk.index, {"id": chunk.id, "name": chunk.name, "arguments": ""})
                call["arguments"] += chunk.arguments
            case TurnEnd():
                self.ends.append(chunk)
            case Retrying():
                self.retries.append(chunk)
                if chunk.restarts:
                    self.text, self.reasoning, self.calls = "", "", {}
            case _:
                raise AssertionError(f"{chunk!r} is not a chunk")

    @property
    def called(self) -> list[tuple[str, str, Any]]:
        """Return the calls in order: id, name and arguments."""
        return [
            (call["id"], call["name"], msgspec.json.decode(call["arguments"] or "{}"))
            for _, call in sorted(self.calls.items())
        ]


async def hear(model: Model, request: ModelRequest | None = None) -> HeardTurn:
    """Call a model and assemble its answer."""
    heard = HeardTurn()
    async for chunk in model.stream(request or ModelRequest(messages=(Message.user("go"),))):
        heard.add(chunk)
    return heard


def _same(heard: HeardTurn, turn: KnownTurn) -> None:
    assert heard.text == "".join(turn.text), f"text {heard.text!r}"
    assert heard.reasoning in ("".join(turn.reasoning), ""), f"reasoning {heard.reasoning!r}"
    expected = [(call.id, call.name, call.args) for call in turn.calls]
    assert heard.called == expected, f"calls {heard.called}"
    assert len(heard.ends) == 1, "a turn has one end"
    assert heard.ends[0].stop_reason == turn.stop_reason, f"stop reason {heard.ends[0].stop_reason!r}"


def _tool(name: str) -> ToolDescriptor:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    return ToolDescriptor(name, name, f"Does {name}.").with_parameters(schema)


_WEATHER = KnownCall("call_w1", "weather", ('{"ci', 'ty": "Zü', 'rich", "da', 'ys": 3}'))
_TIME = KnownCall("call_t2", "time", ('{"city": "Nuuk"}',))
_TOOLS = (_tool("weather"), _tool("time"))
_ASKED = ModelRequest(messages=(Message.system("Be brief."), Message.user("How is it there?")), tools=_TOOLS)

_PLAIN = KnownTurn(text=("Hello", ", ", "wor", "ld", "."))
_TURNS = {
    "plain text": _PLAIN,
    "text of all scripts and line ends": KnownTurn(
        text=("Zürich ", "日本", "語 🦀", "\n\n", 'data: {"x"}\r\n', '\u2028 \\ "')
    ),
    "white space is kept": KnownTurn(text=("  a", "  ", "\n", "b  ")),
    "reasoning before text": KnownTurn(reasoning=("First ", "this."), text=("Then that.",)),
    "a call": KnownTurn(calls=(_WEATHER,), stop_reason="tool_calls"),
    "text and two calls": KnownTurn(text=("Let me look.",), calls=(_WEATHER, _TIME), stop_reason="tool_calls"),
    "a call without arguments": KnownTurn(calls=(KnownCall("call_n", "time"),), stop_reason="tool_calls"),
    "usage with cached tokens": KnownTurn(
        text=("ok",),
        usage=Usage(requests=1, input_tokens=1200, output_tokens=7, cached_tokens=1024, cache_write_tokens=100),
    ),
    "an answer cut at its limit": KnownTurn(text=("Once upon",), stop_reason="length"),
}


def _check_turn(turn: KnownTurn) -> ModelCheck:
    async def check(harness: ModelHarness) -> None:
        async with harness([turn]) as model:
            heard = await hear(model, _ASKED)
        _same(heard, turn)
        usage = heard.ends[0].usage
        assert (usage.requests, usage.input_tokens, usage.output_tokens) == (
            1,
            turn.usage.input_tokens,
            turn.usage.output_tokens,
        ), f"usage {usage}"
        assert usage.cached_tokens == turn.usage.cached_tokens
        assert usage.cache_write_tokens in (turn.usage.cache_write_tokens, 0), "where the provider tells"

    return check


async def check_name(harness: ModelHarness) -> None:
    """A model has a name, and its repr shows no secret."""
    async with harness([_PLAIN]) as model:
        provider, colon, name = model.name.partition(":")
        assert provider and colon and name, model.name
        assert isinstance(model, Model)
        await hear(model)


async def check_asked_twice(harness: ModelHarness) -> None:
    """Turns are independent of each other."""
    second = KnownTurn(text=("Second.",))
    async with harness([_PLAIN, second]) as model:
        _same(await hear(model), _PLAIN)
        _same(await hear(model), second)


async def check_asked_at_once(harness: ModelHarness) -> None:
    """One model serves many concurrent calls."""
    async with harness([_PLAIN] * 8) as model:
        for heard in await asyncio.gather(*[hear(model) for _ in range(8)]):
            _same(heard, _PLAIN)


async def check_left_early(harness: ModelHarness) -> None:
    """After a stream is closed half-way, the model still works."""
    async with harness([_PLAIN, _PLAIN]) as model:
        chunks: Any = model.stream(_ASKED)
        assert isinstance(await anext(chunks), TextChunk)
        await chunks.aclose()
        _same(await hear(model), _PLAIN)


async def check_cancelled(harness: ModelHarness) -> None:
    """Cancelling the reader takes effect at once and is never swallowed."""
    async with harness([_PLAIN, _PLAIN]) as model:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in model.stream(_ASKED):
                begun.set()
                await asyncio.sleep(60)

        async with running(read()) as task:
            await begun.wait()
            assert await cancel_all([task], 5) and task.cancelled()
        _same(await hear(model), _PLAIN)


async def check_conversation(harness: ModelHarness) -> None:
    """A model accepts every kind of message, also signatures of other providers, and changes none of them."""
    image = ImagePart(data="aGk=", media_type="image/png")
    calls = (ToolCall("call_1", "weather", {"city": "Bern"}), ToolCall("call_2", "time", {}, "{broken"))
    messages = (
        Message.system("Be brief."),
        Message.user([TextPart("Look:"), image, FilePart(data="aGk=", media_type="text/plain", name="hi.txt")]),
        Message.assistant([ReasoningPart("Hm.", "elsewhere:proof"), TextPart("Let me see.")], calls),
        Message.tool("rain", tool_call_id="call_1", name="weather"),
        Message.tool([TextPart("see:"), image], tool_call_id="call_2", name="time"),
        Message.user("And now?"),
    )
    request = ModelRequest(messages=messages, tools=_TOOLS, settings={"temperature": 0.5, "max_tokens": 100})
    before = msgspec.json.encode(request)
    async with harness([_PLAIN]) as model:
        _same(await hear(model, request), _PLAIN)
    assert msgspec.json.encode(request) == before


async def check_run(harness: ModelHarness) -> None:
    """In a run the model makes a call and reads its result; the usage of both turns adds up."""

    @tool
    async def weather(city: str, days: int) -> str:
        """The weather."""
        return f"{days} days of sun in {city}"

    asked = KnownTurn(reasoning=("Look it up.",), calls=(_WEATHER,), stop_reason="tool_calls")
    async with harness([asked, KnownTurn(text=("Sun", "ny."))]) as model:
        result = await Runtime([Agent("a", model, "Be brief.", tools=[weather])]).run("a", "Weather in Zürich?")
    assert result.status is RunStatus.COMPLETED, result.error
    assert result.response == "Sunny."
    assert [message.text for message in result.messages if message.role == "tool"] == ["3 days of sun in Zürich"]
    assert (result.usage.requests, result.usage.input_tokens, result.usage.output_tokens) == (2, 24, 10)


MODEL_CHECKS: dict[str, ModelCheck] = {
    **{name: _check_turn(turn) for name, turn in _TURNS.items()},
    "it has a name": check_name,
    "asked twice": check_asked_twice,
    "asked at once": check_asked_at_once,
    "left early": check_left_early,
    "cancelled": check_cancelled,
    "a whole conversation": check_conversation,
    "in a run": check_run,
}
"""The checks by name."""
