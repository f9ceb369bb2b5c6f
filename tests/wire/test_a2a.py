"""A2A: the projection of a log onto a task, and what is read from messages."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import Agent, DataPart, FilePart, Message, Runtime
from retinue.core.events import RunFinished, RunStarted, TextDelta
from retinue.core.messages import ImagePart, ReasoningPart, TextPart
from retinue.core.results import SuspendTicket
from retinue.core.runs import RunResult, RunStatus
from retinue.core.state import PersistedState
from retinue.testing import ScriptedModel, call, say
from retinue.wire.a2a import (
    TaskProjection,
    parts_json,
    read_decisions,
    read_message,
    read_part,
    state_of,
)
from retinue.wire.a2a_budget import with_integers
from retinue.wire.a2a_card import card_json

from ..server.agents import boss


def collected(updates: list[dict[str, Any]]) -> tuple[Any, dict[str, str]]:
    """The status and the texts of artifacts that a client has after a stream."""
    status: Any = None
    texts: dict[str, str] = {}
    for update in updates:
        if "statusUpdate" in update:
            status = update["statusUpdate"]["status"]
            continue
        body = update["artifactUpdate"]
        name, text = body["artifact"]["artifactId"], body["artifact"]["parts"][0]["text"]
        texts[name] = texts[name] + text if body["append"] else text
    return status, texts


async def test_a_stream_adds_up_to_the_task_and_the_log_gives_the_same_task_again() -> None:
    async with Runtime([boss()]) as runtime:
        run = runtime.stream("boss", Message.user("pay", id="m1"))
        await run.result()
        first = TaskProjection(run.run_id, run.thread_id, 0.0)
        for event in await runtime.log(run.run_id).so_far():
            first(event)
        assert first.state == "TASK_STATE_INPUT_REQUIRED"
        answer = {"messageId": "m2", "parts": [{"data": {"approved": True}}]}
        await runtime.resume(run.run_id, read_decisions(answer, first.questions))
        events = await runtime.log(run.run_id).so_far()
    whole, later = (TaskProjection(run.run_id, run.thread_id, 0.0) for _ in range(2))
    status, texts = collected([update for event in events for update in whole(event)])
    task = whole.task()
    assert (status, texts) == (
        task["status"],
        {one["artifactId"]: one["parts"][0]["text"] for one in task["artifacts"]},
    )
    assert texts == {"answer": "boss: clerk: paid 3", "answer:tools:task_1": "clerk: paid 3"}
    for event in events:
        if not isinstance(event, TextDelta):  # a database keeps deltas apart, and drops them first
            later(event)
    assert later.task() == task
    assert whole(RunStarted(thread_id="t")) == []  # what comes after the end changes nothing
    assert whole.task() == task


def test_parts_go_both_ways_but_reasoning_stays() -> None:
    parts = (
        TextPart("a"),
        ReasoningPart("secret"),
        DataPart({"n": 1}),
        FilePart(data="AA==", media_type="text/plain", name="a.txt"),
        ImagePart(url="https://example.com/a.png"),
    )
    assert [read_part(one) for one in parts_json(parts)] == [one for one in parts if type(one) is not ReasoningPart]
    assert with_integers({"a": [1.0, 1.5, 1e300], "b": "1.0"}) == {"a": [1, 1.5, 1e300], "b": "1.0"}
    for bad in ({"parts": []}, {"parts": [{"text": " "}]}, {"parts": [{"mediaType": "text/plain"}]}):
        with pytest.raises(ValueError, match=r"empty|content"):
            read_message(bad)
    assert read_message({"messageId": "mine", "parts": [{"text": "hi"}]}) == Message.user("hi", id="mine")


def test_texts_of_a_message_are_separated() -> None:
    data = {"data": {"n": 1}}
    message = read_message({"parts": [{"text": "a"}, {"text": "b"}, data, {"text": "c"}]})
    assert message.text == "a\n\nb\n\nc"
    assert [type(part) for part in message.parts] == [TextPart, TextPart, DataPart, TextPart]
    (answer,) = read_decisions({"parts": [{"text": "a"}, {"text": "b"}]}, [question("q")]).values()
    assert answer.payload == "a\n\nb"


def question(path: str, schema: Any = None) -> dict[str, Any]:
    return {"path": path, "ticket": {"response_schema": schema}}


@pytest.mark.parametrize(
    ("parts", "questions", "expected"),
    [
        ([{"text": "yes"}], [question("a")], {"a": "yes"}),
        ([{"text": "yes"}], [question("a", {}), question("b")], {"b": "yes"}),
        ([{"text": "hm"}, {"data": {"x": 2.0}}], [question("a", {})], {"a": {"x": 2}}),
        (
            [{"data": {"decisions": {"a": {"action": "answer", "payload": 1.0}}}}],
            [question("a"), question("b")],
            {"a": 1},
        ),
        ([{"text": "yes"}], [question("a", {})], None),
        ([{"text": "yes"}], [question("a"), question("b")], None),
        ([{"data": True}], [question("a"), question("b")], None),
        ([{"data": 1}, {"data": 2}], [question("a")], None),
        ([{"data": {"decisions": {"a": {"action": "nonsense"}}}}], [question("a")], None),
        ([{"text": "yes"}], [], None),
    ],
)
def test_a_message_answers_what_it_can_name(parts: list[Any], questions: list[Any], expected: Any) -> None:
    given = {"messageId": "m", "parts": parts}
    if expected is None:
        with pytest.raises(ValueError, match=r"."):
            read_decisions(given, questions)
    else:
        assert {key: one.payload for key, one in read_decisions(given, questions).items()} == expected


def test_two_answers_with_one_message_id_are_two_decisions() -> None:
    given = {"messageId": "m", "parts": [{"text": "yes"}]}
    first, second = (read_decisions(given, [question("a")])["a"].id for _ in range(2))
    assert first != second
    assert first.endswith(":m")


def test_the_present_questions_of_a_run_are_asked() -> None:
    projection = TaskProjection("r", "t", 0.0)
    projection(RunStarted(thread_id="t", run_id="r"))
    projection(RunFinished(status=RunStatus.SUSPENDED, termination="suspended", run_id="r"))
    assert projection.state == "TASK_STATE_INPUT_REQUIRED"
    tickets = {"input_1": SuspendTicket("t1", "a2a:auth_required", "Log in", path=("x", "input_1"))}
    status = projection.ask(tickets)["statusUpdate"]["status"]
    assert (status["state"], status["message"]["parts"][0]) == ("TASK_STATE_AUTH_REQUIRED", {"text": "Log in"})
    assert list(read_decisions({"parts": [{"text": "done"}]}, projection.questions)) == ["x/input_1"]
    tickets["y"] = SuspendTicket("t2", "ask", "Which?")
    assert projection.ask(tickets)["statusUpdate"]["status"]["state"] == "TASK_STATE_INPUT_REQUIRED"


def result_with(status: RunStatus, **more: Any) -> RunResult[Any]:
    return RunResult(status=status, run_id="r", thread_id="t", state=PersistedState(), termination="", **more)


def test_states() -> None:
    assert state_of(RunStatus.FAILED, "blocked") == "TASK_STATE_REJECTED"
    assert state_of(RunStatus.TIMEOUT) == "TASK_STATE_FAILED"
    projection = TaskProjection("r", "t", 0.0)
    assert projection.settle(None) == projection.settle(result_with(RunStatus.SUSPENDED)) == []
    assert projection.settle(result_with(RunStatus.CANCELLED, error="gone"))
    assert projection.has_ended


def test_a_card_has_the_skills_of_an_agent() -> None:
    kid = Agent("kid", ScriptedModel([say("x")]), description="Looks.")
    agent = Agent("boss", ScriptedModel([call("x", {})]), subagents=[kid, "far"], description="Leads.")
    card = card_json(agent, "http://h/a2a/boss", "1", secured=False)
    assert [(one["name"], one["description"], one["tags"]) for one in card["skills"][:3]] == [
        ("boss", "Leads.", ["agent"]), ("kid", "Looks.", ["sub-agent"]), ("far", "far", ["sub-agent"])
    ]  # fmt: skip
    assert "securitySchemes" not in card
