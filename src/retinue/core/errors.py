"""Every error Retinue raises, in one tree.

    RetinueError
    ├── ConfigurationError        an agent, tool, key or runtime was put together wrongly
    ├── UnknownAgent              no agent of that name
    ├── UnknownRun                no run of that id
    ├── ThreadBusy                another run is active on the thread
    ├── IllegalMove               a life cycle was asked to go where it cannot
    ├── ConsumerTooSlow           a bounded subscription overflowed
    ├── StateError
    │   ├── UnknownKey            the key is not registered in this store
    │   ├── KeyAlreadyRegistered
    │   ├── PluginAlreadyInstalled
    │   ├── PluginNotInstalled
    │   ├── RevisionConflict      the batch was made against an older revision
    │   ├── WriteConflict         two parallel calls wrote one exclusive key
    │   ├── ReducerFailed
    │   ├── UnknownAction         a command asks for something nobody registered to carry out
    │   ├── MissingValue          read before written, and the type has no default
    │   ├── KeyEncodeError
    │   └── KeyDecodeError
    ├── ToolError                 ends one tool call; the run goes on
    │   ├── InvalidArguments, ExecutionFailed, Denied, NotFound
    │   └── InternalError, ToolTimeout, ToolCancelled
    ├── HookFailed                a plugin's hook raised; the run fails with its name
    ├── RunawayActions            actions kept scheduling actions
    ├── ExecutionBackendError     a child run could not be set up or dispatched
    │   └── LimitReached          the tree may start no more children, or none so deep
    ├── ChildAgentError           a child that had to complete did not; carries its result
    ├── DecisionRefused           a decision does not fit what the run waits for
    ├── StoreError                what is kept of runs cannot be read or written
    │   ├── OwnershipLost         another process owns the log now
    │   ├── LogUnreadable         a stored log cannot be folded
    │   └── TaskStoreError        the records of background tasks cannot be read or written
    ├── RecordUnwritable          something a run learned cannot be recorded, so that it could be recovered
    ├── RecordUnreadable          something recorded cannot be read by the code there is now
    ├── ModelError                the model could not answer; its kinds are in `failures.py`
    ├── FilesystemError           the workspace refused something
    │   └── PathError             a path cannot be used as asked
    │       ├── FileMissing       nothing is there
    │       ├── FilesystemDown    no path can be used: what keeps the files is broken or out of reach
    │       └── PathDenied        it leads out, through a link, to a special file, or permission is missing
    └── Escape                    passes through the loop to the caller of run()

Errors keep their fields in `args`, so they survive pickling; constructing one does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast


class RetinueError(Exception):
    """The base of every error here, for one `except`."""


class ConfigurationError(RetinueError, ValueError):
    """Something was put together wrongly; raised at once, where the mistake is."""


def as_tuple(given: Any, owner: str, name: str) -> tuple[Any, ...]:
    """Return a list that a caller gave as a tuple; a single thing in its place is a mistake that is easily made."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{owner}: {name} is a list, even of one: write [{given!r:.80}]")
    return tuple(cast("Iterable[Any]", given))


class UnknownAgent(RetinueError, LookupError):
    """No agent of that name is known to the runtime."""

    def __init__(self, name: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(name, known)
        self.name, self.known = name, known

    def __str__(self) -> str:
        return f"unknown agent {self.name!r}; known: {', '.join(sorted(self.known)) or 'none'}"


class UnknownRun(RetinueError, LookupError):
    """No run of that id is known to the runtime."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return f"unknown run {self.run_id!r}"


class RunElsewhere(RetinueError):
    """Another process is at work on a run."""

    def __init__(self, run_id: str, owner: str) -> None:
        super().__init__(run_id, owner)
        self.run_id, self.owner = run_id, owner

    def __str__(self) -> str:
        return (
            f"run {self.run_id!r} is being worked on by {self.owner}: follow it with events(run_id), or ask again later"
        )


class ThreadBusy(RetinueError):
    """A thread carries one run at a time."""

    def __init__(self, thread_id: str, run_id: str) -> None:
        super().__init__(thread_id, run_id)
        self.thread_id, self.run_id = thread_id, run_id

    def __str__(self) -> str:
        return f"thread {self.thread_id!r} is busy with run {self.run_id!r}: wait for it or cancel it"


class IllegalMove(RetinueError):
    """A life cycle was asked to move where its table does not go."""

    def __init__(self, what: str, current: str, wanted: str) -> None:
        super().__init__(what, current, wanted)
        self.what, self.current, self.wanted = what, current, wanted

    def __str__(self) -> str:
        return f"{self.what} cannot go from {self.current} to {self.wanted}"


class ConsumerTooSlow(RetinueError):
    """A bounded subscription overflowed; read on from the log after `last_seq`."""

    def __init__(self, last_seq: int) -> None:
        super().__init__(last_seq)
        self.last_seq = last_seq

    def __str__(self) -> str:
        return f"the consumer fell behind after event {self.last_seq}: read the log again with after={self.last_seq}"


class StateError(RetinueError):
    """A state store refused something; nothing of it was applied."""


class UnknownKey(StateError, LookupError):
    """The key is not registered in this store."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"state key {self.key!r} is not registered: register it in a plugin of this agent"


class KeyAlreadyRegistered(StateError):
    """Two plugins, or one twice, registered a key of that name."""

    def __init__(self, key: str, owner: str) -> None:
        super().__init__(key, owner)
        self.key, self.owner = key, owner

    def __str__(self) -> str:
        return f"state key {self.key!r} is already registered by plugin {self.owner!r}"


class PluginAlreadyInstalled(StateError):
    """A store holds each plugin once."""

    def __init__(self, plugin: str) -> None:
        super().__init__(plugin)
        self.plugin = plugin

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} is already installed"


class PluginNotInstalled(StateError, LookupError):
    """There is nothing of that name to uninstall."""

    def __init__(self, plugin: str) -> None:
        super().__init__(plugin)
        self.plugin = plugin

    def __str__(self) -> str:
        return f"plugin {self.plugin!r} is not installed"


class RevisionConflict(StateError):
    """The batch was made against an older revision."""

    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(expected, actual)
        self.expected, self.actual = expected, actual

    def __str__(self) -> str:
        return f"the batch was made at revision {self.expected}, the store is at {self.actual}: read it again"


class WriteConflict(StateError):
    """Two parallel calls wrote one exclusive key; the later one loses."""

    def __init__(self, key: str, first_call: str, second_call: str) -> None:
        super().__init__(key, first_call, second_call)
        self.key, self.first_call, self.second_call = key, first_call, second_call

    def __str__(self) -> str:
        return (
            f"state key {self.key!r} was already written by parallel call {self.first_call!r}; "
            f"the write of call {self.second_call!r} was dropped"
        )


class ReducerFailed(StateError):
    """A reducer raised; nothing of its batch was applied."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"the reducer of state key {self.key!r} failed: {self.reason}"


class MissingValue(StateError, LookupError):
    """A key was read before it was written, and its type has no default."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return f"state key {self.key!r} has no value yet and its type has no default: give StateKey(default=…)"


class KeyEncodeError(StateError):
    """A value does not fit its key's type, or has no JSON form."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"the value of state key {self.key!r} does not fit its type or has no JSON form: {self.reason}"


class KeyDecodeError(StateError):
    """A stored value does not fit its key's type."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return f"the stored value of state key {self.key!r} does not fit its type: {self.reason}"


class ToolError(RetinueError):
    """Ends one tool call as FAILED and drops its state; the model reads kind and message, the run goes on."""

    kind: ClassVar[str] = "execution_failed"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


class InvalidArguments(ToolError):
    """The arguments are wrong; the model may correct them."""

    kind = "invalid_arguments"


class ExecutionFailed(ToolError):
    """The tool could not do its work."""

    kind = "execution_failed"


class Denied(ToolError):
    """The call is not allowed."""

    kind = "denied"


class NotFound(ToolError):
    """The call asks for something that does not exist."""

    kind = "not_found"


class InternalError(ToolError):
    """The tool is broken; its traceback is in the log."""

    kind = "internal"


class ToolTimeout(ToolError):
    """The tool took longer than it may."""

    kind = "timeout"


class ToolCancelled(ToolError):
    """The call was stopped."""

    kind = "cancelled"


class HookFailed(RetinueError):
    """A plugin's hook raised; the run fails with its name."""

    def __init__(self, hook: str, phase: str, reason: str) -> None:
        super().__init__(hook, phase, reason)
        self.hook, self.phase, self.reason = hook, phase, reason

    def __str__(self) -> str:
        return f"{self.hook} failed in {self.phase}: {self.reason}"


class UnknownAction(StateError):
    """A command asks for an action or effect that no plugin carries out; nothing of it was applied."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(what, name)
        self.what, self.name = what, name

    def __str__(self) -> str:
        return (
            f"nobody carries out the {self.what} {self.name!r}: register a handler with r.{self.what}({self.name}, …)"
        )


class RunawayActions(RetinueError):
    """Actions kept scheduling actions."""

    def __init__(self, phase: str, rounds: int) -> None:
        super().__init__(phase, rounds)
        self.phase, self.rounds = phase, rounds

    def __str__(self) -> str:
        return f"actions scheduled in {self.phase} were still scheduling others after {self.rounds} rounds"


class ExecutionBackendError(RetinueError):
    """A child run could not be set up or dispatched; no event of it exists."""

    def __init__(self, agent: str, reason: str) -> None:
        RetinueError.__init__(self, agent, reason)
        self.agent, self.reason = agent, reason

    def __str__(self) -> str:
        return f"agent {self.agent!r} could not be run: {self.reason}"


class LimitReached(ExecutionBackendError, ToolError):
    """A limit of the tree stands in the way of a child; where nobody catches it, the model reads which."""

    def __init__(self, agent: str, limit: str, reason: str) -> None:
        RetinueError.__init__(self, agent, limit, reason)
        self.agent, self.limit, self.reason = agent, limit, reason
        self.message = f"[limit:{limit}] {reason}"

    kind: ClassVar[str] = "limit"

    def __str__(self) -> str:
        return self.message


class ChildAgentError(RetinueError):
    """A child that had to complete did not; `result` is how it ended."""

    def __init__(self, result: Any) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        return f"child agent did not complete: {self.result.status}"


class DecisionRefused(RetinueError):
    """A decision does not fit what the run waits for; nothing was changed."""


class StoreError(RetinueError):
    """Stored runs cannot be read or written. If it is `transient`, retrying may succeed.

    If it is `damaged`, the stored data is broken.
    """

    def __init__(self, place: str, problem: str, *, transient: bool = False, damaged: bool = False) -> None:
        super().__init__(place, problem)
        self.place, self.problem, self.transient, self.damaged = place, problem, transient, damaged

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


class OwnershipLost(StoreError):
    """Another process has taken a run over: this one may not write of it any more."""

    def __init__(self, place: str, log_id: str) -> None:
        super().__init__(place, f"run {log_id!r} is another process's now")
        self.log_id = log_id


class LogUnreadable(StoreError):
    """A stored log cannot be folded: a row is missing, damaged or of a kind that this version does not know."""

    def __init__(self, place: str, log_id: str, seq: int, problem: str) -> None:
        super().__init__(place, f"the log of run {log_id!r} cannot be read at event {seq}: {problem}")
        self.log_id, self.seq, self.reason = log_id, seq, problem


class TaskStoreError(StoreError):
    """The records of background tasks cannot be read or written; nothing of them was changed."""


class RecordUnwritable(RetinueError):
    """Something a run learned cannot be recorded as JSON that is read back as it was; nothing was committed."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what} cannot be recorded: {self.reason}; use values of a type that JSON can be read back into"


class RecordUnreadable(RetinueError):
    """Something that was recorded of a run does not fit the code there is now."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return (
            f"{self.what} was recorded and cannot be read any more: {self.reason}; "
            "recover the run with the code that recorded it, or start it anew"
        )


class ModelError(RetinueError):
    """The model could not answer; the run fails with this text. `code` is what events say."""

    code: ClassVar[str] = "model_failed"
    retryable: ClassVar[bool] = False
    """True if the same request may succeed a little later."""

    def __init__(
        self, message: str = "", model: str = "", status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message, model, status, retry_after)
        self.message, self.model, self.status, self.retry_after = message, model, status, retry_after

    def __str__(self) -> str:
        return f"{self.model}: {self.message}" if self.model else self.message


class FilesystemError(RetinueError):
    """The workspace refused something."""


class PathError(FilesystemError):
    """A path cannot be used as asked; `problem` says why."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{shown_path(self.path)}: {self.problem}"


def shown_path(path: str) -> str:
    """A path as it can stand in a message: never empty, endless or with control characters."""
    text = path if len(path) <= 200 else path[:200] + "…"
    return text if text.isprintable() and text else repr(text) if text else "."


class FileMissing(PathError):
    """Nothing is at that path."""


class FilesystemDown(PathError):
    """The storage of the files is broken or out of reach, so that no path can be used."""


class PathDenied(PathError):
    """The path may not be used, whatever is there."""


class Escape(RetinueError):
    """An error that must reach whoever called run(): a broken promise of the harness, not of the agent."""
