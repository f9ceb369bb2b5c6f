"""The two tables: what may follow what."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue import PersistedState, RunResult, RunStatus, ToolCall, ToolCallStatus
from retinue.core.results import CALL_MOVES
from retinue.core.runs import RUN_MOVES
from retinue.errors import IllegalMove
from retinue.log.state import CallState

LEGAL = {
    ("new", "running"),
    ("running", "succeeded"),
    ("running", "failed"),
    ("running", "suspended"),
    ("running", "cancelled"),
    ("suspended", "resuming"),
    ("suspended", "cancelled"),
    ("resuming", "running"),
    ("resuming", "cancelled"),
}


def test_the_call_table_is_the_written_one() -> None:
    assert {(a.value, b.value) for a, to in CALL_MOVES.items() for b in to} == LEGAL
    assert set(CALL_MOVES) == set(ToolCallStatus)


def test_terminal_statuses_lead_nowhere() -> None:
    assert set(RUN_MOVES) == set(RunStatus)
    ends = {"completed", "failed", "cancelled", "timeout", "succeeded"}
    for table in (CALL_MOVES, RUN_MOVES):
        for status, to in table.items():
            assert (status.value in ends) == (not to)


@given(st.lists(st.sampled_from(ToolCallStatus), max_size=12))
def test_a_call_moves_only_along_the_table_and_an_illegal_move_changes_nothing(wanted: list[ToolCallStatus]) -> None:
    call = CallState(ToolCall("c1", "t", {}), "m1")
    current = ToolCallStatus.NEW
    for status in wanted:
        if (current.value, status.value) in LEGAL:
            call.move(status)
            current = status
        else:
            with pytest.raises(IllegalMove, match=f"call 'c1' cannot go from {current} to {status}"):
                call.move(status)
        assert call.status is current


RUN_LEGAL = {
    *[("running", end) for end in ("completed", "failed", "cancelled", "timeout")],
    *[("running", wait) for wait in ("suspended", "waiting_input", "waiting_auth")],
    *[
        (wait, to)
        for wait in ("suspended", "waiting_input", "waiting_auth")
        for to in ("running", "cancelled", "failed")
    ],
}


@given(st.lists(st.sampled_from(RunStatus), max_size=12))
def test_a_run_moves_only_along_its_table(wanted: list[RunStatus]) -> None:
    current = RunStatus.RUNNING
    for status in wanted:
        legal = status in RUN_MOVES[current]
        assert legal == ((current.value, status.value) in RUN_LEGAL)
        current = status if legal else current
        if current.value in ("completed", "failed", "cancelled", "timeout"):
            assert not RUN_MOVES[current]


def test_the_error_survives_pickling() -> None:
    error = IllegalMove("call 'x'", "new", "failed")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_backend_may_write_the_status_of_its_result_as_a_word() -> None:
    fields: dict[str, Any] = {"run_id": "r", "thread_id": "t", "state": PersistedState()}
    assert RunResult(status="completed", **fields).status is RunStatus.COMPLETED  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'done' is not a valid RunStatus"):
        RunResult(status="done", **fields)  # type: ignore[arg-type]
