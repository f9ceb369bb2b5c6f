"""Decisions against what a run waits for: whatever does not fit is refused before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jsonschema_rs
import msgspec
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


class Answer(Struct, frozen=True):
    """A decision, and the call it is on: where it is, and the names it could be answered by."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    decision: Decision


def encode_answers(answers: Iterable[Answer]) -> bytes:
    """Answers as a journal keeps them; DecisionRefused for one that has no JSON form."""
    try:
        return msgspec.json.encode(list(answers))
    except (TypeError, ValueError) as exc:
        raise DecisionRefused(f"a decision on a run that is stored must have a JSON form: {exc}") from exc


decode_answers = msgspec.json.Decoder(list[Answer]).decode


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


def match_decisions(run: RunScope, given: Mapping[str, Decision]) -> list[Answer]:
    """The new decisions, each with its call. One that was taken in before is left out: repeating it changes nothing."""
    if not given:
        raise DecisionRefused(f"run {run.run_id!r}: no decision was given")
    for target, decision in given.items():
        if not isinstance(decision, Decision):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DecisionRefused(f"the decision on {target!r} is {decision!r}: use Decision.resume(…) or .cancel(…)")
    fresh = {target: decision for target, decision in given.items() if (target, decision.id) not in run.decided}
    if not fresh:
        return []
    if run.status is not RunStatus.SUSPENDED:
        raise DecisionRefused(f"run {run.run_id!r} is {run.status}, it waits for nothing")
    waiting = leaves(run)
    matched: dict[tuple[str, ...], Answer] = {}
    for target, decision in fresh.items():
        leaf = _find(run, waiting, target)
        if leaf.path in matched:
            raise DecisionRefused(f"run {run.run_id!r}: call {leaf.calls[-1]!r} is decided on twice")
        if decision.action == "resume" and leaf.ticket is not None:
            _check_payload(leaf.ticket, decision)
        matched[leaf.path] = Answer(leaf.path, leaf.names, decision)
    return list(matched.values())


def take_answers(run: RunScope, answers: Iterable[Answer]) -> dict[str, Decision]:
    """Leave each decision with the run that waits for it, and have every call above it go on; those of this run."""
    for answer in answers:
        _hand_down(run, answer.path, answer.decision)
        run.decided |= {(name, answer.decision.id) for name in answer.names}
    pending, run.pending = dict(run.pending), {}
    return pending


def _hand_down(run: RunScope, path: tuple[str, ...], decision: Decision) -> None:
    call_id = path[0].partition("~")[0]
    if len(path) == 1:
        run.pending = {**run.pending, call_id: decision}
        return
    run.pending = {call_id: Decision.resume(), **run.pending}
    open_call = run.open_calls.get(call_id)
    for number, child in waiting_children(open_call) if open_call is not None else ():
        if segment(call_id, number) == path[0]:
            _hand_down(child, path[1:], decision)
    # Of a run that goes on after its process ended, children may be missing that have ended since: nothing is left to do.


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
