"""Our client against our server: an agent of another Retinue over A2A."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    A2AAgent,
    Agent,
    Decision,
    DecisionRefused,
    Limits,
    Message,
    Permissions,
    RunStatus,
    Runtime,
    ToolContext,
    tool,
)
from retinue.core.runs import Usage
from retinue.server import create_app
from retinue.testing import ScriptedModel, call, say
from retinue.wire.a2a_budget import BUDGET, read_usage
from tests.remote.test_remote_events import helper, researcher
from tests.server.serving import TOKEN, listening

from .test_children import boss, of_child, text_of


@asynccontextmanager
async def served(agent: Agent) -> AsyncIterator[A2AAgent]:
    """The agent as one of another server."""
    async with Runtime([agent]) as far, listening(create_app(far, auth=TOKEN)) as url:
        yield A2AAgent("far", f"{url}/a2a/{agent.name}", headers={"authorization": f"Bearer {TOKEN}"})


async def test_the_answer_is_that_of_the_agent_and_not_of_its_children() -> None:
    async with served(researcher(helper())) as far:
        agent = boss(far, "Find it.")
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            result = await run.result()
            events = [event async for event in runtime.events(run.run_id)]
    assert result.response == "Done: Report: I have looked."
    assert text_of(events) == "Report: I have looked."


async def test_two_messages_of_a_parent_stay_apart() -> None:
    model = ScriptedModel([say("done")])

    @tool
    async def ask_both(ctx: ToolContext) -> str:
        """Ask both."""
        questions = [Message.user("Who wrote it?"), Message.user("When?")]
        return (await ctx.run_child(far, questions)).response or ""

    async with served(Agent("far", model)) as far:
        parent = Agent("boss", ScriptedModel([call("ask_both", {}), say("ok")]), tools=[ask_both])
        async with Runtime([parent]) as runtime:
            await runtime.run(parent, "go")
    said = "\n".join(one.text for one in model.requests[0].messages if one.role == "user")
    assert said.split() == "Who wrote it? When?".split()
    assert "it?\n\nWhen?" in said


async def test_the_name_of_an_agent_may_be_in_any_script() -> None:
    async with served(Agent("评审", ScriptedModel([say("看过了")]))) as far:
        agent = boss(far, "Find it.")
        async with Runtime([agent]) as runtime:
            result = await runtime.run(agent, "go")
    assert result.response == "Done: 看过了"


@pytest.mark.parametrize("approves", [True, False])
async def test_an_approval_there_is_given_here(tmp_path: Path, approves: bool) -> None:
    async with served(researcher(helper(plugins=[Permissions(ask=["look"])]))) as far:
        agent = boss(far, "Find it.")
        async with Runtime.open(f"sqlite:///{tmp_path}/a.db", [agent]) as runtime:
            run = runtime.stream(agent, "go")
            waiting = await run.result()
            ((name, ticket),) = waiting.suspended.items()
            assert ticket.is_approval
            assert ticket.parameters["tool"] == "look"
            with pytest.raises(DecisionRefused):
                await runtime.resume(run.run_id, {name: Decision.resume({"aproved": True})})
            decision = Decision.approve() if approves else Decision.reject("stay out")
            result = await runtime.resume(run.run_id, {name: decision})
            events: list[Any] = [event async for event in runtime.events(run.run_id)]
    assert result.status is RunStatus.COMPLETED
    ends = [event.status for event in of_child(events) if event.kind == "run_finished"]
    assert ends == [RunStatus.WAITING_INPUT, RunStatus.COMPLETED]


async def test_a_structured_answer_is_the_output() -> None:
    far_agent = Agent("counter", ScriptedModel([say('{"n": 3}')]), output=dict[str, int])
    async with served(far_agent) as far:
        agent = boss(far, "Count.")
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            await run.result()
            ends: list[Any] = [event async for event in run.follow() if event.kind == "run_finished" and event.ns]
    assert ends[0].output == {"n": 3}


async def test_usage_and_steps_there_count_here(tmp_path: Path) -> None:
    spent = Usage(requests=1, input_tokens=90, output_tokens=10, cost=0.5)

    @tool
    def look() -> str:
        """Look."""
        return "nothing"

    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("Looked.", usage=spent)
        return [say("", usage=spent), call("look", {}, id="look_1")]

    agent = Agent("looker", ScriptedModel(turn), tools=[look], plugins=[Permissions(ask=["look"])])
    async with served(agent) as far:
        parent = boss(far, "Find it.")
        async with Runtime.open(f"sqlite:///{tmp_path}/a.db", [parent]) as runtime:
            run = runtime.stream(parent, "go")
            waiting = await run.result()
            assert waiting.usage.tokens == 100, "what was used so far counts while it waits"
            (name,) = waiting.suspended
            result = await runtime.resume(run.run_id, {name: Decision.approve()})
            events: list[Any] = [event async for event in runtime.events(run.run_id)]
    assert (result.usage.input_tokens, result.usage.output_tokens, result.usage.cost) == (180, 20, 1.0)
    assert result.usage.requests == 4
    ended = [event for event in of_child(events) if event.kind == "run_finished"][-1]
    assert (ended.usage.tokens, ended.steps) == (200, 2)


async def test_limits_are_sent_to_a_server_that_takes_them() -> None:
    @tool
    def work() -> str:
        """Work."""
        return "worked"

    agent = Agent("worker", ScriptedModel(lambda request: call("work")), tools=[work], max_steps=50)
    async with served(agent) as far:
        parent = boss(far, "Work.")
        async with Runtime([parent]) as runtime:
            run = runtime.stream(parent, "go", limits=Limits(steps=7))
            events: list[Any] = [event async for event in run]
            result = await run.result()
    ended = next(event for event in of_child(events) if event.kind == "run_finished")
    assert ended.steps == 5, "of 7 the parent has used one, and keeps one"
    assert result.steps + ended.steps <= 7


@pytest.mark.parametrize(
    "given",
    [
        None, 3, {}, {"usage": 3}, {"usage": {"inputTokens": -5}}, {"usage": {"cost": 1e300}},
        {"usage": {"inputTokens": 1.5}}, {"usage": {"inputTokens": 5}, "steps": "x"},
    ],
)  # fmt: skip
def test_usage_that_makes_no_sense_does_not_count(given: Any) -> None:
    assert read_usage({BUDGET: given}) is None
    assert read_usage({BUDGET: {"usage": {"inputTokens": 5.0}, "steps": 2.0}}) == (Usage(input_tokens=5), 2)
