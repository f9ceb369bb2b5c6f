from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from retinue.tasks import TaskRecord, TaskScope, TaskSettings, TaskStatus
from retinue.tasks.task import TASK_MOVES, at, await_human, beat, begin, finish, request_cancel, sweep

PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = TaskStatus
ENDS = (COMPLETED, FAILED, CANCELLED)
NOW = 1_000_000.0


def make(status: TaskStatus = PENDING, **fields: Any) -> TaskRecord:
    given = {
        "task_id": "task_1",
        "sub_agent_id": "worker",
        "parent_agent_id": "boss",
        "parent_session_id": "s1",
        "status": status,
        "created_at": at(NOW),
        "last_updated_at": at(NOW),
        "node": None if status is PENDING else "n1",
    }
    return TaskRecord(**{**given, **fields})


def test_the_table() -> None:
    assert {status: set(TASK_MOVES[status]) for status in TaskStatus} == {
        PENDING: {RUNNING, COMPLETED, FAILED, CANCELLED},
        RUNNING: {COMPLETED, FAILED, CANCELLED},
        COMPLETED: set(),
        FAILED: set(),
        CANCELLED: set(),
    }
    assert [status for status in TaskStatus if status.is_terminal] == list(ENDS)


@pytest.mark.parametrize("status", ENDS)
def test_nothing_moves_a_terminal_record(status: TaskStatus) -> None:
    for cancelled, awaiting in itertools.product((False, True), (None, "really?")):
        record = make(status, cancel_requested=cancelled, awaiting=awaiting)
        later = NOW + 1e9
        moved = [
            begin(record, later, "n1"),
            request_cancel(record, later),
            beat(record, later, "n1"),
            await_human(record, later, "why?"),
            await_human(record, later, None),
            sweep(record, later, 1, 1e9),
            *[finish(record, end, later, result="late") for end in TaskStatus],
        ]
        assert moved == [None] * len(moved)


def test_begin_takes_a_pending_task_for_a_node() -> None:
    assert begin(make(), NOW + 1, "n1") == make(RUNNING, node="n1", last_updated_at=at(NOW + 1), version=2)
    assert begin(make(cancel_requested=True), NOW, "n1") is None
    assert begin(make(RUNNING), NOW, "n2") is None


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("status", [PENDING, RUNNING])
def test_finish_ends_what_has_not_ended(status: TaskStatus, end: TaskStatus) -> None:
    record = make(status, awaiting="really?", cancel_requested=True)
    ended = finish(record, end, NOW + 2, result="r", result_file="f", error="e")
    assert ended == replace(
        record,
        status=end,
        result="r",
        result_file="f",
        error_message="e",
        awaiting=None,
        last_updated_at=at(NOW + 2),
        version=2,
    )


def test_finish_is_for_ends_only() -> None:
    assert finish(make(RUNNING), PENDING, NOW) is None
    assert finish(make(RUNNING), RUNNING, NOW) is None


def test_a_cancel_ends_what_nobody_has_begun_and_asks_the_executor_otherwise() -> None:
    assert request_cancel(make(), NOW + 1) == make(
        CANCELLED, node=None, cancel_requested=True, last_updated_at=at(NOW + 1), version=2
    )
    asked = request_cancel(make(RUNNING), NOW + 1)
    assert asked == make(RUNNING, cancel_requested=True, version=2), "the sign of life is the executor's to move"
    assert asked is not None
    assert request_cancel(asked, NOW + 2) is None


def test_only_the_executor_shows_life() -> None:
    assert beat(make(RUNNING), NOW + 5, "n1") == make(RUNNING, last_updated_at=at(NOW + 5), version=2)
    assert beat(make(RUNNING), NOW + 5, "n2") is None
    assert beat(make(), NOW + 5, "n1") is None


def test_a_clock_that_was_set_back_does_not_age_a_record() -> None:
    assert beat(make(RUNNING), NOW - 3600, "n1") == make(RUNNING, version=2)


def test_waiting_for_a_human_is_noted_once_and_taken_back() -> None:
    waiting = await_human(make(RUNNING), NOW + 1, "really?")
    assert waiting == make(RUNNING, awaiting="really?", last_updated_at=at(NOW + 1), version=2)
    assert waiting is not None
    assert await_human(waiting, NOW + 2, "really?") is None
    assert await_human(waiting, NOW + 2, None) == make(RUNNING, last_updated_at=at(NOW + 2), version=3)


@pytest.mark.parametrize("status", [PENDING, RUNNING])
@pytest.mark.parametrize(("silence", "observed"), [(600, 0), (0, 600), (-9999, 600), (700, 650)])
def test_silence_by_the_clock_or_as_observed_ends_a_task(status: TaskStatus, silence: float, observed: float) -> None:
    record = make(status)
    swept = sweep(record, NOW + silence, 600, observed)
    assert swept is not None
    assert swept.status is FAILED
    seconds = max(silence, observed)
    assert swept.error_message == (
        f"executor lost: no heartbeat for {seconds:.0f} seconds (last updated: 1970-01-12T13:46:40Z)"
    )
    assert sweep(record, NOW + 599.9, 600, 599.9) is None


def test_what_is_not_swept() -> None:
    assert sweep(make(RUNNING, awaiting="really?"), NOW + 1e6, 600) is None
    assert sweep(make(RUNNING, transport_type="tasks"), NOW + 1e6, 600) is None


def test_an_orphan_that_was_to_stop_has_stopped() -> None:
    for awaiting in (None, "really?"):
        swept = sweep(make(RUNNING, cancel_requested=True, awaiting=awaiting), NOW + 1e6, 600)
        assert swept is not None
        assert (swept.status, swept.awaiting) == (CANCELLED, None)


def test_a_record_comes_back_from_json_and_leaves_out_what_is_not_set() -> None:
    record = make(
        RUNNING,
        user_id="u",
        input="do it",
        agent_key="agent:worker:1",
        sub_session_id="sub-1",
        parent_run_id="run_1",
        parent_tool_call_id="call_1",
        run_id="run_2",
        result="r",
        result_file="f.txt",
        error_message="e",
        cancel_requested=True,
        awaiting="really?",
        transport_type="tasks",
        version=7,
    )
    data = msgspec.json.encode(record)
    assert msgspec.json.decode(data, type=TaskRecord) == record
    assert list(json.loads(data)) == [
        "taskId",
        "subAgentId",
        "parentAgentId",
        "parentSessionId",
        "userId",
        "status",
        "input",
        "agentKey",
        "subSessionId",
        "parentRunId",
        "parentToolCallId",
        "runId",
        "result",
        "resultFile",
        "errorMessage",
        "cancelRequested",
        "awaiting",
        "transportType",
        "node",
        "createdAt",
        "lastUpdatedAt",
        "version",
    ]
    assert json.loads(msgspec.json.encode(make())) == {
        "taskId": "task_1",
        "subAgentId": "worker",
        "parentAgentId": "boss",
        "parentSessionId": "s1",
        "status": "PENDING",
        "createdAt": "1970-01-12T13:46:40Z",
        "lastUpdatedAt": "1970-01-12T13:46:40Z",
    }


def test_a_record_without_a_status_is_read_as_pending() -> None:
    data = json.loads(msgspec.json.encode(make()))
    del data["status"]
    assert msgspec.json.decode(json.dumps(data), type=TaskRecord) == make()


def test_a_record_of_a_later_version_is_still_read() -> None:
    data = {**json.loads(msgspec.json.encode(make())), "somethingNew": {"a": 1}}
    assert msgspec.json.decode(json.dumps(data), type=TaskRecord) == make()


def test_whose_a_record_is() -> None:
    assert make(user_id="u").scope == TaskScope("boss", "s1", "u")
    assert (make().is_remote, make(transport_type="tasks").is_remote) == (False, True)
    assert at(0) == datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("name", ["heartbeat", "orphan_after", "sweep_every", "look_every"])
def test_settings_are_above_zero(name: str) -> None:
    with pytest.raises(ValueError, match=rf"TaskSettings\.{name} must be above 0 seconds"):
        TaskSettings(**{name: 0})


def test_a_living_task_has_time_to_beat() -> None:
    with pytest.raises(ValueError, match="orphan_after must be longer than heartbeat"):
        TaskSettings(heartbeat=600)
    settings = TaskSettings()
    assert (settings.heartbeat, settings.orphan_after, settings.sweep_every) == (30, 600, 300)
