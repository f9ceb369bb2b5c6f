"""A log as one JSON tree: the runs, their calls, the open questions, and the usage of each run alone and with its children.

A page paints it first, then follows the events after its `seq`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from ..core.content import record_json
from ..core.events import (
    ChildStarted,
    ErrorRaised,
    Event,
    InferenceFinished,
    Namespace,
    RunFinished,
    RunStarted,
    StepStarted,
    TaskUpdated,
    ToolCallFinished,
    ToolCallReady,
    ToolCallResumed,
)
from ..core.messages import Message
from ..core.receipts import Receipt
from ..core.results import SuspendTicket, ToolCallStatus
from ..core.runs import RunStatus, Usage
from .resources import fields_of, iso
from .tree import CallNode, OpenMessage, ProviderWait, RunNode, RunTree, StepNode


def first_open(rows: Iterable[Event]) -> int | None:
    """Return the number of the event after which the deltas of a log count for its tree; None if no delta does.

    A delta counts only until the event that has the whole: the answer of the model, or the end of a call or its first
    child. So those of each model call in progress are needed, and those of each tool call that streams its output. A run
    that was stopped in an answer keeps it.
    """
    models: dict[str, int] = {}
    calls: dict[tuple[str, str], int] = {}
    for event in rows:
        match event:
            case RunStarted() | StepStarted() | ErrorRaised(dropped_message_id=str()):
                models[event.run_id] = event.seq
            case InferenceFinished():
                models.pop(event.run_id, None)
            case RunFinished(status=status) if status is RunStatus.COMPLETED or status.is_waiting:
                models.pop(event.run_id, None)
            case ToolCallReady() | ToolCallResumed():
                calls.setdefault((event.run_id, event.call_id), event.seq)
            case ToolCallFinished() | ChildStarted():
                calls.pop((event.run_id, event.call_id), None)
            case _:
                pass
    return min([*models.values(), *calls.values()], default=None)


class SnapshotTree(RunTree):
    """The tree of a log, with what a page shows beside it."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__()
        self.seq = 0
        self.tasks: dict[str, dict[str, Any]] = {}
        for event in events:
            self(event)

    @classmethod
    def of(cls, snapshot: Mapping[str, Any]) -> SnapshotTree:
        """Return the tree that a snapshot of a whole log shows, ready to read the events after its `seq`."""
        tree = cls()
        tree.seq = snapshot["seq"]
        if snapshot["run"] is not None:
            tree._restore_run(snapshot["run"], None)
        for task in snapshot["tasks"]:
            derived = ("child_run_id", "awaiting")
            tree.tasks[task["task_id"]] = {name: value for name, value in task.items() if name not in derived}
        return tree

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.seq = max(self.seq, event.seq)  # a notice has no number
        if isinstance(event, TaskUpdated):
            known = self.tasks.setdefault(event.task_id, {"task_id": event.task_id, "started_at": iso(event.at)})
            known |= {"status": event.status.lower(), "call_id": event.call_id, "run_id": event.parent_run_id}
            known["agent"] = event.agent
            known["updated_at"] = iso(event.at)

    def find(self, ns: Namespace) -> RunNode | None:
        """Return the run of a namespace."""
        return next((run for run in self.runs.values() if run.ns == ns), None)

    # --- from JSON

    def _restore_run(self, shown: Mapping[str, Any], parent: CallNode | None) -> None:
        run_id, agent, at = shown["run_id"], shown["agent"], _timestamp(shown["started_at"])
        begun = StepStarted(run_id=run_id, agent=agent, ns=tuple(shown["ns"]), at=at or 0.0, step=1)
        run = self.runs[run_id] = RunNode(begun, parent)
        if parent is not None:
            parent.children[run.run_id] = run
        for name in ("thread_id", "task", "model", "termination", "error", "response"):
            setattr(run, name, shown[name])
        run.status, run.ended = RunStatus(shown["status"]), _timestamp(shown["ended_at"])
        run.own_usage = msgspec.convert(shown["usage"], Usage)
        run.receipt = msgspec.convert(shown["receipt"], Receipt | None)
        run.notes = list(shown["notes"])
        run.wait = _restore_wait(shown["wait"])
        run.said = msgspec.convert(shown["messages"], list[Message])
        run.queued = msgspec.convert(shown["queued"], list[Message])
        run.open_message = _restore_open_message(shown["open_message"])
        run.steps = [StepNode(replace(begun, step=number), run) for number in range(1, shown["steps"] + 1)]
        for call in shown["calls"]:
            self._restore_call(call, run, begun)

    def _restore_call(self, shown: Mapping[str, Any], run: RunNode, begun: Event) -> None:
        call_id, at = shown["call_id"], _timestamp(shown["started_at"])
        call = CallNode(replace(begun, at=at or 0.0), run, call_id, shown["tool"])
        run.calls[call_id] = call
        number: int = shown["step"]
        run.steps[number - 1].calls[call_id] = call
        for name in ("result", "output", "error", "is_task", "args"):
            setattr(call, name, shown[name])
        call.status, call.ended = ToolCallStatus(shown["status"]), _timestamp(shown["ended_at"])
        call.ticket = msgspec.convert(shown["ticket"], SuspendTicket | None)
        call.starting = set(shown["starting"])
        for child in shown["children"]:
            self._restore_run(child, call)

    # --- as JSON

    def snapshot(self, ns: Namespace = ()) -> dict[str, Any] | None:
        """Return the subtree of a namespace; None if there is none."""
        run = self.find(ns)
        if run is None:
            return None
        return {"seq": self.seq, "run": self.run_json(run), "questions": self.questions(ns), "tasks": self.task_list()}

    def task_list(self) -> list[dict[str, Any]]:
        asked = {one["answer_to"]: one["ticket"]["message"] for one in reversed(self.questions())}
        shown: list[dict[str, Any]] = []
        for task in self.tasks.values():
            child = self._child_of(task["run_id"], task["call_id"])
            shown.append({**task, "child_run_id": child, "awaiting": asked.get(child)})
        return shown

    def _child_of(self, run_id: str, call_id: str) -> str | None:
        """Return the run that a call has started; None if that is not known yet."""
        run = self.runs.get(run_id)
        call = None if run is None else run.calls.get(call_id)
        return None if call is None else next(iter((*call.children, *call.starting)), None)

    def run_json(self, run: RunNode, *, deep: bool = True) -> dict[str, Any]:
        shown: dict[str, Any] = {
            **fields_of(run, "run_id", "agent", "ns", "thread_id", "task", "model", "status"),
            **fields_of(run, "termination", "error", "response", "tail", "notes"),
            "wait": None if run.wait is None else {**run.wait._asdict(), "until": iso(run.wait.until)},
            "started_at": iso(run.started),
            "ended_at": iso(run.ended),
            "steps": len(run.steps),
            "usage": msgspec.structs.asdict(run.own_usage),
            "total_usage": msgspec.structs.asdict(self.total_usage(run)),
            "children": sum(1 for call in run.calls.values() for _ in call.children),
            "receipt": record_json(run.receipt),
        }
        if deep:
            shown["calls"] = [self._call_json(call, step.number) for step in run.steps for call in step.calls.values()]
            shown["messages"] = [record_json(message) for message in run.conversation()]
            shown["queued"] = [record_json(message) for message in run.queued]
            shown["open_message"] = _open_message_json(run.open_message)
        return shown

    def _call_json(self, call: CallNode, step: int) -> dict[str, Any]:
        return {
            **fields_of(call, "call_id", "tool", "status", "result", "output", "error", "is_task"),
            "step": step,
            "args": record_json(dict(call.args or {})),
            "started_at": iso(call.started),
            "ended_at": iso(call.ended),
            "ticket": record_json(_open_ticket(call)),
            "starting": sorted(call.starting),
            "children": [self.run_json(child) for child in call.children.values()],
        }

    def total_usage(self, run: RunNode) -> Usage:
        """Return the usage of a run and of everything below it."""
        total = run.own_usage
        for call in run.calls.values():
            for child in call.children.values():
                total += self.total_usage(child)
        return total

    def children(self, ns: Namespace = ()) -> list[dict[str, Any]] | None:
        """Return the children of the run of a namespace, without what is below them."""
        run = self.find(ns)
        if run is None:
            return None
        return [
            {"call_id": call.call_id, "parent_run_id": run.run_id, **self.run_json(child, deep=False)}
            for call in run.calls.values()
            for child in call.children.values()
        ]

    def questions(self, ns: Namespace = ()) -> list[dict[str, Any]]:
        """Return the open questions of a subtree, at any depth, in the order in which they were asked."""
        run = self.find(ns)
        if run is None:
            return []
        return sorted(self._questions(run, run.run_id, ()), key=lambda one: one["asked_at"])

    def _questions(self, run: RunNode, answer_to: str, path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Yield the questions of a run. `answer_to` is the run whose decisions they are: a background child has its own."""
        for call in run.calls.values():
            below: list[dict[str, Any]] = []
            for child in call.children.values():
                name = child.ns[-1].removeprefix("tools:") if child.ns else call.call_id
                if call.is_task:
                    below += self._questions(child, child.run_id, ())
                else:
                    below += self._questions(child, answer_to, (*path, name))
            yield from below
            ticket = _open_ticket(call)
            if ticket is not None and not (below and not call.is_task):
                # A child on another server may ask without calls in this log: then the ticket leads to its question.
                has_path = ticket.path[:1] == (call.call_id,)
                asked_by = (*path, *(ticket.path if has_path else (call.call_id,)))
                yield {
                    **fields_of(run, "run_id", "agent", "ns"),
                    **fields_of(call, "call_id", "tool"),
                    "path": "/".join(asked_by),
                    "answer_to": answer_to,
                    "args": record_json(dict(call.args or {})),
                    "ticket": record_json(replace(ticket, path=asked_by)),
                    "asked_at": iso(call.ended),
                }


def _restore_wait(shown: Mapping[str, Any] | None) -> ProviderWait | None:
    if shown is None:
        return None
    return ProviderWait(shown["reason"], shown["message"], _timestamp(shown["until"]) or 0.0, shown["position"])


def _open_message_json(message: OpenMessage | None) -> dict[str, Any] | None:
    if message is None:
        return None
    return {
        "id": message.id,
        "text": "".join(message.text),
        "reasoning": "".join(message.reasoning),
        "calls": {call_id: "".join(pieces) for call_id, pieces in message.calls.items()},
    }


def _restore_open_message(shown: Mapping[str, Any] | None) -> OpenMessage | None:
    if shown is None:
        return None
    calls = {call_id: [text] for call_id, text in shown["calls"].items()}
    return OpenMessage(shown["id"], [shown["text"]], [shown["reasoning"]], calls)


def _timestamp(when: str | None) -> float | None:
    return None if when is None else datetime.fromisoformat(when).timestamp()


def _open_ticket(call: CallNode) -> SuspendTicket | None:
    """Return the question of a call that waits; None if it does not."""
    return call.ticket if call.status is ToolCallStatus.SUSPENDED else None
