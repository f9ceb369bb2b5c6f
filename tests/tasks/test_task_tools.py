from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from retinue import ToolContext, tool
from retinue.subagents.task_tools import MOST_MILLISECONDS
from retinue.tasks import MemoryTaskRepository, TaskRecord, TaskScope, TaskStatus
from retinue.tasks.repository import Change
from retinue.tasks.service import TaskService
from retinue.testing import call, say
from retinue.testing.tasks import task_record

from .. import inside
from .office import Office, plain, task_id_in, texts, value_of


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with Office(tmp_path) as made:
        yield made


ACCEPTED = """\
status: accepted
task_id: <task>
note: It works in the background, and you are told when it has ended. Do NOT call task_output now; go on or answer \
the user. Later: task_output(task_id, block=false), task_cancel, task_list."""

HEADER = "agent_key: <key of worker>\nagent_id: worker\nsession_id: <session>"


@pytest.mark.parametrize("seconds", [0, -1, -600])
async def test_a_spawn_that_does_not_wait(office: Office, seconds: int) -> None:
    answer = await office.spawn("wait here", seconds)
    assert plain(answer) == f"{HEADER}\n{ACCEPTED}"
    record = await office.until(task_id_in(answer), lambda record: record.status is TaskStatus.RUNNING)
    assert record.input == "wait here"
    assert record.agent_key == value_of("agent_key", answer)
    assert record.sub_session_id == value_of("session_id", answer)


async def test_a_send_that_does_not_wait_goes_on_with_the_conversation(office: Office) -> None:
    spawned = await office.spawn("say one", 30)
    key = value_of("agent_key", spawned)
    answer = await office.do("agent_send", {"agent_key": key, "message": "say two", "timeout_seconds": 0})
    assert plain(answer) == ACCEPTED
    record = await office.ended(task_id_in(answer))
    assert (record.status, record.result) == (TaskStatus.COMPLETED, "two")
    said = [message.text for message in office.worker_model.requests[-1].messages if message.role != "system"]
    assert said == ["say one", "one", "say two"]


async def test_the_task_of_a_child_is_its_message_word_for_word(office: Office) -> None:
    task_id = await office.start("  say  two  ")
    assert (await office.ended(task_id)).input == "  say  two  "
    assert office.worker_model.requests[-1].messages[-1].text == "  say  two  "


@pytest.mark.parametrize("args", [{}, {"block": False}, {"block": True}, {"timeout": -5}, {"timeout": 0}])
async def test_the_output_of_a_completed_task(office: Office, args: dict[str, Any]) -> None:
    task_id = await office.start("say a\nb")
    await office.ended(task_id)
    assert plain(await office.do("task_output", {"task_id": f" {task_id} ", **args})) == (
        "task_id: <task>\nagent_id: worker\nstatus: Completed\ncreated_at: <time>\n\nResult:\na\nb"
    )


async def test_created_at_is_when_the_task_was_made(office: Office) -> None:
    task_id = await office.start("say x")
    earlier = (await office.ended(task_id)).created_at - timedelta(hours=1)
    scope = (await office.record(task_id)).scope
    await office.repository.update(scope, task_id, lambda record: replace(record, created_at=earlier))
    made = earlier.strftime("%Y-%m-%dT%H:%M:%SZ")
    assert value_of("created_at", await office.do("task_output", {"task_id": task_id})) == made
    assert f"created: {made}" in await office.do("task_list")


async def test_the_output_of_a_task_without_a_word(office: Office) -> None:
    task_id = await office.start("say ")
    await office.ended(task_id)
    assert plain(await office.do("task_output", {"task_id": task_id})) == (
        "task_id: <task>\nagent_id: worker\nstatus: Completed\ncreated_at: <time>\n\nTask completed with no result."
    )


async def test_a_child_that_raises_has_failed(office: Office) -> None:
    task_id = await office.start("fail no luck")
    record = await office.ended(task_id)
    assert (record.status, record.result, record.error_message) == (TaskStatus.FAILED, None, "RuntimeError: no luck")
    assert plain(await office.do("task_output", {"task_id": task_id})) == (
        "task_id: <task>\nagent_id: worker\nstatus: Failed: RuntimeError: no luck\ncreated_at: <time>\n\n"
        "Error:\nRuntimeError: no luck"
    )


async def test_a_running_task_without_waiting_for_it(office: Office) -> None:
    task_id = await office.start("wait here")
    assert plain(await office.do("task_output", {"task_id": task_id, "block": False})) == (
        "task_id: <task>\nagent_id: worker\nstatus: Running\ncreated_at: <time>\n\nTask still running..."
    )


@pytest.mark.parametrize("timeout", [1, 0, -1000])
async def test_a_wait_that_is_too_short(office: Office, timeout: int) -> None:
    task_id = await office.start("wait here")
    assert plain(await office.do("task_output", {"task_id": task_id, "timeout": timeout})) == (
        "task_id: <task>\nstatus: running\n"
        "note: Task is running (possibly on another node). Use task_output(block=false) to poll."
    )


async def test_a_wait_ends_with_the_task(office: Office) -> None:
    task_id = await office.start("wait here")
    asyncio.get_running_loop().call_later(0.1, office.gates["here"].set)
    answer = await office.do("task_output", {"task_id": task_id})
    assert answer.endswith("Result:\nwaited for here")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [({}, 30), ({"timeout": 999_999_999}, 600), ({"timeout": -1}, 0), ({"timeout": 1500}, 1.5), ({"block": False}, 0)],
)
async def test_how_long_is_waited(
    office: Office, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], seconds: float
) -> None:
    task_id = await office.start("say x")
    await office.ended(task_id)
    waited: list[float] = []
    wait = TaskService.wait

    async def spy(self: TaskService, scope: Any, task_id: str, seconds: float) -> Any:
        waited.append(seconds)
        return await wait(self, scope, task_id, seconds)

    monkeypatch.setattr(TaskService, "wait", spy)
    await office.do("task_output", {"task_id": task_id, **given})
    assert waited == [seconds]
    assert MOST_MILLISECONDS == 600_000


NOT_FOUND = "Error: No background task found with ID: {}. Use task_list() to see all known tasks for this session."
ODD = ["nope", "../s1", "a/b", "žluť", "x" * 500, "{}", '"', "task_1\\u0000"]


async def test_ids_that_are_no_task(office: Office) -> None:
    await office.start("say x")
    for task_id in ODD:
        assert await office.do("task_output", {"task_id": task_id}) == NOT_FOUND.format(task_id)
        assert await office.do("task_cancel", {"task_id": task_id}) == (NOT_FOUND.format(task_id))
    for task_id in ("", "  "):
        assert await office.do("task_output", {"task_id": task_id}) == "Error: task_id is required"
        assert await office.do("task_cancel", {"task_id": task_id}) == "Error: task_id is required"


async def test_tasks_of_another_session_or_user_are_not_there(office: Office) -> None:
    places = [{}, {"user": "ann"}, {"user": "bob"}, {"thread": "s2"}, {"thread": "s2", "user": "ann"}]
    tasks = [await office.start("wait here", **place) for place in places]
    for number, place in enumerate(places):
        assert f"task_id: {tasks[number]}" in await office.do("task_list", **place)
        for other, task_id in enumerate(tasks):
            if other != number:
                answer = await office.do("task_output", {"task_id": task_id}, **place)
                assert answer == NOT_FOUND.format(task_id)
                answer = await office.do("task_cancel", {"task_id": task_id}, **place)
                assert answer == NOT_FOUND.format(task_id)
                assert task_id not in await office.do("task_list", **place)
    records = [await office.record(task_id, **place) for task_id, place in zip(tasks, places, strict=True)]
    assert {(record.status, record.cancel_requested) for record in records} == {(TaskStatus.RUNNING, False)}


async def test_a_cancelled_task_has_stopped(office: Office) -> None:
    task_id = await office.start("wait here")
    await office.until(task_id, lambda record: "wait here" in office.begun)
    assert plain(await office.do("task_cancel", {"task_id": task_id})) == (
        "task_id: <task>\nstatus: cancelled\nCancellation requested successfully."
    )
    record = await office.record(task_id)
    assert (record.status, record.cancel_requested, record.error_message) == (
        TaskStatus.CANCELLED,
        True,
        "the task was cancelled",
    )
    assert plain(await office.do("task_output", {"task_id": task_id})) == (
        "task_id: <task>\nagent_id: worker\nstatus: Cancelled\ncreated_at: <time>\n\nNo result."
    )
    office.gates["here"].set()
    await asyncio.sleep(0.05)
    assert await office.record(task_id) == record
    assert len(office.worker_model.requests) == 1


async def test_what_has_ended_cannot_be_cancelled(office: Office) -> None:
    for task, end in (("say x", "completed"), ("fail x", "failed")):
        task_id = await office.start(task)
        before = await office.ended(task_id)
        assert plain(await office.do("task_cancel", {"task_id": task_id})) == (
            f"task_id: <task>\nstatus: {end}\nnote: Task already in terminal state, cannot cancel."
        )
        assert await office.record(task_id) == before


async def test_a_task_that_does_not_stop_in_time_is_cancelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, running = asyncio.Event(), asyncio.Event()

    @tool
    async def stubborn(ctx: ToolContext) -> str:
        """Do not stop."""
        running.set()
        while not stop.is_set():
            try:
                await stop.wait()
            except asyncio.CancelledError:
                continue
        return "stopped at last"

    cancel = TaskService.cancel
    monkeypatch.setattr(TaskService, "cancel", lambda self, scope, task_id: cancel(self, scope, task_id, 0.05))
    async with Office(tmp_path, worker_tools=[stubborn]) as office:
        office.answers["go"] = call("stubborn")
        task_id = await office.start("go")
        await asyncio.wait_for(running.wait(), 90)
        assert plain(await office.do("task_cancel", {"task_id": task_id})) == (
            "task_id: <task>\nstatus: cancelling\nnote: Cancellation requested; the task has not stopped yet."
        )
        assert (await office.record(task_id)).status is TaskStatus.RUNNING
        stop.set()
        assert (await office.ended(task_id)).status is TaskStatus.CANCELLED


async def test_a_task_that_ended_while_it_was_cancelled(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    task_id = await office.start("wait here")
    cancel = TaskService.cancel

    async def late(self: TaskService, scope: Any, task_id: str) -> Any:
        office.gates["here"].set()
        await office.ended(task_id)
        return await cancel(self, scope, task_id)

    monkeypatch.setattr(TaskService, "cancel", late)
    assert plain(await office.do("task_cancel", {"task_id": task_id})) == (
        "task_id: <task>\nstatus: completed\nnote: It ended before it could be cancelled; see task_output."
    )


async def test_a_task_that_waits_for_its_turn_can_be_cancelled(office: Office) -> None:
    spawned = await office.spawn("wait here")
    key = value_of("agent_key", spawned)
    queued = task_id_in(await office.do("agent_send", {"agent_key": key, "message": "say x", "timeout_seconds": 0}))
    assert plain(await office.do("task_cancel", {"task_id": queued})) == (
        "task_id: <task>\nstatus: cancelled\nCancellation requested successfully."
    )
    office.gates["here"].set()
    assert (await office.ended(task_id_in(spawned))).result == "waited for here"
    await asyncio.sleep(0.05)
    assert office.begun == ["wait here"], "it was cancelled, and yet it began"


@pytest.mark.parametrize("ticks", range(0, 60, 3))
async def test_a_task_may_be_cancelled_at_any_moment(office: Office, ticks: int) -> None:
    task_id = await office.start("wait here")
    for _ in range(ticks):
        await asyncio.sleep(0)
    service = inside.task_service(office.runtime, office.repository)
    ended = await service.cancel(TaskScope("boss", "s1"), task_id)
    assert ended is not None
    assert ended.status is TaskStatus.CANCELLED
    await asyncio.sleep(0.02)
    began = len(office.begun)
    office.gates["here"].set()
    await asyncio.sleep(0.02)
    assert len(office.begun) == began
    assert await office.record(task_id) == ended


async def test_a_task_that_has_not_begun_counts_as_running(office: Office) -> None:
    await office.repository.add(task_record("t1", TaskScope("boss", "s1"), status=TaskStatus.PENDING))
    for wanted in ("running", "pending"):
        answer = await office.do("task_list", {"status_filter": wanted})
        assert answer.startswith("1 tracked task(s):\n- task_id: t1  agent: worker  status: pending  created: ")


class SlowBegin(MemoryTaskRepository):
    """Records that do not change until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def update(self, scope: TaskScope, task_id: str, change: Change) -> TaskRecord | None:
        await self.gate.wait()
        return await super().update(scope, task_id, change)


async def test_a_task_of_this_process_is_running_before_its_record_says_so(tmp_path: Path) -> None:
    slow = SlowBegin()
    async with Office(tmp_path, task_repository=slow) as office:
        task_id = await office.start("say x")
        assert (await office.record(task_id)).status is TaskStatus.PENDING
        assert value_of("status", await office.do("task_output", {"task_id": task_id, "block": False})) == "Running"
        assert "status: running" in await office.do("task_list")
        assert await office.do("task_list", {"status_filter": "pending"}) == (
            "No background tasks tracked with status 'pending'."
        )
        assert f"- task_id: {task_id}  agent: worker  status: running" in office.model.requests[-1].messages[-1].text
        slow.gate.set()
        assert (await office.ended(task_id)).status is TaskStatus.COMPLETED


async def test_the_list_and_its_filters(office: Office) -> None:
    assert await office.do("task_list") == "No background tasks tracked."
    assert await office.do("task_list", {"status_filter": "running"}) == (
        "No background tasks tracked with status 'running'."
    )
    ids = [await office.start(task) for task in ("say x", "fail x", "wait here", "wait there")]
    for task_id in ids[:2]:
        await office.ended(task_id)
    await office.until(ids[2], lambda record: "wait here" in office.begun)
    await office.do("task_cancel", {"task_id": ids[2]})
    lines = [
        f"- task_id: {task_id}  agent: worker  status: {status}  created: <time>"
        for task_id, status in zip(ids, ("completed", "failed", "cancelled", "running"), strict=True)
    ]
    answers = {
        None: lines,
        "": lines,
        "all": lines,
        " ALL ": lines,
        "completed": lines[:1],
        "Failed": lines[1:2],
        "cancelled": lines[2:3],
        "RUNNING": lines[3:],
    }
    for wanted, shown in answers.items():
        answer = await office.do("task_list", {"status_filter": wanted})
        first, *rest = answer.splitlines()
        assert first == f"{len(shown)} tracked task(s):"
        assert [line[: line.index("created:")] + "created: <time>" for line in rest] == shown
    assert await office.do("task_list", {"status_filter": "pending"}) == (
        "No background tasks tracked with status 'pending'."
    )
    assert await office.do("task_list", {"status_filter": "done"}) == (
        "Error: Unknown status_filter: done. Use one of: running, completed, failed, cancelled, pending, all."
    )


async def test_a_long_result_is_read_whole(office: Office) -> None:
    text = "line of the report\n" * 400
    task_id = await office.start(f"say {text}")
    record = await office.ended(task_id)
    assert record.result == f"{text[:1000]}…"
    assert record.result_file == f"agents/boss/tasks/s1.results/{task_id}.txt"
    file = office.root / (record.result_file or "")
    assert file.read_text() == text
    answer = await office.do("task_output", {"task_id": task_id})
    assert answer.split("Result:\n", 1)[1] == text
    file.unlink()
    answer = await office.do("task_output", {"task_id": task_id})
    assert answer.split("Result:\n", 1)[1] == (
        f"{text[:1000]}…\n[the whole result cannot be read: {record.result_file}: there is no such file or folder]"
    )


async def test_text_that_no_file_can_hold_harms_no_task(office: Office) -> None:
    office.answers["odd"] = say("\ud800 odd")
    tasks = [{"agent_id": "worker", "task": task, "timeout_seconds": 0} for task in ("odd", "say plain")]
    result = await office.run([call("agent_spawn", task) for task in tasks])
    odd, even = [await office.ended(task_id_in(text)) for text in texts(result)]
    assert (odd.status, odd.result) == (TaskStatus.COMPLETED, "\ufffd odd")
    assert (even.status, even.result) == (TaskStatus.COMPLETED, "plain")


async def test_what_the_model_reads_of_the_tools(office: Office) -> None:
    toolbox = inside.toolbox_of(office.runtime, office.boss)
    tools = {name: toolbox[name].descriptor for name in ("task_output", "task_cancel", "task_list")}
    schemas = {name: descriptor.parameters for name, descriptor in tools.items()}
    assert {name: list(schema["properties"]) for name, schema in schemas.items()} == {
        "task_output": ["task_id", "block", "timeout"],
        "task_cancel": ["task_id"],
        "task_list": ["status_filter"],
    }
    assert schemas["task_output"]["properties"]["block"]["default"] is True
    assert schemas["task_output"]["properties"]["timeout"]["default"] == 30_000
    assert schemas["task_output"]["required"] == ["task_id"]
