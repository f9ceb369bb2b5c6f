"""The children of a run's calls: which have been started, how they stand, and what they are to be told."""

from __future__ import annotations

from typing import Protocol

from ..core.events import Namespace
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from .scope import OpenCall, RunScope


class ChildRun(Protocol):
    """A child as its parent's loop sees it."""

    scope: RunScope | None
    result: RunResult | None

    def abandon(self) -> RunResult | None: ...


def next_ordinal(parent: RunScope, call_id: str) -> tuple[int, Namespace]:
    """The number of a call's next child, and its namespace."""
    open_call = parent.open_calls.get(call_id)
    if open_call is None:
        number = parent.late_children.get(call_id, 0) + 1
        parent.late_children = {**parent.late_children, call_id: number}
    else:
        open_call.children_started += 1
        number = open_call.children_started
    name = f"tools:{call_id}" if number == 1 else f"tools:{call_id}~{number}"
    return number, (*parent.ns, name)


def waiting_children(open_call: OpenCall) -> list[RunScope]:
    """The children of a call that wait for a human."""
    scopes = [child.scope for child in open_call.children.values()]
    return [scope for scope in scopes if scope is not None and scope.status is RunStatus.SUSPENDED]
