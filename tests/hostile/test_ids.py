"""A model chooses the ids of its calls: none is taken for a path, a place, a ticket or a file of ours."""

from __future__ import annotations

from typing import Any

import pytest

from retinue import Agent, Child, Decision, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say

BAD = ["a/b", "/", "a:b", "a|b", "a~2", "a b", "a\tb", "a\0", "\ud800", "é", "x" * 257, "x" * 1_000_000]
BAD += ["ticket_c1", "..\\..", "\u202e", "a\n", "a\u2028b", "'", '"', "{", "%00", "<x>", "`"]
GOOD = ["call_abc", "toolu_01AbC", "a#1", "chatcmpl-tool-1", "c.1", "x" * 256, "0", "functions.work-0"]


def by_message(waiting: Any) -> dict[str, str]:
    return {ticket.message: name for name, ticket in waiting.suspended.items()}


async def test_ids_that_could_be_mistaken_are_replaced_once(place: str) -> None:
    """The call waits, is answered by the id that is shown, and has that id in every event and message."""

    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay."""
        return ToolResult.suspended(f"pay {to}?") if ctx.resume_input is None else f"paid {to}"

    asks = [[call("pay", {"to": "ann"}, id="c1"), call("pay", {"to": "bob"}, id=wanted)] for wanted in BAD]
    model = ScriptedModel([turn for ask in asks for turn in (ask, say("done"))])
    async with Runtime.open(place, [Agent("a", model, tools=[pay])]) as runtime:
        for wanted in BAD:
            try:
                await check_id_is_replaced(runtime)
            except Exception as exc:
                exc.add_note(f"The id: {wanted[:20]!r}")
                raise


async def check_id_is_replaced(runtime: Runtime) -> None:
    waiting = await runtime.run("a", "go")
    shown = by_message(waiting)
    assert shown["pay ann?"] == "c1"
    made = shown["pay bob?"]
    assert made.startswith("call_run_")
    half = await runtime.resume(waiting.run_id, {"ticket_c1": Decision.resume("yes")})
    assert by_message(half) == {"pay bob?": made}
    result = await runtime.resume(waiting.run_id, {made: Decision.resume("yes")})
    events = [event async for event in runtime.events(waiting.run_id)]
    assert (result.status, result.response) == (RunStatus.COMPLETED, "done")
    assert [message.text for message in result.messages if message.role == "tool"] == ["paid ann", "paid bob"]
    assert {name for event in events if (name := getattr(event, "call_id", None))} == {"c1", made}
    assert [message.tool_call_id for message in result.messages if message.role == "tool"] == ["c1", made]


@pytest.mark.parametrize("wanted", GOOD, ids=lambda wanted: wanted[:20])
async def test_an_ordinary_id_stays(wanted: str) -> None:
    @tool
    async def work() -> str:
        """Work."""
        return "worked"

    result = await Runtime([Agent("a", ScriptedModel([call("work", id=wanted), say("ok")]), tools=[work])]).run(
        "a", "go"
    )
    assert result.messages[2].tool_call_id == wanted


async def test_children_of_calls_have_places_of_their_own(place: str) -> None:
    """Each call asks for an id that another's child has as its place."""
    wanted = ["a", "a~2", "tools:a", "a/a", "a:tools", "a|a", "a", "a~1"]

    @tool
    async def both(ctx: ToolContext) -> str:
        """Have two children."""
        outcomes = await ctx.run_children([Child("echo", "1"), Child("echo", "2")])
        return "+".join([str(outcome.response) for outcome in outcomes])

    echo = Agent("echo", ScriptedModel(lambda request: say(request.messages[-1].text)))
    boss = Agent("boss", ScriptedModel([[call("both", id=name) for name in wanted], say("ok")]), tools=[both])
    async with Runtime.open(place, [boss, echo]) as runtime:
        result = await runtime.run("boss", "go")
        events = [event async for event in runtime.events(result.run_id)]
    assert [message.text for message in result.messages if message.role == "tool"] == ["1+2"] * 8
    places = {event.run_id: event.ns for event in events}
    assert len(set(places.values())) == len(places) == 17
