"""Sub-agents as front ends know them: each is a call named `task`, from its start to its result.

The id of the call is the id of the sub-agent. A call of a known delegation tool is shown as `task` at once. Of another
tool nobody knows before its child starts. The n-th child of one call has the id `<call id>~<n>`, as in its namespace. A
call that leaves its child in the background has not ended for front ends: the end of the child does that.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.events import (
    ChildStarted,
    Event,
    InferenceFinished,
    Namespace,
    RunFinished,
    RunStarted,
    TaskUpdated,
    ToolCallFinished,
)

TASK = "task"
_AGENT_RUN = "agent_run_"
_OPEN_TASKS = frozenset({"PENDING", "RUNNING"})


def is_delegation(tool_name: str) -> bool:
    """Return whether a tool of this name starts a sub-agent."""
    return tool_name in (TASK, "agent_spawn", "agent_send") or tool_name.startswith(_AGENT_RUN)


def as_task(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as it is shown: that of a delegation tool is a `task` with `subagent_type` and `description`."""
    name, args = call["name"], call["args"]
    if name == "agent_spawn":
        described = {"subagent_type": args.get("agent_id") or "", "description": args.get("task") or ""}
    elif name == "agent_send":  # a key is `agent:<agent id>:<unique>`
        key = str(args.get("agent_key") or "")
        agent = ":".join(key.split(":")[1:-1]) or args.get("label") or key
        described = {"subagent_type": agent, "description": args.get("message") or ""}
    elif name.startswith(_AGENT_RUN):
        described = {"subagent_type": name.removeprefix(_AGENT_RUN), "description": args.get("prompt") or ""}
    else:
        return call
    return {**call, "name": TASK, "args": {**args, **described}}


def _number(ns: Namespace) -> int:
    """Return the number of a child among those of its call. A namespace from another server may have anything there."""
    number = ns[-1].partition("~")[2] if ns else ""
    return int(number) if number.isdecimal() and len(number) < 10 else 1


class Child(Struct):
    """A child run, as a call of the run that started it."""

    parent: Event
    """An event with the run, agent and namespace of the parent."""
    call_id: str
    number: int
    agent: str
    description: str
    has_ended: bool = False

    @property
    def shown_id(self) -> str:
        return self.call_id if self.number == 1 else f"{self.call_id}~{self.number}"


class _Call(Struct):
    """A call that starts sub-agents, or may."""

    child: Child | None = None
    """Its first child."""
    has_open_task: bool = False
    has_ended: bool = False
    is_reported: bool = False
    """Its end was shown under the name `task`."""


class Delegations:
    """The calls of a log that start sub-agents. Each method is told of an event once, in the order of the log."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], _Call] = {}
        self._children: dict[str, Child] = {}
        self._agents: dict[str, str] = {}

    def note_calls(self, event: InferenceFinished) -> None:
        for call in event.message.tool_calls:
            if is_delegation(call.name):
                self._call(event.run_id, call.id)

    def begin_child(self, event: ChildStarted | RunStarted) -> Child | None:
        """Return the child that an event is the first to show. One that starts after the end of its parent on another
        server has no `child_started`."""
        if isinstance(event, ChildStarted):
            run_id, parent, ns = event.child_run_id, event, event.child_ns
            agent, description, call_id = event.child_agent, event.description, event.call_id
        else:
            self._agents[event.run_id] = event.agent
            if event.parent_run_id is None or not event.ns:
                return None
            run_id, ns, call_id = event.run_id, event.ns, event.parent_tool_call_id or ""
            above = self._agents.get(event.parent_run_id)
            if above is None:  # of a reader that sees only this subtree
                return None
            parent = replace(event, run_id=event.parent_run_id, agent=above, ns=ns[:-1])
            agent, description = event.agent, next((m.text for m in reversed(event.messages) if m.role == "user"), "")
        if run_id in self._children:
            return None
        number = _number(ns)
        child = self._children[run_id] = Child(parent, call_id, number, agent, description)
        if number == 1:
            self._call(parent.run_id, call_id).child = child
        return child

    def end_call(self, event: ToolCallFinished) -> bool:
        """Return whether the end of a call is that of its sub-agent. If not, it starts none, or left it in the background."""
        call = self._calls.get((event.run_id, event.call_id))
        if call is None:
            return False
        call.has_ended = True
        is_at_work = call.has_open_task or (call.child is not None and not call.child.has_ended)
        call.is_reported = not is_at_work
        return call.is_reported

    def end_child(self, event: RunFinished) -> Child | None:
        """Return the child whose end a `task` must show now; None if the end of its call does."""
        child = self._children.get(event.run_id)
        if child is None or child.has_ended or not event.status.is_terminal:
            return None
        child.has_ended = True
        if child.number > 1:
            return child
        call = self._call(child.parent.run_id, child.call_id)
        if not call.has_ended or call.is_reported:
            return None
        call.is_reported = True
        return child

    def note_task(self, event: TaskUpdated) -> Child | None:
        """Return the child of a background task that has ended although no run of it did: it could not start."""
        if event.parent_run_id is None:
            return None
        call = self._call(event.parent_run_id, event.call_id)
        call.has_open_task = event.status.upper() in _OPEN_TASKS
        if call.has_open_task or not call.has_ended or call.is_reported:
            return None
        call.is_reported = True
        above = self._agents.get(event.parent_run_id, "")
        parent = replace(event, run_id=event.parent_run_id, agent=above, ns=event.ns[:-1])
        return call.child or Child(parent, event.call_id, 1, event.agent, "")

    def _call(self, run_id: str, call_id: str) -> _Call:
        return self._calls.setdefault((run_id, call_id), _Call())
