"""A model chooses the ids of its calls. No choice mixes up calls, children or tickets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import Agent, Child, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say

from ..logs import ends_of, whole_log
from ..payers import Effects, pay_tool, yes


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    return "memory:" if request.param == "memory" else sqlite_url


def count_tool(effects: Effects) -> Any:
    @tool
    async def count(what: str) -> str:
        """Count something."""
        effects.add(f"counted {what}")
        return f"counted {what}"

    return count


def by_call(request: Any) -> str:
    """What the model reads of its calls, in their order."""
    return ", ".join([message.text for message in request.messages if message.role == "tool"])


@pytest.mark.parametrize("other", ["a#1", "a#2", "a/1", "a~2", "tool:a"])
@pytest.mark.parametrize("restart", [False, True], ids=["same-runtime", "restarted"])
async def test_an_approved_call_is_made_whatever_the_other_is_called(
    sqlite_url: str, effects: Effects, other: str, restart: bool
) -> None:
    """The call `a` waits and is approved; another with a similar id is made at once."""

    def agent() -> Agent:
        def turn(request: Any) -> Any:
            if request.messages[-1].role == "tool":
                return say(by_call(request))
            return [call("pay", {"to": "ann"}, id="a"), call("count", {"what": "x"}, id=other)]

        return Agent("solo", ScriptedModel(turn), tools=[pay_tool(effects), count_tool(effects)])

    async with Runtime.open(sqlite_url, [agent()]) as runtime:
        waiting = await runtime.run("solo", "go", thread_id="t")
        assert list(waiting.suspended) == ["a"]
        if not restart:
            result = await runtime.resume(waiting.run_id, {"a": yes()})
    if restart:
        async with Runtime.open(sqlite_url, [agent()]) as runtime:
            result = await runtime.resume(waiting.run_id, {"a": yes()})
    assert effects.lines == ["counted x", "paid ann"]
    assert (result.status, result.response) == (RunStatus.COMPLETED, "paid ann, counted x")


def boss(effects: Effects, root_id: str) -> list[Agent]:
    """A boss that pays cid itself and has two children pay ann and bob, all in one step."""

    def lead(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(by_call(request))
        return [
            call("task", {"subagent_type": "child", "description": "ann"}, id="x"),
            call("task", {"subagent_type": "child", "description": "bob"}, id="y"),
            call("pay", {"to": "cid"}, id=root_id),
        ]

    def child(request: Any) -> Any:
        last = request.messages[-1]
        return say(last.text) if last.role == "tool" else call("pay", {"to": last.text}, id="c1")

    pays = Agent("child", ScriptedModel(child), tools=[pay_tool(effects)])
    return [Agent("boss", ScriptedModel(lead), tools=[pay_tool(effects)], subagents=[pays])]


@pytest.mark.parametrize("root_id", ["x/c1", "c1", "y#c1"])
async def test_every_ticket_is_shown_and_can_be_answered(place: str, effects: Effects, root_id: str) -> None:
    """Calls of the boss and of both children wait; each is answered by the key under which it is shown."""
    async with Runtime.open(place, boss(effects, root_id)) as runtime, asyncio.timeout(90):
        waiting = await runtime.run("boss", "go", thread_id="t")
        asked = {ticket.message: key for key, ticket in waiting.suspended.items()}
        assert sorted(asked) == ["may I pay ann?", "may I pay bob?", "may I pay cid?"]
        half = await runtime.resume(waiting.run_id, {asked["may I pay ann?"]: yes()})
        assert effects.lines == ["paid ann"]
        asked = {ticket.message: key for key, ticket in half.suspended.items()}
        assert sorted(asked) == ["may I pay bob?", "may I pay cid?"]
        half = await runtime.resume(waiting.run_id, {asked["may I pay cid?"]: yes()})
        assert effects.lines == ["paid ann", "paid cid"]
        (last,) = half.suspended
        result = await runtime.resume(waiting.run_id, {last: yes()})
        assert effects.lines == ["paid ann", "paid cid", "paid bob"]
        assert (result.status, result.response) == (RunStatus.COMPLETED, "paid ann, paid bob, paid cid")
        events = await whole_log(runtime, waiting.run_id)
    assert sorted(ends_of(events).values()) == [["completed"]] * 3


async def test_children_of_calls_with_similar_ids_are_kept_apart(place: str) -> None:
    """The second child of the call `a` is `a~2` in the log; a call that wants to be `a~2` gets another place."""

    def lead(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(by_call(request))
        return [
            call("both", {"one": "1", "two": "2"}, id="a"),
            call("both", {"one": "3", "two": "4"}, id="a~2"),
            call("both", {"one": "5", "two": "6"}, id="a#2"),
        ]

    @tool
    async def both(one: str, two: str, ctx: ToolContext) -> Any:
        """Have two children repeat something."""
        outcomes = await ctx.run_children([Child("echo", one), Child("echo", two)])
        if any(outcome.status is RunStatus.SUSPENDED for outcome in outcomes):
            return ToolResult.suspended("children wait")
        return "+".join([str(outcome.response) for outcome in outcomes])

    echo = Agent("echo", ScriptedModel(lambda request: say(request.messages[-1].text)))
    async with Runtime.open(place, [Agent("boss", ScriptedModel(lead), tools=[both]), echo]) as runtime:
        result = await runtime.run("boss", "go")
        assert result.response == "1+2, 3+4, 5+6"
        events = await whole_log(runtime, result.run_id)
    places = {event.run_id: event.ns for event in events}
    assert len(set(places.values())) == len(places) == 7
