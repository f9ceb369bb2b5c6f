"""Every error Retinue raises, in one tree.

    RetinueError
    ├── ConfigurationError
    │   └── NoForkPlace           a run cannot be forked there; it names the places where it can
    ├── UnknownAgent, UnknownRun, RunElsewhere, ThreadBusy, IllegalMove, ConsumerTooSlow
    ├── StateError
    │   ├── UnknownKey, KeyAlreadyRegistered, MissingValue, KeyEncodeError, KeyDecodeError
    │   ├── PluginAlreadyInstalled, PluginNotInstalled, UnknownAction
    │   └── RevisionConflict, WriteConflict, ReducerFailed
    ├── ToolError                 ends one tool call; the run continues
    │   ├── InvalidArguments, ExecutionFailed, Denied, NotFound
    │   └── InternalError, ToolTimeout, ToolCancelled
    ├── HookFailed, RunawayActions, DecisionRefused, RecordUnwritable, RecordUnreadable
    ├── RunNotCompleted           the answer of a run that has none was asked for
    │   └── ChildAgentError
    ├── ExecutionBackendError     a child run could not be set up or dispatched
    │   └── LimitReached          also a ToolError
    ├── StoreError                stored runs cannot be read or written
    │   └── OwnershipLost, LogUnreadable, TaskStoreError
    ├── EngineError               the engine cannot be reached, or refused a request
    ├── ServerError               the server of a Client refused a request or cannot be reached
    ├── ModelError                the model could not answer
    │   ├── ModelAccessDenied, ModelNotFound, ModelRefused
    │   ├── ModelRequestInvalid
    │   │   └── ContextOverflow
    │   ├── ModelUnavailable
    │   │   └── ModelTimeout
    │   └── ModelRateLimited, ModelStreamBroken, ModelResponseInvalid, OutputTruncated
    ├── FilesystemError           the workspace refused something
    │   └── PathError
    │       └── FileMissing, FilesystemDown, PathDenied
    └── Escape                    passes through the loop to the caller of run()

Errors keep their fields in `args`, so they survive pickling; constructing one does nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar, cast, dataclass_transform


class RetinueError(Exception):
    """The base of every error here, for one `except`. A class statement sets class variables with `name=value`."""

    def __init_subclass__(cls, **constants: Any) -> None:
        super().__init_subclass__()
        for name, value in constants.items():
            setattr(cls, name, value)


@dataclass_transform(eq_default=False)
class _FieldError(RetinueError):
    """An error made of the fields that its class declares, as in a dataclass; `template` is its message."""

    template: ClassVar[str] = ""
    _signature: ClassVar[Signature] = Signature()

    def __init_subclass__(cls, **constants: Any) -> None:
        super().__init_subclass__(**constants)
        if "__init__" in cls.__dict__:
            return
        fields = dict(cls._signature.parameters)
        for name, hint in cls.__annotations__.items():
            if "ClassVar" not in str(hint):
                default = cls.__dict__.get(name, Parameter.empty)
                fields[name] = Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default)
        cls._signature = Signature(list(fields.values()))

    def __init__(self, *values: Any, **named: Any) -> None:
        bound = self._signature.bind(*values, **named)
        bound.apply_defaults()
        super().__init__(*bound.args)
        self.__dict__.update(bound.arguments)

    def __str__(self) -> str:
        return self.template.format_map(self.__dict__)


class ConfigurationError(RetinueError, ValueError):
    """A mistake in an agent, tool, key, plugin or runtime; raised where it is made."""


class NoForkPlace(ConfigurationError):
    """A run cannot be forked where that was asked for. `places` are the events after which it can be."""

    def __init__(self, problem: str, places: tuple[int, ...] = ()) -> None:
        super().__init__(problem)
        self.places, self.args = places, (problem, places)

    def __str__(self) -> str:
        return self.args[0]


def as_tuple(given: Any, owner: str, name: str) -> tuple[Any, ...]:
    """Return a caller's list as a tuple; raise ConfigurationError for a single thing in its place."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{owner}: {name} is a list, even of one: write [{given!r:.80}]")
    return tuple(cast("Iterable[Any]", given))


class UnknownAgent(_FieldError, LookupError):
    """No agent of that name is known to the runtime."""

    name: str
    known: tuple[str, ...] = ()
    run_id: str | None = None
    """The run that needs it, which no process works on."""

    def __str__(self) -> str:
        known = f"unknown agent {self.name!r}; known: {', '.join(sorted(self.known)) or 'none'}"
        if self.run_id is None:
            return known
        return f"{known}; no process works on run {self.run_id!r}: continue it in one that has the agent"


class UnknownRun(_FieldError, LookupError):
    """No run of that id is known to the runtime."""

    run_id: str
    template = "unknown run {run_id!r}; a sub-agent that a run waits for is found under its root run"


class RunElsewhere(_FieldError):
    """Another process executes the run."""

    run_id: str
    owner: str
    template = "run {run_id!r} is being worked on by {owner}: follow it with events(run_id), or ask again later"


class RuntimeClosed(_FieldError):
    """The runtime was closed before a run had ended. The run is stored, and the next process continues it."""

    run_id: str
    template = (
        "the runtime was closed before run {run_id!r} had ended: the next runtime that opens its store continues the run, "
        "and `await runtime.result({run_id!r})` there returns its result"
    )


class ThreadBusy(_FieldError):
    """Another run is active on the thread."""

    thread_id: str
    run_id: str
    template = "thread {thread_id!r} is busy with run {run_id!r}: wait for it or cancel it"


class RunEnded(_FieldError):
    """A run takes no more messages: it has ended, or is about to."""

    run_id: str
    reason: str
    template = "run {run_id!r} takes no message: {reason}"


class IllegalMove(_FieldError):
    """A change of status that the life cycle does not allow."""

    what: str
    current: str
    wanted: str
    template = "{what} cannot go from {current} to {wanted}"


class ConsumerTooSlow(_FieldError):
    """A bounded subscription overflowed; read on from the log after `last_seq`."""

    last_seq: int
    template = "the consumer fell behind after event {last_seq}: read the log again with after={last_seq}"


class StateError(RetinueError):
    """A state store refused something; nothing of it was applied."""


class UnknownKey(_FieldError, StateError, LookupError):
    """The key is not registered in this store."""

    key: str
    template = "state key {key!r} is not registered: register it in a plugin of this agent"


class KeyAlreadyRegistered(_FieldError, StateError):
    """Two plugins, or one twice, registered a key of that name."""

    key: str
    owner: str
    template = "state key {key!r} is already registered by plugin {owner!r}: register it once, in one of the plugins"


class PluginAlreadyInstalled(_FieldError, StateError):
    """A store holds each plugin once."""

    plugin: str
    template = "plugin {plugin!r} is already installed"


class PluginNotInstalled(_FieldError, StateError, LookupError):
    """No plugin of that name is installed."""

    plugin: str
    template = "plugin {plugin!r} is not installed"


class RevisionConflict(_FieldError, StateError):
    """The batch was made against an older revision."""

    expected: int
    actual: int
    template = "the batch was made at revision {expected}, the store is at {actual}: read it again"


class WriteConflict(_FieldError, StateError):
    """Two parallel calls wrote one exclusive key; the later one loses."""

    key: str
    first_call: str
    second_call: str
    template = (
        "state key {key!r} was already written by parallel call {first_call!r}; "
        "the write of call {second_call!r} was dropped"
    )


class ReducerFailed(_FieldError, StateError):
    """A reducer raised; nothing of its batch was applied."""

    key: str
    reason: str
    template = "the reducer of state key {key!r} failed: {reason}"


class MissingValue(_FieldError, StateError, KeyError):
    """A key was read before it was written, and its type has no default."""

    key: str
    template = "state key {key!r} has no value yet and its type has no default: give StateKey(default=…)"


class KeyEncodeError(_FieldError, StateError):
    """A value does not fit its key's type, or has no JSON form."""

    key: str
    reason: str
    template = "the value of state key {key!r} does not fit its type or has no JSON form: {reason}"


class KeyDecodeError(_FieldError, StateError):
    """A stored value does not fit its key's type."""

    key: str
    reason: str
    template = "the stored value of state key {key!r} does not fit its type: {reason}"


class ToolError(RetinueError):
    """Ends one tool call as FAILED and drops its state; the model reads kind and message, and the run continues."""

    kind: ClassVar[str] = "execution_failed"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


class InvalidArguments(ToolError, kind="invalid_arguments"):
    """The arguments are wrong; the model may correct them."""


class ExecutionFailed(ToolError, kind="execution_failed"):
    """The tool could not do its work."""


class Denied(ToolError, kind="denied"):
    """The call is not allowed."""


class NotFound(ToolError, kind="not_found"):
    """The call asks for something that does not exist."""


class InternalError(ToolError, kind="internal"):
    """The tool is broken; its traceback is in the log."""


class ToolTimeout(ToolError, kind="timeout"):
    """The tool took longer than it may."""


class ToolCancelled(ToolError, kind="cancelled"):
    """The call was stopped."""


class HookFailed(_FieldError):
    """A plugin's hook raised; the run fails with its name."""

    hook: str
    phase: str
    reason: str
    template = "{hook} failed in {phase}: {reason}"


class UnknownAction(_FieldError, StateError):
    """A command asks for an action or effect without a handler; nothing of it was applied."""

    what: str
    name: str
    template = "nobody carries out the {what} {name!r}: register a handler with r.{what}({name}, …)"


class RunawayActions(_FieldError):
    """Actions kept scheduling actions."""

    phase: str
    rounds: int
    template = "actions scheduled in {phase} were still scheduling others after {rounds} rounds"


class ExecutionBackendError(_FieldError):
    """A child run could not be set up or dispatched; no event of it exists."""

    agent: str
    reason: str
    template = "agent {agent!r} could not be run: {reason}"


class LimitReached(ExecutionBackendError, ToolError, kind="limit"):
    """A limit of the tree forbids a child. If no tool catches the error, the model reads the name of the limit."""

    def __init__(self, agent: str, limit: str, reason: str) -> None:
        RetinueError.__init__(self, agent, limit, reason)
        self.agent, self.limit, self.reason = agent, limit, reason
        self.message = f"[limit:{limit}] {reason}"

    def __str__(self) -> str:
        return self.message


class RunNotCompleted(_FieldError):
    """The answer of a run was asked for, and the run did not complete; `result` says how it ended."""

    result: Any

    def __str__(self) -> str:
        ended = self.result
        said = ": ".join(filter(None, (f"run {ended.run_id!r} has no answer, it is {ended.status}", ended.error)))
        if ended.status.is_waiting:
            waits = ", ".join(map(repr, ended.suspended)) or "its child"
            return f"{said}; it waits for {waits}: answer with runtime.resume(run_id, decisions) and unwrap that result"
        if ended.status.is_terminal and not ended.error:
            said = f"{said} ({ended.termination})"
        return f"{said}; check result.status before result.unwrap()"


class ChildAgentError(RunNotCompleted):
    """A child that had to complete did not; `result` says how it ended."""

    def __str__(self) -> str:
        return ": ".join(filter(None, ("child agent did not complete", self.result.status, self.result.error)))


class DecisionRefused(RetinueError):
    """A decision does not fit what the run waits for; nothing was changed."""


class StoreError(_FieldError):
    """Stored runs cannot be read or written. If it is `transient`, a retry may succeed; if `damaged`, data is broken."""

    place: str
    problem: str
    transient: bool = False
    damaged: bool = False
    template = "{place}: {problem}"


class OwnershipLost(StoreError):
    """Another process owns the run now: this one may not write to its log."""

    def __init__(self, place: str, log_id: str) -> None:
        super().__init__(place, f"run {log_id!r} is another process's now")
        self.log_id, self.args = log_id, (place, log_id)


class LogUnreadable(StoreError):
    """A stored log cannot be folded: a row is missing, damaged or of a kind that this version does not know."""

    def __init__(self, place: str, log_id: str, seq: int, problem: str) -> None:
        super().__init__(place, f"the log of run {log_id!r} cannot be read at event {seq}: {problem}")
        self.log_id, self.seq, self.reason, self.args = log_id, seq, problem, (place, log_id, seq, problem)


class TaskStoreError(StoreError):
    """The records of background tasks cannot be read or written; nothing of them was changed."""


class EngineError(_FieldError):
    """The engine that schedules runs cannot be reached, or refused a request."""

    place: str
    problem: str
    template = "{place}: {problem}"


class ServerError(_FieldError):
    """The server of a `Client` refused a request, or cannot be reached: then `status` is None."""

    url: str
    status: int | None
    code: str
    detail: str
    run_id: str | None = None

    def __str__(self) -> str:
        advice = {
            "unreachable": "check the url, or give the client more patience",
            "unauthorized": "give the client a valid token",
            "unknown_outcome": "look at the runs of the server before you ask again",
        }.get(self.code)
        said = f"{self.url}: {self.detail}" if self.status is None else f"{self.url}: {self.status} {self.detail}"
        return said if advice is None else f"{said}; {advice}"


class RecordUnwritable(_FieldError):
    """A value of a run has no JSON form that is read back as it was; nothing was committed."""

    what: str
    reason: str
    template = "{what} cannot be recorded: {reason}; use values of a type that JSON can be read back into"


class RecordUnreadable(_FieldError):
    """A record of a run does not fit the current code."""

    what: str
    reason: str
    template = (
        "{what} was recorded and cannot be read any more: {reason}; "
        "recover the run with the code that recorded it, or start it anew"
    )


class ModelError(RetinueError):
    """The model could not answer; the run fails with this message. Events carry `code`."""

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


class ModelAccessDenied(ModelError, code="access_denied"):
    """The key is wrong, or it may not use this model."""


class ModelNotFound(ModelError, code="model_not_found"):
    """The server does not have this model, or the address is of another server."""


class ModelRequestInvalid(ModelError, code="request_invalid"):
    """The server rejects the request; a retry would not help."""


class ContextOverflow(ModelRequestInvalid, code="context_overflow"):
    """The conversation is longer than the model can read."""


class ModelRateLimited(ModelError, code="rate_limited", retryable=True):
    """Too many requests; `retry_after` is the number of seconds to wait, if the server said so."""


class ModelUnavailable(ModelError, code="unavailable", retryable=True):
    """There is no connection, or the server is overloaded or failed."""


class ModelTimeout(ModelUnavailable, code="timeout"):
    """The server sent nothing for longer than the time limit."""


class ModelStreamBroken(ModelError, code="stream_broken", retryable=True):
    """The stream stopped before the answer was complete."""


class ModelResponseInvalid(ModelError, code="response_invalid"):
    """The response is not an answer: HTML, broken JSON or a line without end."""


class ModelRefused(ModelError, code="refused"):
    """The model, or a filter of its provider, refuses to answer."""


class OutputTruncated(ModelError, code="output_truncated"):
    """The answer reached the limit on its length; the part that arrived is kept."""


class FilesystemError(RetinueError):
    """The workspace refused something."""


class PathError(_FieldError, FilesystemError):
    """A path cannot be used as asked; `problem` says why."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{shown_path(self.path)}: {self.problem}"


def shown_path(path: str) -> str:
    """Return a path for a message: never empty, endless or with control characters."""
    text = path if len(path) <= 200 else path[:200] + "…"
    return text if text.isprintable() and text else repr(text) if text else "."


class FileMissing(PathError):
    """Nothing is at that path."""


class FilesystemDown(PathError):
    """The storage of the files is broken or out of reach, so that no path can be used."""


class PathDenied(PathError):
    """The path leads out of the root, through a link or to a special file, or permission is missing."""


class Escape(RetinueError):
    """An error that must reach the caller of run(): a fault of the harness, not of the agent."""
