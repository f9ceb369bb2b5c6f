from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from retinue import Agent, HarnessAgent, LocalFilesystem, RunStatus, Runtime
from retinue.tasks import TaskScope, TaskStatus
from retinue.testing import RecordingSink, ScriptedModel, call, say

from ..logs import ends_of, whole_log
from ..waiting import until
from .office import Office, task_id_in

S1 = TaskScope("boss", "s1")


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with Office(tmp_path) as made:
        yield made


def spawn(task: str) -> Any:
    return call("agent_spawn", {"agent_id": "worker", "task": task, "timeout_seconds": 0}, id=f"c_{task[-4:]}")


async def stream(office: Office, *turns: Any, **options: Any) -> Any:
    """A run of the boss that is under way."""
    office.turns = [*turns, say("done")]
    return office.runtime.stream("boss", "go", thread_id="s1", **options)


def lines(events: list[Any]) -> list[str]:
    """Who says what; a task's own events are its task's."""
    shown: list[str] = []
    for event in events:
        who = "task" if event.kind == "task_updated" else event.agent
        what = getattr(event, "status", "")
        shown.append(" ".join([who, event.kind, str(what), *event.ns]).strip())
    return shown


async def test_the_story_of_a_background_task(office: Office) -> None:
    async def release(request: Any) -> Any:
        await office.until(task_id_in(request.messages[-1].text), lambda _: "wait here" in office.begun)
        return call("agent_list", {}, id="c_list")

    run = await stream(office, spawn("wait here"), release)
    seen = [event async for event in run]
    assert seen[-1].kind == "run_finished"
    assert seen[-1].run_id == run.run_id
    office.gates["here"].set()
    events = [event async for event in office.runtime.events(run.run_id)]
    assert events[: len(seen)] == seen
    # Who comes first of two that work side by side is chance; the order of each is not.
    assert lines([event for event in events if event.agent == "boss" and event.kind != "child_started"]) == snapshot(
        [
            "boss run_started",
            "boss step_started",
            "boss tool_call_started",
            "boss tool_call_args_delta",
            "boss inference_finished",
            "boss tool_call_ready",
            "boss tool_call_finished succeeded",
            "boss step_finished",
            "boss step_started",
            "boss tool_call_started",
            "boss tool_call_args_delta",
            "boss inference_finished",
            "boss tool_call_ready",
            "boss tool_call_finished succeeded",
            "boss step_finished",
            "boss step_started",
            "boss text_delta",
            "boss inference_finished",
            "boss step_finished",
            "boss run_finished completed",
        ]
    )
    assert lines([event for event in events if event.agent == "worker"]) == snapshot(
        [
            "task task_updated PENDING tools:c_here",
            "task task_updated RUNNING tools:c_here",
            "worker run_started  tools:c_here",
            "worker step_started  tools:c_here",
            "worker text_delta  tools:c_here",
            "worker inference_finished  tools:c_here",
            "worker step_finished  tools:c_here",
            "worker run_finished completed tools:c_here",
            "task task_updated COMPLETED tools:c_here",
        ]
    )
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_run_finished_is_the_last_event_of_every_run_and_a_task_ends_with_its_end(office: Office) -> None:
    run = await stream(office, [spawn("say one"), spawn("fail two"), spawn("wait here")], spawn("wait there"))
    await run.result()
    for gate in ("here", "there"):
        office.gates[gate].set()
    events: list[Any] = [event async for event in office.runtime.events(run.run_id)]
    last = {event.run_id: event for event in events}
    assert sorted([event.kind for event in last.values()]) == ["run_finished"] * 5 + ["task_updated"] * 4
    ends = sorted([event.status for event in last.values() if event.kind == "task_updated"])
    assert ends == ["COMPLETED", "COMPLETED", "COMPLETED", "FAILED"]
    first = {event.run_id: event for event in reversed(events)}
    for run_id, event in first.items():
        assert event.kind == ("task_updated" if run_id.startswith("task_") else "run_started")
    spaces = {event.run_id: event.ns for event in events if event.kind == "run_started"}
    assert len(set(spaces.values())) == 5, "two runs share a namespace"


async def test_a_sink_hears_of_the_end_of_a_task(office: Office) -> None:
    sink = RecordingSink()
    run = await stream(office, spawn("wait here"), sinks=[sink])
    await run.result()
    office.gates["here"].set()
    (record,) = await office.repository.list(S1)
    await office.ended(record.task_id)
    await until(lambda: len(sink.of("task_updated")) == 3)
    assert [event.status for event in sink.of("task_updated")] == ["PENDING", "RUNNING", "COMPLETED"]


async def test_cancelling_a_run_stops_its_tasks_only_when_asked_to(office: Office) -> None:
    parked = asyncio.Event()

    async def park(request: Any) -> Any:
        parked.set()
        await asyncio.Event().wait()

    run = await stream(office, [spawn("wait here"), spawn("wait there")], park)
    await asyncio.wait_for(parked.wait(), 90)
    assert (await office.runtime.cancel(run.run_id)).status is RunStatus.CANCELLED
    await asyncio.sleep(0.05)
    records = await office.repository.list(S1)
    assert [record.status for record in records] == [TaskStatus.RUNNING, TaskStatus.RUNNING]
    office.gates["here"].set()
    done = await office.ended(records[0].task_id)
    assert (await office.runtime.cancel(run.run_id, tasks=True)).status is RunStatus.CANCELLED
    ended = await office.repository.list(S1)
    assert [record.status for record in ended] == [TaskStatus.COMPLETED, TaskStatus.CANCELLED]
    assert ended[0] == done
    events: list[Any] = [event async for event in office.runtime.events(run.run_id)]
    finished = [(event.agent, event.status) for event in events if event.kind == "run_finished"]
    assert sorted(finished) == [("boss", "cancelled"), ("worker", "cancelled"), ("worker", "completed")]


async def test_closing_the_runtime_stops_its_tasks(tmp_path: Path) -> None:
    office = Office(tmp_path)
    run = await stream(office, [spawn("wait here"), spawn("say done")])
    await run.result()
    records = await office.repository.list(S1)
    await office.ended(records[1].task_id)
    await office.until(records[0].task_id, lambda _: "wait here" in office.begun)
    await office.runtime.close(grace=1)
    ended = await office.repository.list(S1)
    assert [(record.status, record.error_message) for record in ended] == [
        (TaskStatus.CANCELLED, "the runtime was closed"),
        (TaskStatus.COMPLETED, None),
    ]
    events: list[Any] = [event async for event in office.runtime.events(run.run_id)]
    assert sorted([event.status for event in events if event.kind == "run_finished"]) == [
        "cancelled",
        "completed",
        "completed",
    ]
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert left == []


async def test_an_event_loop_that_ends_ends_the_tasks(tmp_path: Path) -> None:
    """Without close(): the records do not say RUNNING after the process has ended well."""

    async def life() -> None:
        office = Office(tmp_path)
        task_id = await office.start("wait here")
        await office.until(task_id, lambda record: record.status is TaskStatus.RUNNING)

    await asyncio.to_thread(asyncio.run, life())
    office = Office(tmp_path)
    (record,) = await office.repository.list(S1)
    assert (record.status, record.error_message) == (TaskStatus.CANCELLED, "its process ended")


async def test_a_task_under_a_child_is_in_the_log_of_the_root(tmp_path: Path) -> None:
    """A middle agent with sub-agents of its own starts a task and ends; the root's log goes on."""
    async with Office(tmp_path) as office:
        turns = iter([spawn("wait here"), say("left it to another")])
        middle = HarnessAgent(
            "middle",
            ScriptedModel(lambda _: next(turns)),
            filesystem=LocalFilesystem(tmp_path),
            subagents=[office.worker],
            description="Delegates.",
        )
        top_turns = iter([call("agent_spawn", {"agent_id": "middle", "task": "go"}, id="c_top"), say("done")])
        top = HarnessAgent(
            "top",
            ScriptedModel(lambda _: next(top_turns)),
            filesystem=LocalFilesystem(tmp_path),
            subagents=[middle],
        )
        run = office.runtime.stream(top, "go", thread_id="s1")
        assert (await run.result()).status is RunStatus.COMPLETED
        office.gates["here"].set()
        events: list[Any] = [event async for event in office.runtime.events(run.run_id)]
        told = [(event.status, event.ns) for event in events if event.kind == "task_updated"]
        assert [status for status, _ in told] == ["PENDING", "RUNNING", "COMPLETED"]
        assert {ns for _, ns in told} == {("tools:c_top", "tools:c_here")}
        ends = [(event.agent, event.status) for event in events if event.kind == "run_finished"]
        assert ends[-1] == ("worker", "completed")
        assert list((tmp_path / "agents").iterdir()) == [tmp_path / "agents" / "middle"]


def starter(folder: Path, count: int) -> Agent:
    """Starts background children and ends at once."""

    def lead(request: Any) -> Any:
        if any(message.role == "tool" for message in request.messages):  # the last may tell of a task's end
            return say("started")
        spawn = {"agent_id": "worker", "task": "work", "timeout_seconds": 0}
        return [call("agent_spawn", spawn, id=f"c{number}") for number in range(count)]

    worker = Agent("worker", ScriptedModel(lambda request: say("worked")))
    return HarnessAgent("boss", ScriptedModel(lead), subagents=[worker], workspace=folder, general_purpose=False)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_background_children_that_begin_late_are_announced(
    request: pytest.FixtureRequest, sqlite_url: str, tmp_path: Path, kind: str
) -> None:
    urls = {"memory": "memory:", "sqlite": sqlite_url}
    url = urls.get(kind) or request.getfixturevalue("postgres_url")
    async with Runtime.open(url, [starter(tmp_path / "ws", 4)]) as runtime, asyncio.timeout(90):
        result = await runtime.run("boss", "go", thread_id="t")
        assert (result.status, result.response) == (RunStatus.COMPLETED, "started")
        events = await whole_log(runtime, result.run_id)
    children = {event.run_id for event in events if event.kind == "run_started"} - {result.run_id}
    assert len(children) == 4
    assert ends_of(events) == {result.run_id: ["completed"], **dict.fromkeys(children, ["completed"])}
    started = [event.child_run_id for event in events if event.kind == "child_started"]
    assert sorted(started) == sorted(children)
    first = {run_id: min(event.seq for event in events if event.run_id == run_id) for run_id in children}
    announced = {event.child_run_id: event.seq for event in events if event.kind == "child_started"}
    assert all(announced[run_id] < first[run_id] for run_id in children)
    assert [event.kind for event in events if event.run_id == result.run_id][-1] == "run_finished"
