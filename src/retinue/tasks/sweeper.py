"""The sweeper: finds tasks whose executor is gone, and ends them as failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from .lifecycle import sweep
from .repository import TaskRepository
from .task import TaskRecord

_log = logging.getLogger(__name__)


class Sweeper:
    """Any process may sweep, as often as it likes: a record is ended once, by whoever comes first."""

    def __init__(
        self,
        repository: TaskRepository,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repository, self._clock, self._steady = repository, clock, steady
        self._seen: dict[str, tuple[int, float]] = {}
        """Which version of a record was seen first when: silence that does not depend on anybody's clock."""

    async def sweep(self, living: Collection[str] = ()) -> list[TaskRecord]:
        """Look at every task but `living`, which this process executes; those that were given up on."""
        orphan_after = self._repository.settings.orphan_after
        ended: list[TaskRecord] = []
        seen: dict[str, tuple[int, float]] = {}
        for scope in await self._repository.open_scopes():
            for record in await self._repository.list(scope):
                if record.status.is_terminal or record.task_id in living:
                    continue
                observed = self._observe(record, seen)
                if sweep(record, self._clock(), orphan_after, observed) is None:
                    continue

                def give_up(current: TaskRecord, known: TaskRecord = record) -> TaskRecord | None:
                    if current.version != known.version:
                        return None  # it has shown life since
                    return sweep(current, self._clock(), orphan_after, self._observed(known))

                after = await self._repository.update(scope, record.task_id, give_up)
                if after is not None and after.status.is_terminal and after.version == record.version + 1:
                    _log.warning("task %s: %s", after.task_id, after.error_message)
                    ended.append(after)
        self._seen = seen
        return ended

    def _observe(self, record: TaskRecord, seen: dict[str, tuple[int, float]]) -> float:
        """Seconds for which a record has been as it is, as far as this process saw."""
        version, since = self._seen.get(record.task_id, (record.version, self._steady()))
        if version != record.version:
            since = self._steady()
        seen[record.task_id] = (record.version, since)
        return self._steady() - since

    def _observed(self, record: TaskRecord) -> float:
        version, since = self._seen.get(record.task_id, (record.version, self._steady()))
        return self._steady() - since if version == record.version else 0.0
