"""Decisions against what a run waits for: whatever does not fit is refused before anything changes."""

from __future__ import annotations

from collections.abc import Mapping

import jsonschema_rs
from msgspec import Struct

from ..core.decisions import Decision
from ..core.errors import DecisionRefused
from ..core.lifecycle import RunStatus
from ..core.results import SuspendTicket
from .children import segment, waiting_children
from .scope import RunScope


class Leaf(Struct, frozen=True):
    """A call that waits for a human, somewhere in a tree of runs, with the runs and calls above it."""

    scopes: tuple[RunScope, ...]
    calls: tuple[str, ...]
    path: tuple[str, ...]
    """As `calls`, with the numbers of children where a call has several."""
    ticket: SuspendTicket | None

    @property
    def names(self) -> tuple[str, ...]:
        """By what it can be answered."""
        ticket = (self.ticket.id,) if self.ticket is not None else ()
        return (self.calls[-1], "/".join(self.path), *ticket)


def leaves(run: RunScope) -> list[Leaf]:
    """Everything a run waits for, its own calls and those of its children."""
    found: list[Leaf] = []
    for call_id, open_call in run.open_calls.items():
        below = [
            Leaf((run, *leaf.scopes), (call_id, *leaf.calls), (segment(call_id, number), *leaf.path), leaf.ticket)
            for number, child in waiting_children(open_call)
            for leaf in leaves(child)
        ]
        found.extend(below or [Leaf((run,), (call_id,), (call_id,), open_call.ticket)])
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
            raise DecisionRefused(f"run {run.run_id!r}: call {leaf.calls[-1]!r} is decided on twice")
        if decision.action == "resume" and leaf.ticket is not None:
            _check_payload(leaf.ticket, decision)
        matched[leaf.path] = leaf, decision
    for leaf, decision in matched.values():
        _hand_down(leaf, decision)
        run.decided |= {(name, decision.id) for name in leaf.names}
    pending, run.pending = dict(run.pending), {}
    return pending


def match_by_path(run: RunScope, given: Mapping[str, Decision]) -> tuple[dict[str, Decision], dict[str, Decision]]:
    """As `match_decisions`, and the new decisions by the paths of what they are on, for `match_again`."""
    decided = run.decided
    fresh = match_decisions(run, given)
    if not fresh:
        return fresh, {}
    waiting = leaves(run)
    new = {target: decision for target, decision in given.items() if (target, decision.id) not in decided}
    return fresh, {"/".join(_find(run, waiting, target).path): decision for target, decision in new.items()}


def match_again(run: RunScope, given: Mapping[str, Decision]) -> dict[str, Decision]:
    """As `match_decisions`, by path, for what a process that has ended took in.

    Where a child waited whose call has ended since, the child is not run again: its call just goes on.
    """
    waiting = leaves(run)
    for path, decision in given.items():
        parts = path.split("/")
        for leaf in waiting:
            if list(leaf.path) == parts:
                _hand_down(leaf, decision)
            elif list(leaf.calls) == [part.partition("~")[0] for part in parts[: len(leaf.calls)]]:
                _hand_down(leaf, Decision.resume())
            else:
                continue
            names = {parts[-1].partition("~")[0], path, *(leaf.names if len(leaf.calls) == len(parts) else ())}
            run.decided |= {(name, decision.id) for name in names}
    pending, run.pending = dict(run.pending), {}
    return pending


def _hand_down(leaf: Leaf, decision: Decision) -> None:
    """Leave the decision with the run that waits, and have every call above it go on."""
    for scope, call_id in zip(leaf.scopes[:-1], leaf.calls[:-1], strict=True):
        scope.pending = {call_id: Decision.resume(), **scope.pending}
    last = leaf.scopes[-1]
    last.pending = {**last.pending, leaf.calls[-1]: decision}


def _find(run: RunScope, waiting: list[Leaf], target: str) -> Leaf:
    found = [leaf for leaf in waiting if target in leaf.names]
    if not found:  # a call that waits for its child stands for what waits there
        found = [leaf for leaf in waiting if target in leaf.calls or target in _tickets_above(leaf)]
    if len(found) == 1:
        return found[0]
    known = ", ".join("/".join(leaf.path) for leaf in (found or waiting))
    problem = f"more than one call is meant by {target!r}" if found else f"does not wait for {target!r}"
    raise DecisionRefused(f"run {run.run_id!r}: {problem}; it waits for: {known}")


def _tickets_above(leaf: Leaf) -> list[str]:
    above = [scope.open_calls[call_id].ticket for scope, call_id in zip(leaf.scopes, leaf.calls, strict=True)]
    return [ticket.id for ticket in above[:-1] if ticket is not None]


def _check_payload(ticket: SuspendTicket, decision: Decision) -> None:
    if ticket.response_schema is None:
        return
    problems = [
        error.message for error in jsonschema_rs.validator_for(ticket.response_schema).iter_errors(decision.payload)
    ]
    if problems:
        raise DecisionRefused(f"the decision on ticket {ticket.id!r} does not fit its schema: {'; '.join(problems)}")
