"""Calls that need more than prepare → execute → finalize: with hooks, with a decision, or interrupted by a crash."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from ..core.agents import BoundTool
from ..core.decisions import Decision
from ..core.errors import InvalidArguments, ToolError
from ..core.events import ToolCallResumed
from ..core.functions import FunctionTool, in_thread
from ..core.hooks import ResultKeeper
from ..core.messages import ToolCall
from ..core.plugins import Block, Intercept, SetResult, Suspend
from ..core.results import ResumeMode, ToolCallStatus, ToolResult, ToolStatus
from ..core.rows import Private
from ..core.schema import isolate
from ..core.state import StateCommand
from ..log.state import CALL_NEW, CALL_RUNNING, CALL_SUSPENDED, CallState
from .calls import (
    CallOutcome,
    default_ticket,
    end_call,
    execute,
    failed,
    finalize,
    interrupted,
    outcome_of,
    prepare,
    ready,
    result_limit,
    stop_if_given_up,
)
from .execution import Execution, cancelled_result, close_children
from .phases import HookRound, carry_out
from .tickets import call_to_run

_log = logging.getLogger(__name__)

_STRENGTH: dict[type[Any], int] = {Block: 3, Suspend: 2, SetResult: 1}
_HOOKED = Private(hooked=True)


async def run_hooked_call(x: Execution, call: CallState) -> None:
    """Run one call from its present state until it ends or is suspended."""
    was_running = call.status is CALL_RUNNING  # its process died
    if not was_running and call.status is not ToolCallStatus.RESUMING:
        _start(x, call)
    decision = call.decision
    if call.status is ToolCallStatus.RESUMING:
        reason = (decision.reason if decision is not None else None) or "the human said no"
        end_call(x, call, CallOutcome(ToolCallStatus.CANCELLED, cancelled_result(call.call, reason)))
        return
    made = call_to_run(call, decision)
    try:
        bound = await prepare(x, made)
        tool: Any = bound.tool
        if made is not call.call and isinstance(tool, FunctionTool):
            cast("FunctionTool", tool).check_values(made.args)
    except ToolError as exc:
        is_edited = made is not call.call and isinstance(exc, InvalidArguments)
        finalize(x, call, _ask_again(call, f"not valid: {exc.message}") if is_edited else failed(made, exc))
        return
    if was_running and call.entered and not _may_run_again(bound, call):
        close_children(x.log, x.state, call.children.values(), "the call that started it was interrupted")
        await _finalize_after_hooks(x, call, made, interrupted(made), {})
    elif call.entered and not (was_running and _has_hooks_before(x, call, decision)):
        # No hooks run before it, or they have admitted it.
        outcome = await _perform(x, bound, call, made, decision)
        await _finalize_after_hooks(x, call, made, outcome, {"admitted": True} if x.has_hooks else {})
    else:
        await _run_after_hooks(x, bound, call, made, decision)


def _may_run_again(bound: BoundTool, call: CallState) -> bool:
    """Return whether a call that was in progress when its process ended may run again.

    A call that was resumed for a child runs again anyway, each time a child is answered.
    """
    decision = call.decision
    if call.placed:  # it has a log of its own, which has its outcome
        return True
    return bound.options.idempotent or _decides_result(call, decision) or (call.resumes > 0 and decision is None)


def _ask_again(call: CallState, problem: str) -> CallOutcome:
    """Return the outcome of a call to which a human gave invalid arguments: it waits for another decision."""
    ticket = call.ticket
    assert ticket is not None
    asked = ticket.message.partition("\n")[0]
    message = f"{asked}\nThe new arguments are {problem}"
    return CallOutcome(CALL_SUSPENDED, ToolResult.suspended(message, replace(ticket, message=message)))


def _has_hooks_before(x: Execution, call: CallState, decision: Decision | None = None) -> bool:
    """Return whether hooks run before the tool.

    They do not if a human has decided the result, or if they admitted the call before with the same arguments.

    Hooks of a call that was in progress when its process ended run again: their changes were not committed.
    """
    if "before_tool" not in x.hooks.by_phase or _decides_result(call, decision):
        return False
    return not call.admitted or call_to_run(call, decision) is not call.call


def _start(x: Execution, call: CallState) -> None:
    """Emit that a call starts or is resumed. If hooks run before it, its tool has not started yet."""
    made, decision = call.call, x.state.pending.get(call.call.id)
    hooked = _HOOKED if _has_hooks_before(x, call, decision) else None
    if call.status is CALL_NEW:
        x.emit(ready(x, made), hooked)
        return
    x.asked_again.pop(made.id, None)
    args = None if (runs := call_to_run(call, decision)) is made else runs.args
    x.emit(ToolCallResumed(call_id=made.id, tool_name=made.name, decision=decision, args=args), hooked)


async def _run_after_hooks(
    x: Execution, bound: BoundTool, call: CallState, made: ToolCall, decision: Decision | None
) -> None:
    """Run the hooks before a call, which may block, suspend or answer it; then run the call."""
    intercept, asked_by, command = await _before_tool(x, call, made, decision)
    stop_if_given_up(x)
    fields: dict[str, Any] = {}
    match intercept:
        case Block() if made is not call.call and not intercept.end_run:
            outcome = _ask_again(call, f"refused: {intercept.reason}")
        case Block():
            outcome = failed(made, intercept)
            if intercept.end_run:
                fields["blocked"] = intercept.reason
        case Suspend():
            outcome = _checked_outcome(made, ToolResult.suspended(intercept.ticket.message, intercept.ticket))
            fields["asked_by"] = asked_by
        case SetResult():
            outcome = _checked_outcome(made, intercept.result)
        case None:
            if x.log.is_leaving:
                await x.log.hold(x.run_id, made.id)
            x.log.append_private(Private(kind="entered", run_id=x.run_id, call_id=made.id))
            outcome = await _perform(x, bound, call, made, decision)
            fields["admitted"] = True
    if command is not None:
        outcome = outcome.with_command_before(command)
    if isinstance(intercept, Block | Suspend):
        await carry_out(x, finalize(x, call, outcome, fields))
    else:
        await _finalize_after_hooks(x, call, made, outcome, fields)


def _checked_outcome(call: ToolCall, result: ToolResult) -> CallOutcome:
    """Return the outcome for a result that did not come from the tool; a failed one if it has no JSON form."""
    try:
        return outcome_of(call, result)
    except ToolError as exc:
        return failed(call, exc)


def _decides_result(call: CallState, decision: Decision | None) -> bool:
    """Return whether the human's answer is the result, so that nothing needs to run."""
    if decision is None or call.ticket is None:
        return False
    return decision.action == "answer" or call.ticket.resume_mode is ResumeMode.USE_DECISION


async def _perform(
    x: Execution, bound: BoundTool, call: CallState, made: ToolCall, decision: Decision | None
) -> CallOutcome:
    """Return the outcome of a call: the human's answer if that is the result, else what the tool returns."""
    if decision is not None and _decides_result(call, decision):
        return _checked_outcome(made, ToolResult.success(decision.payload))
    outcome = await execute(x, bound, call, made, None if decision is None else decision.payload)
    stop_if_given_up(x)
    return outcome


def _isolated(call: ToolCall) -> ToolCall:
    """Return a copy of a call for hooks: changes to its arguments do not reach the real call."""
    return replace(call, args=isolate(call.args))


async def _before_tool(
    x: Execution, call: CallState, made: ToolCall, decision: Decision | None
) -> tuple[Intercept | None, str | None, StateCommand | None]:
    """Run the hooks before a call; return the strongest intercept, the hook that asked for it, and the state change."""
    context = x.hook_context("before_tool", x.snapshot, call=_isolated(made), decision=decision)
    at_work = HookRound(x, "before_tool", context, made.args)
    chosen: Intercept | None = None
    asked_by: str | None = None
    for hook, intercept in await at_work.run_hooks():
        if isinstance(intercept, SetResult) and intercept.result.status is ToolStatus.PENDING:
            intercept = Suspend(intercept.result.suspension or default_ticket(made, intercept.result.text))
        if isinstance(intercept, Suspend) and x.hooks.ids[hook] in call.answered:
            continue  # it has its answer
        strength = _STRENGTH[type(intercept)]
        if chosen is None or strength > _STRENGTH[type(chosen)]:
            chosen, asked_by = intercept, x.hooks.ids[hook] if isinstance(intercept, Suspend) else None
        elif strength == _STRENGTH[type(chosen)]:
            _log.warning("%s also returned %s for call %s; the first is kept", hook.label, intercept, made.id)
            x.emit_error(f"{hook.label} also asked for {type(intercept).__name__}; the first is kept", "intercept_tie")
    return chosen, asked_by, at_work.whole()


async def _finalize_after_hooks(
    x: Execution, call: CallState, made: ToolCall, outcome: CallOutcome, fields: Mapping[str, Any]
) -> None:
    """Run the after_tool hooks, then finalize. Their state changes are part of the call's commit."""
    if x.hooks.keeper is not None and len(text := outcome.result.text) > result_limit(x, made):
        x.kept[made.id] = await _keep(x, x.hooks.keeper, made, text)
    late = None
    if outcome.status is not CALL_SUSPENDED and "after_tool" in x.hooks.by_phase:
        context = x.hook_context("after_tool", x.snapshot, call=_isolated(made), result=outcome.result)
        at_work = HookRound(x, "after_tool", context, made.args)
        if outcome.command is not None:
            at_work.merge(outcome.command)
        if writers := x.state.writers:
            at_work.keep_off([name for name, writer in writers.items() if writer != made.id])
        at_work.refuse(await at_work.run_hooks())
        stop_if_given_up(x)
        late = at_work.late
        outcome = outcome if at_work.command is None else replace(outcome, command=at_work.command)
    if work := finalize(x, call, outcome, fields, late):
        await carry_out(x, work)


async def _keep(x: Execution, keeper: ResultKeeper, call: ToolCall, text: str) -> str:
    """Store the whole result; return a sentence that says where it is."""
    try:
        return await in_thread(partial(keeper, call, text, x.identity), {})
    except Exception as exc:
        _log.warning("the result of call %s could not be kept", call.id, exc_info=exc)
        x.emit_error(f"the result of call {call.id!r} could not be kept: {exc}", "result_not_kept")
        return "the whole could not be kept"
