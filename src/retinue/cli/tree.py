"""The tree of a log as the terminal shows it: numbered names, and lines for calls and runs."""

from __future__ import annotations

import time

from ..core.events import Event
from ..core.lifecycle import ToolCallStatus
from ..wire.tree import CallNode, Node, RunNode, RunTree
from .text import arguments, count, duration, headline, one_line, reply_of


class ShownTree(RunTree):
    """Keeps of each result only its headline."""

    def add_run(self, event: Event) -> RunNode:
        alike = sum(run.agent == event.agent for run in self.runs.values())
        run = super().add_run(event)
        run.label = f"{event.agent}#{alike + 1}" if alike else event.agent
        return run

    def node_ended(self, node: Node) -> None:
        if isinstance(node, CallNode):
            node.result = headline(reply_of(node.result or ""))


def call_line(call: CallNode) -> str:
    """A call, its status and its result, in one line."""
    status = "ok" if call.status is ToolCallStatus.SUCCEEDED else call.status.value
    took = "" if call.ended is None else f"  {duration(call.ended - call.started)}"
    result = one_line(call.result or "", 160)
    return f"{status:<6} {one_line(call.tool)}({arguments(call.args or {})}){took}  {result}".rstrip()


def summary(run: RunNode) -> str:
    """The status of a run and its figures so far, in one line."""
    done = [count(len(run.steps), "step"), count(sum(1 for _ in run.walk_calls()), "call")]
    if run.ended is None:  # its end reports its usage
        done.append(f"{duration(time.time() - run.started)} so far")
    else:
        done += [count(run.usage.tokens, "token"), duration(run.ended - run.started)]
    return f"{run.status.value}: {', '.join(done)}"
