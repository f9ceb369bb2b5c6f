"""Grants: how the limits of a tree hold for children that have logs of their own, on other workers and servers.

The owner of a log grants such a child a part of what the limits above it still allow. It counts the grant as used until
the child has ended. A child on another worker can ask for more; one on a server cannot. So one process decides on each
limit, and all runs of a tree together stay within it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import floor, inf
from typing import TYPE_CHECKING

from msgspec import UNSET

from ..core.runs import Grant, Limits, RunIdentity, Usage
from ..core.tools import AgentTool, TaskTool
from ..log.ask import Wanted
from ..log.state import RUNNING, ChildRef, LogState, RunState
from .budget import (
    Amount,
    closing_from,
    held,
    in_turn,
    is_reached,
    is_within,
    limits_above,
    next_call,
    refuse_first_call,
    runs_ahead,
    starting,
    used,
)

if TYPE_CHECKING:
    from .execution import Execution

_PART = 4
"""A child is granted what it asks for, and this fraction (1/4) of the rest."""
_LARGE_PART = 2
"""The same (1/2) for steps, tokens and cost of a child that cannot ask for more."""


def first_grant(x: Execution, child: RunIdentity, own: Limits | None, *, can_ask: bool) -> Grant:
    """Return the grant of a new child, within its `own` limits.

    A child that cannot ask for more gets all that is left, shared only with other work, if its call has no other child.
    """
    tree, dispatching, call_id = x.log.tree, x.log.dispatching, child.parent_tool_call_id or ""
    if can_ask:
        return grant(tree, x.state, child.run_id, Wanted(), dispatching)
    call = x.state.calls.get(call_id)
    bound = None if call is None else x.toolbox.get(call.call.name)
    if bound is not None and isinstance(bound.tool, AgentTool | TaskTool):
        granted = _equal_part(tree, x.state, child.run_id, call_id, dispatching)
    else:
        granted = grant(tree, x.state, child.run_id, Wanted(), dispatching, _LARGE_PART)
    return Grant(granted.run_id, granted.limits.narrowed(own))


def grant(
    tree: LogState,
    parent: RunState,
    child_id: str,
    wanted: Wanted,
    dispatching: Sequence[RunState] = (),
    part: int = _PART,
) -> Grant:
    """Return the new grant of a child elsewhere; no amount is smaller than in its last grant."""
    before = tree.grants.get(child_id)
    amounts: dict[str, float] = {}
    for name, cap in _caps(tree, parent, child_id, dispatching).items():
        if cap == inf:
            continue
        known = 0 if before is None else before.limits.get(name) or 0
        wants = min(getattr(wanted, name), cap)
        amounts[name] = max(known, _amount(name, wants + (cap - wants) / (_PART if name == "children" else part)))
    return Grant(parent.run_id, Limits(**_shape(tree, parent), **amounts))  # pyright: ignore[reportArgumentType]


def _equal_part(
    tree: LogState, parent: RunState, child_id: str, call_id: str, dispatching: Sequence[RunState]
) -> Grant:
    """Return the grant of a child that its call only waits for: an equal part of what is left for all work in progress."""

    def parts(above: RunState) -> int:
        runs = [run for run in tree.runs.values() if is_within(tree, run, above)]
        return 1 + sum([_at_work(tree, run, call_id if run is parent else "") for run in runs])

    caps = _caps(tree, parent, child_id, dispatching, parts)
    amounts = {name: _amount(name, cap) for name, cap in caps.items() if cap != inf}
    return Grant(parent.run_id, Limits(**_shape(tree, parent), **amounts))  # pyright: ignore[reportArgumentType]


def _at_work(tree: LogState, run: RunState, call_id: str) -> int:
    """Return the number of parts a run itself needs: one for its turn, or one for each other call without a child."""
    if run.status is not RUNNING or run.run_id in tree.grants:
        return 0
    if not run.open_calls:
        return 1
    calls = [call for call in run.open() if call.call.id != call_id and not any(map(_is_open, call.children.values()))]
    begin = [child_id for child_id, one in tree.grants.items() if one.run_id == run.run_id]
    return max(0, len(calls) - sum([child_id not in run.children for child_id in begin]))


def _is_open(child: ChildRef) -> bool:
    return not child.ended and not child.abandoned


def _caps(
    tree: LogState,
    parent: RunState,
    child_id: str,
    dispatching: Sequence[RunState],
    parts: Callable[[RunState], int] = lambda above: 1,
) -> dict[Amount, float]:
    """Return the most that a child elsewhere may use in all: one part of what each limit above it still allows."""
    caps: dict[Amount, float] = {"children": inf, "steps": inf, "tokens": inf, "cost": inf}
    child = tree.runs.get(child_id)
    for above, limits in limits_above(tree, parent):
        count = parts(above)
        for name in caps:
            if (limit := limits.get(name)) is not None:
                others = used(above, name) - used(child, name) + held(tree, above, name, but=child_id)
                left = limit - others - _reserved(tree, parent, above, name, dispatching)
                caps[name] = min(caps[name], left / count)
    return caps


def _amount(name: str, cap: float) -> float:
    return max(cap if name == "cost" else floor(cap), 0)


def _shape(tree: LogState, parent: RunState) -> dict[str, int]:
    """Return the limits on depth and on parallel calls for a child of a run."""
    depth, parallel = sys.maxsize, sys.maxsize
    for above, limits in limits_above(tree, parent):
        if limits.depth is not UNSET:
            depth = min(depth, limits.depth - (parent.identity.depth + 1 - above.identity.depth))
        if limits.parallel is not UNSET:
            parallel = min(parallel, limits.parallel)
    return {"depth": max(depth, 0), "parallel": parallel}


def _reserved(
    tree: LogState, parent: RunState, above: RunState, name: Amount, dispatching: Sequence[RunState]
) -> float:
    """Return the amount to keep for others: children that start, closing turns above, and runs in a turn."""
    if name == "children":
        return starting(tree, above, dispatching)
    ahead = [*closing_from(tree, parent, above), *in_turn(tree, None, above)]
    if name == "steps":
        return len(ahead)
    return sum([next_call(tree, one, above)[name == "cost"] for one in ahead])


def falls_short(limits: Limits, wanted: Wanted) -> bool:
    """Return whether an amount in the limits is smaller than wanted."""
    names: tuple[Amount, ...] = ("children", "steps", "tokens", "cost")
    return any((limit := limits.get(name)) is not None and limit < getattr(wanted, name) for name in names)


# --- on the worker of a placed run


def _root(tree: LogState) -> RunState:
    return next(iter(tree.runs.values()))


def is_short(tree: LogState, run: RunState, now: float) -> bool:
    """Return whether the grant leaves less than two turns."""
    root = _root(tree)
    above = root.request.above
    return above is not None and is_reached(tree, run, root, above.limits, now)


def lacks_children(tree: LogState, run: RunState, dispatching: Sequence[RunState]) -> bool:
    """Return whether the grant allows no further child."""
    root = _root(tree)
    above = root.request.above
    limit = None if above is None else above.limits.get("children")
    return limit is not None and _children(tree, root, dispatching) >= limit


def _children(tree: LogState, root: RunState, dispatching: Sequence[RunState]) -> int:
    return root.total_children + starting(tree, root, dispatching) + int(held(tree, root, "children"))


def wanted_for(tree: LogState, run: RunState, dispatching: Sequence[RunState], first: Usage | None = None) -> Wanted:
    """Return the total grant with which a run can have two more turns and a child. `first` estimates its first call."""
    root = _root(tree)
    ahead = runs_ahead(tree, run, root)
    calls = [next_call(tree, one, root) for one in ahead]
    tokens, cost = next_call(tree, run, root) if first is None else (first.tokens, first.cost)
    return Wanted(
        children=_children(tree, root, dispatching) + 1,
        steps=root.total_steps + len(ahead) + int(held(tree, root, "steps")) + 2,
        tokens=root.total.tokens + sum([one[0] for one in calls]) + held(tree, root, "tokens") + 2 * tokens + 1,
        cost=root.total.cost + sum([one[1] for one in calls]) + held(tree, root, "cost") + 2 * cost,
    )


def wanted_with_child(tree: LogState, child_id: str, wanted: Wanted, dispatching: Sequence[RunState]) -> Wanted:
    """Return the total grant that this log needs to grant a placed child the wanted amounts."""
    root, child = _root(tree), tree.runs.get(child_id)
    parent = tree.runs.get(tree.grants[child_id].run_id) if child_id in tree.grants else None

    def total(name: Amount) -> float:
        others = used(root, name) - used(child, name) + held(tree, root, name, but=child_id)
        return others + getattr(wanted, name) + _reserved(tree, parent or root, root, name, dispatching)

    return Wanted(
        children=int(total("children")), steps=int(total("steps")), tokens=total("tokens"), cost=total("cost")
    )


async def widen_budget(x: Execution) -> None:
    """Ask for a larger grant until two turns are affordable, or no more is granted."""
    log = x.log
    while log.widen is not None and is_short(log.tree, x.state, x.now()):
        if not await log.widen(lambda: wanted_for(log.tree, x.state, log.dispatching)):
            return


async def widen_for_first_call(x: Execution, usage: Usage) -> None:
    """Ask for a larger grant if the first model call of a run needs one."""
    log = x.log
    while log.widen is not None and refuse_first_call(log.tree, x.state, usage) is not None:
        if not await log.widen(lambda: wanted_for(log.tree, x.state, log.dispatching, usage)):
            return


async def widen_for_child(x: Execution) -> None:
    """Ask for a larger grant if it allows no further child."""
    log = x.log
    while log.widen is not None and lacks_children(log.tree, x.state, log.dispatching):
        if not await log.widen(lambda: wanted_for(log.tree, x.state, log.dispatching)):
            return
