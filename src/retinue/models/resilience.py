"""Retries of a model call, with a backoff and a circuit breaker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from msgspec import Struct

from ..core.errors import CircuitOpen, ModelError, ModelStreamBroken, ModelUnavailable
from ..core.model import Model, ModelChunk, ModelRequest, Retrying


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


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """The number of attempts of a model call, and the delays between them."""

    attempts: int = 4
    """All attempts of one call; 1 means no retry."""
    first_delay: float = 0.5
    """Seconds before the second attempt. The delay doubles with each attempt and is shortened at random by up to half."""
    max_delay: float = 30.0
    max_wait: float = 60.0
    """The longest `Retry-After` that is honoured, in seconds; if the server asks for more, the call fails at once."""
    breaker_failures: int = 5
    """Failed calls in a row after which the model is not called for `breaker_seconds`; 0 switches this off."""
    breaker_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"RetryPolicy.attempts must be at least 1, got {self.attempts}")

    def delay(self, attempt: int, error: ModelError) -> float | None:
        """Return the seconds to wait after an attempt, None if there is no further one."""
        if attempt >= self.attempts or not error.retryable:
            return None
        backoff = min(self.max_delay, self.first_delay * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        asked = error.retry_after or 0.0
        if asked > self.max_wait:
            return None
        return max(backoff, asked)


class ResilientModel:
    """Calls a model again when it fails. A `Retrying` chunk drops the partial answer of a failed attempt."""

    def __init__(self, model: Model, policy: RetryPolicy | None = None) -> None:
        self._model, self._policy = model, policy or RetryPolicy()
        threshold = self._policy.breaker_failures or 2**62
        self._breaker = CircuitBreaker(threshold, self._policy.breaker_seconds)
        self.name = model.name

    def __repr__(self) -> str:
        return repr(self._model)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        self._check_circuit()
        attempt, judged = 0, False
        try:
            while True:
                attempt += 1
                chunks: Any = self._model.stream(request)
                said = False
                try:
                    async for chunk in chunks:
                        yield chunk
                        said = True
                    judged = True
                    self._breaker.succeeded()
                    return
                except ModelError as exc:
                    delay = self._policy.delay(attempt, exc)
                    if delay is None:
                        judged = self._blame(exc)
                        raise
                    yield make_retrying(exc, self.name, delay, said)
                finally:
                    await close_model(chunks)
                await asyncio.sleep(delay)
        finally:
            if not judged:
                self._breaker.abandoned()

    def _blame(self, error: ModelError) -> bool:
        """Return True if the server is at fault, and count that in the breaker.

        A call counts once, not each attempt: else one outage that many runs meet at once would open the circuit for all.
        """
        at_fault = isinstance(error, ModelUnavailable | ModelStreamBroken)
        if at_fault:
            self._breaker.failed()
        return at_fault

    def _check_circuit(self) -> None:
        left = self._breaker.remaining()
        if left is not None:
            raise CircuitOpen(
                f"not called, because it failed {self._policy.breaker_failures} times in a row; "
                f"it is tried again in {left:.0f} s: wait, or give another model with FallbackModel",
                self.name,
                retry_after=left,
            )

    async def aclose(self) -> None:
        await close_model(self._model)


def make_retrying(error: ModelError, model: str, delay: float, said: bool) -> Retrying:
    """Return the chunk that reports a failed attempt; `model` makes the next one."""
    return Retrying(code=error.code, message=str(error), model=model, delay=delay, restarts=said)


async def close_model(model: Any) -> None:
    """Close the connections of a model, or its answer, if it has any."""
    if (close := getattr(model, "aclose", None)) is not None:
        await close()
