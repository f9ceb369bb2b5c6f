"""A placed call: a tool call that is a run of its own on another worker, and the form in which its outcome comes back.

The worker makes the call with the retries and the timeout of its tool. The run that asked for the call runs its hooks and
commits its state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..core.agents import Agent
from ..core.content import to_json_value
from ..core.context import ToolContext
from ..core.errors import ExecutionFailed, InternalError, RecordUnreadable, RetinueError, ToolError
from ..core.events import StepStarted
from ..core.messages import Part, ToolCall
from ..core.results import ToolCallStatus, ToolResult
from ..core.rows import Ending, PlacedCall
from ..core.runs import RunResult, RunStatus
from ..core.state import Snapshot, StateCommand
from ..log.state import CallState
from .calls import CallOutcome, execute, failed, interrupted, prepare, stop_if_given_up
from .execution import Execution
from .phases import LOOP_ACTIONS, decode_job, encode_job, name_of
from .run import stop_run

_COMPLETED = Ending(RunStatus.COMPLETED, "natural")


class StoredOutcome(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The outcome of a call as JSON."""

    status: ToolCallStatus
    result: ToolResult
    parts: tuple[Part, ...] = ()
    updates: Sequence[tuple[str, Any]] = ()
    """The updates of state keys, by name."""
    base_revision: int | None = None
    actions: Sequence[tuple[str, Any]] = ()
    """Actions and effects, by the names of their types."""
    effects: Sequence[tuple[str, Any]] = ()
    events: Sequence[Any] = ()


def encode_outcome(outcome: CallOutcome) -> Any:
    """Return an outcome as JSON. Raise RetinueError if a state update, action or effect has no JSON form."""
    command = outcome.command or StateCommand()
    stored = StoredOutcome(
        status=outcome.status,
        result=outcome.result,
        parts=outcome.parts,
        updates=[(key.name, key.encode_update(update)) for key, update in command.patch.updates],
        base_revision=command.patch.base_revision,
        actions=[(name_of(one.__class__), encode_job(one, "action")) for one in command.actions],
        effects=[(name_of(one.__class__), encode_job(one, "effect")) for one in command.effects],
        events=command.events,
    )
    return to_json_value(stored)


def decode_outcome(x: Execution, data: Any) -> CallOutcome:
    """Return an outcome that another worker has stored, with the keys, actions and effects of this run."""
    try:
        stored = msgspec.convert(data, StoredOutcome)
    except msgspec.ValidationError as exc:
        raise RecordUnreadable("the outcome of a call", str(exc)) from exc
    command, hooks = StateCommand(events=list(stored.events)), x.hooks
    command.patch.base_revision = stored.base_revision
    for name, update in stored.updates:
        if (key := x.store.key(name)) is None:
            raise RecordUnreadable(f"state key {name!r}", "no plugin of this agent registers that key")
        command.patch.updates.append((key, key.decode_update(update)))
    known = (*LOOP_ACTIONS, *hooks.actions)
    command.actions = [decode_job(name, given, "action", known) for name, given in stored.actions]
    command.effects = [decode_job(name, given, "effect", hooks.effects) for name, given in stored.effects]
    return CallOutcome(stored.status, stored.result, command or None, stored.parts)


class NoChildren:
    """The resolver of a placed call: it refuses children, because the run that asked is elsewhere."""

    def __getattr__(self, name: str) -> Any:
        raise ExecutionFailed(
            "a tool with a queue works apart from its run, and cannot start children or tasks: "
            "start them from a tool without a queue"
        )

    def place_call(self, *_: Any) -> None:
        """Return None: the call is made here."""


async def execute_call(x: Execution, placed: PlacedCall, owner: Agent) -> RunResult:
    """Make the one call of a placed run, unless it was interrupted; return a run result that holds its outcome."""
    try:
        outcome = await _outcome(x, placed, owner)
        stop_if_given_up(x)
        try:
            x.output = encode_outcome(outcome)
        except RetinueError as exc:
            x.output = encode_outcome(failed(placed.call, InternalError(str(exc))))
        return x.finish(_COMPLETED)
    except asyncio.CancelledError:
        if x.is_over or x.log.lost:
            raise
        x.cancellation.set("cancelled")
        return stop_run(x)


async def _outcome(x: Execution, placed: PlacedCall, owner: Agent) -> CallOutcome:
    call, was_begun = placed.call, x.state.step_open
    x.stop_if_cancelled()
    if x.log.is_leaving:
        await x.log.hold(x.run_id)
    try:
        bound = await prepare(x, call)
    except ToolError as exc:
        return failed(call, exc)
    if was_begun and not bound.options.idempotent:
        return interrupted(call)
    if not was_begun:
        x.emit(StepStarted(step=1))
    known = {name: value for name, value in placed.values.items() if x.store.key(name) is not None}
    x.snapshot = x.store.snapshot_of(known, placed.revision, as_json=True)

    def make_context(_: Execution, made: ToolCall, snapshot: Snapshot | None, resume_input: Any) -> ToolContext:
        return ToolContext(
            made.id,
            made.name,
            placed.run,
            owner,
            x.store.snapshot() if snapshot is None else snapshot,
            x.report,
            x.cancellation,
            NoChildren(),
            resume_input,
            placed.deadline,
            x.request.context,
        )

    return await execute(x, bound, CallState(call, ""), call, placed.resume_input, make_context=make_context)
