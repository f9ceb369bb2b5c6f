"""Feeds: each log is read once for all its followers, and each event is encoded once.

Invariant: only events that are stored enter a feed, in order, each once. A feed keeps the last events; a follower that is
further behind reads from the store until it has caught up. So a slow follower delays nobody.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Literal

from msgspec import Struct

from ..core.content import to_json_bytes
from ..core.errors import RetinueError, StoreError
from ..core.events import AnyEvent
from ..runtime import Runtime

_log = logging.getLogger(__name__)

RING = 2048
"""Events that a feed keeps."""
BATCH = 256
PACE, LONGEST_PACE = 0.00025, 0.06
"""Seconds between two sends to a reader, for each reader of this process, and at most: with many readers, each gets fewer
and larger pieces."""
BEAT = 5.0
"""Seconds between two signs of life on a stream."""
_PAUSE = 1.0
_SEQ = attrgetter("seq")


class Frame(Struct, frozen=True, gc=False):
    """An event and its JSON."""

    seq: int
    event: AnyEvent
    data: bytes


def make_frame(event: AnyEvent) -> Frame:
    return Frame(event.seq, event, to_json_bytes(event))


def encode_frame(frame: Frame, name: str) -> bytes:
    """Return an event as a server-sent event; without a name it has no id."""
    shown = b"id: %b\n" % name.encode() if name else b""
    return b"%bevent: %b\ndata: %b\n\n" % (shown, frame.event.kind.encode(), frame.data)


class Batch(Struct, gc=False):
    """Events to send together; none is a sign of life. The id of an event on the stream is `prefix` and its number.

    It is encoded once, because many readers of a feed may get the same one."""

    frames: list[Frame]
    prefix: str = ""
    ids: Literal["all", "last", "none"] = "all"
    """An event without an id does not move the cursor of the reader."""
    encoded: bytes = b""

    def name_of(self, frame: Frame) -> str:
        if not frame.seq or self.ids == "none" or (self.ids == "last" and frame is not self.frames[-1]):
            return ""
        return f"{self.prefix}{frame.seq}"

    def encode(self) -> bytes:
        """Return the events as server-sent events."""
        if not self.encoded:
            shown = [encode_frame(frame, self.name_of(frame)) for frame in self.frames]
            self.encoded = b"".join(shown) or b": still here\n\n"
        return self.encoded


class Feed:
    """The last events of a log, for its followers in this process."""

    def __init__(self, runtime: Runtime, log_id: str, after: int, pace: Callable[[], float]) -> None:
        self._log, self.log_id = runtime.log(log_id), log_id
        self._pace = pace
        self._frames: list[Frame] = []
        self._before = after
        """The number up to which events are not in `_frames`."""
        self._taken = after
        """The last event that any follower has taken."""
        self._last = after
        self.ended = False
        self.problem: RetinueError | None = None
        self.notice: Frame | None = None
        """A notice that is not stored and is valid until the next event: the log has lost its owner, or has a new one."""
        self.followers = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._room = asyncio.Event()
        self._is_waking = False
        self._woken = 0.0
        self._shared = Batch([])
        self._task = asyncio.create_task(self._follow(), name=f"feed-{log_id}")

    async def _follow(self) -> None:
        while not self.ended and self.problem is None:
            try:
                async for event in self._log.follow(self._last):
                    if not event.seq:
                        self.notice = make_frame(event)
                        self.wake()
                        continue
                    self._add(make_frame(event))
                    while self._last - self._taken > RING:
                        self._room.clear()
                        self.wake()
                        await self._room.wait()
                self.ended = True
            except StoreError as exc:
                if not exc.transient:
                    self.problem = exc
                else:
                    _log.warning("the events of run %s cannot be read now: %s", self.log_id, exc)
                    await asyncio.sleep(_PAUSE)
            except RetinueError as exc:
                self.problem = exc
        self.wake()

    def _add(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._last, self.notice = frame.seq, None
        if len(self._frames) > 2 * RING:
            self._before = self._frames[RING - 1].seq
            del self._frames[:RING]
        if not self._is_waking:  # once for all events of a moment
            self._is_waking = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(self._woken + self._pace(), loop.time()), self.wake)

    def wake(self) -> None:
        self._is_waking = False
        self._woken = asyncio.get_running_loop().time()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def has_events(self, after: int) -> bool:
        """Return whether the feed has events after a number."""
        return self._last > after

    def changed(self, after: int) -> asyncio.Future[None]:
        """Return a future that is done when there may be events after a number; already done if there are.

        It checks and waits in one step: a reader that checked before the call may have missed a change.
        """
        future = asyncio.get_running_loop().create_future()
        if self.has_events(after) or self.ended or self.problem is not None:
            future.set_result(None)
        else:
            self._waiting.append(future)
        return future

    async def available(self, after: int) -> list[Frame]:
        """Return the events after a number that are already in the feed; empty if there are none."""
        if after < self._before:
            frames = await self._read_earlier(after)
            if frames:
                return frames
        if not self.has_events(after):
            return []
        frames = self._frames[bisect_right(self._frames, after, key=_SEQ) :]
        if frames and frames[-1].seq > self._taken:
            self._taken = frames[-1].seq
            self._room.set()
        return frames

    async def _read_earlier(self, after: int) -> list[Frame]:
        frames: list[Frame] = []
        async for event in self._log.follow(after):
            if event.seq > self._before:
                break
            frames.append(make_frame(event))
            if len(frames) == BATCH or event.seq == self._before:
                break
        return frames

    def batch(self, frames: list[Frame]) -> Batch:
        """Return events as a batch; readers who are at the same place share one."""
        known = self._shared.frames
        if not known or known[0] is not frames[0] or known[-1] is not frames[-1]:
            self._shared = Batch(frames)
        return self._shared

    def close(self) -> None:
        self._task.cancel()


class Feeds:
    """The feeds of one process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._feeds: dict[str, Feed] = {}
        self._beats: asyncio.Task[None] | None = None
        self._followers = 0
        self._waiting_for_runs: set[asyncio.Future[None]] = set()

    def _pace(self) -> float:
        return min(self._followers * PACE, LONGEST_PACE)

    def open(self, log_id: str, after: int) -> Feed:
        """Follow a log after an event number, until `leave`."""
        feed = self._feeds.get(log_id)
        if feed is None or feed.problem is not None:
            feed = self._feeds[log_id] = Feed(self._runtime, log_id, after, self._pace)
        feed.followers += 1
        self._followers += 1
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat(), name="stream-heartbeat")
        return feed

    def leave(self, feed: Feed) -> None:
        feed.followers -= 1
        self._followers -= 1
        if not feed.followers:
            feed.close()
            if self._feeds.get(feed.log_id) is feed:
                del self._feeds[feed.log_id]
        if not self._feeds and self._beats is not None:
            self._beats.cancel()
            self._beats = None

    def drop(self, log_ids: Iterable[str]) -> None:
        """End the feeds of logs that were deleted."""
        for log_id in log_ids:
            feed = self._feeds.pop(log_id, None)
            if feed is not None:
                feed.ended = True
                feed.close()
                feed.wake()

    def run_started(self) -> asyncio.Future[None]:
        """Return a future that is done when this server starts a run."""
        future = asyncio.get_running_loop().create_future()
        self._waiting_for_runs.add(future)
        future.add_done_callback(self._waiting_for_runs.discard)
        return future

    def notice_run(self) -> None:
        """Wake the readers of threads: a run was started."""
        for future in list(self._waiting_for_runs):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        for feed in list(self._feeds.values()):
            feed.wake()

    async def _beat(self) -> None:
        """Wake all followers from time to time, so that they send a sign of life."""
        while True:
            await asyncio.sleep(BEAT)
            self.wake_all()
