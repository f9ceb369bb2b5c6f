"""Feeds: each log is read once for all its followers in this process, and each event is encoded once.

A slow follower delays nobody: it reads from the store until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import Struct

from ..core.concurrency import Jobs
from ..log.fanout import Budget, Fanout, Follower, Frame
from ..runtime import Runtime

PACE, LONGEST_PACE = 0.00025, 0.06
"""Seconds between two sends to a reader, for each reader of this process, and at most: with many readers, each gets fewer
and larger pieces."""
BEAT = 5.0
"""Seconds between two signs of life on a stream."""


class Batch(Struct, gc=False):
    """Events to send together. A batch without events tells that the reader has caught up, or is a sign of life.

    It is encoded once, because many readers of a feed may get the same one."""

    frames: list[Frame]
    around: tuple[str, str] = ("", "")
    """What comes before and after the number of an event in its id on the stream."""
    ids: Literal["all", "last"] = "all"
    """The events that have an id. One without an id does not move the cursor of the reader."""
    log_id: str = ""
    """On the stream of a thread, the log that has the events."""
    caught_up: int | str | None = None
    """The cursor of a reader that has caught up: everything that is stored was sent."""
    encoded: bytes = b""

    def id_of(self, frame: Frame) -> str:
        if not frame.seq or (self.ids == "last" and frame is not self.frames[-1]):
            return ""
        return f"{frame.seq}".join(self.around)

    def data_of(self, frame: Frame, *, with_id: bool = False) -> bytes:
        """Return the JSON of an event. On the stream of a thread it has its log and, if asked for, its id."""
        if not self.log_id:
            return frame.data
        shown_id = b'"id":%b,' % msgspec.json.encode(self.id_of(frame)) if with_id and self.id_of(frame) else b""
        return b'{%b"log_id":%b,%b' % (shown_id, msgspec.json.encode(self.log_id), frame.data[1:])

    def encode(self) -> bytes:
        """Return the events as server-sent events."""
        if not self.encoded:
            self.encoded = b"".join([self._server_sent(frame) for frame in self.frames]) or b": still here\n\n"
            if self.caught_up is not None:
                self.encoded = f": caught_up {self.caught_up}\n\n".encode()
        return self.encoded

    def _server_sent(self, frame: Frame) -> bytes:
        name = self.id_of(frame)
        shown = b"id: %b\n" % name.encode() if name else b""
        return b"%bevent: %b\ndata: %b\n\n" % (shown, frame.event.kind.encode(), self.data_of(frame))


class Feed:
    """A log that this server reads for its followers."""

    def __init__(self, log_id: str, fanout: Fanout) -> None:
        self.log_id, self.fanout, self._shared = log_id, fanout, Batch([])

    def batch(self, frames: list[Frame]) -> Batch:
        """Return events as a batch; readers who are at the same place share one."""
        known = self._shared.frames
        if not known or known[0] is not frames[0] or known[-1] is not frames[-1]:
            self._shared = Batch(frames)
        return self._shared


class Feeds:
    """The feeds of one process."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._budget = runtime, Budget()
        self._feeds: dict[str, Feed] = {}
        self._jobs = Jobs("a log cannot be read for its followers")
        self._beats: asyncio.Task[None] | None = None
        self._followers = 0
        self._waiting_for_runs: set[asyncio.Future[None]] = set()

    def _pace(self) -> float:
        return min(self._followers * PACE, LONGEST_PACE)

    def open(self, log_id: str, after: int) -> tuple[Feed, Follower]:
        """Follow a log after an event number, until `leave`."""
        feed = self._feeds.get(log_id)
        if feed is None or feed.fanout.problem is not None:
            log = self._runtime.log(log_id)
            feed = self._feeds[log_id] = Feed(log_id, Fanout(log, after, self._budget, self._jobs.start, self._pace))
        self._followers += 1
        if self._beats is None:
            self._beats = self._jobs.start(self._beat(), name="stream-heartbeat")
        return feed, feed.fanout.attach(after)

    async def leave(self, feed: Feed, follower: Follower) -> None:
        self._followers -= 1
        await follower.aclose()
        if not feed.fanout.followers:
            feed.fanout.close()
            if self._feeds.get(feed.log_id) is feed:
                del self._feeds[feed.log_id]
        if not self._feeds and self._beats is not None:
            self._beats.cancel()
            self._beats = None

    def drop(self, log_ids: Iterable[str]) -> None:
        """End the feeds of logs that were deleted."""
        for log_id in log_ids:
            if (feed := self._feeds.pop(log_id, None)) is not None:
                feed.fanout.close()

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
            feed.fanout.wake()

    async def _beat(self) -> None:
        """Wake all followers from time to time, so that they send a sign of life."""
        while True:
            await asyncio.sleep(BEAT)
            self.wake_all()
