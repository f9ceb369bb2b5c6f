"""Our client against our server: an agent of another Retinue over A2A."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import A2AAgent, Agent, Decision, DecisionRefused, Permissions, RunStatus, Runtime
from retinue.server import create_app
from retinue.testing import ScriptedModel, say
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
