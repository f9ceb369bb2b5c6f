"""A remote sub-agent behaves like a local one: its events, children and questions are in its parent's log."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue import Agent, Decision, DecisionRefused, RunStatus, Runtime, tool
from retinue.backends.mirror import last_seen
from retinue.core.events import DELTAS
from retinue.core.runs import RunIdentity
from retinue.events import RunFinished, RunStarted
from retinue.log.fold import fold_all
from retinue.log.owned import LiveLog
from retinue.log.state import LogState, RunState
from retinue.plugins import Permissions
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from tests.remote.server import TaskServer

from .. import inside

QUESTION = "task_p/task_r/look_1"
"""The path of what the helper on the server asks."""


@tool
def look(where: str) -> str:
    """Look."""
    return f"nothing in {where}"


def helper(**options: Any) -> Agent:
    model = ScriptedModel(
        lambda request: (
            say("I have looked.", chunks=["I have ", "looked."])
            if request.messages[-1].role == "tool"
            else call("look", {"where": "the attic"}, id="look_1")
        )
    )
    return Agent("helper", model, tools=[look], **options)


def researcher(*below: Agent) -> Agent:
    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(f"Report: {request.messages[-1].text}", chunks=["Report: ", request.messages[-1].text])
        return call("task", {"subagent_type": below[0].name, "description": "Look in the attic."}, id="task_r")

    return Agent("researcher", ScriptedModel(turn), subagents=below)


def parent(stub: Agent) -> Agent:
    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("Done.")
        return call("task", {"subagent_type": stub.name, "description": "Find it."}, id="task_p")

    return Agent("parent", ScriptedModel(turn), subagents=[stub])


@asynccontextmanager
async def far(agent: Agent, **options: Any) -> AsyncIterator[TaskServer]:
    async with Runtime([agent]) as runtime, TaskServer(runtime, has_events=True, **options) as server:
        yield server


async def remote_log(server: TaskServer) -> list[Any]:
    (run,) = server.runs.values()
    return [event async for event in server.runtime.events(run.run_id)]


def copied(events: list[Any], ns: tuple[str, ...]) -> list[Any]:
    """The events that came from the server, without those of the local child."""
    below = [event for event in events if event.ns[: len(ns)] == ns]
    own = ("run_started", "run_finished")
    return [
        event
        for event in below
        if not (
            event.ns == ns and (event.kind in own or (event.kind == "custom" and event.data["type"] == "remote_task"))
        )
    ]


def as_there(ns: tuple[str, ...]) -> tuple[str, ...]:
    """A namespace without the hashes of calls whose ids were taken here."""
    return tuple([re.sub(r"(_[0-9a-f]{8})+(?=~|$)", "", part) for part in ns])


def check_copy(events: list[Any], there: list[Any], *, numbered: bool = True) -> None:
    """Check that a log has every event of the other log once and in order, but for the ends of its root run."""
    if numbered:
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
    child = next(event for event in events if event.kind == "run_started" and len(event.ns) == 1)
    expected = [event for event in there if event.ns or event.kind not in ("run_started", "run_finished")]
    found = copied(events, child.ns)
    here = [(event.kind, as_there(event.ns)) for event in found]
    assert here == [(event.kind, as_there((*child.ns, *event.ns))) for event in expected]
    roots = {event.run_id for event in there if not event.ns}
    for here, far_off in zip(found, expected, strict=True):
        assert here.run_id == (child.run_id if far_off.run_id in roots else far_off.run_id)
        if far_off.kind == "text_delta":
            assert here.delta == far_off.delta


@pytest.mark.parametrize("breaks", [[], [1], [0, 2, 0, 3, 5]])
@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_every_event_is_copied_once_and_in_order(breaks: list[int], url: str, tmp_path: Any) -> None:
    async with far(researcher(helper())) as server:
        server.breaks_after = breaks
        agent = parent(RemoteSubagentStub("researcher", url=server.url))
        async with Runtime.open(url if url == "memory:" else f"sqlite:///{tmp_path}/a.db", [agent]) as runtime:
            run = runtime.stream(agent, "go")
            result = await run.result()
            events = [event async for event in runtime.events(run.run_id)]
        there = await remote_log(server)
        assert result.status is RunStatus.COMPLETED
        check_copy(events, there)
        text = [e.delta for e in events if e.kind == "text_delta" and e.run_id != run.run_id and len(e.ns) == 1]
        assert "".join(text) == "Report: I have looked."
        assert result.usage.requests == 2 + 4
        ends = [event for event in events if event.kind == "run_finished"]
        assert [end.usage.requests for end in ends] == [2, 4, 6]


async def test_a_handle_shows_the_children_of_a_remote_child() -> None:
    async with far(researcher(helper())) as server:
        agent = parent(RemoteSubagentStub("researcher", url=server.url))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            names: list[str] = []
            async for child in run.children:
                async for grandchild in child.children:
                    result = await grandchild.result()
                    names.append(f"{child.name}/{grandchild.name}: {result.response}")
                    assert await grandchild.text == "I have looked."
            assert names == ["researcher/helper: I have looked."]


@pytest.mark.parametrize("target", [QUESTION, "task_p"])
async def test_a_question_below_a_remote_child_is_answered_at_the_root(target: str) -> None:
    async with far(researcher(helper(plugins=[Permissions(ask=["look"])]))) as server:
        agent = parent(RemoteSubagentStub("researcher", url=server.url))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            waiting = await run.result()
            assert waiting.status is RunStatus.SUSPENDED
            ((name, ticket),) = waiting.suspended.items()
            assert (name, ticket.path) == (QUESTION, ("task_p", "task_r", "look_1"))
            with pytest.raises(DecisionRefused, match="does not fit its schema"):
                await runtime.resume(run.run_id, {target: Decision.resume({"aproved": True})})
            for bare in ("look_1", ticket.id, "task_r"):  # these were chosen at the server
                with pytest.raises(DecisionRefused, match=f"does not wait for '{bare}'; it waits for: {QUESTION}$"):
                    await runtime.resume(run.run_id, {bare: Decision.approve()})
            decision = Decision.approve()
            result = await runtime.resume(run.run_id, {target: decision})
            assert (result.status, result.response) == (RunStatus.COMPLETED, "Done.")
            again = await runtime.resume(run.run_id, {target: decision})
            assert again.response == "Done."
            events = [event async for event in runtime.events(run.run_id)]
        check_copy(events, await remote_log(server))
        assert result.usage.requests == 6
        told = next(m for m in result.messages if m.role == "tool")
        assert told.text == "Report: I have looked."


async def test_a_decision_that_somebody_gave_at_the_server_is_refused_and_the_run_goes_on_with_that_one() -> None:
    async with far(researcher(helper(plugins=[Permissions(ask=["look"])]))) as server:
        agent = parent(RemoteSubagentStub("researcher", url=server.url))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            assert (await run.result()).suspended
            ((task_id, remote),) = server.runs.items()
            server.runs[task_id] = server.runtime.stream_resume(remote.run_id, {"look_1": Decision.reject("no")})
            result = await runtime.resume(run.run_id, {QUESTION: Decision.approve()})
            assert result.status is RunStatus.COMPLETED
            events = [event async for event in runtime.events(run.run_id)]
        refused = [event for event in events if event.kind == "error" and event.code == "decision_refused"]
        assert len(refused) == 1


async def test_a_server_without_decisions_refuses_them_and_the_question_stays() -> None:
    async with far(researcher(helper(plugins=[Permissions(ask=["look"])]))) as server:
        agent = parent(RemoteSubagentStub("researcher", url=server.url))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            assert (await run.result()).suspended
            server.faults = [403]
            with pytest.raises(DecisionRefused, match="refused the decision: 403"):
                await runtime.resume(run.run_id, {QUESTION: Decision.approve()})
            waiting = await runtime.result(run.run_id)
            assert list(waiting.suspended) == [QUESTION]
            result = await runtime.resume(run.run_id, {QUESTION: Decision.approve()})
            assert result.status is RunStatus.COMPLETED


async def test_a_hostile_server_cannot_speak_for_its_parent() -> None:
    """An event that names a run of the parent's log gets another id."""
    root = RunState(RunIdentity("run_root", "t", "boss"), ())
    child = RunState(RunIdentity("run_child", "t2", "far", "run_root", "t", "c1"), ("tools:c1",))
    log = LiveLog(tree=LogState({"run_root": root, "run_child": child}))
    log.append_remote(child, RunStarted(seq=5, run_id="run_root", thread_id="t", ns=("tools:x",)))
    log.append_remote(child, RunFinished(seq=6, run_id="run_root", status=RunStatus.FAILED, termination="error"))
    assert [(event.run_id, event.ns, event.parent_run_id) for event in log.events] == [
        ("run_child/run_root", ("tools:c1", "tools:x"), "run_child"),
        ("run_child", ("tools:c1",), "run_root"),
    ]
    assert (root.status, child.status, child.remote_seq) == (RunStatus.RUNNING, RunStatus.RUNNING, 6)


async def test_a_stream_that_never_works_costs_events_and_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.backends.remote.PATIENCE", 0.1)
    async with far(researcher(helper())) as server:
        server.breaks_after = [0] * 200
        agent = parent(RemoteSubagentStub("researcher", url=server.url))
        async with Runtime([agent]) as runtime:
            result = await runtime.run(agent, "go")
        told = next(message.text for message in result.messages if message.role == "tool")
        assert told == "Report: I have looked."


async def test_every_prefix_of_a_log_knows_which_remote_events_it_has() -> None:
    """A process may end between any two rows; the next one asks for the events after those that are there."""
    async with far(researcher(helper(plugins=[Permissions(ask=["look"])]))) as server:
        agent = parent(RemoteSubagentStub("researcher", url=server.url))
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go")
            await run.result()
            await runtime.resume(run.run_id, {QUESTION: Decision.approve()})
            log = await inside.log_of(run)
            rows = log.rows()
        there = await remote_log(server)
    ns, copies, checked = ("tools:task_p",), 0, 0
    for end, row in enumerate(rows, 1):
        is_delta = row.event.__class__ in DELTAS and row.event is not None and row.event.ns[:1] == ns
        if is_delta or (row.private is not None and row.private.remote):
            copies += 1
        log = LiveLog(tree=fold_all(rows[:end]))
        log.first, log.events = 0, [one.event for one in rows[:end] if one.event is not None]
        child = next((one for one in log.tree.runs.values() if one.ns == ns), None)
        if child is not None and child.status is RunStatus.RUNNING:
            assert await last_seen(log, child) == copies
            checked += 1
    assert copies == len(there)
    assert checked > 40
    assert fold_all(rows).runs.keys() == {run.run_id, child.run_id if child is not None else ""}
