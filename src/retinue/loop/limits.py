"""Limits: what a tree of runs may use together. What was used is in the state; this compares."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence

from ..core.runs import Limits
from .state import LogState, RunState


class Slots:
    """Slots for tool calls that run at once in a tree. A call that starts a child gives its slot back for good, so a tree
    cannot wait for itself. A run with a limit of its own takes a slot there and one above."""

    __slots__ = ("_above", "_free", "_waiting", "limit")

    def __init__(self, limit: int, above: Slots | None = None) -> None:
        self.limit, self._free, self._above = limit, limit, above
        self._waiting: deque[asyncio.Future[None]] | None = None
        """Calls that wait for a slot; most trees never have any."""

    def below(self, limits: Limits | None) -> Slots:
        """The slots of a child with these limits: the same ones where they are not narrower."""
        return self if limits is None or limits.parallel >= self.limit else Slots(limits.parallel, self)

    def take_now(self) -> bool:
        """Take a slot if one is free."""
        if self._free > 0 and (self._above is None or self._above.take_now()):
            self._free -= 1
            return True
        return False

    async def take(self) -> None:
        """Take a slot when one is free; first come, first served."""
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


def is_limited(tree: LogState, run: RunState) -> bool:
    """Return whether this run or one above it has a budget."""
    return any(
        limits.steps is not None or limits.tokens is not None or limits.cost is not None or limits.seconds is not None
        for _, limits in _limits(tree, run)
    )


def limits_cost(tree: LogState, run: RunState) -> bool:
    return any(limits.cost is not None for _, limits in _limits(tree, run))


def exhausted(tree: LogState, run: RunState, now: float) -> str | None:
    """The name of the first limit that is reached, of this run or one above it; or None."""
    for above, limits in _limits(tree, run):
        if limits.steps is not None and above.total_steps >= limits.steps:
            return "steps"
        if limits.tokens is not None and above.total.tokens >= limits.tokens:
            return "tokens"
        if limits.cost is not None and above.total.cost >= limits.cost:
            return "cost"
        if limits.seconds is not None and above.elapsed(now) >= limits.seconds:
            return "seconds"
    return None


def deadline(tree: LogState, run: RunState, now: float) -> float | None:
    """When the first limit on time is reached, if nobody waits before that."""
    ends = [
        now + limits.seconds - above.elapsed(now) for above, limits in _limits(tree, run) if limits.seconds is not None
    ]
    return min(ends) if ends else None


def refuse_child(tree: LogState, run: RunState, dispatching: Sequence[RunState] = ()) -> tuple[str, int] | None:
    """The limit that stands in the way of a child of this run, and its value; or None.

    `dispatching` are runs that are just starting a child, once for each.
    """
    depth = run.identity.depth + 1
    for above, limits in _limits(tree, run):
        if depth - above.identity.depth > limits.depth:
            return "depth", limits.depth
        started = above.total_children + sum(_is_within(tree, one, above) for one in dispatching)
        if started >= limits.children:
            return "children", limits.children
    return None


def _is_within(tree: LogState, run: RunState | None, above: RunState) -> bool:
    """Whether a run is another, or below it."""
    while run is not None and run is not above:
        run = tree.parent_of(run)
    return run is not None


def child_refusal(limit: str, value: int) -> str:
    """The reason for which a child is refused, for the model."""
    if limit == "depth":
        return f"agents may be nested {value} deep: do this yourself"
    return f"this tree may start {value} children: go on with what you have"


def _limits(tree: LogState, run: RunState) -> Iterator[tuple[RunState, Limits]]:
    """This run and those above it, as far as they have limits."""
    above: RunState | None = run
    while above is not None:
        if above.request.limits is not None:
            yield above, above.request.limits
        above = tree.parent_of(above)
