"""Events: flat records of everything that happens in a run, in one order.

Every event names its run (`run_id`, `agent`, `ns`) and its place in the log (`seq`, `at`). The log fills these in, so
code that makes an event leaves them out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from inspect import iscoroutinefunction
from typing import Any, ClassVar, Literal, get_args

import msgspec
from msgspec import Struct

from .content import record_json
from .decisions import Decision
from .errors import ConfigurationError, ConsumerTooSlow, as_tuple
from .messages import Message
from .receipts import Receipt
from .results import ToolCallStatus, ToolResult
from .runs import RunStatus, Usage

Namespace = tuple[str, ...]


def as_namespace(given: Sequence[str]) -> Namespace:
    """Return a namespace, as events have it; in one string its parts are joined by "|"."""
    return tuple(given.split("|")) if isinstance(given, str) and given else tuple(given)


class Event(Struct, frozen=True, kw_only=True, gc=False, tag_field="kind"):
    """The fields of every event. `seq` grows by one within a log; `ns` is the path of call ids down to the run."""

    kind: ClassVar[str] = "event"
    seq: int = 0
    at: float = 0.0
    run_id: str = ""
    parent_run_id: str | None = None
    agent: str = ""
    ns: Namespace = ()


class RunStarted(Event, frozen=True, kw_only=True, gc=False, tag="run_started"):
    """The first event of a run."""

    kind: ClassVar[Literal["run_started"]] = "run_started"
    thread_id: str
    parent_tool_call_id: str | None = None
    messages: tuple[Message, ...] = ()
    """The input."""
    continues: bool = False
    """True if a `messages_snapshot` with the earlier conversation follows."""


class RunFinished(Event, frozen=True, kw_only=True, gc=False, tag="run_finished"):
    """The last event of a run, whatever its status."""

    kind: ClassVar[Literal["run_finished"]] = "run_finished"
    status: RunStatus
    termination: str
    response: str | None = None
    error: str | None = None
    steps: int = 0
    usage: Usage = Usage()
    output: Any = None
    receipt: Receipt | None = None
    """What the run did, by its events; of a run on a server what the server says of it."""


class StepStarted(Event, frozen=True, kw_only=True, gc=False, tag="step_started"):
    """A step begins: one model call and the tool calls it asks for."""

    kind: ClassVar[Literal["step_started"]] = "step_started"
    step: int
    model: str = ""
    """The model that is asked."""


class StepFinished(Event, frozen=True, kw_only=True, gc=False, tag="step_finished"):
    """A step and its tool calls have ended."""

    kind: ClassVar[Literal["step_finished"]] = "step_finished"
    step: int


class TextDelta(Event, frozen=True, kw_only=True, gc=False, tag="text_delta"):
    """A piece of the model's text."""

    kind: ClassVar[Literal["text_delta"]] = "text_delta"
    delta: str
    message_id: str = ""


class ReasoningDelta(Event, frozen=True, kw_only=True, gc=False, tag="reasoning_delta"):
    """A piece of the model's reasoning."""

    kind: ClassVar[Literal["reasoning_delta"]] = "reasoning_delta"
    delta: str
    message_id: str = ""


class InferenceWaiting(Event, frozen=True, kw_only=True, gc=False, tag="inference_waiting"):
    """The request has waited for a second, because the provider takes no more. The next event of the run ends the wait."""

    kind: ClassVar[Literal["inference_waiting"]] = "inference_waiting"
    reason: Literal["rate_limit", "overloaded"]
    position: int = 0
    """The number of requests before this one, when the event was made."""
    until: float = 0.0
    """The time at which the request was expected to be sent, in seconds since 1970."""
    message: str = ""
    """The refusal of the provider, if there was one."""


class InferenceFinished(Event, frozen=True, kw_only=True, gc=False, tag="inference_finished"):
    """The model has answered: `message` is the whole answer."""

    kind: ClassVar[Literal["inference_finished"]] = "inference_finished"
    step: int
    message: Message
    model: str = ""
    stop_reason: str = "stop"
    usage: Usage = Usage()


class ToolCallStarted(Event, frozen=True, kw_only=True, gc=False, tag="tool_call_started"):
    """The model began to ask for a call; its arguments are still coming."""

    kind: ClassVar[Literal["tool_call_started"]] = "tool_call_started"
    call_id: str
    tool_name: str
    message_id: str = ""


class ToolCallArgsDelta(Event, frozen=True, kw_only=True, gc=False, tag="tool_call_args_delta"):
    """A piece of the arguments of a call, as JSON text."""

    kind: ClassVar[Literal["tool_call_args_delta"]] = "tool_call_args_delta"
    call_id: str
    delta: str


class ToolCallReady(Event, frozen=True, kw_only=True, gc=False, tag="tool_call_ready"):
    """The call's arguments are complete and its work begins."""

    kind: ClassVar[Literal["tool_call_ready"]] = "tool_call_ready"
    call_id: str
    tool_name: str
    args: dict[str, Any]
    tool_id: str | None = None
    """The id in the tool's descriptor, if it is not its name."""


class ToolCallFinished(Event, frozen=True, kw_only=True, gc=False, tag="tool_call_finished"):
    """A call has ended, or waits for a human."""

    kind: ClassVar[Literal["tool_call_finished"]] = "tool_call_finished"
    call_id: str
    tool_name: str
    status: ToolCallStatus
    result: ToolResult
    message: Message
    """The message that the model will read."""


class ToolCallStreamDelta(Event, frozen=True, kw_only=True, gc=False, tag="tool_call_stream_delta"):
    """A piece of output of a call that is still running."""

    kind: ClassVar[Literal["tool_call_stream_delta"]] = "tool_call_stream_delta"
    call_id: str = ""
    tool_name: str = ""
    delta: str


class ToolCallResumed(Event, frozen=True, kw_only=True, gc=False, tag="tool_call_resumed"):
    """A call that waited continues."""

    kind: ClassVar[Literal["tool_call_resumed"]] = "tool_call_resumed"
    call_id: str
    tool_name: str
    decision: Decision | None = None
    """None where the decision was on a call of a child, which continues with it."""
    args: dict[str, Any] | None = None
    """The arguments that the decision gives the call; None if it keeps its own."""


class StateSnapshot(Event, frozen=True, kw_only=True, gc=False, tag="state_snapshot"):
    """The persistent state a run begins with."""

    kind: ClassVar[Literal["state_snapshot"]] = "state_snapshot"
    revision: int
    state: dict[str, Any]


class StateDelta(Event, frozen=True, kw_only=True, gc=False, tag="state_delta"):
    """One commit: the new values of the persistent keys it wrote."""

    kind: ClassVar[Literal["state_delta"]] = "state_delta"
    revision: int
    delta: dict[str, Any]
    call_id: str | None = None


class MessagesSnapshot(Event, frozen=True, kw_only=True, gc=False, tag="messages_snapshot"):
    """The conversation a run continues, before its input."""

    kind: ClassVar[Literal["messages_snapshot"]] = "messages_snapshot"
    messages: tuple[Message, ...]


class ActivitySnapshot(Event, frozen=True, kw_only=True, gc=False, tag="activity_snapshot"):
    """The activity that a call shows; it replaces the earlier one of its type."""

    kind: ClassVar[Literal["activity_snapshot"]] = "activity_snapshot"
    call_id: str = ""
    activity_type: str
    content: Any


class ActivityDelta(Event, frozen=True, kw_only=True, gc=False, tag="activity_delta"):
    """A JSON Patch to the activity of that type."""

    kind: ClassVar[Literal["activity_delta"]] = "activity_delta"
    call_id: str = ""
    activity_type: str
    delta: list[Any]


class ChildStarted(Event, frozen=True, kw_only=True, gc=False, tag="child_started"):
    """A call has started a child run."""

    kind: ClassVar[Literal["child_started"]] = "child_started"
    call_id: str
    child_run_id: str
    child_agent: str
    child_ns: Namespace
    description: str = ""
    """What the child was asked: its last user message, or the beginning of a long one."""


class ChildFinished(Event, frozen=True, kw_only=True, gc=False, tag="child_finished"):
    """A child run has ended, or waits."""

    kind: ClassVar[Literal["child_finished"]] = "child_finished"
    call_id: str
    child_run_id: str
    child_agent: str
    status: RunStatus


class MessageAdded(Event, frozen=True, kw_only=True, gc=False, tag="message_added"):
    """A message for a run at work was accepted: the model reads it with its next request."""

    kind: ClassVar[Literal["message_added"]] = "message_added"
    message: Message


class MessageDropped(Event, frozen=True, kw_only=True, gc=False, tag="message_dropped"):
    """A run has ended before the model read a message that was accepted."""

    kind: ClassVar[Literal["message_dropped"]] = "message_dropped"
    message_id: str
    reason: str


class TaskUpdated(Event, frozen=True, kw_only=True, gc=False, tag="task_updated"):
    """A background task has a new status."""

    kind: ClassVar[Literal["task_updated"]] = "task_updated"
    task_id: str
    status: str
    call_id: str = ""
    """The call that started it."""


class BudgetWarning(Event, frozen=True, kw_only=True, gc=False, tag="budget_warning"):
    """Four fifths of a budget are spent. One run says so, once in each window."""

    kind: ClassVar[Literal["budget_warning"]] = "budget_warning"
    budget: str
    """`<per>/<window>`."""
    cost: float | None = None
    """The budget in dollars."""
    tokens: int | None = None
    spent_cost: float = 0.0
    spent_tokens: int = 0
    renews_at: float = 0.0


class Handoff(Event, frozen=True, kw_only=True, gc=False, tag="handoff"):
    """Another agent continues the run."""

    kind: ClassVar[Literal["handoff"]] = "handoff"
    to_agent: str
    reason: str = ""


class Compacted(Event, frozen=True, kw_only=True, gc=False, tag="compacted"):
    """The model reads less of the conversation from now on, because its window was nearly full. What is stored stays whole."""

    kind: ClassVar[Literal["compacted"]] = "compacted"
    tokens_before: int
    tokens_after: int
    """The tokens of the next request before and after, as far as they can be estimated."""
    kept_from: str
    """The id of the first message that the model still reads as it is."""
    path: str = ""
    """The file with what was cut. Agents without file tools have none."""
    summary: str = ""
    """What the model reads instead. Empty if only long results were shortened."""
    usage: Usage = Usage()
    """What the summary cost; it is part of the run's usage."""
    problem: str | None = None
    """Why there is no summary, if the messages were cut without one."""


class CachePrefixChanged(Event, frozen=True, kw_only=True, gc=False, tag="cache_prefix_changed"):
    """The next request does not begin like the last one, so that the provider's cache does not have it."""

    kind: ClassVar[Literal["cache_prefix_changed"]] = "cache_prefix_changed"
    cause: str
    """The first part that has changed: `model`, `tools`, `system` or `compacted`."""
    tokens: int = 0
    """The estimated tokens of the request."""


class Custom(Event, frozen=True, kw_only=True, gc=False, tag="custom"):
    """Data that a tool or plugin sends to the readers of the events."""

    kind: ClassVar[Literal["custom"]] = "custom"
    data: Any
    call_id: str | None = None


class ErrorRaised(Event, frozen=True, kw_only=True, gc=False, tag="error"):
    """An error; `fatal` if it ends the run."""

    kind: ClassVar[Literal["error"]] = "error"
    message: str
    code: str | None = None
    fatal: bool = False
    retry_model: str | None = None
    """The model that is asked next, if a model call failed and is made again."""
    retry_delay: float = 0.0
    dropped_message_id: str | None = None
    """The partial message that no longer counts; the next answer has a new id."""


class UnknownEvent(Event, frozen=True, kw_only=True, gc=False, tag="unknown"):
    """A stored event of a kind this version does not know, kept as it was."""

    kind: ClassVar[Literal["unknown"]] = "unknown"
    original: dict[str, Any]


DELTAS = (TextDelta, ReasoningDelta, ToolCallArgsDelta, ToolCallStreamDelta, ActivityDelta)
"""Events that stream the parts of something that another event has whole."""

AnyEvent = (
    RunStarted
    | RunFinished
    | StepStarted
    | StepFinished
    | TextDelta
    | ReasoningDelta
    | InferenceWaiting
    | InferenceFinished
    | ToolCallStarted
    | ToolCallArgsDelta
    | ToolCallReady
    | ToolCallFinished
    | ToolCallStreamDelta
    | ToolCallResumed
    | StateSnapshot
    | StateDelta
    | MessagesSnapshot
    | MessageAdded
    | MessageDropped
    | ActivitySnapshot
    | ActivityDelta
    | ChildStarted
    | ChildFinished
    | TaskUpdated
    | Handoff
    | Compacted
    | CachePrefixChanged
    | Custom
    | BudgetWarning
    | ErrorRaised
    | UnknownEvent
)
"""Any event. It narrows by class and by `kind`."""

Sink = Callable[[Event], None]
"""Receives events. It returns quickly and does not raise."""

EVENT_TYPES: dict[str, type[Event]] = {kind.kind: kind for kind in get_args(AnyEvent)}

_decode_known: Callable[[bytes], Event] = msgspec.json.Decoder(AnyEvent).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode


def event_to_json(event: Event) -> dict[str, Any]:
    """Return a flat dict of JSON values with `kind`."""
    return record_json(event)


def event_from_bytes(body: bytes) -> Event:
    """Return the event that was written as JSON; an unknown kind reads as UnknownEvent."""
    try:
        return _decode_known(body)
    except msgspec.ValidationError:
        return event_from_json(_decode_any(body))


def event_from_json(data: dict[str, Any]) -> Event:
    """Return the event of a dict; an unknown kind reads as UnknownEvent. `at` may be in ISO 8601, as `--json` has it."""
    if isinstance(at := data.get("at"), str):
        data = {**data, "at": datetime.fromisoformat(at).timestamp()}
    kind = EVENT_TYPES.get(data.get("kind", ""))
    if kind is not None:
        return msgspec.convert(data, kind)
    stamp = {name: data[name] for name in Event.__struct_fields__ if name in data}
    stamp["ns"] = tuple(stamp.get("ns", ()))
    return UnknownEvent(**stamp, original=data)


_log = logging.getLogger(__name__)


def is_sink(given: Any) -> bool:
    """Return whether it can be called with events; nobody would await an async function."""
    return callable(given) and not iscoroutinefunction(given) and not iscoroutinefunction(type(given).__call__)


def as_sinks(given: Any, owner: str) -> tuple[Sink, ...]:
    """Return a caller's list of sinks as a tuple; raise ConfigurationError for what cannot be one."""
    sinks = as_tuple(given, owner, "sinks")
    for sink in sinks:
        if not is_sink(sink):
            raise ConfigurationError(
                f"{owner}: a sink is a function of one event, which is not async, not {sink!r:.80}"
            )
    return sinks


def deliver(event: Event, sinks: list[Sink]) -> None:
    """Send an event to sinks. A sink that fails is removed from the list; the others still get the event."""
    for sink in tuple(sinks):
        try:
            sink(event)
        except Exception:
            _log.exception("a sink failed at event %d and is not called again", event.seq)
            sinks.remove(sink)


class NullSink:
    """Receives events and does nothing."""

    def __call__(self, event: Event) -> None:
        return None


class Subscription:
    """One reader of a FanOut, with a queue of its own that cannot grow past its size."""

    def __init__(self, maxsize: int) -> None:
        given: Any = maxsize
        if type(given) is not int or given < 1:  # a queue of size 0 would have no bound
            raise ConfigurationError(f"maxsize is the number of events that may wait, at least 1, not {given!r}")
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue(maxsize)
        self._overflowed = self._closed = False

    def put(self, event: Event) -> None:
        if not self._closed:
            try:
                self._queue.put_nowait(event)
            except asyncio.QueueFull:
                self._overflowed = self._closed = True

    def close(self) -> None:
        self._closed = True
        if self._queue.empty():
            self._queue.put_nowait(None)  # wakes its reader

    async def __aiter__(self) -> AsyncIterator[Event]:
        last_seq = 0
        while not (self._closed and self._queue.empty()):
            event = await self._queue.get()
            if event is None:
                break
            last_seq = event.seq
            yield event
        if self._overflowed:
            raise ConsumerTooSlow(last_seq)


class FanOut:
    """One sink to many: plain sinks at once, subscribers through bounded queues.

    A subscriber whose queue overflows gets the queued events and then ConsumerTooSlow, with the last `seq` it got.
    Other subscribers are not affected.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self._subscriptions: list[Subscription] = []

    def __call__(self, event: Event) -> None:
        deliver(event, self._sinks)
        for subscription in self._subscriptions:
            subscription.put(event)

    def subscribe(self, maxsize: int = 1024) -> Subscription:
        subscription = Subscription(maxsize)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)
        subscription.close()

    def close(self) -> None:
        """End every subscription after its queued events."""
        for subscription in self._subscriptions:
            subscription.close()
        self._subscriptions.clear()
