"""Humans through children: the same child goes on, and nobody else is run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from retinue import Agent, Decision, DecisionRefused, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.testing import ScriptedModel, call, say


def asking(ran: Counter[str]) -> Any:
    @tool
    async def ask(what: str, ctx: ToolContext) -> Any:
        """Ask a human."""
        ran[what] += 1
        if ctx.resume_input is None:
            return ToolResult.suspended(f"{what}?")
        return f"{what}: {ctx.resume_input}"

    return ask


def worker(ran: Counter[str], name: str = "worker") -> Agent:
    """Asks about what it is told to, or just works."""

    def answer(request: Any) -> Any:
        last = request.messages[-1]
        if last.role == "tool":
            return say(f"report({last.text})")
        ran[f"model {last.text}"] += 1
        if last.text.startswith("ask"):
            return call("ask", {"what": last.text}, id="inner")
        return say(f"worked on {last.text}")

    return Agent(name, ScriptedModel(answer), tools=[asking(ran)])


def task(name: str, description: str) -> Any:
    return call("task", {"subagent_type": name, "description": description}, id=f"call_{description.replace(' ', '_')}")


async def test_parallel_children_are_answered_one_by_one_and_siblings_do_not_run_again() -> None:
    ran: Counter[str] = Counter()
    calls = [task("worker", d) for d in ("ask a", "plain", "ask b")]
    model = ScriptedModel([calls, say("all done")])
    runtime = Runtime([Agent("boss", model, subagents=[worker(ran)])])
    run = runtime.stream("boss", "go")
    waiting = await run.result()
    assert waiting.status is RunStatus.SUSPENDED
    paths = {ticket.path: ticket.message for ticket in waiting.suspended.values()}
    assert paths == {("call_ask_a", "inner"): "ask a?", ("call_ask_b", "inner"): "ask b?"}
    with pytest.raises(DecisionRefused, match="more than one call is meant by 'inner'"):
        await runtime.resume(waiting.run_id, {"inner": Decision.resume("?")})
    second = await runtime.resume(waiting.run_id, {"call_ask_b/inner": Decision.resume("yes")})
    assert [t.path for t in second.suspended.values()] == [("call_ask_a", "inner")]
    with pytest.raises(DecisionRefused, match="more than one call is meant by 'inner'.*waits for: call_ask_a/inner$"):
        await runtime.resume(waiting.run_id, {"inner": Decision.resume("?")})  # it meant the answered call too
    final = await runtime.resume(waiting.run_id, {next(iter(second.suspended)): Decision.resume("no")})
    assert (final.status, final.response) == (RunStatus.COMPLETED, "all done")
    assert [m.text for m in final.messages if m.role == "tool"] == [
        "report(ask a: no)",
        "worked on plain",
        "report(ask b: yes)",
    ]
    assert ran == {"model ask a": 1, "model plain": 1, "model ask b": 1, "ask a": 2, "ask b": 2}
    events: list[Any] = [e async for e in runtime.events(waiting.run_id)]
    for call_id in ("call_ask_a", "call_ask_b"):
        child = [e for e in events if e.ns == (f"tools:{call_id}",)]
        assert len({e.run_id for e in child}) == 1
        assert [e.status for e in child if e.kind == "run_finished"] == ["suspended", "completed"]
    assert len([e for e in events if e.kind == "child_started"]) == 3
    assert [e.seq for e in events] == list(range(1, len(events) + 1))


async def test_three_levels_deep_and_cancelled_there() -> None:
    for decision, end in ((Decision.resume("yes"), "ask x: yes"), (Decision.cancel("no time"), "cancelled: no time")):
        ran: Counter[str] = Counter()
        leaf = worker(ran, "leaf")
        middle = Agent("middle", ScriptedModel([task("leaf", "ask x"), say("middle done")]), subagents=[leaf])
        top_model = ScriptedModel([task("middle", "go on"), say("top done")])
        runtime = Runtime([Agent("top", top_model, subagents=[middle])])
        waiting = await runtime.run("top", "go")
        (ticket,) = waiting.suspended.values()
        assert ticket.path == ("call_go_on", "call_ask_x", "inner")
        result = await runtime.resume(waiting.run_id, {ticket.id: decision})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "top done")
        middle_model: Any = middle.model
        assert middle_model.requests[1].messages[-1].text == f"report({end})"
        assert len(top_model.requests) == 2


async def test_a_hand_written_tool_may_go_on_with_its_children_too() -> None:
    ran: Counter[str] = Counter()
    agent = worker(ran)

    @tool
    async def delegate(ctx: ToolContext) -> Any:
        """Run two children, the second of which asks."""
        first = await ctx.run_child(agent, "plain")
        second = await ctx.run_child(agent, "ask y")
        if second.status is RunStatus.SUSPENDED:
            return ToolResult.suspended("a child waits")
        return f"{first.response}, {second.response}"

    model = ScriptedModel([call("delegate", id="c1"), say("done")])
    runtime = Runtime([Agent("boss", model, tools=[delegate])])
    waiting = await runtime.run("boss", "go")
    (ticket,) = waiting.suspended.values()
    assert ticket.path == ("c1~2", "inner")
    result = await runtime.resume(waiting.run_id, {"inner": Decision.resume("ok")})
    assert [m.text for m in result.messages if m.role == "tool"] == ["worked on plain, report(ask y: ok)"]
    assert ran == {"model plain": 1, "model ask y": 1, "ask y": 2}


async def test_cancelling_a_tree_that_waits_ends_every_run_in_it() -> None:
    ran: Counter[str] = Counter()
    model = ScriptedModel([[task("worker", "ask a"), task("worker", "ask b")]])
    runtime = Runtime([Agent("boss", model, subagents=[worker(ran)])])
    waiting = await runtime.run("boss", "go")
    result = await runtime.cancel(waiting.run_id)
    assert result.status is RunStatus.CANCELLED
    events: list[Any] = [e async for e in runtime.events(waiting.run_id)]
    last = {e.run_id: e.status for e in events if e.kind == "run_finished"}
    assert set(last.values()) == {"cancelled"}
    assert len(last) == 3
    assert events[-1].ns == ()


async def test_a_child_that_waits_is_cancelled_with_its_call_and_that_is_told() -> None:
    """The tool passes the suspended child on as an ordinary result: nobody can answer the child any more."""
    agent = worker(Counter())

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate, and do not look at the status."""
        outcome = await ctx.run_child(agent, "ask x")
        return f"it said {outcome.response}"

    model = ScriptedModel([call("delegate", id="c1"), say("done")])
    runtime = Runtime([Agent("boss", model, tools=[delegate])])
    run = runtime.stream("boss", "go")
    result = await run.result()
    events: list[Any] = [event async for event in runtime.events(run.run_id)]
    assert (result.status, result.suspended) == (RunStatus.COMPLETED, {})
    (problem,) = [event for event in events if event.kind == "error"]
    assert problem.code == "waiting_child_cancelled"
    assert problem.message == (
        "call 'c1' of delegate has ended although its child 'worker' waits for a human: the child is cancelled. "
        "Return ToolResult.suspended(…) while a child is suspended"
    )
    (child,) = {event.run_id for event in events if event.ns}
    (ended,) = [event for event in events if event.kind == "tool_call_finished" and event.call_id == "c1"]
    assert ended.result.metadata == {"cancelled_children": [child]}
    read = model.requests[-1].messages[-1].text
    assert (
        read
        == ended.message.text
        == (
            "it said None\n[Cancelled at the end of this call, still waiting for a human: 'worker'. Nobody can answer any more.]"
        )
    )
    assert [event.status for event in events if event.kind == "child_finished"][-1] == "cancelled"


async def test_a_call_that_is_cancelled_beside_its_waiting_child_gives_no_advice() -> None:
    """The call was at work and might have waited for the child: its author has nothing to mend."""
    agent, child_waits = worker(Counter()), asyncio.Event()

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate, and work on."""
        await ctx.run_child(agent, "ask x")
        child_waits.set()
        await asyncio.Event().wait()
        return "never"

    runtime = Runtime([Agent("boss", ScriptedModel([call("delegate")]), tools=[delegate])])
    run = runtime.stream("boss", "go")
    await child_waits.wait()
    await runtime.cancel(run.run_id)
    assert (await run.result()).status is RunStatus.CANCELLED
    events: list[Any] = [event async for event in runtime.events(run.run_id)]
    assert [event.code for event in events if event.kind == "error" and event.code == "waiting_child_cancelled"] == []
    ended = [event for event in events if event.kind == "tool_call_finished" and event.ns == ()][-1]
    assert (ended.status, ended.result.metadata) == ("cancelled", {})
    assert [event.status for event in events if event.kind == "child_finished"][-1] == "cancelled"
