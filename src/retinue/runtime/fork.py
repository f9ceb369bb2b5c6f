"""Time travel: the state of a run at an earlier event, and a new run that continues from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.errors import ConfigurationError
from ..core.events import ChildFinished, ChildStarted, Event, RunStarted
from ..core.ids import unique
from ..core.rows import LogRow, Private
from ..core.runs import RunIdentity
from ..loop.fold import fold
from ..loop.state import LogState, RunState

SHOWN = 6
"""The number of places that an error names."""


def fold_until(rows: Iterable[LogRow], seq: int, place: str = "", log_id: str = "") -> LogState:
    """The state of a log after event number `seq`."""
    tree = LogState()
    for row in rows:
        if row.seq > seq:
            break
        fold(tree, row, place, log_id)
    return tree


def is_boundary(tree: LogState, root: RunState | None) -> bool:
    """Return whether nothing is in progress: the root is between two steps, waits or has ended; all below it wait or ended."""
    if root is None or root.awaits_history or any(task.is_open for task in tree.tasks.values()):
        return False
    if not (root.waits or root.is_over) and (root.step_open or root.open_calls or root.jobs or root.ending):
        return False
    return all(run.is_over or run.waits for run in tree.runs.values() if run is not root)


def check_place(rows: Sequence[LogRow], run_id: str, seq: int, place: str = "") -> None:
    """Raise where a run cannot be forked at an event, and name the nearest ones where it can be."""
    tree, places = LogState(), list[int]()
    for number, row in enumerate(rows):
        fold(tree, row, place, run_id)
        is_last = number + 1 == len(rows) or rows[number + 1].seq > row.seq
        if is_last and is_boundary(tree, tree.runs.get(run_id)):
            places.append(row.seq)
    if seq not in places:
        nearest = sorted(sorted(places, key=lambda place: abs(place - seq))[:SHOWN])
        known = ", ".join(map(str, nearest)) or "nowhere"
        raise ConfigurationError(
            f"run {run_id!r} cannot be forked at event {seq}, where work is in progress; it can be at: {known}"
        )


class Copy:
    """The rows of a log until an event, as those of a new run: with new ids, and numbered without its deltas."""

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
            self.rows.append(self._renamed(row, number))

    @property
    def thread_id(self) -> str:
        return f"thread_{self.run_id.removeprefix('run_')}"

    def _new_id(self, run_id: str) -> str:
        if run_id not in self._ids:
            self._ids[run_id] = f"run_{unique()}"
        return self._ids[run_id]

    def _new_thread(self, thread_id: str) -> str:
        if thread_id not in self._threads:
            self._threads[thread_id] = f"thread_{unique()}" if self._threads else self.thread_id
        return self._threads[thread_id]

    def _renamed(self, row: LogRow, seq: int) -> LogRow:
        private = None if row.private is None else self._private(row.private)
        return LogRow(seq, row.sub, None if row.event is None else self._event(row.event, seq), private)

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
        return replace(private, **changes) if changes else private

    def _identity(self, identity: RunIdentity) -> RunIdentity:
        above = identity.parent_run_id
        return replace(
            identity,
            run_id=self._new_id(identity.run_id),
            thread_id=self._new_thread(identity.thread_id),
            parent_run_id=None if above is None else self._new_id(above),
            parent_thread_id=None if above is None else self._threads.get(identity.parent_thread_id or ""),
        )


def threads_of(tree: LogState) -> Mapping[str, RunState]:
    """The runs of a copied log that had a conversation before them, by the new thread."""
    return {run.identity.thread_id: run for run in tree.runs.values() if run.own_from}
