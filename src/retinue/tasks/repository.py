"""The port of task records, and the implementation in memory. The record is the source of truth; memory is a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from ..core.errors import TaskStoreError
from .task import TaskRecord, TaskScope

LONGEST_RESULT = 4096
"""Bytes of a result that stay in the record."""

Change = Callable[[TaskRecord], TaskRecord | None]
"""The next record, or None to leave it. It may be called more than once and must do nothing else."""


Records = dict[str, TaskRecord]
"""The tasks of a session, by id."""


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

    `alive`: a process executes the task. `waiting`: its run waits for a human. `orphaned`: no process executes it, but
    one may take it over. `lost`: no process ever will.
    """

    status: Literal["alive", "waiting", "orphaned", "lost"]
    mark: str = ""
    """Differs after each sign of life."""
    owner: str | None = None
    """The process that executes it, or did last: its id as the owner of a log."""


class TaskRepository(Protocol):
    """Contract: an update is atomic, in this process and between processes. A terminal record is never changed, lost or
    torn. Every process reads what was written before its read."""

    settings: TaskSettings

    async def add(self, record: TaskRecord) -> None:
        """Add a new task."""

    async def get(self, scope: TaskScope, task_id: str) -> TaskRecord | None:
        """Return the task, if it is one of that session and user."""
        ...

    async def list(self, scope: TaskScope) -> Sequence[TaskRecord]:
        """Return the tasks of a session and user, oldest first."""
        ...

    async def update(self, scope: TaskScope, task_id: str, change: Change) -> TaskRecord | None:
        """Apply a change and return the record as it is afterwards; None if there is no such task."""
        ...

    async def keep_result(self, record: TaskRecord, text: str) -> str | None:
        """Store a result that is too long for its record, and return its place; None if it is not too long."""
        ...

    async def read_result(self, record: TaskRecord) -> str | None:
        """Return the whole result of a task."""
        ...

    async def open_scopes(self) -> Sequence[TaskScope]:
        """Return the sessions, of every user, that may have open tasks."""
        ...

    async def liveness(self, scope: TaskScope) -> Mapping[str, TaskLiveness]:
        """Return the state of the executors of open tasks, by task id. Any other task lives by its heartbeats."""
        ...


def is_long(text: str) -> bool:
    """Return whether a result is too long for its record."""
    return len(text) > LONGEST_RESULT // 4 and len(text.encode(errors="replace")) > LONGEST_RESULT


class SessionRecords:
    """Base of repositories that keep the records of a session together: they read and write all of them at once."""

    async def add(self, record: TaskRecord) -> None:
        def put(records: Records) -> None:
            if record.task_id in records:
                place = self._path(record.parent_session_id)
                raise TaskStoreError(place, f"task {record.task_id} is there already")
            records[record.task_id] = record

        await self._write(record.parent_session_id, put)

    async def get(self, scope: TaskScope, task_id: str) -> TaskRecord | None:
        return _find(await self._current(scope.session_id), scope, task_id)

    async def list(self, scope: TaskScope) -> Sequence[TaskRecord]:
        records = await self._current(scope.session_id)
        return [record for record in records.values() if record.user_id == scope.user_id]

    async def update(self, scope: TaskScope, task_id: str, change: Change) -> TaskRecord | None:
        def apply(records: Records) -> TaskRecord | None:
            record = _find(records, scope, task_id)
            changed = None if record is None else change(record)
            if changed is not None and changed != record:
                records[task_id] = changed
            return changed or record

        return await self._write(scope.session_id, apply)

    async def liveness(self, scope: TaskScope) -> Mapping[str, TaskLiveness]:
        return {}

    def _path(self, session_id: str) -> str:
        """Return the place of a session, for people."""
        raise NotImplementedError

    async def _current(self, session_id: str) -> Records:
        raise NotImplementedError

    async def _write(self, session_id: str, change: Callable[[Records], Any]) -> Any:
        """Apply a change to the records of a session, as one atomic step; return what it returns."""
        raise NotImplementedError


def _find(records: Records, scope: TaskScope, task_id: str) -> TaskRecord | None:
    record = records.get(task_id)
    return record if record is not None and record.user_id == scope.user_id else None


class MemoryTaskRepository(SessionRecords):
    """Task records in the memory of this process, for tests and short-lived agents.

    Agents that share one see each other's tasks, as those of one name do.
    """

    def __init__(self, settings: TaskSettings | None = None) -> None:
        self.settings = settings or TaskSettings()
        self._sessions: dict[str, Records] = {}

    def __repr__(self) -> str:
        return f"MemoryTaskRepository({sum(map(len, self._sessions.values()))} tasks)"

    async def keep_result(self, record: TaskRecord, text: str) -> str | None:
        return None

    async def read_result(self, record: TaskRecord) -> str | None:
        return record.result

    async def open_scopes(self) -> Sequence[TaskScope]:
        return open_scopes([record for session in self._sessions.values() for record in session.values()])

    def _path(self, session_id: str) -> str:
        return session_id

    async def _current(self, session_id: str) -> Records:
        return self._sessions.get(session_id, {})

    async def _write(self, session_id: str, change: Callable[[Records], Any]) -> Any:
        return change(self._sessions.setdefault(session_id, {}))


def open_scopes(records: Iterable[TaskRecord]) -> list[TaskScope]:
    """Return the sessions and users of the records that have not ended, sorted."""
    scopes = {record.scope for record in records if not record.status.is_terminal}
    return sorted(scopes, key=lambda scope: (scope.session_id, scope.user_id or ""))
