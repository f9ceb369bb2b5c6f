"""The call ids of runs elsewhere, as the log here has them.

A run elsewhere does not know the ids that are taken here (`LogState.is_taken`). Its ids are checked as its events are
copied, and a replaced id is noted in the row that first has it (`Private.renamed`). `local_path` and `remote_path`
translate questions and decisions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from msgspec.structs import replace

from ..core.events import (
    ActivitySnapshot,
    ChildFinished,
    ChildStarted,
    Event,
    InferenceFinished,
    MessagesSnapshot,
    Namespace,
    RunStarted,
    TaskUpdated,
    ToolCallFinished,
    ToolCallStarted,
)
from ..core.messages import Message
from .state import LogState, RemoteCalls, RunState, with_hash

_PREFIX = "tools:"


def new_calls(event: Event | None) -> tuple[str, ...]:
    """Return the ids of the calls that an event is the first to have."""
    if isinstance(event, ToolCallStarted):
        return (event.call_id,)
    messages: tuple[Message, ...] = ()
    if isinstance(event, InferenceFinished):
        messages = (event.message,)
    elif isinstance(event, MessagesSnapshot):
        messages = event.messages
    return tuple([call.id for message in messages for call in message.tool_calls])


# --- runs elsewhere


class Renaming:
    """Gives an event of a run elsewhere the call ids that it has in the log here."""

    def __init__(self, tree: LogState, run: RunState, event: Event) -> None:
        self._tree, self._run, self._event = tree, run, event
        self._known = run.remote_calls or RemoteCalls()
        self.made: dict[str, str] = {}
        """The ids that this event is the first to have and that are replaced, by the id elsewhere."""
        self.ns: Namespace = ()
        self.ns = self._namespace(event.ns)

    def changes(self) -> dict[str, Any]:
        """Return the fields that are different here. The names of new calls are in `made` after that."""
        event = self._event
        for call_id in new_calls(event):
            if (self.ns, call_id) not in self._known.names and (name := self._free(self.ns, call_id)) != call_id:
                self.made[call_id] = name
        found: dict[str, Any] = {"ns": self.ns}
        call_id: str | None = getattr(event, "call_id", None)
        if call_id:
            # The namespace of a task is that of its child: its call is one of the run above.
            found["call_id"] = self._name(self.ns[:-1] if isinstance(event, TaskUpdated) else self.ns, call_id)
        if isinstance(event, RunStarted) and event.parent_tool_call_id is not None and event.ns:
            found["parent_tool_call_id"] = self._name(self.ns[:-1], event.parent_tool_call_id)
        elif isinstance(event, ChildStarted):
            found["child_ns"] = self._namespace(event.child_ns)
        elif isinstance(event, InferenceFinished | ToolCallFinished):
            found["message"] = self._message(event.message)
        elif isinstance(event, MessagesSnapshot):
            found["messages"] = tuple([self._message(message) for message in event.messages])
        elif isinstance(event, ActivitySnapshot):
            found["content"] = self._content(event.content)
        return found

    def _namespace(self, ns: Namespace) -> Namespace:
        here = self._run.ns
        for part in ns:
            call_id, tilde, number = part.removeprefix(_PREFIX).partition("~")
            here = (*here, f"{_PREFIX}{self._name(here, call_id)}{tilde}{number}")
        return here

    def _name(self, ns: Namespace, call_id: str) -> str:
        """Return the id here of a call of the run elsewhere with this namespace here."""
        made = self.made.get(call_id) if ns == self.ns else None
        return made or self._known.names.get((ns, call_id)) or self._free(ns, call_id)

    def _free(self, ns: Namespace, call_id: str) -> str:
        """Return an id for a new call that no call above or below it, or beside it, has."""
        name, number = call_id, 0
        while self._tree.is_above(self._run, name) or self._known.is_taken(ns, name) or name in self.made.values():
            name = with_hash(call_id, (*ns, str(number)) if number else ns)
            number += 1
        return name

    def _message(self, message: Message) -> Message:
        if message.tool_calls:
            calls = [replace(call, id=self._name(self.ns, call.id)) for call in message.tool_calls]
            return replace(message, tool_calls=tuple(calls))
        if message.tool_call_id is not None:
            return replace(message, tool_call_id=self._name(self.ns, message.tool_call_id))
        return message

    def _content(self, given: Any) -> Any:
        """Return what a call shows. A report of progress names its call and the call above."""
        if not isinstance(given, dict):
            return given
        content = cast("dict[str, Any]", given)
        places = {"call_id": self.ns, "parent_call_id": self.ns[:-1]}
        named = {key: ns for key, ns in places.items() if isinstance(content.get(key), str)}
        return {**content, **{key: self._name(ns, content[key]) for key, ns in named.items()}}


def as_local(tree: LogState, run: RunState, event: Event) -> tuple[Event, dict[str, str]]:
    """Return an event of a run elsewhere with the ids it has here, so that it cannot claim to be of another run, and the
    call ids that were replaced for the first time."""
    identity, depth = run.identity, len(event.ns)

    def local_id(run_id: str) -> str:
        return f"{identity.run_id}/{run_id}" if run_id in tree.runs else run_id

    renaming = Renaming(tree, run, event)
    changes = renaming.changes()
    changes["run_id"] = local_id(event.run_id) if depth else identity.run_id
    if depth > 1 and event.parent_run_id is not None:
        changes["parent_run_id"] = local_id(event.parent_run_id)
    else:
        changes["parent_run_id"] = identity.run_id if depth else identity.parent_run_id
    if isinstance(event, ChildStarted | ChildFinished):
        changes["child_run_id"] = local_id(event.child_run_id)
    return replace(event, **changes), renaming.made


def note_remote(tree: LogState, run: RunState, event: Event, renamed: dict[str, str]) -> None:
    """Note the call ids of an event that was copied from a run elsewhere. Only the fold calls this."""
    call_ids = new_calls(event)
    if not call_ids:
        return
    tree.note_calls(run, call_ids)
    if run.remote_calls is None:
        run.remote_calls = RemoteCalls()
    there = {name: call_id for call_id, name in renamed.items()}
    for name in call_ids:
        if (event.ns, name) not in run.remote_calls.used:  # else an earlier event had it
            run.remote_calls.add(event.ns, there.get(name, name), name)


def local_path(run: RunState, path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the path of a question of a run elsewhere with the call ids it has here."""
    known = (run.remote_calls or RemoteCalls()).names
    return _translated(run, path, lambda ns, call_id: known.get((ns, call_id), call_id), is_local=True)


def remote_path(run: RunState, path: tuple[str, ...]) -> tuple[str, ...]:
    """Return a path here with the call ids that it has in the log of the run elsewhere."""
    known = (run.remote_calls or RemoteCalls()).names
    there = {(ns, name): call_id for (ns, call_id), name in known.items()}
    return _translated(run, path, lambda ns, name: there.get((ns, name), name), is_local=False)


def _translated(
    run: RunState, path: tuple[str, ...], name_of: Callable[[Namespace, str], str], *, is_local: bool
) -> tuple[str, ...]:
    """Return a path with other ids. With `is_local` those are the ids here, which make up the namespaces."""
    ns, found = run.ns, list[str]()
    for part in path:
        call_id, tilde, number = part.partition("~")
        found.append(f"{name_of(ns, call_id)}{tilde}{number}")
        ns = (*ns, f"{_PREFIX}{found[-1] if is_local else part}")
    return tuple(found)
