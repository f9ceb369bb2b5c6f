"""Task records in the memory of this process: for tests, and for agents whose tasks need not outlive it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.errors import TaskStoreError
from .repository import Change, TaskLiveness, TaskSettings
from .task import TaskRecord, TaskScope


class MemoryTaskRepository:
    """Nothing is written anywhere. Agents that share one see each other's tasks, as those of one name do."""

    def __init__(self, settings: TaskSettings | None = None) -> None:
        self.settings = settings or TaskSettings()
        self._sessions: dict[str, dict[str, TaskRecord]] = {}

    def __repr__(self) -> str:
        return f"MemoryTaskRepository({sum(map(len, self._sessions.values()))} tasks)"

    async def add(self, record: TaskRecord) -> None:
        records = self._sessions.setdefault(record.parent_session_id, {})
        if record.task_id in records:
            raise TaskStoreError(record.parent_session_id, f"task {record.task_id} is there already")
        records[record.task_id] = record

    async def get(self, scope: TaskScope, task_id: str) -> TaskRecord | None:
        record = self._sessions.get(scope.session_id, {}).get(task_id)
        return record if record is not None and record.user_id == scope.user_id else None

    async def list(self, scope: TaskScope) -> Sequence[TaskRecord]:
        records = self._sessions.get(scope.session_id, {})
        return [record for record in records.values() if record.user_id == scope.user_id]

    async def update(self, scope: TaskScope, task_id: str, change: Change) -> TaskRecord | None:
        record = await self.get(scope, task_id)
        if record is None:
            return None
        changed = change(record) or record
        self._sessions[scope.session_id][task_id] = changed
        return changed

    async def update_all(self, changes: Sequence[tuple[TaskScope, str, Change]]) -> None:
        for scope, task_id, change in changes:
            await self.update(scope, task_id, change)

    async def keep_result(self, record: TaskRecord, text: str) -> str | None:
        return None

    async def read_result(self, record: TaskRecord) -> str | None:
        return record.result

    async def open_scopes(self) -> Sequence[TaskScope]:
        records = [record for session in self._sessions.values() for record in session.values()]
        return sorted(
            {record.scope for record in records if not record.status.is_terminal},
            key=lambda scope: (scope.session_id, scope.user_id or ""),
        )

    async def liveness(self, scope: TaskScope) -> Mapping[str, TaskLiveness]:
        return {}
