from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from retinue import ConfigurationError, HarnessAgent, Limits, RunStatus, ToolContext, tool
from retinue.subagents import tools
from retinue.tasks import TaskScope, TaskStatus
from retinue.testing import ScriptedModel, call

from .office import Office, eventually, plain, task_id_in, texts, value_of

S1 = TaskScope("boss", "s1")
HEADER = "agent_key: <key of worker>\nagent_id: worker\nsession_id: <session>"
PROMOTED = """\
status: timeout_promoted
task_id: <task>
note: It did not end within 1 s and goes on in the background; nothing is lost, and you are told when it has ended. \
Do NOT start the same task again."""


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with Office(tmp_path) as made:
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of waiting takes a twentieth of one."""
    wait = asyncio.wait

    async def sooner(tasks: Any, *, timeout: float | None = None, **options: Any) -> Any:
        return await wait(tasks, timeout=0.05 if timeout == 1 else timeout, **options)

    monkeypatch.setattr("retinue.subagents.work.asyncio.wait", sooner)


@pytest.mark.parametrize(
    ("given", "seconds"), [(None, 30), (0, 0), (-1, 0), (1, 1), (600, 600), (601, 600), (10**9, 600)]
)
def test_how_long_a_call_waits(given: int | None, seconds: int) -> None:
    assert tools.seconds_of(given) == seconds


async def test_work_that_ends_in_time_is_no_task(office: Office) -> None:
    assert plain(await office.spawn("say hi", 5)) == f"{HEADER}\nstatus: ok\nreply:\nhi"
    assert list(await office.repository.list(S1)) == []


@pytest.mark.usefixtures("impatient")
async def test_work_that_takes_longer_goes_on_as_a_task(office: Office) -> None:
    answer = await office.spawn("wait here", 1)
    assert plain(answer) == f"{HEADER}\n{PROMOTED}"
    record = await office.record(task_id_in(answer))
    assert (record.status, record.input) == (TaskStatus.RUNNING, "wait here")
    assert (record.agent_key, record.sub_session_id) == (value_of("agent_key", answer), value_of("session_id", answer))
    assert record.node is not None
    office.gates["here"].set()
    ended = await office.ended(record.task_id)
    assert (ended.status, ended.result) == (TaskStatus.COMPLETED, "waited for here")
    assert office.begun == ["wait here"], "it was started again"
    key = value_of("agent_key", answer)
    assert plain(await office.do("agent_send", {"agent_key": key, "message": "say more"})) == (
        "agent_key: <key of worker>\nstatus: ok\nreply:\nmore"
    )
    said = [message.text for message in office.worker_model.requests[-1].messages if message.role != "system"]
    assert said == ["wait here", "waited for here", "say more"]


@pytest.mark.usefixtures("impatient")
async def test_a_send_is_promoted_too(office: Office) -> None:
    key = value_of("agent_key", await office.spawn("say hi", 5))
    answer = await office.do("agent_send", {"agent_key": key, "message": "wait here", "timeout_seconds": 1})
    assert plain(answer) == f"agent_key: <key of worker>\n{PROMOTED}"
    office.gates["here"].set()
    assert (await office.ended(task_id_in(answer))).result == "waited for here"


@pytest.mark.usefixtures("impatient")
async def test_a_promoted_child_that_fails_or_is_cancelled(office: Office) -> None:
    broken: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def break_down(request: Any) -> Any:
        return await broken

    office.worker_turn = break_down
    failing = task_id_in(await office.spawn("go", 1))
    broken.set_exception(RuntimeError("no luck"))
    ended = await office.ended(failing)
    assert (ended.status, ended.error_message) == (TaskStatus.FAILED, "RuntimeError: no luck")
    office.worker_turn = office.work
    waiting = task_id_in(await office.spawn("wait here", 1))
    assert plain(await office.do("task_cancel", {"task_id": waiting})) == (
        "task_id: <task>\nstatus: cancelled\nCancellation requested successfully."
    )


@pytest.mark.usefixtures("impatient")
async def test_a_message_that_waits_for_its_turn_is_promoted_before_it_begins(office: Office) -> None:
    first = await office.spawn("wait here")
    key = value_of("agent_key", first)
    answer = await office.do("agent_send", {"agent_key": key, "message": "say then", "timeout_seconds": 1})
    assert plain(answer) == f"agent_key: <key of worker>\n{PROMOTED}"
    assert office.begun == ["wait here"]
    office.gates["here"].set()
    assert (await office.ended(task_id_in(answer))).result == "then"
    assert office.begun == ["wait here", "say then"]


@pytest.mark.usefixtures("impatient")
async def test_on_timeout_cancel_stops_the_child_and_makes_no_task(tmp_path: Path) -> None:
    async with Office(tmp_path, on_timeout="cancel") as office:
        assert plain(await office.spawn("wait here", 1)) == (
            f"{HEADER}\nstatus: timeout\nnote: it was stopped after 1 s; send it a smaller task"
        )
        assert list(await office.repository.list(S1)) == []
        office.gates["here"].set()
        await asyncio.sleep(0.02)
        assert len(office.worker_model.requests) == 1
        background = await office.start("wait there")
        key = (await office.record(background)).agent_key
        answer = await office.do("agent_send", {"agent_key": key, "message": "say x", "timeout_seconds": 1})
        assert plain(answer) == (
            "agent_key: <key of worker>\nstatus: timeout\nnote: it was stopped after 1 s; send it a smaller task"
        )
        assert office.begun == ["wait here", "wait there"]


def test_on_timeout_is_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="on_timeout is 'promote' or 'cancel', not 'wait'"):
        HarnessAgent("boss", ScriptedModel([]), workspace=tmp_path, on_timeout="wait")  # pyright: ignore[reportArgumentType]


async def test_cancelling_a_call_that_waits_stops_its_child(office: Office) -> None:
    office.turns = [call("agent_spawn", {"agent_id": "worker", "task": "wait here"})]
    run = office.runtime.stream("boss", "go", thread_id="s1")
    await eventually(lambda: office.begun)
    result = await office.runtime.cancel(run.run_id)
    assert result.status is RunStatus.CANCELLED
    events: list[Any] = [event async for event in office.runtime.events(run.run_id)]
    ends = [(event.agent, event.status) for event in events if event.kind == "run_finished"]
    assert ends == [("worker", "cancelled"), ("boss", "cancelled")]
    assert list(await office.repository.list(S1)) == []


@pytest.mark.usefixtures("impatient")
async def test_a_cancelled_run_leaves_promoted_work_alone(office: Office) -> None:
    parked = asyncio.Event()

    async def park(request: Any) -> Any:
        parked.set()
        await asyncio.Event().wait()

    office.turns = [call("agent_spawn", {"agent_id": "worker", "task": "wait here", "timeout_seconds": 1}), park]
    run = office.runtime.stream("boss", "go", thread_id="s1")
    await asyncio.wait_for(parked.wait(), 90)
    assert (await office.runtime.cancel(run.run_id)).status is RunStatus.CANCELLED
    (record,) = await office.repository.list(S1)
    assert record.status is TaskStatus.RUNNING
    office.gates["here"].set()
    assert (await office.ended(record.task_id)).result == "waited for here"


async def test_a_child_is_started_with_what_its_parent_has(tmp_path: Path) -> None:
    """User and context flow down to a background child, and its tools see them after the parent's end."""
    seen: list[Any] = []

    @tool
    async def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append((ctx.run.user_id, ctx.run.depth, dict(ctx.context)))
        return "seen"

    async with Office(tmp_path, worker_tools=[look]) as office:
        office.answers["look"] = call("look")
        result = await office.run(
            call("agent_spawn", {"agent_id": "worker", "task": "look", "timeout_seconds": 0}),
            user="ann",
            context={"tenant": 7},
        )
        await office.ended(task_id_in(texts(result)[0]), user="ann")
        assert seen == [("ann", 1, {"tenant": 7})]


async def test_limits_hold_for_background_children(tmp_path: Path) -> None:
    async with Office(tmp_path, limits=Limits(children=2)) as office:
        spawn = call("agent_spawn", {"agent_id": "worker", "task": "say x", "timeout_seconds": 0})
        result = await office.run(spawn, spawn, spawn)
        assert len(texts(result)) == 3
        records = [await office.ended(record.task_id) for record in await office.repository.list(S1)]
        refused = [record.error_message for record in records if record.status is not TaskStatus.COMPLETED]
        # One that begins at once is counted at once; one that waited is refused when it begins.
        assert len(office.begun) == 2
        assert [str(error).splitlines()[0] for error in refused] in (
            [],
            ["LimitReached: [limit:children] this tree may start 2 children: go on with what you have"],
        )
