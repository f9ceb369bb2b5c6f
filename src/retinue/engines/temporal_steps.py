"""Agents as steps of your own Temporal workflows: activities that run an agent and answer it.

A run has an id made from its activity, so that a retry finds the same run instead of starting another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from temporalio import activity
from temporalio.exceptions import ApplicationError

from ..core.concurrency import cancel_all, join, running
from ..core.errors import ConfigurationError, DecisionRefused, RunElsewhere, ThreadBusy, UnknownAgent, UnknownRun
from ..core.runs import RunResult
from ..wire.resources import DecisionBody

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime

_BEAT = 1.0
LARGEST = 100_000
"""Characters of a response that a workflow carries."""


class AgentStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input of `run_agent`."""

    agent: str
    input: str
    thread_id: str | None = None
    user_id: str | None = None
    context: dict[str, Any] = {}
    run_id: str | None = None
    """An id of your own; else it is made from the activity."""


class AnswerStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input of `answer_agent`: decisions as in the HTTP API, `{"call id": {"action": "approve"}}`."""

    run_id: str
    decisions: dict[str, DecisionBody]


class AgentActivities:
    """`run_agent` and `answer_agent` of a runtime. Both return where the run stands, as a dict:

    `run_id`, `thread_id`, `status`, `response` (up to 100,000 characters, else `is_cut` is true), `error`, `step` and
    `questions`, which has the calls that wait for an answer.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @activity.defn
    async def run_agent(self, step: dict[str, Any]) -> dict[str, Any]:
        """Run an agent until it ends or waits for an answer."""
        return await _refusing(lambda: self._run(msgspec.convert(step, AgentStep)))

    @activity.defn
    async def answer_agent(self, step: dict[str, Any]) -> dict[str, Any]:
        """Answer a suspended run, and return its next result."""
        return await _refusing(lambda: self._answer(msgspec.convert(step, AnswerStep)))

    async def _run(self, step: AgentStep) -> dict[str, Any]:
        runtime, run_id = self._runtime, step.run_id or _own_id()
        known = await runtime.store.load_run(run_id)
        if known is not None and known.result is not None:
            return outcome(known.result)
        if known is None:
            run = runtime.stream(
                step.agent,
                step.input,
                run_id=run_id,
                thread_id=step.thread_id,
                user_id=step.user_id,
                context=step.context,
            )
        else:  # an attempt before this one has started it
            run = await runtime.load(run_id)
        return await self._follow(run_id, runtime.result(run_id) if run is None else run.result())

    async def _answer(self, step: AnswerStep) -> dict[str, Any]:
        made = {
            name: replace(one, id=one.id or f"{_own_id()}/{name}").as_decision() for name, one in step.decisions.items()
        }
        result = await self._follow(step.run_id, self._runtime.stream_resume(step.run_id, made, by="temporal").result())
        if result["questions"] and result["error"] is not None:
            raise DecisionRefused(result["error"])
        return result

    async def _follow(self, run_id: str, end: Coroutine[Any, Any, RunResult[Any]]) -> dict[str, Any]:
        """Wait for a run. If the activity is cancelled, cancel the run."""
        timeout = activity.info().heartbeat_timeout
        every = _BEAT if timeout is None else min(_BEAT, timeout.total_seconds() / 4)
        async with running(end) as work:
            try:
                activity.heartbeat({"run_id": run_id})
                while not await join([work], every):
                    activity.heartbeat({"run_id": run_id})
            except asyncio.CancelledError:
                await cancel_all([work])
                details, this = activity.cancellation_details(), asyncio.current_task()
                if details is None or this is None:
                    raise
                this.uncancel()
                if not details.cancel_requested:
                    raise ApplicationError(f"run {run_id!r} is left to another worker", type="RunLeft") from None
                await self._runtime.cancel(run_id)
                raise
            return outcome(work.result())


def agent_activities(runtime: Runtime) -> Sequence[Callable[..., Any]]:
    """Return the activities of a runtime, for your own Temporal worker: `run_agent` and `answer_agent`."""
    made = AgentActivities(runtime)
    return [made.run_agent, made.answer_agent]


def outcome(result: RunResult[Any]) -> dict[str, Any]:
    """Return the outcome of a run as a dict for a workflow."""
    text = result.response or ""
    return {
        "run_id": result.run_id,
        "thread_id": result.thread_id,
        "status": result.status.value,
        "response": text[:LARGEST],
        "is_cut": len(text) > LARGEST,
        "error": result.error,
        "step": result.steps,
        "questions": sorted(result.suspended),
    }


def _own_id() -> str:
    info = activity.info()
    return f"{info.workflow_run_id}-{info.activity_id}"


async def _refusing(work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    """Mark errors as not retryable for Temporal if a retry cannot succeed."""
    try:
        return await work()
    except (ThreadBusy, RunElsewhere):
        raise
    except (ConfigurationError, DecisionRefused, UnknownAgent, UnknownRun, msgspec.ValidationError) as exc:
        raise ApplicationError(str(exc), type=type(exc).__name__, non_retryable=True) from exc
