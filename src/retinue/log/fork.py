"""Copies of a log up to an event: where the log may be cut, and its rows under new ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.errors import ConfigurationError
from ..core.events import ChildFinished, ChildStarted, Event, RunStarted
from ..core.rows import LogRow, Private
from ..core.runs import Grant, RunIdentity, unique
from .fold import fold
from .state import LogState, RunState

SHOWN = 6
"""The number of places that an error names."""


def is_boundary(tree: LogState, root: RunState | None) -> bool:
    """Return whether nothing is in progress: the root is between steps, or it and all runs below are suspended or ended."""
    if root is None or root.awaits_history or tree.has_open_tasks():
        return False
    if not (root.waits or root.is_over) and (root.step_open or root.open_calls or root.jobs):
        return False
    # A question of a run on a server cannot be copied: the server would get two answers.
    return all(run.is_over or (run.waits and not run.tickets) for run in tree.runs.values() if run is not root)


def check_place(rows: Sequence[LogRow], run_id: str, seq: int, place: str = "") -> None:
    """Raise if a run cannot be forked at an event; the error names the nearest events where it can."""
    tree, places = LogState(), list[int]()
    for number, row in enumerate(rows):
        fold(tree, row, place, run_id)
        is_last = number + 1 == len(rows) or rows[number + 1].seq > row.seq
        if is_last and is_boundary(tree, tree.runs.get(run_id)):
            places.append(row.seq)
    if seq not in places:
        nearest = sorted(sorted(places, key=lambda place: abs(place - seq))[:SHOWN])
        known = ", ".join(map(str, nearest)) or "nowhere"
        why = "where work is in progress" if 1 <= seq <= tree.seq else f"its log has events 1 to {tree.seq}"
        raise ConfigurationError(f"run {run_id!r} cannot be forked at event {seq}, {why}; it can be at: {known}")


class Copy:
    """Copies the rows of a log up to an event for a new run: with new ids, without deltas, numbered again."""

    def __init__(self, rows: Iterable[LogRow], run_id: str, seq: int) -> None:
        self._ids: dict[str, str] = {}
        self._threads: dict[str, str] = {}
        self.run_id = self._new_id(run_id)
        self.rows: list[LogRow] = []
        number = before = 0
        for row in rows:
            if row.seq > seq:
                break
            if row.event is not None or row.seq != before:
                number, before = number + (row.event is not None), row.seq
            private = None if row.private is None else self._private(row.private)
            event = None if row.event is None else self._event(row.event, number)
            self.rows.append(LogRow(number, row.sub, event, private))

    def _new_id(self, run_id: str) -> str:
        if run_id not in self._ids:
            self._ids[run_id] = f"run_{unique()}"
        return self._ids[run_id]

    def _new_thread(self, thread_id: str) -> str:
        if thread_id not in self._threads:
            made = unique() if self._threads else self.run_id.removeprefix("run_")
            self._threads[thread_id] = f"thread_{made}"
        return self._threads[thread_id]

    def _event(self, event: Event, seq: int) -> Event:
        changes: dict[str, Any] = {"seq": seq}
        if isinstance(event, RunStarted):
            changes["thread_id"] = self._new_thread(event.thread_id)
        if isinstance(event, ChildStarted | ChildFinished):
            changes["child_run_id"] = self._new_id(event.child_run_id)
        if event.parent_run_id is not None:
            changes["parent_run_id"] = self._new_id(event.parent_run_id)
        if event.kind != "task_updated":
            changes["run_id"] = self._new_id(event.run_id)
        return replace(event, **changes)

    def _private(self, private: Private) -> Private:
        changes: dict[str, Any] = {}
        if private.run_id:
            changes["run_id"] = self._new_id(private.run_id)
        if private.identity is not None:
            changes["identity"] = self._identity(private.identity)
        if private.child is not None:
            changes["child"] = self._event(private.child, private.child.seq)
        if private.grants:
            changes["grants"] = {self._new_id(run_id): self._grant(one) for run_id, one in private.grants.items()}
        return replace(private, **changes) if changes else private

    def _grant(self, grant: Grant | None) -> Grant | None:
        return None if grant is None else replace(grant, run_id=self._new_id(grant.run_id))

    def _identity(self, identity: RunIdentity) -> RunIdentity:
        above = identity.parent_run_id
        return replace(
            identity,
            run_id=self._new_id(identity.run_id),
            thread_id=self._new_thread(identity.thread_id),
            parent_run_id=None if above is None else self._new_id(above),
            parent_thread_id=None if above is None else self._threads.get(identity.parent_thread_id or ""),
        )
