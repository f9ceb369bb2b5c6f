"""The roster of a run: how each run below it stands, for lists of a thousand. What it sends follows what a reader looks at,
not how fast agents talk.

Four times a second it sends rows that have changed: all of the reader's window, all that have begun, ended or waited, and a few
others. Once a second it sends the last words of the runs in the window.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from typing import Any

from ..core.events import Namespace
from ..core.stores import RunRecord
from ..wire.roster import Roster, is_below, row_json
from .queries import subtree_of
from .service import Service
from .streams import ServerCloses

PACE, WORDS_PACE = 0.25, 1.0
"""Seconds between two messages, and between two with words."""
_OTHERS = 50
"""Rows outside the window that a message may have because of their counters."""
_AT_ONCE = 500
"""Rows of one message."""


class RosterView:
    """The roster of one run for one reader."""

    def __init__(self, service: Service, window: Collection[str]) -> None:
        self._service, self._roster = service, Roster()
        self._window = frozenset(window)
        self._now = asyncio.get_running_loop().time
        self._changed: asyncio.Future[None] | None = None
        self._words_at = 0.0
        self._counts: dict[str, int] = {}

    def look_at(self, window: Collection[str]) -> None:
        """Send the words of these runs from now on, by namespace."""
        self._window, self._words_at = frozenset(window), 0.0
        self._roster.spoken.update((row.run_id, None) for row in self._roster.rows() if row.ns in self._window)
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def messages(self, record: RunRecord, ns: str | None) -> AsyncGenerator[dict[str, Any]]:
        """Yield all rows, in pieces, then those that change, until the log has ended."""
        log_id, below = await subtree_of(self._service, record, ns)
        roster, feeds = self._roster, self._service.feeds
        after = await self._service.runtime.log(log_id).fold(roster)
        feed, follower = feeds.open(log_id, after)
        roster.urgent.update((row.run_id, None) for row in roster.rows())
        self.look_at(self._window)
        try:
            while True:
                began = self._now()
                while self._now() < began + PACE and (frames := await follower.available()):
                    for frame in frames:
                        roster(frame.event)
                    await asyncio.sleep(0)
                for message in self._news(below):
                    yield message
                if follower.ended:
                    return
                await asyncio.sleep(max(began + PACE - self._now(), 0))
                if not self._service.closing.is_set() and not self._has_news() and not follower.ready:
                    self._changed = follower.changed()
                    await self._changed
                if self._service.closing.is_set():
                    raise ServerCloses
        finally:
            await feeds.leave(feed, follower)

    def _has_news(self) -> bool:
        """Return whether something is left to send later."""
        return bool(self._roster.changed or self._roster.spoken)

    def _news(self, below: Namespace) -> list[dict[str, Any]]:
        """Return what to send now; what is left is sent later."""
        roster = self._roster
        has_words = self._now() >= self._words_at
        words = {one for one in roster.spoken if roster.row(one).ns in self._window} if has_words else set[str]()
        seen = [one for one in roster.changed if roster.row(one).ns in self._window]
        others = [one for one in roster.changed if one not in roster.urgent][:_OTHERS]
        due = [
            one for one in dict.fromkeys([*roster.urgent, *seen, *others, *words]) if is_below(roster.row(one), below)
        ]
        for one in (*roster.urgent, *seen, *others):
            roster.changed.pop(one, None)
        roster.urgent.clear()
        if has_words:
            roster.spoken.clear()
            self._words_at = self._now() + WORDS_PACE
        counts = dict(roster.counts(below))
        if not due and counts == self._counts:
            return []
        self._counts = counts
        shown = [row_json(roster.row(one), roster.tail(one) if one in words else None) for one in due]
        pieces = [shown[start : start + _AT_ONCE] for start in range(0, len(shown), _AT_ONCE)] or [[]]
        return [{"seq": roster.seq, "counts": counts, "rows": piece} for piece in pieces]
