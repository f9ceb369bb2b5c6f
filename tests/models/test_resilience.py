"""Servers that misbehave, and what becomes of a run that asks them: an event for each setback, and no text twice."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import pytest
from inline_snapshot import snapshot

from retinue import (
    Agent,
    ConfigurationError,
    Message,
    Model,
    ModelRequest,
    RunResult,
    RunStatus,
    Runtime,
    ToolContext,
    run_streaming_subagent,
    tool,
)
from retinue.errors import ModelRateLimited, ModelUnavailable
from retinue.models import FallbackModel, RetryPolicy
from retinue.models.refusals import retry_after
from retinue.models.resilience import ResilientModel, close_model
from retinue.testing import KnownCall, KnownTurn, ScriptedModel, call, fail, hear, say
from tests.models.server import Answer, Reply, Server, break_after, hang_after, refuse, serving, stream
from tests.models.streams import RENDER, chat
from tests.models.test_conformance import connect
from tests.story import check_order, story

FAST = RetryPolicy(attempts=3, first_delay=0.001, max_delay=0.002)
HELLO = KnownTurn(text=("Hel", "lo"))
WHOLE = KnownTurn(text=("Good", " day"))
HALF_A_CALL = KnownTurn(
    text=("Look. ",), calls=(KnownCall("call_1", "work", ('{"x": ', "1}")),), stop_reason="tool_calls"
)


def patience(hangs: bool) -> float:
    """Seconds of silence that a model bears: only a server that hangs is given up, however busy the machine is."""
    return 0.5 if hangs else 3600.0


@asynccontextmanager
async def served(*answers: Answer, retry: RetryPolicy = FAST, **options: Any) -> AsyncIterator[tuple[Server, Model]]:
    async with serving(*answers) as server:
        model = connect("chat", server.url, retry=retry, **options)
        yield server, model
        await close_model(model)


async def run(model: Model, **options: Any) -> tuple[list[Any], RunResult]:
    """The events of a run, without what every run has, and its result."""
    running = Runtime([Agent("a", model, **options)]).stream("a", "go")
    events: list[Any] = [event async for event in running]
    check_order(events)
    return events, await running.result()


def setbacks(events: list[Any]) -> list[tuple[str, bool, bool]]:
    """The error events: code, whether it is the end, whether what was said counts no more."""
    return [(e.code, e.fatal, e.dropped_message_id is not None) for e in events if e.kind == "error"]


@pytest.mark.parametrize("wire", RENDER)
@pytest.mark.parametrize("ends", [break_after, hang_after])
async def test_an_answer_that_has_said_its_end_is_whole(wire: str, ends: Any) -> None:
    events = [event for event in RENDER[wire](HELLO) if b"[DONE]" not in event and b"message_stop" not in event]
    async with serving(ends(events)) as server:
        model = connect(wire, server.url, idle_timeout=patience(ends is hang_after))
        told, result = await run(model)
        await close_model(model)
    assert (result.response, setbacks(told), len(server.asked)) == ("Hello", [], 1)


@pytest.mark.parametrize(("reason", "code"), [("refusal", "refused"), ("length", "output_truncated")])
async def test_an_answer_that_came_is_no_reason_to_fall_back(reason: str, code: str) -> None:
    second = ScriptedModel([say("never")])
    events, result = await run(FallbackModel(ScriptedModel([say("No", stop_reason=reason)]), second))
    assert (result.status, setbacks(events), second.requests) == (RunStatus.FAILED, [(code, True, False)], [])


def counted(events: list[Any]) -> str:
    """The text a reader has who drops what counts no more."""
    said: list[Any] = []
    for event in events:
        if event.kind == "text_delta":
            said.append(event)
        elif event.kind == "error" and event.dropped_message_id:
            said = [delta for delta in said if delta.message_id != event.dropped_message_id]
    return "".join([delta.delta for delta in said])


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (stream([]), "stream_broken"),
        (break_after([]), "stream_broken"),
        (break_after([b": nothing yet\n\n"]), "stream_broken"),
        (hang_after(), "timeout"),
        (hang_after(head=False), "timeout"),
    ],
)
async def test_before_anything_was_said_it_is_asked_again(answer: Answer, code: str) -> None:
    async with served(answer, answer, stream(chat(HELLO)), idle_timeout=patience(code == "timeout")) as (server, model):
        events, result = await run(model)
    assert (result.status, result.response) == (RunStatus.COMPLETED, "Hello")
    assert setbacks(events) == [(code, False, False)] * 2
    assert len(server.asked) == 3
    assert server.asked[0].body == server.asked[2].body


@pytest.mark.parametrize("status", [429, 500, 503, 529])
async def test_a_request_that_is_refused_waits_and_costs_no_attempt(status: int) -> None:
    once = RetryPolicy(attempts=1, first_delay=0.001, max_delay=0.002)
    async with served(*[refuse(status)] * 3, stream(chat(HELLO)), retry=once) as (server, model):
        events, result = await run(model)
    assert (result.status, result.response, setbacks(events)) == (RunStatus.COMPLETED, "Hello", [])
    assert len(server.asked) == 4
    assert server.asked[0].body == server.asked[3].body
    assert result.usage.waited > 0


@pytest.mark.parametrize("status", [429, 503])
async def test_patience_ends(status: int) -> None:
    hasty = RetryPolicy(first_delay=0.001, max_delay=0.002, patience=0.05)
    async with served(refuse(status), retry=hasty) as (server, model):
        events, result = await run(model)
    assert result.status is RunStatus.FAILED
    assert "waited for as long as RetryPolicy(patience=0.05) allows" in (result.error or "")
    assert len(setbacks(events)) == 1
    assert len(server.asked) > 1


@pytest.mark.parametrize("code", ["insufficient_quota", "billing_hard_limit_reached"])
async def test_an_account_without_credit_is_not_waited_for(code: str) -> None:
    body = {"error": {"message": "You exceeded your current quota", "type": code, "code": code}}
    async with served(refuse(429, body)) as (server, model):
        events, _ = await run(model)
    assert (setbacks(events), len(server.asked)) == ([("access_denied", True, False)], 1)


@pytest.mark.parametrize("breaks", [break_after, stream, hang_after], ids=["breaks", "ends", "hangs"])
async def test_an_answer_that_stops_half_way_begins_again_under_a_new_id(breaks: Any) -> None:
    idle = patience(breaks is hang_after)
    async with served(breaks(chat(HELLO)[:3]), stream(chat(WHOLE)), idle_timeout=idle) as (_, model):
        events, result = await run(model)
    assert result.response == "Good day" == counted(events)
    assert [message.text for message in result.messages] == ["go", "Good day"]
    deltas = [event for event in events if event.kind == "text_delta"]
    first, second = deltas[0].message_id, deltas[-1].message_id
    assert [(delta.delta, delta.message_id) for delta in deltas] == [("Hel", first), ("Good", second), (" day", second)]
    assert first != second
    error = next(event for event in events if event.kind == "error")
    assert (error.dropped_message_id, error.retry_model, error.fatal) == (first, "openai-chat:m", False)
    assert result.messages[-1].id == second


async def test_the_whole_story_of_half_a_tool_call() -> None:
    @tool
    async def work(x: int) -> str:
        """Work."""
        return f"done {x}"

    half = chat(HALF_A_CALL)[:5]
    async with served(break_after(half), stream(chat(HALF_A_CALL)), stream(chat(WHOLE))) as (_, model):
        events, result = await run(model, tools=[work])
    lines = [re.sub("call_1_[0-9a-f]{8}", "call_new", line) for line in story(events)]
    assert [line for line in lines if not line.startswith("error")] == snapshot(
        [
            "run_started",
            "step_started 1",
            "text_delta 'Look. '",
            "tool_call_started call_1 work",
            "tool_call_args_delta call_1 '{\"x\": '",
            "tool_call_finished call_1 cancelled 'cancelled: the model did not finish asking for it'",
            "text_delta 'Look. '",
            "tool_call_started call_new work",
            "tool_call_args_delta call_new '{\"x\": '",
            "tool_call_args_delta call_new '1}'",
            "inference_finished tool_calls",
            "tool_call_ready call_new {'x': 1}",
            "tool_call_finished call_new succeeded 'done 1'",
            "step_finished 1",
            "step_started 2",
            "text_delta Good",
            "text_delta ' day'",
            "inference_finished stop",
            "step_finished 2",
            "run_finished completed natural 'Good day' None",
        ]
    )
    assert [m.text for m in result.messages] == ["go", "Look. ", "done 1", "Good day"]


async def test_a_stream_that_breaks_again_and_again_fails_with_what_it_said_last() -> None:
    async with served(break_after(chat(HELLO)[:3])) as (server, model):
        events, result = await run(model)
    assert (result.status, result.termination) == (RunStatus.FAILED, "error")
    assert (result.error or "").startswith("ModelStreamBroken: openai-chat:m: the connection to http://127.0.0.1")
    assert setbacks(events) == [("stream_broken", False, True)] * 2 + [("stream_broken", True, False)]
    assert result.response == "Hel" == counted(events)
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_what_cannot_get_better_is_asked_once(status: int) -> None:
    async with served(refuse(status)) as (server, model):
        events, _ = await run(model)
    assert len(server.asked) == 1
    assert len(setbacks(events)) == 1


@pytest.mark.parametrize("header", ["retry-after: 0.3", "retry-after-ms: 300"])
async def test_retry_after_is_obeyed(header: str) -> None:
    now = asyncio.get_running_loop().time
    async with served(refuse(429, b"", "application/json", header), stream(chat(HELLO))) as (_, model):
        began = now()
        assert (await hear(model)).text == "Hello"
        assert now() - began >= 0.3


def test_the_bounds_of_retry_after() -> None:
    later, earlier = formatdate(time.time() + 25, usegmt=True), formatdate(time.time() - 25, usegmt=True)
    read = {given: retry_after({"retry-after": given}) for given in (later, earlier, "-1", "1e9", "nan", "soon", "0")}
    assert 20 < (read.pop(later) or 0) <= 25
    assert read == {earlier: 1.0, "-1": 1.0, "1e9": 1e9, "nan": None, "soon": None, "0": 0.0}


async def test_a_server_that_wants_to_be_left_alone_for_long_is_not_waited_for() -> None:
    async with served(refuse(429, b"", "application/json", "retry-after: 3600")) as (server, model):
        with pytest.raises(ModelRateLimited) as caught:
            await hear(model)
        assert caught.value.retry_after == 3600
        assert "it asks to wait 3600 s, more than RetryPolicy(patience=600)" in str(caught.value)
        assert len(server.asked) == 1


@pytest.mark.parametrize("header", ["retry-after: soon", "retry-after: -5", "retry-after: ", "retry-after: 1e999"])
async def test_a_retry_after_that_makes_no_sense_is_not_one(header: str) -> None:
    async with served(refuse(429, b"", "application/json", header), stream(chat(HELLO))) as (_, model):
        assert (await hear(model)).text == "Hello"


def test_pauses_grow_are_bounded_and_differ() -> None:
    policy, error = RetryPolicy(attempts=8), ModelUnavailable("x")
    pauses = [policy.delay(attempt, error) or 0 for attempt in range(1, 8)]
    for pause, whole in zip(pauses, (0.5, 1, 2, 4, 8, 16, 30), strict=True):
        assert whole / 2 <= pause <= whole
    assert policy.delay(8, error) is None
    assert len({policy.delay(3, error) for _ in range(20)}) > 10
    with pytest.raises(ConfigurationError, match="attempts must be at least 1"):
        RetryPolicy(attempts=0)


async def test_a_pause_can_be_cancelled() -> None:
    slow = RetryPolicy(first_delay=30)
    async with served(break_after([]), retry=slow) as (_, model):
        running = Runtime([Agent("a", model)]).stream("a", "go")
        async for event in running:
            if event.kind == "error":
                break
        await running.cancel()
        assert (await running.result()).status is RunStatus.CANCELLED


async def test_fallback_when_a_model_fails() -> None:
    async with served(refuse(401)) as (_, first), served(stream(chat(HELLO))) as (_, second):
        events, result = await run(FallbackModel(first, second))
    assert result.response == "Hello"
    assert setbacks(events) == [("access_denied", False, False)]
    assert [event.model for event in events if event.kind == "inference_finished"] == ["openai-chat:m"]


async def test_fallback_half_way_tells_who_answered() -> None:
    async with served(break_after(chat(HELLO)[:3])) as (_, first):
        second = ScriptedModel([say("From the second.")], name="second")
        events, result = await run(FallbackModel(first, second))
    assert result.response == "From the second." == counted(events)
    assert setbacks(events) == [("stream_broken", False, True)] * 3
    finished = next(event for event in events if event.kind == "inference_finished")
    assert finished.model == "testing:second"


async def test_when_all_fail_the_last_one_tells_why() -> None:
    def broken(text: str) -> ScriptedModel:
        return ScriptedModel([fail(ModelUnavailable(text, "testing:x"))])

    model = FallbackModel(broken("one"), broken("two"))
    events, result = await run(model)
    assert result.error == "ModelUnavailable: testing:x: two"
    assert setbacks(events) == [("unavailable", False, False), ("unavailable", True, False)]
    with pytest.raises(ConfigurationError, match="at least two"):
        FallbackModel(broken("one"))


async def test_an_error_of_our_own_is_no_reason_to_ask_another() -> None:
    first, second = ScriptedModel([fail(RuntimeError("a bug"))]), ScriptedModel([say("never")])
    _, result = await run(FallbackModel(first, second))
    assert result.error == "RuntimeError: a bug"
    assert second.requests == []


async def test_fallback_leaves_a_provider_that_makes_it_wait() -> None:
    async with served(refuse(429, b"", "application/json", "retry-after: 30")) as (server, first):
        async with served(stream(chat(HELLO))) as (_, second):
            model = FallbackModel(first, second)
            seen = [setbacks((await run(model))[0]) for _ in range(2)]
    assert seen == [[("rate_limited", False, False)]] * 2
    assert len(server.asked) == 2


@pytest.mark.parametrize("after", [-1, float("nan")])
def test_fallback_waits_for_a_number_of_seconds(after: float) -> None:
    with pytest.raises(ConfigurationError, match="after is a number of seconds"):
        FallbackModel(ScriptedModel([]), ScriptedModel([]), after=after)


# --- answers that are not whole, though the server says so properly


@pytest.mark.parametrize("wire", RENDER)
async def test_truncated_output_fails_and_keeps_its_text(wire: str) -> None:
    turn = KnownTurn(text=("Once upon",), stop_reason="length")
    async with serving(stream(RENDER[wire](turn))) as server:
        model = connect(wire, server.url)
        events, result = await run(model)
        await close_model(model)
    assert (result.status, result.response) == (RunStatus.FAILED, "Once upon")
    assert (result.error or "").startswith("OutputTruncated: ")
    assert "raise max_tokens in the agent's settings" in (result.error or "")
    assert setbacks(events) == [("output_truncated", True, False)]
    assert result.usage.output_tokens == 5


@pytest.mark.parametrize("wire", RENDER)
async def test_a_refusal_fails_with_its_words(wire: str) -> None:
    turn = KnownTurn(text=("I cannot help with that.",), stop_reason="refusal")
    async with serving(stream(RENDER[wire](turn))) as server:
        model = connect(wire, server.url)
        events, result = await run(model)
        await close_model(model)
    assert (result.error or "").startswith("ModelRefused: ")
    assert "the model declined to answer: I cannot help with that." in (result.error or "")
    assert setbacks(events) == [("refused", True, False)]


async def test_a_tool_call_cut_at_the_limit_is_given_back_to_the_model() -> None:
    made: list[Any] = []

    @tool
    async def work(x: int = 0) -> str:
        """Work."""
        made.append(x)
        return "done"

    for pieces in ((), ('{"x": ',), ('{"x": 1',)):
        turn = KnownTurn(calls=(KnownCall("call_1", "work", pieces),), stop_reason="length")
        async with served(stream(chat(turn)), stream(chat(WHOLE))) as (_, model):
            events, result = await run(model, tools=[work])
        assert result.response == "Good day"
        assert setbacks(events) == [("output_truncated", False, False)]
        assert result.messages[2].text.startswith("invalid_arguments: the arguments are not a JSON object")
    assert made == []


async def test_context_overflow_says_what_to_do() -> None:
    body = {"error": {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"}}
    async with served(refuse(400, body)) as (server, model):
        events, result = await run(model)
    assert (result.error or "").startswith("ContextOverflow: openai-chat:m: the conversation is longer than the model")
    assert setbacks(events) == [("context_overflow", True, False)]
    assert len(server.asked) == 1


# --- who reads the text of others


async def test_text_that_counts_no_more_is_in_nobodys_whole() -> None:
    async with served(break_after(chat(HELLO)[:3]), stream(chat(WHOLE))) as (_, model):
        child = Agent("child", model)

        @tool
        async def ask(ctx: ToolContext) -> str:
            """Ask."""
            return (await run_streaming_subagent(ctx, child, "go")).content

        parent = Agent("parent", ScriptedModel([call("ask"), say("ok")]), tools=[ask])
        running = Runtime([parent]).stream("parent", "go")
        texts = [await each.text async for each in running.children]
        result = await running.result()
    assert texts == ["Good day"]
    assert [message.text for message in result.messages if message.role == "tool"] == ["Good day"]


async def test_a_model_that_is_no_model_of_ours_can_be_wrapped() -> None:
    script = ScriptedModel([fail(ModelUnavailable("x")), say("ok")])
    heard = await hear(ResilientModel(script, FAST), ModelRequest(messages=(Message.user("hi"),)))
    assert (heard.text, len(heard.retries)) == ("ok", 1)


async def test_a_hiccup_felt_by_many_fails_none() -> None:
    async with served(*[refuse(503)] * 20, stream(chat(HELLO))) as (server, model):
        heard = await asyncio.gather(*[hear(model) for _ in range(20)])
    assert {each.text for each in heard} == {"Hello"}
    assert len(server.asked) == 40


async def test_leaving_a_silent_stream_takes_no_time() -> None:
    async with served(hang_after(chat(HELLO)[:3])) as (_, model):
        chunks: Any = model.stream(ModelRequest(messages=(Message.user("hi"),)))
        assert (await anext(chunks)).text == "Hel"
        await chunks.aclose()


async def test_a_cancelled_run_closes_its_connection() -> None:
    left = asyncio.Event()

    async def watch(reply: Reply) -> None:
        await reply.head()
        for piece in chat(HELLO)[:3]:
            await reply.piece(piece)
        while not reply.writer.transport.is_closing():
            reply.writer.write(b"3\r\n:\n\n\r\n")
            await asyncio.sleep(0.01)
        left.set()

    async with served(watch) as (_, model):
        running = Runtime([Agent("a", model)]).stream("a", "go")
        async for event in running:
            if event.kind == "text_delta":
                break
        await running.cancel()
        async with asyncio.timeout(90):
            await left.wait()
        assert (await running.result()).status is RunStatus.CANCELLED
