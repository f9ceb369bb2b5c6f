"""The task protocol: sub-agents for parents on other machines.

A task is a root run. Its run id is derived from the user and the task id. So a repeated request finds the same run, also on
another node of the same store and after a restart.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response

from ..core.concurrency import join
from ..core.errors import StoreError, UnknownAgent
from ..core.runs import Limits, RunStatus, limits_of_run
from ..core.stores import RunRecord
from ..runtime import Run
from ..wire.resources import ID, Decisions
from ..wire.task_protocol import RemoteTask, TaskCancel, TaskSubmission
from .auth import User
from .http import ApiError, Call, Endpoints, is_text, json_response, traced
from .service import MOST_WAIT
from .streams import EventsQuery, stream_run

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


_TASK = "/tasks/{task_id}"
endpoint = Endpoints()


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


async def find_started(call: Call, run_id: str | None, digest: str) -> RunRecord | None:
    """Return the run of an earlier request with the same key; refuse a request that asks for something else."""
    known = None if run_id is None else await call.runtime.store.load_run(run_id)
    if known is not None:
        await _check_same(call, known.identity.run_id, digest)
    return known


async def _check_same(call: Call, run_id: str, digest: str) -> None:
    if await call.runtime.log(run_id).digest() not in (None, digest):
        raise ApiError(409, "key_reused", "this key was used for another request: choose a new one")


async def start_once(
    call: Call,
    agent: str,
    given: Any,
    run_id: str | None,
    digest: str,
    thread_id: str | None,
    *,
    limits: Limits | None,
    **options: Any,
) -> Run:
    """Start a run on a thread of the user, and return once it is stored. With a `run_id`, which is derived from a key of
    the client, only one of the nodes that get the same request starts it."""
    known = call.runtime.agents
    if agent not in known:
        raise UnknownAgent(agent, tuple(known))
    limits = limits_of_run(known[agent].limits, limits, over_network=True)
    chosen = thread_id or (run_id and f"thread_{run_id}")
    kept = None if run_id is None else digest
    async with call.service.thread_for(call.user, agent, chosen, is_ours=thread_id is None):
        run = call.runtime.stream(
            agent, given, thread_id=chosen, user_id=call.user.id, run_id=run_id, digest=kept, limits=limits, **options
        )
        call.note_run(run.run_id)
        try:
            await run.stored()
        except StoreError:
            if await call.runtime.store.load_run(run.run_id) is None:  # else another node was faster
                raise
    if run_id is not None:
        await _check_same(call, run_id, digest)
    call.service.feeds.notice_run()
    return run


@endpoint("POST", "/tasks", scope="run", body=TaskSubmission, status=201, returns=RemoteTask, more={200: RemoteTask})
async def submit(call: Call) -> Response:
    """Have an agent work on an input. The same task again changes nothing."""
    body: TaskSubmission = call.body
    if not body.task_id.strip() or not _TASK_ID.fullmatch(body.task_id) or not is_text(body.task_id):
        detail = "body: task_id has 1 to 256 characters, without '/' and control characters"
        raise ApiError(422, "invalid_body", detail)
    try:
        session_id = msgspec.convert(body.context.get("session_id"), ID | None)
    except msgspec.ValidationError as exc:
        raise ApiError(422, "invalid_body", f"body: context.session_id: {exc}") from None
    run_id, digest = run_id_of(call.user, body.task_id), digest_of(replace(body, limits=None))
    is_known = await find_started(call, run_id, digest) is not None
    if not is_known:
        context = {**traced(call.request.headers), **body.context}
        options: dict[str, Any] = {"context": context, "limits": body.limits, "when_busy": "enqueue"}
        await start_once(call, body.agent_id, body.input, run_id, digest, session_id, **options)
    return json_response(await _state(call, body.task_id), 200 if is_known else 201)


async def _record(call: Call, task_id: str | None = None) -> RunRecord:
    return await call.service.run_of(call.user, run_id_of(call.user, task_id or call.param("task_id")), "task")


async def _state(call: Call, task_id: str | None = None) -> RemoteTask:
    task_id = task_id or call.param("task_id")
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
    known = msgspec.convert(result, RemoteTask, from_attributes=True)
    status = _STATUS.get(result.status, "running")
    return replace(
        known, status=status, result=result.response, task_id=task_id, awaiting=result.suspended, run_id=run_id, seq=seq
    )


@endpoint("GET", _TASK, returns=RemoteTask)
async def get_task(call: Call) -> Any:
    """Return the state of a task."""
    return await _state(call)


@endpoint("GET", f"{_TASK}/wait", query=TaskWait, returns=RemoteTask)
async def wait_for_task(call: Call) -> Any:
    """Wait until a task has ended or waits for a human, or until the time is over."""
    query: TaskWait = call.query
    record = await _record(call)
    if record.result is None and query.timeout_seconds > 0:
        seconds = min(query.timeout_seconds, MOST_WAIT)
        await call.service.unless_closing(call.runtime.result(record.identity.run_id), seconds)
    return await _state(call)


@endpoint("POST", f"{_TASK}/cancel", scope="run", body=TaskCancel, returns=RemoteTask)
async def cancel_task(call: Call) -> Any:
    """Stop a task."""
    body: TaskCancel = call.body
    record = await _record(call)
    if not record.has_ended or body.tasks:
        cancelling = call.service.spawn(call.runtime.cancel(record.identity.run_id, tasks=body.tasks))
        if await join([cancelling], CANCEL_WAIT):
            cancelling.result()
    return await _state(call)


@endpoint("GET", f"{_TASK}/events", query=EventsQuery, media="text/event-stream")
async def task_events(call: Call) -> Response:
    """Follow the events of a task, from any number."""
    return await stream_run(call, await _record(call))


@endpoint("POST", f"{_TASK}/resume", scope="answer", body=Decisions, status=202, returns=RemoteTask)
async def resume_task(call: Call) -> Any:
    """Answer a task that waits."""
    body: Decisions = call.body
    run_id = run_id_of(call.user, call.param("task_id"))
    await call.service.run_to_continue(call.user, run_id, "task")
    run = call.runtime.stream_resume(run_id, body.as_decisions(), by=call.user.id)
    await run.stored()
    return await _state(call)
