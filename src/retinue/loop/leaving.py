"""Leaving a log: a process that stops begins nothing more, and releases a log when nothing of it runs here.

Invariant: once `LiveLog.is_leaving` is set, no run of the log begins a step, a model call or a tool call here. Such a run
waits in `LiveLog.hold` before the row that would say that its work began, so the next owner finds nothing interrupted.
Model calls, tools and hooks that run already may finish. The owner of the log sets the mark, and never clears it.
"""

from __future__ import annotations

from ..core.results import ToolCallStatus
from ..log.owned import LiveLog
from ..log.state import RUNNING, CallState, RunState


def is_idle(log: LiveLog) -> bool:
    """Return whether nothing of a log that is being left runs in this process."""
    return not any(run.status is RUNNING and _is_at_work(log, run) for run in log.tree.runs.values())


def _is_at_work(log: LiveLog, run: RunState) -> bool:
    """Return whether a run calls a model, a tool or a hook here. A run without an execution works elsewhere."""
    x = log.executions.get(run.run_id)
    if x is None or (run.run_id, "") in log.held:
        return False
    if not x.is_calling:
        return True
    return any((run.run_id, call.call.id) not in log.held and _is_running(log, call) for call in run.open())


def _is_running(log: LiveLog, call: CallState) -> bool:
    """Return whether the tool of a call runs here. A call that waits for a child counts only through that child."""
    if call.status is not ToolCallStatus.RUNNING or call.placed:
        return False
    children = [log.tree.runs.get(ref.run_id) for ref in call.children.values()]
    return not any(child is not None and child.status is RUNNING for child in children)
