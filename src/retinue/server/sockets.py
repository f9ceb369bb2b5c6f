"""Events over WebSocket: one run or thread on its own path, or many subscriptions on `/api/v1/events`, also to rosters of runs
and to the list of threads.

A message is a JSON object, or an array of such objects: events that are sent together. A refusal closes the socket with
4000 and its HTTP status, because a page cannot read the answer to a handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..core.concurrency import Jobs, cancel_all, wait_for_first
from ..log.fanout import Frame
from .auth import User
from .feeds import BEAT, Batch
from .http import (
    ApiError,
    admit,
    as_api_error,
    check_origin,
    check_path,
    error_response,
    headers_of,
    is_text,
    read_query,
    still_allowed,
)
from .queries import EventsQuery
from .rosters import RosterView
from .service import Service
from .shape_errors import explain
from .streams import ServerCloses, open_run, open_thread
from .thread_changes import thread_changes

RESTART, GOING_WRONG, FORBIDDEN, REFUSED = 1012, 1011, 1008, 4000
_CLOSING = RESTART, "connect again"
_MOST_SUBSCRIPTIONS = 256
THREADS = "threads"
"""The subscription that follows the list of threads, not one run or thread."""
_BEAT = b'{"beat":true}'
_MOST_REASON = 120
"""Bytes of the reason with which a socket is closed."""
_LEFT = (WebSocketDisconnect, OSError, RuntimeError)
"""The errors that a socket raises once the client has left, or it was closed here."""
Name = Annotated[str, Meta(min_length=1, max_length=200)]
"""The name of a subscription: every message of it repeats the name."""
Field = Annotated[str, Meta(max_length=10_000)]

MOST_WATCHED = 500
"""Runs of a window."""

End = tuple[int, str]
"""The code and the reason with which a socket is closed."""
Work = Callable[[], Coroutine[Any, Any, End | None]]
"""A part of the work on a socket. It returns None if the client has left."""


class Request(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a client: begin to follow a run or a thread under a name of its own, or stop that."""

    subscribe: Name | None = None
    unsubscribe: Name | None = None
    run_id: Field | None = None
    thread_id: Field | None = None
    after: Field | int | None = None
    ns: Field | None = None
    kinds: Field | None = None
    until: Literal["idle"] | None = None
    merge: Annotated[int, Meta(ge=0, le=5_000)] = 0
    roster: bool = False
    """Follow how the runs below a run stand, not its events."""
    watch: Name | None = None
    """The roster of which `window` is to be looked at from now on."""
    window: Annotated[list[Field], Meta(max_length=MOST_WATCHED)] | None = None
    """The runs of a roster whose last words are sent, by namespace, as `tools:a|tools:b`."""

    def query(self) -> EventsQuery:
        after = None if self.after is None else str(self.after)
        return EventsQuery(after=after, ns=self.ns, kinds=self.kinds, until=self.until, merge=self.merge)


def routes(service: Service) -> list[WebSocketRoute]:
    async def one(socket: WebSocket, user: User) -> list[Work]:
        query, last = read_query(socket, EventsQuery), socket.headers.get("last-event-id")
        batches = await _open(service, user, query, last, **socket.path_params)
        return [partial(_send_events, socket, batches), partial(_until_left, socket)]

    async def many(socket: WebSocket, user: User) -> list[Work]:
        read_query(socket, None)
        subscriptions = Subscriptions(service, socket, user)
        return [subscriptions.receive_all, subscriptions.until_closing]

    return [
        WebSocketRoute("/api/v1/runs/{run_id}/events", partial(_serve, service, one)),
        WebSocketRoute("/api/v1/threads/{thread_id}/events", partial(_serve, service, one)),
        WebSocketRoute("/api/v1/events", partial(_serve, service, many)),
    ]


async def _open(
    service: Service,
    user: User,
    query: EventsQuery,
    last: str | None = None,
    *,
    run_id: str | None = None,
    thread_id: str | None = None,
) -> AsyncGenerator[Batch]:
    """Return the event stream of a run or a thread of the user."""
    if run_id is not None:
        return await open_run(service, await service.run_of(user, run_id), query, last)
    assert thread_id is not None
    await service.check_thread(user, thread_id)
    return await open_thread(service, user, thread_id, query, last)


async def _serve(
    service: Service, begin: Callable[[WebSocket, User], Awaitable[list[Work]]], socket: WebSocket
) -> None:
    """Check a request, then do its work until a part of it ends or the token is revoked. That end closes the socket."""
    with contextlib.ExitStack() as stack:
        try:
            headers = headers_of(socket)
            user = await admit(service, headers, "read")
            check_origin(service, headers)
            check_path(socket)
            stack.enter_context(service.limits.stream(user.id))
            works = await begin(socket, user)
        except Exception as exc:
            await refuse(socket, as_api_error(exc))
            return
        try:
            await socket.accept()
        except _LEFT:
            return
        works.append(partial(_until_revoked, service, headers, user))
        jobs = Jobs()
        tasks = [jobs.start(work()) for work in works]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await jobs.close()
        ends = [task.result() for task in tasks if task in done and task.exception() is None]
        with contextlib.suppress(*_LEFT):
            for end in ends:
                if end is not None:
                    await socket.close(*end)


async def _until_revoked(service: Service, headers: Mapping[str, str], user: User) -> End:
    """Return when the token of a socket is no longer valid."""
    while await still_allowed(service, headers, user):  # noqa: ASYNC110 - another process may revoke it
        await asyncio.sleep(BEAT)
    return FORBIDDEN, "the token is no longer valid"


async def refuse(socket: WebSocket, error: ApiError) -> None:
    """Close a socket with the reason of a refusal."""
    with contextlib.suppress(*_LEFT):
        await socket.accept()
        await socket.close(REFUSED + error.status, _reason(error.detail))


def _reason(detail: str) -> str:
    """Return the start of a text, as long as the reason of a close may be."""
    return detail.encode()[:_MOST_REASON].decode(errors="ignore")


async def _until_left(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _send_events(socket: WebSocket, batches: AsyncGenerator[Batch]) -> End | None:
    """Send the events of one run or thread: each object is a flat event."""
    try:
        async with contextlib.aclosing(batches):
            async for batch in batches:
                if batch.frames:
                    await _send(socket, _joined([batch.data_of(frame, with_id=True) for frame in batch.frames]))
                elif batch.caught_up is not None:
                    await _send(socket, msgspec.json.encode({"caught_up": batch.caught_up}))
                else:
                    await _send(socket, _BEAT)
        return 1000, ""
    except ServerCloses:
        return _CLOSING
    except WebSocketDisconnect:
        return None
    except Exception as exc:
        return GOING_WRONG, _reason(as_api_error(exc).detail)


def _joined(shown: list[bytes]) -> bytes:
    """Return JSON objects as one message."""
    return shown[0] if len(shown) == 1 else b"[%b]" % b",".join(shown)


async def _send(socket: WebSocket, data: bytes) -> None:
    """Send a message; raise WebSocketDisconnect if the client has left, also while this waits for it to read."""
    try:
        await socket.send({"type": "websocket.send", "text": data.decode()})
    except _LEFT as exc:
        raise WebSocketDisconnect from exc


class Subscriptions:
    """Many runs and threads over one socket, and the list of threads. Each message of the server names the subscription it
    belongs to.

    `{"subscription": name, "id": …, "event": …}`, `{"subscription": name, "ended": true}`, or `{"subscription": name,
    "error": {"detail", "code"}}`. One task a subscription sends; the socket takes one message at a time.
    """

    def __init__(self, service: Service, socket: WebSocket, user: User) -> None:
        self._service, self._socket, self._user = service, socket, user
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rosters: dict[str, RosterView] = {}
        self._lock = asyncio.Lock()

    async def until_closing(self) -> End:
        """Show from time to time that the server is there; return when it ends."""
        while True:
            await wait_for_first(self._service.closing.wait(), seconds=BEAT)
            if self._service.closing.is_set():
                return _CLOSING
            await self._send(_BEAT)

    async def receive_all(self) -> None:
        """Do what the client asks for, until it leaves."""
        try:
            while (message := await self._socket.receive())["type"] != "websocket.disconnect":
                await self._receive(message)
        finally:
            await cancel_all(self._tasks.values())

    async def _receive(self, message: Any) -> None:
        try:
            request = msgspec.json.decode(message.get("text") or message.get("bytes") or b"", type=Request)
        except (ValueError, RecursionError) as exc:
            await self._tell(None, error={"detail": f"not a request: {explain(str(exc), Request)}", "code": "invalid"})
            return
        given = [value for value in msgspec.structs.astuple(request) if isinstance(value, str)]
        if not all(is_text(value) for value in (*given, *(request.window or ()))):
            await self._tell(None, error={"detail": "a field has a character that is no text", "code": "invalid"})
            return
        if request.subscribe is None and request.unsubscribe is None and request.watch is None:
            await self._tell(None, error={"detail": "a request has subscribe, unsubscribe or watch", "code": "invalid"})
        if request.watch is not None and (roster := self._rosters.get(request.watch)) is not None:
            roster.look_at(request.window or ())
        if request.unsubscribe is not None and (task := self._tasks.get(request.unsubscribe)) is not None:
            await cancel_all([task])  # only then is the name free for another
            self._tasks.pop(request.unsubscribe, None)
        if request.subscribe is not None:
            await self._subscribe(request.subscribe, request)

    async def _subscribe(self, name: str, request: Request) -> None:
        if name in self._tasks:
            await self._tell(name, error={"detail": f"{name[:80]!r} is in use", "code": "in_use"})
        elif len(self._tasks) >= _MOST_SUBSCRIPTIONS:
            detail = f"one socket carries at most {_MOST_SUBSCRIPTIONS} subscriptions"
            await self._tell(name, error={"detail": detail, "code": "too_many"})
        else:
            self._tasks[name] = asyncio.create_task(self._follow(name, request))

    async def _follow(self, name: str, request: Request) -> None:
        try:
            self._service.limits.count_request(self._user.id)
            if request == Request(subscribe=THREADS):
                return await self._follow_threads(name)
            if (request.run_id is None) == (request.thread_id is None):
                problem = f"a subscription names either a run_id or a thread_id, or is called {THREADS!r}"
                raise ApiError(422, "invalid", problem)
            if request.roster:
                return await self._follow_roster(name, request)
            names = {"run_id": request.run_id, "thread_id": request.thread_id}
            opened = await _open(self._service, self._user, request.query(), **names)
            async with contextlib.aclosing(opened):
                async for batch in opened:
                    if batch.frames:
                        await self._send(_joined([_named(name, batch, frame) for frame in batch.frames]))
                    elif batch.caught_up is not None:
                        await self._tell(name, caught_up=batch.caught_up)
            await self._tell(name, ended=True)
        except ServerCloses:
            return  # the socket is closed for all
        except Exception as exc:
            await self._tell(name, error=msgspec.json.decode(bytes(error_response(exc).body)))
        finally:
            self._tasks.pop(name, None)

    async def _follow_threads(self, name: str) -> None:
        """Send what changes in the list of the user's threads."""
        async with contextlib.aclosing(thread_changes(self._service, self._user)) as changes:
            async for thread in changes:
                await self._tell(name, **({"caught_up": True} if thread is None else {"thread_updated": thread}))

    async def _follow_roster(self, name: str, request: Request) -> None:
        """Send how the runs below a run stand."""
        if request.run_id is None or request != Request(
            subscribe=name, run_id=request.run_id, ns=request.ns, roster=True, window=request.window
        ):
            raise ApiError(422, "invalid", "a roster is of a run_id, with ns and window; it takes no other field")
        record = await self._service.run_of(self._user, request.run_id)
        roster = self._rosters[name] = RosterView(self._service, request.window or ())
        try:
            async with contextlib.aclosing(roster.messages(record, request.ns)) as messages:
                async for message in messages:
                    await self._tell(name, roster=message)
        finally:
            del self._rosters[name]
        await self._tell(name, ended=True)

    async def _tell(self, name: str | None, **more: Any) -> None:
        await self._send(msgspec.json.encode({"subscription": name, **more}))

    async def _send(self, data: bytes) -> None:
        """Send a message. What comes after the client has left is dropped; `serve` ends soon."""
        async with self._lock:
            with contextlib.suppress(WebSocketDisconnect):
                await _send(self._socket, data)


def _named(name: str, batch: Batch, frame: Frame) -> bytes:
    """Return an event of a subscription, with its id on the stream if it has one."""
    shown_id = b'"id":%b,' % msgspec.json.encode(batch.id_of(frame)) if batch.id_of(frame) else b""
    return b'{"subscription":%b,%b"event":%b}' % (msgspec.json.encode(name), shown_id, batch.data_of(frame))
