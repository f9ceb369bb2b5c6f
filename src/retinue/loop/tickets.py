"""Tickets and decisions: which calls of a tree wait for a human, and to which call each decision belongs.

A decision that does not match is refused before anything changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as shown
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from ..core.content import clean_text, to_json_bytes
from ..core.decisions import Decision
from ..core.errors import DecisionRefused
from ..core.messages import ToolCall, checked_record
from ..core.results import SuspendTicket, ToolCallStatus
from ..core.rows import Answer
from ..core.schema import ArgumentCheck, with_defaults
from .state import CallState, LogState, RunState


class Leaf(Struct, frozen=True):
    """A call that waits for a human, somewhere in a tree of runs, with the calls above it."""

    calls: tuple[CallState, ...]
    path: tuple[str, ...]
    """The call ids, with the numbers of children where a call has several."""

    @property
    def ticket(self) -> SuspendTicket | None:
        return self.calls[-1].ticket

    @property
    def call_id(self) -> str:
        return self.calls[-1].call.id

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a decision may address it."""
        ticket = (self.ticket.id,) if self.ticket is not None else ()
        return (self.call_id, "/".join(self.path), *ticket)


def segment(call_id: str, number: int) -> str:
    """Return a child's part of a path: the call that started it, and its number among that call's children."""
    return call_id if number == 1 else f"{call_id}~{number}"


def leaves(tree: LogState, run: RunState) -> Iterator[Leaf]:
    """Return the waiting calls of a run and of the runs below it."""
    for ticket in run.tickets:
        if "/".join(ticket.path) not in run.pending:
            yield Leaf(_remote_calls(ticket), ticket.path)
    for call in run.open():
        found = False
        for number, ref in call.children.items():
            child = tree.runs.get(ref.run_id)
            if child is None or not child.waits or child.request.detached:
                continue
            for leaf in leaves(tree, child):
                found = True
                yield Leaf((call, *leaf.calls), (segment(call.call.id, number), *leaf.path))
        if not found and call.status is ToolCallStatus.SUSPENDED and call.call.id not in run.pending:
            yield Leaf((call,), (call.call.id,))


def _remote_calls(ticket: SuspendTicket) -> tuple[CallState, ...]:
    """Return the calls of a run elsewhere that lead to a ticket; only their ids are known here."""
    calls = [CallState(ToolCall(part.partition("~")[0], "", {}), "") for part in ticket.path]
    calls[-1].ticket, calls[-1].asked_by = ticket, ""  # which hook asked is not known here: the server checks
    return tuple(calls)


def shown_leaves(leaves: Sequence[Leaf]) -> dict[str, Leaf]:
    """Return the waiting calls by key: the call id or, if several waiting calls share an id, the path."""
    ids = [leaf.call_id for leaf in leaves]
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        names = leaf.names if ids.count(leaf.call_id) == 1 else leaf.names[1:]
        # A model may choose an id that reads like a path: then the next name is used.
        found[next((name for name in names if name not in found), names[0])] = leaf
    return found


def tickets_of(tree: LogState, run: RunState) -> dict[str, SuspendTicket]:
    """Return the tickets of a run and of the runs below it, each with its path."""
    shown = shown_leaves(list(leaves(tree, run))).items()
    return {name: replace(leaf.ticket, path=leaf.path) for name, leaf in shown if leaf.ticket is not None}


def encode_decisions(given: Mapping[str, Decision]) -> bytes:
    """Return decisions in their stored form; raise DecisionRefused if they have none."""
    return to_json_bytes(_checked_decisions(given))


_METHODS = "approve(), .reject(message), .answer(value), .resume(payload) or .cancel(reason)"


def _checked_decisions(given: Mapping[str, Decision]) -> dict[str, Decision]:
    """Return decisions with clean text and JSON values only; raise DecisionRefused if they are invalid."""
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DecisionRefused(f"decisions are given as {{call id: Decision}}, not as {shown(given)}")
    if not given:
        raise DecisionRefused("no decision was given")
    for target, decision in given.items():
        if not isinstance(target, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            asked = 'a call id, a ticket id or "/".join(path)'
            raise DecisionRefused(f"a decision is for {asked}, not for {shown(target)}")
        if not isinstance(decision, Decision):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DecisionRefused(f"the decision on {target!r} is {shown(decision)}: write Decision.{_METHODS}")
    try:
        return {clean_text(target): checked_record(decision) for target, decision in given.items()}
    except (TypeError, ValueError) as exc:
        raise DecisionRefused(f"a decision must have a JSON form: {exc}") from exc


def match_decisions(tree: LogState, run: RunState, given: Mapping[str, Decision]) -> list[Answer]:
    """Return the new decisions, each with its call. Decisions that were accepted before are left out (idempotent)."""
    checked = _checked_decisions(given)
    fresh = {name: decision for name, decision in checked.items() if name not in run.decided.get(decision.id, ())}
    if not fresh:
        return []
    if not run.waits:
        asking = [f"run {one.run_id!r}" for one in tree.runs.values() if one.waits and one.request.detached]
        is_root = run.identity.parent_run_id is None
        hint = f"; background tasks of it wait: answer {' or '.join(asking)}" if asking and is_root else ""
        raise DecisionRefused(f"run {run.run_id!r} is {run.status}, it waits for nothing{hint}")
    waiting = list(leaves(tree, run))
    matched: dict[tuple[str, ...], Answer] = {}
    for target, decision in fresh.items():
        leaf = _find(run, waiting, target)
        if leaf.path in matched:
            raise DecisionRefused(f"run {run.run_id!r}: call {leaf.call_id!r} is decided on twice")
        if leaf.ticket is not None:
            _check_payload(leaf.ticket, leaf.calls[-1].asked_by is not None, decision)
        if decision.action in ("approve", "reject"):
            decision = replace(decision, action="resume")
        _check_rules(leaf.calls[-1], decision)
        matched[leaf.path] = Answer(leaf.path, leaf.names, decision)
    return list(matched.values())


def call_to_run(call: CallState, decision: Decision | None) -> ToolCall:
    """Return the call to run after a decision: with the decision's arguments if the ticket says so."""
    made, ticket = call.call, call.ticket
    if decision is None or ticket is None or decision.action != "resume" or not ticket.takes_arguments:
        return made
    args: Any = decision.payload
    if ticket.editable:
        given = cast("dict[str, Any]", args) if isinstance(args, dict) else {}
        args = given["args"] if "args" in given and given.get("approved", True) else made.args
    if args is made.args:
        return made
    if isinstance(args, dict):
        return ToolCall(made.id, made.name, cast("dict[str, Any]", args))
    return ToolCall(made.id, made.name, {}, repr(args))


def _check_rules(call: CallState, decision: Decision) -> None:
    """Refuse a decision with arguments that a rule denies."""
    made, ticket = call_to_run(call, decision), call.ticket
    if made is call.call or ticket is None:
        return
    schema = ticket.response_schema or {}
    if ticket.editable:
        schema = schema.get("properties", {}).get("args", {})
    full = with_defaults(schema, made.args)
    if any(rules.verdict(made, full) == "deny" for rules in call.rules):
        problem = f"{made.name} is not permitted with these arguments"
        raise DecisionRefused(f"the decision on ticket {ticket.id!r} is refused: {problem}")


def _find(run: RunState, waiting: list[Leaf], target: str) -> Leaf:
    if (shown := shown_leaves(waiting).get(target)) is not None:
        return shown
    found = [leaf for leaf in waiting if target in leaf.names]
    if not found:  # a call that waits for a child stands for the waiting calls of that child
        found = [leaf for leaf in waiting if target in _names_above(leaf)]
    if len(found) == 1:
        return found[0]
    known = ", ".join("/".join(leaf.path) for leaf in (found or waiting))
    problem = f"more than one call is meant by {target!r}" if found else f"does not wait for {target!r}"
    raise DecisionRefused(f"run {run.run_id!r}: {problem}; it waits for: {known}")


def _names_above(leaf: Leaf) -> list[str]:
    above = leaf.calls[:-1]
    return [*(call.call.id for call in above), *(call.ticket.id for call in above if call.ticket is not None)]


def _check_payload(ticket: SuspendTicket, is_of_hook: bool, decision: Decision) -> None:
    """Raise if a decision does not match its ticket. A hook without a schema asks only for approval."""
    is_approved = decision.action == "approve"
    if decision.action == "reject" and not ticket.is_approval:
        fitting = "Decision.cancel(reason) refuses the call"
    elif is_approved and not ticket.is_approval and not (is_of_hook and ticket.response_schema is None):
        fitting = "Decision.resume(value) answers it"
    elif is_approved and "args" in decision.payload and not ticket.editable:
        fitting = "its call keeps its arguments, Decision.approve() without args lets it go on"
    else:
        fitting = ""
    if fitting:
        raise DecisionRefused(f"ticket {ticket.id!r} cannot be answered so: {fitting}")
    if decision.action in ("cancel", "answer") or ticket.response_schema is None:
        return
    problems = ArgumentCheck(ticket.response_schema, ticket.id, proven=True).problems(decision.payload)
    if problems:
        raise DecisionRefused(f"the decision on ticket {ticket.id!r} does not fit its schema: {'; '.join(problems)}")
