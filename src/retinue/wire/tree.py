"""The tree of runs, model calls and tool calls that events describe. Terminal and telemetry both read events with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.events import (
    CachePrefixChanged,
    ChildStarted,
    Compacted,
    ErrorRaised,
    Event,
    Handoff,
    InferenceFinished,
    InferenceWaiting,
    MessageAdded,
    MessageDropped,
    MessagesSnapshot,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StepStarted,
    TaskUpdated,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallResumed,
    ToolCallStarted,
    ToolCallStreamDelta,
)
from ..core.messages import Message, Role
from ..core.receipts import Receipt
from ..core.results import SuspendTicket, ToolCallStatus
from ..core.runs import RunStatus, Usage

CANCELLED = "cancelled"
"""The error type of stopped work: nothing went wrong, but it did not reach its end."""
_TAIL = 400
_STOPPED = {RunStatus.CANCELLED: CANCELLED, RunStatus.TIMEOUT: "timeout"}


class _Node:
    """Work that takes time. A resumed run, and a resumed call, stay the same node and begin another leg."""

    def __init__(self, event: Event, parent: Node | None) -> None:
        self.run_id, self.agent, self.parent = event.run_id, event.agent, parent
        self.started = self.began = event.at
        """When its first leg began, and its present one."""
        self.ended: float | None = None
        self.error: str | None = None
        self.error_type: str | None = None
        """The kind of error, in few words that do not vary."""
        self.handle: Any = None
        """Free for observers: their record of this leg."""
        self.earlier: Any = None
        """The handle of the leg before."""

    def begin_leg(self, at: float) -> None:
        self.began, self.ended, self.error, self.error_type = at, None, None, None
        self.earlier, self.handle = self.handle, None

    @property
    def seconds(self) -> float:
        """The length of the present leg."""
        return max((self.ended or self.began) - self.began, 0.0)


@dataclass(slots=True)
class OpenMessage:
    """An answer that the model has begun and not ended, in pieces as they came."""

    id: str
    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """The JSON text of the arguments so far, by call id."""

    @property
    def tail(self) -> str:
        """The end of its text."""
        pieces: list[str] = []
        length = 0
        for piece in reversed(self.text):
            pieces.append(piece)
            length += len(piece)
            if length >= _TAIL:
                break
        return "".join(reversed(pieces))[-_TAIL:]


class ProviderWait(NamedTuple):
    """The wait of a run for its model provider."""

    reason: str
    message: str
    until: float
    """When it is expected to end."""
    position: int | None = None
    """The number of requests before that of the run, where it is known."""


class RunNode(_Node):
    def __init__(self, event: Event, parent: Node | None) -> None:
        super().__init__(event, parent)
        self.label, self.ns, self.thread_id, self.model, self.task = event.agent, event.ns, "", "", ""
        self.status, self.termination = RunStatus.RUNNING, ""
        self.usage = self.leg_usage = self.own_usage = Usage()
        """The usage `run_finished` reports, the sum over the model calls of this leg and its children, and that over all
        model calls of this run alone."""
        self.inferences = self.tool_calls = 0
        self.steps: list[StepNode] = []
        self.calls: dict[str, CallNode] = {}
        self.notes: list[str] = []
        self.open_message: OpenMessage | None = None
        """The answer in progress. A run that was stopped in an answer keeps it."""
        self.wait: ProviderWait | None = None
        """The next event of the run ends it."""
        self.resumed = False
        """True until the first step of a resumed leg, which need not ask the model."""
        self.messages: tuple[Message, ...] = ()
        self.said: list[Message] = []
        self.queued: list[Message] = []
        """Messages that were added to it and that its model has not read."""
        self.results: dict[str | None, Message] = {}
        self.response: str | None = None
        self.receipt: Receipt | None = None
        """The runtime's account of its last leg and all before."""

    @property
    def step(self) -> StepNode:
        """The step in progress."""
        if not self.steps:
            self.steps.append(StepNode(StepStarted(run_id=self.run_id, agent=self.agent, at=self.began, step=0), self))
        return self.steps[-1]

    def walk_calls(self) -> Iterator[CallNode]:
        """Yield the calls of this run and of the runs below it."""
        for call in self.calls.values():
            yield call
            for child in call.children.values():
                yield from child.walk_calls()

    @property
    def tail(self) -> str:
        """The end of its text: of the answer in progress, else of the last message with text."""
        if self.open_message is not None and (tail := self.open_message.tail):
            return tail
        spoken = (message.text for message in reversed(self.said) if message.role is Role.ASSISTANT)
        return next((text[-_TAIL:] for text in spoken if text), "")

    def conversation(self) -> tuple[Message, ...]:
        """Return the messages so far, with the results of a step in the order of its calls."""
        asked = next((at for at in reversed(range(len(self.said))) if self.said[at].tool_calls), None)
        if asked is None:
            return tuple(self.said)
        after = self.said[asked + 1 :]
        results = {message.tool_call_id: message for message in after if message.role is Role.TOOL} | self.results
        ordered = [results[call.id] for call in self.said[asked].tool_calls if call.id in results]
        return (*self.said[: asked + 1], *ordered, *[message for message in after if message.role is not Role.TOOL])


class StepNode(_Node):
    """A model call, and the tool calls it asked for. It ends with the model's answer."""

    def __init__(self, event: StepStarted, parent: RunNode) -> None:
        super().__init__(event, parent)
        self.number, self.model, self.answered_by = event.step, event.model, ""
        self.asked = False
        """True if the model was asked; the first step of a resumed leg may only finish calls."""
        self.calls: dict[str, CallNode] = {}
        self.first_chunk: float | None = None
        self.thought = self.stop_reason = ""
        self.usage = Usage()
        self.messages: tuple[Message, ...] = ()
        self.message: Message | None = None


class CallNode(_Node):
    def __init__(self, event: Event, parent: RunNode, call_id: str, tool: str) -> None:
        super().__init__(event, parent)
        self.call_id, self.tool, self.status = call_id, tool, ToolCallStatus.NEW
        self.args: Mapping[str, Any] | None = None
        self.result: str | None = None
        self.ticket: SuspendTicket | None = None
        """The question that it waits for."""
        self.output = ""
        """The end of its streamed output, while it runs and has no child."""
        self.children: dict[str, RunNode] = {}
        self.starting: set[str] = set()
        """The announced children that have not begun, by run id."""
        self.is_task = False
        """True if it started a background task."""


Node = RunNode | StepNode | CallNode
_CallEvent = ToolCallStarted | ToolCallReady | ToolCallResumed | ToolCallFinished | ToolCallStreamDelta


class RunTree:
    """Reads events in order. `runs` holds the runs by id; subclasses override the hooks at the end.

    Without `content` it keeps no messages, arguments, results or texts.
    """

    def __init__(self, *, content: bool = True) -> None:
        self.runs: dict[str, RunNode] = {}
        self._content = content
        self._readers: dict[type[Event], Callable[[Any, RunNode], None]] = {
            RunFinished: self._run_finished,
            MessagesSnapshot: self._messages_snapshot,
            MessageAdded: self._message_added,
            MessageDropped: self._message_dropped,
            StepStarted: self._step_started,
            TextDelta: self._text,
            ReasoningDelta: self._text,
            ToolCallArgsDelta: self._arguments,
            InferenceFinished: self._inference_finished,
            InferenceWaiting: self._inference_waiting,
            ToolCallStarted: self._call_started,
            ToolCallReady: self._call_ready,
            ToolCallResumed: self._call_resumed,
            ToolCallFinished: self._call_finished,
            ToolCallStreamDelta: self._call_output,
            ChildStarted: self._child_started,
            Handoff: self._handoff,
            Compacted: self._compacted,
            CachePrefixChanged: self._prefix_changed,
            ErrorRaised: self._error,
        }

    @property
    def root(self) -> RunNode | None:
        return next(iter(self.runs.values()), None)

    def __call__(self, event: Event) -> None:
        kind = type(event)
        if kind is RunStarted:
            self._run_started(event)  # pyright: ignore[reportArgumentType]
        elif kind is TaskUpdated:
            self._task_updated(event)  # pyright: ignore[reportArgumentType]
        elif (read := self._readers.get(kind)) is None:
            if (run := self.runs.get(event.run_id)) is not None:
                run.wait = None
        elif (run := self.find_run(event)) is not None:
            run.wait = None
            read(event, run)

    def find_run(self, event: Event) -> RunNode | None:
        """Return the run of an event, or None to ignore the event. A run whose beginning was not seen is added."""
        return self.runs.get(event.run_id) or self.add_run(event)

    def add_run(self, event: Event) -> RunNode:
        above = self.runs.get(event.parent_run_id or "")
        call_id = event.ns[-1].removeprefix("tools:").partition("~")[0] if event.ns else ""
        call = above.calls.get(call_id) if above is not None else None
        run = self.runs[event.run_id] = RunNode(event, call or above)
        if call is not None:
            call.children[event.run_id] = run
            call.starting.discard(event.run_id)
        return run

    def _run_started(self, event: RunStarted) -> None:
        is_known = event.run_id in self.runs
        run = self.runs[event.run_id] if is_known else self.add_run(event)
        run.wait = None
        if is_known:
            run.begin_leg(event.at)
            run.status, run.leg_usage, run.inferences, run.tool_calls = RunStatus.RUNNING, Usage(), 0, 0
        run.thread_id = event.thread_id
        run.resumed = is_known or (event.continues and not event.messages)
        if self._content:
            run.messages, run.said, run.results = event.messages, list(event.messages), {}
            run.open_message = None
            said = event.messages[-1].text if event.messages else ""
            run.task = said or run.task or ("(goes on)" if event.continues else "")
        self.node_began(run)

    def _messages_snapshot(self, event: MessagesSnapshot, run: RunNode) -> None:
        if self._content:
            run.said = [*event.messages, *run.said]

    def _message_added(self, event: MessageAdded, run: RunNode) -> None:
        if self._content:
            run.queued.append(event.message)

    def _message_dropped(self, event: MessageDropped, run: RunNode) -> None:
        run.queued = [message for message in run.queued if message.id != event.message_id]

    def _step_started(self, event: StepStarted, run: RunNode) -> None:
        if not run.steps or run.steps[-1].number != event.step:
            run.steps.append(StepNode(event, run))
            if run.queued:
                run.said, run.queued = [*run.conversation(), *run.queued], []
        run.steps[-1].asked = False
        if run.resumed:
            run.resumed = False
        else:
            self._ask(run)

    def _ask(self, run: RunNode) -> None:
        step = run.step
        step.asked, step.ended, run.model = True, None, step.model or run.model
        if self._content:
            step.messages = run.conversation()
        self.node_began(step)

    def _text(self, event: TextDelta | ReasoningDelta, run: RunNode) -> None:
        self._chunk(event, run)
        if not self._content:
            return
        message = _open_message(run, event.message_id)
        if type(event) is TextDelta:
            message.text.append(event.delta)
        else:
            message.reasoning.append(event.delta)
            run.step.thought += event.delta

    def _arguments(self, event: ToolCallArgsDelta, run: RunNode) -> None:
        if run.open_message is not None and event.call_id in run.open_message.calls:
            run.open_message.calls[event.call_id].append(event.delta)

    def _chunk(self, event: Event, run: RunNode) -> None:
        step = run.step
        if not step.asked:
            self._ask(run)
        if step.first_chunk is None:
            step.first_chunk = event.at

    def _inference_finished(self, event: InferenceFinished, run: RunNode) -> None:
        run.own_usage += event.usage
        step = run.step
        if not step.asked:
            self._ask(run)
        if self._content:
            run.open_message = None
            run.said, run.results = [*run.conversation(), event.message], {}
        if step.ended is not None:
            return
        run.model, run.inferences, run.leg_usage = (
            event.model or run.model,
            run.inferences + 1,
            run.leg_usage + event.usage,
        )
        step.model, step.answered_by = step.model or event.model, event.model
        step.stop_reason, step.usage, step.ended = event.stop_reason, event.usage, event.at
        if self._content:
            step.message = event.message
        self.node_ended(step)

    def _inference_waiting(self, event: InferenceWaiting, run: RunNode) -> None:
        run.wait = ProviderWait(event.reason, event.message, event.until, event.position)
        facts = {"reason": event.reason, "position": event.position, "seconds": max(event.until - event.at, 0.0)}
        self.node_noted(run.step, "inference_waiting", event.at, facts)

    def _call_of(self, event: _CallEvent, run: RunNode) -> CallNode:
        call = run.calls.get(event.call_id)
        if call is None:
            call = CallNode(event, run, event.call_id, event.tool_name)
            run.calls[event.call_id] = run.step.calls[event.call_id] = call
        return call

    def _call_started(self, event: ToolCallStarted, run: RunNode) -> None:
        self._chunk(event, run)
        self._call_of(event, run)
        if self._content:
            _open_message(run, event.message_id).calls.setdefault(event.call_id, [])

    def _call_ready(self, event: ToolCallReady, run: RunNode) -> None:
        call = self._call_of(event, run)
        call.started = event.at
        self._begin_call(call, run, event.at, event.args)

    def _call_resumed(self, event: ToolCallResumed, run: RunNode) -> None:
        call = self._call_of(event, run)
        asked = [one.args for said in run.said for one in said.tool_calls if one.id == event.call_id]
        args = event.args if event.args is not None else call.args or (asked[-1] if asked else None)
        self._begin_call(call, run, event.at, args)

    def _begin_call(self, call: CallNode, run: RunNode, at: float, args: Mapping[str, Any] | None) -> None:
        call.begin_leg(at)
        call.status, call.result = ToolCallStatus.RUNNING, None
        run.tool_calls += 1
        if self._content:
            call.args = args
        self.node_began(call)

    def _call_output(self, event: ToolCallStreamDelta, run: RunNode) -> None:
        if self._content:
            call = self._call_of(event, run)
            if call.status is ToolCallStatus.RUNNING and not (call.children or call.starting):
                call.output = (call.output + event.delta)[-_TAIL:]

    def _call_finished(self, event: ToolCallFinished, run: RunNode) -> None:
        call = self._call_of(event, run)
        is_open = call.status is not ToolCallStatus.NEW  # else the model did not finish asking for it
        call.status, call.ended, call.output = event.status, event.at, ""
        if event.status is ToolCallStatus.FAILED:
            call.error_type, call.error = _kind_of(event.result.data), event.message.text
        elif event.status is ToolCallStatus.CANCELLED:
            call.error_type = CANCELLED
        if self._content:
            call.result, call.ticket = event.message.text, event.result.suspension
            if event.status is not ToolCallStatus.SUSPENDED:
                run.results[event.call_id] = event.message
        if is_open:
            self.node_ended(call)

    def _child_started(self, event: ChildStarted, run: RunNode) -> None:
        if (call := run.calls.get(event.call_id)) is not None:
            call.output = ""
            if event.child_run_id not in self.runs:
                call.starting.add(event.child_run_id)

    def _task_updated(self, event: TaskUpdated) -> None:
        run = self.runs.get(event.parent_run_id or "")
        if run is not None and (call := run.calls.get(event.call_id)) is not None:
            call.is_task = True

    def _handoff(self, event: Handoff, run: RunNode) -> None:
        run.notes.append(f"handed over to {event.to_agent}")
        self.node_noted(run, "handoff", event.at, {"to_agent": event.to_agent})

    def _compacted(self, event: Compacted, run: RunNode) -> None:
        run.own_usage += event.usage
        run.leg_usage += event.usage
        run.notes.append(_compaction_note(event))
        facts = {"tokens_before": event.tokens_before, "tokens_after": event.tokens_after, "path": event.path}
        self.node_noted(run, "compacted", event.at, facts)

    def _prefix_changed(self, event: CachePrefixChanged, run: RunNode) -> None:
        run.notes.append(f"the cached prefix has changed: {event.cause}")
        self.node_noted(run, "cache_prefix_changed", event.at, {"cause": event.cause, "tokens": event.tokens})

    def _error(self, event: ErrorRaised, run: RunNode) -> None:
        if event.fatal:
            return
        facts: dict[str, Any] = {"code": event.code or "unknown"}
        if event.retry_model is not None:
            facts |= {"retry_model": event.retry_model, "retry_delay": event.retry_delay}
            run.wait = ProviderWait(event.code or "unknown", event.message, event.at + event.retry_delay)
        if self._content:
            facts["message"] = event.message
            run.notes.append(_error_note(event))
            if event.dropped_message_id is not None:
                _drop_message(run, event.dropped_message_id)
        is_asking = bool(run.steps) and run.step.asked and run.step.ended is None
        self.node_noted(run.step if is_asking else run, "error", event.at, facts)

    def _run_finished(self, event: RunFinished, run: RunNode) -> None:
        run.status, run.termination, run.usage, run.ended = event.status, event.termination, event.usage, event.at
        run.error, run.error_type, run.receipt = event.error, _error_type(event), event.receipt
        if self._content:
            run.response = event.response
            if event.status is RunStatus.COMPLETED or event.status.is_waiting:
                run.open_message = None
        for step in run.steps[-1:]:  # a model that failed or was stopped has no last event of its own
            if step.asked and step.ended is None:
                step.ended, step.error, step.error_type = event.at, run.error, run.error_type or CANCELLED
                self.node_ended(step)
        for call in list(run.calls.values()):
            if call.status is ToolCallStatus.RUNNING:
                call.status, call.ended, call.error_type = ToolCallStatus.CANCELLED, event.at, CANCELLED
                self.node_ended(call)
        above = self.runs.get(event.parent_run_id or "")
        if above is not None and above.ended is None:
            above.leg_usage += run.leg_usage
        self.node_ended(run)

    def node_began(self, node: Node) -> None:
        """A leg of a run, a model call or a tool call began."""

    def node_ended(self, node: Node) -> None:
        """It ended, or waits."""

    def node_noted(self, node: Node, name: str, at: float, facts: Mapping[str, Any]) -> None:
        """A handoff, a wait, a non-fatal error, a compaction or a change of the cached prefix happened in it."""


def _open_message(run: RunNode, message_id: str) -> OpenMessage:
    """Return the answer in progress of this id, which may begin with the present event."""
    if run.open_message is None or run.open_message.id != message_id:
        run.open_message = OpenMessage(message_id)
    return run.open_message


def _drop_message(run: RunNode, message_id: str) -> None:
    """Forget an answer that no longer counts, with the calls it asked for. Calls that were closed before stay."""
    dropped = run.open_message
    run.step.thought = ""
    if dropped is None or dropped.id != message_id:
        return
    run.open_message = None
    for call_id in dropped.calls:
        if call_id in run.calls and run.calls[call_id].status is ToolCallStatus.NEW:
            del run.calls[call_id]
            run.step.calls.pop(call_id, None)


def _compaction_note(event: Compacted) -> str:
    cost = f", which cost {event.usage.tokens:,}" if event.usage.tokens else ""
    without = f", without a summary: {event.problem}" if event.problem else ""
    return f"compacted: {event.tokens_before:,} → {event.tokens_after:,} tokens{cost}{without}"


def _error_note(event: ErrorRaised) -> str:
    if event.retry_model is None:
        return event.message
    delay = f" in {event.retry_delay:.1f} s" if event.retry_delay else ""
    restarts = "; the answer starts again" if event.dropped_message_id else ""
    return f"retrying with {event.retry_model}{delay}{restarts}: {event.message}"


def _error_type(event: RunFinished) -> str | None:
    """Return the kind of error that ended a run, None if it completed or waits."""
    if event.status in _STOPPED:
        return _STOPPED[event.status]
    if event.status is not RunStatus.FAILED:
        return None
    named = (event.error or "").partition(":")[0]
    return named if event.termination == "error" and named.isidentifier() else event.termination


def _kind_of(data: Any) -> str:
    """Return the kind or code of a failed call."""
    error = data.get("error") if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(error, dict):
        return str(error.get("kind") or error.get("code") or "tool_error")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return "tool_error"
