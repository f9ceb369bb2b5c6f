"""Runs as text and as JSON: the tree, the events, and the questions that wait."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec

from ..core.content import record_json
from ..core.events import Event, event_to_json
from ..core.receipts import Receipt
from ..core.results import SuspendTicket, ToolCallStatus
from ..core.runs import RunResult
from ..core.stores import RunRecord
from ..plugins.todo import TodoItem
from ..wire.resources import iso
from ..wire.tree import CallNode, Node, RunNode, RunTree
from .text import arguments, count, duration, headline, one_line, reply_of

_STAMP = ("kind", *Event.__struct_fields__)
_WIDTH = 48
_IN = "  "


class ShownTree(RunTree):
    """The tree that a terminal shows: runs of one agent are numbered, and a result is its headline."""

    def add_run(self, event: Event) -> RunNode:
        alike = sum(run.agent == event.agent for run in self.runs.values())
        run = super().add_run(event)
        run.label = f"{event.agent}#{alike + 1}" if alike else event.agent
        return run

    def node_ended(self, node: Node) -> None:
        if isinstance(node, CallNode):
            node.result = headline(reply_of(node.result or ""))


def call_line(call: CallNode) -> str:
    """Return a call, its status and its result, in one line."""
    status = "ok" if call.status is ToolCallStatus.SUCCEEDED else call.status.value
    took = "" if call.ended is None else f"  {duration(call.ended - call.started)}"
    result = one_line(call.result or "", 160)
    return f"{status:<6} {one_line(call.tool)}({arguments(call.args or {})}){took}  {result}".rstrip()


def wait_line(run: RunNode, now: float) -> str:
    """Return the wait of a run for its provider in a few words: "429, waiting 20 s, 14 before you"."""
    wait = run.wait
    if wait is None:
        return ""
    seconds = round(wait.until - now)
    if wait.position is None:  # an attempt has failed
        return f"{one_line(wait.message, 60)}{f', again in {seconds} s' if seconds > 0 else ', tries again'}"
    words = ["429" if wait.reason == "rate_limit" else "provider overloaded", f"waiting {max(0, seconds)} s"]
    if wait.position:
        words.append(f"{wait.position} before you")
    said = f": {one_line(wait.message, 160)}" if wait.reason == "overloaded" and wait.message else ""
    return ", ".join(words) + said


def summary(run: RunNode) -> str:
    """Return the status of a run and its figures so far, in one line."""
    done = [count(len(run.steps), "step"), count(sum(1 for _ in run.walk_calls()), "call")]
    if run.ended is None:  # its end reports its usage
        done.append(f"{duration(time.time() - run.started)} so far")
    else:
        cached = f" ({run.usage.cached_tokens:,} of them cached)" if run.usage.cached_tokens else ""
        done += [count(run.usage.tokens, "token") + cached, duration(run.ended - run.started)]
        done += [] if run.receipt is None else receipt_words(run.receipt)
    return f"{run.status.value}: {', '.join(done)}"


def receipt_words(receipt: Receipt) -> Iterator[str]:
    """Yield what a receipt says beyond success, in a few words each."""
    if receipt.failed:
        named = ", ".join([f"{one.tool}: {one.code}" for one in receipt.failures])
        yield one_line(f"{receipt.failed} of {count(receipt.calls, 'call')} failed ({named})", 120)
    for limit in receipt.limits:
        yield one_line(f"hit {limit}", 60)
    for approval in receipt.approvals:
        yield one_line(f"{approval.tool} {approval.answer} by {approval.by}", 100)
    if receipt.files_changed:
        yield f"{count(receipt.files_changed, 'file')} changed"
    if receipt.shell:
        yield f"{count(receipt.shell, 'command')} run"
    if receipt.open_tasks:
        yield f"{count(receipt.open_tasks, 'task')} still open"
    if receipt.reported_by is not None:
        yield one_line(f"reported by {receipt.reported_by}", 100)


def tree_lines(run: RunNode, indent: str = "") -> Iterator[str]:
    """Yield a run with its steps, calls and children, as lines."""
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
    """Return a run with its steps, calls and children, as JSON."""
    return {
        "agent": run.label,
        "ns": list(run.ns),
        "task": run.task,
        "status": run.status.value,
        "error": run.error,
        "receipt": record_json(run.receipt),
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
        "args": dict(call.args or {}),
        "status": call.status.value,
        "started_at": iso(call.started),
        "ended_at": iso(call.ended),
        "result": call.result or "",
        "children": [tree_json(child) for child in call.children.values()],
    }


def how_it_ended(result: RunResult) -> str:
    """Return the status of a run, and the reason where it says more."""
    why = result.error or result.termination
    return result.status.value if why == result.status.value else f"{result.status.value}: {one_line(why, 1_000)}"


def gist(record: RunRecord) -> str:
    """Return the outcome of a run, or its first question, in a few words."""
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
    """Yield the questions of a run, and the commands that answer them."""
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
    run_id, tickets = record.identity.run_id, record.result.suspended
    yield "answer with one of these, and --target MODULE:ATTR or --workspace DIR for the agents it was started with:"
    for call_id, ticket in tickets.items():
        where = run_id if len(tickets) == 1 else f"{run_id} {shlex.quote(call_id)}"
        if ticket.is_approval:
            yield f"  retinue runs approve {where}"
        yield f"  retinue runs answer {where} VALUE"
        yield f"  retinue runs deny {where} --message TEXT"


def questions(tickets: Mapping[str, SuspendTicket]) -> str:
    """Return the waiting calls and what they ask, in one line."""
    asked = [f"{call} ({one_line(ticket.message or ticket.action, 60)})" for call, ticket in tickets.items()]
    return ", ".join(asked)


def event_line(event: Event) -> str:
    """Return an event in one line: number, time, agent, kind and fields."""
    at = datetime.fromtimestamp(event.at).strftime("%H:%M:%S.%f")[:-3]
    agent = one_line("/".join((event.agent, *event.ns)), 40)
    fields = [
        f"{name}={_value(value)}"
        for name, value in event_to_json(event).items()
        if name not in _STAMP and value not in (None, "", [], {})
    ]
    return f"{event.seq:>6}  {at}  {agent}  {event.kind}  {one_line(' '.join(fields), 160)}".rstrip()


def _value(value: Any) -> str:
    return one_line(value if isinstance(value, str) else _compact(value), _WIDTH)


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def todo_lines(items: Any, width: int) -> list[str]:
    """Return the todos of a state as lines: the open ones, and how many are completed."""
    todos = [msgspec.convert(item, TodoItem) for item in items]
    done = sum(todo.status == "completed" for todo in todos)
    lines = [one_line(todo.line, width) for todo in todos if todo.status != "completed"]
    return [f"todos: {done} of {len(todos)} done", *lines] if todos else []
