"""Time travel: the state of a run at an earlier event, and a new run that continues from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, DecisionRefused, UnknownRun
from ..core.events import ChildFinished, ChildStarted, Event, RunStarted
from ..core.messages import Message
from ..core.rows import LogRow, Private
from ..core.runs import Grant, RunIdentity, unique
from ..core.stores import Placement, RunRecord, ThreadRecord
from ..loop.execution import start_leg
from ..loop.fold import fold, fold_all
from ..loop.state import LogState, RunState
from ..loop.tickets import match_decisions
from ..storage.logs import LogWriter
from .inbox import encode_start, restored
from .live import LiveRun

if TYPE_CHECKING:
    from .runs import LocalRuns

SHOWN = 6
"""The number of places that an error names."""


async def _rows_of(runs: LocalRuns, run_id: str) -> list[LogRow]:
    """Return the rows of a log as they are stored, or in memory."""
    live = runs.get(run_id)
    if runs.owner is None:
        if live is None:
            raise UnknownRun(run_id)
        return live.log.rows()
    if live is not None and live.writer is not None:
        await live.writer.flush()
    stored = await runs.owner.store.read_log(run_id)
    if stored is None:
        raise UnknownRun(run_id)
    if stored.thinned:
        raise ConfigurationError(f"the log of run {run_id!r} was thinned by retention: it can only be read")
    return list(stored.rows)


async def state_at(runs: LocalRuns, run_id: str, seq: int) -> RunState:
    """Return the state of a run after an event of its log."""
    rows = await _rows_of(runs, run_id)
    state = fold_all([row for row in rows if row.seq <= seq], _place(runs), run_id).runs.get(run_id)
    if state is None or seq > rows[-1].seq:
        raise ConfigurationError(f"the log of run {run_id!r} has events 1 to {rows[-1].seq}, and no event {seq}")
    return state


async def fork_run(
    runs: LocalRuns, run_id: str, at: int, messages: tuple[Message, ...], decisions: Mapping[str, Decision] | None
) -> LiveRun:
    """Start a new run on a new thread that continues another as it was after an event."""
    rows = await _rows_of(runs, run_id)
    check_place(rows, run_id, at, _place(runs))
    copy = Copy(rows, run_id, at)
    tree = fold_all(copy.rows, _place(runs), run_id)
    state = tree.runs[copy.run_id]
    if messages and (state.waits or decisions is not None):
        raise ConfigurationError(f"run {run_id!r} waits at event {at}: give the fork decisions, not an input")
    if state.is_over and not messages:
        raise ConfigurationError(f"run {run_id!r} had ended at event {at}: give the fork an input to continue with")
    if decisions is not None:
        if not state.waits:
            raise DecisionRefused(f"run {run_id!r} waits for nothing at event {at}: fork it without decisions")
        match_decisions(tree, state, decisions)  # raises before anything is stored
    dispatcher, registry = runs.dispatcher, runs.registry
    agent = registry.agent(state.first_agent) if dispatcher is None else registry.named(state.first_agent)
    request = restored(agent, state.identity, state.request)
    placement = None if dispatcher is None else await dispatcher.placement_of(run_id)
    run = await _store_copy(runs, copy, tree, state, request, placement)
    run.first = tree.seq
    if messages:
        numbered = enumerate(messages, state.message_count + 1)
        named = [replace(one, id=one.id or f"{run.run_id}-m{number}") for number, one in numbered]
        start_leg(run.log, state, messages=tuple(named))
    if dispatcher is not None and placement is not None:
        if decisions is not None:
            start_leg(run.log, state, tuple(match_decisions(tree, state, decisions)))
        await run.hand_over()
        await dispatcher.schedule(run.run_id, placement)
    elif decisions is not None:
        run.accept(decisions)
    elif messages or not state.waits:
        run.proceed()
    else:
        await run.resume_tasks()
        await run.release_if_idle()
    return run


async def _store_copy(
    runs: LocalRuns, copy: Copy, tree: LogState, state: RunState, request: RunRequest, placement: Placement | None
) -> LiveRun:
    identity, now, owner = state.identity, runs.clock(), runs.owner
    record = RunRecord(identity=identity, started_at=now, log_id=identity.run_id)
    before = {run.identity.thread_id: tuple(run.messages[: run.own_from]) for run in tree.runs.values() if run.own_from}
    for thread_id, history in before.items():
        await runs.store.save_thread(ThreadRecord(thread_id=thread_id, user_id=identity.user_id, messages=history))
    writer = None
    if owner is not None:
        # A process that finds this run without its rows must not start it from the request.
        start = encode_start(
            request, replace(state.request, problem="the process that forked it ended before it was done")
        )
        await owner.store.begin_run(record, start, owner.id, owner.lease, placement=placement)
        writer = LogWriter(identity.run_id, owner.store)
        writer.rows.extend(copy.rows)
    log = runs.make_log(writer, tree)
    if writer is None:
        log.first, log.events = 0, [row.event for row in copy.rows if row.event is not None]
        log.privates = [row for row in copy.rows if row.private is not None]
    log.append_private(Private(kind="resumed", at=now))
    made = runs.add(LiveRun(runs, request, log, record, writer))
    return made


def _place(runs: LocalRuns) -> str:
    return "" if runs.owner is None else runs.owner.store.place


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
