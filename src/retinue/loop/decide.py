"""Decisions against what a run waits for: whatever does not fit is refused before anything changes."""

from __future__ import annotations

from collections.abc import Mapping

import jsonschema_rs

from ..core.decisions import Decision
from ..core.errors import DecisionRefused
from ..core.lifecycle import RunStatus
from ..core.results import SuspendTicket
from .scope import OpenCall, RunScope


def match_decisions(run: RunScope, given: Mapping[str, Decision]) -> dict[str, Decision]:
    """The new decisions by call id. One that was taken in before is left out, so repeating it changes nothing."""
    fresh = {target: decision for target, decision in given.items() if decision.id not in run.decided}
    if not fresh:
        if not given:
            raise DecisionRefused(f"run {run.run_id!r}: no decision was given")
        return {}
    if run.status is not RunStatus.SUSPENDED:
        raise DecisionRefused(f"run {run.run_id!r} is {run.status}, it waits for nothing")
    matched: dict[str, Decision] = {}
    for target, decision in fresh.items():
        waiting = _find(run, target)
        call_id = waiting.call.id
        if call_id in matched:
            raise DecisionRefused(f"run {run.run_id!r}: call {call_id!r} is decided on twice")
        if decision.action == "resume" and waiting.ticket is not None:
            _check_payload(waiting.ticket, decision)
        matched[call_id] = decision
    run.decided.update(decision.id for decision in matched.values())
    return matched


def _find(run: RunScope, target: str) -> OpenCall:
    for call_id, waiting in run.open_calls.items():
        if target == call_id or (waiting.ticket is not None and target == waiting.ticket.id):
            return waiting
    known = ", ".join(run.open_calls)
    raise DecisionRefused(f"run {run.run_id!r} does not wait for {target!r}; it waits for: {known}")


def _check_payload(ticket: SuspendTicket, decision: Decision) -> None:
    if ticket.response_schema is None:
        return
    problems = [
        error.message for error in jsonschema_rs.validator_for(ticket.response_schema).iter_errors(decision.payload)
    ]
    if problems:
        raise DecisionRefused(f"the decision on ticket {ticket.id!r} does not fit its schema: {'; '.join(problems)}")
