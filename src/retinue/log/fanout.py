"""Following a log together: one reader of the log, a ring of its last events, and a follower for each who wants them.

Invariant: the reader waits for no follower, and the rings of a process are bounded in bytes. A follower that is behind the
ring reads pages of the log until it is inside again, so it gives each event once and in order, however slow it is.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Sequence
from operator import attrgetter
from typing import Any, Protocol, cast
from weakref import WeakSet

from msgspec import Struct

from ..core.concurrency import Backoff
from ..core.content import to_json_bytes
from ..core.errors import RetinueError, StoreError
from ..core.events import AnyEvent, Event
from .read import MOST, Reader

_log = logging.getLogger(__name__)
_SEQ = attrgetter("seq")

RING_BYTES, ALL_BYTES = 1 << 20, 64 << 20
"""Bytes of JSON that the ring of one log keeps, and those of all logs together."""

AT_ONCE = 1 << 16
"""Bytes of JSON that a follower gives at once: what one that does not read holds on to."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Readable(Protocol):
    """A log from the point of view of a fan-out."""

    def read(self, after: int = 0) -> Reader:
        """Return a reader of what comes after a number."""
        ...


class Frame(Struct, frozen=True, gc=False):
    """An event and its JSON."""

    seq: int
    event: AnyEvent
    data: bytes


def make_frame(event: Event) -> Frame:
    return Frame(event.seq, cast("AnyEvent", event), to_json_bytes(event))


class Budget:
    """The bytes that the rings of one process may keep: each has the same share."""

    def __init__(self, ring_bytes: int = RING_BYTES, all_bytes: int = ALL_BYTES) -> None:
        self._ring_bytes, self._all_bytes = ring_bytes, all_bytes
        self._fanouts: WeakSet[Fanout] = WeakSet()

    @property
    def share(self) -> int:
        return min(self._ring_bytes, self._all_bytes // max(len(self._fanouts), 1))

    def add(self, fanout: Fanout) -> None:
        self._fanouts.add(fanout)
        for other in self._fanouts:
            other.trim()

    def remove(self, fanout: Fanout) -> None:
        self._fanouts.discard(fanout)


class Fanout:
    """Reads a log while it has followers. Its ring begins where the first of them began."""

    def __init__(
        self, log: Readable, after: int, budget: Budget, spawn: Spawn, pace: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.log, self.before, self.last = log, after, after
        """`before`: the number up to which events are not in the ring."""
        self._budget, self._spawn, self._pace = budget, spawn, pace
        self._ring: list[Frame] = []
        self._bytes = 0
        self._reader: Reader | None = None
        self._reading: asyncio.Task[None] | None = None
        self.ended = self.is_closed = False
        self.problem: RetinueError | None = None
        self.notice: Event | None = None
        """Why no event comes, until the next one comes."""
        self.followers = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._is_waking = False
        self._woken = 0.0
        budget.add(self)

    def attach(self, after: int) -> Follower:
        """Return a follower that gives the events after a number, until it is closed."""
        self.followers += 1
        if self._reading is None and not self.is_over:
            self._reading = self._spawn(self._read())
        return Follower(self, after)

    def detach(self) -> None:
        """Note that a follower is closed. Without followers the log is not read."""
        self.followers -= 1
        if not self.followers:
            self._stop_reading()

    def close(self) -> None:
        """End for all followers, also those that have not read all."""
        self.ended = self.is_closed = True
        self._stop_reading()
        self._budget.remove(self)
        self.wake()

    def _stop_reading(self) -> None:
        reading, self._reading, self._reader = self._reading, None, None
        if reading is not None:
            reading.cancel()

    @property
    def is_over(self) -> bool:
        """True if it reads no more events."""
        return self.ended or self.problem is not None

    @property
    def ready(self) -> bool:
        """False if it has all events that can be read now."""
        return not self.is_over and (self._reader is None or self._reader.ready)

    async def rests(self) -> bool:
        """Return whether nothing works on the log, as far as it was read."""
        return self.ended or (self._reader is not None and await self._reader.rests())

    async def _read(self) -> None:
        backoff = Backoff()
        while not self.is_over:
            reader: Reader | None = None
            try:
                reader = self._reader = self.log.read(self.last)
                if not reader.ready:
                    self.wake()
                while not reader.ended:
                    if events := await reader.take():
                        backoff.reset()
                        self._add(events)
                    elif (notice := await reader.notice()) is not None:
                        self.notice = notice
                        self.wake()
                    elif not reader.ready:
                        self.wake()
                self.ended = True
            except StoreError as exc:
                if not exc.transient:
                    self.problem = exc
                else:
                    _log.warning("a log cannot be read now: %s", exc)
                    await backoff.wait()
            except RetinueError as exc:
                self.problem = exc
            finally:
                if reader is not None:
                    await reader.aclose()
        self.wake()

    def _add(self, events: Sequence[Event]) -> None:
        frames = [make_frame(event) for event in events]
        self._ring += frames
        self._bytes += sum([len(frame.data) for frame in frames])
        self.last, self.notice = frames[-1].seq, None
        self.trim()
        if not self._is_waking:  # once for all events of a moment
            self._is_waking = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(self._woken + self._pace(), loop.time()), self.wake)

    def trim(self) -> None:
        """Remove the oldest frames until the ring has no more than its share, but not the last frame."""
        share, frames, place = self._budget.share, self._ring, 0
        while self._bytes > share and place < len(frames) - 1:
            self._bytes -= len(frames[place].data)
            place += 1
        if place:
            self.before = frames[place - 1].seq
            del frames[:place]

    def wake(self) -> None:
        """Have all followers look."""
        self._is_waking = False
        self._woken = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done at the next `wake`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future

    def since(self, after: int) -> list[Frame]:
        """Return frames of the ring after a number: as many as may be sent at once."""
        ring, size = self._ring, 0
        first = last = bisect_right(ring, after, key=_SEQ)
        while last < len(ring) and (last == first or size + len(ring[last].data) <= AT_ONCE):
            size += len(ring[last].data)
            last += 1
        return ring[first:last]


class Follower:
    """A place in a log that is followed together. It keeps at most one page of the log."""

    def __init__(self, fanout: Fanout, after: int) -> None:
        self._fanout, self.seq = fanout, after
        self._own: Reader | None = None
        """Reads the log while this follower is behind the ring."""
        self._page: list[Event] = []
        self._told: Event | None = None
        self._has_paused = self._is_closed = False

    @property
    def _is_behind(self) -> bool:
        return bool(self._page) or self.seq < self._fanout.before

    @property
    def ready(self) -> bool:
        """False if every event that can be read now was given."""
        return self._is_behind or self.seq < self._fanout.last or self._fanout.ready

    @property
    def ended(self) -> bool:
        fanout = self._fanout
        return fanout.is_closed or (fanout.ended and not self._is_behind and self.seq >= fanout.last)

    async def available(self) -> list[Frame]:
        """Return the next events, as many as may be sent at once; none if there are none now."""
        fanout = self._fanout
        if self._is_behind:
            frames = await self._read_page()
        else:
            frames = fanout.since(self.seq)
        if frames:
            self.seq, self._has_paused = frames[-1].seq, False
        elif fanout.problem is not None:
            raise fanout.problem
        return frames

    async def _read_page(self) -> list[Frame]:
        """Return events that are no longer in the ring, from a page of the log."""
        while not self._page and self.seq < self._fanout.before:
            reader = self._own = self._own or self._fanout.log.read(self.seq)
            self._page = list(await reader.take())
            if not self._page and not reader.ready:
                self.seq = self._fanout.before  # the log has no such events any more
        frames, size = list[Frame](), 0
        for event in self._page:
            frame = make_frame(event)
            if frames and size + len(frame.data) > AT_ONCE:
                break
            frames.append(frame)
            size += len(frame.data)
        del self._page[: len(frames)]
        if not self._page and (not frames or frames[-1].seq >= self._fanout.before):
            await self._leave_page()
        return frames

    async def _leave_page(self) -> None:
        own, self._own = self._own, None
        self._page.clear()
        if own is not None:
            await own.aclose()

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done when there may be something to give. It looks and waits in one step."""
        fanout = self._fanout
        if self._is_behind or self.seq < fanout.last or fanout.is_over:
            future = asyncio.get_running_loop().create_future()
            future.set_result(None)
            return future
        return fanout.wait()

    def news(self) -> Event | None:
        """Return why no event comes, once for each reason."""
        told, self._told = self._told, self._fanout.notice
        return None if self._told is told else self._told

    async def take(self, most: int = MOST) -> Sequence[Event]:
        has_waited = False
        while not self.ended:
            if frames := await self.available():
                return [frame.event for frame in frames]
            if has_waited or not (self.ready or self._has_paused):
                self._has_paused = True
                break
            await self.changed()
            has_waited = True
        return ()

    async def notice(self) -> Event | None:
        return self.news()

    async def rests(self) -> bool:
        return self.ended or (not self.ready and await self._fanout.rests())

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._fanout.detach()
            await self._leave_page()
