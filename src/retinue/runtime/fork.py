"""Time travel: the state of a run at an earlier event, and a new run that continues from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, DecisionRefused, UnknownRun
from ..core.messages import Message
from ..core.rows import LogRow, Private
from ..core.stores import Placement, RunRecord, ThreadRecord, title_of
from ..log.fold import fold_all
from ..log.fork import Copy, check_place, place_of_message, places_of
from ..log.owned import LogWriter
from ..log.state import LogState, RunState, with_ids
from ..loop.execution import start_leg
from ..loop.tickets import match_decisions
from .live import LiveRun
from .stored_start import encode_start, restored

if TYPE_CHECKING:
    from .runs import LocalRuns


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
    runs: LocalRuns,
    run_id: str,
    at: int | str,
    messages: tuple[Message, ...],
    decisions: Mapping[str, Decision] | None,
) -> LiveRun:
    """Start a new run on a new thread that continues another as it was after an event, or at a message, given by its id."""
    rows = await _rows_of(runs, run_id)
    copy, messages = _copied(rows, run_id, at, messages, places_of(rows, run_id, _place(runs)))
    tree = fold_all(copy.rows, _place(runs), run_id)
    state = tree.runs[copy.run_id]
    where = f"message {at!r}" if isinstance(at, str) else f"event {at}"
    if messages and (state.waits or decisions is not None):
        raise ConfigurationError(f"run {run_id!r} waits at {where}: give the fork decisions, not an input")
    if state.is_over and not messages:
        raise ConfigurationError(f"run {run_id!r} had ended at {where}: give the fork an input to continue with")
    if decisions is not None:
        if not state.waits:
            raise DecisionRefused(f"run {run_id!r} waits for nothing at {where}: fork it without decisions")
        match_decisions(tree, state, decisions)  # raises before anything is stored
    dispatcher, registry = runs.dispatcher, runs.registry
    agent = registry.agent(state.first_agent) if dispatcher is None else registry.named(state.first_agent)
    request = restored(agent, state.identity, state.request)
    said = with_ids(messages, state.run_id, state.message_count)
    request.messages = (*state.own_messages(), *said)
    placement = None if dispatcher is None else await dispatcher.placement_of(run_id)
    run = await _store_copy(runs, copy, tree, state, request, placement)
    run.first = tree.seq
    if messages:
        start_leg(run.log, state, messages=said)
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


def _copied(
    rows: list[LogRow], run_id: str, at: int | str, messages: tuple[Message, ...], places: list[int]
) -> tuple[Copy, tuple[Message, ...]]:
    """Return a copy of a log up to a place, and the input with which it continues."""
    first_input = None
    if isinstance(at, str):
        place = place_of_message(rows, run_id, at, places)
        at = place.seq
        if place.before is not None:
            messages = (*place.before, *(messages or place.rest))
        if place.is_first:
            first_input, messages = messages, ()
    check_place(rows, run_id, at, places)
    return Copy(rows, run_id, at, first_input), messages


async def _store_copy(
    runs: LocalRuns, copy: Copy, tree: LogState, state: RunState, request: RunRequest, placement: Placement | None
) -> LiveRun:
    identity, now, owner = state.identity, runs.clock(), runs.owner
    title = title_of((*state.messages[: state.own_from], *request.messages))
    record = RunRecord(identity=identity, started_at=now, log_id=identity.run_id, title=title)
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
        writer = LogWriter(identity.run_id, owner.store, gathering=runs.gathering)
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
