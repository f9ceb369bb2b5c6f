"""Tool calls: prepare → execute → finalize. A call that goes wrong is a result, never an exception."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from msgspec import Struct

from ..core.agents import BoundTool
from ..core.codec import to_json_value
from ..core.context import ToolContext
from ..core.errors import (
    Escape,
    ExecutionFailed,
    InternalError,
    InvalidArguments,
    NotFound,
    StateError,
    ToolCancelled,
    ToolError,
    ToolTimeout,
    WriteConflict,
)
from ..core.events import Custom, StateDelta, ToolCallFinished, ToolCallReady
from ..core.lifecycle import ToolCallStatus
from ..core.messages import Message, Role, TextPart, ToolCall
from ..core.results import ToolOutput, ToolResult, ToolStatus
from ..core.state import Snapshot, StateCommand
from .scope import RunScope

_log = logging.getLogger(__name__)

_STATUS = {
    ToolStatus.SUCCESS: ToolCallStatus.SUCCEEDED,
    ToolStatus.ERROR: ToolCallStatus.FAILED,
    ToolStatus.PENDING: ToolCallStatus.SUSPENDED,
}
_NEVER_RETRIED = (InvalidArguments, ToolCancelled)


class CallOutcome(Struct, frozen=True, gc=False):
    """How a call went, before its state is committed."""

    status: ToolCallStatus
    result: ToolResult
    command: StateCommand | None = None


class CallGroup:
    """The calls of one step: they see one snapshot, and are told when they write the same key."""

    __slots__ = ("run", "snapshot", "writers")

    def __init__(self, run: RunScope) -> None:
        self.run = run
        self.snapshot: Snapshot = run.state.snapshot()
        self.writers: dict[str, str] = {}


async def run_calls(run: RunScope, calls: tuple[ToolCall, ...]) -> list[CallOutcome]:
    """Run the calls of one step side by side; their messages join the conversation in call order."""
    group = CallGroup(run)
    done: dict[str, tuple[CallOutcome, Message]] = {}
    for call in calls:
        run.open_call(call)
    try:
        if len(calls) == 1:
            done[calls[0].id] = await _run_call(group, calls[0])
        else:
            await _run_together(group, calls, done)
    finally:
        # Also when cancelled: the conversation must hold a result for every call it holds.
        if not run.sealed:
            for call in calls:
                if call.id not in done:
                    done[call.id] = _cancelled(run, call)
            run.conversation.extend([done[call.id][1] for call in calls])
    return [done[call.id][0] for call in calls]


async def _run_together(
    group: CallGroup, calls: tuple[ToolCall, ...], done: dict[str, tuple[CallOutcome, Message]]
) -> None:
    slots = asyncio.Semaphore(group.run.budget.limits.parallel)

    async def one(call: ToolCall) -> None:
        async with slots:
            done[call.id] = await _run_call(group, call)

    tasks = [asyncio.ensure_future(one(call)) for call in calls]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _run_call(group: CallGroup, call: ToolCall) -> tuple[CallOutcome, Message]:
    run = group.run
    _start(run, call)
    try:
        bound = prepare(run, call)
    except ToolError as exc:
        outcome = failed(call, exc)
    else:

        async def work() -> CallOutcome:
            return await execute(group, bound, call)

        outcome = await run.journal.record("tool", f"tool:{call.id}", (call.name, call.args), work)
        if run.sealed:  # the run was given up on while this went on
            raise asyncio.CancelledError
    return finalize(group, call, outcome)


def refuse_calls(run: RunScope, calls: tuple[ToolCall, ...], limit: str) -> None:
    """Answer every call with the limit that stands in its way."""
    group = CallGroup(run)
    for call in calls:
        run.open_call(call)
        _start(run, call)
        text = f"the limit on {limit} is reached: no further calls are made, answer with what you have"
        refusal = ToolResult.error(text, code=f"limit:{limit}")
        run.conversation.append(finalize(group, call, _outcome(call, refusal, None))[1])


def _start(run: RunScope, call: ToolCall) -> None:
    run.open_calls[call.id].move(ToolCallStatus.RUNNING)
    run.emit(ToolCallReady(call_id=call.id, tool_name=call.name, args=call.args))


def close_calls(run: RunScope) -> None:
    """Close whatever is open, as cancelled."""
    for still_open in tuple(run.open_calls.values()):
        run.conversation.append(_cancelled(run, still_open.call)[1])


def prepare(run: RunScope, call: ToolCall) -> BoundTool:
    """The tool to run, once its arguments are known to be good; raises a ToolError that the model can learn from."""
    bound = run.toolbox.get(call.name)
    if bound is None:
        raise NotFound(f"there is no tool named {call.name!r}; available: {', '.join(run.toolbox) or 'none'}")
    if call.malformed is not None:
        raise InvalidArguments(f"the arguments are not a JSON object: {call.malformed[:200]}")
    bound.check(call.args)
    try:
        bound.tool.validate_args(call.args)
    except (ToolError, Escape):
        raise
    except Exception as exc:
        raise _internal(call, exc) from exc
    return bound


async def execute(group: CallGroup, bound: BoundTool, call: ToolCall) -> CallOutcome:
    """Run the tool, again where it may be retried, and make one outcome of whatever happens."""
    tool, attempt = bound.tool, 0
    # One turn is one attempt.
    while True:
        try:
            returned = await _attempt(group, bound, call)
            return _outcome_of(call, returned)
        except ToolError as exc:
            error = exc
        except Escape:
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = InternalError("the tool cancelled itself")
        except (Exception, SystemExit) as exc:
            error = _internal(call, exc)
        if attempt >= tool.retries or isinstance(error, _NEVER_RETRIED):
            return failed(call, error)
        await asyncio.sleep(min(0.05 * 2**attempt, 2.0))
        attempt += 1


async def _attempt(group: CallGroup, bound: BoundTool, call: ToolCall) -> Any:
    run, tool = group.run, bound.tool
    timeout, deadline = tool.timeout, run.budget.deadline
    cancellation = run.cancellation if timeout is None else run.cancellation.child()
    if timeout is not None:
        deadline = min(time.time() + timeout, deadline or float("inf"))
    ctx = ToolContext(
        call_id=call.id,
        tool_name=call.name,
        run=run.identity,
        agent=run.agent,
        snapshot=group.snapshot,
        emit=run.report,
        cancellation=cancellation,
        resolver=run.resolver,
        deadline=deadline,
        context=run.context,
    )
    if timeout is None:
        return await tool.execute(dict(call.args), ctx)
    timer = asyncio.timeout(timeout)
    try:
        async with timer:
            return await tool.execute(dict(call.args), ctx)
    except TimeoutError:
        if not timer.expired():
            raise
        cancellation.set("timeout")
        raise ToolTimeout(f"no result after {timeout:g} s") from None


def _outcome_of(call: ToolCall, returned: Any) -> CallOutcome:
    """What a tool returned, as an outcome; raises InternalError for a value that has no JSON form."""
    command = None
    if isinstance(returned, ToolOutput):
        command, returned = returned.command, returned.result
    result = returned if isinstance(returned, ToolResult) else ToolResult(call.name, data=returned)
    return _outcome(call, result, command)


def _outcome(call: ToolCall, result: ToolResult, command: StateCommand | None) -> CallOutcome:
    data: Any = result.data
    if type(data) is not str:
        try:
            data = to_json_value(data)
        except (TypeError, ValueError) as exc:
            raise InternalError(f"tool {call.name!r} returned a value that cannot be written as JSON: {exc}") from exc
    named = ToolResult(call.name, result.status, data, result.message, result.suspension, result.metadata)
    return CallOutcome(_STATUS[result.status], named, command)


def failed(call: ToolCall, error: ToolError) -> CallOutcome:
    """The outcome of a call that ended by an error: the model reads kind and message, its state is dropped."""
    data = {"error": {"kind": error.kind, "message": error.message}}
    return CallOutcome(ToolCallStatus.FAILED, ToolResult(call.name, ToolStatus.ERROR, data, str(error)))


def finalize(group: CallGroup, call: ToolCall, outcome: CallOutcome) -> tuple[CallOutcome, Message]:
    """Commit the call's state, tell the log, and make the message the model reads."""
    run = group.run
    if outcome.command:
        try:
            _commit(group, call, outcome.command)
        except StateError as exc:
            outcome = failed(call, ExecutionFailed(f"call {call.id!r} could not commit its state: {exc}"))
    return outcome, _close(run, call, outcome)


def _commit(group: CallGroup, call: ToolCall, command: StateCommand) -> None:
    run, writers = group.run, group.writers
    exclusive = [key.name for key, _ in command.patch.updates if key.merge == "exclusive"]
    if run.agent.conflicts == "error":
        for name in exclusive:
            if writers.get(name, call.id) != call.id:
                raise WriteConflict(name, writers[name], call.id)
    commit = run.state.apply(command)
    for name in exclusive:
        writers[name] = call.id
    if commit.changes:
        run.emit(StateDelta(revision=commit.revision, changes=commit.changes, call_id=call.id))
    for data in command.events:
        run.emit(Custom(data=data, call_id=call.id))


def _close(run: RunScope, call: ToolCall, outcome: CallOutcome) -> Message:
    """The last event of a call, and its message."""
    open_call = run.open_calls[call.id]
    open_call.move(outcome.status)
    if outcome.status is not ToolCallStatus.SUSPENDED:
        del run.open_calls[call.id]
    bound = run.toolbox.get(call.name)
    limit = run.agent.result_limit if bound is None or bound.tool.result_limit is None else bound.tool.result_limit
    text = cut(outcome.result.text, limit)
    message = Message(
        role=Role.TOOL,
        parts=(TextPart(text),) if text else (),
        tool_call_id=call.id,
        name=call.name,
        id=open_call.message_id,
    )
    run.emit(
        ToolCallFinished(
            call_id=call.id,
            tool_name=call.name,
            status=outcome.status,
            result=outcome.result,
            message=message,
        )
    )
    return message


def _cancelled(run: RunScope, call: ToolCall) -> tuple[CallOutcome, Message]:
    """Close a call that was stopped, or never came to its turn."""
    if run.open_calls[call.id].status is ToolCallStatus.NEW:
        run.open_calls[call.id].move(ToolCallStatus.RUNNING)
    error = ToolCancelled("the call was cancelled before it finished")
    result = ToolResult(call.name, ToolStatus.ERROR, {"error": {"kind": error.kind}}, str(error))
    outcome = CallOutcome(ToolCallStatus.CANCELLED, result)
    return outcome, _close(run, call, outcome)


def cut(text: str, limit: int) -> str:
    """Text within the limit: the beginning and the end, with a line between that says what is missing."""
    if len(text) <= limit:
        return text
    head = limit * 3 // 4
    tail = limit - head
    missing = len(text) - head - tail
    return f"{text[:head]}\n[… {missing:,} of {len(text):,} characters left out here …]\n{text[len(text) - tail :]}"


def _internal(call: ToolCall, exc: BaseException) -> InternalError:
    _log.error("tool %r failed in call %s", call.name, call.id, exc_info=exc)
    return InternalError(str(exc) or type(exc).__name__)
