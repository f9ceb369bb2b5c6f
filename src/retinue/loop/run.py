"""The agent loop: ask the model, run the calls it asked for, commit, repeat.

Where it stands is a function of the run's state (`next_move`), so a new run, one that was answered and one whose
process ended all come in by the same door.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from msgspec.structs import replace

from ..core.context import TIMED_OUT
from ..core.errors import Escape, HookFailed, ModelError, OwnershipLost
from ..core.events import MessagesSnapshot, RunStarted, StateSnapshot
from ..core.lifecycle import RunStatus
from ..core.messages import Message, Visibility
from ..core.output import OUTPUT_TRIES
from ..core.rows import Ending, Private
from ..core.runs import RunResult
from .calls import close_calls, refuse_calls, run_calls
from .execution import Execution
from .handoff import hand_over
from .limits import exhausted
from .phases import carry_out, jobs_left, run_phase
from .state import Move, message_id, next_move
from .turn import ask_model, continue_turn, drop_drafts

_log = logging.getLogger(__name__)

SUSPENDED = Ending(RunStatus.SUSPENDED, "suspended")


async def run_loop(x: Execution) -> Ending:
    """One run, from where it stands to its end or to where it waits."""
    run = x.state
    if x.was_interrupted:
        await continue_turn(x)
    # Each turn is one move; a step is OPEN_STEP, ASK, RUN_CALLS (if the model asked for any), CLOSE_STEP.
    while True:
        move = next_move(run)
        if move is Move.ASK:
            await ask_model(x)
        elif move is Move.RUN_CALLS:
            if not _refuse_calls(x):
                await run_calls(x)
        elif move is Move.CLOSE_STEP:
            if (ending := await _close_step(x)) is not None:
                return ending
        elif move is Move.OPEN_STEP:
            if (ending := await _open_step(x)) is not None:
                return ending
        elif move is Move.SUSPEND:
            return SUSPENDED
        elif move is Move.RUN_JOBS:  # those that a process before has left
            await carry_out(x, jobs_left(x))
        else:
            return _decided_ending(x)


async def _open_step(x: Execution) -> Ending | None:
    """Begin the next step, or continue the one whose calls waited; the end of the run where it may not."""
    run = x.state
    x.stop_if_cancelled()
    if run.open_calls:
        x.open_step(run.step)
        return None
    if run.step == 0 and x.has_hooks:
        await run_phase(x, "run_start", x.own_messages())
    if run.step >= x.agent.max_steps:
        error = f"no answer after max_steps={x.agent.max_steps} steps: raise max_steps or give a smaller task"
        return Ending(RunStatus.FAILED, "max_steps", error)
    if x.is_limited and (ending := _check_budget(x)) is not None:
        return ending
    x.open_step(run.step + 1)
    return None


def _check_budget(x: Execution) -> Ending | None:
    """A budget that is spent allows no model call at the start of a run, and later one last answer."""
    run = x.state
    limit = exhausted(x.log.tree, run, x.now()) if run.limit is None else None
    if limit is None:
        return None
    if run.step == 0:
        return Ending(RunStatus.FAILED, f"limit:{limit}", f"the limit on {limit} leaves nothing to begin with")
    # The calls of the last step have spent it: children, or the time they took.
    said = f"[limit:{limit}] {_last_turn(limit)}"
    message = Message.user(said, id=x.next_message_id(), visibility=Visibility.INTERNAL)
    x.tell(said, f"limit:{limit}", Private(message=message, limit=limit))
    return None


def _refuse_calls(x: Execution) -> bool:
    """Refuse the calls of a step where a limit or a plugin stands in their way, before any of them began."""
    run = x.state
    if run.step_values is not None and (run.limit is None or run.limit_step != run.step):
        return False  # they have begun
    if run.stopping is not None:
        refuse_calls(x, f"limit:{run.stopping.name}", run.stopping.reason)
        return True
    limit = exhausted(x.log.tree, run, x.now()) if x.is_limited else None
    if limit is None:
        return False
    # The model gets one more turn to answer with what it has; asking again ends the run.
    refuse_calls(x, f"limit:{limit}", _last_turn(limit), limit)
    return True


def _last_turn(limit: str) -> str:
    return f"the limit on {limit} is reached: no further calls are made, answer with what you have"


async def _close_step(x: Execution) -> Ending | None:
    """End a step whose answer is there and whose calls have ended; the end of the run, or None for the next step."""
    run = x.state
    if run.blocked is not None:
        close_calls(x)  # nobody need answer any more
    if run.limit_over:
        return Ending(RunStatus.FAILED, f"limit:{run.limit}", f"the limit on {run.limit} was reached")
    if x.has_hooks:
        await run_phase(x, "step_end", x.own_messages())
    if run.blocked is not None:
        return Ending(RunStatus.FAILED, "blocked", run.blocked)
    if (stop := run.stopping) is not None:
        return Ending(RunStatus.COMPLETED if stop.completed else RunStatus.FAILED, f"limit:{stop.name}", stop.reason)
    if run.next_agent is not None:
        hand_over(x)
    if not run.asked_calls and not run.judged and (ending := _take_answer(x)) is not None:
        return ending
    x.close_step()
    return None


def _take_answer(x: Execution) -> Ending | None:
    """The end of a run whose model has answered; None where the answer does not fit and it may try again."""
    run, form = x.state, x.agent.output_format
    if form is not None:
        try:
            x.output = form.read(_answer(x))
        except ValueError as exc:
            limit = exhausted(x.log.tree, run, x.now()) if x.is_limited else None
            if limit is not None:
                reason = f"the limit on {limit} was reached, and the answer does not fit the output type: {exc}"
                return Ending(RunStatus.FAILED, f"limit:{limit}", reason)
            if run.output_tries >= OUTPUT_TRIES:
                return Ending(RunStatus.FAILED, "error", f"the answer does not fit the output type: {exc}")
            feedback = f"Your answer does not fit the required JSON: {exc}\nAnswer again, with JSON only."
            message = Message.user(feedback, id=x.next_message_id(), visibility=Visibility.INTERNAL)
            private = Private(message=message, output_tried=True)
            x.tell(f"the answer does not fit the output type: {exc}", "output_invalid", private)
            return None
    return Ending(RunStatus.COMPLETED, "natural")


def _answer(x: Execution) -> str:
    """The text of the last answer, which may be empty."""
    for message in reversed(x.state.messages):
        if message.role == "assistant":
            return message.text
    return ""


def _decided_ending(x: Execution) -> Ending:
    """The ending that was decided on before the process ended."""
    ending, form = x.state.ending, x.agent.output_format
    assert ending is not None
    if ending.termination == "natural" and form is not None:  # a run that a plugin has stopped has no output
        x.output = form.read(_answer(x))
    return ending


def begin_run(
    x: Execution,
    messages: tuple[Message, ...],
    history: tuple[Message, ...] = (),
    foreign: dict[str, Any] | None = None,
) -> None:
    """The first events of a new run: its input, what was said before, and the state it begins with."""
    identity, own = x.identity, list(messages)
    for place, message in enumerate(own):
        if not message.id:
            own[place] = replace(message, id=message_id(x.state, place + 1))
    values = x.store.values(as_json=x.is_stored)
    x.emit(
        RunStarted(
            thread_id=identity.thread_id,
            parent_tool_call_id=identity.parent_tool_call_id,
            messages=tuple(own),
            continues=bool(history),
        ),
        Private(identity=identity, request=x.state.request, values=values, foreign=foreign or {}),
    )
    if history:
        x.emit(MessagesSnapshot(messages=history))
    state = x.store.export_persisted()
    if state.extensions:
        x.emit(StateSnapshot(revision=state.revision, state=state.extensions))


async def execute_run(x: Execution) -> RunResult:
    """Run the loop and make a result of whatever happens; only an Escape comes out as an exception."""
    try:
        was_decided = x.state.ending is not None
        ending = await run_loop(x)
        if x.has_hooks and ending.status is not RunStatus.SUSPENDED and not was_decided:
            await run_phase(x, "run_end", x.own_messages())
        return x.finish(ending)
    except asyncio.CancelledError:
        if x.is_over or x.log.lost:  # given up on: its end has been told, or is for others to tell
            raise
        x.cancellation.set("cancelled")
        return stop_run(x)
    except Escape as exc:
        _give_up(x)
        if not x.is_over:
            x.finish(Ending(RunStatus.FAILED, "error", str(exc)))
        raise
    except OwnershipLost:
        raise
    except Exception as exc:
        if x.is_over:
            raise
        return await _fail(x, exc)


def stop_run(x: Execution) -> RunResult:
    """End a run that was cancelled or timed out."""
    _give_up(x)
    return x.finish(stopped(x))


def stopped(x: Execution) -> Ending:
    """The ending of a run that was cancelled or timed out."""
    if x.cancellation.reason == TIMED_OUT:
        return Ending(RunStatus.TIMEOUT, "timeout", "the run took longer than it may")
    return Ending(RunStatus.CANCELLED, "cancelled", x.cancellation.reason)


def _give_up(x: Execution) -> None:
    drop_drafts(x)
    close_calls(x)


async def _fail(x: Execution, exc: Exception) -> RunResult:
    """End a run in which something went wrong that is nobody's result."""
    # How a model failed is in the words; where in our code it was noticed helps nobody.
    trace = None if isinstance(exc, ModelError) else exc
    _log.error("run %s of agent %r failed: %s", x.run_id, x.agent.name, exc, exc_info=trace)
    _give_up(x)
    if not isinstance(exc, HookFailed) and x.has_hooks:
        try:
            await run_phase(x, "run_end", x.own_messages())
        except Exception:
            _log.exception("a hook failed at the end of run %s", x.run_id)
    code = exc.code if isinstance(exc, ModelError) else None
    return x.finish(Ending(RunStatus.FAILED, "error", f"{type(exc).__name__}: {exc}", code))
