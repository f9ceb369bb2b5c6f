"""Endings: the outcomes of calls, and the end of calls and runs that nobody continues."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.codec import to_json_value
from ..core.errors import InternalError, ToolCancelled, ToolError
from ..core.events import ChildFinished, MessagesSnapshot, RunFinished, RunStarted, StepFinished, ToolCallFinished
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.messages import Message, ToolCall
from ..core.plugins import Block
from ..core.results import ToolOutput, ToolResult, ToolStatus
from ..core.rows import Answer, Ending, Private
from ..core.state import StateCommand
from .execution import result_of
from .log import LiveLog
from .state import CallState, RunState

_STATUS = {
    ToolStatus.SUCCESS: ToolCallStatus.SUCCEEDED,
    ToolStatus.ERROR: ToolCallStatus.FAILED,
    ToolStatus.PENDING: ToolCallStatus.SUSPENDED,
}
_PLAIN = ToolResult()
"""The fields of a result whose tool returns just a value."""


class CallOutcome(Struct, frozen=True, gc=False):
    """The status a call will have, its result, and the state it asks to change."""

    status: ToolCallStatus
    result: ToolResult
    command: StateCommand | None = None

    def with_command(self, command: StateCommand) -> CallOutcome:
        return replace(self, command=command)

    def with_command_before(self, command: StateCommand) -> CallOutcome:
        """The same, with what hooks asked for earlier in front."""
        if not command:
            return self
        return replace(self, command=command.extend(self.command) if self.command is not None else command)


def outcome_of(call: ToolCall, returned: Any) -> CallOutcome:
    """Make an outcome of what a tool returned; raises InternalError for a value that has no JSON form."""
    command = None
    if isinstance(returned, ToolOutput):
        command, returned = returned.command, returned.result
    result = returned if isinstance(returned, ToolResult) else _PLAIN
    data = returned if result is _PLAIN else result.data
    if type(data) is not str:
        try:
            data = to_json_value(data)
        except (TypeError, ValueError) as exc:
            raise InternalError(f"tool {call.name!r} returned a value that cannot be written as JSON: {exc}") from exc
    named = ToolResult(call.name, result.status, data, result.message, result.suspension, result.metadata)
    return CallOutcome(_STATUS[result.status], named, command)


def failed(call: ToolCall, error: ToolError | Block) -> CallOutcome:
    """The outcome of a call that ended by an error: the model reads kind and message, its state is dropped."""
    kind, message = ("blocked", error.reason) if isinstance(error, Block) else (error.kind, error.message)
    data = {"error": {"kind": kind, "message": message}}
    return CallOutcome(ToolCallStatus.FAILED, ToolResult(call.name, ToolStatus.ERROR, data, f"{kind}: {message}"))


def cancelled(call: ToolCall, reason: str) -> CallOutcome:
    """The outcome of a call that was stopped, or never came to its turn."""
    error = ToolCancelled(reason)
    data = {"error": {"kind": error.kind, "message": reason}}
    return CallOutcome(ToolCallStatus.CANCELLED, ToolResult(call.name, ToolStatus.ERROR, data, str(error)))


def interrupted(call: ToolCall) -> CallOutcome:
    """The outcome of a call whose process ended while it ran, and which may not be run twice."""
    message = (
        "interrupted, outcome unknown: the process ended while this call ran. It may have done its work, a part of it "
        "or nothing: find out before you make it again"
    )
    data = {"error": {"kind": "interrupted", "message": message}}
    return CallOutcome(ToolCallStatus.FAILED, ToolResult(call.name, ToolStatus.ERROR, data, message))


def cut(text: str, limit: int, kept: str = "") -> str:
    """Text within the limit: the beginning and the end, with a line between that says what is missing, and where it is."""
    head = limit * 3 // 4
    tail = limit - head
    missing = len(text) - head - tail
    note = f"{missing:,} of {len(text):,} characters left out here{'; ' + kept if kept else ''}"
    return f"{text[:head]}\n[… {note} …]\n{text[len(text) - tail :]}"


def close_call(log: LiveLog, run: RunState, call: CallState) -> None:
    """End a call as cancelled, after the children it started."""
    made = call.status is not ToolCallStatus.NEW
    reason = "the call was cancelled before it finished" if made else "the run ended before this call was made"
    close_children(log, run, call, reason)
    finish_cancelled(log, run, call.call, reason, call.message_id)


def finish_cancelled(log: LiveLog, run: RunState, call: ToolCall, reason: str, message_id: str = "") -> None:
    """Tell that a call was cancelled."""
    dropped = cancelled(call, reason)
    message = Message.tool(dropped.result.text, tool_call_id=call.id, name=call.name, id=message_id)
    log.append(
        run,
        ToolCallFinished(
            call_id=call.id, tool_name=call.name, status=dropped.status, result=dropped.result, message=message
        ),
    )


def close_children(log: LiveLog, run: RunState, call: CallState, reason: str, *, running: bool = True) -> None:
    """End the children of a call that nobody waits for any more; not those that work in the background.

    Without `running`, also not those that are at work in this process.
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
    """Begin another leg of a run that waits, with the decisions that were made, or of a fork, with new input."""
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
    execution = log.executions.get(run.run_id)
    if run.waits:
        start_leg(log, run)
    for call in run.open():
        close_call(log, run, call)
    for call_id, name in list(run.drafts.items()):
        finish_cancelled(log, run, ToolCall(call_id, name, {}), "the model did not finish asking for it")
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
