"""Port: the store of task records. The record is the truth; memory is only a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct

from .task import TaskRecord, TaskScope

LONGEST_RESULT = 4096
"""Bytes of a result that stay in the record."""

Change = Callable[[TaskRecord], TaskRecord | None]
"""The next record, or None to leave it. It may be called more than once and must do nothing else."""


class TaskSettings(Struct, frozen=True, kw_only=True):
    """The times of heartbeats, and of giving up on a task without them."""

    heartbeat: float = 30.0
    orphan_after: float = 600.0
    sweep_every: float = 300.0
    look_every: float = 0.5
    """Seconds between two looks at what other processes wrote: cancels, ends."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"TaskSettings.{name} must be above 0 seconds")
        if self.orphan_after <= self.heartbeat:
            raise ValueError("TaskSettings.orphan_after must be longer than heartbeat, or living tasks are given up on")


class TaskLiveness(Struct, frozen=True, kw_only=True):
    """The state of the executor of a task, if the repository knows it without heartbeats.

    `alive`: somebody works on the task. `waiting`: nobody needs to, its run waits for a human. `orphaned`: nobody does,
    but a process may take it over. `lost`: nobody ever will.
    """

    status: Literal["alive", "waiting", "orphaned", "lost"]
    mark: str = ""
    """Differs after each sign of life."""
    owner: str | None = None
    """The process that works on it, or did last, by the id that it has as the owner of a log."""


class TaskRepository(Protocol):
    """Contract: an update is atomic, in this process and between processes; a terminal record is never changed, lost
    or torn; what was written is read by every process that looks afterwards."""

    settings: TaskSettings

    async def add(self, record: TaskRecord) -> None:
        """A new task."""
        ...

    async def get(self, scope: TaskScope, task_id: str) -> TaskRecord | None:
        """The task, if it is one of that session and user."""
        ...

    async def list(self, scope: TaskScope) -> Sequence[TaskRecord]:
        """The tasks of a session and user, oldest first."""
        ...

    async def update(self, scope: TaskScope, task_id: str, change: Change) -> TaskRecord | None:
        """Apply a change; the record as it is afterwards, None where there is no such task."""
        ...

    async def update_all(self, changes: Sequence[tuple[TaskScope, str, Change]]) -> None:
        """Several at once, each as `update`."""
        ...

    async def keep_result(self, record: TaskRecord, text: str) -> str | None:
        """Put a result that is too long for its record elsewhere, and say where; None where it is not too long."""
        ...

    async def read_result(self, record: TaskRecord) -> str | None:
        """The whole result of a task."""
        ...

    async def open_scopes(self) -> Sequence[TaskScope]:
        """The sessions that may have tasks which have not ended, of every user."""
        ...

    async def liveness(self, scope: TaskScope) -> Mapping[str, TaskLiveness]:
        """Return the state of the executors of open tasks, by task id. Any other task lives by its heartbeats."""
        ...


def is_long(text: str) -> bool:
    """Return whether a result is too long for its record."""
    return len(text) > LONGEST_RESULT // 4 and len(text.encode(errors="replace")) > LONGEST_RESULT
