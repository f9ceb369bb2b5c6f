"""The sweeper: finds tasks whose executor is gone, and ends them as failed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from ..core.errors import RetinueError
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
        settings = repository.settings
        self.proof = min(2 * settings.heartbeat, settings.orphan_after)
        """Seconds without a sign of life that must be seen, whatever a clock says: it may have been set, or this
        machine have slept, and the executor with it."""
        self.suspects = False
        """Whether the last sweep found tasks that are silent by the clock, but were not watched for long enough."""
        self._seen: dict[str, tuple[int, float]] = {}
        """Which version of a record was seen first when: silence that does not depend on anybody's clock."""

    async def sweep(self, living: Collection[str] = (), *, trust_clock: bool = False) -> list[TaskRecord]:
        """Look at every task but `living`, which this process executes; those that were given up on.

        With `trust_clock`, what is silent by the clock is given up on unseen: for a command that is not there for long.
        """
        proof = 0.0 if trust_clock else self.proof
        ended: list[TaskRecord] = []
        seen: dict[str, tuple[int, float]] = {}
        self.suspects = False
        for scope in await self._repository.open_scopes():
            try:
                for record in await self._repository.list(scope):
                    if record.status.is_terminal or record.task_id in living:
                        continue
                    after = await self._give_up(record, self._observe(record, seen), proof)
                    if after is not None:
                        _log.warning("task %s: %s", after.task_id, after.error_message)
                        ended.append(after)
            except RetinueError as exc:
                _log.error("the tasks of session %s cannot be swept: %s", scope.session_id, exc)
        self._seen = seen
        return ended

    async def _give_up(self, record: TaskRecord, observed: float, proof: float) -> TaskRecord | None:
        """End a task whose executor is gone; None where it may be alive."""
        orphan_after = self._repository.settings.orphan_after
        if sweep(record, self._clock(), orphan_after, observed) is None:
            return None
        if observed < proof:
            self.suspects = True
            return None
        given_up = False

        def give_up(current: TaskRecord) -> TaskRecord | None:
            nonlocal given_up
            # One that has changed has shown life since.
            ended = sweep(current, self._clock(), orphan_after, observed) if current == record else None
            given_up = ended is not None
            return ended

        after = await self._repository.update(record.scope, record.task_id, give_up)
        return after if given_up else None

    def _observe(self, record: TaskRecord, seen: dict[str, tuple[int, float]]) -> float:
        """Seconds for which a record has been as it is, as far as this process saw."""
        version, since = self._seen.get(record.task_id, (record.version, self._steady()))
        if version != record.version:
            since = self._steady()
        seen[record.task_id] = (record.version, since)
        return self._steady() - since
