"""No run uses a call id of a run above or below it, whatever ids the models choose. Parallel siblings may."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from retinue import Agent, Child, Decision, Permissions, RunStatus, Runtime, ToolContext, tool
from retinue.log.fold import fold_all
from retinue.storage.sql import SqlStore
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say

from ..remote.server import TaskServer

HASHED = r"_[0-9a-f]{8}"


@tool
async def look() -> str:
    """Look."""
    return "nothing"


def delegate(agent: str, call_id: str) -> Any:
    return call("task", {"subagent_type": agent, "description": f"work of {agent}"}, id=call_id)


def used(events: list[Any]) -> dict[tuple[str, ...], list[str]]:
    """The ids of calls, by the namespace of their run."""
    found: dict[tuple[str, ...], list[str]] = {}
    for event in events:
        if event.kind == "inference_finished":
            found.setdefault(event.ns, []).extend([one.id for one in event.message.tool_calls])
    return found


def check(events: list[Any]) -> dict[tuple[str, ...], list[str]]:
    """Check the ids of a log: unique in a run and along every line of descent, and the same in all events of a call."""
    found = used(events)
    lines = [(ns, other) for ns in found for other in found if other[: len(ns)] == ns]
    for ns, other in lines:
        both = [*found[ns], *(found[other] if other != ns else [])]
        assert len(both) == len(set(both)), (ns, other, both)
    for event in events:
        for part in event.ns:
            assert part.removeprefix("tools:").partition("~")[0] in {one for ids in found.values() for one in ids}
        call_id = getattr(event, "call_id", None)
        if call_id and event.kind != "task_updated":
            assert call_id in found[event.ns], event
        if event.kind == "tool_call_finished":
            assert event.message.tool_call_id == call_id
        if event.kind == "run_started" and event.ns:
            assert event.parent_tool_call_id == event.ns[-1].removeprefix("tools:").partition("~")[0]
    return found


async def events_of(runtime: Runtime, run_id: str) -> list[Any]:
    return [event async for event in runtime.events(run_id)]


def echoes() -> list[Agent]:
    """Three levels whose models all choose the id `c1`, again and again."""
    leaf = Agent("leaf", ScriptedModel([call("look", id="c1"), call("look", id="c1"), say("leaf")] * 9), tools=[look])
    middle = Agent("middle", ScriptedModel([delegate("leaf", "c1"), say("middle")] * 9), subagents=[leaf])
    root = Agent(
        "root",
        ScriptedModel([delegate("middle", "c1"), delegate("middle", "c1"), delegate("leaf", "c2"), say("done")] * 9),
        subagents=[middle, leaf],
    )
    return [root, middle, leaf]


async def test_an_id_of_a_run_above_is_replaced_by_one_that_follows_from_the_place() -> None:
    async with Runtime(echoes()[:1]) as runtime:
        first = await runtime.run("root", "go")
        second = await runtime.run("root", "go")
        assert (first.status, first.response) == (RunStatus.COMPLETED, "done")
        found = check(await events_of(runtime, first.run_id))
        again = check(await events_of(runtime, second.run_id))
    assert found[()][0] == "c1"  # who is first keeps the id
    assert re.fullmatch("c1" + HASHED, found[()][1])
    assert found[()][2] == "c2"
    (nested,) = found["tools:c1",]
    assert re.fullmatch("c1" + HASHED, nested)
    below, fresh = found["tools:c1", f"tools:{nested}"]
    assert re.fullmatch("c1" + HASHED, below)
    assert len({found[()][1], nested, below}) == 3  # each has the hash of its own namespace
    assert fresh.startswith("call_run_")  # that was taken, too
    assert [again[ns][:1] for ns in again if ns[:1] == ("tools:c1",)] == [["c1" + nested[2:]], ["c1" + below[2:]]]


async def test_an_id_that_was_used_below_is_replaced_above() -> None:
    """The front end of the page knows the calls of the root by id: one that an ended child had is not one of them."""
    child = Agent("child", ScriptedModel([call("look", id="c2"), say("looked")]), tools=[look])
    model = ScriptedModel([delegate("child", "c1"), call("look", id="c2"), say("done")])
    async with Runtime([Agent("root", model, tools=[look], subagents=[child])]) as runtime:
        result = await runtime.run("root", "go")
        found = check(await events_of(runtime, result.run_id))
    assert found["tools:c1",] == ["c2"]
    assert re.fullmatch("c2" + HASHED, found[()][1])


async def test_parallel_siblings_may_use_one_id() -> None:
    @tool
    async def fan_out(ctx: ToolContext) -> int:
        """Ask three."""
        return len(await ctx.run_children([Child("child", "a"), Child("child", "b"), Child("child", "c")]))

    child = Agent("child", ScriptedModel(lambda r: say("x") if r.messages[-1].role == "tool" else call("look", id="s")))
    child = Agent("child", child.model, tools=[look])
    async with Runtime(
        [Agent("root", ScriptedModel([call("fan_out", id="c1"), say("done")]), tools=[fan_out]), child]
    ) as r:
        result = await r.run("root", "go")
        found = check(await events_of(r, result.run_id))
    assert {ns: ids for ns, ids in found.items() if ns} == {(f"tools:c1{n}",): ["s"] for n in ("", "~2", "~3")}


async def test_the_conversation_that_a_thread_continues_counts() -> None:
    child = Agent("child", ScriptedModel([call("look", id="c1"), say("looked")]), tools=[look])
    model = ScriptedModel([call("look", id="c1"), say("one"), delegate("child", "c2"), say("two")])
    async with Runtime([Agent("root", model, tools=[look], subagents=[child])]) as runtime:
        await runtime.run("root", "go", thread_id="t")
        result = await runtime.run("root", "go on", thread_id="t")
        found = check(await events_of(runtime, result.run_id))
    assert re.fullmatch("c1" + HASHED, found["tools:c2",][0])


async def test_the_fold_of_a_log_knows_the_ids(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with Runtime.open(url, echoes()[:1]) as runtime:
        result = await runtime.run("root", "go")
        events = await events_of(runtime, result.run_id)
        assert isinstance(runtime.store, SqlStore)
        stored = await runtime.store.read_log(result.run_id)
    assert stored is not None
    tree = fold_all(stored.rows)
    root = tree.runs[result.run_id]
    assert root.used_call_ids == set(used(events)[()])
    assert root.call_ids_below == {one for ns, ids in used(events).items() if ns for one in ids}


# --- runs elsewhere: their ids are mapped as their events are copied, and back for their answers


def asking(name: str) -> Agent:
    """An agent that asks before it looks, under the id that its caller has too."""
    model = ScriptedModel(lambda r: say("looked") if r.messages[-1].role == "tool" else call("look", id="c1"))
    return Agent(name, model, tools=[look], plugins=[Permissions(ask=["look"])])


def forwarding(name: str, below: Agent) -> Agent:
    model = ScriptedModel(
        lambda r: say(r.messages[-1].text) if r.messages[-1].role == "tool" else delegate(below.name, "c1")
    )
    return Agent(name, model, subagents=[below])


async def test_an_answer_finds_the_call_of_a_remote_run_whose_id_is_taken_here(tmp_path: Path) -> None:
    far = forwarding("far", asking("helper"))
    async with Runtime([far]) as there, TaskServer(there, has_events=True) as server:
        url, agents = f"sqlite:///{tmp_path}/a.db", [forwarding("root", RemoteSubagentStub("far", url=server.url))]
        async with Runtime.open(url, agents, on_close="leave") as runtime:
            waiting = await runtime.run("root", "go")
        ((name, ticket),) = waiting.suspended.items()
        assert (ticket.path[0], len(set(ticket.path)), "/".join(ticket.path)) == ("c1", 3, name)
        assert all(re.fullmatch(f"c1({HASHED})+", part) for part in ticket.path[1:])
        async with Runtime.open(url, agents, on_close="leave") as runtime:  # another process
            result = await runtime.resume(waiting.run_id, {name: Decision.approve()})
            assert (result.status, result.response) == (RunStatus.COMPLETED, "looked")
            events = await events_of(runtime, waiting.run_id)
        found = check(events)
        assert [ns[0] for ns in found if ns] == ["tools:c1", "tools:c1"]
        finished = [e for e in events if e.kind == "tool_call_finished" and e.status.value == "succeeded"]
        assert [event.call_id for event in finished] == list(ticket.path[::-1])
        (run,) = server.runs.values()
        theirs = check(await events_of(there, run.run_id))
        assert theirs[()] == ["c1"]
