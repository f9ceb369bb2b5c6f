"""The task protocol: sub-agents for parents on other machines.

A task is a root run. Its run id is derived from the user and the task id. So a repeated request finds the same run, also on
another node of the same store and after a restart.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response

from ..core.errors import StoreError
from ..core.runs import Limits, RunStatus
from ..core.stores import RunRecord
from ..wire.resources import ID, Decisions
from ..wire.task_protocol import RemoteTask, TaskCancel, TaskSubmission
from .auth import User
from .http import ApiError, Call, Endpoint, is_text, json_response, traced
from .service import MOST_WAIT, Service
from .streams import EventsQuery, EventStream, open_run

CANCEL_WAIT = 1.0
"""Seconds that the answer to a cancel waits for the end of the run; the cancel continues after that."""
_TASK_ID = re.compile(r"(?!\.{1,2}$)[^\x00-\x1f\x7f/]{1,256}")
"""A task id that can be a part of a path."""

_STATUS = {
    RunStatus.COMPLETED: "success",
    RunStatus.FAILED: "error",
    RunStatus.TIMEOUT: "error",
    RunStatus.CANCELLED: "cancelled",
}


class TaskWait(Struct, frozen=True):
    """Seconds to wait until a task has ended or waits for a human."""

    timeout_seconds: float = 30.0


def run_id_of(user: User, task_id: str) -> str:
    """Return the id of the run of a task."""
    said = f"{len(user.id)}:{user.id}/{task_id}".encode()
    return f"run_{hashlib.blake2b(said, digest_size=12).hexdigest()}"


def digest_of(request: Any) -> str:
    """Return a digest of a whole request; the order of its fields does not matter."""
    return hashlib.blake2b(msgspec.json.encode(request, order="sorted"), digest_size=16).hexdigest()


async def check_same(call: Call, run_id: str, digest: str) -> None:
    """Refuse a request that has the key of an earlier one but asks for something else."""
    if await call.runtime.log(run_id).digest() not in (None, digest):
        raise ApiError(409, "key_reused", "this key was used for another request: choose a new one")


async def submit(call: Call) -> Response:
    body: TaskSubmission = call.body
    if not body.task_id.strip() or not _TASK_ID.fullmatch(body.task_id) or not is_text(body.task_id):
        detail = "body: task_id has 1 to 256 characters, without '/' and control characters"
        raise ApiError(422, "invalid_body", detail)
    try:
        session_id = msgspec.convert(body.context.get("session_id"), ID | None)
    except msgspec.ValidationError as exc:
        raise ApiError(422, "invalid_body", f"body: context.session_id: {exc}") from None
    run_id, store, digest = (
        run_id_of(call.user, body.task_id),
        call.runtime.store,
        digest_of(replace(body, limits=None)),
    )
    if await store.load_run(run_id) is not None:
        await check_same(call, run_id, digest)
        return json_response(await _state(call, body.task_id))
    thread_id = session_id or f"thread_{run_id}"
    try:
        async with call.service.thread_for(call.user, thread_id, is_ours=session_id is None):
            run = call.runtime.stream(
                body.agent_id,
                body.input,
                thread_id=thread_id,
                user_id=call.user.id,
                context={**traced(call.request.headers), **body.context},
                limits=_limits(call, body),
                when_busy="enqueue",
                run_id=run_id,
                digest=digest,
            )
            await run.stored()
            call.service.feeds.notice_run()
    except StoreError:
        if await store.load_run(run_id) is None:  # else another node was faster
            raise
    await check_same(call, run_id, digest)
    return json_response(await _state(call, body.task_id), 201)


def _limits(call: Call, body: TaskSubmission) -> Limits | None:
    """Return the limits of the agent, or those of the parent's tree where they are lower."""
    agent = call.runtime.agents.get(body.agent_id)
    return body.limits if agent is None else agent.limits.narrowed(body.limits)


async def _record(call: Call, task_id: str) -> RunRecord:
    return await call.service.run_of(call.user, run_id_of(call.user, task_id), "task")


async def _state(call: Call, task_id: str) -> RemoteTask:
    record = await _record(call, task_id)
    log = call.runtime.log(record.identity.run_id)
    is_open = record.has_ended and not await log.has_ended()
    # The number is read last: nothing that led to the state comes after it.
    return replace(state_of(task_id, record, await log.last()), open=is_open)


def state_of(task_id: str, record: RunRecord, seq: int) -> RemoteTask:
    """Return a run as the state of a task."""
    result, run_id = record.result, record.identity.run_id
    if result is None:
        return RemoteTask("pending" if record.queued else "running", task_id=task_id, run_id=run_id, seq=seq)
    return RemoteTask(
        _STATUS.get(result.status, "running"),
        result.response,
        result.error,
        task_id,
        awaiting=result.suspended,
        usage=result.usage,
        steps=result.steps,
        output=result.output,
        termination=result.termination,
        run_id=run_id,
        seq=seq,
    )


async def get_task(call: Call) -> Any:
    return await _state(call, call.param("task_id"))


async def wait_for_task(call: Call) -> Any:
    query: TaskWait = call.query
    record = await _record(call, call.param("task_id"))
    if record.result is None and query.timeout_seconds > 0:
        seconds = min(query.timeout_seconds, MOST_WAIT)
        await call.service.unless_closing(call.runtime.result(record.identity.run_id), seconds)
    return await _state(call, call.param("task_id"))


async def cancel_task(call: Call) -> Any:
    body: TaskCancel = call.body
    record = await _record(call, call.param("task_id"))
    if not record.has_ended or body.tasks:
        service: Service = call.service
        cancelling = service.spawn(call.runtime.cancel(record.identity.run_id, tasks=body.tasks))
        done, _ = await asyncio.wait({cancelling}, timeout=CANCEL_WAIT)
        if done:
            cancelling.result()
    return await _state(call, call.param("task_id"))


async def task_events(call: Call) -> Response:
    query: EventsQuery = call.query
    record = await _record(call, call.param("task_id"))
    batches = await open_run(call.service, record, query, call.request.headers.get("last-event-id"))
    return EventStream(call.service, call.user.id, batches, call.is_still_allowed)


async def resume_task(call: Call) -> Response:
    body: Decisions = call.body
    record = await _record(call, call.param("task_id"))
    run = call.runtime.stream_resume(record.identity.run_id, body.as_decisions())
    await run.stored()
    return json_response(await _state(call, call.param("task_id")), 202)


_TASK = "/tasks/{task_id}"
ENDPOINTS = (
    Endpoint(
        method="POST", path="/tasks", handle=submit, scope="run", body=TaskSubmission, status=201, returns=RemoteTask,
        more={200: RemoteTask}, summary="Have an agent work on an input. The same task again changes nothing.",
    ),
    Endpoint(method="GET", path=_TASK, handle=get_task, returns=RemoteTask, summary="Return the state of a task."),
    Endpoint(
        method="GET", path=f"{_TASK}/wait", handle=wait_for_task, query=TaskWait, returns=RemoteTask,
        summary="Wait until a task has ended or waits for a human, or until the time is over.",
    ),
    Endpoint(
        method="POST", path=f"{_TASK}/cancel", handle=cancel_task, scope="run", body=TaskCancel, returns=RemoteTask,
        summary="Stop a task.",
    ),
    Endpoint(
        method="GET", path=f"{_TASK}/events", handle=task_events, query=EventsQuery, media="text/event-stream",
        summary="Follow the events of a task, from any number.",
    ),
    Endpoint(
        method="POST", path=f"{_TASK}/resume", handle=resume_task, scope="answer", body=Decisions, status=202,
        returns=RemoteTask, summary="Answer a task that waits.",
    ),
)  # fmt: skip
