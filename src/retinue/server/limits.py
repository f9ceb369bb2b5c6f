"""Limits for each user: requests in a time, and streams at once. Off until set."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from .http import ApiError

_MOST_USERS = 10_000


class UserLimits:
    """A bucket of requests for each user, filled at `rate` a second, and a count of open streams."""

    def __init__(
        self,
        rate: float | None = None,
        max_streams: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate, self._max_streams, self._clock = rate, max_streams, clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._clean_at = _MOST_USERS
        """The number of buckets at which those that are full are dropped."""
        self._streams: Counter[str] = Counter()

    def count_request(self, user_id: str) -> None:
        """Count a request; raise if the user has asked too often."""
        if self._rate is None:
            return
        now, most = self._clock(), max(self._rate, 1.0)
        left, at = self._buckets.get(user_id, (most, now))
        left = min(most, left + (now - at) * self._rate)
        if left < 1.0:
            seconds = (1.0 - left) / self._rate
            detail = f"more than {self._rate:g} requests a second: try again in {seconds:.1f} s"
            raise ApiError(429, "too_many_requests", detail, {"retry-after": str(max(1, round(seconds)))})
        if len(self._buckets) >= self._clean_at:
            self._drop_full(now, most)
        self._buckets[user_id] = left - 1.0, now

    def _drop_full(self, now: float, most: float) -> None:
        """Forget the users whose buckets are full again: they are as users that never came."""
        rate = self._rate or 0.0
        self._buckets = {
            user: (left, at) for user, (left, at) in self._buckets.items() if left + (now - at) * rate < most
        }
        self._clean_at = max(_MOST_USERS, 2 * len(self._buckets))

    @contextmanager
    def stream(self, user_id: str) -> Generator[None]:
        """Hold one of the streams of a user."""
        if self._max_streams is not None and self._streams[user_id] >= self._max_streams:
            detail = f"{self._max_streams} streams are open already: close one first"
            raise ApiError(429, "too_many_streams", detail, {"retry-after": "1"})
        self._streams[user_id] += 1
        try:
            yield
        finally:
            self._streams[user_id] -= 1
            if not self._streams[user_id]:
                del self._streams[user_id]
