"""Execution of one call: attempts, time limits, and whatever a tool may raise."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ..core.agents import BoundTool
from ..core.codec import isolate
from ..core.context import CancellationToken, ToolContext
from ..core.errors import (
    Denied,
    Escape,
    InternalError,
    InvalidArguments,
    OwnershipLost,
    ToolCancelled,
    ToolError,
    ToolTimeout,
)
from ..core.messages import ToolCall
from ..core.state import Snapshot
from ..core.tools import Tool
from .children import give_up_children
from .outcomes import CallOutcome, failed, outcome_of
from .scope import RunScope

_log = logging.getLogger(__name__)

_NEVER_RETRIED = (InvalidArguments, Denied, ToolCancelled)


async def execute(
    run: RunScope, bound: BoundTool, call: ToolCall, snapshot: Snapshot, resume_input: Any = None
) -> CallOutcome:
    """Run the tool, again where it may be retried, and make one outcome of whatever happens."""
    tool, attempt = bound.tool, 0
    # One turn is one attempt.
    while True:
        if attempt and (open_call := run.open_calls.get(call.id)) is not None:
            give_up_children(run, open_call)  # those of the attempt that failed
            open_call.child_base = open_call.children_started
        try:
            if tool.timeout is None:
                ctx = _context(run, call, snapshot, resume_input, run.cancellation, run.budget.deadline)
                return outcome_of(call, await tool.execute(isolate(call.args), ctx))
            return outcome_of(call, await _within(tool.timeout, run, tool, call, snapshot, resume_input))
        except ToolError as exc:
            error = exc
        except (Escape, OwnershipLost):
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            error = InternalError("the tool cancelled itself")
        except (Exception, SystemExit) as exc:
            error = internal_error(call, exc)
        if attempt >= tool.retries or isinstance(error, _NEVER_RETRIED):
            return failed(call, error)
        await asyncio.sleep(min(0.05 * 2**attempt, 2.0))
        attempt += 1


def _context(
    run: RunScope,
    call: ToolCall,
    snapshot: Snapshot,
    resume_input: Any,
    cancellation: CancellationToken,
    deadline: float | None,
) -> ToolContext:
    return ToolContext(
        call.id,
        call.name,
        run.identity,
        run.agent,
        snapshot,
        run.report,
        cancellation,
        run.resolver,
        resume_input,
        deadline,
        run.context,
    )


def context_for(run: RunScope, call: ToolCall) -> ToolContext:
    """The context of a call that has ended, for what it has left to do."""
    return _context(run, call, run.state.snapshot(), None, run.cancellation, run.budget.deadline)


async def _within(
    timeout: float, run: RunScope, tool: Tool, call: ToolCall, snapshot: Snapshot, resume_input: Any
) -> Any:
    """One attempt that may take so long. Its token is its own: a timeout stops this attempt, not the run."""
    cancellation = CancellationToken()
    deadline = min(time.time() + timeout, run.budget.deadline or float("inf"))
    ctx = _context(run, call, snapshot, resume_input, cancellation, deadline)
    timer = asyncio.timeout(timeout)
    pass_on = run.cancellation.pass_on_to(cancellation)
    try:
        async with timer:
            returned = await tool.execute(isolate(call.args), ctx)
        if not timer.expired():
            return returned
    except TimeoutError:
        if not timer.expired():
            raise
    except asyncio.CancelledError:
        cancellation.set(run.cancellation.reason or "cancelled")
        raise
    finally:
        run.cancellation.forget(pass_on)
    # Also for a tool that swallowed its cancellation and came back late.
    cancellation.set("timeout")
    raise ToolTimeout(f"no result after {timeout:g} s")


def internal_error(call: ToolCall, exc: BaseException) -> InternalError:
    """What the model may know of an unexpected exception; the traceback goes to the log."""
    _log.error("tool %r failed in call %s", call.name, call.id, exc_info=exc)
    return InternalError(str(exc) or type(exc).__name__)
