"""The agent loop: ask the model, run the calls it asked for, commit, repeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from ..core.context import TIMED_OUT
from ..core.decisions import Decision
from ..core.errors import Escape, HookFailed, ModelError, OwnershipLost
from ..core.events import MessagesSnapshot, RunStarted, StateSnapshot
from ..core.lifecycle import RunStatus
from ..core.messages import Message, Visibility
from ..core.output import OUTPUT_TRIES
from ..core.runs import RunResult
from .calls import refuse_calls, resume_calls, run_calls
from .handoff import hand_over
from .phases import run_phase
from .scope import Ending, RunScope
from .turn import ask_model

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def run_loop(run: RunScope) -> Ending:
    """One agent run, from its input to its end."""
    if run.has_hooks and run.step == 0:
        await run_phase(run, "run_start", run.own_messages())
    # Each turn of this loop is one step: a model call and the tool calls it asked for.
    while run.step < run.agent.max_steps:
        run.stop_if_cancelled()
        if run.budget.limited and (ending := _check_budget(run)) is not None:
            return ending
        run.open_step(run.step + 1)
        if run.has_hooks:
            await run_phase(run, "step_start", run.own_messages())

        answer = await ask_model(run)
        if not answer.tool_calls:
            agent, ending = run.agent, await _end_step(run) if run.needs_attention() else None
            if ending is None and run.agent is agent:
                ending = take_answer(run, answer)
            if ending is not None:
                return ending
            run.close_step()
            continue

        if run.stopping is not None:
            refuse_calls(run, answer.tool_calls, f"limit:{run.stopping.name}", run.stopping.reason)
        elif limit := _limit_reached(run, "calls"):
            # The model gets one more turn to answer with what it has; asking again ends the run.
            refuse_calls(run, answer.tool_calls, f"limit:{limit}", _last_turn(limit))
            if run.refused_limit is not None:
                return Ending(RunStatus.FAILED, f"limit:{limit}", f"the limit on {limit} was reached")
            run.refused_limit = limit
        else:
            await run_calls(run, answer.tool_calls)
        if run.needs_attention() and (ending := await _end_step(run)) is not None:
            return ending
        run.close_step()
    error = f"no answer after max_steps={run.agent.max_steps} steps: raise max_steps or give a smaller task"
    return Ending(RunStatus.FAILED, "max_steps", error)


def _check_budget(run: RunScope) -> Ending | None:
    """Before a model call: a budget that is spent allows none at the start of a run, and later the one last answer."""
    limit = None if run.refused_limit is not None else _limit_reached(run, "step")
    if limit is None:
        return None
    if run.step == 0:
        return Ending(RunStatus.FAILED, f"limit:{limit}", f"the limit on {limit} leaves nothing to begin with")
    # The calls of the last step have spent it: children, or the time they took.
    run.refused_limit, said = limit, f"[limit:{limit}] {_last_turn(limit)}"
    run.conversation.append(Message.user(said, id=run.next_message_id(), visibility=Visibility.INTERNAL))
    run.tell(said, f"limit:{limit}")
    return None


def _limit_reached(run: RunScope, where: str) -> str | None:
    """The limit that is reached, or that was when a process before came here: by now more time has gone."""
    journal, budget = run.journal, run.budget
    if not (journal.keeps and budget.limited):
        return budget.exhausted(journal)
    key = f"limit:{where}:{run.step}"
    noted = journal.recall(key)
    if noted is None:
        noted = (budget.exhausted(journal) or "").encode()
        journal.note(key, noted, with_next=True)
    return noted.decode() or None


def _last_turn(limit: str) -> str:
    return f"the limit on {limit} is reached: no further calls are made, answer with what you have"


async def resume_loop(run: RunScope, decisions: Mapping[str, Decision]) -> Ending:
    """Go on where calls waited: with those that were decided on, and then with the loop."""
    run.open_step(run.step)
    await resume_calls(run, decisions)
    if (ending := await _end_step(run)) is not None:
        return ending
    run.close_step()
    return await run_loop(run)


async def _end_step(run: RunScope) -> Ending | None:
    """What follows the calls of a step: the end of the run, or None for the next step."""
    if run.blocked is not None and run.group is not None:
        run.group.close()  # nobody need answer any more
    if run.open_calls:
        return Ending(RunStatus.SUSPENDED, "suspended")
    if run.has_hooks:
        await run_phase(run, "step_end", run.own_messages())
    if run.blocked is not None:
        return Ending(RunStatus.FAILED, "blocked", run.blocked)
    if (stop := run.stopping) is not None:
        return Ending(RunStatus.COMPLETED if stop.completed else RunStatus.FAILED, f"limit:{stop.name}", stop.reason)
    if run.next_agent is not None:
        hand_over(run)
    return None


def take_answer(run: RunScope, answer: Message) -> Ending | None:
    """The end of a run whose model has answered; None where the answer does not fit and it may try again."""
    output_format = run.agent.output_format
    if output_format is not None:
        try:
            run.output = output_format.read(answer.text)
        except ValueError as exc:
            if limit := _limit_reached(run, "answer"):
                reason = f"the limit on {limit} was reached, and the answer does not fit the output type: {exc}"
                return Ending(RunStatus.FAILED, f"limit:{limit}", reason)
            run.output_tries += 1
            if run.output_tries > OUTPUT_TRIES:
                return Ending(RunStatus.FAILED, "error", f"the answer does not fit the output type: {exc}")
            feedback = f"Your answer does not fit the required JSON: {exc}\nAnswer again, with JSON only."
            run.conversation.append(Message.user(feedback, id=run.next_message_id(), visibility=Visibility.INTERNAL))
            run.tell(f"the answer does not fit the output type: {exc}", "output_invalid")
            return None
    return Ending(RunStatus.COMPLETED, "natural")


def execute_run(run: RunScope, messages: tuple[Message, ...]) -> Coroutine[Any, Any, RunResult]:
    """Run the loop and make a result of whatever happens; only an Escape comes out as an exception."""
    return _to_the_end(run, _begin, messages)


def _begin(run: RunScope, messages: tuple[Message, ...]) -> Awaitable[Ending]:
    own: list[Message] = []
    for message in messages:
        own.append(message if message.id else replace(message, id=run.next_message_id()))
    run.conversation.extend(own)
    given = tuple(own)
    _tell_start(run, given, run.history)
    state = run.state.export_persisted()
    if state.extensions:
        run.emit(StateSnapshot(revision=state.revision, state=state.extensions))
    return run_loop(run)


def resume_run(run: RunScope, decisions: Mapping[str, Decision]) -> Coroutine[Any, Any, RunResult]:
    """As `execute_run`, for a run that was suspended."""
    return _to_the_end(run, _begin_again, decisions)


def _begin_again(run: RunScope, decisions: Mapping[str, Decision]) -> Awaitable[Ending]:
    run.reopen()
    said = [*run.conversation, *([] if run.group is None else run.group.results())]
    _tell_start(run, (), tuple(said))
    return resume_loop(run, decisions)


def abandon_run(run: RunScope) -> RunResult:
    """End a run that waits, or whose tools or model do not stop; what they still do is not listened to."""
    if run.sealed:
        run.reopen()
        _tell_start(run, (), tuple(run.conversation))
    elif not run.started:
        _tell_start(run, (), run.history)
    if run.group is not None:
        run.group.close()
    return _finish(run, _stopped(run))


def _finish(run: RunScope, ending: Ending) -> RunResult:
    run.result = result = run.finish(ending)
    return result


async def _to_the_end(run: RunScope, begin: Callable[[RunScope, T], Awaitable[Ending]], given: T) -> RunResult:
    try:
        ending = await begin(run, given)
        if run.has_hooks and ending.status is not RunStatus.SUSPENDED:
            await run_phase(run, "run_end", run.own_messages())
        return _finish(run, ending)
    except asyncio.CancelledError:
        if run.sealed:  # given up on: its end has been told
            raise
        run.cancellation.set("cancelled")
        return _finish(run, _stopped(run))
    except Escape as exc:
        run.finish(Ending(RunStatus.FAILED, "error", str(exc)))
        raise
    except OwnershipLost as exc:  # it goes on elsewhere: nothing that happens here is part of it any more
        _log.warning("run %s of agent %r stops here: %s", run.run_id, run.agent.name, exc)
        return _finish(run, Ending(RunStatus.FAILED, "error", str(exc)))
    except Exception as exc:
        # How a model failed is in the words; where in our code it was noticed helps nobody.
        trace = None if isinstance(exc, ModelError) else exc
        _log.error("run %s of agent %r failed: %s", run.run_id, run.agent.name, exc, exc_info=trace)
        if not isinstance(exc, HookFailed):
            await _run_end_anyway(run)
        code = exc.code if isinstance(exc, ModelError) else None
        return _finish(run, Ending(RunStatus.FAILED, "error", f"{type(exc).__name__}: {exc}", code))


def _stopped(run: RunScope) -> Ending:
    """How a run ends that was told to stop."""
    if run.cancellation.reason == TIMED_OUT:
        return Ending(RunStatus.TIMEOUT, "timeout", "the run took longer than it may")
    return Ending(RunStatus.CANCELLED, "cancelled", run.cancellation.reason)


async def _run_end_anyway(run: RunScope) -> None:
    """The last hooks of a run that has failed already; what they do wrong is only logged."""
    try:
        if run.has_hooks:
            await run_phase(run, "run_end", run.own_messages())
    except Exception:
        _log.exception("a hook failed at the end of run %s", run.run_id)


def _tell_start(run: RunScope, messages: tuple[Message, ...], before: tuple[Message, ...]) -> None:
    run.started = True
    run.emit(
        RunStarted(
            thread_id=run.identity.thread_id,
            parent_tool_call_id=run.identity.parent_tool_call_id,
            messages=messages,
            continues=bool(before),
        )
    )
    if before:
        run.emit(MessagesSnapshot(messages=before))
