"""A circuit breaker: a server that keeps failing is not called for a while."""

from __future__ import annotations

import time
from collections.abc import Callable


class CircuitBreaker:
    """Opens after `threshold` failures in a row; after `seconds`, it lets one request through as a test."""

    __slots__ = ("_clock", "_failures", "_opened_at", "_seconds", "_threshold", "_trying")

    def __init__(self, threshold: int = 5, seconds: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold, self._seconds, self._clock = threshold, seconds, clock
        self._failures, self._opened_at, self._trying = 0, 0.0, False

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    def remaining(self) -> float | None:
        """Return the seconds until the next call is allowed, None if it is now; a caller that gets None reports the outcome."""
        if not self.is_open:
            return None
        left = self._opened_at + self._seconds - self._clock()
        if left > 0 or self._trying:
            return max(left, 0.0)
        self._trying = True
        return None

    def succeeded(self) -> None:
        self._failures, self._trying = 0, False

    def failed(self) -> None:
        self._failures += 1
        self._trying = False
        if self.is_open:
            self._opened_at = self._clock()

    def abandoned(self) -> None:
        """The request ended without a verdict: it was cancelled, or it was at fault itself."""
        self._trying = False
