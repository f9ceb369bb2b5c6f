"""Streams of events: of a run, a subtree or a thread, over SSE and WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.events import (
    EVENT_TYPES,
    AnyEvent,
    ChildStarted,
    Namespace,
    ReasoningDelta,
    RunFinished,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallStreamDelta,
)
from ..core.stores import RunRecord
from ..log.fanout import Frame, make_frame
from .auth import User
from .feeds import BEAT, Batch
from .http import ApiError, Call, is_text
from .service import Service, owns

_LOOK_FOR_RUNS = 1.0
"""Seconds between two looks for new runs of a thread."""
_RECONNECT = b"retry: 500\n: the server ends, connect again\n\n"


class EventsQuery(Struct, frozen=True):
    """The query of a stream."""

    after: str | None = None
    """The last event the reader has."""
    ns: str | None = None
    """Only events of this subtree, as `tools:a|tools:b`."""
    kinds: str | None = None
    """Only events of these kinds, as `a,b`."""
    until: Literal["idle"] | None = None
    """`idle`: the stream ends where the run waits for a human, too."""
    merge: Annotated[int, Meta(ge=0, le=5_000)] = 0
    """Milliseconds for which deltas of one message are gathered into one."""
    before: Annotated[int, Meta(ge=1, le=10**15)] | None = None
    """Of a page of JSON: only events before this one; without `after`, the last of them."""
    limit: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Of a page of JSON: how many events."""


class Filter:
    """The events of a log that one reader wants."""

    def __init__(self, query: EventsQuery) -> None:
        if query.before is not None or query.limit is not None:
            raise ApiError(422, "invalid_query", "query: before and limit are for pages: send Accept: application/json")
        self._ns: Namespace = tuple(query.ns.split("|")) if query.ns else ()
        self._kinds = frozenset(query.kinds.split(",")) if query.kinds else frozenset[str]()
        if unknown := sorted(self._kinds - set(EVENT_TYPES)):
            raise ApiError(
                422,
                "unknown_kind",
                f"there is no event kind {unknown[0][:80]!r}; the kinds are {', '.join(EVENT_TYPES)}",
            )
        self.until_idle, self.merge = query.until == "idle", query.merge / 1000
        self._wants_all = not self._ns and not self._kinds
        self.is_open = self._wants_all and not self.merge
        """True if the reader gets every event as it is."""

    def is_wanted(self, event: AnyEvent) -> bool:
        return event.ns[: len(self._ns)] == self._ns and (not self._kinds or event.kind in self._kinds)

    def __call__(self, frames: list[Frame]) -> list[Frame]:
        return frames if self._wants_all else [frame for frame in frames if self.is_wanted(frame.event)]

    def notices(self, frame: Frame | None) -> list[Frame]:
        """Return a notice about the owner of a log if its kind is wanted, whatever the subtree."""
        return [frame] if frame is not None and (not self._kinds or frame.event.kind in self._kinds) else []

    def batch(self, frames: list[Frame], prefix: str = "") -> Batch:
        """Return events with their ids. Of deltas that were merged, only the last event moves the cursor."""
        return Batch(merge_deltas(frames), prefix, "last") if self.merge else Batch(frames, prefix)


def read_place(text: str | None) -> int:
    """Return the event number after which to begin."""
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise ApiError(422, "unknown_cursor", f"{text[:40]!r} is not the number of an event: give a whole number")
    return int(text)


async def whole_or_subtree(service: Service, record: RunRecord, query: EventsQuery) -> tuple[str, EventsQuery]:
    """Return the log of a run, and the query of a reader of it: of a background child only its subtree is read."""
    run_id = record.identity.run_id
    log_id = record.log_id or run_id
    if query.ns is None and log_id != run_id:
        for event in await service.runtime.log(log_id).so_far():
            if isinstance(event, ChildStarted) and event.child_run_id == run_id:
                return log_id, replace(query, ns="|".join(event.child_ns))
    return log_id, query


async def open_run(
    service: Service, record: RunRecord, query: EventsQuery, last: str | None = None
) -> AsyncIterator[Batch]:
    """Check the query of a reader, and return the event stream of a run. That of a background child is a subtree.

    `last` is the `Last-Event-ID` that a browser sends when it connects again; it counts more than `after`."""
    log_id, query = await whole_or_subtree(service, record, query)
    wanted, after = Filter(query), read_place(last or query.after)
    if after and not await service.runtime.log(log_id).has_event(after):
        raise ApiError(422, "unknown_cursor", f"the log of run {log_id!r} has no event {after}")
    return _run_batches(service, log_id, after, wanted)


def log_batches(service: Service, log_id: str, after: int, query: EventsQuery) -> AsyncGenerator[Batch]:
    """Return the event stream of a log, for those who make something else of it."""
    return _run_batches(service, log_id, after, Filter(query))


async def _run_batches(service: Service, log_id: str, after: int, wanted: Filter) -> AsyncGenerator[Batch]:
    """Yield the events of a log as they are stored, and an empty batch as a sign of life."""
    now = asyncio.get_running_loop().time
    said = now()
    async with contextlib.aclosing(_Source(service, log_id, after, root_ended=True)) as source:
        feed, follower = source.feed, source.follower
        while True:
            frames = await source.read()
            if frames and wanted.merge:
                await asyncio.sleep(wanted.merge)
                frames += await source.read()
            if frames:
                found = wanted(frames)
                if found or now() - said >= BEAT:  # events that the reader does not want are no sign of life
                    said = now()
                    yield feed.batch(found) if found and wanted.is_open else wanted.batch(found)
            elif follower.ended:
                return
            elif wanted.until_idle and await _is_idle(service, log_id, source.after) and not follower.ready:
                return
            elif notices := source.notices(wanted):
                yield notices[0]
            else:
                changed = follower.changed()
                if not service.closing.is_set():
                    await changed
                if service.closing.is_set():
                    raise ServerCloses
                if not follower.ready and not follower.ended and now() - said >= BEAT / 2:
                    said = now()
                    yield Batch([])


async def stream_run(call: Call, record: RunRecord) -> EventStream:
    """Answer a request with the events of a run."""
    return EventStream(call, await open_run(call.service, record, call.query, call.last_event))


class ServerCloses(Exception):
    """The server ends: the reader connects again, here or elsewhere."""


async def _is_idle(service: Service, log_id: str, after: int) -> bool:
    """Return whether a run has ended or waits, and no event comes after a number."""
    record = await service.runtime.store.load_run(log_id)
    is_idle = record is not None and record.result is not None
    return is_idle and not await service.runtime.log(log_id).has_event(after + 1)


class _Source:
    """A log that is being read: that of a run, or of one of the runs of a thread."""

    def __init__(self, service: Service, run_id: str, after: int = 0, *, root_ended: bool = False) -> None:
        self._feeds = service.feeds
        self.feed, self.follower = self._feeds.open(run_id, after)
        self.root_ended = root_ended
        self._rest: list[Frame] = []
        """Events after the end of the root run that were read with it."""

    @property
    def after(self) -> int:
        return self._rest[0].seq - 1 if self._rest else self.follower.seq

    def notices(self, wanted: Filter) -> list[Batch]:
        """Return the notice about the owner that the reader wants and does not have."""
        notice = self.follower.news()
        return [] if notice is None else [Batch([frame]) for frame in wanted.notices(make_frame(notice))]

    async def aclose(self) -> None:
        await self._feeds.leave(self.feed, self.follower)

    async def read(self) -> list[Frame]:
        """Return the next events; while the root run has not ended, none after its end."""
        if self._rest:
            frames, self._rest = self._rest, []
            return frames
        frames = await self.follower.available()
        return frames if self.root_ended else self._until_end(frames)

    def _until_end(self, frames: list[Frame]) -> list[Frame]:
        for place, frame in enumerate(frames):
            event = frame.event
            if isinstance(event, RunFinished) and event.run_id == self.feed.log_id and event.status.is_terminal:
                self.root_ended = True
                self._rest = frames[place + 1 :]
                return frames[: place + 1]
        return frames


# --- threads


async def open_thread(
    service: Service, user: User, thread_id: str, query: EventsQuery, last: str | None = None
) -> AsyncIterator[Batch]:
    """Check the query of a reader, and return the event stream of a thread."""
    wanted = Filter(query)
    first_run, after = await _thread_place(service, thread_id, last or query.after)
    return _ThreadReader(service, user, thread_id, first_run, after, wanted).batches()


async def _thread_place(service: Service, thread_id: str, cursor: str | None) -> tuple[str | None, int]:
    """Return the run and event after which a reader of a thread continues."""
    if not cursor:
        return None, 0
    run_id, _, seq = cursor.rpartition(":")
    record = await service.runtime.store.load_run(run_id) if run_id and is_text(run_id) else None
    after = read_place(seq)
    is_known = record is not None and record.identity.thread_id == thread_id and seq
    if not is_known or (after and not await service.runtime.log(run_id).has_event(after)):
        raise ApiError(422, "unknown_cursor", f"{cursor[:80]!r} is not an event of this thread")
    return run_id, after


class _ThreadReader:
    """Reads the runs of a thread, one after the other.

    Events that background tasks append after the end of their run are sent as they are stored, between those of later
    runs. They have no id: after a reconnect, those of logs that have not ended are sent again.
    """

    def __init__(
        self, service: Service, user: User, thread_id: str, first_run: str | None, after: int, wanted: Filter
    ) -> None:
        self._service, self._user, self._thread_id, self._wanted = service, user, thread_id, wanted
        self._first_run, self._after = first_run, after
        self._seen: set[str] = set()
        self._main: _Source | None = None
        self._tails: list[_Source] = []

    async def batches(self) -> AsyncIterator[Batch]:
        now = asyncio.get_running_loop().time
        said = now()
        try:
            while True:
                batches = [*await self._read_tails(), *await self._read_main()]
                batches = batches or [batch for source in self._sources() for batch in source.notices(self._wanted)]
                for batch in batches:
                    if batch.frames:
                        said = now()
                        yield batch
                if batches:
                    continue
                if await self._is_over():
                    return
                await self._any_changed(self._sources())
                if self._service.closing.is_set():
                    raise ServerCloses
                if now() - said >= BEAT:
                    said = now()
                    yield Batch([])
        finally:
            for source in self._sources():
                await source.aclose()

    def _sources(self) -> list[_Source]:
        return [*self._tails, *([self._main] if self._main is not None else [])]

    async def _read_tails(self) -> list[Batch]:
        batches: list[Batch] = []
        for source in list(self._tails):
            was_ended = source.root_ended
            frames = await source.read()
            if not frames and source.follower.ended:
                self._tails.remove(source)
                await source.aclose()
            elif frames:
                batches.append(Batch(self._wanted(frames) if was_ended else [], ids="none"))
        return batches

    async def _read_main(self) -> list[Batch]:
        """Return the new batches of the present run; none if there is nothing new. A batch may be empty, too."""
        if self._main is None:
            self._main = await self._next_run()
        main = self._main
        if main is None:
            return []
        frames = await main.read()
        if main.root_ended:
            self._tails.append(main)
            self._main = None
        elif not frames and main.follower.ended:
            self._main = None
            await main.aclose()
            return [Batch([])]
        return [self._wanted.batch(self._wanted(frames), f"{main.feed.log_id}:")] if frames else []

    async def _next_run(self) -> _Source | None:
        """Open the oldest run that was not read yet. Of runs before the cursor, only open tasks are of interest."""
        runtime = self._service.runtime
        newest = await self._runs(limit=1)
        if not newest or newest[0].identity.run_id in self._seen:
            return None
        runs = (await self._runs())[::-1]
        ids = [run.identity.run_id for run in runs]
        start = ids.index(self._first_run) if self._first_run in ids else 0
        for place, run in enumerate(runs):
            run_id = run.identity.run_id
            if run_id in self._seen:
                continue
            self._seen.add(run_id)
            is_first = run_id == self._first_run
            if is_first and run.has_ended and await self._has_read_end(run_id):
                self._tails.append(_Source(self._service, run_id, self._after, root_ended=True))
            elif place >= start:
                return _Source(self._service, run_id, self._after if is_first else 0)
            elif await runtime.log(run_id).is_open():
                self._tails.append(_Source(self._service, run_id))
        return None

    async def _runs(self, limit: int | None = None) -> list[RunRecord]:
        """Return the user's runs of the thread, which may have been deleted and created again."""
        store = self._service.runtime.store
        return await store.list_runs(self._thread_id, limit=limit, **self._service.filters(self._user))

    async def _has_read_end(self, run_id: str) -> bool:
        """Return whether the cursor is at the end of its run or later: what follows are events of tasks."""
        ends = [
            event.seq
            for event in await self._service.runtime.log(run_id).so_far()
            if isinstance(event, RunFinished) and event.run_id == run_id and event.status.is_terminal
        ]
        return bool(ends) and self._after >= ends[-1]

    async def _any_changed(self, sources: Sequence[_Source]) -> None:
        """Return when a source may have something new, a run is started here, or it is time to look for others."""
        futures = [source.follower.changed() for source in sources]
        futures.append(self._service.feeds.run_started())
        try:
            await asyncio.wait(futures, timeout=_LOOK_FOR_RUNS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in futures:
                future.cancel()

    async def _is_over(self) -> bool:
        """Return whether the stream ends: the thread is deleted or, with `until=idle`, nothing works on it."""
        main = self._main
        if main is None:
            owner = await self._service.runtime.store.user_of_thread(self._thread_id)
            return self._wanted.until_idle or owner is None or not owns(self._user, owner[0])
        return self._wanted.until_idle and await _is_idle(self._service, main.feed.log_id, main.after)


# --- merging

_MERGED = (TextDelta, ReasoningDelta, ToolCallArgsDelta, ToolCallStreamDelta)


def merge_deltas(frames: Iterable[Frame]) -> list[Frame]:
    """Join the deltas of each message and each call up to the next other event of their run.

    A joined delta has the number of its last part, so the numbers stay in order.
    """
    found: list[AnyEvent] = []
    open_at: dict[str, dict[tuple[type[Any], str], int]] = {}
    for frame in frames:
        event = frame.event
        if not isinstance(event, _MERGED):
            open_at.pop(event.run_id, None)
            found.append(event)
            continue
        key = event.__class__, getattr(event, "message_id", None) or getattr(event, "call_id", "")
        places = open_at.setdefault(event.run_id, {})
        if key in places:
            event = replace(event, delta=getattr(found[places[key]], "delta", "") + event.delta)
            found[places[key]] = event
        else:
            places[key] = len(found)
            found.append(event)
    return [make_frame(event) for event in sorted(found, key=lambda event: event.seq)]


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
