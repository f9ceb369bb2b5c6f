"""The tree of runs, steps and calls that events describe. A child is nested by its `ns` under its call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.events import (
    ErrorRaised,
    Event,
    Handoff,
    MessagesSnapshot,
    Namespace,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StepStarted,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallResumed,
    ToolCallStarted,
    ToolCallStreamDelta,
)
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.messages import ToolCall
from ..core.runs import Usage
from .text import arguments, count, duration, headline, one_line, reply_of

_KEPT_CHARS = 400
"""How much of the running output of a call or a child is kept to show."""


@dataclass(slots=True)
class CallNode:
    id: str
    tool: str
    started: float
    args: str = ""
    status: ToolCallStatus = ToolCallStatus.NEW
    ended: float | None = None
    result: str = ""
    output: str = ""
    """The end of what it has streamed."""
    path: str | None = None
    """The file it works on, where an argument names one."""
    children: list[RunNode] = field(default_factory=list["RunNode"])

    def began(self, args: Mapping[str, Any]) -> None:
        """It works now, for the first time or again."""
        self.status, self.ended, self.result = ToolCallStatus.RUNNING, None, ""
        if not self.args:
            self.args = arguments(args)
            self.path = path if isinstance(path := args.get("path"), str) else None


@dataclass(slots=True)
class StepNode:
    number: int
    thought: str = ""
    calls: dict[str, CallNode] = field(default_factory=dict[str, CallNode])


@dataclass(slots=True)
class RunNode:
    label: str
    ns: Namespace
    task: str = ""
    steps: list[StepNode] = field(default_factory=list[StepNode])
    notes: list[str] = field(default_factory=list[str])
    status: RunStatus = RunStatus.RUNNING
    error: str | None = None
    tail: str = ""
    """The end of what it has said."""
    started: float = 0.0
    ended: float | None = None
    usage: Usage = Usage()
    before: dict[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    """The calls of the conversation it goes on with."""

    @property
    def step(self) -> StepNode:
        """The step it is in."""
        if not self.steps:
            self.steps.append(StepNode(0))
        return self.steps[-1]

    def open_step(self, number: int) -> None:
        """Begin a step, or go on with the one in which calls waited."""
        if not self.steps or self.steps[-1].number != number:
            self.steps.append(StepNode(number))

    def calls(self) -> Iterator[CallNode]:
        """Every call in it and below it."""
        for step in self.steps:
            for call in step.calls.values():
                yield call
                for child in call.children:
                    yield from child.calls()


class RunTree:
    """Takes the events of one log, in order, and is the tree they make."""

    def __init__(self) -> None:
        self.runs: dict[Namespace, RunNode] = {}

    @property
    def root(self) -> RunNode | None:
        return next(iter(self.runs.values()), None)

    def run_of(self, event: Event) -> RunNode:
        """The run an event belongs to; made where its beginning was not seen."""
        return self.runs.get(event.ns) or self._add(event)

    def call_of(self, event: Event, call_id: str, tool: str = "") -> CallNode:
        step = self.run_of(event).step
        if call_id not in step.calls:
            step.calls[call_id] = CallNode(call_id, tool, event.at)
        return step.calls[call_id]

    def take(self, event: Event) -> None:
        match event:
            case ToolCallStarted() | ToolCallReady() | ToolCallResumed() | ToolCallFinished() | ToolCallStreamDelta():
                self._take_call(event)
            case TextDelta():
                run = self.run_of(event)
                run.tail = (run.tail + event.delta)[-_KEPT_CHARS:]
            case ReasoningDelta():
                self.run_of(event).step.thought += event.delta
            case StepStarted():
                self.run_of(event).open_step(event.step)
            case RunStarted():
                run = self.run_of(event)
                said = event.messages[-1].text if event.messages else ""
                run.task = said or run.task or ("(goes on)" if event.continues else "")
                run.status, run.ended = RunStatus.RUNNING, None
            case MessagesSnapshot():
                self.run_of(event).before = {call.id: call for said in event.messages for call in said.tool_calls}
            case RunFinished():
                run = self.run_of(event)
                run.status, run.error, run.ended, run.usage = event.status, event.error, event.at, event.usage
            case Handoff():
                self.run_of(event).notes.append(f"handed over to {event.to_agent}")
            case ErrorRaised(fatal=False):
                run = self.run_of(event)
                run.notes.append(event.message)
                if event.dropped_message_id is not None:
                    run.tail, run.step.thought = "", ""
            case _:
                pass

    def _take_call(
        self, event: ToolCallStarted | ToolCallReady | ToolCallResumed | ToolCallFinished | ToolCallStreamDelta
    ) -> None:
        call = self.call_of(event, event.call_id, event.tool_name)
        match event:
            case ToolCallReady():
                call.began(event.args)
                call.started = event.at
            case ToolCallResumed():
                asked = self.run_of(event).before.get(event.call_id)
                call.began({} if asked is None else asked.args)
            case ToolCallFinished():
                call.status, call.ended, call.result = event.status, event.at, headline(reply_of(event.message.text))
            case ToolCallStreamDelta():
                call.output = (call.output + event.delta)[-_KEPT_CHARS:]
            case _:
                pass

    def _add(self, event: Event) -> RunNode:
        alike = sum(run.label.partition("#")[0] == event.agent for run in self.runs.values())
        label = f"{event.agent}#{alike + 1}" if alike else event.agent
        run = self.runs[event.ns] = RunNode(label, event.ns, started=event.at)
        if (call := self._parent_call(event.ns)) is not None:
            call.children.append(run)
        return run

    def _parent_call(self, ns: Namespace) -> CallNode | None:
        parent = self.runs.get(ns[:-1]) if ns else None
        call_id = ns[-1].removeprefix("tools:").partition("~")[0] if ns else ""
        found = [step.calls[call_id] for step in parent.steps if call_id in step.calls] if parent else []
        return found[-1] if found else None


def call_line(call: CallNode) -> str:
    """A call, how it went and what came of it, in one line."""
    status = "ok" if call.status is ToolCallStatus.SUCCEEDED else call.status.value
    took = "" if call.ended is None else f"  {duration(call.ended - call.started)}"
    return f"{status:<6} {one_line(call.tool)}({call.args}){took}  {call.result}".rstrip()


def summary(run: RunNode) -> str:
    """How a run went, or how far it is, in one line."""
    done = [count(len(run.steps), "step"), count(sum(1 for _ in run.calls()), "call")]
    if run.ended is None:  # what it has used is told at its end
        done.append(f"{duration(time.time() - run.started)} so far")
    else:
        done += [count(run.usage.tokens, "token"), duration(run.ended - run.started)]
    return f"{run.status.value}: {', '.join(done)}"
