"""The end of the work of a backend, as a result."""

from __future__ import annotations

from typing import Any

from msgspec import ValidationError, convert
from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import WorkEnd
from ..core.context import OUT_OF_TIME, TIMED_OUT
from ..core.errors import ExecutionBackendError
from ..core.events import RunFinished
from ..core.messages import Message, Role
from ..core.output import OutputFormat
from ..core.runs import RunResult, RunStatus, bounded
from ..core.state import PersistedState

_STOPPED = (RunStatus.CANCELLED, RunStatus.FAILED, RunStatus.TIMEOUT)


def outcome_of(end: WorkEnd[RunResult], request: RunRequest) -> RunResult:
    """Return the result of a run, also if its backend raised, was cancelled or returned too early."""
    token = request.cancellation
    if (problem := end.error) is not None:
        words = problem.reason if isinstance(problem, ExecutionBackendError) else f"{type(problem).__name__}: {problem}"
        result = bare_result(request, RunStatus.FAILED, "error", words)
    elif end.has_no_outcome:
        result = bare_result(request, RunStatus.CANCELLED, "cancelled", token.reason or "cancelled")
    else:
        result = _checked(end.result(), request)
    if result.status is RunStatus.RUNNING:
        return bare_result(request, RunStatus.FAILED, "error", "its backend returned before the run had ended")
    if token.reason == OUT_OF_TIME and result.status in _STOPPED:
        return replace(
            result, status=RunStatus.FAILED, termination=OUT_OF_TIME, error="the limit on seconds is reached"
        )
    if token.reason == TIMED_OUT and result.status in _STOPPED:
        late = f"it took longer than {request.timeout or 0:g} s"
        return replace(result, status=RunStatus.TIMEOUT, termination="timeout", error=late)
    return result


def _checked(given: Any, request: RunRequest) -> RunResult:
    """Return the result of a backend under the ids that the run has here; a failed one if it cannot end the run."""
    identity = request.identity
    try:
        end = convert(given, RunFinished, from_attributes=True)
        ids, steps = {"run_id": identity.run_id, "thread_id": identity.thread_id}, bounded(end.steps)
        result: RunResult = replace(given, **ids, usage=end.usage, steps=steps)
    except (TypeError, ValidationError) as exc:
        return bare_result(request, RunStatus.FAILED, "error", f"its backend returned no valid RunResult: {exc}")
    form = request.agent.output_format
    if form is None or result.status is not RunStatus.COMPLETED:
        return result
    if result.output is None and result.termination != "natural":  # it was ended before it had an answer
        return result
    try:
        return replace(result, output=_answer_as_json(result, form))
    except (TypeError, ValueError) as exc:
        problem = f"the answer of its backend does not fit the output type: {exc}"
        return replace(result, status=RunStatus.FAILED, termination="error", error=problem, output=None)


def _answer_as_json(result: RunResult, form: OutputFormat) -> Any:
    """Return the answer of a run as JSON: its output, which may have its type already, or what its text says. ValueError or
    TypeError if it does not fit."""
    if result.output is None:
        return form.encode(form.read(result.response or ""))
    try:
        return form.encode(form.decode(result.output))
    except (TypeError, ValueError):
        return form.encode(form.decode(form.encode(result.output)))


def typed(result: RunResult, agent: Agent | None) -> RunResult:
    """Return a result whose answer is JSON, as in a log, with the answer as the type that its agent gives."""
    form = None if agent is None else agent.output_format
    if form is None or result.output is None:
        return result
    return replace(result, output=form.decode(result.output))


def bare_result(request: RunRequest, status: RunStatus, termination: str, reason: str) -> RunResult:
    identity = request.identity
    return RunResult(
        status=status,
        run_id=identity.run_id,
        thread_id=identity.thread_id,
        state=PersistedState(),
        error=reason,
        termination=termination,
        messages=request.messages,
    )


def answer_in(result: RunResult) -> Message | None:
    """Return the answer of a run as a message: its last message, or one with its text."""
    last = result.messages[-1] if result.messages else None
    if last is not None and last.role is Role.ASSISTANT and last.text == (result.response or ""):
        return last
    return Message.assistant(result.response) if result.response else None
