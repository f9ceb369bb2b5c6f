"""Endpoints of agents and runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from ..core.agents import Agent
from ..core.errors import UnknownAgent
from ..core.state import PersistedState
from ..core.stores import Place, RunRecord
from ..log.fork import ForkMarks
from ..runtime import Run, Runtime
from ..storage.sql import SqlStore
from ..wire.resources import (
    CancelRun,
    CancelTask,
    Decisions,
    ForkRun,
    SendMessages,
    StartRun,
    as_input,
    decode_cursor,
    encode_cursor,
    fields_of,
    message_json,
    page_json,
    result_json,
    run_json,
)
from ..wire.shapes import (
    AgentShape,
    ChildShape,
    EventPage,
    Items,
    ListedTask,
    OneRun,
    PartShape,
    QuestionShape,
    ResultShape,
    RunShape,
    RunState,
    SnapshotShape,
    TaskShape,
)
from ..wire.snapshot import SnapshotTree
from .event_pages import event_page
from .http import ApiError, Call, Endpoints, Page, check_scope, json_response, not_found
from .parts import PartsQuery, open_parts
from .queries import EventsQuery
from .service import MOST_WAIT, Service
from .streams import EventStream, stream_run
from .tasks import digest_of, find_started, run_id_of, start_once

T = TypeVar("T")
RunStatusName = Literal[
    "queued", "running", "completed", "failed", "cancelled", "timeout", "suspended", "waiting_input", "waiting_auth"
]
TaskStatusName = Literal["pending", "running", "completed", "failed", "cancelled"]


class RunsQuery(Page, frozen=True):
    """The query of a list of runs."""

    thread_id: str | None = None
    status: RunStatusName | None = None


class TasksQuery(Page, frozen=True):
    """The query of a list of tasks. A page covers `limit` runs."""

    thread_id: str | None = None
    status: TaskStatusName | None = None
    agent: str | None = None


class TaskQuery(Struct, frozen=True):
    """The root run of a task; without it, the task is looked for."""

    run_id: str | None = None


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


def page_after(found: list[T], limit: int, place_of: Callable[[T], Place]) -> tuple[list[T], str | None]:
    """Return the first items of a list, and the cursor of the next page if there are more."""
    shown = found[:limit]
    return shown, encode_cursor(place_of(shown[-1])) if len(found) > limit else None


def cursor_of(given: str | None) -> Place | None:
    if given is None:
        return None
    try:
        return decode_cursor(given)
    except ValueError as exc:
        raise ApiError(422, "unknown_cursor", str(exc)) from None


_RUN = "/api/v1/runs/{run_id}"
_TASK = "/api/v1/tasks/{background_task_id}"
endpoint = Endpoints()

# --- agents


@endpoint("GET", "/api/v1/agents", query=WholeList, returns=Items[AgentShape])
async def list_agents(call: Call) -> Any:
    """List the agents."""
    return page_of([agent_json(call.runtime, agent) for agent in call.runtime.agents.values()], call.query)


@endpoint("GET", "/api/v1/agents/{agent}", returns=AgentShape)
async def get_agent(call: Call) -> Any:
    """Show an agent."""
    agent = call.runtime.agents.get(call.param("agent"))
    if agent is None:
        raise not_found("agent")
    return agent_json(call.runtime, agent)


def agent_json(runtime: Runtime, agent: Agent) -> dict[str, Any]:
    model: Any = agent.model
    return {
        "served": runtime._is_served(agent.name),  # pyright: ignore[reportPrivateUsage]  # for lists of servers
        **fields_of(agent, "name", "description", "max_steps"),
        "model": model if isinstance(model, str | None) else getattr(model, "name", type(model).__name__),
        "tools": [{"name": name, "description": one.descriptor.description} for name, one in agent.toolbox.items()],
        "subagents": [child if isinstance(child, str) else child.name for child in agent.subagents],
        "handoffs": [target if isinstance(target, str) else target.name for target in agent.handoffs],
    }


# --- runs


@endpoint("POST", "/api/v1/runs", scope="run", body=StartRun, status=201, returns=RunState)
async def start_run(call: Call) -> Any:
    """Start a run; it is stored when this answers. The same Idempotency-Key again is the same run."""
    body: StartRun = call.body
    run_id, digest, given = _chosen_id(call), digest_of(body), _input_of(body)
    if (known := await find_started(call, run_id, digest)) is not None:
        return _state_json(known)
    if body.agent not in call.runtime.agents:
        raise UnknownAgent(body.agent, tuple(call.runtime.agents))
    run = await start_once(
        call,
        body.agent,
        given,
        run_id,
        digest,
        body.thread_id,
        context=body.context,
        state=None if body.state is None else PersistedState(extensions=body.state),
        limits=body.limits,
        when_busy=body.when_busy,
        queue=body.queue,
        priority=body.priority,
        delay=body.delay,
    )
    return await _started_json(call, run)


def _input_of(body: StartRun | ForkRun | SendMessages) -> Any:
    try:
        return None if body.input is None else as_input(body.input)
    except ValueError as exc:
        raise ApiError(422, "invalid_body", f"body: {exc}") from None


def _chosen_id(call: Call) -> str | None:
    """Return the run id that is derived from the idempotency key of a request."""
    key = call.request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= 200:
        raise ApiError(422, "invalid", "an Idempotency-Key has 1 to 200 characters")
    return run_id_of(call.user, f"key:{key}")


def _state_json(record: RunRecord) -> dict[str, Any]:
    identity = record.identity
    return {"run_id": identity.run_id, "thread_id": identity.thread_id, "status": record.status}


async def _started_json(call: Call, run: Run) -> dict[str, Any]:
    call.service.feeds.notice_run()
    record = await call.runtime.store.load_run(run.run_id)
    known = {"run_id": run.run_id, "thread_id": run.thread_id, "status": "running"}
    return known if record is None else _state_json(record)


@endpoint("GET", "/api/v1/runs", query=RunsQuery, returns=Items[RunShape])
async def list_runs(call: Call) -> Any:
    """List runs, newest first."""
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
    return page_after(found, query.limit, _place_in_list)


def _place_in_list(record: RunRecord) -> Place:
    return record.started_at, record.identity.run_id


async def shown_run(service: Service, record: RunRecord, ended_at: float | None = None) -> dict[str, Any]:
    """Return a run as JSON; a running one is `orphaned` if its process is gone and no other continues it yet."""
    log_id = record.log_id or record.identity.run_id
    orphaned = record.result is None and await service.runtime.log(log_id).is_orphaned()
    return run_json(record, ended_at, orphaned=orphaned)


async def ends_of(service: Service, records: list[RunRecord]) -> dict[str, float]:
    """Return when runs ended, where the store knows it."""
    store = service.runtime.store
    return await store.ends_of([one.identity.run_id for one in records]) if isinstance(store, SqlStore) else {}


@endpoint("GET", _RUN, returns=OneRun)
async def get_run(call: Call) -> Any:
    """Show a run, with what it has used so far; of one that has not begun, with its input."""
    record = await call.run()
    run_id = record.identity.run_id
    ends = await ends_of(call.service, [record])
    shown = await shown_run(call.service, record, ends.get(run_id))
    log = call.runtime.log(record.log_id or run_id)
    marks = ForkMarks(run_id)
    usage, cost_known = await log.usage(run_id, marks)
    if record.result is None:
        shown["usage"] = msgspec.structs.asdict(usage)
    given = await log.input() if record.status == "queued" else ()
    known = {"cost_known": cost_known, "can_fork": sorted(marks.message_ids)}
    return {**shown, **known, "input": [message_json(message) for message in given]}


@endpoint("GET", f"{_RUN}/result", query=WaitQuery, returns=ResultShape, more={202: RunState})
async def get_result(call: Call) -> Any:
    """Return the result of a run that has ended or waits; 202 while it works."""
    query: WaitQuery = call.query
    record, run_id = await call.run(), call.param("run_id")
    if record.result is None and query.wait > 0:
        found = await call.service.unless_closing(call.runtime.result(run_id), min(query.wait, MOST_WAIT))
        if found is not None:
            return result_json(found)
        record = await call.run()
    if record.result is None:
        return json_response(_state_json(record), 202)
    return result_json(record.result)


@endpoint("POST", f"{_RUN}/cancel", scope="run", body=CancelRun, returns=RunState)
async def cancel_run(call: Call) -> Any:
    """Stop a run, or one below it, and wait for its end."""
    body: CancelRun = call.body
    run_id = (await call.run()).identity.run_id
    result = await call.runtime.cancel(run_id, ns=body.ns, tasks=body.tasks, reason=body.reason, grace=body.grace)
    return {"run_id": result.run_id, "thread_id": result.thread_id, "status": result.status.value}


@endpoint("POST", f"{_RUN}/messages", scope="run", body=SendMessages, status=202, returns=RunState)
async def send_messages(call: Call) -> Any:
    """Give a run at work messages, which its model reads with its next request."""
    body: SendMessages = call.body
    record = await call.run()
    await call.runtime.send(record.identity.run_id, _input_of(body), ns=body.ns)
    return _state_json(record)


@endpoint("POST", f"{_RUN}/decisions", scope="answer", body=Decisions, status=202, returns=RunState)
async def decide(call: Call) -> Any:
    """Answer a run that waits."""
    body: Decisions = call.body
    record = await call.service.run_to_continue(call.user, call.param("run_id"))
    run = call.runtime.stream_resume(record.identity.run_id, body.as_decisions(), by=call.user.id)
    await run.stored()
    place = await run.place()
    return await _started_json(call, run) | {"after": place}


@endpoint("POST", f"{_RUN}/fork", scope="run", body=ForkRun, status=201, returns=RunState)
async def fork_run(call: Call) -> Any:
    """Continue a run from an earlier event, on a new thread."""
    body: ForkRun = call.body
    if body.decisions is not None:
        check_scope(call.user, "answer")
    run_id = (await call.service.run_to_continue(call.user, call.param("run_id"))).identity.run_id
    decisions = None if body.decisions is None else Decisions(body.decisions).as_decisions()
    run = await call.runtime.fork(
        run_id, at=body.after, message_id=body.message_id, input=_input_of(body), decisions=decisions, by=call.user.id
    )
    call.note_run(run.run_id)
    await run.stored()
    return await _started_json(call, run) | {"after": await run.place()}


@endpoint("GET", f"{_RUN}/events", query=EventsQuery, media="text/event-stream", page=EventPage)
async def run_events(call: Call) -> Any:
    """Follow the events of a run, from any number. A WebSocket on the same path sends the same. With `Accept:
    application/json`, return a page of the stored ones."""
    record = await call.run()
    if call.wants_json:
        return await event_page(call.service, record, call.query)
    return await stream_run(call, record)


@endpoint("GET", f"{_RUN}/parts", query=PartsQuery, media="text/event-stream", returns=PartShape)
async def run_parts(call: Call) -> Response:
    """Follow a run as LangGraph-shaped parts, in which every sub-agent is a call named `task`."""
    return EventStream(call, await open_parts(call.service, await call.run(), call.query, call.last_event))


# --- trees


async def tree_of(service: Service, record: RunRecord) -> SnapshotTree:
    """Return the tree of the log of a run, as far as it is stored."""
    return await service.runtime.log(record.log_id or record.identity.run_id).tree()


async def _subtree(call: Call) -> tuple[RunRecord, SnapshotTree, tuple[str, ...]]:
    """Return the run of a request, its tree, and the namespace in it: the one given, as events have it, or that of the run,
    a background child perhaps."""
    record = await call.run()
    tree = await tree_of(call.service, record)
    if call.query.ns:
        return record, tree, tuple(call.query.ns.split("|"))
    node = tree.runs.get(record.identity.run_id)
    return record, tree, () if node is None else node.ns


@endpoint("GET", f"{_RUN}/snapshot", query=SubtreeQuery, returns=SnapshotShape)
async def snapshot(call: Call) -> Any:
    """Return the tree of a run as it is stored now, with the number of its last event."""
    record, tree, ns = await _subtree(call)
    found = tree.snapshot(ns)
    if found is None:
        if call.query.ns:
            raise not_found("subtree")
        found = dict[str, Any](seq=0, run=None, questions=[], tasks=[])
    return {**found, "status": record.status}


@endpoint("GET", f"{_RUN}/children", query=SubtreeList, returns=Items[ChildShape])
async def run_children(call: Call) -> Any:
    """List the children of a run, or of a run below it."""
    _, tree, ns = await _subtree(call)
    found = tree.children(ns)
    if found is None and call.query.ns:
        raise not_found("subtree")
    return page_of(found or [], call.query)


@endpoint("GET", f"{_RUN}/questions", query=SubtreeList, returns=Items[QuestionShape])
async def run_questions(call: Call) -> Any:
    """List the open questions of a run, at any depth."""
    _, tree, ns = await _subtree(call)
    return page_of(tree.questions(ns), call.query)


# --- background tasks


@endpoint("GET", f"{_RUN}/tasks", query=WholeList, returns=Items[TaskShape])
async def run_tasks(call: Call) -> Any:
    """List the background tasks of a run."""
    return page_of((await tree_of(call.service, await call.run())).task_list(), call.query)


@endpoint("GET", "/api/v1/tasks", query=TasksQuery, returns=Items[ListedTask])
async def list_tasks(call: Call) -> Any:
    """List the background tasks of all runs."""
    query: TasksQuery = call.query
    shown, cursor = await _page_of_runs(call, query)
    tasks = [task for record in shown for task in await _tasks_of(call, record)]
    wanted = [task for task in tasks if query.status in (None, task["status"]) and query.agent in (None, task["agent"])]
    return page_json(wanted, cursor)


async def _tasks_of(call: Call, record: RunRecord) -> list[dict[str, Any]]:
    """Return the background tasks of a run, with the log that has them."""
    place = {"log_id": record.identity.run_id, "thread_id": record.identity.thread_id}
    return [{**place, **task} for task in (await tree_of(call.service, record)).task_list()]


@endpoint("GET", _TASK, query=TaskQuery, returns=ListedTask)
async def get_task(call: Call) -> Any:
    """Show a task."""
    return await _find_task(call, call.query.run_id)


@endpoint("POST", f"{_TASK}/cancel", scope="run", body=CancelTask, returns=ListedTask)
async def cancel_task(call: Call) -> Any:
    """Stop a background task and wait a few seconds for its end."""
    body: CancelTask = call.body
    task = await _find_task(call, body.run_id)
    call.note_run(task["log_id"])
    await call.runtime.cancel_task(task["log_id"], task["task_id"])
    return await _find_task(call, task["log_id"])


async def _find_task(call: Call, run_id: str | None) -> dict[str, Any]:
    """Return a background task of the user; `run_id`: the run that has it, if it is known."""
    task_id = call.param("background_task_id")
    async for record in _runs_with_tasks(call, run_id):
        for task in await _tasks_of(call, record):
            if task["task_id"] == task_id:
                return task
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
    place: Place | None = None
    while found := await store.list_runs(limit=100, before=place, **service.filters(call.user)):
        for record in found:
            if record.identity.run_id not in at_work:
                yield record
        place = _place_in_list(found[-1])
