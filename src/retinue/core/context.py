"""The context of a tool call."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Iterable, Mapping, Sequence
from copy import copy
from enum import StrEnum
from reprlib import repr as short_repr
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

from .concurrency import CancellationToken
from .content import clean_text, to_json_value
from .events import ActivityDelta, ActivitySnapshot, Custom, ErrorRaised, Event, Sink, ToolCallStreamDelta
from .runs import ParentContext
from .state import Seed, Snapshot, StateKey

if TYPE_CHECKING:
    from .agents import Agent
    from .backend import Resolver
    from .messages import Message
    from .runs import Child, Limits, Out, RunIdentity, RunResult
    from .window import History

V = TypeVar("V")

_NOTHING: Mapping[str, Any] = MappingProxyType({})

TIMED_OUT = "timeout"
"""The cancel reason of a run that took too long."""
OUT_OF_TIME = "limit:seconds"
"""The cancel reason of a run that has reached its limit on time."""


class ProgressStatus(StrEnum):
    """The progress of a call, for people who watch it."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Reported:
    """The return value of a report, which is sent already: `await` it or not, nothing waits."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_REPORTED = Reported()


class ToolContext:
    """A read-only view of the run for one call. Reports may be sent from any thread, never block, and may be awaited.

    A report holds JSON values: one that has no JSON form raises TypeError, one that is too deep or too large ValueError.
    """

    call_id: str
    tool_name: str
    run: RunIdentity
    agent: Agent
    snapshot: Snapshot
    cancellation: CancellationToken
    resolver: Resolver
    resume_input: Any
    deadline: float | None
    context: Mapping[str, Any]
    history: History | None
    """What was cut from the conversation that the model reads, as files."""
    _emit: Sink

    def __init__(
        self,
        call_id: str,
        tool_name: str,
        run: RunIdentity,
        agent: Agent,
        snapshot: Snapshot,
        emit: Sink,
        cancellation: CancellationToken,
        resolver: Any = None,
        resume_input: Any = None,
        deadline: float | None = None,
        context: Mapping[str, Any] | None = None,
        history: History | None = None,
    ) -> None:
        fields: dict[str, Any] = {
            "call_id": call_id,
            "tool_name": tool_name,
            "run": run,
            "agent": agent,
            "snapshot": snapshot,
            "cancellation": cancellation,
            "resolver": resolver,
            "resume_input": resume_input,
            "deadline": deadline,
            "context": MappingProxyType(context) if context else _NOTHING,
            "history": history,
            "_emit": emit,
        }
        object.__setattr__(self, "__dict__", fields)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"the context of a call is read-only: {name!r} cannot be set; return a ToolOutput instead")

    def within(self, cancellation: CancellationToken, deadline: float) -> ToolContext:
        """Return the same context for one attempt, with its own token and deadline."""
        made = copy(self)
        made.__dict__.update(cancellation=cancellation, deadline=deadline)
        return made

    @property
    def sink(self) -> Sink:
        """A sink that sends events as this call's own. It drops a child's events: wrap it to pass text through."""
        return CallSink(self)

    def state(self, key: StateKey[V, Any]) -> V:
        """The value of a key when the step began, or its default."""
        return self.snapshot[key]

    def run_child(
        self,
        agent: str | Agent[Out],
        input: str | Message | Iterable[Message],
        *,
        seed: Seed | None = None,
        sink: Sink | None = None,
        timeout: float | None = None,
        limits: Limits | None = None,
        cancellation: CancellationToken | None = None,
        thread_id: str | None = None,
        detached: bool = False,
        run_id: str | None = None,
    ) -> Coroutine[Any, Any, RunResult[Out]]:
        """Run another agent as a child of this call, with lineage and cancellation filled in.

        With a `thread_id` it continues that conversation and stores it. A `detached` child may outlive the call: give it
        a cancellation token of its own.
        """
        return self.resolver.run_child_agent(
            self.resolver,
            agent,
            input,
            parent=ParentContext.of(self),
            seed=seed,
            sink=sink,
            timeout=timeout,
            limits=limits,
            cancellation=cancellation or self.cancellation,
            thread_id=thread_id,
            detached=detached,
            run_id=run_id,
        )

    def run_children(
        self,
        children: Sequence[Child],
        *,
        limit: int | None = None,
        on_error: Literal["collect", "cancel_siblings"] = "collect",
    ) -> Coroutine[Any, Any, list[RunResult]]:
        """Run several children of this call, at most `limit` at a time; results in the given order."""
        return self.resolver.run_children(self, children, limit=limit, on_error=on_error)

    def report_activity(self, activity_type: str, content: Any) -> Reported:
        """Show the activity of the call; it replaces the earlier one of its type."""
        kind, shown = clean_text(activity_type), to_json_value(content)
        self._emit(ActivitySnapshot(call_id=self.call_id, activity_type=kind, content=shown))
        return _REPORTED

    def report_activity_delta(self, activity_type: str, patch: Any) -> Reported:
        """Change the activity of a type with a JSON Patch."""
        operations = cast("list[Any]", patch) if isinstance(patch, list) else [patch]
        kind, delta = clean_text(activity_type), to_json_value(operations)
        self._emit(ActivityDelta(call_id=self.call_id, activity_type=kind, delta=delta))
        return _REPORTED

    def report_progress(
        self, status: ProgressStatus | str, message: str | None = None, progress: float | None = None
    ) -> Reported:
        """Show the progress of the call, from 0 to 1."""
        given, said = cast("tuple[Any, Any]", (progress, message))
        if said is not None and not isinstance(said, str):
            advice = f"write report_progress(status, progress={short_repr(said)})"
            raise TypeError(f"report_progress: the message is text, not {short_repr(said)}: {advice}")
        if given is not None and not (isinstance(given, int | float) and 0 <= given <= 1):
            raise ValueError(f"progress is a number from 0 to 1, not {short_repr(given)}")
        content = {
            "status": ProgressStatus(status).value,
            "message": message,
            "progress": progress,
            "call_id": self.call_id,
            "tool_name": self.tool_name,
            "run_id": self.run.run_id,
            "parent_run_id": self.run.parent_run_id,
            "parent_call_id": self.run.parent_tool_call_id,
        }
        return self.report_activity("tool-call-progress", content)

    def stream_output(self, text: str) -> Reported:
        """Show a piece of the call's output before its result is there."""
        self._emit(ToolCallStreamDelta(call_id=self.call_id, tool_name=self.tool_name, delta=clean_text(text)))
        return _REPORTED

    def report_error(self, message: str, code: str | None = None) -> Reported:
        """Send an `error` event that does not end the run."""
        self._emit(ErrorRaised(message=clean_text(message), code=None if code is None else clean_text(code)))
        return _REPORTED

    def emit(self, data: Any) -> Reported:
        """Send a `custom` event."""
        self._emit(Custom(data=to_json_value(data), call_id=self.call_id))
        return _REPORTED


class CallSink:
    """A tool's own sink. It sends reports as the call's, and drops a child's events and any other kind."""

    __slots__ = ("_ctx",)

    def __init__(self, ctx: ToolContext) -> None:
        self._ctx = ctx

    def __call__(self, event: Event) -> None:
        ctx = self._ctx
        if event.run_id not in ("", ctx.run.run_id):
            return
        match event:
            case ToolCallStreamDelta():
                ctx.stream_output(event.delta)
            case ActivitySnapshot():
                ctx.report_activity(event.activity_type, event.content)
            case ActivityDelta():
                ctx.report_activity_delta(event.activity_type, event.delta)
            case Custom():
                ctx.emit(event.data)
            case ErrorRaised():
                ctx.report_error(event.message, event.code)
            case _:
                return
