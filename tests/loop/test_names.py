"""A name means one question for the life of a run: it never passes to another question."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Decision, DecisionRefused, RunStatus, Runtime, SuspendTicket, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say

YES = Decision.resume({"ok": True})


class Office:
    """A lead that pays, and clerks below it that delete, each after a question."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def asks(self, name: str, ticket: str = "", times: int = 1) -> Any:
        async def ask(ctx: ToolContext, what: str = "it") -> Any:
            if ctx.resume_input is None:
                given = SuspendTicket(ticket, f"tool:{name}", f"{name} {what}?") if ticket else None
                return ToolResult.suspended(f"{name} {what}?", ticket=given)
            self.done.append(f"{name} {what}: {ctx.resume_input}")
            return "done"

        return tool(name=name, description="Ask.")(ask)

    def clerk(self, call_id: str, ticket: str = "", name: str = "clerk") -> Agent:
        def turn(request: Any) -> Any:
            said = request.messages[-1]
            return say("deleted") if said.role == "tool" else call("delete", {"what": said.text}, id=call_id)

        return Agent(name, ScriptedModel(turn), tools=[self.asks("delete", ticket)])

    def lead(self, *turns: Any, clerk: Agent, ticket: str = "") -> Agent:
        model = ScriptedModel([*turns, say("all done")])
        return Agent("lead", model, tools=[self.asks("pay", ticket)], subagents=[clerk])


def delegate(call_id: str, what: str = "files", to: str = "clerk") -> Any:
    return call("task", {"subagent_type": to, "description": what}, id=call_id)


async def refused(runtime: Runtime, run_id: str, target: str, why: str) -> None:
    before = await runtime.result(run_id)
    with pytest.raises(DecisionRefused, match=why):
        await runtime.resume(run_id, {target: Decision.resume("PASSWORD")})
    assert await runtime.result(run_id) == before


@pytest.mark.parametrize("restart", [False, True])
async def test_an_answer_that_is_sent_twice_does_not_reach_another_question(tmp_path: Path, restart: bool) -> None:
    """The call `c1` of the lead is answered twice; a clerk that waits has chosen the same id."""
    office = Office()
    url = f"sqlite:///{tmp_path}/app.db"

    def runtime() -> Runtime:
        turns = [[call("pay", id="c1"), delegate("c2")]]
        return Runtime.open(url, [office.lead(*turns, clerk=office.clerk("c1"))])

    async with runtime() as first:
        waiting = await first.run("lead", "go", thread_id="t")
        run_id, asked = waiting.run_id, {one.message: one for one in waiting.suspended.values()}
        path = "/".join(asked["delete files?"].path)
        await first.resume(run_id, {"c1": YES})
        if not restart:
            await refused(first, run_id, "c1", f"'c1' was answered already.*; it waits for: {path}$")
    if restart:  # what was asked and answered follows from the log
        async with runtime() as second:
            await refused(second, run_id, "c1", f"'c1' was answered already.*; it waits for: {path}$")
            assert ["/".join(one.path) for one in (await second.result(run_id)).suspended.values()] == [path]
    assert office.done == ["pay it: {'ok': True}"]


@pytest.mark.parametrize("name", ["inner", "t", "c1"], ids=["call-id", "ticket-id", "call-above"])
async def test_a_short_name_means_one_of_all_questions_that_were_ever_asked(name: str) -> None:
    """First one clerk asks, then another under the same names; the first answer comes once more."""
    office = Office()
    clerk = office.clerk("inner", "t")
    runtime = Runtime([office.lead(delegate("c1", "a"), delegate("c2", "b"), clerk=clerk)])
    waiting = await runtime.run("lead", "go")
    assert [*waiting.suspended] == ["inner"]
    decision = Decision.resume("first", id="d1")
    second = await runtime.resume(waiting.run_id, {name: decision})
    assert [*second.suspended] == ["c2/inner"]
    why = "'c1' was answered already" if name == "c1" else f"more than one call is meant by '{name}'"
    await refused(runtime, waiting.run_id, name, f"{why}.*; it waits for: c2/inner$")
    assert await runtime.resume(waiting.run_id, {name: decision}) == second
    last = await runtime.resume(waiting.run_id, {"c2/inner": Decision.resume("second")})
    assert (last.status, office.done) == (RunStatus.COMPLETED, ["delete a: first", "delete b: second"])


async def test_a_call_above_names_one_question_only() -> None:
    """A clerk asks twice in two calls: the id of the call that waits for the clerk means neither of them then."""
    office = Office()
    model = ScriptedModel([call("delete", {"what": "a"}, id="k1"), call("delete", {"what": "b"}, id="k2"), say("ok")])
    runtime = Runtime([office.lead(delegate("c1"), clerk=Agent("clerk", model, tools=[office.asks("delete")]))])
    waiting = await runtime.run("lead", "go")
    again = await runtime.resume(waiting.run_id, {"c1": YES})
    assert [*again.suspended] == ["k2"]
    await refused(runtime, waiting.run_id, "c1", "more than one call is meant by 'c1'.*; it waits for: c1/k2$")
    assert (await runtime.resume(waiting.run_id, {"c1/k2": YES})).status is RunStatus.COMPLETED


async def test_a_question_that_was_dropped_keeps_its_names() -> None:
    """Nobody answers the first clerk, which is cancelled; an answer that comes late does not reach the second."""
    office = Office()
    runtime = Runtime([office.lead(delegate("c1", "a"), delegate("c2", "b"), clerk=office.clerk("inner"))])
    waiting = await runtime.run("lead", "go")
    second = await runtime.resume(waiting.run_id, {"c1/inner": Decision.cancel("never mind")})
    assert [*second.suspended] == ["c2/inner"]
    await refused(runtime, waiting.run_id, "inner", "more than one call is meant by 'inner'")
    await refused(runtime, waiting.run_id, "c1/inner", "'c1/inner' was answered already or has ended")
    assert office.done == []


async def test_a_path_comes_first_but_not_after_the_name_meant_another_call() -> None:
    """The ticket id `c3` below is answered; later a call of the lead has that id as its path."""
    office = Office()
    turns = [delegate("c1"), call("pay", id="c3")]
    runtime = Runtime([office.lead(*turns, clerk=office.clerk("inner", "c3"), ticket="p")])
    waiting = await runtime.run("lead", "go")
    again = await runtime.resume(waiting.run_id, {"c3": YES})
    assert [*again.suspended] == ["p"]
    await refused(runtime, waiting.run_id, "c3", "'c3' was answered already")
    assert (await runtime.resume(waiting.run_id, {"p": YES})).status is RunStatus.COMPLETED


async def test_a_call_that_asks_again_keeps_its_name_and_each_ticket_has_its_own() -> None:
    done: list[Any] = []

    @tool
    async def confirm(ctx: ToolContext) -> Any:
        """Ask twice."""
        done.append(ctx.resume_input)
        if len(done) < 3:
            return ToolResult.suspended("sure?", ticket=SuspendTicket(f"sure-{len(done)}", "ask"))
        return "sure"

    model = ScriptedModel([call("confirm", id="c1"), say("done")])
    runtime = Runtime([Agent("a", model, tools=[confirm])])
    waiting = await runtime.run("a", "go")
    await runtime.resume(waiting.run_id, {"sure-1": Decision.resume(1)})
    await refused(runtime, waiting.run_id, "sure-1", "'sure-1' was answered already")
    assert (await runtime.resume(waiting.run_id, {"c1": Decision.resume(2)})).status is RunStatus.COMPLETED
    assert done == [None, 1, 2]


@pytest.mark.parametrize("ticket", ["", "c1", "c2/c1", "inner", "c1/inner"])
@pytest.mark.parametrize("ids", [("c1", "c2"), ("c1", "c1"), ("inner", "c2")], ids="-".join)
async def test_every_name_that_is_shown_works(ticket: str, ids: tuple[str, str]) -> None:
    """Whatever ids models and tools choose, each waiting call is answered by the name under which it is shown."""
    office = Office()
    above, below = ids
    turns = [[call("pay", id=above), delegate("c2"), delegate("c9", "more")]]
    runtime = Runtime([office.lead(*turns, clerk=office.clerk(below, ticket), ticket=ticket)])
    waiting = await runtime.run("lead", "go")
    asked = by_message(waiting.suspended)
    assert sorted(asked) == ["delete files?", "delete more?", "pay it?"]
    while waiting.suspended:
        message, name = sorted(by_message(waiting.suspended).items())[0]
        waiting = await runtime.resume(waiting.run_id, {name: Decision.resume(message)})
        assert office.done[-1] == f"{message.removesuffix('?')}: {message}"
    assert (waiting.status, len(office.done)) == (RunStatus.COMPLETED, 3)


def by_message(tickets: Mapping[str, SuspendTicket]) -> dict[str, str]:
    return {ticket.message: name for name, ticket in tickets.items()}
