"""Streams of LangGraph-shaped parts: the events of a run's log as a front end reads them.

A part follows from all events before it, so the log is read from its beginning; a reader that connects again gets the
parts after the last one it has. An event may have several parts: the last has the number of the event as its id, the
others `<number>.1`, `<number>.2` and so on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Literal

from msgspec import Struct

from ..core.content import to_json_bytes
from ..core.events import Namespace
from ..core.stores import RunRecord
from ..log.fanout import Frame
from ..wire.parts import PartsProjection
from .feeds import BEAT, Batch
from .http import ApiError
from .queries import EventsQuery, read_place, subtree_of
from .service import Service
from .streams import log_batches


class PartsQuery(Struct, frozen=True):
    """The query of a stream of parts."""

    modes: str = "updates"
    """The modes, as `updates,messages`."""
    after: str | None = None
    """The last part the reader has, or the number of an event."""
    ns: str | None = None
    """Only parts of this subtree, as `tools:a|tools:b`."""
    until: Literal["idle"] | None = None
    """`idle`: the stream ends where the run waits for a human, too."""


class _Reader:
    """Makes the parts of one reader from the frames of a log."""

    def __init__(self, query: PartsQuery, ns: Namespace, last: str | None) -> None:
        try:
            self._project = PartsProjection(query.modes.split(","))  # pyright: ignore[reportArgumentType]  # it checks
        except ValueError as exc:
            raise ApiError(422, "unknown_mode", str(exc)) from None
        number, dot, place = (last or query.after or "").partition(".")
        self.after, self._ns = read_place(number), ns
        self._parts_seen = read_place(place) if dot else None
        """The number of parts that the reader has of event `after`; None for all of them."""

    def __call__(self, frames: list[Frame]) -> Batch:
        """Return the parts of events, encoded."""
        return Batch(frames, encoded=b"".join([shown for frame in frames for shown in self._shown(frame)]))

    def _shown(self, frame: Frame) -> list[bytes]:
        depth, parts = len(self._ns), self._project(frame.event)
        if frame.seq < self.after or (frame.seq == self.after and self._parts_seen is None):
            return []
        skipped = (self._parts_seen or 0) if frame.seq == self.after else 0
        shown: list[bytes] = []
        for place, part in enumerate(parts, 1):
            if place > skipped and part["ns"][:depth] == self._ns:
                name = f"{frame.seq}" if place == len(parts) else f"{frame.seq}.{place}"
                shown.append(b"id: %b\ndata: %b\n\n" % (name.encode(), to_json_bytes(part)))
        return shown


async def open_parts(
    service: Service, record: RunRecord, query: PartsQuery, last: str | None = None
) -> AsyncIterator[Batch]:
    """Check the query of a reader, and return the stream of parts of a run. That of a background child is a subtree.

    `last` is the `Last-Event-ID` that a browser sends when it connects again; it counts more than `after`."""
    log_id, ns = await subtree_of(service, record, query.ns)
    log = service.runtime.log(log_id)
    reader = _Reader(query, ns, last)
    if reader.after and not await log.has_event(reader.after):
        raise ApiError(422, "unknown_cursor", f"the log of run {log_id!r} has no event {reader.after}")
    return _batches(reader, log_batches(service, log_id, 0, EventsQuery(until=query.until)))


async def _batches(reader: _Reader, source: AsyncGenerator[Batch]) -> AsyncIterator[Batch]:
    """Yield the parts of events as they are stored, and an empty batch as a sign of life."""
    now = asyncio.get_running_loop().time
    said = now()
    async with aclosing(source) as batches:
        async for batch in batches:
            made = reader([frame for frame in batch.frames if frame.seq])
            if made.encoded or batch.caught_up is not None:
                yield made if made.encoded else batch
            elif now() - said < BEAT:
                continue
            else:
                yield Batch([])
            said = now()
