"""The budget of a run: limits that it shares with the runs above and below it.

Invariant: a step, a token or a cent is spent only if the runs above can still afford one closing turn each. A child
elsewhere has a grant (`grants.py`), and no other run spends that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal

from msgspec import UNSET, Struct

from ..core.messages import Role
from ..core.model import CHARACTERS_PER_TOKEN
from ..core.runs import DEFAULT_LIMITS, NO_USAGE, Limits, Usage
from ..log.state import RUNNING, LogState, RunState

Amount = Literal["children", "steps", "tokens", "cost"]
_NO_BUDGET = (None, None, None, None)
_ROUNDING = 1e-9
BUDGET = "budget:"
"""Names of limits that are budgets of a runtime (`spending.py`) begin so."""
_NOTICE = 200
"""Characters of the notice that this is the model's last turn."""


class Reached(Struct, frozen=True):
    """A limit that leaves one more turn, for the answer; with `is_over`, none."""

    name: str
    limit: float
    spent: float
    is_over: bool

    @property
    def code(self) -> str:
        """The limit as codes and terminations name it."""
        return self.name if self.name.startswith(BUDGET) else f"limit:{self.name}"

    @property
    def text(self) -> str:
        """The limit and what is used of it."""
        if self.name.startswith(BUDGET):
            return f"the budget {self.name.removeprefix(BUDGET)} is used up"
        return f"the limit on {self.name} is reached: {_number(self.spent)} of {_number(self.limit)} used"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def limits_above(tree: LogState, run: RunState) -> Iterator[tuple[RunState, Limits]]:
    """Yield this run and those above it that have limits."""
    above: RunState | None = run
    while above is not None:
        request = above.request
        if request.limits is not None:
            yield above, request.limits
        if request.above is not None:
            yield above, request.above.limits
        above = tree.parent_of(above)


def is_limited(tree: LogState, run: RunState) -> bool:
    """Return whether this run or one above it has a budget."""
    above: RunState | None = run
    while above is not None:  # not by `limits_above`: every run asks
        request = above.request
        if request.limits is not None and request.limits is not DEFAULT_LIMITS and _is_budget(request.limits):
            return True
        if request.above is not None and _is_budget(request.above.limits):
            return True
        above = tree.parent_of(above)
    return False


def _is_budget(limits: Limits) -> bool:
    return (limits.steps, limits.tokens, limits.cost, limits.seconds) != _NO_BUDGET


def limits_cost(tree: LogState, run: RunState) -> bool:
    return any(limits.cost is not None for _, limits in limits_above(tree, run))


def reached(tree: LogState, run: RunState, now: float) -> Reached | None:
    """Return the first limit of this run or one above it that forbids the next step, or allows it as the last one."""
    last: Reached | None = None
    for above, limits in limits_above(tree, run):
        for found in _reached(tree, run, above, limits, now):
            if found.is_over:
                return found
            last = last or found
    return last


def is_reached(tree: LogState, run: RunState, above: RunState, limits: Limits, now: float) -> bool:
    """Return whether a limit of `above` leaves at most one more turn."""
    return any(True for _ in _reached(tree, run, above, limits, now))


def _reached(tree: LogState, run: RunState, above: RunState, limits: Limits, now: float) -> Iterator[Reached]:
    """Yield the limits of `above` that leave at most one more turn, after what `runs_ahead` are sure to need."""
    total = above.total
    if limits.seconds is not None and (elapsed := above.elapsed(now)) >= limits.seconds:
        yield Reached("seconds", limits.seconds, round(elapsed, 2), True)
    if limits.steps is None and limits.tokens is None and limits.cost is None:
        return
    ahead = runs_ahead(tree, run, above)
    if limits.steps is not None:
        left = limits.steps - above.total_steps - len(ahead) - held(tree, above, "steps")
        if left < 2:
            yield Reached("steps", limits.steps, above.total_steps, left < 1)
    if limits.tokens is None and limits.cost is None:
        return
    tokens, cost = next_call(tree, run, above)
    reserved = [next_call(tree, one, above) for one in ahead]
    if limits.tokens is not None:
        taken = total.tokens + sum([one[0] for one in reserved]) + held(tree, above, "tokens")
        yield from _amount("tokens", limits.tokens, total.tokens, taken, tokens, run)
    if limits.cost is not None:
        taken = total.cost + sum([one[1] for one in reserved]) + held(tree, above, "cost")
        yield from _amount("cost", limits.cost, total.cost, taken, cost, run)


def _amount(name: str, limit: float, spent: float, taken: float, needed: float, run: RunState) -> Iterator[Reached]:
    most = limit + limit * _ROUNDING
    # The size of a first call is unknown: it may start if anything is left.
    is_over = taken + needed > most or (not needed and not run.step and taken >= limit)
    if is_over or taken + 2 * needed > most or taken >= limit:
        yield Reached(name, limit, spent, is_over)


def next_call(tree: LogState, run: RunState, above: RunState) -> tuple[float, float]:
    """Estimate the tokens and cost of a run's next model call: those of its last call, and the messages since then."""
    last = run.last_call
    if last is NO_USAGE:  # it has made none: estimate by other runs of its agent, else by all
        agent, total = run.identity.agent, above.total
        alike = [one.last_call for one in tree.runs.values() if one.identity.agent == agent]
        if any(one is not NO_USAGE for one in alike):
            return max(one.tokens for one in alike), max(one.cost for one in alike)
        return (total.tokens / total.requests, total.cost / total.requests) if total.requests else (0, 0)
    if not last.tokens:
        return 0, last.cost
    added = _NOTICE
    for message in reversed(run.messages):
        if message.role is Role.ASSISTANT:
            break
        added += len(message.text)
    tokens = last.tokens + last.output_tokens + added / CHARACTERS_PER_TOKEN
    return tokens, last.cost * tokens / last.tokens


def refuse_first_call(tree: LogState, run: RunState, usage: Usage) -> tuple[str, str] | None:
    """Return the limit that the first request of a run would pass with about `usage`, and the reason as text."""
    for above, limits in limits_above(tree, run):
        ahead = [next_call(tree, one, above) for one in runs_ahead(tree, run, above)]
        for place, name in enumerate(("tokens", "cost")):
            limit, spent, needed = getattr(limits, name), getattr(above.total, name), getattr(usage, name)
            taken = spent + sum([one[place] for one in ahead]) + held(tree, above, name)
            if limit is not None and taken + needed > limit * (1 + _ROUNDING):
                amounts = f"it needs about {_number(needed)}, {_number(spent)} of {_number(limit)} are used"
                return name, f"the limit on {name} is too small for the first request: {amounts}"
    return None


def runs_ahead(tree: LogState, run: RunState, above: RunState) -> list[RunState]:
    """Return the runs whose next turn must stay affordable before `run` may have its own."""
    parent = None if run is above else tree.parent_of(run)
    return [*closing_from(tree, parent, above), *in_turn(tree, run, above)]


def closing_from(tree: LogState, parent: RunState | None, above: RunState) -> Iterator[RunState]:
    """Yield the runs from a parent up to `above`: each needs a closing turn."""
    while parent is not None:
        if parent.status is RUNNING:
            yield parent
        parent = None if parent is above else tree.parent_of(parent)


def in_turn(tree: LogState, run: RunState | None, above: RunState) -> Iterator[RunState]:
    """Yield the other runs under `above` whose model is answering: their usage is not counted yet."""
    for one in tree.runs.values():
        if one is not run and one.step_open and not one.answered and one.status is RUNNING:
            if is_within(tree, one, above):
                yield one


def time_left(tree: LogState, run: RunState, now: float) -> float | None:
    """Return the seconds until a limit on time ends this run; None if there is no such limit.

    A run above that reaches its limit stops the children it waits for. A detached run must watch those limits itself.
    """
    found = inf
    for above, limits in limits_above(tree, run):
        if limits.seconds is not None and (above is run or run.request.detached):
            found = min(found, limits.seconds - above.elapsed(now))
    return None if found == inf else max(found, 0.0)


def limit_reached(tree: LogState, run: RunState, name: str, now: float) -> Reached:
    """Return, of the limits with that name on this run and those above it, the one that is used up the most."""
    if name.startswith(BUDGET):
        return Reached(name, 0, 0, True)
    found = [
        Reached(name, limit, _spent(above, name, now), True)
        for above, limits in limits_above(tree, run)
        if (limit := getattr(limits, name)) is not None
    ]
    return max(found, key=lambda one: one.spent / one.limit if one.limit else inf, default=Reached(name, 0, 0, True))


def _spent(run: RunState, name: str, now: float) -> float:
    match name:
        case "steps":
            return run.total_steps
        case "tokens":
            return run.total.tokens
        case "cost":
            return run.total.cost
        case _:
            return round(run.elapsed(now), 2)


def deadline(tree: LogState, run: RunState, now: float) -> float | None:
    """Return the time at which the first limit on time is reached, if no run is suspended before that."""
    ends = [
        now + limits.seconds - above.elapsed(now)
        for above, limits in limits_above(tree, run)
        if limits.seconds is not None
    ]
    return min(ends, default=None)


def refuse_child(tree: LogState, run: RunState, dispatching: Sequence[RunState] = ()) -> tuple[str, int] | None:
    """Return the name and value of the limit that forbids another child of this run.

    `dispatching` holds the runs that are starting a child now, once for each child.
    """
    depth = run.identity.depth + 1
    for above, limits in limits_above(tree, run):
        if limits.depth is not UNSET and depth - above.identity.depth > limits.depth:
            return "depth", limits.depth
        if limits.children is UNSET:
            continue
        count: float = above.total_children
        if dispatching or tree.grants:
            count += starting(tree, above, dispatching) + held(tree, above, "children")
        if count >= limits.children:
            return "children", limits.children
    return None


def exceeded(tree: LogState, run: RunState) -> Reached | None:
    """Return a limit on steps, tokens or cost that a run elsewhere has passed, counting the grants of other runs."""
    names: tuple[Amount, ...] = ("steps", "tokens", "cost")
    for above, limits in limits_above(tree, run):
        for name in names:
            if (limit := getattr(limits, name)) is not None:
                spent = used(above, name)
                if spent + held(tree, above, name, but=run.run_id) > limit + limit * _ROUNDING:
                    return Reached(name, limit, spent, True)
    return None


def starting(tree: LogState, above: RunState, dispatching: Sequence[RunState]) -> int:
    """Return the number of children under a run that are about to start."""
    return sum([is_within(tree, one, above) for one in dispatching]) if dispatching else 0


def held(tree: LogState, above: RunState, name: Amount, but: str = "") -> float:
    """Return the unused part of the grants of all children elsewhere under `above`, except the child `but`."""
    total: float = 0
    for run_id, grant in tree.grants.items():
        granted = grant.limits.get(name)
        if granted is not None and run_id != but and is_within(tree, tree.runs.get(grant.run_id), above):
            total += max(granted - used(tree.runs.get(run_id), name), 0)
    return total


def used(run: RunState | None, name: Amount) -> float:
    """Return how much a run and its descendants have used, as far as this log knows."""
    if run is None:
        return 0
    match name:
        case "steps":
            return run.total_steps
        case "children":
            return run.total_children
        case _:
            return getattr(run.total, name)


def is_within(tree: LogState, run: RunState | None, above: RunState) -> bool:
    """Return whether `run` is `above` or a descendant of it."""
    while run is not None and run is not above:
        run = tree.parent_of(run)
    return run is not None


def child_refusal(limit: str, value: int) -> str:
    """Return the text that tells the model why a child is refused."""
    if limit == "depth":
        return f"agents may be nested {value} deep: do this yourself"
    return f"this tree may start {value} children: go on with what you have"
