"""What a reader of events asks for: a place to begin, a subtree, some kinds, fewer and larger pieces."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from ..core.events import EVENT_TYPES, AnyEvent, ChildStarted, InferenceFinished, Namespace
from ..core.stores import RunRecord
from ..log.fanout import Frame
from .gathering import Gathering
from .http import ApiError
from .service import Service


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
    """Milliseconds for which deltas of one message are joined once the reader has caught up."""
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
        self.ids: Literal["all", "last"] = "last" if self.merge else "all"
        """The events of a batch that have ids. Of deltas that were joined, only the last event moves the cursor."""

    def is_wanted(self, event: AnyEvent) -> bool:
        return event.ns[: len(self._ns)] == self._ns and (not self._kinds or event.kind in self._kinds)

    def __call__(self, frames: list[Frame]) -> list[Frame]:
        return frames if self._wants_all else [frame for frame in frames if self.is_wanted(frame.event)]

    def notices(self, frame: Frame | None) -> list[Frame]:
        """Return a notice about the owner of a log if its kind is wanted, whatever the subtree."""
        return [frame] if frame is not None and (not self._kinds or frame.event.kind in self._kinds) else []

    def gathering(self) -> Gathering:
        """Return the place for events of one log that wait to be sent."""
        return Gathering(self.merge, has_answers=not self._kinds or InferenceFinished.kind in self._kinds)


def read_place(text: str | None) -> int:
    """Return the event number after which to begin."""
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise ApiError(422, "unknown_cursor", f"{text[:40]!r} is not the number of an event: give a whole number")
    return int(text)


async def subtree_of(service: Service, record: RunRecord, ns: str | None) -> tuple[str, Namespace]:
    """Return the log of a run, and the subtree to read of it: the one that is given, else that of a background child."""
    run_id = record.identity.run_id
    log_id = record.log_id or run_id
    if ns is None and log_id != run_id:
        for event in await service.runtime.log(log_id).so_far():
            if isinstance(event, ChildStarted) and event.child_run_id == run_id:
                return log_id, event.child_ns
    return log_id, tuple(ns.split("|")) if ns else ()


async def whole_or_subtree(service: Service, record: RunRecord, query: EventsQuery) -> tuple[str, EventsQuery]:
    """Return the log of a run, and the query of a reader of it: of a background child only its subtree is read."""
    log_id, ns = await subtree_of(service, record, query.ns)
    return log_id, replace(query, ns="|".join(ns))
