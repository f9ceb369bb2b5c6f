"""The gates of a runtime by account, and the passage of one model call through a gate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from math import inf
from typing import NoReturn

from msgspec import Struct

from ..core.concurrency import join
from ..core.errors import ModelError, ModelRateLimited, ModelUnavailable
from ..core.gate import Account, Caller, GateTable, LocalGateTable, Rate, Rates, Wait, rate_of
from ..core.model import ModelRequest
from ..core.runs import unique
from .gate import SHOWN_AFTER, Gate, GateStatus, Pauses, Waiter
from .limits import Sent

_ANSWER = 1_000
"""Tokens of an answer that a request reserves if it sets no `max_tokens`."""


class AccountGates:
    """The gates of a runtime. With a table in a store, all processes that use the store share them."""

    def __init__(self, rates: Rates | None = None, table: GateTable | None = None) -> None:
        self._rates, self._table, self._owner = rates or {}, table or LocalGateTable(), unique()
        self._gates: dict[tuple[asyncio.AbstractEventLoop, str, str, str], Gate] = {}

    def use(self, rates: Rates) -> None:
        """Add limits; they hold for gates that are not made yet."""
        self._rates = {**self._rates, **rates}

    def gate_of(self, account: Account) -> Gate:
        """Return the gate of an account in the running event loop. Providers limit each model for itself; models that one
        pattern of `rates` names are limited together."""
        found = rate_of(self._rates, account.model)
        scope = account.model if found is None else found[0]
        key = (asyncio.get_running_loop(), account.origin, account.key, scope)
        gate = self._gates.get(key)
        if gate is None:
            self._gates = {known: each for known, each in self._gates.items() if not known[0].is_closed()}
            gate = self._gates[key] = Gate(
                account, scope, Rate() if found is None else found[1], self._table, self._owner
            )
        return gate

    def status(self) -> Iterator[GateStatus]:
        """Yield the gates that are in use, for metrics and people."""
        for (loop, _, _, scope), gate in list(self._gates.items()):
            if not loop.is_closed():
                yield gate.status(scope)

    def figures(self) -> Iterator[str]:
        """Yield the gates as Prometheus reads them."""
        found = list(self.status())
        known: dict[str, dict[str, float]] = {
            "waiting": {one.model: one.waiting for one in found},
            "under_way": {one.model: one.under_way for one in found},
            "closed": {one.model: int(one.reason is not None) for one in found},
            "requests_per_minute": {one.model: one.requests_per_minute or 0 for one in found},
            "refused_total": {one.model: one.refused for one in found},
        }
        for name, values in known.items() if found else ():
            yield f"# TYPE retinue_gate_{name} {'counter' if name == 'refused_total' else 'gauge'}"
            for model, value in values.items():
                shown = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
                yield f'retinue_gate_{name}{{model="{shown}"}} {round(value, 3)}'

    async def close(self) -> None:
        """Close the gates of the running event loop."""
        loop = asyncio.get_running_loop()
        for key in [key for key in self._gates if key[0] is loop]:
            await self._gates.pop(key).close()


class Alone(Struct):
    """A caller without a run: a model that is asked directly."""

    gates: AccountGates
    user: str = ""

    def waiting(self, wait: Wait) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class Passage:
    """One model call at a gate: it enters, is sent and may be refused, until it is answered."""

    def __init__(
        self, gate: Gate, caller: Caller, request: ModelRequest, pauses: Pauses, after: float | None = None
    ) -> None:
        self._gate, self._caller, self._pauses, self._after = gate, caller, pauses, after
        self._place, self._tokens = gate.arrive(), _ANSWER * 1.0
        if gate.counts_tokens:  # estimating takes time in long conversations
            self._tokens = _tokens_of(request)
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._refused_at: float | None = None
        self._error: ModelError | None = None
        self._sent: Sent | None = None
        self._headers: Mapping[str, str] = {}
        self.waited = 0.0
        """Seconds of waiting so far."""

    async def enter(self) -> None:
        """Return when the request may be sent; raise ModelError when it has waited for as long as it may."""
        gate = self._gate
        if self._error is None and (sent := gate.send_now(self._tokens)) is not None:
            self._sent = sent
            return
        began, loop = self._clock(), asyncio.get_running_loop()
        try:
            while self._sent is None:
                turn: asyncio.Future[Sent] = loop.create_future()
                waiter = Waiter(user=self._caller.user, place=self._place, tokens=self._tokens, turn=turn)
                gate.join_line(waiter)
                try:
                    await self._wait(waiter)
                except BaseException:
                    gate.leave_line(waiter)
                    raise
                self._take(turn)
        finally:
            self.waited += self._clock() - began

    async def _wait(self, waiter: Waiter) -> None:
        """Wait for a turn; after a second, the run shows that it waits and lends its slot."""
        gate, turn = self._gate, waiter.turn
        self._check_patience(waiter)
        if await join([turn], min(SHOWN_AFTER, max(0.0, self._left()))):
            return
        self._check_patience(waiter)
        async with self._caller.waiting(gate.wait_of(waiter)):
            while not await join([turn], max(0.0, self._left())):
                self._check_patience(waiter)

    def _take(self, turn: asyncio.Future[Sent]) -> None:
        """Use a turn, unless it was lost while the run waited for a slot of its worker."""
        sent = turn.result()
        if self._gate.is_stale(sent):
            self._gate.ended(sent, 0.0)
        else:
            self._sent = sent

    def _left(self) -> float:
        """Return the seconds that this call may still wait. The patience of a call that was not refused itself is for a
        provider that accepts nothing."""
        now, patience = self._clock(), self._pauses.patience
        if self._refused_at is None:
            left = max(patience, SHOWN_AFTER) - min(now - self._began, self._gate.since_accepted())
        else:
            left = patience - (now - self._refused_at)
        return left if self._after is None else min(left, self._began + self._after - now)

    def _check_patience(self, waiter: Waiter) -> None:
        if self._left() <= 0:
            self._give_up()
        if self._after is not None and self._gate.expected(self._gate.line.before(waiter)) > self._after:
            self._give_up()

    def _give_up(self) -> NoReturn:
        patience = self._pauses.patience
        limit = (
            f"RetryPolicy(patience={patience:g})" if self._after is None else f"FallbackModel(after={self._after:g})"
        )
        if self._error is not None:
            problem = f"{self._error.message}; waited for as long as {limit} allows"
            raise type(self._error)(problem, self._error.model, self._error.status, self._error.retry_after)
        reason, words = self._gate.refusal
        problem = f"no turn at the provider within what {limit} allows"
        error = ModelRateLimited if reason == "rate_limit" else ModelUnavailable
        raise error(f"{problem}: {words}" if words else problem, self._gate.account.model)

    def heard(self, headers: Mapping[str, str], *, is_accepted: bool) -> None:
        """The head of a response has arrived."""
        self._headers = headers
        if is_accepted and self._sent is not None:
            self._gate.accepted(self._sent, headers)

    def refused(self, error: ModelError) -> bool:
        """Judge an attempt that failed before its first word: True if it waits for another turn and costs no attempt."""
        sent, gate = self._sent, self._gate
        if sent is None or not gate.refused(sent, error, self._headers, self._pauses) or not self._pauses.patience:
            return False
        self._error, self._sent, self._headers = error, None, {}
        if self._refused_at is None:
            self._refused_at = self._clock()
        asked = error.retry_after or 0.0
        if asked > (self._pauses.patience if self._after is None else min(self._after, self._pauses.patience)):
            self._give_up_at_once(asked)
        return True

    def _give_up_at_once(self, asked: float) -> NoReturn:
        error = self._error
        assert error is not None
        problem = (
            f"{error.message}; it asks to wait {asked:g} s, more than RetryPolicy(patience={self._pauses.patience:g})"
        )
        raise type(error)(problem, error.model, error.status, error.retry_after)

    def end(self, tokens: float | None = None) -> None:
        """The attempt is over; `tokens` are those that it used, where that is known."""
        if self._sent is not None:
            self._gate.ended(self._sent, tokens)
            self._sent = None


def _tokens_of(request: ModelRequest) -> float:
    most = request.settings.get("max_tokens")
    answer = min(most, _ANSWER) if isinstance(most, int) and 0 < most < inf else _ANSWER
    return float(request.estimate_tokens() + answer)
