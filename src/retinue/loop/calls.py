"""Tool calls: prepare → execute → finalize. A call that goes wrong is a result, never an exception."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from ..core.agents import BoundTool
from ..core.decisions import Decision
from ..core.errors import (
    Escape,
    ExecutionFailed,
    InternalError,
    InvalidArguments,
    NotFound,
    RecordUnwritable,
    StateError,
    ToolError,
    WriteConflict,
)
from ..core.events import Custom, StateDelta, ToolCallFinished, ToolCallReady, ToolCallResumed
from ..core.functions import in_thread
from ..core.lifecycle import ToolCallStatus
from ..core.messages import Message, Role, TextPart, ToolCall
from ..core.plugins import Block, Intercept, ResultKeeper, SetResult, Suspend
from ..core.results import ResumeMode, SuspendTicket, ToolResult
from ..core.rows import Private
from ..core.state import Snapshot, StateCommand
from ..core.together import run_together
from ..core.tools import Tool
from .endings import CallOutcome, cancelled, close_call, close_children, cut, failed, interrupted, outcome_of
from .execute import execute, internal_error
from .execution import Execution
from .phases import HookRound, WorkItem, carry_out, private_of
from .state import CallState, can_go

_log = logging.getLogger(__name__)

_STRENGTH: dict[type[Any], int] = {Block: 3, Suspend: 2, SetResult: 1}
_HOOKED = Private(hooked=True)


async def run_calls(x: Execution) -> None:
    """Run the calls of the step that have something to do. Those that wait for a human are still open afterwards."""
    run = x.state
    x.snapshot = _snapshot(x)
    todo = [call for call in run.calls.values() if can_go(run, call)]
    try:
        if len(todo) == 1:
            await _run_one(x, todo[0])
        else:
            await run_together([_run_one(x, call) for call in todo])
    except BaseException:
        # Also when cancelled: the conversation must hold a result for every call it holds.
        close_calls(x)
        raise


def close_calls(x: Execution) -> None:
    """End whatever is open, as cancelled, with the children it started."""
    if not x.is_over:
        for call in x.state.open():
            close_call(x.log, x.state, call)


def refuse_calls(x: Execution, code: str, reason: str, limit: str | None = None) -> None:
    """Answer every call with what stands in its way."""
    for call in x.state.open():
        if call.status is ToolCallStatus.NEW:
            ready = ToolCallReady(call_id=call.call.id, tool_name=call.call.name, args=call.call.args)
            x.emit(ready, Private(hooked=True, limit=code))
        outcome = outcome_of(call.call, ToolResult.error(reason, code=code))
        _end(x, call, outcome, {} if limit is None else {"limit": limit})


def _snapshot(x: Execution) -> Snapshot:
    """The state that the calls of this step see: that of the first one's beginning, or of the leg's."""
    run = x.state
    if run.step_values is None or run.step_revision == x.store.revision:
        return x.store.snapshot()
    return x.store.snapshot_of(run.step_values, run.step_revision, as_json=x.is_stored)


async def _run_one(x: Execution, call: CallState) -> None:
    """Run a call when there is a slot for it."""
    slots, call_id = x.slots, call.call.id
    if not slots.take_now():
        await slots.take()
    x.holding.add(call_id)
    try:
        if x.has_hooks or call.status is not ToolCallStatus.NEW:
            await _run_call(x, call)
        else:  # nobody hooks in and nobody has decided: the common case, with nothing in its way
            x.emit(ToolCallReady(call_id=call_id, tool_name=call.call.name, args=call.call.args))
            bound = _prepared(x, call, call.call)
            if bound is not None:
                outcome = await _work(x, bound, call, call.call, None)
                _stop_if_given_up(x)
                if work := _finalize(x, call, outcome):
                    await carry_out(x, work)
    finally:
        x.give_slot_back(call_id)


async def _run_call(x: Execution, call: CallState) -> None:
    """One call from where it stands to its end, or to where it waits."""
    was_running = call.status is ToolCallStatus.RUNNING  # its process ended
    if not was_running and call.status is not ToolCallStatus.RESUMING:
        _start(x, call)
    decision = call.decision
    if call.status is ToolCallStatus.RESUMING:
        reason = (decision.reason if decision is not None else None) or "the human said no"
        _end(x, call, cancelled(call.call, reason), {})
        return
    made = _decided(call, decision)
    bound = _prepared(x, call, made)
    if bound is None:
        return
    if was_running and call.entered and not _may_run_again(bound, call):
        close_children(x.log, x.state, call, "the call that started it was interrupted")
        await _finalize_with_hooks(x, call, made, interrupted(made), {})
    elif call.entered and not (was_running and _has_hooks_before(x, call, decision)):
        # No hook comes before it, or those that do have let it pass.
        outcome = await _perform(x, bound, call, made, decision)
        await _finalize_with_hooks(x, call, made, outcome, {"admitted": True} if x.has_hooks else {})
    else:
        await _run_hooked_call(x, bound, call, made, decision)


def _may_run_again(bound: BoundTool, call: CallState) -> bool:
    """Return whether a call that was in progress when its process ended may run again.

    A call that was resumed for the sake of a child runs again anyway, each time a child is answered.
    """
    return bound.tool.idempotent or (call.resumes > 0 and call.decision is None)


def _has_hooks_before(x: Execution, call: CallState, decision: Decision | None = None) -> bool:
    """Return whether hooks come before the tool: not if they admitted it before, or a human has decided the result.

    Hooks of a call that was in progress when its process ended run again: what they changed was not committed.
    """
    return "before_tool" in x.hooks.by_phase and not call.admitted and not _decides_result(call, decision)


def _start(x: Execution, call: CallState) -> None:
    """Emit that a call begins or is resumed. If hooks come before it, its tool has not started yet."""
    made, decision = call.call, x.state.pending.get(call.call.id)
    hooked = _HOOKED if _has_hooks_before(x, call, decision) else None
    if call.status is ToolCallStatus.NEW:
        x.emit(ToolCallReady(call_id=made.id, tool_name=made.name, args=made.args), hooked)
        return
    x.asked_again.pop(made.id, None)
    x.emit(ToolCallResumed(call_id=made.id, tool_name=made.name, decision=decision), hooked)


async def _run_hooked_call(
    x: Execution, bound: BoundTool, call: CallState, made: ToolCall, decision: Decision | None
) -> None:
    """A call that hooks may block, suspend or answer before it is made."""
    intercept, asked_by, command = await _before_tool(x, call, made, decision)
    _stop_if_given_up(x)
    fields: dict[str, Any] = {}
    match intercept:
        case Block():
            outcome = failed(made, intercept)
            if intercept.end_run:
                fields["blocked"] = intercept.reason
        case Suspend():
            outcome = _outcome(made, ToolResult.suspended(intercept.ticket.message, intercept.ticket))
            fields["asked_by"] = asked_by
        case SetResult():
            outcome = _outcome(made, intercept.result)
        case None:
            x.log.append_private(Private(kind="entered", run_id=x.run_id, call_id=made.id))
            outcome = await _perform(x, bound, call, made, decision)
            fields["admitted"] = True
    if command is not None:
        outcome = outcome.with_command_before(command)
    if isinstance(intercept, Block | Suspend):
        await carry_out(x, _finalize(x, call, outcome, fields))
    else:
        await _finalize_with_hooks(x, call, made, outcome, fields)


def _outcome(call: ToolCall, result: ToolResult) -> CallOutcome:
    """A result that did not come from the tool, as an outcome; one that has no JSON form fails the call."""
    try:
        return outcome_of(call, result)
    except ToolError as exc:
        return failed(call, exc)


def _decides_result(call: CallState, decision: Decision | None) -> bool:
    """Return whether the human's answer is the result, so that nothing needs to run."""
    return decision is not None and call.ticket is not None and call.ticket.resume_mode is ResumeMode.USE_DECISION


def _prepared(x: Execution, call: CallState, made: ToolCall) -> BoundTool | None:
    """The tool to run; None where the call has ended, because it cannot."""
    try:
        return prepare(x, made)
    except ToolError as exc:
        _finalize(x, call, failed(made, exc))
        return None


async def _perform(
    x: Execution, bound: BoundTool, call: CallState, made: ToolCall, decision: Decision | None
) -> CallOutcome:
    """The outcome of a call: what a human said it is, or what comes of the work."""
    if decision is not None and _decides_result(call, decision):
        return _outcome(made, ToolResult.success(decision.payload))
    outcome = await _work(x, bound, call, made, decision)
    _stop_if_given_up(x)
    return outcome


async def _work(
    x: Execution, bound: BoundTool, call: CallState, made: ToolCall, decision: Decision | None
) -> CallOutcome:
    """Run the tool, once the log says that it starts."""
    if x.log.writer is not None:
        await x.log.writer.flush()
        await x.log.writer.confirm()
    assert x.snapshot is not None
    return await execute(x, bound, call, made, x.snapshot, None if decision is None else decision.payload)


def _stop_if_given_up(x: Execution) -> None:
    if x.is_over or x.log.lost:  # while its work went on
        raise asyncio.CancelledError


def _decided(call: CallState, decision: Decision | None) -> ToolCall:
    """The call as it is to run: with the decision as its arguments where the ticket says so."""
    made, ticket = call.call, call.ticket
    if decision is None or ticket is None or ticket.resume_mode is not ResumeMode.PASS_DECISION:
        return made
    payload: Any = decision.payload
    if isinstance(payload, dict):
        return ToolCall(made.id, made.name, cast("dict[str, Any]", payload))
    return ToolCall(made.id, made.name, {}, repr(payload))


def prepare(x: Execution, call: ToolCall) -> BoundTool:
    """The tool to run, once its arguments are known to be good; raises a ToolError that the model can learn from."""
    bound, offered = x.toolbox.get(call.name), x.state.offered
    if bound is None or (offered is not None and call.name not in offered):
        known = x.toolbox if offered is None else sorted(offered)
        raise NotFound(f"there is no tool named {call.name!r}; available: {', '.join(known) or 'none'}")
    if call.malformed is not None:
        raise InvalidArguments(f"the arguments are not a JSON object: {call.malformed[:200]}")
    bound.check.require(call.args)
    if bound.validates:
        _validate(bound.tool, call)
    return bound


def _validate(tool: Tool, call: ToolCall) -> None:
    try:
        tool.validate_args(call.args)
    except (ToolError, Escape):
        raise
    except Exception as exc:
        raise internal_error(call, exc) from exc


async def _before_tool(
    x: Execution, call: CallState, made: ToolCall, decision: Decision | None
) -> tuple[Intercept | None, str | None, StateCommand | None]:
    """Run the hooks before a call; return the strongest intercept, the hook that asked for it, and the state change."""
    assert x.snapshot is not None
    context = x.hook_context("before_tool", x.snapshot, call=made, decision=decision)
    at_work = HookRound(x, "before_tool", context)
    said = await at_work.run_hooks()
    chosen: Intercept | None = None
    asked_by: str | None = None
    for hook, intercept in said:
        if isinstance(intercept, Suspend) and x.hooks.ids[hook] in call.answered:
            continue  # it has its answer
        strength = _STRENGTH[type(intercept)]
        if chosen is None or strength > _STRENGTH[type(chosen)]:
            chosen, asked_by = intercept, x.hooks.ids[hook] if isinstance(intercept, Suspend) else None
        elif strength == _STRENGTH[type(chosen)]:
            _log.warning("%s also returned %s for call %s; the first is kept", hook.label, intercept, made.id)
            x.tell(f"{hook.label} also asked for {type(intercept).__name__}; the first is kept", "intercept_tie")
    return chosen, asked_by, at_work.whole()


async def _finalize_with_hooks(
    x: Execution, call: CallState, made: ToolCall, outcome: CallOutcome, fields: Mapping[str, Any]
) -> None:
    """As `_finalize`, after the hooks have seen the result; what they change is part of the one commit."""
    if x.hooks.keeper is not None and len(text := outcome.result.text) > _limit(x, made):
        x.kept[made.id] = await _keep(x, x.hooks.keeper, made, text)
    late = None
    if outcome.status is not ToolCallStatus.SUSPENDED and "after_tool" in x.hooks.by_phase:
        assert x.snapshot is not None
        context = x.hook_context("after_tool", x.snapshot, call=made, result=outcome.result)
        at_work = HookRound(x, "after_tool", context)
        if outcome.command is not None:
            at_work.merge(outcome.command)
        if writers := x.state.writers:
            at_work.keep_off([name for name, writer in writers.items() if writer != made.id])
        if said := await at_work.run_hooks():
            at_work.refuse(said)
        _stop_if_given_up(x)
        late = at_work.late
        outcome = outcome.with_command(at_work.command) if at_work.command is not None else outcome
    if work := _finalize(x, call, outcome, fields, late):
        await carry_out(x, work)


async def _keep(x: Execution, keeper: ResultKeeper, call: ToolCall, text: str) -> str:
    """Keep the whole result; return a sentence that says where it is."""
    try:
        return await in_thread(partial(keeper, call, text, x.identity), {})
    except Exception as exc:
        _log.warning("the result of call %s could not be kept", call.id, exc_info=exc)
        x.tell(f"the result of call {call.id!r} could not be kept: {exc}", "result_not_kept")
        return "the whole could not be kept"


_NOTHING: Mapping[str, Any] = {}


def _finalize(
    x: Execution,
    call: CallState,
    outcome: CallOutcome,
    fields: Mapping[str, Any] = _NOTHING,
    late: StateCommand | None = None,
) -> list[WorkItem]:
    """Commit the call's state, or fail the call where it cannot be, and end it; returns the jobs that follow.

    `late` is what hooks want that have seen the writes of other calls, so that they do not clash with them.
    """
    work: list[WorkItem] = []
    if outcome.command or late is not None:
        try:
            committed, work = _commit(x, call.call, outcome.command, late)
            fields = {**fields, **committed}
        except StateError as exc:
            outcome = failed(call.call, ExecutionFailed(f"call {call.call.id!r} could not commit its state: {exc}"))
        except RecordUnwritable as exc:
            outcome = failed(call.call, InternalError(str(exc)))
    _end(x, call, outcome, fields)
    return work


def _commit(
    x: Execution, call: ToolCall, command: StateCommand | None, late: StateCommand | None
) -> tuple[dict[str, Any], list[WorkItem]]:
    """Commit a call's state. What the log says of it goes into the row of the call's end, and is returned."""
    writers = x.state.writers
    if command is not None and writers and x.agent.conflicts == "error":
        for key, _ in command.patch.updates:
            if key.merge == "exclusive" and writers.get(key.name, call.id) != call.id:
                raise WriteConflict(key.name, writers[key.name], call.id)
    if late is not None:
        command = StateCommand().extend(command or StateCommand()).extend(late)
    assert command is not None
    fields: dict[str, Any] = {}
    work: list[WorkItem] = []
    if command.actions or command.effects:
        x.hooks.check(command)
        fields, work = private_of(x, command, "after_tool")
    changed = x.store.apply(command, as_json=x.is_stored)
    if changed.writes:
        fields["writes"], fields["revision"] = changed.writes, changed.revision
    if changed.changes:
        x.emit(StateDelta(revision=changed.revision, delta=changed.changes, call_id=call.id))
    for data in command.events:
        x.emit(Custom(data=data, call_id=call.id))
    return fields, work


def _end(x: Execution, call: CallState, outcome: CallOutcome, fields: Mapping[str, Any]) -> None:
    """The last event of a call and its message, or the news that it waits."""
    made, result = call.call, outcome.result
    text = result.text
    if len(text) > (limit := _limit(x, made)):
        text = cut(text, limit, x.kept.pop(made.id, ""))
    message = Message(
        role=Role.TOOL,
        parts=(TextPart(text),) if text else (),
        tool_call_id=made.id,
        name=made.name,
        id=call.message_id,
    )
    if outcome.status is ToolCallStatus.SUSPENDED:
        result = result.with_ticket(result.suspension or _default_ticket(made, text))
    elif call.children:
        close_children(x.log, x.state, call, "the call that started it has ended", running=False)
    if fields and outcome.status is not ToolCallStatus.SUSPENDED:
        fields = {name: value for name, value in fields.items() if name != "admitted"}
    x.emit(
        ToolCallFinished(call_id=made.id, tool_name=made.name, status=outcome.status, result=result, message=message),
        Private(**fields) if fields else None,
    )


def _limit(x: Execution, call: ToolCall) -> int:
    bound = x.toolbox.get(call.name)
    own = None if bound is None else bound.tool.result_limit
    return x.agent.result_limit if own is None else own


def _default_ticket(call: ToolCall, message: str) -> SuspendTicket:
    return SuspendTicket(f"ticket_{call.id}", f"tool:{call.name}", message, call.args)
