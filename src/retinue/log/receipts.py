"""What a run did, counted from the public events of its log, and the receipt that follows.

The fold counts; `receipt_of` adds up a run and the runs below it. So a process that reads a log back, a fork and time
travel get the same receipt.
"""

from __future__ import annotations

import re
from posixpath import normpath
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec import Struct

from ..core.decisions import Decision
from ..core.events import ToolCallFinished
from ..core.receipts import MOST_FAILURES, MOST_NAMES, Approval, Failure, Receipt, cleaned, merged
from ..core.results import ToolCallStatus
from ..core.rows import Ending
from ..core.runs import RunStatus

if TYPE_CHECKING:
    from .state import CallState, LogState, RunState

_SHELL = "shell"
_WRITING = frozenset({"write_file", "edit_file"})
"""The file tools that change a file, named by their argument `path`."""
_NOT_RUN = frozenset({"invalid_arguments", "not_found", "denied"})
"""Codes of calls whose tool did not begin."""
_CODE = re.compile(r"[a-z][a-z0-9_.:/-]{0,79}")
_LIMITS = ("limit:", "budget:")
_SUCCEEDED, _CANCELLED = ToolCallStatus.SUCCEEDED, ToolCallStatus.CANCELLED


class Tally(Struct, gc=False):
    """The counts of one run, without the runs below it."""

    calls: int = 0
    failed: int = 0
    failures: tuple[Failure, ...] = ()
    approvals: tuple[Approval, ...] = ()
    limits: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    files_changed: int = 0
    shell: int = 0


def count_call(run: RunState, call: CallState, event: ToolCallFinished) -> None:
    """Count a call that has ended."""
    tally = _tally_of(run)
    tally.calls += 1
    code = "" if event.status is _SUCCEEDED else _code_of(event)
    if code:
        tally.failed += 1
        if len(tally.failures) < MOST_FAILURES:
            failure = Failure(cleaned(event.tool_name), code, cleaned(event.message.text))
            tally.failures = (*tally.failures, failure)
        count_limit(run, code)
    if event.tool_name == _SHELL and code not in _NOT_RUN:
        tally.shell += 1
    if event.tool_name in _WRITING and not code:
        path = _args_of(call).get("path")
        if isinstance(path, str) and (name := cleaned(normpath(path))) not in tally.files:
            tally.files_changed += 1
            tally.files = (*tally.files, name)[:MOST_NAMES]


def _args_of(call: CallState) -> dict[str, Any]:
    """Return the arguments of a call; a human may have changed them."""
    payload = None if call.decision is None else call.decision.payload
    changed: Any = cast("dict[str, Any]", payload).get("args") if isinstance(payload, dict) else None
    return cast("dict[str, Any]", changed) if isinstance(changed, dict) else call.call.args


def count_decision(run: RunState, tool: str, decision: Decision) -> None:
    """Count the answer of a human to a call."""
    tally = _tally_of(run)
    if len(tally.approvals) < MOST_NAMES:
        by = cleaned(decision.by or "unknown")
        tally.approvals = (*tally.approvals, Approval(cleaned(tool), _answer_in(decision), by))


def count_limit(run: RunState, code: str | None) -> None:
    """Count a limit, if a code is that of one."""
    if code is not None and code.startswith(_LIMITS):
        tally = _tally_of(run)
        if code not in tally.limits:
            tally.limits = (*tally.limits, code)[:MOST_NAMES]


def _tally_of(run: RunState) -> Tally:
    if run.tally is None:
        run.tally = Tally()
    return run.tally


def _code_of(event: ToolCallFinished) -> str:
    if event.status is _CANCELLED:
        return "cancelled"
    data: Any = event.result.data
    error: Any = cast("Any", data).get("error") if isinstance(data, dict) else None
    known = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    code = known.get("code") or known.get("kind")
    if code == "blocked":  # by a hook or a human
        return "denied"
    return code if isinstance(code, str) and _CODE.fullmatch(code) else "error"


def _answer_in(decision: Decision) -> Literal["approved", "rejected", "answered", "cancelled"]:
    if decision.action == "cancel":
        return "cancelled"
    payload = decision.payload
    approved = cast("dict[str, Any]", payload).get("approved") if isinstance(payload, dict) else None
    if decision.action == "approve" or approved is True:
        return "approved"
    return "rejected" if decision.action == "reject" or approved is False else "answered"


def receipt_of(tree: LogState, run: RunState, ending: Ending | None = None) -> Receipt:
    """Return the receipt of a run with everything below it; with an ending, as it ends now."""
    if run.reported is not None and ending is None:
        return run.reported
    own = _own(tree, run, ending)
    if not run.children:
        return own
    below = [
        receipt_of(tree, child) for ref in run.children.values() if (child := tree.runs.get(ref.run_id)) is not None
    ]
    return merged([own, *below], children=len(below)) if below else own


def _own(tree: LogState, run: RunState, ending: Ending | None) -> Receipt:
    ending = ending or run.ending
    status = str(run.status if ending is None else ending.status)
    termination = "" if ending is None else ending.termination
    is_limit = termination.startswith(_LIMITS) or termination in ("max_steps", RunStatus.TIMEOUT)
    open_tasks = 0
    if tree.tasks:
        open_tasks = sum([task.run_id == run.run_id and task.is_open for task in tree.tasks.values()])
    if (tally := run.tally) is None:
        limits = (termination,) if is_limit else ()
        return Receipt(status=status, steps=run.step, limits=limits, open_tasks=open_tasks)
    limits = (*tally.limits, termination) if is_limit and termination not in tally.limits else tally.limits
    return Receipt(
        status=status,
        steps=run.step,
        calls=tally.calls,
        failed=tally.failed,
        failures=tally.failures,
        approvals=tally.approvals,
        limits=limits,
        files=tally.files,
        files_changed=tally.files_changed,
        shell=tally.shell,
        open_tasks=open_tasks,
    )
