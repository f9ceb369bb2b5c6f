"""Endpoints of agents and runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response

from ..core.agents import Agent
from ..core.errors import StoreError, UnknownAgent
from ..core.events import ChildStarted
from ..core.runs import RunResult
from ..core.state import PersistedState
from ..core.stores import RunRecord
from ..runtime import Run
from ..storage.sql import SqlStore
from ..wire.resources import (
    CancelRun,
    CancelTask,
    Decisions,
    ForkRun,
    StartRun,
    as_input,
    decode_cursor,
    encode_cursor,
    page_json,
    result_json,
    run_json,
)
from ..wire.shapes import (
    AgentShape,
    ChildShape,
    Items,
    ListedTask,
    QuestionShape,
    ResultShape,
    RunShape,
    RunState,
    SnapshotShape,
    TaskShape,
    WorkingRun,
)
from ..wire.snapshot import SnapshotTree
from .http import ApiError, Call, Endpoint, Page, check_scope, json_response, not_found
from .service import MOST_WAIT, Service
from .streams import EventsQuery, EventStream, open_run
from .tasks import check_same, digest_of, run_id_of

RunStatusName = Literal[
    "queued", "running", "completed", "failed", "cancelled", "timeout", "suspended", "waiting_input", "waiting_auth"
]
TaskStatusName = Literal["pending", "running", "completed", "failed", "cancelled"]


class RunsQuery(Page, frozen=True):
    """The query of a list of runs."""

    thread_id: str | None = None
    status: RunStatusName | None = None


class WaitQuery(Struct, frozen=True):
    """Seconds to wait for the end."""

    wait: float = 0.0


class SubtreeQuery(Struct, frozen=True):
    """A subtree, as `tools:a|tools:b`."""

    ns: str | None = None


class WholeList(Struct, frozen=True):
    """The query of a list that is given whole unless a limit is asked for."""

    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None
    cursor: str | None = None


class SubtreeList(WholeList, frozen=True):
    """The query of a list of something in a subtree, as `tools:a|tools:b`."""

    ns: str | None = None


def page_of(items: list[Any], query: Page | WholeList) -> dict[str, Any]:
    """Return the page of a list that a query asks for."""
    place = cursor_of(query.cursor)
    start = 0 if place is None else int(place[0])
    end = len(items) if query.limit is None else start + query.limit
    return page_json(items[start:end], encode_cursor((float(end), "")) if end < len(items) else None)


# --- agents


async def list_agents(call: Call) -> Any:
    return page_of([agent_json(agent) for agent in call.runtime.agents.values()], call.query)


async def get_agent(call: Call) -> Any:
    agent = call.runtime.agents.get(call.param("agent"))
    if agent is None:
        raise not_found("agent")
    return agent_json(agent)


def agent_json(agent: Agent) -> dict[str, Any]:
    model: Any = agent.model
    return {
        "name": agent.name,
        "description": agent.description,
        "model": model if isinstance(model, str | None) else getattr(model, "name", type(model).__name__),
        "tools": [{"name": name, "description": one.descriptor.description} for name, one in agent.toolbox.items()],
        "subagents": [child if isinstance(child, str) else child.name for child in agent.subagents],
        "handoffs": [target if isinstance(target, str) else target.name for target in agent.handoffs],
        "max_steps": agent.max_steps,
    }


# --- runs


async def start_run(call: Call) -> Any:
    body: StartRun = call.body
    run_id, digest = _chosen_id(call), digest_of(body)
    try:
        given = as_input(body.input)
    except ValueError as exc:
        raise ApiError(422, "invalid_body", f"body: {exc}") from None
    if run_id is not None and (known := await call.runtime.store.load_run(run_id)) is not None:
        await check_same(call, run_id, digest)
        return json_response(_started_json(known), 201)
    if body.agent not in call.runtime.agents:
        raise UnknownAgent(body.agent, tuple(call.runtime.agents))
    thread_id = body.thread_id or (run_id and f"thread_{run_id}")
    async with call.service.thread_for(call.user, thread_id, is_ours=body.thread_id is None):
        run = call.runtime.stream(
            body.agent,
            given,
            thread_id=thread_id,
            user_id=call.user.id,
            context=body.context,
            run_id=run_id,
            digest=None if run_id is None else digest,
            state=None if body.state is None else PersistedState(extensions=body.state),
            limits=None if body.limits is None else body.limits.as_limits(),
            when_busy=body.when_busy,
            queue=body.queue,
            priority=body.priority,
            delay=body.delay,
        )
        call.note_run(run.run_id)
        try:
            await run.stored()
        except StoreError:
            if await call.runtime.store.load_run(run.run_id) is None:  # else another node has the same request
                raise
    if run_id is not None:
        await check_same(call, run_id, digest)
    return json_response(await started_json(call.service, run), 201)


def _chosen_id(call: Call) -> str | None:
    """Return the run id that is derived from the idempotency key of a request."""
    key = call.request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= 200:
        raise ApiError(422, "invalid", "an Idempotency-Key has 1 to 200 characters")
    return run_id_of(call.user, f"key:{key}")


def _started_json(record: RunRecord) -> dict[str, Any]:
    identity = record.identity
    return {"run_id": identity.run_id, "thread_id": identity.thread_id, "status": record.status}


async def started_json(service: Service, run: Run) -> dict[str, Any]:
    service.feeds.notice_run()
    record = await service.runtime.store.load_run(run.run_id)
    if record is not None:
        return _started_json(record)
    return {"run_id": run.run_id, "thread_id": run.thread_id, "status": "running"}


async def list_runs(call: Call) -> Any:
    shown, cursor = await _page_of_runs(call, call.query, call.query.status)
    ends = await ends_of(call.service, shown)
    return page_json([await shown_run(call.service, one, ends.get(one.identity.run_id)) for one in shown], cursor)


async def _page_of_runs(
    call: Call, query: RunsQuery | TasksQuery, status: str | None = None
) -> tuple[list[RunRecord], str | None]:
    """Return runs of the user, newest first, and the cursor of the next page."""
    place, filters = cursor_of(query.cursor), call.service.filters(call.user)
    found = await call.runtime.store.list_runs(
        query.thread_id, status=status, limit=query.limit + 1, before=place, **filters
    )
    shown = found[: query.limit]
    last = shown[-1] if len(found) > query.limit else None
    return shown, None if last is None else encode_cursor((last.started_at, last.identity.run_id))


async def shown_run(service: Service, record: RunRecord, ended_at: float | None = None) -> dict[str, Any]:
    """Return a run as JSON; a running one is `orphaned` if its process is gone and no other continues it yet."""
    log_id = record.log_id or record.identity.run_id
    orphaned = record.result is None and await service.runtime.log(log_id).is_orphaned()
    return run_json(record, ended_at, orphaned=orphaned)


def cursor_of(given: str | None) -> tuple[float, str] | None:
    if given is None:
        return None
    try:
        return decode_cursor(given)
    except ValueError as exc:
        raise ApiError(422, "unknown_cursor", str(exc)) from None


async def ends_of(service: Service, records: list[RunRecord]) -> dict[str, float]:
    """Return when runs ended, where the store knows it."""
    store = service.runtime.store
    return await store.ends_of([one.identity.run_id for one in records]) if isinstance(store, SqlStore) else {}


async def get_run(call: Call) -> Any:
    record = await call.service.run_of(call.user, call.param("run_id"))
    ends = await ends_of(call.service, [record])
    return await shown_run(call.service, record, ends.get(record.identity.run_id))


async def get_result(call: Call) -> Any:
    query: WaitQuery = call.query
    run_id = call.param("run_id")
    record = await call.service.run_of(call.user, run_id)
    if record.result is None and query.wait > 0:
        found = await call.service.unless_closing(call.runtime.result(run_id), min(query.wait, MOST_WAIT))
        if found is not None:
            return result_json(found)
        record = await call.service.run_of(call.user, run_id)
    if record.result is None:
        return json_response({"run_id": run_id, "status": record.status}, 202)
    return result_json(record.result)


async def cancel_run(call: Call) -> Any:
    body: CancelRun = call.body
    run_id = call.param("run_id")
    await call.service.run_of(call.user, run_id)
    result = await call.runtime.cancel(run_id, tasks=body.tasks, reason=body.reason, grace=body.grace)
    return short_json(result)


def short_json(result: RunResult) -> dict[str, Any]:
    return {"run_id": result.run_id, "thread_id": result.thread_id, "status": result.status.value}


async def decide(call: Call) -> Any:
    body: Decisions = call.body
    record = await call.service.run_of(call.user, call.param("run_id"))
    run = call.runtime.stream_resume(record.identity.run_id, body.as_decisions())
    await run.stored()
    place = await run.place()
    return json_response(await started_json(call.service, run) | {"after": place}, 202)


async def fork_run(call: Call) -> Any:
    body: ForkRun = call.body
    if body.decisions is not None:
        check_scope(call.user, "answer")
    record = await call.service.run_of(call.user, call.param("run_id"))
    decisions = None if body.decisions is None else Decisions(body.decisions).as_decisions()
    try:
        given = None if body.input is None else as_input(body.input)
    except ValueError as exc:
        raise ApiError(422, "invalid_body", f"body: {exc}") from None
    run = await call.runtime.fork(record.identity.run_id, at=body.after, input=given, decisions=decisions)
    call.note_run(run.run_id)
    await run.stored()
    return json_response(await started_json(call.service, run) | {"after": await run.place()}, 201)


async def run_events(call: Call) -> Response:
    query: EventsQuery = call.query
    record = await call.service.run_of(call.user, call.param("run_id"))
    query = await own_events(call.service, record, query)
    batches = await open_run(call.service, record, query, call.request.headers.get("last-event-id"))
    return EventStream(call.service, call.user.id, batches, call.is_still_allowed)


async def own_events(service: Service, record: RunRecord, query: EventsQuery) -> EventsQuery:
    """Return a query limited to the run's own subtree: a background child is in the log of its root."""
    if query.ns is not None or record.log_id in ("", record.identity.run_id):
        return query
    run_id = record.identity.run_id
    for event in await service.runtime.log(record.log_id).so_far():
        if isinstance(event, ChildStarted) and event.child_run_id == run_id:
            return replace(query, ns="|".join(event.child_ns))
    return query


# --- trees


async def tree_of(service: Service, record: RunRecord) -> SnapshotTree:
    """Return the tree of the log of a run, as far as it is stored."""
    return SnapshotTree(await service.runtime.log(record.log_id or record.identity.run_id).so_far())


def namespace_of(tree: SnapshotTree, record: RunRecord, query: SubtreeQuery | SubtreeList) -> tuple[str, ...]:
    """Return the namespace of a request: the one given, as events have it, or that of its run, a background child perhaps."""
    if query.ns:
        return tuple(query.ns.split("|"))
    node = tree.runs.get(record.identity.run_id)
    return () if node is None else node.ns


async def snapshot(call: Call) -> Any:
    record = await call.service.run_of(call.user, call.param("run_id"))
    tree = await tree_of(call.service, record)
    found = tree.snapshot(namespace_of(tree, record, call.query))
    if found is None:
        if call.query.ns:
            raise not_found("subtree")
        found = dict[str, Any](seq=0, run=None, questions=[], tasks=[])
    return {**found, "status": record.status}


async def run_children(call: Call) -> Any:
    record = await call.service.run_of(call.user, call.param("run_id"))
    tree = await tree_of(call.service, record)
    found = tree.children(namespace_of(tree, record, call.query))
    if found is None and call.query.ns:
        raise not_found("subtree")
    return page_of(found or [], call.query)


async def run_questions(call: Call) -> Any:
    record = await call.service.run_of(call.user, call.param("run_id"))
    tree = await tree_of(call.service, record)
    return page_of(tree.questions(namespace_of(tree, record, call.query)), call.query)


async def run_tasks(call: Call) -> Any:
    record = await call.service.run_of(call.user, call.param("run_id"))
    return page_of((await tree_of(call.service, record)).task_list(), call.query)


class TasksQuery(Page, frozen=True):
    """The query of a list of tasks. A page covers `limit` runs."""

    thread_id: str | None = None
    status: TaskStatusName | None = None
    agent: str | None = None


async def list_tasks(call: Call) -> Any:
    """List the background tasks of a user, run by run, the newest run first."""
    query: TasksQuery = call.query
    shown, cursor = await _page_of_runs(call, query)
    items: list[dict[str, Any]] = []
    for record in shown:
        for task in (await tree_of(call.service, record)).task_list():
            if query.status in (None, task["status"]) and query.agent in (None, task["agent"]):
                items.append({**_place_of(record), **task})
    return page_json(items, cursor)


class TaskQuery(Struct, frozen=True):
    """The root run of a task; without it, the task is looked for."""

    run_id: str | None = None


async def get_task(call: Call) -> Any:
    return (await _find_task(call, call.query.run_id))[1]


async def cancel_task(call: Call) -> Any:
    body: CancelTask = call.body
    record, task = await _find_task(call, body.run_id)
    call.note_run(record.identity.run_id)
    await call.runtime.cancel_task(record.identity.run_id, task["task_id"])
    return (await _find_task(call, record.identity.run_id))[1]


async def _find_task(call: Call, run_id: str | None) -> tuple[RunRecord, dict[str, Any]]:
    """Return a background task of the user, and the root run that has it in its log."""
    task_id = call.param("background_task_id")
    async for record in _runs_with_tasks(call, run_id):
        for task in (await tree_of(call.service, record)).task_list():
            if task["task_id"] == task_id:
                return record, {**_place_of(record), **task}
    raise not_found("task")


async def _runs_with_tasks(call: Call, run_id: str | None) -> AsyncIterator[RunRecord]:
    """Yield the runs of a user that may have a task: those at work first, then all, the newest first."""
    service, store = call.service, call.runtime.store
    if run_id is not None:
        record = await service.run_of(call.user, run_id, "task")
        log_id = record.log_id or run_id
        yield record if log_id == run_id else await service.run_of(call.user, log_id, "task")
        return
    at_work = [log.log_id for log in await store.open_logs()] if isinstance(store, SqlStore) else []
    for log_id in at_work:
        with contextlib.suppress(ApiError):
            yield await service.run_of(call.user, log_id)
    place: tuple[float, str] | None = None
    while found := await store.list_runs(limit=100, before=place, **service.filters(call.user)):
        for record in found:
            if record.identity.run_id not in at_work:
                yield record
        place = found[-1].started_at, found[-1].identity.run_id


def _place_of(record: RunRecord) -> dict[str, Any]:
    return {"log_id": record.identity.run_id, "thread_id": record.identity.thread_id}


_RUN = "/api/v1/runs/{run_id}"
_TASK = "/api/v1/tasks/{background_task_id}"
ENDPOINTS = (
    Endpoint(
        method="GET", path="/api/v1/agents", handle=list_agents, query=WholeList, returns=Items[AgentShape],
        summary="List the agents.",
    ),
    Endpoint(
        method="GET", path="/api/v1/agents/{agent}", handle=get_agent, returns=AgentShape, summary="Show an agent."
    ),
    Endpoint(
        method="POST", path="/api/v1/runs", handle=start_run, scope="run", body=StartRun, status=201,
        returns=RunState,
        summary="Start a run; it is stored when this answers. The same Idempotency-Key again is the same run.",
    ),
    Endpoint(
        method="GET", path="/api/v1/runs", handle=list_runs, query=RunsQuery, returns=Items[RunShape],
        summary="List runs, newest first.",
    ),
    Endpoint(method="GET", path=_RUN, handle=get_run, returns=RunShape, summary="Show a run."),
    Endpoint(
        method="GET", path=f"{_RUN}/result", handle=get_result, query=WaitQuery, returns=ResultShape,
        more={202: WorkingRun},
        summary="Return the result of a run that has ended or waits; 202 while it works.",
    ),
    Endpoint(
        method="POST", path=f"{_RUN}/cancel", handle=cancel_run, scope="run", body=CancelRun, returns=RunState,
        summary="Stop a run and wait for its end.",
    ),
    Endpoint(
        method="POST", path=f"{_RUN}/decisions", handle=decide, scope="answer", body=Decisions, status=202,
        returns=RunState,
        summary="Answer a run that waits.",
    ),
    Endpoint(
        method="POST", path=f"{_RUN}/fork", handle=fork_run, scope="run", body=ForkRun, status=201,
        returns=RunState,
        summary="Continue a run from an earlier event, on a new thread.",
    ),
    Endpoint(
        method="GET", path=f"{_RUN}/events", handle=run_events, query=EventsQuery, media="text/event-stream",
        summary="Follow the events of a run, from any number. A WebSocket on the same path sends the same.",
    ),
    Endpoint(
        method="GET", path=f"{_RUN}/snapshot", handle=snapshot, query=SubtreeQuery, returns=SnapshotShape,
        summary="Return the tree of a run as it is stored now, with the number of its last event.",
    ),
    Endpoint(
        method="GET", path=f"{_RUN}/children", handle=run_children, query=SubtreeList, returns=Items[ChildShape],
        summary="List the children of a run, or of a run below it.",
    ),
    Endpoint(
        method="GET", path=f"{_RUN}/questions", handle=run_questions, query=SubtreeList, returns=Items[QuestionShape],
        summary="List the open questions of a run, at any depth.",
    ),
    Endpoint(
        method="GET", path=f"{_RUN}/tasks", handle=run_tasks, query=WholeList, returns=Items[TaskShape],
        summary="List the background tasks of a run.",
    ),
    Endpoint(
        method="GET", path="/api/v1/tasks", handle=list_tasks, query=TasksQuery, returns=Items[ListedTask],
        summary="List the background tasks of all runs.",
    ),
    Endpoint(method="GET", path=_TASK, handle=get_task, query=TaskQuery, returns=ListedTask, summary="Show a task."),
    Endpoint(
        method="POST", path=f"{_TASK}/cancel", handle=cancel_task, scope="run", body=CancelTask, returns=ListedTask,
        summary="Stop a background task and wait a few seconds for its end.",
    ),
)  # fmt: skip
