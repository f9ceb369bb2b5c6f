"""Tickets and decisions: which calls of a tree wait for a human, and to which call each decision belongs.

Invariant: a name means one call for the life of a run, whatever waits at the moment. The names follow from all questions
that the tree has ever asked (`RunState.asked`), which only grow. So a name may become ambiguous or answered, but it never
passes from one call to another. A decision that does not match is refused before anything changes.
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
from ..log.state import CallState, LogState, RunState


class Leaf(Struct, frozen=True):
    """A call that waits for a human, somewhere in a tree of runs, with the calls above it."""

    calls: tuple[CallState, ...]
    path: tuple[str, ...]
    """The call ids, with the numbers of children where a call has several."""
    is_elsewhere: bool = False
    """A run on another server or in another log asks: its ids were chosen there, so only the path addresses it."""

    @property
    def ticket(self) -> SuspendTicket | None:
        return self.calls[-1].ticket

    @property
    def call_id(self) -> str:
        return self.calls[-1].call.id

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a decision may address it."""
        if self.is_elsewhere:
            return ("/".join(self.path),)
        ticket = (self.ticket.id,) if self.ticket is not None else ()
        return (self.call_id, "/".join(self.path), *ticket)


def segment(call_id: str, number: int) -> str:
    """Return a child's part of a path: the call that started it, and its number among that call's children."""
    return call_id if number == 1 else f"{call_id}~{number}"


def leaves(tree: LogState, run: RunState) -> Iterator[Leaf]:
    """Return the waiting calls of a run and of the runs below it."""
    for ticket in run.tickets:
        if "/".join(ticket.path) not in run.pending:
            yield Leaf(_remote_calls(ticket), ticket.path, is_elsewhere=True)
    for call in run.open():
        found = False
        for number, ref in call.children.items():
            child = tree.runs.get(ref.run_id)
            if child is None or not child.waits or child.request.detached:
                continue
            for leaf in leaves(tree, child):
                found = True
                path = (segment(call.call.id, number), *leaf.path)
                yield Leaf((call, *leaf.calls), path, leaf.is_elsewhere)
        if not found and call.status is ToolCallStatus.SUSPENDED and call.call.id not in run.pending:
            yield Leaf((call,), (call.call.id,))


def _remote_calls(ticket: SuspendTicket) -> tuple[CallState, ...]:
    """Return the calls of a run elsewhere that lead to a ticket; only their ids are known here."""
    calls = [CallState(ToolCall(part.partition("~")[0], "", {}), "") for part in ticket.path]
    calls[-1].ticket, calls[-1].asked_by = ticket, ""  # which hook asked is not known here: the server checks
    return tuple(calls)


def _asked(tree: LogState, run: RunState) -> Iterator[tuple[tuple[str, ...], frozenset[str]]]:
    """Yield the path of every question that a run and the runs below it have asked, with its names beside the path.

    A call that waits for its children also names their questions.
    """
    for path, asked in run.asked.items():
        if asked.is_elsewhere:
            yield path, frozenset()
        elif not asked.stands_in:
            yield path, frozenset((*path, *asked.tickets))
    for ref in run.children.values():
        child = tree.runs.get(ref.run_id)
        if child is None or child.request.detached:
            continue
        part = ref.ns[-1].removeprefix("tools:")
        call_id = part.partition("~")[0]
        above = run.asked.get((call_id,))
        own = {call_id, *(() if above is None else above.tickets)}
        for path, names in _asked(tree, child):
            yield (part, *path), names | own


class Questions:
    """The questions of a run and of the runs below it: all that were ever asked, and those that wait."""

    def __init__(self, tree: LogState, run: RunState) -> None:
        self._run = run
        self.waiting = {leaf.path: leaf for leaf in leaves(tree, run)}
        self._by_path: dict[str, list[tuple[str, ...]]] = {}
        self._by_name: dict[str, list[tuple[str, ...]]] = {}
        asked = dict(_asked(tree, run))
        for leaf in self.waiting.values():  # also a call that is asked now because its children wait no more
            known = asked.get(leaf.path, frozenset[str]())
            asked[leaf.path] = known if leaf.is_elsewhere else known.union(leaf.names)
        for path, names in asked.items():
            self._by_path.setdefault("/".join(path), []).append(path)
            for name in names:
                self._by_name.setdefault(name, []).append(path)

    def find(self, target: str) -> Leaf:
        """Return the waiting call that a name means. A full path comes first; another name must mean one question."""
        exact, named = self._by_path.get(target, []), self._by_name.get(target, [])
        found = exact or named
        if len(exact) == 1 and (leaf := self.waiting.get(exact[0])) is not None and leaf.is_elsewhere:
            # Its ids were chosen elsewhere, perhaps to look like a ticket of this process.
            found = list(dict.fromkeys((*exact, *named)))
        if len(found) > 1:
            raise self._refusal(f"more than one call is meant by {target!r}, write the path of one", found)
        if not found:
            raise self._refusal(f"does not wait for {target!r}")
        leaf, before = self.waiting.get(found[0]), self._run.addressed.get(target, found[0])
        if leaf is None or before != leaf.path or self._is_of_earlier_ticket(target, leaf):
            raise self._refusal(f"{target!r} was answered already or has ended, and the run does not wait for it")
        return leaf

    def _is_of_earlier_ticket(self, target: str, leaf: Leaf) -> bool:
        """Return whether a name is the id of an earlier ticket of a call that asks again."""
        return leaf.path not in self._by_path.get(target, ()) and target not in (*leaf.names, *_names_above(leaf))

    def means(self, target: str, leaf: Leaf) -> bool:
        """Return whether a name means a waiting call."""
        try:
            return self.find(target) is leaf
        except DecisionRefused:
            return False

    def name_of(self, leaf: Leaf) -> str:
        """Return the name under which a waiting call is shown: its call id, or its path where others had that id."""
        names = (*leaf.names, *_names_above(leaf))
        return next((name for name in names if self.means(name, leaf)), "/".join(leaf.path))

    def shown(self) -> dict[str, Leaf]:
        """Return the waiting calls by the names under which they are shown; a decision may use each name."""
        return {self.name_of(leaf): leaf for leaf in self.waiting.values()}

    def _refusal(self, problem: str, among: Sequence[tuple[str, ...]] = ()) -> DecisionRefused:
        waiting = [path for path in among if path in self.waiting] or self.waiting
        known = ", ".join("/".join(path) for path in waiting) or "nothing"
        return DecisionRefused(f"run {self._run.run_id!r}: {problem}; it waits for: {known}")


def tickets_of(tree: LogState, run: RunState) -> dict[str, SuspendTicket]:
    """Return the tickets of a run and of the runs below it, each with its path."""
    shown = Questions(tree, run).shown().items()
    return {name: replace(leaf.ticket, path=leaf.path) for name, leaf in shown if leaf.ticket is not None}


def waits_for(tree: LogState, run: RunState, decisions: Mapping[str, Decision]) -> bool:
    """Return whether a run has decisions that are new, and waits for the call of each of these."""
    fresh = _fresh(run, decisions)
    if not fresh:
        return False
    questions = Questions(tree, run)
    try:
        return all(questions.find(target) for target in fresh)
    except DecisionRefused:
        return False


def _fresh(run: RunState, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Return the decisions that were not accepted before."""
    return {name: one for name, one in decisions.items() if name not in run.decided.get(one.id, ())}


def encode_decisions(given: Mapping[str, Decision]) -> bytes:
    """Return decisions in their stored form; raise DecisionRefused if they have none."""
    return to_json_bytes(checked_decisions(given))


_METHODS = "approve(), .reject(message), .answer(value), .resume(payload) or .cancel(reason)"


def checked_decisions(given: Mapping[str, Decision]) -> dict[str, Decision]:
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
    fresh = _fresh(run, checked_decisions(given))
    if not fresh:
        return []
    if not run.waits:
        asking = [f"run {one.run_id!r}" for one in tree.runs.values() if one.waits and one.request.detached]
        is_root = run.identity.parent_run_id is None
        hint = f"; background tasks of it wait: answer {' or '.join(asking)}" if asking and is_root else ""
        raise DecisionRefused(f"run {run.run_id!r} is {run.status}, it waits for nothing{hint}")
    questions = Questions(tree, run)
    matched: dict[tuple[str, ...], Answer] = {}
    for target, decision in fresh.items():
        leaf = questions.find(target)
        if leaf.path in matched:
            raise DecisionRefused(f"run {run.run_id!r}: call {leaf.call_id!r} is decided on twice")
        if leaf.ticket is not None:
            _check_payload(leaf.ticket, leaf.calls[-1].asked_by is not None, decision)
        if decision.action in ("approve", "reject"):
            decision = replace(decision, action="resume")
        _check_rules(leaf.calls[-1], decision)
        names = tuple(dict.fromkeys((*leaf.names, target)))
        matched[leaf.path] = Answer(leaf.path, names, decision, target)
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
