from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from retinue import HarnessAgent, LocalFilesystem, RunStatus, Runtime
from retinue.stores import MemoryStore
from retinue.subagents.task_tools import task_summary
from retinue.tasks import TaskScope, TaskStatus
from retinue.tasks.task import at
from retinue.testing import ScriptedModel, call, say
from retinue.testing.tasks import NOW, task_record

from .. import inside
from .office import Office, eventually, plain, task_id_in, texts

HEAD = "<task-notification>\nNews of your background tasks. The user has not seen this.\n\n"


def notice(*parts: str, running: int = 0) -> str:
    return HEAD + "\n\n".join([*parts, f"Still running: {running}."]) + "\n</task-notification>"


def part(status: str, body: str) -> str:
    return f"task_id: <task>\nagent_id: worker\nstatus: {status}\n{body}"


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with Office(tmp_path) as made:
        yield made


def spawn(task: str) -> Any:
    return call("agent_spawn", {"agent_id": "worker", "task": task, "timeout_seconds": 0})


async def test_an_end_is_announced_once_at_the_next_step_of_the_same_run(office: Office) -> None:
    async def once_it_ended(request: Any) -> Any:
        await office.ended(task_id_in(request.messages[-1].text))
        return call("agent_list")

    result = await office.run(spawn("say hi"), once_it_ended, call("agent_list"))
    assert office.announced() == [notice(part("completed", "result:\nhi"))]
    roles = [message.role.value for message in result.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    told = [event async for event in office.runtime.events(result.run_id) if event.kind == "custom"]
    assert [event.data["type"] for event in told] == ["tasks_announced"]  # pyright: ignore[reportAttributeAccessIssue]


async def test_an_end_is_announced_over_a_new_run_of_the_thread_and_only_there(office: Office) -> None:
    task_id = await office.start("say hi")
    await office.ended(task_id)
    await office.run(thread="s2")
    assert office.announced() == []
    await office.run(user="ann")
    assert office.announced() == []
    await office.run()
    assert office.announced() == [notice(part("completed", "result:\nhi"))]
    await office.run()
    assert len(office.announced()) == 1, "the message is in the conversation, once"


@pytest.mark.parametrize("wait", [True, False])
async def test_what_was_pulled_is_not_announced(office: Office, wait: bool) -> None:
    task_id = await office.start("wait here")
    office.gates["here"].set()
    if not wait:
        await office.ended(task_id)
        # The run that pulls begins with the news; a second task shows that only news is told.
    pulled = call("task_output", {"task_id": task_id})
    result = await office.run(pulled, call("agent_list"))
    assert "Result:\nwaited for here" in texts(result)[0]
    assert len(office.announced()) == (0 if wait else 1)
    await office.run()
    assert len(office.announced()) == (0 if wait else 1)


async def test_a_look_at_a_running_task_is_no_pull(office: Office) -> None:
    task_id = await office.start("wait here")
    await office.do("task_output", {"task_id": task_id, "block": False})
    await office.do("task_output", {"task_id": task_id, "timeout": 1})
    await office.do("task_list")
    office.gates["here"].set()
    await office.ended(task_id)
    await office.run()
    assert office.announced() == [notice(part("completed", "result:\nwaited for here"))]


async def test_a_task_the_model_cancelled_is_not_announced(office: Office) -> None:
    task_id = await office.start("wait here")
    await office.do("task_cancel", {"task_id": task_id})
    await office.run()
    assert office.announced() == []


async def test_a_cancel_that_came_too_late_does_not_hide_the_result(office: Office) -> None:
    task_id = await office.start("say hi")
    await office.ended(task_id)
    result = await office.run(call("task_cancel", {"task_id": task_id}))
    assert "already in terminal state" in texts(result)[0]
    assert office.announced() == [notice(part("completed", "result:\nhi"))]


async def test_ends_are_told_as_what_they_are_with_how_many_still_run(office: Office) -> None:
    ids = [await office.start(task) for task in ("say hi", "fail no luck", "say ", "wait here", "wait there")]
    for task_id in ids[:3]:
        await office.ended(task_id)
    service = inside.task_service(office.runtime, office.repository)
    await service.cancel(TaskScope("boss", "s1"), ids[3])
    await office.run()
    told = office.announced()
    assert all(text.startswith(HEAD) for text in told)
    parts = [part for text in told for part in text.removeprefix(HEAD).split("\n\n") if part.startswith("task_id")]
    assert sorted(parts) == sorted(
        [
            part("completed", "result:\nhi"),
            part("failed", "error: RuntimeError: no luck"),
            part("completed", "note: It gave no result."),
            part("cancelled", "error: the task was cancelled"),
        ]
    )
    assert told[-1].endswith("\n\nStill running: 1.\n</task-notification>")


async def test_ten_at_a_time_oldest_end_first(office: Office) -> None:
    result = await office.run([spawn(f"say n{number}") for number in range(23)])
    ids = [task_id_in(text) for text in texts(result)]
    ends = [await office.ended(task_id) for task_id in ids]
    await office.run(call("agent_list"), call("agent_list"), call("agent_list"))
    told = office.announced()
    assert [text.count("status: completed") for text in told] == [10, 10, 3]
    assert "13 more have ended; they are announced next, or use task_list()." in told[0]
    assert "3 more have ended" in told[1]
    assert "more have ended" not in told[2]
    shown = [line for text in told for line in text.splitlines() if line.startswith("n") and line[1:].isdigit()]
    ends.sort(key=lambda record: record.last_updated_at)
    assert shown == [record.result for record in ends]


async def test_a_long_result_is_cut_and_says_how_to_read_on(office: Office) -> None:
    task_id = await office.start("say " + "x" * 10_000)
    await office.ended(task_id)
    await office.run()
    cut = "x" * 4000 + '\n[6,000 more characters: task_output("<task>")]'
    assert office.announced() == [notice(part("completed", f"result:\n{cut}"))]


async def test_a_step_that_was_never_stored_did_not_announce(tmp_path: Path) -> None:
    """The process dies after the announcement and before the thread is saved: it is told again."""
    store = MemoryStore()

    def boss(script: Any) -> HarnessAgent:
        return HarnessAgent("boss", ScriptedModel(script), filesystem=LocalFilesystem(tmp_path))

    seen: list[list[str]] = []

    async def stuck(request: Any) -> Any:
        seen.append([plain(m.text) for m in request.messages if m.text.startswith("<task-notification>")])
        await asyncio.Event().wait()

    def answering(request: Any) -> Any:
        seen.append([plain(m.text) for m in request.messages if m.text.startswith("<task-notification>")])
        return say("done")

    first = boss(lambda _: say("done"))
    assert first.task_repository is not None
    await first.task_repository.add(task_record("t1", status=TaskStatus.COMPLETED, result="hi"))
    dying = Runtime([boss(stuck)], store=store)
    run = dying.stream("boss", "go", thread_id="s1")
    await eventually(lambda: seen)
    inside.kill_run(dying, run.run_id)
    for _ in range(2):
        async with Runtime([boss(answering)], store=store) as runtime:
            assert (await runtime.run("boss", "go", thread_id="s1")).status is RunStatus.COMPLETED
    text = HEAD + "task_id: t1\nagent_id: worker\nstatus: completed\nresult:\nhi\n\nStill running: 0.\n"
    text += "</task-notification>"
    assert seen[:2] == [[text], [text]]
    assert seen[2] == [text], "told once, and in the conversation ever after"
    await dying.close(grace=0.1)


def test_the_summary_shows_ten_running_first_then_newest() -> None:
    assert task_summary([]) == ""
    records = [
        replace(task_record(f"t{number:02}", status=status), created_at=at(NOW + number * 60))
        for number, status in enumerate([TaskStatus.COMPLETED] * 6 + [TaskStatus.RUNNING] * 3 + [TaskStatus.FAILED] * 5)
    ]
    records[0] = replace(records[0], status=TaskStatus.PENDING)
    records[7] = replace(records[7], awaiting="really?")
    assert task_summary(records).splitlines() == [
        "# Async tasks (current session)",
        "",
        "- task_id: t08  agent: worker  status: running  started: 08:08Z",
        "- task_id: t07  agent: worker  status: running (waits for a human)  started: 08:07Z",
        "- task_id: t06  agent: worker  status: running  started: 08:06Z",
        "- task_id: t00  agent: worker  status: pending  started: 08:00Z",
        "- task_id: t13  agent: worker  status: failed  started: 08:13Z",
        "- task_id: t12  agent: worker  status: failed  started: 08:12Z",
        "- task_id: t11  agent: worker  status: failed  started: 08:11Z",
        "- task_id: t10  agent: worker  status: failed  started: 08:10Z",
        "- task_id: t09  agent: worker  status: failed  started: 08:09Z",
        "- task_id: t05  agent: worker  status: completed  started: 08:05Z",
        "- ... (4 more - use task_list() to see all)",
        "",
        "What was said of them earlier may be old.",
    ]
    assert "more - use" not in task_summary(records[:10])


async def test_the_summary_is_in_every_request_of_the_session(office: Office) -> None:
    await office.run()
    assert "Async tasks" not in office.model.requests[-1].messages[-1].text
    task_id = await office.start("wait here")
    await office.until(task_id, lambda record: record.status is TaskStatus.RUNNING)
    await office.run()
    line = "- task_id: <task>  agent: worker  status: running  started: <time>"
    *others, last = [plain(message.text) for message in office.model.requests[-1].messages]
    assert last == f"# Async tasks (current session)\n\n{line}\n\nWhat was said of them earlier may be old."
    assert "Async tasks" not in "".join(others), "what changes comes last, so that the provider's cache has the rest"
    await office.run(thread="s2")
    assert "Async tasks" not in office.model.requests[-1].messages[-1].text
