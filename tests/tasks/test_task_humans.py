"""A background child that waits for a human: it runs, waits, is answered through its run id, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from retinue import Decision, DecisionRefused, RunStatus, UnknownRun
from retinue.tasks import TaskRecord, TaskScope, TaskStatus
from retinue.tasks.sweeper import Sweeper

from .office import Office, plain, task_id_in, value_of

S1 = TaskScope("boss", "s1")


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    async with Office(tmp_path) as made:
        yield made


async def waiting(office: Office, task: str = "ask really?") -> TaskRecord:
    """A task that waits, as it stands then."""
    task_id = await office.start(task)
    return await office.until(task_id, lambda record: record.awaiting is not None)


def call_id(office: Office, number: int = 0) -> str:
    """The call of a worker that waits."""
    return f"ask_{len(office.worker_model.requests)}_{number + 1}"


async def test_it_is_running_says_what_it_waits_for_and_is_announced_once(office: Office) -> None:
    record = await waiting(office)
    assert (record.status, record.awaiting) == (TaskStatus.RUNNING, "really?")
    assert plain(await office.do("task_output", {"task_id": record.task_id, "block": False})) == (
        "task_id: <task>\nagent_id: worker\nstatus: Running\ncreated_at: <time>\n\nIt waits for a human: really?"
    )
    assert plain(await office.do("task_output", {"task_id": record.task_id, "timeout": 1})) == (
        "task_id: <task>\nstatus: running\nnote: It waits for a human: really?"
    )
    (told,) = office.announced()
    assert told == (
        "<task-notification>\nNews of your background tasks. The user has not seen this.\n\n"
        "task_id: <task>\nagent_id: worker\nstatus: waiting\nquestion: really?\n"
        "note: It goes on when a human has answered.\n\nStill running: 1.\n</task-notification>"
    )


async def test_an_answer_lets_it_complete_and_its_end_is_announced(office: Office) -> None:
    record = await waiting(office)
    assert record.run_id is not None
    result = await office.runtime.resume(record.run_id, {call_id(office): Decision.resume("yes")})
    assert (result.status, result.response) == (RunStatus.COMPLETED, "report: really? yes")
    ended = await office.ended(record.task_id)
    assert (ended.status, ended.result, ended.awaiting) == (TaskStatus.COMPLETED, "report: really? yes", None)
    await office.run()
    assert [text.count("status: completed") for text in office.announced()] == [1]
    assert office.asked == ["really?", "really?"]


async def test_while_it_goes_on_it_waits_for_nobody(office: Office) -> None:
    record = await waiting(office)
    assert record.run_id is not None
    answer = asyncio.create_task(office.runtime.resume(record.run_id, {call_id(office): Decision.resume("wait gate")}))
    going_on = await office.until(record.task_id, lambda record: record.awaiting is None)
    assert going_on.status is TaskStatus.RUNNING
    office.gates["gate"].set()
    assert (await answer).response == "report: really? wait gate"
    await office.ended(record.task_id)


async def test_its_task_events_end_with_its_end(office: Office) -> None:
    record = await waiting(office)
    assert record.run_id is not None
    assert record.parent_run_id is not None
    await office.runtime.resume(record.run_id, {call_id(office): Decision.resume("yes")})
    events: list[Any] = [event async for event in office.runtime.events(record.parent_run_id)]
    told = [event.status for event in events if event.kind == "task_updated"]
    assert told == ["PENDING", "RUNNING", "RUNNING", "RUNNING", "COMPLETED"]
    legs = [event.status for event in events if event.kind == "run_finished" and event.run_id == record.run_id]
    assert legs == ["suspended", "completed"]


async def test_two_questions_one_after_the_other_are_both_announced(office: Office) -> None:
    record = await waiting(office, "ask first? and second?")
    assert record.run_id is not None
    assert record.awaiting == "first?; second?"
    await office.run()
    once = await office.runtime.resume(record.run_id, {call_id(office): Decision.resume("yes")})
    assert once.status is RunStatus.SUSPENDED
    again = await office.until(record.task_id, lambda record: record.awaiting == "second?")
    assert again.status is TaskStatus.RUNNING
    await office.run()
    questions = [line for text in office.announced() for line in text.splitlines() if line.startswith("question: ")]
    assert questions == ["question: first?; second?", "question: second?"]
    done = await office.runtime.resume(record.run_id, {call_id(office, 1): Decision.resume("no")})
    assert done.status is RunStatus.COMPLETED


async def test_an_answer_may_come_before_anybody_listens(office: Office) -> None:
    """Whoever follows the log answers at the very event that says it waits."""
    answered: list[Any] = []

    async def follow(run_id: str) -> None:
        async for event in office.runtime.events(run_id):
            if event.kind == "run_finished" and event.agent == "worker" and not answered:
                answered.append(event.run_id)
                result = await office.runtime.resume(event.run_id, {call_id(office): Decision.resume("yes")})
                answered.append(result.status)

    task_id = await office.start("ask really?")
    following = asyncio.create_task(follow((await office.record(task_id)).parent_run_id or ""))
    assert (await office.ended(task_id)).result == "report: really? yes"
    await asyncio.wait_for(following, 90)
    assert answered[1] is RunStatus.COMPLETED


async def test_a_wrong_answer_changes_nothing_and_a_repeated_one_neither(office: Office) -> None:
    record = await waiting(office)
    assert record.run_id is not None
    with pytest.raises(DecisionRefused, match="does not wait for 'nobody'"):
        await office.runtime.resume(record.run_id, {"nobody": Decision.resume("yes")})
    assert await office.record(record.task_id) == record
    with pytest.raises(UnknownRun):
        await office.runtime.resume("run_of_nobody", {"x": Decision.resume("yes")})
    decision = Decision.resume("yes")
    first = await office.runtime.resume(record.run_id, {call_id(office): decision})
    assert first.status is RunStatus.COMPLETED
    await office.ended(record.task_id)
    assert await office.runtime.resume(record.run_id, {"ask_1_1": decision}) == first
    with pytest.raises(DecisionRefused, match="completed, it waits for nothing"):
        await office.runtime.resume(record.run_id, {"ask_1_1": Decision.resume("no")})
    assert office.asked == ["really?", "really?"]


async def test_an_answer_to_the_run_that_started_it_is_refused_and_names_the_run_to_answer(office: Office) -> None:
    record = await waiting(office)
    wanted = rf"it waits for nothing; background tasks of it wait: answer run '{record.run_id}'$"
    with pytest.raises(DecisionRefused, match=wanted):
        await office.runtime.resume(record.parent_run_id or "", {call_id(office): Decision.resume("yes")})


async def test_it_is_not_swept_however_long_it_waits(office: Office) -> None:
    record = await waiting(office)
    steady = iter([0.0, *[1e9] * 20])
    other = Sweeper(office.repository, clock=lambda: 9e9, steady=lambda: next(steady))
    assert await other.sweep() == await other.sweep() == []
    assert (await office.record(record.task_id)).status is TaskStatus.RUNNING


async def test_it_can_be_cancelled_while_it_waits(office: Office) -> None:
    record = await waiting(office)
    assert plain(await office.do("task_cancel", {"task_id": record.task_id})) == (
        "task_id: <task>\nstatus: cancelled\nCancellation requested successfully."
    )
    ended = await office.record(record.task_id)
    assert (ended.status, ended.awaiting) == (TaskStatus.CANCELLED, None)
    events: list[Any] = [event async for event in office.runtime.events(record.parent_run_id or "")]
    legs = [event.status for event in events if event.kind == "run_finished" and event.run_id == record.run_id]
    assert legs == ["suspended", "cancelled"]
    with pytest.raises(DecisionRefused, match="cancelled, it waits for nothing"):
        await office.runtime.resume(record.run_id or "", {"ask_1_1": Decision.resume("yes")})


async def test_a_message_to_one_that_waits_is_refused_until_the_human_has_answered(office: Office) -> None:
    """Its conversation is not over: what is sent meanwhile would be lost with it."""
    record = await waiting(office)
    assert record.run_id is not None
    call, send = call_id(office), {"agent_key": record.agent_key, "message": "say more"}
    assert await office.do("agent_send", send) == (
        "Error: agent 'worker' could not be run: it waits for a decision: send your message when it has gone on"
    )
    assert office.begun == ["ask really?"]
    await office.runtime.resume(record.run_id, {call: Decision.resume("yes")})
    await office.ended(record.task_id)
    assert plain(await office.do("agent_send", send)) == "agent_key: <key of worker>\nstatus: ok\nreply:\nmore"
    said = [message.text for message in office.worker_model.requests[-1].messages if message.role != "system"]
    assert said == ["ask really?", "", "really? yes", "report: really? yes", "say more"]


async def test_a_child_cancelled_while_it_waited_takes_another_message(office: Office) -> None:
    record = await waiting(office)
    await office.do("task_cancel", {"task_id": record.task_id})
    answer = await office.do("agent_send", {"agent_key": record.agent_key, "message": "say more"})
    assert plain(answer) == "agent_key: <key of worker>\nstatus: ok\nreply:\nmore"
    said = [message.text for message in office.worker_model.requests[-1].messages if message.role == "user"]
    assert said == ["ask really?", "say more"]


async def test_closing_the_runtime_ends_what_waits(tmp_path: Path) -> None:
    office = Office(tmp_path)
    record = await waiting(office)
    await office.runtime.close(grace=1)
    ended = await office.record(record.task_id)
    assert (ended.status, ended.error_message) == (TaskStatus.CANCELLED, "the runtime was closed")


@pytest.mark.parametrize("answer", ["yes", "wait gate"])
async def test_a_promoted_child_may_come_to_wait(office: Office, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    wait = asyncio.wait

    async def sooner(tasks: Any, *, timeout: float | None = None, **options: Any) -> Any:
        return await wait(tasks, timeout=0.05 if timeout == 1 else timeout, **options)

    monkeypatch.setattr("retinue.subagents.work.asyncio.wait", sooner)
    work = office.work

    async def slowly(request: Any) -> Any:
        await office.gates["first"].wait()
        return await work(request)

    office.worker_turn = slowly
    spawned = await office.spawn("ask really?", 1)
    assert value_of("status", spawned) == "timeout_promoted"
    office.gates["first"].set()
    record = await office.until(task_id_in(spawned), lambda record: record.awaiting is not None)
    office.gates["gate"].set()
    result = await office.runtime.resume(record.run_id or "", {call_id(office): Decision.resume(answer)})
    assert result.response == f"report: really? {answer}"
    assert (await office.ended(record.task_id)).result == f"report: really? {answer}"
