"""Streams of events: of a run, a subtree or a thread, over SSE and WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.concurrency import wait_for_first
from ..core.stores import RunRecord
from .auth import User
from .feeds import BEAT, Batch
from .http import ApiError, Call
from .queries import EventsQuery, Filter, read_place, whole_or_subtree
from .service import Service
from .sources import RunSources, Sources, ThreadSources, read_thread_cursor

_RECONNECT = b"retry: 500\n: the server ends, connect again\n\n"


class ServerCloses(Exception):
    """The server ends: the reader connects again, here or elsewhere."""


async def open_run(
    service: Service, record: RunRecord, query: EventsQuery, last: str | None = None
) -> AsyncGenerator[Batch]:
    """Check the query of a reader, and return the event stream of a run. That of a background child is a subtree.

    `last` is the `Last-Event-ID` that a browser sends when it connects again; it counts more than `after`."""
    log_id, query = await whole_or_subtree(service, record, query)
    wanted, after = Filter(query), read_place(last or query.after)
    if after and not await service.runtime.log(log_id).has_event(after):
        raise ApiError(422, "unknown_cursor", f"the log of run {log_id!r} has no event {after}")
    return _Stream(service, RunSources(service, log_id, after, wanted)).batches()


def log_batches(service: Service, log_id: str, after: int, query: EventsQuery) -> AsyncGenerator[Batch]:
    """Return the event stream of a log, for those who make something else of it."""
    return _Stream(service, RunSources(service, log_id, after, Filter(query))).batches()


async def open_thread(
    service: Service, user: User, thread_id: str, query: EventsQuery, last: str | None = None
) -> AsyncGenerator[Batch]:
    """Check the query of a reader, and return the event stream of a thread."""
    wanted, places = Filter(query), await read_thread_cursor(service, thread_id, last or query.after)
    return _Stream(service, ThreadSources(service, user, thread_id, places, wanted)).batches()


class _Stream:
    """The events of one reader, as they are stored. All logs of a reader share one pace."""

    def __init__(self, service: Service, sources: Sources) -> None:
        self._closing, self._sources = service.closing, sources
        self._now = asyncio.get_running_loop().time
        self._said = self._now()
        """When something was sent last."""
        self._has_caught_up = False

    async def batches(self) -> AsyncGenerator[Batch]:
        try:
            while (found := await self._next()) is not None:
                if found:
                    self._said = self._now()
                for batch in found:
                    yield batch
        finally:
            for source in self._sources.open:
                await source.aclose()

    async def _next(self) -> list[Batch] | None:
        """Return what to send next, perhaps nothing; None at the end. A batch without events says that the reader has caught
        up, or is a sign of life."""
        sources = self._sources
        has_more = await sources.read(self._now())
        is_all = not has_more and not sources.ready
        is_news = is_all and not self._has_caught_up
        gathered = [source for source in sources.open if source.gathering]
        pause = min(
            [source.gathering.seconds_left(self._now()) for source in gathered if not source.ended], default=0.0
        )
        if gathered and (is_news or pause <= 0):
            return [sources.take(source) for source in gathered]
        if is_news:
            self._has_caught_up = True
            return [Batch([], caught_up=sources.cursor)]
        if has_more:  # events that the reader does not want are no sign of life
            return self._sign_of_life(BEAT)
        if gathered and is_all:
            await wait_for_first(self._closing.wait(), seconds=pause)
        elif await sources.is_over():
            return None
        elif notices := [batch for source in sources.open for batch in source.notices()]:
            return notices
        elif not self._closing.is_set():
            await sources.wait()
        if self._closing.is_set():
            raise ServerCloses
        return [] if sources.ready else self._sign_of_life(BEAT / 2)

    def _sign_of_life(self, after: float) -> list[Batch]:
        """Return an empty batch if nothing was sent for some seconds."""
        return [Batch([])] if self._now() - self._said >= after else []


async def stream_run(call: Call, record: RunRecord) -> EventStream:
    """Answer a request with the events of a run."""
    return EventStream(call, await open_run(call.service, record, call.query, call.last_event))


# --- server-sent events


class EventStream(Response):
    """Server-sent events. The batches are read once the client listens; a client that leaves ends the reading."""

    def __init__(self, call: Call, batches: AsyncIterator[Batch]) -> None:
        self.status_code, self.background, self._call, self._batches = 200, None, call, batches
        self._place = contextlib.ExitStack()
        self._place.enter_context(call.service.limits.stream(call.user.id))
        self.init_headers({"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = asyncio.current_task()
        assert reader is not None
        leaving = asyncio.create_task(_left(receive))
        leaving.add_done_callback(lambda done: None if done.cancelled() else reader.cancel())
        metrics = self._call.service.metrics
        metrics.streams += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                await send({"type": "http.response.body", "body": b": open\n\n", "more_body": True})
                await self._send_all(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (asyncio.CancelledError, OSError):
            if not leaving.done():
                raise
            reader.uncancel()
        finally:
            metrics.streams -= 1
            self._place.close()
            leaving.cancel()
            await self._batches.aclose()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    async def _send_all(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        checked = now()
        try:
            async for batch in self._batches:
                if now() - checked >= BEAT:
                    checked = now()
                    if not await self._call.is_still_allowed():
                        return
                self._call.service.metrics.events_sent += len(batch.frames)
                await send({"type": "http.response.body", "body": batch.encode(), "more_body": True})
        except ServerCloses:
            await send({"type": "http.response.body", "body": _RECONNECT, "more_body": True})


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
