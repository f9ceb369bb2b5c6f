"""Port: the gate before a provider's account. Every model request of a runtime passes it.

A provider counts the requests of an account together, whoever makes them. So all runs of all processes that share a
store share one row for each account, a `GateTable`: a cursor of send times, and what was learned.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from math import isfinite
from typing import Any, Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from .errors import ConfigurationError
from .stores import Watch

WaitReason = Literal["rate_limit", "overloaded"]


class Rate(Struct, frozen=True, kw_only=True):
    """The limits of a provider's account. What is not given is learned from the provider."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Tokens of requests and answers together."""
    parallel: int | None = None
    """Requests at once, of all processes together."""

    def __post_init__(self) -> None:
        given: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__}
        for name, value in given.items():
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
                raise ConfigurationError(f"Rate.{name} is a number above 0, not {value!r:.40}")
            if name == "parallel" and not isinstance(value, int):
                raise ConfigurationError(f"Rate.parallel is a whole number, 1 or more, not {value!r}")


Rates = Mapping[str, Rate]
"""Limits by "provider:model" or "provider:*"; the models of one pattern share its limits."""


def check_rates(rates: Any) -> dict[str, Rate]:
    """Return the limits by pattern; raise ConfigurationError for what cannot be one."""
    if not isinstance(rates, Mapping):
        raise ConfigurationError(f'rates is a dict such as {{"openai:*": Rate(parallel=8)}}, not {rates!r:.80}')
    checked: dict[str, Rate] = {}
    for pattern, rate in rates.items():  # pyright: ignore[reportUnknownVariableType]  # given by a caller
        provider, colon, model = pattern.partition(":") if isinstance(pattern, str) else ("", "", "")
        if not (provider and colon and model) or "*" in provider or "*" in model[:-1]:
            raise ConfigurationError(
                f'rates: {pattern!r:.80} is not of the form "provider:model", "provider:*" or "provider:name*"'
            )
        if not isinstance(rate, Rate):
            raise ConfigurationError(f"rates: the limits of {pattern!r} are a Rate(…), not {rate!r:.80}")
        if rate == Rate():
            raise ConfigurationError(
                f"rates: Rate() of {pattern!r} limits nothing: {', '.join(Rate.__struct_fields__)}"
            )
        checked[str(pattern)] = rate  # pyright: ignore[reportUnknownArgumentType]
    return checked


def rate_of(rates: Rates, model: str) -> tuple[str, Rate] | None:
    """Return the most specific pattern that a model matches, and its limits."""
    if model in rates:
        return model, rates[model]
    found = [pattern for pattern in rates if pattern.endswith("*") and model.startswith(pattern[:-1])]
    pattern = max(found, key=len, default=None)
    return None if pattern is None else (pattern, rates[pattern])


class Account(Struct, frozen=True):
    """An account at a provider, as one of its models is asked."""

    model: str
    """As "provider:model"."""
    origin: str
    """The address of the server."""
    key: str = ""
    """The key; it stays in memory, a store keeps only a keyed digest of it."""

    def __repr__(self) -> str:
        return f"<account of {self.model} at {self.origin}>"


class Wait(Struct, frozen=True, kw_only=True):
    """A request that waits at a gate."""

    reason: WaitReason
    position: int
    """The number of requests before this one."""
    until: float
    """The time at which it is expected to be sent, in seconds since 1970."""
    message: str = ""
    """The refusal of the provider, if there was one."""


class Gates(Protocol):
    """The gates of a runtime. A model asks them for the gate of its account."""

    def gate_of(self, account: Account) -> Any: ...


class Caller(Protocol):
    """The run for which a model is asked."""

    @property
    def user(self) -> str:
        """The user; users take turns at a gate."""
        ...

    @property
    def gates(self) -> Gates: ...

    def waiting(self, wait: Wait) -> AbstractAsyncContextManager[None]:
        """Enter when a request has waited for a second; leave when it may be sent."""
        ...


class GateRow(Struct, frozen=True, kw_only=True):
    """The knowledge of an account that the processes of a database share. Times are by the clock of its table."""

    next_at: float = 0.0
    """The time after all send times that were handed out."""
    token_next_at: float = 0.0
    """The same for tokens."""
    generation: int = 0
    """Grows when a limit was learned: send times handed out before are void."""
    facts: bytes = b""
    """What was learned, as the gate encodes it."""
    now: float = 0.0


class GateTable(Protocol):
    """Contract: each method is atomic among all processes that share the table."""

    async def id_of(self, account: Account, scope: str) -> str:
        """Return the id of the gate of an account and a scope in it: a keyed digest, which does not tell the key."""
        ...

    async def read(self, gate: str) -> GateRow: ...

    async def reserve(self, gate: str, generation: int, seconds: float, token_seconds: float) -> GateRow | None:
        """Move the cursors on from now, or back by a negative number, and return the row; None if the generation is not that
        of the row, which is then to be read."""
        ...

    async def learn(
        self, gate: str, generation: int, facts: bytes, ahead: float, token_ahead: float, *, voids: bool
    ) -> GateRow | None:
        """Store facts, with the cursors at least so many seconds ahead of now; `voids` raises the generation. None as above."""
        ...

    async def hold(self, gate: str, owner: str, held: int, wanted: int, most: int) -> int:
        """Note that `owner` holds so many of the `most` slots of a gate, and give it up to `wanted` more; return how many.

        An owner that does not call this for `SLOT_LEASE` seconds counts as dead, and its slots are free again."""
        ...

    def watch(self, gate: str) -> AbstractContextManager[Watch]:
        """Watch for slots that are given back."""
        ...


SLOT_LEASE = 15.0


class SlotLook:
    """A watch on slots where nothing notifies: it looks now and then."""

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.2))


class LocalGateTable:
    """The rows of gates in the memory of this process; threads with event loops of their own may share it."""

    def __init__(self) -> None:
        self._rows: dict[str, GateRow] = {}
        self._slots: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()

    async def id_of(self, account: Account, scope: str) -> str:
        return f"{account.origin} {account.key} {scope}"

    async def read(self, gate: str) -> GateRow:
        return self._now(gate)

    def _now(self, gate: str) -> GateRow:
        return replace(self._rows.get(gate, GateRow()), now=asyncio.get_running_loop().time())

    async def reserve(self, gate: str, generation: int, seconds: float, token_seconds: float) -> GateRow | None:
        with self._lock:
            row = self._now(gate)
            if row.generation != generation:
                return None
            next_at, token_next_at = max(row.next_at, row.now), max(row.token_next_at, row.now)
            row = replace(row, next_at=next_at + seconds, token_next_at=token_next_at + token_seconds)
            self._rows[gate] = row
            return row

    async def learn(
        self, gate: str, generation: int, facts: bytes, ahead: float, token_ahead: float, *, voids: bool
    ) -> GateRow | None:
        with self._lock:
            row = self._now(gate)
            if row.generation != generation:
                return None
            next_at, token_next_at = row.now + ahead, max(row.token_next_at, row.now + token_ahead)
            if not voids:  # else the send times that were handed out and not used are void
                next_at = max(row.next_at, next_at)
            row = replace(row, facts=facts, generation=generation + voids, next_at=next_at, token_next_at=token_next_at)
            self._rows[gate] = row
            return row

    async def hold(self, gate: str, owner: str, held: int, wanted: int, most: int) -> int:
        with self._lock:
            slots = self._slots.setdefault(gate, {})
            slots[owner] = held
            given = max(0, min(wanted, most - sum(slots.values())))
            slots[owner] += given
            return given

    def watch(self, gate: str) -> AbstractContextManager[Watch]:
        return nullcontext(SlotLook())
