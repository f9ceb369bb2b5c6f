"""Execution of one call: attempts, time limits, and whatever a tool may raise."""

from __future__ import annotations

import asyncio
import logging
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
from ..core.rows import Private
from ..core.state import Snapshot
from ..core.tools import Tool
from .endings import CallOutcome, close_children, failed, outcome_of
from .execution import Execution
from .limits import deadline
from .state import CallState

_log = logging.getLogger(__name__)

_NEVER_RETRIED = (InvalidArguments, Denied, ToolCancelled)


async def execute(
    x: Execution, bound: BoundTool, state: CallState, call: ToolCall, snapshot: Snapshot, resume_input: Any = None
) -> CallOutcome:
    """Run the tool, again where it may be retried, and make one outcome of whatever happens."""
    tool, attempt = bound.tool, 0
    # One turn is one attempt.
    while True:
        if attempt and state.children:  # those of the attempt that failed
            close_children(x.log, x.state, state, "the attempt that started it failed")
            x.log.append_private(Private(kind="commit", run_id=x.run_id, call_id=call.id, abandoned=True))
        try:
            if tool.timeout is None:
                ctx = _context(x, call, snapshot, resume_input, x.cancellation, _deadline(x))
                return outcome_of(call, await tool.execute(isolate(call.args), ctx))
            return outcome_of(call, await _within(tool.timeout, x, tool, call, snapshot, resume_input))
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
    x: Execution,
    call: ToolCall,
    snapshot: Snapshot,
    resume_input: Any,
    cancellation: CancellationToken,
    deadline: float | None,
) -> ToolContext:
    return ToolContext(
        call.id,
        call.name,
        x.identity,
        x.agent,
        snapshot,
        x.report,
        cancellation,
        x.resolver,
        resume_input,
        deadline,
        x.context,
    )


def _deadline(x: Execution) -> float | None:
    return deadline(x.log.tree, x.state, x.now()) if x.is_limited else None


def context_for(x: Execution, call: ToolCall) -> ToolContext:
    """The context of a call that has ended, for what it has left to do."""
    return _context(x, call, x.store.snapshot(), None, x.cancellation, _deadline(x))


async def _within(
    timeout: float, x: Execution, tool: Tool, call: ToolCall, snapshot: Snapshot, resume_input: Any
) -> Any:
    """One attempt that may take so long. Its token is its own: a timeout stops this attempt, not the run."""
    cancellation = CancellationToken()
    ends = min(x.now() + timeout, _deadline(x) or float("inf"))
    ctx = _context(x, call, snapshot, resume_input, cancellation, ends)
    timer = asyncio.timeout(timeout)
    pass_on = x.cancellation.pass_on_to(cancellation)
    try:
        async with timer:
            returned = await tool.execute(isolate(call.args), ctx)
        if not timer.expired():
            return returned
    except TimeoutError:
        if not timer.expired():
            raise
    except asyncio.CancelledError:
        cancellation.set(x.cancellation.reason or "cancelled")
        raise
    finally:
        x.cancellation.forget(pass_on)
    # Also for a tool that swallowed its cancellation and came back late.
    cancellation.set("timeout")
    raise ToolTimeout(f"no result after {timeout:g} s")


def internal_error(call: ToolCall, exc: BaseException) -> InternalError:
    """The error that the model reads for an unexpected exception; the traceback goes to the log."""
    _log.error("tool %r failed in call %s", call.name, call.id, exc_info=exc)
    return InternalError(str(exc) or type(exc).__name__)
