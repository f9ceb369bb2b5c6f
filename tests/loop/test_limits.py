"""Limits refuse the next call in words the model can read, and then end the run."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import pytest

from retinue import Agent, Compaction, Limits, RunResult, RunStatus, Runtime, Usage, tool
from retinue.testing import ScriptedModel, call, say

spent = Usage(requests=1, input_tokens=60, output_tokens=40, cost=0.5)


@tool
async def work() -> str:
    """Work."""
    return "worked"


async def run_with(limits: Limits, *turns: object) -> tuple[RunResult, ScriptedModel]:
    model = ScriptedModel(cast(Any, turns))
    return await Runtime([Agent("a", model, tools=[work], limits=limits)]).run("a", "go"), model


TWICE = [[say("x", usage=spent), call("work")], say("what I have", usage=spent), say("never")]


@pytest.mark.parametrize(
    ("limits", "name", "used"),
    [
        (Limits(steps=2), "steps", "1 of 2"),
        (Limits(tokens=299), "tokens", "100 of 299"),
        (Limits(cost=1.9), "cost", "0.5 of 1.9"),
    ],
)
async def test_the_last_turn_is_announced_and_fits(limits: Limits, name: str, used: str) -> None:
    result, model = await run_with(limits, *TWICE)
    assert (result.status, result.response, result.termination) == (RunStatus.COMPLETED, "what I have", "natural")
    said = f"[limit:{name}] the limit on {name} is reached: {used} used: no further calls are made"
    assert model.requests[1].messages[-1].text.startswith(said)
    assert [m.text for m in result.messages if m.role == "tool"] == ["worked"]


@pytest.mark.parametrize(
    ("limits", "name", "used"),
    [
        (Limits(steps=1), "steps", "1 of 1"),
        (Limits(tokens=199), "tokens", "100 of 199"),
        (Limits(cost=0.6), "cost", "0.5 of 0.6"),
    ],
)
async def test_a_turn_that_would_exceed_a_limit_is_not_begun(limits: Limits, name: str, used: str) -> None:
    result, model = await run_with(limits, *TWICE)
    assert (result.status, result.termination, len(model.requests)) == (RunStatus.FAILED, f"limit:{name}", 1)
    assert (result.error or "").startswith(f"the limit on {name} is reached: {used} used")
    (refused,) = [m.text for m in result.messages if m.role == "tool"]
    assert refused == f"[limit:{name}] the limit on {name} is reached: {used} used: the call is not made"


@pytest.mark.parametrize("limits", [Limits(steps=0), Limits(tokens=0), Limits(cost=0), Limits(seconds=0)])
async def test_a_limit_of_nothing_allows_nothing(limits: Limits) -> None:
    result, model = await run_with(limits)
    assert (result.status, result.steps, len(model.requests)) == (RunStatus.FAILED, 0, 0)
    assert "too little is left for another step" in (result.error or "")


async def test_steps_are_never_more_than_allowed() -> None:
    for most in range(1, 6):
        result, model = await run_with(Limits(steps=most), *[call("work")] * 9)
        assert (result.termination, result.steps, len(model.requests)) == ("limit:steps", most, most)


async def test_a_conversation_that_grows_stays_within_its_limit() -> None:
    """Each call reads what was said before, and costs accordingly."""

    @tool
    async def read(amount: int) -> str:
        """Read."""
        return "x" * amount

    def turn(request: Any) -> Any:
        said = sum([len(message.text) for message in request.messages])
        usage = Usage(requests=1, input_tokens=100 + said // 4, output_tokens=25, cost=(125 + said // 4) / 1000)
        return [say("x" * 100, usage=usage), call("read", {"amount": said % 700})]

    for most in range(200, 6000, 100):
        for limits in (Limits(tokens=most), Limits(cost=most / 1000)):
            result = await Runtime([Agent("a", ScriptedModel(turn), tools=[read])]).run("a", "go", limits=limits)
            assert result.usage.tokens <= most
            assert result.termination in ("limit:tokens", "limit:cost")


async def test_children_leave_a_closing_turn_to_those_above() -> None:
    """Three levels share ten steps; each child would work forever."""

    def agent(name: str, below: Agent | None) -> Agent:
        def turn(request: Any) -> Any:
            if "[limit:steps]" in request.messages[-1].text:
                return say(f"{name} closes")
            if below is None:
                return call("work")
            return call("task", {"subagent_type": below.name, "description": "work"})

        return Agent(name, ScriptedModel(turn), tools=[work], subagents=[] if below is None else [below])

    top = agent("top", agent("middle", agent("bottom", None)))
    result = await Runtime([top]).run(top, "go", limits=Limits(steps=10))
    assert (result.status, result.response) == (RunStatus.COMPLETED, "top closes")
    assert result.usage.requests == 10


async def test_children_at_work_at_once_stay_within_the_limit() -> None:
    """Twenty children ask the model at the same time."""
    much = Usage(requests=1, input_tokens=6000, output_tokens=4000, cost=50)

    async def answer(request: Any) -> Any:
        for _ in range(20):
            await asyncio.sleep(0)
        return [say("x", usage=much), call("work")]

    child = Agent("child", ScriptedModel(answer), tools=[work])
    ask = [call("task", {"subagent_type": "child", "description": str(n)}, id=f"c{n}") for n in range(20)]
    for limits in (Limits(steps=12), Limits(tokens=120_000), Limits(cost=600)):
        turns = [[say("x", usage=much), *ask], say("done", usage=much)]
        boss = Agent("boss", ScriptedModel(turns), subagents=[child])
        result = await Runtime([boss]).run(boss, "go", limits=limits)
        assert (result.status, result.response) == (RunStatus.COMPLETED, "done")
        assert 3 <= result.usage.requests <= 12


async def test_a_model_that_does_not_listen_is_stopped() -> None:
    turns = [[say("x", usage=spent), call("work")], [say("more"), call("work")]]
    result, _ = await run_with(Limits(tokens=299), *turns)
    assert (result.status, result.termination, result.response) == (RunStatus.FAILED, "limit:tokens", "more")
    assert [m.role for m in result.messages] == ["user", "assistant", "tool", "user", "assistant", "tool"]
    assert result.error == "the limit on tokens is reached: 100 of 299 used, and the model asked for more calls"


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
    assert (
        model.requests[1].messages[-1].text.startswith("[limit:cost] the limit on cost is reached: 0.5 of 0.5 used: no")
    )
    ends = (RunStatus.COMPLETED, "natural") if listens else (RunStatus.FAILED, "limit:cost")
    assert (result.status, result.termination) == ends


@pytest.mark.parametrize(
    ("own", "given", "holds"),
    [
        (Limits(steps=3), None, 3),
        (Limits(steps=3), Limits(), 3),
        (Limits(steps=3), Limits(steps=50, tokens=10**9), 3),
        (Limits(steps=3), Limits(steps=2), 2),
        (Limits(), Limits(steps=2), 2),
    ],
)
async def test_a_caller_can_only_narrow_the_limits_of_an_agent(own: Limits, given: Limits | None, holds: int) -> None:
    model = ScriptedModel([call("work")] * 9)
    result = await Runtime([Agent("a", model, tools=[work], limits=own)]).run("a", "go", limits=given)
    assert (result.termination, result.steps) == ("limit:steps", holds)


def test_nonsense_limits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Limits.parallel must be at least 1, got 0"):
        Limits(parallel=0)
    with pytest.raises(ValueError, match=r"Limits.tokens must be at least 0, got -1"):
        Limits(tokens=-1)


async def test_a_tool_that_swallows_its_timeout_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.loop.calls.GRACE", 0.01)
    end = asyncio.Event()

    @tool(timeout=0.01)
    async def stubborn() -> str:
        """Never stop."""
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    agent = Agent("a", ScriptedModel([call("stubborn", {}, id="c1"), say("went on")]), tools=[stubborn])
    result = await Runtime([agent]).run("a", "go")
    assert (result.status, result.response) == ("completed", "went on")
    assert "no result after 0.01 s" in result.messages[-2].text
    end.set()


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (Limits(tokens=900), "tokens is too small for the first request: it needs about 1,0.., 0 of 900 are used"),
        (Limits(cost=0.0009), "cost is too small for the first request: it needs about 0.0010.*, 0 of 0.0009 are used"),
        (Limits(tokens=1100), None),
        (Limits(cost=0.0011), None),
    ],
)
@pytest.mark.parametrize("text", ["word " * 800, "\u4e2d\u6587\u5b57" * 445])
async def test_a_first_request_that_is_plainly_too_large_is_not_sent(
    limits: Limits, error: str | None, text: str
) -> None:
    model = ScriptedModel([say("short")])
    async with Runtime([Agent("a", model)], price=lambda name, usage: usage.tokens / 1_000_000) as runtime:
        result = await runtime.run("a", text, limits=limits)
    if error is None:
        assert (result.status, len(model.requests)) == (RunStatus.COMPLETED, 1)
        return
    assert (result.status, result.termination, model.requests) == (RunStatus.FAILED, f"limit:{error.split()[0]}", [])
    assert re.fullmatch(f"the limit on {error}", result.error or "")


async def test_a_child_whose_first_request_is_too_large_is_an_error_for_its_parent() -> None:
    child = Agent("child", ScriptedModel([]), "x" * 4000)
    ask = call("task", {"subagent_type": "child", "description": "go"})
    boss = Agent("boss", ScriptedModel([[say("x", usage=spent), ask], say("went on", usage=spent)]), subagents=[child])
    result = await Runtime([boss]).run("boss", "go", limits=Limits(tokens=1000))
    assert (result.status, result.response) == (RunStatus.COMPLETED, "went on")
    assert "the limit on tokens is too small for the first request" in result.messages[2].text


async def test_a_history_that_hooks_shorten_is_measured_as_it_is_sent() -> None:
    model = ScriptedModel([say("y" * 2000), say("fits")])
    runtime = Runtime([Agent("a", model, plugins=[Compaction(100, keep=1)])])
    await runtime.run("a", "x" * 4000, thread_id="t")
    result = await runtime.run("a", "short", thread_id="t", limits=Limits(tokens=500))
    assert (result.status, result.response) == (RunStatus.COMPLETED, "fits")
