"""Limits refuse the next call in words the model can read, and then end the run."""

from __future__ import annotations

from typing import Any, cast

import pytest

from retinue import Agent, Limits, RunResult, RunStatus, Runtime, Usage, tool
from retinue.testing import ScriptedModel, call, say

spent = Usage(requests=1, input_tokens=60, output_tokens=40, cost=0.5)


@tool
async def work() -> str:
    """Work."""
    return "worked"


async def run_with(limits: Limits, *turns: object) -> tuple[RunResult, ScriptedModel]:
    model = ScriptedModel(cast(Any, turns))
    return await Runtime([Agent("a", model, tools=[work], limits=limits)]).run("a", "go"), model


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (Limits(steps=1), "steps"),
        (Limits(tokens=100), "tokens"),
        (Limits(cost=0.5), "cost"),
        (Limits(seconds=0), "seconds"),
    ],
)
async def test_the_model_may_answer_after_a_refusal(limits: Limits, name: str) -> None:
    if name == "seconds":
        result, _ = await run_with(limits)
        assert (result.status, result.termination, result.steps) == (RunStatus.FAILED, "limit:seconds", 0)
        return
    result, model = await run_with(limits, [say("x", usage=spent), call("work")], say("what I have"))
    assert (result.status, result.response, result.termination) == (RunStatus.COMPLETED, "what I have", "natural")
    assert model.requests[1].messages[-1].text.startswith(f"[limit:{name}] the limit on {name} is reached")


async def test_a_model_that_does_not_listen_is_stopped() -> None:
    turns = [[say("x", usage=spent), call("work")], [say("more"), call("work")]]
    result, _ = await run_with(Limits(tokens=100), *turns)
    assert (result.status, result.termination, result.response) == (RunStatus.FAILED, "limit:tokens", "more")
    assert [m.role for m in result.messages] == ["user", "assistant", "tool", "assistant", "tool"]


async def test_an_answer_that_does_not_fit_is_not_asked_for_again() -> None:
    model = ScriptedModel([say("no JSON", usage=spent)] * 3)
    result = await Runtime([Agent("a", model, output=list[int])]).run("a", "go", limits=Limits(cost=0.5))
    assert (result.status, result.termination, len(model.requests)) == (RunStatus.FAILED, "limit:cost", 1)
    assert "does not fit the output type" in (result.error or "")


@pytest.mark.parametrize("listens", [True, False])
async def test_what_a_child_has_spent_leaves_one_last_answer(listens: bool) -> None:
    child = Agent("child", ScriptedModel([say("done", usage=spent)]))
    ask = call("task", {"subagent_type": "child", "description": "work"})
    model = ScriptedModel([ask, say("what I have") if listens else ask, say("never")])
    result = await Runtime([Agent("a", model, subagents=[child])]).run("a", "go", limits=Limits(cost=0.5))
    assert len(model.requests) == 2
    assert model.requests[1].messages[-1].text.startswith("[limit:cost] the limit on cost is reached: no further")
    ends = (RunStatus.COMPLETED, "natural") if listens else (RunStatus.FAILED, "limit:cost")
    assert (result.status, result.termination) == ends


async def test_limits_of_the_run_win_over_the_agents() -> None:
    model = ScriptedModel([call("work"), say("ok")])
    agent = Agent("a", model, tools=[work], limits=Limits(steps=0))
    result = await Runtime([agent]).run("a", "go", limits=Limits())
    assert result.response == "ok"
    result = await Runtime([agent]).run("a", "go")
    assert result.termination == "limit:steps"


def test_nonsense_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Limits.parallel must be at least 1, got 0"):
        Limits(parallel=0)
    with pytest.raises(ValueError, match=r"Limits.tokens must be at least 0, got -1"):
        Limits(tokens=-1)
