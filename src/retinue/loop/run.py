"""The agent loop: ask the model, run the calls it asked for, commit, repeat.

`next_move` computes the next action from the run's state. So new, answered and recovered runs all enter the loop in
the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..core.concurrency import is_closing, run_together
from ..core.context import OUT_OF_TIME, TIMED_OUT
from ..core.errors import Escape, HookFailed, ModelError, OwnershipLost, RetinueError, ToolError
from ..core.events import (
    Handoff,
    MessagesSnapshot,
    RunStarted,
    StateSnapshot,
    StepFinished,
    StepStarted,
)
from ..core.messages import Message, Visibility
from ..core.output import OUTPUT_TRIES
from ..core.results import error_with_code
from ..core.rows import Ending, Private
from ..core.runs import RunResult, RunStatus
from ..core.state import UnknownKeyPolicy
from ..core.stores import ThreadRecord
from ..log.state import CALL_NEW, CallState, is_runnable, next_move, with_ids
from .budget import Reached, limit_reached, reached, time_left
from .calls import context_for, end_call, execute, failed, finalize, outcome_of, prepare, ready, stop_if_given_up
from .compaction import read_window
from .execution import Execution, close_calls, result_of
from .grants import widen_budget
from .hooked import run_hooked_call
from .phases import SIGNALS, carry_out, jobs_left, run_phase
from .turn import ask_model, continue_turn

_log = logging.getLogger(__name__)

SUSPENDED = Ending(RunStatus.SUSPENDED, "suspended")
BEGINNINGS = ("open_step", "ask_model", "run_calls")
"""The moves that begin work. A process that stops makes the others still, so that a run with its answer can end."""
MAX_HANDOFFS = 8
MAX_SAME_HANDOFFS = 2
LONG_ANSWER = 100_000
"""Characters of a structured answer after which other work has its turn."""


async def run_loop(x: Execution) -> Ending:
    """Work on a run from its present state until it ends or is suspended; return how."""
    run, log = x.state, x.log
    if x.was_interrupted:
        await continue_turn(x)
    # Each turn is one move. A step is open_step, ask_model, run_calls (if the model asked for any) and close_step.
    while True:
        stop_if_given_up(x)  # appends are ignored then, so the state would not advance
        ending = None
        if log.widen is not None and x.is_limited:
            await widen_budget(x)
        move = next_move(run)
        if log.is_leaving and move in BEGINNINGS:
            await log.hold(x.run_id)
        match move:
            case "ask_model":
                ending = await ask_model(x)
            case "run_calls":
                await _make_calls(x)
            case "close_step":
                ending = await _close_step(x)
            case "open_step":
                ending = await _open_step(x)
            case "run_jobs":  # those that an earlier process has left
                await carry_out(x, jobs_left(x))
            case "suspend" | "finish":
                return _decided_ending(x)
        if ending is not None:
            return ending


async def _open_step(x: Execution) -> Ending | None:
    """Open the next step, or the step whose calls waited; return an ending if a limit or max_steps forbids it."""
    run = x.state
    x.stop_if_cancelled()
    if run.open_calls:
        x.emit(StepStarted(step=run.step, model=x.model.name))
        return None
    if run.step == 0 and x.has_hooks:
        await run_phase(x, "run_start", x.own_messages())
    if run.step >= x.agent.max_steps:
        error = f"no answer after max_steps={x.agent.max_steps} steps: raise max_steps or give a smaller task"
        return Ending(RunStatus.FAILED, "max_steps", error)
    if x.is_limited and (ending := _check_budget(x)) is not None:
        return ending
    x.emit(StepStarted(step=run.step + 1, model=x.model.name))
    return None


def _check_budget(x: Execution) -> Ending | None:
    """Return an ending if no further step is affordable; tell the model if this step is the last one."""
    run = x.state
    limit = reached(x.log.tree, run, x.now())
    if limit is None:
        return None
    if limit.is_over:
        error = f"{limit.text}, too little is left for another step"
        return Ending(RunStatus.FAILED, f"limit:{limit.name}", error)
    if run.step and run.limit is None:
        said = f"[limit:{limit.name}] {limit.text}: no further calls are made, answer with what you have"
        message = Message.user(said, id=x.next_message_id(), visibility=Visibility.INTERNAL)
        x.emit_error(said, f"limit:{limit.name}", Private(message=message, limit=limit.name))
    return None


async def _make_calls(x: Execution) -> None:
    """Run the calls of the step that have work to do, unless they are refused. Calls that wait for a human stay open."""
    if _refuse_calls(x):
        return
    run, store = x.state, x.store
    if run.step_values is None or run.step_revision == store.revision:
        x.snapshot = store.snapshot()
    else:  # all calls of the step see the state as it was when the first one started
        x.snapshot = store.snapshot_of(run.step_values, run.step_revision, as_json=x.is_stored)
    todo, x.is_calling = list(run.calls.values()), True
    try:
        if len(todo) == 1:
            await _run_call(x, todo[0])
        else:
            await run_together([_run_call(x, call) for call in todo if is_runnable(run, call)])
    finally:
        x.is_calling = False


def _refuse_calls(x: Execution) -> bool:
    """Fail the calls of a step if a limit or a plugin forbids them and none has started; return whether it did."""
    run = x.state
    if not x.is_limited and run.stopping is None and run.limit is None:
        return False
    if run.step_values is not None and (run.limit is None or run.limit_step != run.step):
        return False  # they have started
    fields: dict[str, Any] = {}
    if run.stopping is not None:
        code, reason = f"limit:{run.stopping.name}", run.stopping.reason
    elif (limit := _limit_of_calls(x)) is not None:
        said = limit.text if x.spending is None or x.spending.refusal is None else x.spending.refusal.text
        code, reason, fields = limit.code, f"{said}: the call is not made", {"limit": limit.name}
    else:
        return False
    for call in run.open():
        made = call.call
        if call.status is CALL_NEW:
            x.emit(ready(x, made), Private(hooked=True, limit=code))
        end_call(x, call, outcome_of(made, error_with_code(reason, code)), fields)
    return True


def _limit_of_calls(x: Execution) -> Reached | None:
    """Return the limit that forbids the calls of this step because no turn is left to read their results."""
    run, now = x.state, x.now()
    if run.limit is not None:  # the model was told that this was its last turn
        return limit_reached(x.log.tree, run, run.limit, now)
    limit = reached(x.log.tree, run, now)
    return limit if limit is not None and limit.is_over else None


async def _run_call(x: Execution, call: CallState) -> None:
    """Run a call when there is a slot for it."""
    slots, made = x.slots, call.call
    if not slots.take_now() and not await x.wait_for_slot(call):
        return
    x.holding.add(made.id)
    try:
        if x.log.is_leaving:
            await x.log.hold(x.run_id, made.id)
        if x.has_hooks or call.status is not CALL_NEW:
            await run_hooked_call(x, call)
            return
        # The common case: no hooks and no decision.
        x.emit(ready(x, made))
        try:
            bound = await prepare(x, made)
        except ToolError as exc:
            outcome = failed(made, exc)
        else:
            outcome = await execute(x, bound, call, made)
            stop_if_given_up(x)
        if work := finalize(x, call, outcome):
            await carry_out(x, work)
    finally:
        x.give_slot_back(made.id)


async def _close_step(x: Execution) -> Ending | None:
    """End a step whose calls have ended; return the ending of the run, or None if another step follows."""
    run = x.state
    if run.blocked is not None:
        close_calls(x.log, run)  # the suspended calls need no answer any more
    if run.limit_over:
        limit = limit_reached(x.log.tree, run, run.limit or "", x.now())
        return Ending(RunStatus.FAILED, limit.code, f"{limit.text}, and the model asked for more calls")
    if x.has_hooks:
        await run_phase(x, "step_end", x.own_messages())
    if run.blocked is not None:
        return Ending(RunStatus.FAILED, "blocked", run.blocked)
    if (stop := run.stopping) is not None:
        return Ending(RunStatus.COMPLETED if stop.completed else RunStatus.FAILED, f"limit:{stop.name}", stop.reason)
    if run.next_agent is not None:
        _hand_over(x, run.next_agent.to)
    is_last = not (run.asked_calls or run.is_settled or run.queued)  # a message that was added has an answer, too
    if is_last and (ending := _take_answer(x)) is not None:
        x.is_ending = True
        if x.agent.output_format is not None and len(_answer(x)) > LONG_ANSWER:
            await asyncio.sleep(0)  # it was decoded just now, and is encoded next
        return ending
    x.emit(StepFinished(step=run.step))
    return None


def _hand_over(x: Execution, target: str) -> None:
    """Let another agent continue the run; if that is refused, give the present agent the reason."""
    assert x.state.next_agent is not None
    try:
        problem = _handoff_problem(x, target)
        equipment = None if problem else x.equip(x, target)
    except RetinueError as exc:
        problem, equipment = str(exc), None
    if equipment is None:
        text = f"The handoff to {target} was refused: {problem}. Go on yourself."
        message = Message.user(text, id=x.next_message_id(), visibility=Visibility.INTERNAL)
        private = Private(message=message, refused_handoff=True)
        x.emit_error(f"handoff to {target!r} refused: {problem}", "handoff_refused", private)
        return
    x.emit(Handoff(to_agent=target, reason=x.state.next_agent.reason))
    x.use(equipment)


def _handoff_problem(x: Execution, target: str) -> str | None:
    """Return the reason if one more handoff would be a loop of handoffs, else None."""
    handoffs, present = x.state.handoffs, x.agent.name
    if target == present:
        return "you are that agent"
    if len(handoffs) >= MAX_HANDOFFS:
        return f"there were {MAX_HANDOFFS} handoffs in this run already"
    pairs = list(zip((x.state.first_agent, *handoffs), handoffs, strict=False))
    if pairs.count((present, target)) >= MAX_SAME_HANDOFFS:
        return f"you handed over to {target} {MAX_SAME_HANDOFFS} times in this run already"
    return None


def _take_answer(x: Execution) -> Ending | None:
    """Return the ending of a run whose model has answered; None if the answer is invalid and the model may retry."""
    run, form = x.state, x.agent.output_format
    if form is not None:
        try:
            x.output = form.read(_answer(x))
        except ValueError as exc:
            limit = reached(x.log.tree, run, x.now()) if x.is_limited else None
            if limit is not None and limit.is_over:
                reason = f"{limit.text}, and the answer does not fit the output type: {exc}"
                return Ending(RunStatus.FAILED, f"limit:{limit.name}", reason)
            if run.output_tries >= OUTPUT_TRIES:
                return Ending(RunStatus.FAILED, "error", f"the answer does not fit the output type: {exc}")
            feedback = f"Your answer does not fit the required JSON: {exc}\nAnswer again, with JSON only."
            message = Message.user(feedback, id=x.next_message_id(), visibility=Visibility.INTERNAL)
            private = Private(message=message, output_tried=True)
            x.emit_error(f"the answer does not fit the output type: {exc}", "output_invalid", private)
            return None
    return Ending(RunStatus.COMPLETED, "natural")


def _answer(x: Execution) -> str:
    """Return the text of the last answer, which may be empty."""
    for message in reversed(x.state.messages):
        if message.role == "assistant":
            return message.text
    return ""


def _decided_ending(x: Execution) -> Ending:
    """Return the ending that the state already has; if it has none, the run is suspended."""
    ending, form = x.state.ending, x.agent.output_format
    if ending is None:
        below = x.log.tree.children_of(x.state)
        refused = [child.refused for child in below if child.waits and child.since >= x.state.since]
        error = next((reason for reason in refused if reason is not None), None)
        return SUSPENDED if error is None else replace(SUSPENDED, error=error)
    if ending.termination == "natural" and form is not None:  # a run that a plugin has stopped has no output
        x.output = form.read(_answer(x))
    return ending


def begin_run(x: Execution, thread: ThreadRecord | None) -> None:
    """Append the first rows of a new run: its input, the conversation of its thread if there is one, its initial state."""
    identity, store = x.identity, x.store
    history, foreign, window = (), {}, None
    if thread is not None:
        store.apply_seed(thread.state, UnknownKeyPolicy.SKIP)
        store.apply_seed(x.request.seed)
        history = thread.messages
        foreign = {name: value for name, value in thread.state.extensions.items() if store.key(name) is None}
        if x.hooks.policy is not None:
            window = read_window(foreign, len(history))
    values = store.values(as_json=x.is_stored)
    x.emit(
        RunStarted(
            thread_id=identity.thread_id,
            parent_tool_call_id=identity.parent_tool_call_id,
            messages=with_ids(x.request.messages, identity.run_id),
            continues=bool(history),
        ),
        Private(identity=identity, request=x.state.request, values=values, foreign=foreign, window=window),
    )
    if history:
        x.emit(MessagesSnapshot(messages=history))
    if values and (state := store.export_persisted()).extensions:
        x.emit(StateSnapshot(revision=state.revision, state=state.extensions))


async def continue_tasks(x: Execution) -> None:
    """Continue the background tasks that a run had when its process died."""
    for agent in dict.fromkeys(x.agents):
        await agent.resume_tasks(x.identity, partial(context_for, x))


def result_again(x: Execution) -> RunResult:
    """Return the result of an ended or suspended run, from its state."""
    state, form = x.state, x.agent.output_format
    output = state.output if form is None or state.output is None else form.decode(state.output)
    ending = SUSPENDED if state.status is RunStatus.SUSPENDED else state.ending or Ending(state.status, "error")
    return result_of(x.log, state, ending, state.response(), x.store, output)


async def execute_run(
    x: Execution, at_time_limit: Callable[[], object] | None = None, *, resumed: bool = False
) -> RunResult:
    """Run the loop and return a result, also if it fails; only an Escape comes out as an exception.

    `at_time_limit` is called when a limit on time is reached; it must stop the work in progress. With `resumed`, continue
    the background tasks that the run had in an earlier process first.
    """
    if resumed:
        try:
            await continue_tasks(x)
            x.stop_if_cancelled()
        except asyncio.CancelledError:
            return _stop_cancelled(x)
    left = time_left(x.log.tree, x.state, x.now()) if at_time_limit is not None and x.is_limited else None
    if left is None or at_time_limit is None:
        return await _execute(x)
    timer = asyncio.get_running_loop().call_later(left, at_time_limit)
    try:
        return await _execute(x)
    finally:
        timer.cancel()


async def _execute(x: Execution) -> RunResult:
    try:
        was_decided = x.state.ending is not None
        ending = await run_loop(x)
        x.is_ending = ending.status is not RunStatus.SUSPENDED
        if x.has_hooks and ending.status is not RunStatus.SUSPENDED and not was_decided:
            await run_phase(x, "run_end", x.own_messages())
        return x.finish(ending)
    except asyncio.CancelledError:
        return _stop_cancelled(x)
    except Escape as exc:
        close_calls(x.log, x.state)
        if not x.is_over:
            x.finish(Ending(RunStatus.FAILED, "error", str(exc)))
        raise
    except (OwnershipLost, *SIGNALS):
        raise
    except BaseException as exc:  # also the exceptions of test frameworks
        if x.is_over or is_closing(exc):
            raise
        return await _fail(x, exc)
    finally:
        if x.spending is not None:
            x.spending.release()


def _stop_cancelled(x: Execution) -> RunResult:
    """End a run whose work has just raised CancelledError; raise it on if the run cannot be ended here."""
    if x.is_over or x.log.lost:  # its end is in the log already, or another process owns the log
        raise
    x.cancellation.set("cancelled")
    return stop_run(x)


def stop_run(x: Execution) -> RunResult:
    """End a run that was cancelled or timed out."""
    close_calls(x.log, x.state)
    return x.finish(stopped(x))


def stopped(x: Execution) -> Ending:
    """Return the ending of a run that was cancelled or timed out."""
    if x.cancellation.reason == TIMED_OUT:
        return Ending(RunStatus.TIMEOUT, "timeout", "the run took longer than it may")
    if x.cancellation.reason == OUT_OF_TIME:
        return Ending(RunStatus.FAILED, OUT_OF_TIME, limit_reached(x.log.tree, x.state, "seconds", x.now()).text)
    return Ending(RunStatus.CANCELLED, "cancelled", x.cancellation.reason)


async def _fail(x: Execution, exc: BaseException) -> RunResult:
    """End a run as FAILED after an exception that no call or child accounts for; return its result."""
    # The message says how a model failed; a traceback of our own code would not help.
    trace = None if isinstance(exc, ModelError) else exc
    _log.error("run %s of agent %r failed: %s", x.run_id, x.agent.name, exc, exc_info=trace)
    close_calls(x.log, x.state)
    if not isinstance(exc, HookFailed) and x.has_hooks:
        try:
            await run_phase(x, "run_end", x.own_messages())
        except Exception:
            _log.exception("a hook failed at the end of run %s", x.run_id)
    code = exc.code if isinstance(exc, ModelError) else None
    return x.finish(Ending(RunStatus.FAILED, "error", f"{type(exc).__name__}: {exc}", code))
