"""A model that does not give up at once: retries with a pause, and a circuit breaker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

from msgspec import Struct

from ..core.errors import ModelError
from ..core.failures import CircuitOpen, ModelStreamBroken, ModelUnavailable
from ..core.model import Model, ModelChunk, ModelRequest, Retrying
from .breaker import CircuitBreaker


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How often a failed model call is made again, and after how long."""

    attempts: int = 4
    """All tries of one call together; 1 is never again."""
    first_delay: float = 0.5
    """Seconds before the second try; it doubles with each, and a random half of it is left out."""
    max_delay: float = 30.0
    max_wait: float = 60.0
    """The longest time a server may ask us to wait; where it asks for more, the call fails at once."""
    breaker_failures: int = 5
    """Calls in a row that fail for good, after which the model is not asked for `breaker_seconds`; 0 is never."""
    breaker_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"RetryPolicy.attempts must be at least 1, got {self.attempts}")

    def delay(self, attempt: int, error: ModelError) -> float | None:
        """Seconds to wait after the n-th try; None where there is no further one."""
        if attempt >= self.attempts or not error.retryable:
            return None
        backoff = min(self.max_delay, self.first_delay * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        asked = error.retry_after or 0.0
        if asked > self.max_wait:
            return None
        return max(backoff, asked)


class ResilientModel:
    """Asks a model again when it fails. What a failed try had begun to say is taken back with a `Retrying` chunk."""

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
                    yield retrying(exc, self.name, delay, said)
                finally:
                    if (close := getattr(chunks, "aclose", None)) is not None:
                        await close()
                await asyncio.sleep(delay)
        finally:
            if not judged:
                self._breaker.abandoned()

    def _blame(self, error: ModelError) -> bool:
        """Whether the server is at fault, and then the breaker knows. A whole call counts, not each try of it: else a
        hiccup that many runs feel at once would open the circuit for all."""
        at_fault = isinstance(error, ModelUnavailable | ModelStreamBroken)
        if at_fault:
            self._breaker.failed()
        return at_fault

    def _check_circuit(self) -> None:
        left = self._breaker.remaining()
        if left is not None:
            raise CircuitOpen(
                f"not asked, because it failed {self._policy.breaker_failures} times in a row; "
                f"it is tried again in {left:.0f} s: wait, or give another model with FallbackModel",
                self.name,
                retry_after=left,
            )

    async def aclose(self) -> None:
        await close_model(self._model)


def retrying(error: ModelError, model: str, delay: float, said: bool) -> Retrying:
    """What to tell of a failed try before the next one, which `model` makes."""
    return Retrying(code=error.code, message=str(error), model=model, delay=delay, restarts=said)


async def close_model(model: Any) -> None:
    """Close the connections of a model that has any."""
    if (close := getattr(model, "aclose", None)) is not None:
        await close()
