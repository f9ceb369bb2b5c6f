"""Pages of stored events, as JSON: for what a page shows beside the live stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from ..core.events import AnyEvent
from ..core.stores import RunRecord
from ..log.fanout import make_frame
from ..runtime.reading import StoredEvents
from .http import ApiError
from .queries import EventsQuery, Filter, read_place, whole_or_subtree
from .service import Service

DEFAULT = 100
AT_ONCE = 1000
MOST_READ = 20_000
"""Events that one request looks at. A page that few of them fit may have fewer than its limit, and a cursor."""


async def event_page(service: Service, record: RunRecord, query: EventsQuery) -> dict[str, Any]:
    """Return the stored events of a run after a number, in order; with only `before`, the last ones before that number."""
    if query.until is not None or query.merge:
        raise ApiError(422, "invalid_query", "query: until and merge are for streams, not for pages of JSON")
    log_id, query = await whole_or_subtree(service, record, query)
    log, wanted = service.runtime.log(log_id), Filter(replace(query, before=None, limit=None))
    last, limit = await log.last(), query.limit or DEFAULT
    end = last + 1 if query.before is None else min(query.before, last + 1)
    if query.before is not None and query.after is None:
        items, cursor = await _before(log, end, limit, wanted)
    else:
        items, cursor = await _after(log, read_place(query.after), end, limit, wanted)
    shown = [msgspec.Raw(make_frame(event).data) for event in items]
    return {"items": shown, "next_cursor": None if cursor is None else str(cursor), "last_seq": last}


async def _after(
    log: StoredEvents, after: int, end: int, limit: int, wanted: Filter
) -> tuple[list[AnyEvent], int | None]:
    """Return events after one number and before another, and the number after which the next page begins."""
    found: list[AnyEvent] = []
    first = after
    while after + 1 < end and len(found) < limit and after - first < MOST_READ:
        events = [event for event in await log.page(after, AT_ONCE) if event.seq < end]
        for event in events:
            after = event.seq
            if wanted.is_wanted(event):
                found.append(event)
                if len(found) == limit:
                    break
        if not events:
            return found, None
    return found, after if after + 1 < end else None


async def _before(log: StoredEvents, end: int, limit: int, wanted: Filter) -> tuple[list[AnyEvent], int | None]:
    """Return the last events before a number, and the number before which the page before them ends."""
    found: list[AnyEvent] = []
    first = end
    while end > 1 and len(found) < limit and first - end < MOST_READ:
        start = max(end - 1 - AT_ONCE, 0)
        events = await _between(log, start, end)
        end = start + 1
        for event in reversed(events):
            if wanted.is_wanted(event):
                found.append(event)
                if len(found) == limit:
                    end = event.seq
                    break
    return found[::-1], end if end > 1 else None


async def _between(log: StoredEvents, after: int, end: int) -> list[AnyEvent]:
    """Return all events after one number and before another; a page of the store may end before its limit."""
    found: list[AnyEvent] = []
    while after + 1 < end and (events := await log.page(after, end - 1 - after)):
        found += [event for event in events if event.seq < end]
        after = events[-1].seq
    return found
