"""The logs that one stream reads: that of a run, or those of the runs of a thread.

Invariant: of each log the stream sends each event once and in order. A thread has no order between its logs but that of its
runs. The cursor of a stream names for each open log the number up to which everything was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from ..core.events import RunFinished
from ..core.stores import RunRecord
from ..log.fanout import Frame, make_frame
from .auth import User
from .feeds import Batch
from .http import ApiError, is_text
from .queries import Filter, read_place
from .service import Service, owns

_LOOK_FOR_RUNS = 1.0
"""Seconds between two looks for new runs of a thread."""


class Source:
    """One log that is being read for one stream."""

    def __init__(
        self, service: Service, run_id: str, wanted: Filter, after: int = 0, *, root_ended: bool = False
    ) -> None:
        self._feeds, self._wanted = service.feeds, wanted
        self.feed, self.follower = self._feeds.open(run_id, after)
        self.root_ended = root_ended
        self.sent = after
        """The number up to which every event was sent, or is not wanted."""
        self.gathering = wanted.gathering()
        self._rest: list[Frame] = []
        """Events after the end of the root run that were read with it."""

    @property
    def after(self) -> int:
        """The number up to which events were read."""
        return self._rest[0].seq - 1 if self._rest else self.follower.seq

    @property
    def ready(self) -> bool:
        """False if everything that can be read now was read."""
        return bool(self._rest) or self.follower.ready

    @property
    def ended(self) -> bool:
        return not self._rest and self.follower.ended

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

    def gather(self, frames: list[Frame], now: float) -> None:
        """Keep those events that are wanted, to be sent."""
        self.gathering.add(self._wanted(frames), now)
        if not self.gathering:
            self.sent = self.after

    def take(self) -> list[Frame]:
        """Return the events that were gathered, as sent."""
        self.sent = self.after
        return self.gathering.take()

    def notices(self) -> list[Batch]:
        """Return the notice about the owner that the reader wants and does not have."""
        notice = self.follower.news()
        return [] if notice is None else [Batch([frame]) for frame in self._wanted.notices(make_frame(notice))]

    async def aclose(self) -> None:
        await self._feeds.leave(self.feed, self.follower)


class Sources(Protocol):
    """The logs that a stream reads."""

    async def read(self, now: float) -> bool:
        """Gather what can be read now. Return whether there may be more."""
        ...

    @property
    def ready(self) -> bool:
        """False if everything that can be read now was gathered."""
        ...

    @property
    def open(self) -> Sequence[Source]:
        """The logs that are being read."""
        ...

    @property
    def cursor(self) -> int | str:
        """The place after which a reader that connects again misses nothing."""
        ...

    def take(self, source: Source) -> Batch:
        """Return what was gathered of a log, with ids."""
        ...

    async def is_over(self) -> bool:
        """Return whether the stream ends."""
        ...

    async def wait(self) -> None:
        """Return when there may be more to read."""
        ...


class RunSources:
    """The log of one run."""

    def __init__(self, service: Service, log_id: str, after: int, wanted: Filter) -> None:
        self._service, self._wanted = service, wanted
        self._source = Source(service, log_id, wanted, after, root_ended=True)
        self.open = (self._source,)

    @property
    def ready(self) -> bool:
        return self._source.ready

    @property
    def cursor(self) -> int:
        return self._source.sent

    async def read(self, now: float) -> bool:
        frames = await self._source.read()
        self._source.gather(frames, now)
        return bool(frames)

    def take(self, source: Source) -> Batch:
        frames = source.take()
        if self._wanted.is_open:
            return source.feed.batch(frames)
        return Batch(frames, ids=self._wanted.ids)

    async def is_over(self) -> bool:
        source = self._source
        if source.ended:
            return True
        log = self._service.runtime.log(source.feed.log_id)
        # Look once more after the answer: the run may have been answered meanwhile.
        return self._wanted.until_idle and await log.is_settled(source.after) and not source.ready

    async def wait(self) -> None:
        await self._source.follower.changed()


class ThreadSources:
    """The logs of the runs of a thread, one run after the other.

    What background tasks append after the end of their run is sent as it is stored, between the events of later runs. The
    cursor is the place in the newest run, then those in older logs that have not ended: `run:seq;older:seq`.
    """

    def __init__(self, service: Service, user: User, thread_id: str, places: dict[str, int], wanted: Filter) -> None:
        self._service, self._user, self._thread_id, self._wanted = service, user, thread_id, wanted
        self._places = places
        """The cursor of the reader: the first run is the newest that it has seen."""
        self._newest = next(iter(places.items()), None)
        """The newest run that was read, and the place in it."""
        self._seen: set[str] = set()
        self._main: Source | None = None
        self._tails: list[Source] = []

    @property
    def open(self) -> Sequence[Source]:
        return [*self._tails, *([self._main] if self._main is not None else [])]

    @property
    def ready(self) -> bool:
        return any(source.ready for source in self.open)

    @property
    def cursor(self) -> str:
        return ";".join(f"{run_id}:{seq}" for run_id, seq in self._sent().items())

    def _sent(self) -> dict[str, int]:
        """Return the place in each open log, that of the newest run first."""
        sent = dict[str, int]() if self._newest is None else dict([self._newest])
        for source in [*([self._main] if self._main is not None else []), *self._tails]:
            if source is self._main or source.root_ended:
                sent[source.feed.log_id] = source.sent
        return sent

    def take(self, source: Source) -> Batch:
        frames, log_id = source.take(), source.feed.log_id
        self._note_newest(source)
        sent = self._sent()
        place, shown = list(sent).index(log_id), [f"{run_id}:{seq}" for run_id, seq in sent.items()]
        start, end = "".join(f"{one};" for one in shown[:place]), "".join(f";{one}" for one in shown[place + 1 :])
        return Batch(frames, (f"{start}{log_id}:", end), self._wanted.ids, log_id)

    def _note_newest(self, source: Source) -> None:
        if self._newest is not None and self._newest[0] == source.feed.log_id:
            self._newest = source.feed.log_id, source.sent

    async def read(self, now: float) -> bool:
        return any([await self._read_tails(now), await self._read_main(now)])

    async def _read_tails(self, now: float) -> bool:
        has_read = False
        for source in list(self._tails):
            was_ended = source.root_ended
            frames = await source.read()
            source.gather(frames if was_ended else [], now)
            has_read |= bool(frames)
            if source.ended and not source.gathering:
                self._tails.remove(source)
                self._note_newest(source)
                await source.aclose()
        return has_read

    async def _read_main(self, now: float) -> bool:
        if self._main is None:
            self._main = await self._next_run()
        main = self._main
        if main is None:
            return False
        if self._newest is None or self._newest[0] != main.feed.log_id:
            self._newest = main.feed.log_id, main.sent
        frames = await main.read()
        main.gather(frames, now)
        if main.root_ended or (not frames and main.ended):
            self._tails.append(main)
            self._main = None
            return True
        return bool(frames)

    async def _next_run(self) -> Source | None:
        """Open the oldest run that was not read yet. Of runs before the cursor, only open logs are of interest."""
        newest = await self._runs(limit=1)
        if not newest or newest[0].identity.run_id in self._seen:
            return None
        runs = (await self._runs())[::-1]
        ids = [run.identity.run_id for run in runs]
        first = next(iter(self._places), None)
        start = ids.index(first) if first in ids else 0
        for place, run in enumerate(runs):
            run_id = run.identity.run_id
            if run_id in self._seen:
                continue
            self._seen.add(run_id)
            after = self._places.get(run_id, 0)
            is_ended = place < start and run_id in self._places
            if run_id == first:
                is_ended = run.has_ended and await self._has_read_end(run_id, after)
            if is_ended or (place < start and await self._service.runtime.log(run_id).is_open()):
                self._tails.append(Source(self._service, run_id, self._wanted, after, root_ended=is_ended))
            elif place >= start:
                return Source(self._service, run_id, self._wanted, after)
        return None

    async def _runs(self, limit: int | None = None) -> list[RunRecord]:
        """Return the user's runs of the thread, which may have been deleted and created again."""
        store = self._service.runtime.store
        return await store.list_runs(self._thread_id, limit=limit, **self._service.filters(self._user))

    async def _has_read_end(self, run_id: str, after: int) -> bool:
        """Return whether a place is at the end of its run or later: what follows are events of tasks."""
        ends = [
            event.seq
            for event in await self._service.runtime.log(run_id).so_far()
            if isinstance(event, RunFinished) and event.run_id == run_id and event.status.is_terminal
        ]
        return bool(ends) and after >= ends[-1]

    async def is_over(self) -> bool:
        """Return whether the thread is deleted or, with `until=idle`, nothing works on it."""
        main = self._main
        if main is None:
            owner = await self._service.runtime.store.user_of_thread(self._thread_id)
            return self._wanted.until_idle or owner is None or not owns(self._user, owner[0])
        if not self._wanted.until_idle:
            return False
        return await self._service.runtime.log(main.feed.log_id).is_settled(main.after) and not main.ready

    async def wait(self) -> None:
        """Return when a log may have something new, a run is started here, or it is time to look for others."""
        futures = [source.follower.changed() for source in self.open]
        futures.append(self._service.feeds.run_started())
        try:
            await asyncio.wait(futures, timeout=_LOOK_FOR_RUNS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in futures:
                future.cancel()


async def read_thread_cursor(service: Service, thread_id: str, cursor: str | None) -> dict[str, int]:
    """Return the place in each log that the cursor of a reader names, the newest run first. Raise if it is none."""
    places: dict[str, int] = {}
    for one in (cursor or "").split(";"):
        if not one:
            continue
        run_id, _, seq = one.rpartition(":")
        record = await service.runtime.store.load_run(run_id) if run_id and is_text(run_id) else None
        if record is None and places:  # an older log, which was deleted
            continue
        after = read_place(seq)
        is_known = record is not None and record.identity.thread_id == thread_id and seq and run_id not in places
        if not is_known or (after and not await service.runtime.log(run_id).has_event(after)):
            raise ApiError(422, "unknown_cursor", f"{one[:80]!r} is not an event of this thread")
        places[run_id] = after
    return places
