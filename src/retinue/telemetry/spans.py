"""Runs, model calls and tool calls as OpenTelemetry spans and metrics.

The span of the work in progress is also the current one, so that whatever a tool, a hook or a model's HTTP client records
hangs under it. That needs no help from the loop: events are told in the task that does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context, attach, create_key, get_current, get_value, set_value
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)

from ..wire.tree import CallNode, Node, RunNode, StepNode
from . import conventions as names
from .conventions import first_attributes, is_failure, last_attributes, provider_and_model, span_name

_HERE = create_key("retinue-place")


class _Place:
    """A span, and the context that was current before it."""

    __slots__ = ("before", "ended", "span")

    def __init__(self, span: Span, before: Context) -> None:
        self.span, self.before, self.ended = span, before, False


class Spans:
    """Makes a span of every node. Error texts count as content and are sent only with `content`."""

    def __init__(self, tracer: Tracer, *, content: bool) -> None:
        self._tracer, self._content = tracer, content

    def began(self, node: Node) -> None:
        before = get_current()
        parent: _Place | None = None if node.parent is None else node.parent.handle
        earlier: _Place | None = node.earlier
        above = before
        if parent is not None and get_current_span(before) is not parent.span:
            above = set_span_in_context(parent.span, before)
        span = self._tracer.start_span(
            span_name(node),
            above,
            SpanKind.CLIENT if isinstance(node, StepNode) else SpanKind.INTERNAL,
            first_attributes(node),
            [] if earlier is None else [Link(earlier.span.get_span_context(), {"retinue.link": "earlier_leg"})],
            _nanoseconds(node.began),
        )
        place = node.handle = _Place(span, before)
        attach(set_value(_HERE, place, set_span_in_context(span, before)))

    def ended(self, node: Node) -> None:
        place: _Place | None = node.handle
        if place is None:
            return
        span = place.span
        try:
            if span.is_recording():
                self._complete(span, node)
        finally:
            # Links and late children need only the ids.
            place.span, place.ended = NonRecordingSpan(span.get_span_context()), True
            _step_back(place)
            span.end(_nanoseconds(node.ended or node.began))

    def _complete(self, span: Span, node: Node) -> None:
        span.set_attributes(last_attributes(node))
        if isinstance(node, StepNode):
            span.update_name(span_name(node))
        if is_failure(node):
            detail = node.error if self._content else None
            span.set_status(Status(StatusCode.ERROR, detail or node.error_type))

    def noted(self, node: Node, name: str, at: float, facts: Mapping[str, Any]) -> None:
        place: _Place | None = node.handle
        if place is not None:
            place.span.add_event(f"retinue.{name}", {f"retinue.{key}": facts[key] for key in facts}, _nanoseconds(at))


def _step_back(place: _Place) -> None:
    """Restore the context from before the span, unless another task reported the end."""
    if get_value(_HERE) is not place:
        return
    here, context = place, get_current()
    while isinstance(here, _Place) and here.ended:  # spans may end in another order than they began
        context = here.before
        here = get_value(_HERE, context)
    attach(context)
    place.before = Context()  # a context holds whole spans, and a waiting leg is kept


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


SECONDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
AGENT_SECONDS = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2]
TOKENS = [4.0**power for power in range(14)]
COUNTS: list[float] = [0, 1, 2, 4, 8, 16, 32, 64, 128]


class Metrics:
    """Counts and times nodes. Attributes are agents, models, tools and error types, never ids."""

    def __init__(self, meter: Meter) -> None:
        def histogram(name: str, unit: str, about: str, buckets: list[float]) -> Histogram:
            return meter.create_histogram(name, unit, about, explicit_bucket_boundaries_advisory=buckets)

        chat, agent = "gen_ai.client", "gen_ai.invoke_agent"
        first_chunk = "From the request to the first piece of the answer."
        self._chat_seconds = histogram(f"{chat}.operation.duration", "s", "Model call.", SECONDS)
        self._first_chunk = histogram(f"{chat}.operation.time_to_first_chunk", "s", first_chunk, SECONDS)
        self._tokens = histogram(f"{chat}.token.usage", "{token}", "Tokens a call.", TOKENS)
        self._run_seconds = histogram(f"{agent}.duration", "s", "Run, or leg of a run.", AGENT_SECONDS)
        self._inferences = histogram(f"{agent}.inference_calls", "{inference_call}", "Model calls a run.", COUNTS)
        self._tool_calls = histogram(f"{agent}.tool_calls", "{tool_call}", "Tool calls a run.", COUNTS)
        self._tool_seconds = histogram("gen_ai.execute_tool.duration", "s", "Tool call.", SECONDS)
        self._runs = meter.create_counter("retinue.runs", "{run}", "Runs that ended or wait, by status.")
        self._active = meter.create_up_down_counter("retinue.runs.active", "{run}", "Runs in progress.")
        self._steps = meter.create_counter("retinue.steps", "{step}", "Steps with an answer of the model.")
        waited = "How long a model call waited because its provider took no more."
        self._waits = histogram("retinue.inference.wait", "s", waited, AGENT_SECONDS)
        self._cost = meter.create_counter("retinue.cost", "USD", "What model calls cost.")

    def began(self, node: Node) -> None:
        if isinstance(node, RunNode):
            self._active.add(1, {names.AGENT_NAME: node.agent})

    def ended(self, node: Node) -> None:
        if isinstance(node, RunNode):
            self._run_ended(node)
        elif isinstance(node, StepNode):
            self._chat_ended(node)
        else:
            self._tool_ended(node)

    def noted(self, node: Node, name: str, at: float, facts: Mapping[str, Any]) -> None:
        return None

    def _run_ended(self, run: RunNode) -> None:
        whose = {names.AGENT_NAME: run.agent}
        self._active.add(-1, whose)
        self._runs.add(1, {**whose, names.RUN_STATUS: run.status.value, names.RUN_IS_CHILD: bool(run.ns)})
        self._run_seconds.record(run.seconds, _with_error(whose, run))
        self._inferences.record(run.inferences, whose)
        self._tool_calls.record(run.tool_calls, whose)

    def _chat_ended(self, chat: StepNode) -> None:
        provider, model = provider_and_model(chat.model)
        about = {names.OPERATION_NAME: names.KINDS[StepNode], names.PROVIDER_NAME: provider, names.REQUEST_MODEL: model}
        if chat.answered_by:
            about[names.RESPONSE_MODEL] = provider_and_model(chat.answered_by)[1]
            self._steps.add(1, {names.AGENT_NAME: chat.agent})
        self._chat_seconds.record(chat.seconds, _with_error(about, chat))
        if chat.first_chunk is not None:
            self._first_chunk.record(max(chat.first_chunk - chat.began, 0.0), about)
        for kind, count in (("input", chat.usage.input_tokens), ("output", chat.usage.output_tokens)):
            if count:
                self._tokens.record(count, {**about, names.TOKEN_TYPE: kind})
        if chat.usage.waited:
            self._waits.record(chat.usage.waited, about)
        if chat.usage.cost:
            self._cost.add(chat.usage.cost, {**about, names.AGENT_NAME: chat.agent})

    def _tool_ended(self, tool: CallNode) -> None:
        name = names.OTHER if tool.error_type == "not_found" else tool.tool
        about = {names.OPERATION_NAME: names.KINDS[CallNode], names.TOOL_NAME: name, names.AGENT_NAME: tool.agent}
        self._tool_seconds.record(tool.seconds, _with_error(about, tool))


def _with_error(about: dict[str, Any], node: Node) -> dict[str, Any]:
    return about if node.error_type is None else {**about, names.ERROR_TYPE: node.error_type}
