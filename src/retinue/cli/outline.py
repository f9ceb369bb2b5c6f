"""A run that is stored, as text: its tree, its events, and what it waits for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from ..core.events import Event, event_to_json
from ..core.results import SuspendTicket
from ..core.runs import RunResult
from ..core.stores import RunRecord
from ..wire.tree import CallNode, RunNode
from .text import arguments, headline, iso, one_line
from .tree import call_line, summary

_STAMP = ("kind", *Event.__struct_fields__)
_WIDTH = 48
_IN = "  "


def tree_lines(run: RunNode, indent: str = "") -> Iterator[str]:
    """A run with its steps and calls, and with each call the children that it had."""
    yield f"{indent}{one_line(run.label)}: {one_line(run.task, 200)}"
    for step in run.steps:
        yield f"{indent}{_IN}step {step.number}"
        if step.thought:
            yield f"{indent}{_IN * 2}{one_line(step.thought, 300)}"
        for call in step.calls.values():
            yield f"{indent}{_IN * 2}{call_line(call)}"
            for child in call.children.values():
                yield from tree_lines(child, indent + _IN * 3)
    for note in run.notes:
        yield f"{indent}{_IN}note: {one_line(note, 200)}"
    if run.error:
        yield f"{indent}{_IN}error: {one_line(run.error, 300)}"
    yield f"{indent}{_IN if run.ns else ''}{summary(run)}"


def tree_json(run: RunNode) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "agent": run.label,
        "ns": list(run.ns),
        "task": run.task,
        "status": run.status.value,
        "error": run.error,
        "started_at": iso(run.started),
        "ended_at": iso(run.ended),
        "tokens": run.usage.tokens,
        "steps": [
            {"step": step.number, "calls": [_call_json(call) for call in step.calls.values()]} for step in run.steps
        ],
    }


def _call_json(call: CallNode) -> dict[str, Any]:
    return {
        "call_id": call.call_id,
        "tool": call.tool,
        "args": arguments(call.args or {}),
        "status": call.status.value,
        "started_at": iso(call.started),
        "ended_at": iso(call.ended),
        "result": call.result or "",
        "children": [tree_json(child) for child in call.children.values()],
    }


def run_json(record: RunRecord, ended_at: float | None, *, orphaned: bool = False) -> dict[str, Any]:
    """Return a run without its messages; `orphaned`: no process works on it."""
    import msgspec

    identity, result = record.identity, record.result
    return {
        "run_id": identity.run_id,
        "status": record.status,
        "orphaned": orphaned,
        "agent": identity.agent,
        "thread_id": identity.thread_id,
        "user_id": identity.user_id,
        "parent_run_id": identity.parent_run_id,
        "started_at": iso(record.started_at),
        "ended_at": iso(ended_at),
        "steps": None if result is None else result.steps,
        "usage": None if result is None else msgspec.structs.asdict(result.usage),
        "response": None if result is None else result.response,
        "error": None if result is None else result.error,
        "termination": None if result is None else result.termination,
        "waits_for": {} if result is None else _tickets_json(result.suspended),
    }


def _tickets_json(tickets: Mapping[str, SuspendTicket]) -> dict[str, Any]:
    import msgspec

    return {call_id: msgspec.to_builtins(ticket) for call_id, ticket in tickets.items()}


def how_it_ended(result: RunResult) -> str:
    """The status of a run, and why, where that says more."""
    why = result.error or result.termination
    return result.status.value if why == result.status.value else f"{result.status.value}: {one_line(why, 1_000)}"


def gist(record: RunRecord) -> str:
    """What came of a run, or what it waits for, in a few words."""
    result = record.result
    if result is None:
        return ""
    if result.suspended:
        first, *more = result.suspended.values()
        others = f" (and {len(more)} more)" if more else ""
        return f"waits: {one_line(first.message or first.action, 60)}{others}"
    if result.status.value != "completed" and result.error:
        return headline(result.error, 70)
    return headline(result.response, 70) if result.response else ""


def waiting_lines(record: RunRecord) -> Iterator[str]:
    """What a run waits for, and how it is answered."""
    if record.result is None or not record.result.suspended:
        return
    yield "waits for:"
    for call_id, ticket in record.result.suspended.items():
        asked = f": {one_line(ticket.message, 300)}" if ticket.message else ""
        yield f"  {one_line(call_id)} (ticket {one_line(ticket.id)}): {one_line(ticket.action)}{asked}"
        if ticket.parameters is not None:
            yield f"    with {one_line(_compact(ticket.parameters), 300)}"
        if ticket.response_schema is not None:
            yield f"    wants {one_line(_compact(ticket.response_schema), 300)}"
    run_id, call_id = record.identity.run_id, next(iter(record.result.suspended))
    yield f"answer with: retinue runs resume {run_id} --approve {call_id}[=JSON]   or   --cancel {call_id}[=REASON]"
    yield "             and --target MODULE:ATTR or --workspace DIR, for the agents it was started with"


def event_line(event: Event) -> str:
    """An event on one line: its number and time, whose it is, its kind and what it says."""
    at = datetime.fromtimestamp(event.at).strftime("%H:%M:%S.%f")[:-3]
    whose = event.agent + "".join(f"/{part}" for part in event.ns)
    said = [f"{name}={_value(value)}" for name, value in event_to_json(event).items() if _is_told(name, value)]
    return f"{event.seq:>6}  {at}  {one_line(whose, 40)}  {event.kind}  {one_line(' '.join(said), 160)}".rstrip()


def _is_told(name: str, value: Any) -> bool:
    return name not in _STAMP and value not in (None, "", [], {})


def _value(value: Any) -> str:
    return one_line(value if isinstance(value, str) else _compact(value), _WIDTH)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
