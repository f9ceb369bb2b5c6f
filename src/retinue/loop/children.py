"""The children of a run's calls: which have been started, how they stand, and which one a tool means."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.codec import to_json_bytes
from ..core.events import ChildFinished, Namespace
from ..core.journal import Journal
from ..core.lifecycle import RunStatus
from ..core.runs import RunIdentity, RunResult
from .scope import OpenCall, RunScope


class ChildRun(Protocol):
    """A child as its parent's loop sees it."""

    scope: RunScope | None

    @property
    def identity(self) -> RunIdentity: ...

    @property
    def result(self) -> RunResult | None: ...

    @property
    def asked_for(self) -> Any:
        """What it was started with: two children that were asked for the same are interchangeable."""
        ...

    def abandon(self) -> RunResult | None: ...


def next_number(parent: RunScope, call_id: str) -> int:
    """The number of a call's next child."""
    open_call = parent.open_calls.get(call_id)
    started = parent.late_children.get(call_id, 0) if open_call is None else open_call.children_started
    return started + 1


def segment(call_id: str, number: int) -> str:
    """A child's part of a path: the call that started it, and which of its children it is."""
    return call_id if number == 1 else f"{call_id}~{number}"


class _Noted(Struct, frozen=True, array_like=True):
    """Who a child was when it was first started, and a few letters of what it was asked."""

    run_id: str
    thread_id: str
    asked: str


def same_child(parent: RunScope, call_id: str, request: RunRequest) -> int:
    """The number of a child; one that a process before had started gets its identity back, whoever is asked first."""
    journal, open_call = parent.journal, parent.open_calls.get(call_id)
    taken = {} if open_call is None else open_call.children
    asked = hashlib.blake2b(to_json_bytes(asked_for(request)), digest_size=8).hexdigest()
    number = following = next_number(parent, call_id)
    known = _noted(journal, call_id, number)
    if known is None or known.asked != asked:  # it is not the next one, as it mostly is
        number = 1
        while (known := _noted(journal, call_id, number)) is not None and (known.asked != asked or number in taken):
            number += 1
    if known is not None:
        request.identity = replace(request.identity, run_id=known.run_id, thread_id=known.thread_id)
        return number
    number, made = max(number, following), request.identity
    noted = _Noted(made.run_id, made.thread_id, asked)
    journal.note(f"child_ids:{segment(call_id, number)}", msgspec.json.encode(noted))
    return number


def _noted(journal: Journal, call_id: str, number: int) -> _Noted | None:
    body = journal.recall(f"child_ids:{segment(call_id, number)}")
    return None if body is None else msgspec.json.decode(body, type=_Noted)


def child_ns(parent: RunScope, call_id: str, number: int) -> Namespace:
    return (*parent.ns, f"tools:{segment(call_id, number)}")


def enter_child(parent: RunScope, call_id: str, number: int, child: ChildRun) -> None:
    """Remember a child that has been set up."""
    open_call = parent.open_calls.get(call_id)
    if open_call is None:
        parent.late_children = {**parent.late_children, call_id: number}
        return
    open_call.children_started = max(number, open_call.children_started)
    open_call.children[number] = child


def give_slot_back(parent: RunScope, call_id: str) -> None:
    """A call that has started a child leaves its place in the row to others, for good."""
    open_call = parent.open_calls.get(call_id)
    if open_call is not None and open_call.holds_slot:
        open_call.holds_slot = False
        parent.budget.slots.give_back()


def asked_for(request: RunRequest) -> Any:
    """What tells children of one call apart: who was asked, and what."""
    said = tuple([(message.role, message.parts) for message in request.messages])
    return request.identity.agent, said, request.seed.extensions


def find_again(open_call: OpenCall, asked_for: Any) -> ChildRun | None:
    """The child that a call which goes on means: started before, for the same, and not yet found again."""
    for number, child in open_call.children.items():
        known = number > open_call.child_base and number not in open_call.found_again
        if known and child.asked_for == asked_for:
            open_call.found_again |= {number}
            return child
    return None


def waiting_children(open_call: OpenCall) -> list[tuple[int, RunScope]]:
    """The children of a call that wait for a human, by their number."""
    found: list[tuple[int, RunScope]] = []
    for number, child in open_call.children.items():
        if child.scope is not None and child.scope.status is RunStatus.SUSPENDED:
            found.append((number, child.scope))
    return found


def give_up_children(parent: RunScope, open_call: OpenCall) -> None:
    """End the children of a call that nobody waits for any more."""
    for child in open_call.children.values():
        before = child.result
        result = child.abandon()
        if result is not None and result is not before:
            tell_child_finished(parent, child.identity, result)


def tell_child_finished(parent: RunScope, identity: RunIdentity, result: RunResult) -> None:
    parent.emit(
        ChildFinished(
            call_id=identity.parent_tool_call_id or "",
            child_run_id=identity.run_id,
            child_agent=identity.agent,
            status=result.status,
        )
    )
