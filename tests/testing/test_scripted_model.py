"""The scripted model is a product: it says what it is told, and notices when it is used wrongly."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import Agent, RunStatus, Runtime
from retinue.testing import ScriptedModel, ScriptError, call, fail, say, think


async def run(model: ScriptedModel, text: str = "go") -> Any:
    return await Runtime([Agent("a", model, "Sys.")]).run("a", text)


async def test_turns_are_said_in_order_and_requests_kept() -> None:
    model = ScriptedModel([[think("hm"), say("one "), say("two")]])
    result = await run(model)
    assert result.response == "one two"
    assert [str(m) for m in model.requests[0].messages] == ["system: Sys.", "user: go"]
    model.assert_consumed()


async def test_a_function_of_the_request_sync_or_async() -> None:
    async def later(request: Any) -> Any:
        await asyncio.sleep(0)
        return say(request.messages[-1].text.upper())

    assert (await run(ScriptedModel(later), "loud")).response == "LOUD"
    assert (await run(ScriptedModel(lambda request: say(str(len(request.messages)))))).response == "2"


async def test_an_exception_in_the_function_is_a_model_failure() -> None:
    def broken(request: Any) -> Any:
        raise AssertionError("expected something else")

    for model in (ScriptedModel(broken), ScriptedModel([fail(AssertionError("expected something else"))])):
        result = await run(model)
        assert (result.status, result.termination) == (RunStatus.FAILED, "error")
        assert "expected something else" in (result.error or "")
        assert len(model.requests) == 1


async def test_one_request_too_many_raises_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="has 1 turns and was asked once more"):
        await run(ScriptedModel([call("nothing")]))
    assert issubclass(ScriptError, AssertionError)


def test_turns_left_over_are_noticed() -> None:
    with pytest.raises(ScriptError, match="1 of 1 scripted turns were not asked for"):
        ScriptedModel([say("x")]).assert_consumed()


def test_chunks_must_make_the_text() -> None:
    with pytest.raises(ValueError, match="the chunks of"):
        say("abc", chunks=["a", "b"])
