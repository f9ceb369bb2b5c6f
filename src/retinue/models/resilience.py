"""A model call behind the gate of its account, and the retries of what really failed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from math import isfinite
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.errors import ConfigurationError, ModelError
from ..core.gate import Caller
from ..core.model import Model, ModelChunk, ModelRequest, Retrying, TurnEnd
from .gate import Pauses
from .gates import AccountGates, Alone, Passage


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """The attempts of a model call, and how long it waits for a provider that refuses.

    A request that is refused (too many requests, overloaded, not reachable) waits at the gate of its account for another
    turn and costs no attempt. A broken stream, a silent server or an unreadable answer is a failed attempt.
    """

    attempts: int = 4
    """All attempts of one call; 1 means no retry."""
    first_delay: float = 0.5
    """Seconds before the second attempt. The delay doubles with each attempt and is shortened at random by up to half."""
    max_delay: float = 30.0
    patience: float = 600.0
    """Seconds in which a refused request may wait for another turn. If the provider asks for more, the call fails at once.
    With 0 a refused request is a failed attempt."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigurationError(f"RetryPolicy.attempts must be at least 1, got {self.attempts}")
        for name in ("first_delay", "max_delay", "patience"):
            if not (isfinite(value := getattr(self, name)) and value >= 0):
                raise ConfigurationError(f"RetryPolicy.{name} is a number of seconds, 0 or more, not {value!r}")

    def delay(self, attempt: int, error: ModelError) -> float | None:
        """Return the seconds to wait after an attempt, None if there is no further one."""
        if attempt >= self.attempts or not error.retryable:
            return None
        backoff = min(self.max_delay, self.first_delay * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        asked = error.retry_after or 0.0
        return None if asked > self.patience else max(backoff, asked)


class ResilientModel:
    """Asks a model in its turn, and again when it fails. A `Retrying` chunk drops the partial answer of a failed attempt.

    A model with an `account` is asked through the gate of the account; its `stream` takes a function that it calls with
    the head of each response.
    """

    def __init__(self, model: Model, policy: RetryPolicy | None = None, context_window: int | None = None) -> None:
        self._model, self._policy = model, policy or RetryPolicy()
        self._account = getattr(model, "account", None)
        policy = self._policy
        self._pauses = Pauses(policy.first_delay, policy.max_delay, policy.patience)
        self._alone = Alone(AccountGates())
        self.name, self.context_window = model.name, context_window
        """The name, and the tokens that it reads; None if not known."""

    def __repr__(self) -> str:
        return repr(self._model)

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        """Ask without a run: the model then has gates of its own."""
        return self.stream_for(request, self._alone)

    async def stream_for(
        self, request: ModelRequest, caller: Caller, after: float | None = None
    ) -> AsyncIterator[ModelChunk]:
        """Ask for a run, through the gate of its runtime; with `after`, give up when the request waits for so many seconds."""
        passage = None
        if self._account is not None:
            gate: Any = caller.gates.gate_of(self._account)
            passage = Passage(gate, caller, request, self._pauses, after)
        attempt = 0
        while True:
            if passage is not None:
                await passage.enter()
            said, tokens = False, None
            model: Any = self._model
            chunks: Any = model.stream(request) if passage is None else model.stream(request, passage.heard)
            try:
                async for chunk in chunks:
                    if passage is not None and type(chunk) is TurnEnd:
                        tokens = float(chunk.usage.tokens)
                        if passage.waited >= 0.001:
                            chunk = replace(chunk, usage=replace(chunk.usage, waited=passage.waited))
                    yield chunk
                    said = True
                return
            except ModelError as exc:
                if passage is not None and not said and passage.refused(exc):
                    continue
                attempt += 1
                delay = self._policy.delay(attempt, exc)
                if delay is None:
                    raise
                yield make_retrying(exc, self.name, delay, said)
            finally:
                if passage is not None:
                    passage.end(tokens)
                await close_model(chunks)
            await asyncio.sleep(delay)

    async def aclose(self) -> None:
        await self._alone.gates.close()
        await close_model(self._model)


def make_retrying(error: ModelError, model: str, delay: float, said: bool) -> Retrying:
    """Return the chunk that reports a failed attempt; `model` makes the next one."""
    return Retrying(code=error.code, message=str(error), model=model, delay=delay, restarts=said)


async def close_model(model: Any) -> None:
    """Close the connections of a model, or its answer, if it has any."""
    if (close := getattr(model, "aclose", None)) is not None:
        await close()
