"""Tool calls: prepare → execute → finalize. A call that goes wrong is a result, never an exception."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping
from functools import partial
from typing import Any, cast

from ..core.agents import BoundTool
from ..core.decisions import Decision
from ..core.errors import Escape, ExecutionFailed, InvalidArguments, NotFound, StateError, ToolError, WriteConflict
from ..core.events import ToolCallFinished, ToolCallReady, ToolCallResumed
from ..core.functions import in_thread
from ..core.lifecycle import ToolCallStatus
from ..core.messages import Message, Role, TextPart, ToolCall
from ..core.plugins import Block, Intercept, ResultKeeper, SetResult, Suspend
from ..core.results import ResumeMode, SuspendTicket, ToolResult
from ..core.state import Snapshot, StateCommand
from ..core.together import run_together
from ..core.tools import Tool
from .children import give_up_children
from .execute import execute, internal_error
from .outcomes import CallOutcome, cancelled, cut, failed, interrupted, outcome_of
from .phases import HookRound, apply, carry_out, commit
from .recovery import close_runs
from .scope import OpenCall, RunScope

_log = logging.getLogger(__name__)

_STRENGTH: dict[type[Any], int] = {Block: 3, Suspend: 2, SetResult: 1}


class CallGroup:
    """The calls of one step: they see one snapshot, and are told when they write the same key."""

    __slots__ = ("calls", "messages", "run", "snapshot", "writers")

    def __init__(self, run: RunScope, calls: tuple[ToolCall, ...]) -> None:
        self.run, self.calls = run, calls
        self.snapshot: Snapshot = run.state.snapshot()
        self.writers: dict[str, str] = {}
        self.messages: dict[str, Message] = {}
        for call in calls:
            run.open_calls[call.id] = OpenCall(call, run.next_message_id())

    async def run_all(self, calls: tuple[ToolCall, ...], decisions: Mapping[str, Decision]) -> None:
        """Run calls side by side, and join the conversation when none is left open."""
        try:
            if len(calls) == 1:
                await self._run_one(calls[0], decisions.get(calls[0].id))
            else:
                await run_together([self._run_one(call, decisions.get(call.id)) for call in calls])
        except BaseException:
            # Also when cancelled: the conversation must hold a result for every call it holds.
            if not self.run.sealed:
                self.close()
            raise
        if not self.run.open_calls:
            self.join()

    async def _run_one(self, call: ToolCall, decision: Decision | None) -> None:
        """Run a call when there is a slot for it."""
        run = self.run
        slots, open_call = run.budget.slots, run.open_calls[call.id]
        if not slots.take_now():
            await slots.take()
        open_call.holds_slot = True
        try:
            _start(run, open_call, decision)
            if run.has_hooks or decision is not None:
                await _run_call(self, open_call, decision)
            else:  # nobody hooks in and nobody has decided: the common case, with nothing in its way
                bound = _prepared(self, open_call, call)
                if bound is not None:
                    outcome = await _work(self, bound, open_call, call, None)
                    _stop_if_given_up(run)
                    if run.log.told is not None:
                        await run.log.told.order.turn(run, call.id)
                    committed = _finalize(self, open_call, outcome)
                    if committed is not None and (committed.actions or committed.effects):
                        await carry_out(run, committed, "after_tool")
        finally:
            if open_call.holds_slot:
                open_call.holds_slot = False
                slots.give_back()

    def close(self) -> None:
        """Close whatever is open, as cancelled, with the children it started."""
        for still_open in tuple(self.run.open_calls.values()):
            give_up_children(self.run, still_open)
            if still_open.status is ToolCallStatus.NEW:
                still_open.move(ToolCallStatus.RUNNING)
            _end(self, still_open, cancelled(still_open.call, "the call was cancelled before it finished"))
        self.join()

    def results(self) -> list[Message]:
        """What there is of the results, in call order."""
        messages = self.messages
        return [messages[call.id] for call in self.calls if call.id in messages]

    def join(self) -> None:
        """The results join the conversation in call order."""
        self.run.conversation.extend(self.results())
        self.run.group = None


def run_calls(run: RunScope, calls: tuple[ToolCall, ...]) -> Coroutine[Any, Any, None]:
    """Run the calls of one step. Those that wait for a human are still open afterwards."""
    run.group = group = CallGroup(run, calls)
    return group.run_all(calls, {})


async def resume_calls(run: RunScope, decisions: Mapping[str, Decision]) -> None:
    """Go on with the suspended calls that were decided on."""
    group = run.group
    assert group is not None
    group.snapshot, group.writers = run.state.snapshot(), {}
    await group.run_all(tuple([call for call in group.calls if call.id in decisions]), decisions)


def refuse_calls(run: RunScope, calls: tuple[ToolCall, ...], code: str, reason: str) -> None:
    """Answer every call with what stands in its way."""
    group = CallGroup(run, calls)
    for call in calls:
        open_call = run.open_calls[call.id]
        _start(run, open_call, None)
        _end(group, open_call, outcome_of(call, ToolResult.error(reason, code=code)))
    group.join()


async def _run_call(group: CallGroup, open_call: OpenCall, decision: Decision | None) -> None:
    """One call from its start to its end, or to where it waits."""
    run, call = group.run, open_call.call
    if decision is not None:
        if decision.action == "cancel":
            _end(group, open_call, cancelled(call, decision.reason or "the human said no"))
            return
        call = _decided(open_call, decision)
    bound = _prepared(group, open_call, call)
    if bound is None:
        return
    if not run.has_hooks:
        outcome = await _perform(group, bound, open_call, call, decision)
        await _settle(group, open_call, outcome)
    elif open_call.admitted:  # it waited by its own wish: the hooks before it have let it pass
        outcome = await _perform(group, bound, open_call, call, decision)
        await _finalize_with_hooks(group, open_call, call, outcome)
    else:
        await _run_hooked_call(group, bound, open_call, call, decision)


async def _run_hooked_call(
    group: CallGroup, bound: BoundTool, open_call: OpenCall, call: ToolCall, decision: Decision | None
) -> None:
    """A call that hooks may block, suspend or answer before it is made."""
    if decision is not None and _decides_result(open_call):
        intercept, command = None, None
    else:
        intercept, command = await _before_tool(group, open_call, call, decision)
    open_call.admitted = intercept is None
    match intercept:
        case Block():
            outcome = failed(call, intercept)
            if intercept.end_run:
                group.run.blocked = intercept.reason
        case Suspend():
            outcome = _outcome(call, ToolResult.suspended(intercept.ticket.message, intercept.ticket))
        case SetResult():
            outcome = _outcome(call, intercept.result)
        case None:
            outcome = await _perform(group, bound, open_call, call, decision)
    if command is not None:
        outcome = outcome.with_command_before(command)
    if isinstance(intercept, Block | Suspend):
        await _settle(group, open_call, outcome)
    else:
        await _finalize_with_hooks(group, open_call, call, outcome)


def _outcome(call: ToolCall, result: ToolResult) -> CallOutcome:
    """A result that did not come from the tool, as an outcome; one that has no JSON form fails the call."""
    try:
        return outcome_of(call, result)
    except ToolError as exc:
        return failed(call, exc)


def _decides_result(open_call: OpenCall) -> bool:
    """Whether what the human says is the result, so that nothing needs to run."""
    return open_call.ticket is not None and open_call.ticket.resume_mode is ResumeMode.USE_DECISION


def _prepared(group: CallGroup, open_call: OpenCall, call: ToolCall) -> BoundTool | None:
    """The tool to run; None where the call has ended, because it cannot."""
    try:
        return prepare(group.run, call)
    except ToolError as exc:
        _finalize(group, open_call, failed(call, exc))
        return None


async def _perform(
    group: CallGroup, bound: BoundTool, open_call: OpenCall, call: ToolCall, decision: Decision | None
) -> CallOutcome:
    """The outcome of a call: what a human said it is, or what comes of the work."""
    if decision is not None and _decides_result(open_call):
        return _outcome(call, ToolResult.success(decision.payload))
    outcome = await _work(group, bound, open_call, call, decision)
    _stop_if_given_up(group.run)
    return outcome


def _work(
    group: CallGroup, bound: BoundTool, open_call: OpenCall, call: ToolCall, decision: Decision | None
) -> Awaitable[CallOutcome]:
    """Have the work done, once: what is recorded is not done again."""
    run = group.run
    key = f"tool:{call.id}" if not open_call.resumes else f"tool:{call.id}#{open_call.resumes}"
    resume_input = None if decision is None else decision.payload
    about = (call.name, call.args)
    instead = None if bound.tool.idempotent or not run.journal.keeps else partial(_interrupted, run, call)
    return run.journal.record(
        "tool", key, about, execute, run, bound, call, group.snapshot, resume_input, instead=instead
    )


def _interrupted(run: RunScope, call: ToolCall) -> CallOutcome:
    """The outcome of a call that may have done its work, or half of it, when its process ended."""
    close_runs(run.log, (*run.ns, f"tools:{call.id}"), "the call that started it was interrupted")
    run.count_call(call.id)
    return interrupted(call)


def _stop_if_given_up(run: RunScope) -> None:
    if run.sealed:  # while its work went on
        raise asyncio.CancelledError


def _start(run: RunScope, open_call: OpenCall, decision: Decision | None) -> None:
    call = open_call.call
    if decision is None:
        open_call.move(ToolCallStatus.RUNNING)
        run.emit(ToolCallReady(call_id=call.id, tool_name=call.name, args=call.args))
        return
    open_call.move(ToolCallStatus.RESUMING)
    open_call.resumes += 1
    open_call.found_again = frozenset()
    run.emit(ToolCallResumed(call_id=call.id, tool_name=call.name, decision=decision))
    if decision.action == "resume":
        open_call.move(ToolCallStatus.RUNNING)


def _decided(open_call: OpenCall, decision: Decision) -> ToolCall:
    """The call as it is to run: with the decision as its arguments where the ticket says so."""
    call, ticket = open_call.call, open_call.ticket
    if ticket is None or ticket.resume_mode is not ResumeMode.PASS_DECISION:
        return call
    payload: Any = decision.payload
    if isinstance(payload, dict):
        return ToolCall(call.id, call.name, cast("dict[str, Any]", payload))
    return ToolCall(call.id, call.name, {}, repr(payload))


def prepare(run: RunScope, call: ToolCall) -> BoundTool:
    """The tool to run, once its arguments are known to be good; raises a ToolError that the model can learn from."""
    bound = run.toolbox.get(call.name)
    if bound is None or (run.offered is not None and call.name not in run.offered):
        offered = run.toolbox if run.offered is None else sorted(run.offered)
        raise NotFound(f"there is no tool named {call.name!r}; available: {', '.join(offered) or 'none'}")
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
    group: CallGroup, open_call: OpenCall, call: ToolCall, decision: Decision | None
) -> tuple[Intercept | None, StateCommand | None]:
    """What the hooks say before a call: the strongest intercept, and the state they change with it."""
    run = group.run
    if "before_tool" not in run.hooks.by_phase:
        return None, None
    context = run.hook_context("before_tool", group.snapshot, call=call, decision=decision)
    at_work = HookRound(run, "before_tool", context, f"#{open_call.resumes}")
    said = await at_work.run_hooks()
    if at_work.deferred:  # they must see what the others wrote, so that is committed now
        committed, at_work.command = at_work.command, None
        if committed is not None:
            await commit(run, committed, "before_tool", call.id)
        said += await at_work.finish(call.id)
    if decision is not None and open_call.asked_by is not None:
        open_call.answered |= {open_call.asked_by}
        open_call.asked_by = None
    chosen: Intercept | None = None
    for hook, intercept in said:
        if isinstance(intercept, Suspend) and hook in open_call.answered:
            continue  # it has its answer
        strength = _STRENGTH[type(intercept)]
        if chosen is None or strength > _STRENGTH[type(chosen)]:
            chosen = intercept
            open_call.asked_by = hook if isinstance(intercept, Suspend) else None
        elif strength == _STRENGTH[type(chosen)]:
            _log.warning("%s also returned %s for call %s; the first is kept", hook.label, intercept, call.id)
            run.tell(f"{hook.label} also asked for {type(intercept).__name__}; the first is kept", "intercept_tie")
    return chosen, at_work.command


async def _finalize_with_hooks(group: CallGroup, open_call: OpenCall, call: ToolCall, outcome: CallOutcome) -> None:
    """As `_finalize`, after the hooks have seen the result; what they change is part of the one commit."""
    run = group.run
    if run.hooks.keeper is not None and len(text := outcome.result.text) > _limit(run, call):
        open_call.kept = await _keep(run, run.hooks.keeper, call, text)
    if outcome.status is ToolCallStatus.SUSPENDED or "after_tool" not in run.hooks.by_phase:
        await _settle(group, open_call, outcome)
        return
    if run.log.told is not None:
        await run.log.told.order.turn(run, call.id)
    context = run.hook_context("after_tool", group.snapshot, call=call, result=outcome.result)
    at_work = HookRound(run, "after_tool", context, f"#{open_call.resumes}")
    if outcome.command is not None:
        at_work.merge(outcome.command)
    if group.writers:
        at_work.keep_off([name for name, writer in group.writers.items() if writer != call.id])
    if said := await at_work.run_hooks():
        at_work.refuse(said)
    committed = _finalize(group, open_call, outcome.with_command(at_work.command) if at_work.command else outcome)
    if at_work.deferred:
        await at_work.finish(call.id)
    if committed is not None:
        await _carry_out(run, committed)


async def _keep(run: RunScope, keeper: ResultKeeper, call: ToolCall, text: str) -> str:
    """Where the whole result is kept, in words; nothing where it could not be."""
    try:
        return await in_thread(partial(keeper, call, text, run.identity), {})
    except Exception as exc:
        _log.warning("the result of call %s could not be kept", call.id, exc_info=exc)
        run.tell(f"the result of call {call.id!r} could not be kept: {exc}", "result_not_kept")
        return "the whole could not be kept"


async def _settle(group: CallGroup, open_call: OpenCall, outcome: CallOutcome) -> None:
    """End a call when it is its turn, and do what it asked for."""
    run = group.run
    if run.log.told is not None:
        await run.log.told.order.turn(run, open_call.call.id)
    await _carry_out(run, _finalize(group, open_call, outcome))


async def _carry_out(run: RunScope, command: StateCommand | None) -> None:
    """Do what a call asked for beyond its state."""
    if command is not None and (command.actions or command.effects):
        await carry_out(run, command, "after_tool")


def _finalize(group: CallGroup, open_call: OpenCall, outcome: CallOutcome) -> StateCommand | None:
    """Commit the call's state, or fail the call where it cannot be, and end it; returns what was committed."""
    call = open_call.call
    if outcome.command:
        try:
            _commit(group, call, outcome.command)
        except StateError as exc:
            outcome = failed(call, ExecutionFailed(f"call {call.id!r} could not commit its state: {exc}"))
    _end(group, open_call, outcome)
    return outcome.command


def _commit(group: CallGroup, call: ToolCall, command: StateCommand) -> None:
    run, writers = group.run, group.writers
    if writers and run.agent.conflicts == "error":
        for key, _ in command.patch.updates:
            if key.merge == "exclusive" and writers.get(key.name, call.id) != call.id:
                raise WriteConflict(key.name, writers[key.name], call.id)
    if command.actions or command.effects:
        run.hooks.check(command)
    apply(run, command, call.id)
    if len(group.calls) > 1:  # a call that is alone cannot clash
        for key, _ in command.patch.updates:
            if key.merge == "exclusive":
                writers[key.name] = call.id


def _end(group: CallGroup, open_call: OpenCall, outcome: CallOutcome) -> None:
    """The last event of a call and its message, or the news that it waits."""
    run, call, result = group.run, open_call.call, outcome.result
    open_call.move(outcome.status)
    text = result.text
    if len(text) > (limit := _limit(run, call)):
        text = cut(text, limit, open_call.kept)
    message = Message(
        role=Role.TOOL,
        parts=(TextPart(text),) if text else (),
        tool_call_id=call.id,
        name=call.name,
        id=open_call.message_id,
    )
    if outcome.status is ToolCallStatus.SUSPENDED:
        open_call.ticket = ticket = result.suspension or _default_ticket(call, text)
        result = result.with_ticket(ticket)
    else:
        del run.open_calls[call.id]
        if open_call.children_started:
            run.late_children = {**run.late_children, call.id: open_call.children_started}
        group.messages[call.id] = message
    run.emit(
        ToolCallFinished(call_id=call.id, tool_name=call.name, status=outcome.status, result=result, message=message)
    )


def _limit(run: RunScope, call: ToolCall) -> int:
    bound = run.toolbox.get(call.name)
    own = None if bound is None else bound.tool.result_limit
    return run.agent.result_limit if own is None else own


def _default_ticket(call: ToolCall, message: str) -> SuspendTicket:
    return SuspendTicket(f"ticket_{call.id}", f"tool:{call.name}", message, call.args)
