"""Endpoints of threads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.responses import Response

from ..core.messages import Visibility
from ..core.runs import unique
from ..core.state import PersistedState
from ..core.stores import TITLE, ThreadRecord, ThreadSummary
from ..wire.resources import CreateThread, PatchThread, message_json, page_json, thread_json
from ..wire.shapes import Items, MessageShape, NewThread, OneThread, QuestionShape, ThreadShape, ThreadState
from .http import ApiError, Call, Endpoints, Page, not_found
from .queries import EventsQuery
from .runs import WholeList, cursor_of, page_after, page_of, shown_run, tree_of
from .service import check_chosen
from .streams import EventStream, open_thread

ThreadStatusName = Literal["idle", "waiting", "running", "queued", "failed", "completed"]
_THREAD = "/api/v1/threads/{thread_id}"
endpoint = Endpoints()


@endpoint("POST", "/api/v1/threads", scope="run", body=CreateThread, status=201, returns=NewThread)
async def create_thread(call: Call) -> Any:
    """Make a thread."""
    body: CreateThread = call.body
    try:
        messages = tuple(message.as_message() for message in body.messages)
    except ValueError as exc:
        raise ApiError(422, "invalid_body", f"body: {exc}") from None
    thread_id = body.thread_id or f"thread_{unique()}"
    if body.thread_id is not None:
        check_chosen(thread_id)
    record = ThreadRecord(thread_id=thread_id, user_id=call.user.id, messages=messages)
    if not await call.runtime.store.create_thread(record):
        await call.service.check_thread(call.user, thread_id)
        raise ApiError(409, "thread_exists", f"thread {thread_id!r} exists already")
    return {"thread_id": thread_id, "user_id": call.user.id}


async def own_thread(call: Call) -> str:
    """Return the id of the thread that a request names; raise unless it is the user's."""
    thread_id = call.param("thread_id")
    await call.service.check_thread(call.user, thread_id)
    return thread_id


class ThreadsQuery(Page, frozen=True):
    """The query of a list of threads."""

    q: Annotated[str, Meta(max_length=TITLE)] | None = None
    """Only threads with this text in their titles, in upper or lower case."""
    status: ThreadStatusName | None = None


@endpoint("GET", "/api/v1/threads", query=ThreadsQuery, returns=Items[ThreadShape])
async def list_threads(call: Call) -> Any:
    """List the threads of root runs, the one used last first."""
    query: ThreadsQuery = call.query
    found = await call.runtime.threads(
        status=query.status,
        search=query.q,
        limit=query.limit + 1,
        before=cursor_of(query.cursor),
        **call.service.filters(call.user),
    )
    shown, cursor = page_after(found, query.limit, lambda one: (one.used_at, one.thread_id))
    return page_json([thread_json(one) for one in shown], cursor)


@endpoint("GET", _THREAD, returns=OneThread)
async def get_thread(call: Call) -> Any:
    """Show a thread and its newest run."""
    return await _shown(call, await own_thread(call))


@endpoint("PATCH", _THREAD, scope="run", body=PatchThread, returns=OneThread)
async def name_thread(call: Call) -> Any:
    """Set the title of a thread."""
    body: PatchThread = call.body
    thread_id = await own_thread(call)
    await call.runtime.name_thread(thread_id, body.title)
    return await _shown(call, thread_id)


async def _shown(call: Call, thread_id: str) -> dict[str, Any]:
    listed = await call.runtime.threads(thread_id=thread_id)
    # The thread of a child is not listed.
    thread = thread_json(listed[0]) if listed else _of_a_child(thread_id, call.user.id)
    newest = await call.runtime.store.list_runs(thread_id, limit=1)
    return thread | {"run": await shown_run(call.service, newest[0]) if newest else None}


def _of_a_child(thread_id: str, user_id: str) -> dict[str, Any]:
    return thread_json(ThreadSummary(thread_id=thread_id, user_id=user_id, used_at=0.0)) | {"used_at": None}


@endpoint("DELETE", _THREAD, scope="run", status=204)
async def delete_thread(call: Call) -> Any:
    """Delete a thread with its runs and their events."""
    thread_id = await own_thread(call)
    runs = await call.runtime.store.list_runs(thread_id)
    await call.runtime.store.delete_thread(thread_id)
    call.service.feeds.drop([run.identity.run_id for run in runs])
    return Response(status_code=204)


@endpoint("GET", f"{_THREAD}/messages", query=Page, returns=Items[MessageShape])
async def thread_messages(call: Call) -> Any:
    """List the messages."""
    thread_id = await own_thread(call)
    messages = [one for one in await call.runtime.messages(thread_id) if one.visibility is Visibility.ALL]
    page = page_of(messages, call.query)
    return {**page, "items": [message_json(one) for one in page["items"]]}


class StateQuery(Struct, frozen=True):
    """The query of the state of a thread."""

    run_id: str | None = None
    """A run of the thread; else the newest."""
    at: Annotated[int, Meta(ge=1)] | None = None
    """The state after this event of the run's log; else the state now."""


@endpoint("GET", f"{_THREAD}/state", query=StateQuery, returns=ThreadState)
async def thread_state(call: Call) -> Any:
    """Return the persistent state, now or after an earlier event of a run."""
    query: StateQuery = call.query
    thread_id = await own_thread(call)
    found = await call.runtime.store.list_runs(thread_id, limit=1) if query.run_id is None else [
        await call.service.run_of(call.user, query.run_id)
    ]  # fmt: skip
    if found and found[0].identity.thread_id != thread_id:
        raise not_found("run")
    run_id = found[0].identity.run_id if found else None
    thread = await call.runtime.store.load_thread(thread_id)
    state = PersistedState() if thread is None else thread.state
    if query.at is not None or query.run_id is not None:
        if run_id is None:
            raise not_found("run")
        state = await call.runtime.log(found[0].log_id or run_id).state_after(run_id, query.at)
    elif found and found[0].result is not None:
        latest = found[0].result.state
        state = PersistedState(latest.revision, {**state.extensions, **latest.extensions})
    return {"thread_id": thread_id, "run_id": run_id, "revision": state.revision, "values": state.extensions}


@endpoint("GET", f"{_THREAD}/questions", query=WholeList, returns=Items[QuestionShape])
async def thread_questions(call: Call) -> Any:
    """List the open questions of a thread, at any depth."""
    thread_id = await own_thread(call)
    found: list[dict[str, Any]] = []
    for record in reversed(await call.runtime.store.list_runs(thread_id)):
        if not record.has_ended or await call.runtime.log(record.identity.run_id).is_open():
            found += (await tree_of(call.service, record)).questions()
    return page_of(found, call.query)


@endpoint("GET", f"{_THREAD}/events", query=EventsQuery, media="text/event-stream")
async def thread_events(call: Call) -> Response:
    """Follow the events of all runs of a thread. A WebSocket on the same path sends the same."""
    thread_id = await own_thread(call)
    return EventStream(call, await open_thread(call.service, call.user, thread_id, call.query, call.last_event))
