"""What a run holds of budgets: its next model call and one closing turn.

`hold_call` asks before each call; `settle_call` counts what the call has cost. A run that cannot hold both keeps the closing
turn that it has, tells the model, and ends with that turn. One without a closing turn ends at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.budgets import (
    NOTHING,
    WARN_AT,
    Account,
    Amount,
    Budgets,
    Holder,
    Refusal,
    Standing,
    refusal_of,
    unpriced,
)
from ..core.concurrency import Backoff, join
from ..core.errors import StoreError
from ..core.events import BudgetWarning
from ..core.messages import Message, Role, Visibility
from ..core.model import ModelRequest, estimate_tokens
from ..core.rows import Ending, Private
from ..core.runs import RunStatus, Usage

if TYPE_CHECKING:
    from .execution import Execution

T = TypeVar("T")

_NOTICE = 50
"""Tokens of the notice that this is the model's last turn."""


class Spending:
    """The holds of one run in this process."""

    def __init__(self, x: Execution, budgets: Budgets) -> None:
        self._x, self._budgets = x, budgets
        self._number = 0
        """The model calls of the run here."""
        self._accounts: dict[tuple[str, str, float], Account] = {}
        self._standings: Sequence[Standing] = ()
        self._call = self._closing = NOTHING
        """What is held for the call in flight, and for the closing turn."""
        self.has_closing = self.is_closing = False
        """The closing turn is held; it is the call in flight."""
        self.refusal: Refusal | None = None
        self._last: asyncio.Task[None] | None = None
        """The last write that this run does not wait for."""

    @property
    def _holder(self) -> Holder:
        x = self._x
        writer = x.log.writer
        return Holder(x.run_id, "", 0) if writer is None else Holder(x.run_id, writer.log_id, writer.epoch)

    async def hold(self, request: ModelRequest) -> Refusal | None:
        """Hold a call and a closing turn in every account of the run; return the refusal of the first one without room."""
        x, budgets = self._x, self._budgets
        if self._last is not None and not self._last.done():
            await join([self._last])  # the last call is counted before its hold is replaced
        accounts = await _patiently(lambda: budgets.accounts_of(x.identity, x.now()))
        self._number += 1
        self.is_closing = False
        self._accounts = {one.place: one for one in accounts}
        if not accounts:
            return None
        call, closing = self._estimate(request)
        if call is None or closing is None:
            if (limiting := next((one for one in accounts if one.budget.cost is not None), None)) is not None:
                return unpriced(limiting, x.model.name)
            call, closing = Amount(self._tokens(request)[0]), Amount(self._tokens(request)[1])
        table, holder, number = budgets.table, self._holder, self._number
        self._standings, full = await _patiently(lambda: table.hold(holder, number, accounts, call, closing))
        if full is not None and len(budgets.jobs):  # runs that have just ended here may still hold something
            await budgets.counted()
            self._standings, full = await _patiently(lambda: table.hold(holder, number, accounts, call, closing))
        for standing in self._standings:
            if standing.used >= WARN_AT and not standing.warned:
                await self._warn(standing.account, standing.spent)
        if full is not None:
            return refusal_of(full, call + closing)
        self._call, self._closing, self.has_closing = call, closing, True
        return None

    async def use_closing_turn(self) -> None:
        """Make the closing turn the next call. The run has none after it."""
        await _patiently(lambda: self._budgets.table.keep(self._holder, self._number))
        self._call, self._closing, self.has_closing, self.is_closing = self._closing, NOTHING, False, True

    def _tokens(self, request: ModelRequest) -> tuple[int, int]:
        """Estimate the tokens of a call, and of the closing turn after it."""
        last = self._x.state.last_call
        if last.input_tokens:  # what was read and written, and what is new since
            new = takewhile(lambda message: message.role is not Role.ASSISTANT, reversed(request.messages))
            read = last.tokens + sum(map(estimate_tokens, new))
        else:
            read = request.estimate_tokens()
        written = self._budgets.output_of(self._x.model.name, request.settings)
        return read + written, read + 2 * written + _NOTICE

    def _estimate(self, request: ModelRequest) -> tuple[Amount | None, Amount | None]:
        """Estimate a call and the closing turn; None where the price is not known."""
        both = self._tokens(request)
        written = self._budgets.output_of(self._x.model.name, request.settings)
        found: list[Amount | None] = []
        for tokens in both:
            cost = self._cost(Usage(requests=1, input_tokens=tokens - written, output_tokens=written))
            found.append(None if cost is None else Amount(tokens, cost))
        return found[0], found[1]

    def _cost(self, usage: Usage) -> float | None:
        name, resolver = self._x.model.name, self._x.resolver
        cost = resolver.price(name, usage) if resolver.prices else None
        return self._budgets.mean_cost(name) if cost is None else cost

    async def settle(self, usage: Usage, *, is_known: bool) -> None:
        """Count a call that has ended, without waiting for the store where nothing is to be announced."""
        budgets, cost = self._budgets, usage.cost if is_known else None
        if usage.tokens or usage.cost:
            budgets.note_call(self._x.model.name, usage, cost)
        if not self._accounts:
            return
        spent = Amount(usage.tokens, self._call.cost if cost is None else cost)
        counted = self._count(spent, self._number)
        if any(self._may_warn(one, spent) for one in self._standings):
            await counted
        else:
            self._start(counted)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Write without waiting, after the last write of this run."""
        before = self._last

        async def write() -> None:
            if before is not None:
                await join([before])
            await work

        self._last = self._budgets.jobs.start(write())

    def drop(self, said: int) -> None:
        """Count a call that has failed or was stopped: as its hold if it had begun to answer, else as nothing."""
        if self._accounts:
            self._start(self._count(self._call if said else NOTHING, self._number))

    async def _count(self, spent: Amount, number: int) -> None:
        closing = self._closing if self.has_closing else NOTHING
        for one in await _patiently(lambda: self._budgets.table.settle(self._holder, number, spent, closing)):
            account = self._accounts.get(one.place)
            if account is not None and not one.warned:
                standing = Standing(account=account, spent=one.spent)
                if standing.used >= WARN_AT:
                    await self._warn(account, one.spent)

    @staticmethod
    def _may_warn(standing: Standing, spent: Amount) -> bool:
        after = Standing(account=standing.account, spent=standing.spent + spent)
        return not standing.warned and after.used >= WARN_AT

    async def _warn(self, account: Account, spent: Amount) -> None:
        if not await self._budgets.table.warn(account):
            return
        budget = account.budget
        self._budgets.warned[budget.name] += 1
        warning = BudgetWarning(
            budget=budget.name,
            cost=budget.cost,
            tokens=budget.tokens,
            spent_cost=spent.cost,
            spent_tokens=spent.tokens,
            renews_at=account.renews_at,
        )
        if not self._x.is_over:
            self._x.emit(warning)

    def release(self) -> None:
        """Give back what the run holds, at the end of its leg."""
        if self._accounts:
            self.has_closing = False
            self._start(_patiently(lambda: self._budgets.table.release(self._holder)))


async def _patiently(write: Callable[[], Awaitable[T]]) -> T:
    """Write to the accounts; while the store cannot be reached, try again, as the log does."""
    backoff = Backoff()
    while True:
        try:
            return await write()
        except StoreError as exc:
            if not exc.transient:
                raise
            await backoff.wait(exc)


async def hold_extra_call(x: Execution, request: ModelRequest) -> Refusal | None:
    """Hold what a model call may cost that the run can do without, such as a summary; return why it may not be made."""
    if x.spending is None:
        if not x.resolver.budgets.may_apply():
            return None
        x.spending = Spending(x, x.resolver.budgets)
    return await x.spending.hold(request)


async def hold_call(x: Execution, request: ModelRequest) -> Ending | None:
    """Hold what a model call may cost; return an ending if the run may not make it. If only the closing turn is left, the
    model is told so (`Spending.is_closing`)."""
    refusal, spending = await hold_extra_call(x, request), x.spending
    if refusal is None or spending is None:
        return None
    spending.refusal = refusal
    x.resolver.budgets.refused[refusal.name] += 1
    if not spending.has_closing:
        return Ending(RunStatus.FAILED, refusal.name, refusal.text)
    await spending.use_closing_turn()
    said = f"[{refusal.name}] {refusal.text}: no further calls are made, answer with what you have"
    message = Message.user(said, id=x.next_message_id(), visibility=Visibility.INTERNAL)
    x.emit_error(said, refusal.name, Private(message=message, limit=refusal.name))
    return None
