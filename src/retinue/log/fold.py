"""The fold: how the rows of a log make the state of its runs. Start here to understand how a run is recovered.

The loop changes a run only by emitting a row, which is folded at once. So a process that reads the rows back gets the
same state. The fold uses no agents, models, reducers or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from ..core.decisions import Decision
from ..core.errors import LogUnreadable
from ..core.events import (
    CachePrefixChanged,
    ChildFinished,
    ChildStarted,
    Compacted,
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    MessageAdded,
    MessageDropped,
    MessagesSnapshot,
    RunFinished,
    RunStarted,
    StateDelta,
    StepFinished,
    StepStarted,
    TaskUpdated,
    ToolCallFinished,
    ToolCallReady,
    ToolCallResumed,
    ToolCallStarted,
    UnknownEvent,
)
from ..core.messages import Message, TextPart, Visibility
from ..core.plugins import AddMessage, StopRun, TransferTo, UseSummary
from ..core.results import ToolCallStatus
from ..core.rows import Ending, LogRow, Private
from ..core.runs import ENDED, REMOTE_KEY, WAITING, Usage
from .call_ids import note_remote
from .receipts import count_call, count_decision, count_limit
from .state import (
    CALL_NEW,
    CALL_RUNNING,
    CALL_SUSPENDED,
    EMPTY,
    NO_REQUEST,
    RUNNING,
    CallState,
    ChildRef,
    LogState,
    RunState,
    TaskState,
    message_id,
)


def fold(tree: LogState, row: LogRow, place: str = "", log_id: str = "") -> None:
    """Change the state as a stored row says. Raises LogUnreadable for a row that cannot be understood."""
    event, private = row.event, row.private
    tree.seq, tree.sub = row.seq, row.sub
    try:
        if event is None:
            if private is not None:
                fold_private(tree, private)
        else:
            fold_event(tree, tree.runs.get(event.run_id), event, private)
    except LogUnreadable:
        raise
    except Exception as exc:
        what = event.kind if event is not None else f"row {private.kind if private else ''}"
        raise LogUnreadable(place, log_id, row.seq, f"{what} does not follow from what is before it: {exc!r}") from exc
    if isinstance(event, UnknownEvent):
        kind = event.original.get("kind")
        raise LogUnreadable(place, log_id, row.seq, f"the event kind {kind!r} is unknown to this version")


def fold_all(rows: Iterable[LogRow], place: str = "", log_id: str = "") -> LogState:
    """Return the state after all rows of a log."""
    tree = LogState()
    for row in rows:
        fold(tree, row, place, log_id)
    return tree


def fold_event(tree: LogState, run: RunState | None, event: Event, private: Private | None) -> None:
    """Change the state as an event says. Deltas and other events that are only for readers change nothing."""
    tree.last_at = event.at
    if private is not None and private.remote:
        _note_remote(tree, event, private)
        return
    if (change := CHANGES.get(event.__class__)) is not None:
        change(tree, run, event, private)


def fold_private(tree: LogState, private: Private) -> None:
    """Change the state as a row without an event says."""
    if private.kind == "resumed":
        _resume_clocks(tree, private)
        return
    if private.kind == "remote":
        _note_remote(tree, None, private)
        return
    run = tree.runs[private.run_id]
    if private.kind == "entered":
        call = run.calls[private.call_id]
        call.entered, call.placed = True, private.placed
        if private.placed:
            tree.placed_calls |= {private.placed}
        return
    if private.child is not None:
        _child_started(tree, run, private.child, private)
    if private.grants:
        grants = {**tree.grants, **private.grants}
        tree.grants = {name: grant for name, grant in grants.items() if grant is not None}
    _commit(run, private)
    if run.run_id in tree.grants:
        _end_grant(tree, run)


def _note_remote(tree: LogState, event: Event | None, private: Private) -> None:
    """Note an event of a run elsewhere: only its number, call ids, usage and children. Its work is not continued here."""
    run = tree.runs[private.run_id]
    run.remote_seq, run.remote_at = private.remote, tree.seq
    if event is not None:
        note_remote(tree, run, event, private.renamed)
    if isinstance(event, InferenceFinished):
        _count(tree, run, event.usage, 1)
    elif isinstance(event, Compacted):
        _count(tree, run, event.usage, 0)
    elif isinstance(event, ChildStarted):
        _count_child(tree, run)


def _resume_clocks(tree: LogState, private: Private) -> None:
    """Restart the clocks for a new owner: the time since the last event does not count as work."""
    for run in tree.runs.values():
        if run.status is RUNNING:
            run.worked += max(0.0, tree.last_at - run.since)
            run.since = private.at
    tree.last_at = private.at


def _commit(run: RunState, p: Private) -> None:
    """Apply the state, actions and jobs that any row may carry."""
    if p.revision:
        run.values = {**run.values, **p.writes}
        run.revision = p.revision
    for action in p.actions:
        _act(run, action)
    if p.jobs:
        run.jobs += p.jobs
        run.job_count = p.jobs[-1].number
    if p.done:
        run.jobs = tuple([job for job in run.jobs if job.number != p.done])
    if p.phase is not None:
        run.marks |= {p.phase}
    if p.abandoned and p.call_id in run.calls:
        for ref in run.calls[p.call_id].children.values():
            ref.abandoned = True
    if p.detached:
        run.request = replace(run.request, detached=True)
    if p.granted is not None and run.request.above is not None:
        run.request = replace(run.request, above=replace(run.request.above, limits=p.granted))


def _act(run: RunState, action: Any) -> None:
    """Apply an action of the loop itself. Of several handoffs or stops the first counts."""
    if isinstance(action, TransferTo):
        run.next_agent = run.next_agent or action
    elif isinstance(action, StopRun):
        run.stopping = run.stopping or action
    elif isinstance(action, UseSummary):
        run.window = replace(run.window, count=action.count, summary=action.summary)
    elif isinstance(action, AddMessage):
        run.message_count += 1
        parts = (TextPart(action.text), *action.receipts)
        said = Message.user(parts, id=message_id(run, run.message_count), visibility=Visibility.INTERNAL)
        run.messages.append(said)
    else:
        run.step_actions = (*run.step_actions, action)


def _forget(run: RunState, call_id: str) -> None:
    """Drop the decision on a call: it was carried out, or came too late."""
    if call_id in run.pending:
        run.pending = {name: one for name, one in run.pending.items() if name != call_id}


def _join(run: RunState, message: Message) -> None:
    run.message_count += 1
    run.messages.append(message)


def _run_started(tree: LogState, run: RunState | None, event: RunStarted, p: Private | None) -> None:
    assert p is not None, "its private part is missing"
    if run is None or run.leg == 0:
        if run is None:
            assert p.identity is not None, "it does not say whose run it is"
            run = RunState(p.identity, event.ns)
        tree.runs[event.run_id] = run
        run.request, run.first_agent = p.request or NO_REQUEST, event.agent
        run.messages.extend(event.messages)
        run.message_count, run.awaits_history = len(event.messages), event.continues
        run.values, run.foreign = p.values, p.foreign
        run.window = p.window or run.window
    else:
        run.step_values, run.step_revision, run.writers = run.values, run.revision, EMPTY
        if event.messages:  # a fork with new input
            run.blocked = None
        for message in event.messages:
            _join(run, message)
    tree.open[event.run_id] = run
    run.leg += 1
    run.leg_from = event.seq - 1
    run.status, run.ending, run.has_fatal_error, run.since = RUNNING, None, False, event.at
    for answer in p.answers:
        known = run.decided.get(answer.decision.id, ())
        run.decided = {**run.decided, answer.decision.id: (*known, *answer.names)}
        if answer.target:
            run.addressed = {answer.target: answer.path, **run.addressed}
        _hand_down(tree, run, answer.path, answer.decision)


def _hand_down(tree: LogState, run: RunState, path: tuple[str, ...], decision: Decision) -> None:
    """Store a decision at the run that waits for it, and mark every call above it to continue."""
    if run.tickets:  # its backend passes the decision on
        run.pending = {**run.pending, "/".join(path): decision}
        return
    call_id, _, number = path[0].partition("~")
    if len(path) == 1:
        run.pending = {**run.pending, call_id: decision}
        call = run.calls.get(call_id)
        if call is not None and call.ticket is not None:
            run.note_asked((call_id,), call.ticket.id)
        return
    run.pending = {call_id: None, **run.pending}
    child = run.calls[call_id].children.get(int(number or 1)) if call_id in run.calls else None
    below = None if child is None else tree.runs.get(child.run_id)
    if below is not None and below.waits:
        _hand_down(tree, below, path[1:], decision)


def _note_question(tree: LogState, run: RunState, call: CallState) -> None:
    """Note the ticket of a suspended call: its own question, or that its children wait."""
    if call.ticket is not None:
        run.note_asked((call.call.id,), call.ticket.id, stands_in=tree.stands_in(call))


def _messages_snapshot(tree: LogState, run: RunState, event: MessagesSnapshot, p: Private | None) -> None:
    if not run.awaits_history:  # of a later leg
        return
    run.messages[:0] = event.messages
    run.own_from, run.awaits_history = len(event.messages), False
    tree.note_calls(run, [call.id for message in event.messages for call in message.tool_calls])


def _step_started(tree: LogState, run: RunState, event: StepStarted, p: Private | None) -> None:
    run.step, run.step_open = event.step, True
    if not run.calls:
        run.answered = run.is_settled = run.asked_calls = False
        run.dropped, run.marks = 0, frozenset()
        if run.queued:
            for message in run.queued:
                _join(run, message)
            run.queued = ()


def _step_finished(tree: LogState, run: RunState, event: StepFinished, p: Private | None) -> None:
    run.step_open = False
    if p is not None:
        run.ending = p.ending
        for message in p.messages:
            _join(run, message)


def _tool_call_started(tree: LogState, run: RunState, event: ToolCallStarted, p: Private | None) -> None:
    tree.note_calls(run, (event.call_id,))
    if run.drafts is EMPTY:
        run.drafts = {}
    run.drafts[event.call_id] = event.tool_name


def _error(tree: LogState, run: RunState | None, event: ErrorRaised, p: Private | None) -> None:
    if run is None:
        return
    if event.dropped_message_id is not None:
        run.dropped += 1
        run.drafts = EMPTY
    if event.fatal:
        run.has_fatal_error = True
    count_limit(run, event.code)
    if p is None:
        return
    _commit(run, p)
    if p.message is not None:
        _join(run, p.message)
    if p.limit is not None:
        _reach_limit(run, p.limit)
    if p.output_tried:
        run.output_tries += 1
        run.is_settled = True
    if p.ending is not None:
        run.ending = p.ending
    if p.refused_handoff:
        run.next_agent = None


def _reach_limit(run: RunState, limit: str) -> None:
    if run.limit is not None and run.limit_step < run.step:
        run.limit_over = True
    run.limit, run.limit_step = limit, run.step


def _inference_finished(tree: LogState, run: RunState, event: InferenceFinished, p: Private | None) -> None:
    message = event.message
    run.messages.append(message)
    run.answered, run.stop_reason = True, event.stop_reason
    number = run.message_count + 1
    run.offered, run.step_actions, run.drafts = None, (), EMPTY
    if message.tool_calls:
        run.asked_calls, run.step_values, run.writers = True, None, EMPTY
        calls: dict[str, CallState] = {}
        run.calls = calls
        for call in message.tool_calls:
            number += 1
            calls[call.id] = CallState(call, message_id(run, number))
        tree.note_calls(run, calls)
        run.open_calls = len(message.tool_calls)
    run.message_count = number
    if p is not None:
        run.offered = p.offered
        _commit(run, p)
        if p.estimate:
            run.window = run.window.counted(p.estimate, event.usage.input_tokens)
        if p.prefix:
            run.window = replace(run.window, prefix=p.prefix)
    run.last_call = event.usage
    _count(tree, run, event.usage, 1)


def _compacted(tree: LogState, run: RunState, event: Compacted, p: Private | None) -> None:
    assert p is not None and p.cut is not None, "its private part is missing"
    run.window = run.window.after(p.cut, event.path, event.summary)
    _count(tree, run, event.usage, 0)


def _cache_prefix_changed(tree: LogState, run: RunState, event: CachePrefixChanged, p: Private | None) -> None:
    if p is not None:
        run.window = replace(run.window, prefix=p.prefix)


def _tool_call_ready(tree: LogState, run: RunState, event: ToolCallReady, p: Private | None) -> None:
    call = run.calls[event.call_id]
    call.move(CALL_RUNNING)
    call.entered = p is None or not p.hooked
    if p is not None and p.limit is not None:
        return  # refused: no call of this step has started
    if run.step_values is None:
        run.step_values, run.step_revision = run.values, run.revision


def _tool_call_resumed(tree: LogState, run: RunState, event: ToolCallResumed, p: Private | None) -> None:
    call, decision = run.calls[event.call_id], event.decision
    _forget(run, event.call_id)
    call.move(ToolCallStatus.RESUMING)
    if decision is None or decision.action != "cancel":
        call.move(CALL_RUNNING)
    call.resumes += 1
    if decision is not None:
        count_decision(run, event.tool_name, decision)
    call.decision, call.entered, call.placed = decision, p is None or not p.hooked, ""
    if call.asked_by is not None:
        call.answered, call.asked_by = call.answered | {call.asked_by}, None


def _tool_call_finished(tree: LogState, run: RunState, event: ToolCallFinished, p: Private | None) -> None:
    call = run.calls.get(event.call_id)
    if call is None:
        if run.drafts:
            run.drafts.pop(event.call_id, None)
        return
    if call.status is CALL_NEW:  # it ends before it has started
        call.move(CALL_RUNNING)
    call.move(event.status)
    call.entered = False
    if call.placed and event.status is not ToolCallStatus.CANCELLED:
        tree.placed_calls -= {call.placed}
    if p is not None:
        _commit(run, p)
        if p.writes and len(run.calls) > 1:
            run.writers = {**run.writers, **dict.fromkeys(p.writes, event.call_id)}
        if p.limit is not None:
            _reach_limit(run, p.limit)
        if p.blocked is not None:
            run.blocked = p.blocked
        call.admitted, call.asked_by = p.admitted, p.asked_by
    if event.status is CALL_SUSPENDED:
        call.ticket, call.rules = event.result.suspension, () if p is None else p.rules
        _note_question(tree, run, call)
        return
    count_call(run, call, event)
    call.message = event.message
    run.open_calls -= 1
    if run.pending:
        _forget(run, event.call_id)
    if not run.open_calls:
        run.messages += [one.message for one in run.calls.values() if one.message is not None]
        run.calls = EMPTY


def _child_started(tree: LogState, run: RunState, event: ChildStarted, p: Private | None) -> None:
    ref = run.children.get(event.child_run_id)
    if ref is None:
        ref = _add_child(run, event, None if p is None else p.asked)
        ref.is_announced = p is None or not p.reserved
    elif not ref.is_announced:
        ref.is_announced = True
    else:
        return
    if ref.is_announced:
        _count_child(tree, run)


def _count_child(tree: LogState, run: RunState) -> None:
    """Count a new child for its parent and for all runs above."""
    above: RunState | None = run
    while above is not None:
        above.total_children += 1
        above = tree.parent_of(above)


def _add_child(run: RunState, event: ChildStarted, asked: Any) -> ChildRef:
    if run.children is EMPTY:
        run.child_counts, run.children = {}, {}
    run.child_counts[event.call_id] = number = run.child_counts.get(event.call_id, 0) + 1
    ref = ChildRef(number, event.child_run_id, event.child_agent, event.child_ns, asked)
    run.children[event.child_run_id] = ref
    call = run.calls.get(event.call_id)
    if call is not None:
        if call.children is EMPTY:
            call.children = {}
        call.children[number] = ref
    return ref


def _child_finished(tree: LogState, run: RunState, event: ChildFinished, p: Private | None) -> None:
    ref = run.children.get(event.child_run_id)
    if ref is not None:
        ref.ended = event.status in ENDED


def _state_delta(tree: LogState, run: RunState | None, event: StateDelta, p: Private | None) -> None:
    if p is not None and run is not None:  # a commit of hooks; a call's commit is in the row of its end
        _commit(run, p)


def _handoff(tree: LogState, run: RunState, event: Handoff, p: Private | None) -> None:
    run.handoffs = (*run.handoffs, event.to_agent)
    run.identity = replace(run.identity, agent=event.to_agent)
    run.next_agent, run.is_settled = None, True


def _message_added(tree: LogState, run: RunState, event: MessageAdded, p: Private | None) -> None:
    run.queued = (*run.queued, event.message)
    run.added |= {event.message.id or ""}


def _message_dropped(tree: LogState, run: RunState, event: MessageDropped, p: Private | None) -> None:
    run.queued = tuple([message for message in run.queued if message.id != event.message_id])


def _task_updated(tree: LogState, run: RunState, event: TaskUpdated, p: Private | None) -> None:
    task = TaskState(event.parent_run_id or "", event.call_id, event.status)
    tree.tasks = {**tree.tasks, event.task_id: task}


def _run_finished(tree: LogState, run: RunState, event: RunFinished, p: Private | None) -> None:
    run.worked += max(0.0, event.at - run.since)
    run.status, run.output, run.step_open = event.status, event.output, False
    run.ending, run.refused = None, None
    if event.status in WAITING:
        run.refused = event.error
    if event.status in ENDED:
        if run.leg > 1:  # it has waited
            _continue_above(tree, run)
        tree.open.pop(run.run_id, None)
        run.ending, run.jobs = Ending(event.status, event.termination, event.error), ()
    if p is not None:
        _commit(run, p)
        for message in p.messages:
            _join(run, message)
        if p.usage is not None:
            run.step, run.tickets, run.pending = event.steps, p.tickets, EMPTY
            run.reported = event.receipt
            for ticket in p.tickets:
                run.note_asked(ticket.path, ticket.id, is_elsewhere=True)
            _count(tree, run, p.usage, max(0, event.steps - run.total_steps))
    if run.run_id in tree.grants:
        _end_grant(tree, run)


def _continue_above(tree: LogState, run: RunState) -> None:
    """Mark the calls that waited only for a run that has ended: they continue, as they do after an answer to that run."""
    above = tree.parent_of(run)
    while above is not None and above.calls:
        call_id = run.identity.parent_tool_call_id or ""
        call, asked = above.calls.get(call_id), above.asked.get((call_id,))
        if call is None or call.status is not CALL_SUSPENDED or asked is None or not asked.stands_in:
            return
        above.pending = {call_id: None, **above.pending}
        run, above = above, tree.parent_of(above)


def _end_grant(tree: LogState, run: RunState) -> None:
    """Release the grant of a child elsewhere, if the child and its background tasks have ended."""
    if run.is_over and not run.values.get(REMOTE_KEY, EMPTY).get("open"):
        tree.grants = {name: grant for name, grant in tree.grants.items() if name != run.run_id}


def _count(tree: LogState, run: RunState, usage: Usage, steps: int) -> None:
    """Add usage to the total of a run and of all runs above."""
    runs, above = tree.runs, run
    while above is not None:
        above.total += usage
        above.total_steps += steps
        above = runs.get(above.identity.parent_run_id or "")


CHANGES: dict[type[Event], Callable[[LogState, Any, Any, Private | None], None]] = {
    RunStarted: _run_started,
    MessagesSnapshot: _messages_snapshot,
    StepStarted: _step_started,
    StepFinished: _step_finished,
    StateDelta: _state_delta,
    ToolCallStarted: _tool_call_started,
    ErrorRaised: _error,
    InferenceFinished: _inference_finished,
    Compacted: _compacted,
    CachePrefixChanged: _cache_prefix_changed,
    ToolCallReady: _tool_call_ready,
    ToolCallResumed: _tool_call_resumed,
    ToolCallFinished: _tool_call_finished,
    ChildStarted: _child_started,
    ChildFinished: _child_finished,
    Handoff: _handoff,
    MessageAdded: _message_added,
    MessageDropped: _message_dropped,
    TaskUpdated: _task_updated,
    RunFinished: _run_finished,
}
"""The functions that fold events, by kind. Other kinds are only for watching and change nothing."""
