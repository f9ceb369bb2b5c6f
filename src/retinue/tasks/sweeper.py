"""The sweeper: finds tasks whose executor is gone, and ends them as failed."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection

from ..core.errors import RetinueError
from ..core.processes import has_process_ended, is_pid_used
from .repository import Change, TaskLiveness, TaskRepository
from .task import TaskRecord, give_up, give_up_killed, sweep

_log = logging.getLogger(__name__)
_Sign = tuple[object, float]
"""A sign of life, and when it was first seen."""


class Sweeper:
    """Ends tasks whose executor is gone. Any process may sweep at any time: a record is ended once, by the first.

    A task is alive by its heartbeats or, if the repository knows it (`liveness`), by the owner of its log.
    """

    def __init__(
        self,
        repository: TaskRepository,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._repository, self._clock, self._steady = repository, clock, steady
        settings = repository.settings
        self.proof = min(2 * settings.heartbeat, settings.orphan_after)
        """Seconds of silence that this process must observe: a clock can be set, and a machine can sleep."""
        self.suspects = False
        """True if the last sweep found tasks that are silent by the clock, but were not watched for long enough."""
        self.unwatched: list[TaskRecord] = []
        """The tasks of the last sweep that servers execute and no process watches any more."""
        self._seen: dict[str, _Sign] = {}
        """The last sign of life of each task, and when this process first saw it."""

    async def sweep(self, living: Collection[str] = (), *, trust_clock: bool = False) -> list[TaskRecord]:
        """End the tasks whose executors are gone, except `living`, which this process executes; return them.

        With `trust_clock`, old timestamps are enough: for a command that cannot observe for long. Then tasks of stored runs
        are not ended, because the next process on the store continues them.
        """
        ended: list[TaskRecord] = []
        before, self._seen, self.suspects = self._seen, {}, False
        self.unwatched = []
        for scope in await self._repository.open_scopes():
            try:
                # Liveness first: a task that ends in between is then read as ended.
                known = await self._repository.liveness(scope)
                for record in await self._repository.list(scope):
                    if record.status.is_terminal or record.task_id in living:
                        continue
                    if self._is_unwatched(record, before.get(record.task_id)):
                        self.unwatched.append(record)
                    proof = 0.0 if trust_clock and record.log_id is None else self.proof
                    change = self._judge(record, known.get(record.task_id), before.get(record.task_id), proof)
                    after = None if change is None else await self._give_up(record, change)
                    if after is not None:
                        _log.warning("task %s: %s", after.task_id, after.error_message)
                        ended.append(after)
            except RetinueError as exc:
                _log.error("the tasks of session %s cannot be swept: %s", scope.session_id, exc)
        return ended

    def _is_unwatched(self, record: TaskRecord, seen: _Sign | None) -> bool:
        """Return whether no process watches a remote task, and no next owner of a log will."""
        if not record.is_remote or record.log_id is not None or record.node is None:
            return False
        silent = self._silence(record.task_id, record.version, seen)
        return is_unwatched(record) or silent >= self._repository.settings.orphan_after

    def _judge(self, record: TaskRecord, known: TaskLiveness | None, seen: _Sign | None, proof: float) -> Change | None:
        """Return the change that ends a task; None if its executor may be alive."""
        if known is not None:
            return self._judge_known(record, known, seen)
        if is_abandoned(record):
            return lambda current: give_up_killed(current, self._clock())
        orphan_after = self._repository.settings.orphan_after
        observed = self._silence(record.task_id, record.version, seen)
        if sweep(record, self._clock(), orphan_after, observed) is None:
            return None
        if observed < proof:
            self.suspects = True
            return None
        return lambda current: sweep(current, self._clock(), orphan_after, observed)

    def _judge_known(self, record: TaskRecord, known: TaskLiveness, seen: _Sign | None) -> Change | None:
        """As `_judge`, for a task that lives without heartbeats."""
        if known.status == "alive":
            return None
        if known.status == "lost":
            return lambda current: give_up(current, self._clock(), "its run has ended without it")
        # It may wait for a human until it is cancelled.
        if (known.status == "waiting" or record.awaiting is not None) and not record.cancel_requested:
            return None
        silent = self._silence(record.task_id, known.mark, seen)
        if silent < self._repository.settings.orphan_after:
            return None
        return lambda current: give_up(current, self._clock(), f"nobody has continued its run for {silent:.0f} seconds")

    async def _give_up(self, record: TaskRecord, change: Change) -> TaskRecord | None:
        """End a task, unless its record has changed: then it is alive."""
        given_up = False

        def end(current: TaskRecord) -> TaskRecord | None:
            nonlocal given_up
            ended = change(current) if current == record else None
            given_up = ended is not None
            return ended

        after = await self._repository.update(record.scope, record.task_id, end)
        return after if given_up else None

    def _silence(self, task_id: str, mark: object, seen: _Sign | None) -> float:
        """Return the seconds since this process first saw the last sign of life of a task."""
        now = self._steady()
        since = seen[1] if seen is not None and seen[0] == mark else now
        self._seen[task_id] = (mark, since)
        return now - since


def is_node_gone(node: str) -> bool:
    """Return whether a node is known to be gone: a process of this machine, in this boot, that has ended.

    A node is `<host>-<pid>-<random>@<process identity>`. One without an identity is judged by host and pid.
    """
    name, _, identity = node.partition("@")
    if identity:
        return has_process_ended(identity)
    host, _, pid = name.rpartition("-")[0].rpartition("-")
    return host == socket.gethostname() and pid.isdigit() and not is_pid_used(int(pid))


def is_unwatched(record: TaskRecord) -> bool:
    """Return whether a server executes a task whose process has ended, and no process continues its parent run."""
    return record.is_remote and _has_lost_process(record)


def is_abandoned(record: TaskRecord) -> bool:
    """Return whether the process of a task has ended and no other can continue it, because its run was not stored."""
    return not record.is_remote and _has_lost_process(record)


def _has_lost_process(record: TaskRecord) -> bool:
    if record.status.is_terminal or record.log_id is not None or record.node is None:
        return False
    return is_node_gone(record.node)
