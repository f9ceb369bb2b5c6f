"""Structured answers, handoff and front-end tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import pytest
from pydantic import BaseModel

from retinue import (
    Agent,
    Decision,
    Plugin,
    Registrar,
    RunStatus,
    Runtime,
    StateCommand,
    StateKey,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.plugins import TransferTo
from retinue.testing import RecordingSink, ScriptedModel, call, say
from retinue.tools import FrontEndTool


@dataclass
class Verdict:
    guilty: bool
    years: int = 0


class Report(BaseModel):
    title: str
    findings: list[str]


class Point(TypedDict):
    x: int


async def answer(kind: Any, *turns: Any, **options: Any) -> Any:
    model = ScriptedModel(turns)
    result = await Runtime([Agent("a", model, "Judge.", output=kind, **options)]).run("a", "go")
    return result, model


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Verdict, '{"guilty": true, "years": 3}', Verdict(True, 3)),
        (Verdict, 'Here it is:\n```json\n{"guilty": false}\n```\nGood luck.', Verdict(False)),
        (Report, '{"title": "t", "findings": ["a"]}', Report(title="t", findings=["a"])),
        (Point, '{"x": 1}', {"x": 1}),
        (list[int], "[1, 2]", [1, 2]),
        (int, "42", 42),
        (str, "just text", "just text"),
    ],
)
async def test_the_answer_is_typed(kind: Any, text: str, value: Any) -> None:
    result, model = await answer(kind, say(text))
    assert (result.status, result.output, result.response) == (RunStatus.COMPLETED, value, text)
    assert model.requests[0].output_schema is not None
    assert model.requests[0].messages[0].text.startswith("Judge.\n\nGive your final answer as JSON only")


async def test_a_wrong_answer_is_fed_back_and_may_be_corrected() -> None:
    sink = RecordingSink()
    model = ScriptedModel([say("guilty!"), say('{"guilty": "yes"}'), say('{"guilty": true}')])
    runtime = Runtime([Agent("a", model, output=Verdict)])
    result = await runtime.run("a", "go", sinks=[sink])
    assert (result.status, result.output, result.steps) == (RunStatus.COMPLETED, Verdict(True), 3)
    assert "it is not JSON" in model.requests[1].messages[-1].text
    assert "$.guilty" in model.requests[2].messages[-1].text
    assert [e.code for e in sink.of("error")] == ["output_invalid"] * 2
    assert sink.of("run_finished")[0].output == {"guilty": True, "years": 0}
    assert [e.kind for e in sink.events if e.kind.startswith("step")] == ["step_started", "step_finished"] * 3


async def test_it_is_not_fed_back_for_ever() -> None:
    result, _ = await answer(Verdict, *[say("no")] * 4)
    assert (result.status, result.termination, result.output, result.response) == (
        RunStatus.FAILED,
        "error",
        None,
        "no",
    )
    assert "the answer does not fit the output type: it is not JSON" in result.error


@pytest.mark.parametrize(
    ("text", "came"), [("no", "'no'"), ("```json\n```", "empty"), ('{"guilty": tr', "'{\"guilty\": tr'")]
)
async def test_an_answer_that_is_not_json_is_quoted_with_what_is_expected(text: str, came: str) -> None:
    result, model = await answer(Verdict, say(text), say('{"guilty": true}'))
    problem = f"it is not JSON: the answer is {came}, expected is JSON that fits the schema"
    assert problem in model.requests[1].messages[-1].text
    assert result.output == Verdict(True)


def test_an_output_type_without_a_schema_is_refused_at_once() -> None:
    class Odd:
        def __init__(self, x: int) -> None: ...

    with pytest.raises(ValueError, match="agent 'a': output type .*Odd.* has no JSON Schema"):
        Agent("a", output=Odd)


# -- handoff

log: StateKey[list[str], str] = StateKey("log", list[str], update=str, reduce=lambda a, b: [*a, b], persistent=True)


class Log(Plugin):
    name = "log"

    def register(self, r: Registrar) -> None:
        r.key(log)


@tool
async def refund(amount: int) -> ToolOutput:
    """Refund."""
    return ToolOutput(f"refunded {amount}", update={log: f"refund {amount}"})


async def test_handoff_there_and_back() -> None:
    clerk_model = ScriptedModel([[say("One moment."), call("transfer_to_cashier", {"reason": "money"})], say("Bye.")])
    cashier_model = ScriptedModel([call("refund", {"amount": 5}), call("transfer_to_clerk", {})])
    cashier = Agent("cashier", cashier_model, "You refund.", [refund], [Log()], handoffs=["clerk"])
    clerk = Agent("clerk", clerk_model, "You greet.", plugins=[Log()], handoffs=[cashier])
    runtime = Runtime([clerk])
    run = runtime.stream("clerk", "My money!", thread_id="t")
    events: list[Any] = [e async for e in run]
    result = await run.result()
    assert (result.status, result.response, result.steps) == (RunStatus.COMPLETED, "Bye.", 4)
    assert result.state[log] == ["refund 5"]
    handoffs = [(e.agent, e.to_agent, e.reason) for e in events if e.kind == "handoff"]
    assert handoffs == [("clerk", "cashier", "money"), ("cashier", "clerk", "")]
    assert [e.agent for e in events if e.kind == "step_started"] == ["clerk", "cashier", "cashier", "clerk"]
    assert {e.run_id for e in events} == {run.run_id}
    first = cashier_model.requests[0]
    assert [m.text for m in first.messages] == ["You refund.", "My money!", "One moment.", "cashier goes on from here."]
    assert [t.name for t in first.tools] == ["refund", "transfer_to_clerk"]
    assert clerk_model.requests[1].messages[0].text == "You greet."


async def test_handoffs_that_go_round_in_circles_are_refused() -> None:
    asked = {"a": 0, "b": 0}

    def pass_on(me: str, to: str) -> Any:
        def answer(request: Any) -> Any:
            asked[me] += 1
            refused = request.messages[-1].text.startswith("The handoff to")
            return say(f"{me} gives in") if refused else call(f"transfer_to_{to}")

        return ScriptedModel(answer)

    b = Agent("b", pass_on("b", "a"), handoffs=["a"])
    a = Agent("a", pass_on("a", "b"), handoffs=[b])
    result = await Runtime([a]).run("a", "go")
    assert (result.status, result.response) == (RunStatus.COMPLETED, "a gives in")
    assert asked == {"a": 4, "b": 2}


async def test_a_handoff_to_nobody_is_refused_in_words() -> None:
    @tool
    async def pass_on() -> ToolOutput:
        """Hand over."""
        return ToolOutput.with_command(ToolResult.success("ok"), StateCommand().schedule(TransferTo("ghost")))

    model = ScriptedModel([call("pass_on"), say("alone then")])
    result = await Runtime([Agent("a", model, tools=[pass_on])]).run("a", "go")
    assert result.response == "alone then"
    assert "refused: unknown agent 'ghost'" in model.requests[1].messages[-1].text


# -- front-end tools


async def test_a_front_end_tool_takes_the_clients_answer_as_its_result() -> None:
    parameters = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
    pick = FrontEndTool("pick_colour", "Let the user pick a colour.", parameters)
    model = ScriptedModel([call("pick_colour", {"question": "Which?"}, id="c1"), say("Nice.")])
    runtime = Runtime([Agent("a", model, tools=[pick])])
    waiting = await runtime.run("a", "go")
    ticket = waiting.suspended["c1"]
    assert (ticket.action, ticket.parameters) == ("tool:pick_colour", {"question": "Which?"})
    result = await runtime.resume(waiting.run_id, {ticket.id: Decision.resume({"colour": "red"})})
    assert [m.text for m in result.messages if m.role == "tool"] == ['{"colour":"red"}']
