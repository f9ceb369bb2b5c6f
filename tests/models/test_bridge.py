"""What goes wrong behind the bridge is said in our words; what goes over it arrives."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import Agent, ConfigurationError, Message, ModelError, ModelRequest, RunStatus, Runtime
from retinue.errors import (
    ContextOverflow,
    ModelAccessDenied,
    ModelNotFound,
    ModelRateLimited,
    ModelRequestInvalid,
    ModelStreamBroken,
    ModelUnavailable,
)
from retinue.models import RetryPolicy, bridge_model, open_model
from retinue.testing import KnownCall, KnownTurn, hear
from tests.models.server import break_after, refuse, serving, stream
from tests.models.streams import chat
from tests.models.test_conformance import ONCE, their_model

HI = KnownTurn(text=("Hi", " there"))
OVERFLOW = {"error": {"message": "maximum context length is 10 tokens", "code": "context_length_exceeded"}}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {"error": {"message": "bad key"}}, ModelAccessDenied),
        (404, {"error": {"message": "no such model", "code": "model_not_found"}}, ModelNotFound),
        (400, {"error": {"message": "odd"}}, ModelRequestInvalid),
        (400, OVERFLOW, ContextOverflow),
        (429, {"error": {"message": "slow down"}}, ModelRateLimited),
        (500, {"error": {"message": "boom"}}, ModelUnavailable),
        (502, b"<html>bad gateway</html>", ModelUnavailable),
    ],
)
async def test_a_status_is_explained(status: int, body: Any, kind: type[ModelError]) -> None:
    async with serving(refuse(status, body)) as server, their_model("chat", server.url) as theirs:
        with pytest.raises(ModelError) as caught:
            await hear(bridge_model(theirs, ONCE))
    assert type(caught.value) is kind
    assert caught.value.status == status
    assert caught.value.model == "openai:gpt-4o"


async def test_no_key_gets_into_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-of-the-environment")
    said = {"error": {"message": "no such keys: sk-of-the-client, sk-of-the-environment"}}
    async with serving(refuse(401, said)) as server, their_model("chat", server.url) as theirs:
        theirs.client.api_key = "sk-of-the-client"
        with pytest.raises(ModelAccessDenied, match="no such keys") as caught:
            await hear(bridge_model(theirs, ONCE))
    assert "sk-of" not in str(caught.value)


async def test_a_broken_stream_begins_again() -> None:
    answers = (break_after(chat(HI)[:3]), refuse(503), stream(chat(HI)[:3]), stream(chat(HI)))
    async with serving(*answers) as server, their_model("chat", server.url) as theirs:
        model = bridge_model(theirs, RetryPolicy(attempts=4, first_delay=0.001))
        result = await Runtime([Agent("a", model)]).run("a", "go")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "Hi there"), result.error


async def test_an_answer_without_an_end_is_no_answer() -> None:
    async with serving(stream(chat(HI)[:3])) as server, their_model("chat", server.url) as theirs:
        with pytest.raises(ModelStreamBroken, match="openai:gpt-4o: the answer ended before it was complete"):
            await hear(bridge_model(theirs, ONCE))


async def test_a_model_without_an_address_need_not_say_its_end() -> None:
    from pydantic_ai.models.test import TestModel

    heard = await hear(bridge_model(TestModel(custom_output_text="Hi"), ONCE))
    assert heard.text == "Hi"


async def test_a_tool_can_be_demanded() -> None:
    from retinue import ToolDescriptor

    turn = KnownTurn(calls=(KnownCall("call_1", "look", ("{}",)),), stop_reason="tool_calls")
    look = ToolDescriptor("look", "look", "Look.")
    async with serving(stream(chat(turn))) as server, their_model("chat", server.url) as theirs:
        for choice in ("required", {"name": "look"}, "auto"):
            settings = {"tool_choice": choice, "temperature": 0, "max_tokens": 9, "stop": "."}
            asked = ModelRequest(messages=(Message.user("x"),), tools=(look,), settings=settings)
            heard = await hear(bridge_model(theirs, ONCE), asked)
            assert heard.called == [("call_1", "look", {})]
        bodies = [asked.body for asked in server.asked]
    assert bodies[0]["tool_choice"] == "required"
    assert bodies[0]["stop"] == ["."]
    assert bodies[0]["temperature"] == 0


async def test_only_models_of_theirs_are_taken() -> None:
    with pytest.raises(ConfigurationError, match="takes a model of pydantic-ai, not str"):
        bridge_model("openai:x")
    with pytest.raises(ConfigurationError, match="takes no base_url: use bridge_model"):
        open_model("deepseek:x", base_url="http://localhost/v1")
