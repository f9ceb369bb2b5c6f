"""What a run needs of its backend, compared with the profile of the backend."""

from __future__ import annotations

from msgspec.structs import replace

from ..core.backend import BackendProfile, RunRequest
from ..core.runs import RunResult, RunStatus
from ..core.stores import ThreadRecord

_INSTEAD = {
    "transcript": "give it one user message",
    "continuation": "start a new conversation, without thread_id",
    "output": "leave out the output type of the agent",
    "persistence": "wait for its answer, without a background task",
}


def missing(profile: BackendProfile, request: RunRequest, thread: ThreadRecord | None, *, is_stored: bool) -> list[str]:
    """Return a sentence for each capability that a new run needs and its backend lacks, with what to do instead.

    `is_stored` says that the log of the run outlives this process."""
    needs: dict[str, str] = {}
    if thread is not None and thread.messages:
        needs["continuation"] = "in_process"
    if len(request.remote_messages()) > 1:
        needs["transcript"] = "user_messages"
    if request.agent.output_format is not None:
        needs["output"] = "text_and_artifacts"
    if request.detached and is_stored:
        needs["persistence"] = "stored"
    return [f"{problem}: {_INSTEAD[problem.partition(':')[0]]}" for problem in profile.check(needs)]


def refuse_wait(profile: BackendProfile, result: RunResult) -> RunResult:
    """Return the result of a run that waits; a failed one, with its questions, if its backend cannot wait or be answered."""
    level = "input_and_auth" if result.status is RunStatus.WAITING_AUTH else "input"
    problems = profile.check({"waits": level, "decisions": "durable"})
    if not problems:
        return result
    asked = "; ".join([ticket.message for ticket in result.suspended.values() if ticket.message])
    shown = f"{result.status} ({asked})" if asked else str(result.status)
    reason = f"it is {shown}, and its backend cannot do this: {'; '.join(problems)}"
    return replace(result, status=RunStatus.FAILED, termination="error", error=reason, suspended={})


def can_stop(profile: BackendProfile) -> bool:
    return profile.cancellation != "none"


def left_alone(result: RunResult) -> RunResult:
    """Return the result of a run that is not waited for any more, with a note that it was not stopped."""
    return replace(result, error=f"{result.error}; its backend cannot stop it, so it may go on there")
