"""A provider in this process that enforces limits, for models in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from retinue import Message, ModelRequest, Rate, TextChunk, TurnEnd, Usage
from retinue.core.gate import Account, GateTable, LocalGateTable
from retinue.core.model import ModelChunk
from retinue.errors import ModelRateLimited, ModelUnavailable
from retinue.models.gates import AccountGates, Alone
from retinue.models.resilience import ResilientModel, RetryPolicy

HELLO = ModelRequest(messages=(Message.user("hello"),))


@dataclass
class Provider:
    """A token bucket in which refused requests count, a limit on requests at once, and times in which it is down."""

    rate: float | None = 10.0
    burst: float = 10.0
    parallel: int | None = None
    tells: bool = False
    """True if headers tell the limit."""
    retry_after: float | None = None
    status: int = 429
    seconds: float = 0.2
    """The length of an answer, whose head comes after a quarter."""
    down: tuple[float, float] = (-1.0, -1.0)
    lies: bool = False
    """True if headers tell that nothing was used."""
    arrivals: list[tuple[float, str, bool]] = field(default_factory=list[tuple[float, str, bool]])
    """The time, the words and the success of each request."""
    account: Account = Account("openai:m", "http://provider", "key")
    name: str = "openai:m"
    busy: int = 0
    most_busy: int = 0
    _level: float = 0.0
    _at: float = -1000.0

    @property
    def refused(self) -> int:
        return sum(not accepted for _, _, accepted in self.arrivals)

    async def stream(self, request: ModelRequest, on_head: Any = None) -> AsyncIterator[ModelChunk]:
        now = asyncio.get_running_loop().time()
        if self.rate is not None:
            self._level = min(self.burst, self._level + (now - self._at) * self.rate)
            self._at = now
        is_down = self.down[0] <= now < self.down[1]
        fits = (self.rate is None or self._level >= 1) and (self.parallel is None or self.busy < self.parallel)
        self._level = max(self._level - 1, 0.0)
        self.arrivals.append((now, request.messages[-1].text, fits and not is_down))
        headers = self._headers()
        await asyncio.sleep(0.005)
        if is_down:
            raise ModelUnavailable("nobody answers", self.name)
        if not fits:
            if on_head is not None:
                on_head(headers, is_accepted=False)
            error = ModelRateLimited if self.status == 429 else ModelUnavailable
            raise error("too many", self.name, self.status, self.retry_after)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            await asyncio.sleep(self.seconds / 4)
            if on_head is not None:
                on_head(headers, is_accepted=True)
            await asyncio.sleep(self.seconds * 3 / 4)
            yield TextChunk("hi")
            yield TurnEnd("stop", Usage(requests=1, input_tokens=90, output_tokens=10))
        finally:
            self.busy -= 1

    def _headers(self) -> Mapping[str, str]:
        if not self.tells or self.rate is None:
            return {}
        used = 0.0 if self.lies else self.burst - self._level
        names = ("limit", "remaining", "reset")
        values = (self.burst, int(self.burst - used), used / self.rate)
        return {f"x-ratelimit-{name}-requests": f"{value:.3f}" for name, value in zip(names, values, strict=True)}


class Process:
    """The gates of one process before a provider."""

    def __init__(
        self, provider: Provider, table: GateTable | None = None, policy: RetryPolicy | None = None, **rates: Rate
    ) -> None:
        given = {f"openai:{model}": rate for model, rate in rates.items()}
        self.gates = AccountGates(given, table or LocalGateTable())
        self.model = ResilientModel(provider, policy)

    async def ask(self, user: str = "", words: str = "hello") -> Usage:
        request = ModelRequest(messages=(Message.user(words),))
        usage = Usage()
        async for chunk in self.model.stream_for(request, Alone(self.gates, user)):
            if isinstance(chunk, TurnEnd):
                usage = chunk.usage
        return usage
