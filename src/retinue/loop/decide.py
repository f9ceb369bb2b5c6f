"""Decisions against what a run waits for: whatever does not fit is refused before anything changes."""

from __future__ import annotations

from collections.abc import Mapping

import jsonschema_rs
from msgspec import Struct

from ..core.decisions import Decision
from ..core.errors import DecisionRefused
from ..core.lifecycle import RunStatus
from ..core.results import SuspendTicket
from .children import waiting_children
from .scope import RunScope


class Leaf(Struct, frozen=True):
    """A call that waits for a human, somewhere in a tree of runs, with the runs and calls above it."""

    scopes: tuple[RunScope, ...]
    path: tuple[str, ...]
    ticket: SuspendTicket | None

    @property
    def names(self) -> tuple[str, ...]:
        """By what it can be answered."""
        ticket = (self.ticket.id,) if self.ticket is not None else ()
        return (self.path[-1], "/".join(self.path), *ticket)


def leaves(run: RunScope, scopes: tuple[RunScope, ...] = (), path: tuple[str, ...] = ()) -> list[Leaf]:
    """Everything a run waits for, its own calls and those of its children."""
    found: list[Leaf] = []
    for call_id, open_call in run.open_calls.items():
        below = waiting_children(open_call)
        for child in below:
            found.extend(leaves(child, (*scopes, run), (*path, call_id)))
        if not below:
            found.append(Leaf((*scopes, run), (*path, call_id), open_call.ticket))
    return found


def match_decisions(run: RunScope, given: Mapping[str, Decision]) -> dict[str, Decision]:
    """The new decisions by call id. One that was taken in before is left out, so repeating it changes nothing."""
    if not given:
        raise DecisionRefused(f"run {run.run_id!r}: no decision was given")
    for target, decision in given.items():
        if not isinstance(decision, Decision):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DecisionRefused(f"the decision on {target!r} is {decision!r}: use Decision.resume(…) or .cancel(…)")
    fresh = {target: decision for target, decision in given.items() if (target, decision.id) not in run.decided}
    if not fresh:
        return {}
    if run.status is not RunStatus.SUSPENDED:
        raise DecisionRefused(f"run {run.run_id!r} is {run.status}, it waits for nothing")
    waiting = leaves(run)
    matched: dict[tuple[str, ...], tuple[Leaf, Decision]] = {}
    for target, decision in fresh.items():
        leaf = _find(run, waiting, target)
        if leaf.path in matched:
            raise DecisionRefused(f"run {run.run_id!r}: call {leaf.path[-1]!r} is decided on twice")
        if decision.action == "resume" and leaf.ticket is not None:
            _check_payload(leaf.ticket, decision)
        matched[leaf.path] = leaf, decision
    for leaf, decision in matched.values():
        _hand_down(leaf, decision)
        run.decided |= {(name, decision.id) for name in leaf.names}
    pending, run.pending = dict(run.pending), {}
    return pending


def _hand_down(leaf: Leaf, decision: Decision) -> None:
    """Leave the decision with the run that waits, and have every call above it go on."""
    for scope, call_id in zip(leaf.scopes[:-1], leaf.path[:-1], strict=True):
        scope.pending = {call_id: Decision.resume(), **scope.pending}
    last = leaf.scopes[-1]
    last.pending = {**last.pending, leaf.path[-1]: decision}


def _find(run: RunScope, waiting: list[Leaf], target: str) -> Leaf:
    found = [leaf for leaf in waiting if target in leaf.names]
    if len(found) == 1:
        return found[0]
    known = ", ".join("/".join(leaf.path) for leaf in (found or waiting))
    problem = f"more than one call is meant by {target!r}" if found else f"does not wait for {target!r}"
    raise DecisionRefused(f"run {run.run_id!r}: {problem}; it waits for: {known}")


def _check_payload(ticket: SuspendTicket, decision: Decision) -> None:
    if ticket.response_schema is None:
        return
    problems = [
        error.message for error in jsonschema_rs.validator_for(ticket.response_schema).iter_errors(decision.payload)
    ]
    if problems:
        raise DecisionRefused(f"the decision on ticket {ticket.id!r} does not fit its schema: {'; '.join(problems)}")
