"""The answer and the state of a result: what they are for a run that did not give or write them."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ChildAgentError,
    Decision,
    ParentContext,
    Plugin,
    Registrar,
    RunNotCompleted,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    SuspendTicket,
    ToolContext,
    ToolOutput,
    ToolResult,
    run_child_agent_checked,
    tool,
)
from retinue.plugins import StopOnTool
from retinue.testing import ScriptedModel, call, fail, say

SAID = '{"items": ["a"]}'


@dataclass
class Findings:
    items: list[str] = field(default_factory=list[str])


@tool
async def ask(ctx: ToolContext) -> Any:
    """Ask a human."""
    return ctx.resume_input or ToolResult.suspended("Sure?", SuspendTicket("t1", "ask"))


@tool
async def look() -> str:
    """Look."""
    return "seen"


@tool
async def hang() -> None:
    """Hang."""
    await asyncio.Event().wait()


def finder(*turns: Any, plugins: tuple[Plugin, ...] = ()) -> Agent[Findings]:
    return Agent("finder", ScriptedModel(list(turns)), tools=[ask, look, hang], plugins=plugins, output=Findings)


def refusal(result: RunResult[Findings]) -> str:
    """Check that a result has no answer and says so, also after pickling; return the sentence."""
    assert result.output is None
    with pytest.raises(RunNotCompleted) as caught:
        result.unwrap()
    assert caught.value.result is result
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.result, str(again)) == (result, str(caught.value))
    return str(again).replace(result.run_id, "R")


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_a_completed_run_has_its_answer(url: str, tmp_path: Path) -> None:
    agent = finder(say(SAID))
    async with Runtime.open(f"sqlite:///{tmp_path}/app.db" if url == "sqlite" else url, [agent]) as runtime:
        result = await runtime.run(agent, "go")
        assert result.unwrap() == result.output == Findings(["a"])
        assert (await runtime.result(result.run_id)).unwrap() == Findings(["a"])


async def test_a_failed_run_has_no_answer() -> None:
    agent = finder(fail(RuntimeError("down")))
    sentence = refusal(await Runtime([agent]).run(agent, "go"))
    assert sentence == (
        "run 'R' has no answer, it is failed: RuntimeError: down; check result.status before result.unwrap()"
    )


async def test_a_run_that_waits_has_no_answer_until_it_is_answered() -> None:
    agent = finder(call("ask", id="c1"), say(SAID))
    runtime = Runtime([agent])
    waiting = await runtime.run(agent, "go")
    assert refusal(waiting) == (
        "run 'R' has no answer, it is suspended; it waits for 'c1': "
        "answer with runtime.resume(run_id, decisions) and unwrap that result"
    )
    assert (await runtime.resume(waiting.run_id, {"c1": Decision.resume("yes")})).unwrap() == Findings(["a"])


async def test_a_cancelled_run_has_no_answer() -> None:
    agent = finder(call("hang"))
    run = Runtime([agent]).stream(agent, "go")
    async for event in run:
        if event.kind == "tool_call_ready":
            await run.cancel()
    assert "it is cancelled" in refusal(await run.result())


async def test_a_run_that_a_plugin_stopped_has_no_answer_though_it_completed() -> None:
    agent = finder(call("look"), plugins=(StopOnTool("look"),))
    result = await Runtime([agent]).run(agent, "go")
    assert result.status is RunStatus.COMPLETED
    assert "it is completed" in refusal(result)


async def test_the_answer_of_an_agent_without_an_output_type_is_none() -> None:
    agent = Agent("plain", ScriptedModel([say("hello")]))
    assert (await Runtime([agent]).run(agent, "go")).unwrap() is None


async def test_one_except_is_enough_for_a_child_that_had_to_complete() -> None:
    caught: list[RunNotCompleted] = []

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        try:
            await run_child_agent_checked(
                ctx.resolver, finder(fail(RuntimeError("down"))), "go", parent=ParentContext.of(ctx)
            )
        except RunNotCompleted as exc:
            caught.append(exc)
        return "ok"

    parent = Agent("parent", ScriptedModel([call("delegate"), say("ok")]), tools=[delegate])
    await Runtime([parent]).run("parent", "go")
    (error,) = caught
    assert isinstance(error, ChildAgentError)
    assert str(error) == "child agent did not complete: failed: RuntimeError: down"
    assert error.result.status is RunStatus.FAILED


topic = StateKey("topic", str)
sources = StateKey("sources", list[str], persistent=True)


class Research(Plugin):
    def register(self, r: Registrar) -> None:
        r.key(topic)
        r.key(sources)


@tool
async def search(ctx: ToolContext) -> ToolOutput:
    """Search."""
    return ToolOutput("found", update={sources: [f"a page on {ctx.state(topic)}"]})


@pytest.mark.parametrize(("turns", "found"), [([call("search")], ["a page on rust"]), ([], [])])
async def test_a_child_that_skips_its_tool_gives_the_default_of_its_key(turns: list[Any], found: list[str]) -> None:
    researcher = Agent("researcher", ScriptedModel([*turns, say("Done.")]), tools=[search], plugins=[Research()])

    @tool
    async def research(about: str, ctx: ToolContext) -> ToolOutput:
        """Research a topic."""
        outcome = await ctx.run_child(researcher, f"Research {about}", seed={topic: about})
        return ToolOutput(outcome.response, update={sources: outcome.state[sources]})

    parent = Agent(
        "parent",
        ScriptedModel([call("research", {"about": "rust"}), say("ok")]),
        tools=[research],
        plugins=[Research()],
    )
    result = await Runtime([parent]).run("parent", "What is new?")
    assert [message.text for message in result.messages if message.role == "tool"] == ["Done."]
    assert result.state[sources] == found


async def test_a_default_that_was_read_is_not_shared() -> None:
    result = await Runtime([Agent("a", ScriptedModel([say("hi")]), plugins=[Research()])]).run("a", "go")
    result.state[sources].append("mine")
    assert result.state[sources] == []
    assert sources not in result.state
    assert result.state.get(sources) is None
