"""Budgets: what a tree of runs may use together."""

from __future__ import annotations

import asyncio
from collections import deque

from ..core.journal import Journal
from ..core.runs import Limits, Usage

_DEFAULTS = Limits()


class Slots:
    """How many tool calls of a tree run at once. A call that starts a child gives its slot back for good, so a tree
    cannot wait for itself. A run with a limit of its own takes a slot there and one above."""

    __slots__ = ("_above", "_free", "_waiting")

    def __init__(self, limit: int, above: Slots | None = None) -> None:
        self._free, self._above = limit, above
        self._waiting: deque[asyncio.Future[None]] | None = None
        """Who waits for a slot; most trees never have anybody."""

    def take_now(self) -> bool:
        """A slot, if one is free."""
        if self._free > 0 and (self._above is None or self._above.take_now()):
            self._free -= 1
            return True
        return False

    async def take(self) -> None:
        """A slot, when one is free; first come, first served."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._turn()
        if self._above is not None:
            try:
                await self._above.take()
            except asyncio.CancelledError:
                self._give_own_back()
                raise

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        if self._waiting is None:
            self._waiting = deque()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_own_back()  # it was handed a slot and never used it
            raise

    def give_back(self) -> None:
        self._give_own_back()
        if self._above is not None:
            self._above.give_back()

    def _give_own_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def child_refusal(limit: str, value: int) -> str:
    """What to say of a limit that stands in the way of a child."""
    if limit == "depth":
        return f"agents may be nested {value} deep: do this yourself"
    return f"this tree may start {value} children: go on with what you have"


class Budget:
    """Counts what a run uses against its own limits and those of every run above it."""

    __slots__ = (
        "children",
        "cost",
        "deadline",
        "depth",
        "limited",
        "limits",
        "parent",
        "slots",
        "steps",
        "tokens",
    )

    def __init__(self, limits: Limits, started_at: float, parent: Budget | None = None, depth: int = 0) -> None:
        self.limits, self.parent, self.depth = limits, parent, depth
        self.steps = self.tokens = self.children = 0
        self.cost = 0.0
        if parent is not None and (limits == _DEFAULTS or limits.parallel >= parent.limits.parallel):
            self.slots: Slots = parent.slots
        else:
            self.slots = Slots(limits.parallel, None if parent is None else parent.slots)
        deadlines = [started_at + limits.seconds] if limits.seconds is not None else []
        if parent is not None and parent.deadline is not None:
            deadlines.append(parent.deadline)
        self.deadline = min(deadlines) if deadlines else None
        counted = limits.steps is not None or limits.tokens is not None or limits.cost is not None
        self.limited: bool = counted or self.deadline is not None or (parent is not None and parent.limited)
        """Whether there is anything to reach, here or above; without it there is nothing to count."""

    def below(self, limits: Limits, started_at: float, depth: int) -> Budget:
        """The budget of a run at that depth: this one, where nothing is set that would narrow it."""
        # With a deadline each run has its own, which is put off when it has waited for a human.
        if limits == _DEFAULTS and self.deadline is None:
            return self
        return Budget(limits, started_at, self, depth)

    def spend(self, usage: Usage) -> None:
        """Count one model call, here and above."""
        if not self.limited:
            return
        self.steps += 1
        self.tokens += usage.tokens
        self.cost += usage.cost
        if self.parent is not None:
            self.parent.spend(usage)

    @property
    def limits_cost(self) -> bool:
        """Whether there is a limit on cost, here or above."""
        return self.limits.cost is not None or (self.parent is not None and self.parent.limits_cost)

    def exhausted(self, journal: Journal) -> str | None:
        """The name of the first limit that is reached, or None."""
        if not self.limited:
            return None
        limits = self.limits
        if limits.steps is not None and self.steps >= limits.steps:
            return "steps"
        if limits.tokens is not None and self.tokens >= limits.tokens:
            return "tokens"
        if limits.cost is not None and self.cost >= limits.cost:
            return "cost"
        if self.deadline is not None and journal.now() >= self.deadline:
            return "seconds"
        return None if self.parent is None else self.parent.exhausted(journal)

    def refuse_child(self, depth: int) -> tuple[str, int] | None:
        """The limit that stands in the way of a child at that depth, and its value; or None."""
        limits = self.limits
        # An agent that sets nothing does not narrow what the run above it may do.
        if self.parent is None or limits != _DEFAULTS:
            if depth - self.depth > limits.depth:
                return "depth", limits.depth
            if self.children >= limits.children:
                return "children", limits.children
        return None if self.parent is None else self.parent.refuse_child(depth)

    def count_child(self) -> None:
        self.children += 1
        if self.parent is not None:
            self.parent.count_child()
