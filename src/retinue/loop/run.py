"""The agent loop: ask the model, run the calls it asked for, commit, repeat."""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from ..core.errors import Escape
from ..core.events import MessagesSnapshot, RunStarted, StateSnapshot, StepStarted
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.messages import Message
from ..core.runs import RunResult
from .calls import close_calls, refuse_calls, run_calls
from .scope import RunScope
from .turn import ask_model

_log = logging.getLogger(__name__)


async def run_loop(run: RunScope) -> RunResult:
    """One agent run, from its input to its result."""
    # Each turn of this loop is one step: a model call and the tool calls it asked for.
    while run.step < run.agent.max_steps:
        run.stop_if_cancelled()
        if run.step == 0 and (limit := run.budget.exhausted(run.journal)):
            return run.finish(RunStatus.FAILED, f"limit:{limit}", f"the limit on {limit} leaves nothing to begin with")
        run.step += 1
        run.step_is_open = True
        run.emit(StepStarted(step=run.step))

        answer = await ask_model(run)
        if not answer.tool_calls:
            return run.finish(RunStatus.COMPLETED, "natural")

        if limit := run.budget.exhausted(run.journal):
            # The model gets one more turn to answer with what it has; asking again ends the run.
            refuse_calls(run, answer.tool_calls, limit)
            if run.refused_limit is not None:
                return run.finish(RunStatus.FAILED, f"limit:{limit}", f"the limit on {limit} was reached")
            run.refused_limit = limit
        else:
            outcomes = await run_calls(run, answer.tool_calls)
            if any(outcome.status is ToolCallStatus.SUSPENDED for outcome in outcomes):
                return run.finish(RunStatus.SUSPENDED, "suspended")
        run.close_step()
    error = f"no answer after max_steps={run.agent.max_steps} steps: raise max_steps or give a smaller task"
    return run.finish(RunStatus.FAILED, "max_steps", error)


async def execute_run(run: RunScope, messages: tuple[Message, ...]) -> RunResult:
    """Run the loop and make a result of whatever happens; only an Escape comes out as an exception."""
    _begin(run, messages)
    try:
        return await run_loop(run)
    except asyncio.CancelledError:
        if run.sealed:  # given up on: its end has been told
            raise
        return run.finish(RunStatus.CANCELLED, "cancelled", run.cancellation.reason)
    except Escape as exc:
        run.finish(RunStatus.FAILED, "error", str(exc))
        raise
    except Exception as exc:
        _log.error("run %s of agent %r failed", run.run_id, run.agent.name, exc_info=exc)
        return run.finish(RunStatus.FAILED, "error", f"{type(exc).__name__}: {exc}")


def abandon_run(run: RunScope) -> RunResult:
    """End a cancelled run whose tools or model do not stop; what they still do is not listened to."""
    close_calls(run)
    return run.finish(RunStatus.CANCELLED, "cancelled", run.cancellation.reason)


def _begin(run: RunScope, messages: tuple[Message, ...]) -> None:
    given = tuple([message if message.id else replace(message, id=run.next_message_id()) for message in messages])
    run.conversation.extend(given)
    run.emit(
        RunStarted(
            thread_id=run.identity.thread_id,
            parent_tool_call_id=run.identity.parent_tool_call_id,
            messages=given,
        )
    )
    if run.history:
        run.emit(MessagesSnapshot(messages=run.history))
    state = run.state.export_persisted()
    if state.extensions:
        run.emit(StateSnapshot(revision=state.revision, state=state.extensions))
