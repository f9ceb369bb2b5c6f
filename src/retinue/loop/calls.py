"""One tool call: prepare → execute → finalize. A call that fails returns a result; it never raises."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from msgspec import DecodeError, Struct
from msgspec.structs import replace

from ..core.agents import BoundTool
from ..core.concurrency import GRACE, CancellationToken, Cause, is_closing, join, supervise
from ..core.content import MAX_BYTES, check_shape, clean_text, parse_json, to_json_value
from ..core.context import ToolContext
from ..core.errors import (
    Denied,
    Escape,
    ExecutionFailed,
    InternalError,
    InvalidArguments,
    NotFound,
    OwnershipLost,
    RecordUnwritable,
    RetinueError,
    StateError,
    ToolCancelled,
    ToolError,
    ToolTimeout,
    WriteConflict,
)
from ..core.events import Custom, StateDelta, ToolCallFinished, ToolCallReady
from ..core.messages import FilePart, ImagePart, Message, Part, ReceiptPart, Role, TextPart, ToolCall, checked_record
from ..core.plugins import Block
from ..core.receipts import is_shown, of_children
from ..core.results import SuspendTicket, ToolCallStatus, ToolOutput, ToolResult, ToolStatus, media_json, media_parts
from ..core.rows import Private
from ..core.schema import has_more_items, isolate
from ..core.state import Snapshot, StateCommand
from ..core.tools import Tool
from ..log.receipts import receipt_of
from ..log.state import CALL_SUSPENDED, RUNNING, CallState, RunState
from .budget import deadline
from .compaction import history_of
from .execution import Execution, close_children
from .phases import WorkItem, private_of

_log = logging.getLogger(__name__)

_STATUS = {
    ToolStatus.SUCCESS: ToolCallStatus.SUCCEEDED,
    ToolStatus.ERROR: ToolCallStatus.FAILED,
    ToolStatus.PENDING: CALL_SUSPENDED,
}
_TOOL, _SUCCESS, _SUCCEEDED = Role.TOOL, ToolStatus.SUCCESS, ToolCallStatus.SUCCEEDED
_PLAIN = ToolResult()
"""The fields of a result whose tool returns just a value."""
_NEVER_RETRIED = (InvalidArguments, Denied, ToolCancelled)
_FEW_ITEMS = 5
"""Items of wrong arguments whose errors are listed at once. With more, that takes time, so it is one call in a turn."""
_NOTHING: Mapping[str, Any] = {}
_NO_METADATA: dict[str, Any] = {}


MakeContext = Callable[["Execution", ToolCall, Snapshot | None, Any], ToolContext]
"""Returns the context of a call with a snapshot and the input of a decision."""


class CallOutcome(Struct, frozen=True, gc=False):
    """The end of a call: its status, its result, and the state changes it asks for."""

    status: ToolCallStatus
    result: ToolResult
    command: StateCommand | None = None
    parts: tuple[Part, ...] = ()
    """The parts of a result with images or files."""
    receipts: tuple[ReceiptPart, ...] = ()
    """The receipts of background tasks that the result is about."""

    def with_command_before(self, command: StateCommand) -> CallOutcome:
        """The same outcome, with an earlier command of hooks in front."""
        if not command:
            return self
        return replace(self, command=command.extend(self.command) if self.command is not None else command)


_MEDIA = frozenset({ImagePart, FilePart})
_MISTAKES = (ToolError, StateCommand)
"""What a tool may not return."""


def outcome_of(call: ToolCall, returned: Any) -> CallOutcome:
    """Convert the return value of a tool to an outcome; raise InternalError for a value that has no JSON form."""
    command = None
    receipts: tuple[ReceiptPart, ...] = ()
    if isinstance(returned, ToolOutput):
        command, receipts, returned = returned.command, returned.receipts, returned.result
    if returned.__class__ is str:
        return CallOutcome(_SUCCEEDED, ToolResult(call.name, _SUCCESS, _text(call, returned)), command, (), receipts)
    if isinstance(returned, _MISTAKES):
        instead = "raise it" if isinstance(returned, ToolError) else "return ToolOutput.with_command(result, command)"
        raise InternalError(f"tool {call.name!r} returned a {type(returned).__name__}: {instead} instead")
    result = returned if isinstance(returned, ToolResult) else _PLAIN
    data, message = returned if result is _PLAIN else result.data, result.message
    parts: tuple[Part, ...] = ()
    if type(data) is str:
        data = _text(call, data)
    else:
        try:
            if _MEDIA & check_shape(data).kinds and (parts := media_parts(data)):
                if message is not None:  # it takes the place of the text
                    parts = (TextPart(message), *[part for part in parts if isinstance(part, ImagePart | FilePart)])
                data = [media_json(part) for part in parts]
                message = "".join([part.text for part in parts if isinstance(part, TextPart)])
                parts = tuple([checked_record(part) for part in parts])
            data = to_json_value(data)
        except (TypeError, ValueError) as exc:
            raise _unwritable(call, exc) from exc
    message = None if message is None else _text(call, message)
    ticket, metadata = result.suspension, result.metadata
    try:
        ticket = None if ticket is None else checked_record(ticket)
        metadata = to_json_value(metadata) if metadata else _NO_METADATA
    except (TypeError, ValueError) as exc:
        raise _unwritable(call, exc) from exc
    named = ToolResult(call.name, result.status, data, message, ticket, metadata)
    return CallOutcome(_STATUS[result.status], named, command, parts, receipts)


def _text(call: ToolCall, text: str) -> str:
    if text.__class__ is str and text.isascii() and len(text) <= MAX_BYTES:
        return text
    try:
        return clean_text(text)
    except (TypeError, ValueError) as exc:
        raise _unwritable(call, exc) from exc


def _unwritable(call: ToolCall, exc: Exception) -> InternalError:
    return InternalError(f"tool {call.name!r} returned a value that cannot be written as JSON: {exc}")


def interrupted(call: ToolCall) -> CallOutcome:
    """Return the outcome of a call that was running when its process died, and that must not run twice."""
    message = (
        "interrupted, outcome unknown: the process ended while this call ran. It may have done its work, a part of it "
        "or nothing: find out before you make it again"
    )
    data = {"error": {"kind": "interrupted", "message": message}}
    return CallOutcome(ToolCallStatus.FAILED, ToolResult(call.name, ToolStatus.ERROR, data, message))


def failed(call: ToolCall, error: ToolError | Block) -> CallOutcome:
    """Return the outcome of a call that failed: the model reads kind and message, its state changes are dropped."""
    kind, message = ("blocked", error.reason) if isinstance(error, Block) else (error.kind, error.message)
    message = clean_text(str(message))
    data = {"error": {"kind": kind, "message": message}}
    return CallOutcome(ToolCallStatus.FAILED, ToolResult(call.name, ToolStatus.ERROR, data, f"{kind}: {message}"))


# --- prepare


def _why_malformed(text: str) -> str:
    """Return why a text cannot be the arguments of a call: it is too deep, too large, or no JSON object."""
    if text.endswith("}"):
        try:
            parse_json(text)
        except DecodeError:
            pass
        except ValueError as exc:
            return f"the JSON of the arguments is refused: {exc}"
    return f"the arguments are not a JSON object: {text[:200]}"


def ready(x: Execution, call: ToolCall) -> ToolCallReady:
    """Return the event with which the work of a call begins."""
    bound = x.toolbox.get(call.name)
    tool_id = None if bound is None or bound.descriptor.id == call.name else bound.descriptor.id
    return ToolCallReady(call_id=call.id, tool_name=call.name, args=call.args, tool_id=tool_id)


async def prepare(x: Execution, call: ToolCall) -> BoundTool:
    """Find the tool, check the arguments and return the tool; raise a ToolError that the model can learn from."""
    bound, offered = x.toolbox.get(call.name), x.state.offered
    if bound is None or (offered is not None and call.name not in offered):
        known = x.toolbox if offered is None else sorted(offered)
        raise NotFound(f"there is no tool named {call.name!r}; available: {', '.join(known) or 'none'}")
    if call.malformed is not None:
        raise InvalidArguments(_why_malformed(call.malformed))
    if not bound.check.accepts(call.args):
        if has_more_items(call.args, _FEW_ITEMS):
            async with x.listing:
                problems = bound.check.problems(call.args)
                await asyncio.sleep(0)
            stop_if_given_up(x)
        else:
            problems = bound.check.problems(call.args)
        raise InvalidArguments("; ".join(problems))
    if bound.validates:
        try:
            if bound.tool.validate_args(isolate(call.args)) is not None:
                raise InternalError(
                    f"validate_args of {call.name!r} returned a value: it raises InvalidArguments instead"
                )
        except (ToolError, Escape):
            raise
        except Exception as exc:
            raise _internal_error(call, exc) from exc
    return bound


# --- execute


async def execute(
    x: Execution,
    bound: BoundTool,
    state: CallState,
    call: ToolCall,
    resume_input: Any = None,
    *,
    make_context: MakeContext | None = None,
) -> CallOutcome:
    """Run the tool, with its retries, and return one outcome, also if it fails.

    The tool starts only after the row of its start is stored. A tool with a queue may run on another worker.
    """
    placed = None if bound.options.queue is None else x.resolver.place_call(x, bound.tool, state, call, resume_input)
    if placed is not None:
        return await placed
    writer, make_context = x.log.writer, make_context or context_for
    if writer is not None:
        await writer.flush()
        await writer.confirm()
    outcome = await _attempt(x, bound, state, call, resume_input, make_context)
    if state.children and outcome.status is not CALL_SUSPENDED and (waiting := _waiting(x, state)):
        await x.resolver.stop_waiting(x.log.tree, "the call that started it has ended", waiting)
    return outcome


async def _attempt(
    x: Execution, bound: BoundTool, state: CallState, call: ToolCall, resume_input: Any, make_context: MakeContext
) -> CallOutcome:
    """Run the tool until an attempt succeeds, or no further one is allowed."""
    tool, options, attempt = bound.tool, bound.options, 0
    # Each turn is one attempt.
    while True:
        if attempt and state.children:  # those of the attempt that failed
            close_children(x.log, x.state, state.children.values(), "the attempt that started it failed")
            x.log.append_private(Private(kind="commit", run_id=x.run_id, call_id=call.id, abandoned=True))
        ctx = make_context(x, call, x.snapshot, resume_input)
        try:
            if options.timeout is None:
                returned = await _begin(tool, call, ctx)
            else:
                returned = await _execute_within(options.timeout, x, tool, call, ctx)
            return outcome_of(call, returned)
        except ToolError as exc:
            error = exc
        except (Escape, OwnershipLost, KeyboardInterrupt):
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = InternalError("the tool cancelled itself")
        except BaseException as exc:  # also SystemExit and the exceptions of test frameworks
            if is_closing(exc):
                raise
            error = _internal_error(call, exc)
        if attempt >= options.retries or isinstance(error, _NEVER_RETRIED):
            return failed(call, error)
        await asyncio.sleep(min(0.05 * 2**attempt, 2.0))
        attempt += 1


def _waiting(x: Execution, call: CallState) -> list[RunState]:
    """Return the runs below a call that wait for a human, on any backend."""
    tree = x.log.tree
    below = [child for ref in call.children.values() if (child := tree.runs.get(ref.run_id)) is not None]
    places = [child.ns for child in below if child.waits and not child.request.detached]
    if not places:
        return []  # fast path: do not scan every run of the tree
    return [run for run in tree.runs.values() if run.waits and any(run.ns[: len(ns)] == ns for ns in places)]


def _begin(tool: Tool, call: ToolCall, ctx: ToolContext) -> Coroutine[Any, Any, Any]:
    work = tool.execute(isolate(call.args), ctx)
    if not hasattr(work, "__await__"):
        raise InternalError(f"tool {call.name!r}: its execute is not async; write `async def execute(self, args, ctx)`")
    return work


def stop_if_given_up(x: Execution) -> None:
    """Raise if the run has ended, or another process has claimed its log, during the last await."""
    if x.state.status is not RUNNING or x.log.lost:
        raise asyncio.CancelledError


def context_for(
    x: Execution, call: ToolCall, snapshot: Snapshot | None = None, resume_input: Any = None
) -> ToolContext:
    """Return the context for the tool of a call. Without a snapshot, the tool sees the present state."""
    return ToolContext(
        call.id,
        call.name,
        x.state.identity,
        x.agent,
        x.store.snapshot() if snapshot is None else snapshot,
        x.report,
        x.cancellation,
        x.resolver,
        resume_input,
        deadline(x.log.tree, x.state, x.now()) if x.is_limited else None,
        x.request.context,
        None if x.hooks.policy is None else history_of(x),
    )


async def _execute_within(timeout: float, x: Execution, tool: Tool, call: ToolCall, ctx: ToolContext) -> Any:
    """Make one attempt with a time limit. It has its own cancellation token: a timeout stops the attempt, not the run."""
    cancellation = CancellationToken()
    ctx = ctx.within(cancellation, min(x.now() + timeout, ctx.deadline or float("inf")))
    # In its own asyncio task: a tool that swallows its cancellation can be abandoned.
    attempt = asyncio.create_task(_begin(tool, call, ctx))

    def stop(_: asyncio.Task[Any], cause: Cause) -> None:
        cancellation.set("timeout" if cause == "deadline" else x.cancellation.reason or "cancelled")
        attempt.cancel(cancellation.reason)

    pass_on = x.cancellation.pass_on_to(cancellation)
    try:
        end = await supervise(attempt, deadline=timeout, grace=GRACE, stop=stop)
    except asyncio.CancelledError:
        await join([attempt])  # the grace of the run counts
        raise
    finally:
        x.cancellation.forget(pass_on)
    if end.cause is None:
        return end.result()
    if end.is_left:
        _log.warning("tool %r did not stop after its timeout and is left behind, in call %s", call.name, call.id)
    raise ToolTimeout(f"no result after {timeout:g} s")


def _internal_error(call: ToolCall, exc: BaseException) -> InternalError:
    """Return the error that the model reads for an unexpected exception, and write the traceback to the log."""
    _log.error("tool %r failed in call %s", call.name, call.id, exc_info=exc)
    kind = type(exc).__name__
    if isinstance(exc, RetinueError):  # a sentence of its own
        return InternalError(str(exc) or kind)
    return InternalError(f"{kind}: {exc}" if str(exc) else kind)


# --- finalize


def finalize(
    x: Execution,
    call: CallState,
    outcome: CallOutcome,
    fields: Mapping[str, Any] = _NOTHING,
    late: StateCommand | None = None,
) -> list[WorkItem]:
    """Commit the call's state, end the call and return the jobs that follow. If the commit fails, the call fails.

    `late` is the command of hooks that ran on fresh state, so it cannot conflict with the writes of other calls.
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
    end_call(x, call, outcome, fields)
    return work


def _commit(
    x: Execution, call: ToolCall, command: StateCommand | None, late: StateCommand | None
) -> tuple[dict[str, Any], list[WorkItem]]:
    """Commit a call's state; return the fields for the row of the call's end, and the jobs."""
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


def _left_waiting(x: Execution, call: CallState) -> list[RunState]:
    """Report and return the children that wait for a human while their call ends: nobody could answer them."""
    children = [x.log.tree.runs.get(ref.run_id) for ref in call.children.values() if not ref.ended]
    left = [child for child in children if child is not None and child.waits and not child.request.detached]
    for child in left:
        x.emit_error(
            f"call {call.call.id!r} of {call.call.name} has ended although its child {child.identity.agent!r} waits for a "
            "human: the child is cancelled. Return ToolResult.suspended(…) while a child is suspended",
            "waiting_child_cancelled",
        )
    return left


def _note_on(left: list[RunState]) -> str:
    """Return what the model reads below the result of a call that ended although children of it wait for a human."""
    names = ", ".join(repr(child.identity.agent) for child in left)
    return f"[Cancelled at the end of this call, still waiting for a human: {names}. Nobody can answer any more.]"


def end_call(x: Execution, call: CallState, outcome: CallOutcome, fields: Mapping[str, Any] = _NOTHING) -> None:
    """Emit the end of a call with its message, or the event of its suspension."""
    made, result, status = call.call, outcome.result, outcome.status
    text, parts = result.text, outcome.parts
    if len(text) > (limit := result_limit(x, made)):
        text = _shorten(text, limit, x.kept.pop(made.id, ""))
        parts = (TextPart(text), *[part for part in parts if not isinstance(part, TextPart)])
    parts = parts or ((TextPart(text),) if text else ())
    if call.children and status is not CALL_SUSPENDED and (left := _left_waiting(x, call)):
        result = replace(result, metadata={**result.metadata, "cancelled_children": [child.run_id for child in left]})
        parts = (*parts, TextPart(f"\n{_note_on(left)}" if parts else _note_on(left)))
    if outcome.receipts or call.children:
        parts = (*parts, *_shown_receipts(x, call, outcome))
    message = Message(
        role=_TOOL,
        parts=parts,
        tool_call_id=made.id,
        name=made.name,
        id=call.message_id,
    )
    if status is CALL_SUSPENDED:
        ticket, bound = result.suspension or default_ticket(made, text), x.toolbox.get(made.name)
        result = result.with_ticket(ticket if bound is None else ticket.with_arguments(bound.descriptor.parameters))
        if ticket.takes_arguments and (rules := x.hooks.rules()):
            fields = {**fields, "rules": rules}
    else:
        for child in call.children.values():
            if not child.ended:
                reason, is_failed = "the call that started it has ended", status is ToolCallStatus.FAILED
                close_children(x.log, x.state, call.children.values(), reason, running=is_failed)
                break
        if "admitted" in fields:
            fields = {name: value for name, value in fields.items() if name != "admitted"}
    x.emit(
        ToolCallFinished(call_id=made.id, tool_name=made.name, status=status, result=result, message=message),
        Private(**fields) if fields else None,
    )


def _shown_receipts(x: Execution, call: CallState, outcome: CallOutcome) -> Iterator[ReceiptPart]:
    """Yield the receipts that the model reads with the result of a call: of its children that have ended, as one, or of
    the background tasks that the result is about."""
    if outcome.status is CALL_SUSPENDED:
        return
    when, tree = x.agent.receipts, x.log.tree
    children = [child for ref in call.children.values() if (child := tree.runs.get(ref.run_id)) is not None]
    if ended := [receipt_of(tree, child) for child in children if child.is_over]:
        yield from [ReceiptPart(whole) for whole in [of_children(ended)] if is_shown(whole, when)]
    else:
        yield from [part for part in outcome.receipts if is_shown(part.receipt, when)]


def default_ticket(call: ToolCall, text: str) -> SuspendTicket:
    """Return the ticket of a call that was suspended without one."""
    return SuspendTicket(f"ticket_{call.id}", f"tool:{call.name}", text, call.args)


def result_limit(x: Execution, call: ToolCall) -> int:
    """Return the number of characters of the result that the model reads."""
    bound = x.toolbox.get(call.name)
    own = None if bound is None else bound.options.result_limit
    return x.agent.result_limit if own is None else own


def _shorten(text: str, limit: int, kept: str = "") -> str:
    """Keep the beginning and the end of a text; a line between says how much is missing and where it is kept."""
    head = limit * 3 // 4
    tail = limit - head
    missing = len(text) - head - tail
    note = f"{missing:,} of {len(text):,} characters left out here{'; ' + kept if kept else ''}"
    return f"{text[:head]}\n[… {note} …]\n{text[len(text) - tail :]}"
