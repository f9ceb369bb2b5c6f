"""Runs, model calls and tool calls as OpenTelemetry spans.

The span of the work in progress is also the current one, so that whatever a tool, a hook or a model's HTTP client records
hangs under it. That needs no help from the loop: events are told in the task that does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.context import Context, attach, create_key, get_current, get_value, set_value
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

from ..wire.tree import Node, StepNode
from .conventions import first_attributes, is_failure, last_attributes, span_name

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
