"""Copies of a log up to an event: where the log may be cut, and its rows under new ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..core.errors import NoForkPlace
from ..core.events import (
    ChildFinished,
    ChildStarted,
    Event,
    InferenceFinished,
    RunFinished,
    RunStarted,
    StepFinished,
    TaskUpdated,
)
from ..core.messages import Message
from ..core.rows import LogRow, Private
from ..core.runs import Grant, RunIdentity, unique
from .fold import fold
from .state import LogState, RunState, with_ids

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


def places_of(rows: Sequence[LogRow], run_id: str, place: str = "") -> list[int]:
    """Return the events after which a run can be forked."""
    tree, places = LogState(), list[int]()
    for number, row in enumerate(rows):
        fold(tree, row, place, run_id)
        is_last = number + 1 == len(rows) or rows[number + 1].seq > row.seq
        if is_last and is_boundary(tree, tree.runs.get(run_id)):
            places.append(row.seq)
    return places


def check_place(rows: Sequence[LogRow], run_id: str, seq: int, places: Sequence[int]) -> None:
    """Raise if a run cannot be forked at an event; the error names the nearest events where it can."""
    if seq not in places:
        nearest = sorted(sorted(places, key=lambda place: abs(place - seq))[:SHOWN])
        known, last = ", ".join(map(str, nearest)) or "nowhere", rows[-1].seq if rows else 0
        why = "where work is in progress" if 1 <= seq <= last else f"its log has events 1 to {last}"
        problem = f"run {run_id!r} cannot be forked at event {seq}, {why}; it can be at: {known}"
        raise NoForkPlace(problem, tuple(places))


class ForkPlace(NamedTuple):
    """The place of a message in a log."""

    seq: int
    """The event after which a fork continues."""
    before: tuple[Message, ...] | None = None
    """Of a message of the user, the input before it: the fork replaces the message. None for answers of the model."""
    rest: tuple[Message, ...] = ()
    """That message, and the input after it."""
    is_first: bool = False
    """True if it belongs to the first input of the run."""


def place_of_message(rows: Iterable[LogRow], run_id: str, message_id: str, places: Sequence[int]) -> ForkPlace:
    """Return where a run is forked for a message: after an answer of the model, or in place of a message of the user."""
    found: ForkPlace | None = None
    answered_at = 0
    for event in [row.event for row in rows if row.event is not None and row.event.run_id == run_id]:
        if isinstance(event, InferenceFinished):
            if answered_at:
                break
            answered_at = event.seq if event.message.id == message_id else 0
        elif isinstance(event, RunStarted) and message_id in (ids := [message.id for message in event.messages]):
            number = ids.index(message_id)
            earlier = [place for place in places if place < event.seq]
            at = earlier[-1:] or places[:1]
            if at:
                before, rest = event.messages[:number], event.messages[number:]
                found = ForkPlace(at[0], before, rest, is_first=not earlier)
        elif answered_at and event.seq in places:
            return ForkPlace(event.seq)
    if found is None:
        why = "no such message of its own" if not answered_at else "work in progress after that message"
        known = ", ".join(map(str, places[-SHOWN:])) or "nowhere"
        problem = f"run {run_id!r} cannot be forked at message {message_id!r}: it has {why}; it can be at: {known}"
        raise NoForkPlace(problem, tuple(places))
    return found


class ForkMarks:
    """Reads the events of a log and notes the messages of its root run at which it can be forked.

    It needs no private parts. A fork that it allows may still be refused, where a run on a server waits for an answer.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id, self._answer = run_id, ""
        self._tasks: set[str] = set()
        self.message_ids: set[str] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, TaskUpdated):
            change = self._tasks.add if event.status in ("PENDING", "RUNNING") else self._tasks.discard
            change(event.task_id)
        elif event.run_id != self._run_id:
            return
        elif isinstance(event, RunStarted):
            self.message_ids.update(message.id for message in event.messages if message.id)
        elif isinstance(event, InferenceFinished):
            self._answer = event.message.id or ""
        elif isinstance(event, RunFinished) and event.status.is_waiting:
            self.message_ids.discard(self._answer)  # a fork there needs decisions
            self._answer = ""
        elif isinstance(event, StepFinished | RunFinished) and self._answer and not self._tasks:
            self.message_ids.add(self._answer)


class Copy:
    """Copies the rows of a log up to an event for a new run: with new ids, without deltas, numbered again."""

    def __init__(self, rows: Iterable[LogRow], run_id: str, seq: int, input: tuple[Message, ...] | None = None) -> None:
        """`input`: the messages with which the copy begins, instead of those of the run."""
        self._ids: dict[str, str] = {}
        self._threads: dict[str, str] = {}
        self._from, self.run_id = run_id, self._new_id(run_id)
        self._input = None if input is None else with_ids(input, self.run_id)
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
            if self._input is not None and event.run_id == self._from:
                changes["messages"] = self._input
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
