"""The life cycles of runs and tool calls: one table each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class RunStatus(StrEnum):
    """The status of a run."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    SUSPENDED = "suspended"
    """A call of it waits for a human: `RunResult.suspended` has the tickets."""
    WAITING_INPUT = "waiting_input"
    """A child on another server waits for an answer to its question."""
    WAITING_AUTH = "waiting_auth"
    """A child on another server waits for credentials."""

    @property
    def is_terminal(self) -> bool:
        return self in ENDED

    @property
    def is_waiting(self) -> bool:
        """True while the run waits for a human."""
        return self in WAITING


class ToolCallStatus(StrEnum):
    """The status of a tool call."""

    NEW = "new"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    CANCELLED = "cancelled"


WAITING = (RunStatus.SUSPENDED, RunStatus.WAITING_INPUT, RunStatus.WAITING_AUTH)
ENDED = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.TIMEOUT})
_CALL_ENDED = frozenset({ToolCallStatus.SUCCEEDED, ToolCallStatus.FAILED, ToolCallStatus.CANCELLED})

RUN_MOVES: Mapping[RunStatus, frozenset[RunStatus]] = {
    RunStatus.RUNNING: ENDED.union(WAITING),
    **dict.fromkeys(WAITING, frozenset({RunStatus.RUNNING, RunStatus.CANCELLED, RunStatus.FAILED})),
    **dict.fromkeys(ENDED, frozenset[RunStatus]()),
}

CALL_MOVES: Mapping[ToolCallStatus, frozenset[ToolCallStatus]] = {
    ToolCallStatus.NEW: frozenset({ToolCallStatus.RUNNING}),
    ToolCallStatus.RUNNING: _CALL_ENDED | {ToolCallStatus.SUSPENDED},
    ToolCallStatus.SUSPENDED: frozenset({ToolCallStatus.RESUMING, ToolCallStatus.CANCELLED}),
    ToolCallStatus.RESUMING: frozenset({ToolCallStatus.RUNNING, ToolCallStatus.CANCELLED}),
    **dict.fromkeys(_CALL_ENDED, frozenset[ToolCallStatus]()),
}
