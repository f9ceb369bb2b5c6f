"""The end of calls and runs that nobody continues, and the start of another leg."""

from __future__ import annotations

from ..core.errors import ToolCancelled
from ..core.events import ChildFinished, MessagesSnapshot, RunFinished, RunStarted, StepFinished, ToolCallFinished
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.messages import Message, ToolCall
from ..core.results import ToolResult, ToolStatus
from ..core.rows import Answer, Ending, Private
from .execution import result_of
from .log import LiveLog
from .state import CALL_NEW, CallState, RunState


def cancelled_result(call: ToolCall, reason: str) -> ToolResult:
    """The result of a call that was stopped or never began."""
    error = ToolCancelled(reason)
    data = {"error": {"kind": error.kind, "message": reason}}
    return ToolResult(call.name, ToolStatus.ERROR, data, str(error))


def close_call(log: LiveLog, run: RunState, call: CallState) -> None:
    """End a call as cancelled, after the children it started."""
    was_made = call.status is not CALL_NEW
    reason = "the call was cancelled before it finished" if was_made else "the run ended before this call was made"
    close_children(log, run, call, reason)
    finish_cancelled(log, run, call.call, reason, call.message_id)


def drop_drafts(log: LiveLog, run: RunState) -> None:
    """End the calls that the model has not finished asking for."""
    for call_id, name in list(run.drafts.items()):
        finish_cancelled(log, run, ToolCall(call_id, name, {}), "the model did not finish asking for it")


def finish_cancelled(log: LiveLog, run: RunState, call: ToolCall, reason: str, message_id: str = "") -> None:
    """Append the end of a call that was cancelled."""
    result = cancelled_result(call, reason)
    message = Message.tool(result.text, tool_call_id=call.id, name=call.name, id=message_id)
    status = ToolCallStatus.CANCELLED
    log.append(
        run, ToolCallFinished(call_id=call.id, tool_name=call.name, status=status, result=result, message=message)
    )


def close_children(log: LiveLog, run: RunState, call: CallState, reason: str, *, running: bool = True) -> None:
    """End the children of a call that nobody waits for any more, except those in the background.

    With `running=False`, those that are at work in this process continue, too.
    """
    for ref in list(call.children.values()):
        child = log.tree.runs.get(ref.run_id)
        if child is None or ref.ended or child.request.detached:
            continue
        if not running and not child.waits and ref.run_id in log.executions:
            continue
        if not child.is_over:
            close_run(log, child, Ending(RunStatus.CANCELLED, "cancelled", reason))
        log.append(
            run,
            ChildFinished(
                call_id=call.call.id, child_run_id=ref.run_id, child_agent=child.identity.agent, status=child.status
            ),
        )


def start_leg(
    log: LiveLog, run: RunState, answers: tuple[Answer, ...] = (), messages: tuple[Message, ...] = ()
) -> None:
    """Begin another leg of a run that waits, with the decisions on it, or of a fork, with new input."""
    said = (*run.messages, *[call.message for call in run.calls.values() if call.message is not None])
    identity = run.identity
    log.append(
        run,
        RunStarted(
            thread_id=identity.thread_id,
            parent_tool_call_id=identity.parent_tool_call_id,
            messages=messages,
            continues=bool(said),
        ),
        Private(answers=answers),
    )
    if said:
        log.append(run, MessagesSnapshot(messages=said))


def close_run(log: LiveLog, run: RunState, ending: Ending) -> Ending:
    """End a run and everything under it that waits or does not stop, the deepest first."""
    if run.waits:
        start_leg(log, run)
    for call in run.open():
        close_call(log, run, call)
    drop_drafts(log, run)
    execution = log.executions.get(run.run_id)
    if execution is not None:
        execution.cancellation.set(ending.error or "cancelled")
        execution.finish(ending)
        return ending
    if run.step_open:
        log.append(run, StepFinished(step=run.step), Private(ending=ending))
    log.append(
        run,
        RunFinished(
            status=ending.status,
            termination=ending.termination,
            response=run.response(),
            error=ending.error,
            steps=run.step,
            usage=run.total,
        ),
    )
    log.results[run.run_id] = result_of(log, run, ending)
    return ending
