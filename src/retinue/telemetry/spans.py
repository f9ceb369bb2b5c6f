"""Operations as OpenTelemetry spans.

The span of the work in progress is also the current one, so that whatever a tool, a hook or a model's HTTP client records
hangs under it. That needs no help from the loop: events are told in the task that does the work.
"""

from __future__ import annotations

from collections.abc import Mapping

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

from .conventions import first_attributes, is_failure, last_attributes, span_name
from .operations import ChatOperation, Operation

_HERE = create_key("retinue-place")


class _Place:
    """A span, and the context that was current before it."""

    __slots__ = ("before", "ended", "span")

    def __init__(self, span: Span, before: Context) -> None:
        self.span, self.before, self.ended = span, before, False


class Spans:
    """Makes a span of every operation. Error texts are content too, and are sent only where that is wanted."""

    def __init__(self, tracer: Tracer, *, content: bool) -> None:
        self._tracer, self._content = tracer, content

    def began(self, operation: Operation) -> None:
        before = get_current()
        parent, earlier = _place(operation.parent), _place(operation.earlier)
        above = before
        if parent is not None and get_current_span(before) is not parent.span:
            above = set_span_in_context(parent.span, before)
        span = self._tracer.start_span(
            span_name(operation),
            above,
            SpanKind.CLIENT if isinstance(operation, ChatOperation) else SpanKind.INTERNAL,
            first_attributes(operation),
            [] if earlier is None else [Link(earlier.span.get_span_context(), {"retinue.link": "earlier_leg"})],
            _nanoseconds(operation.began),
        )
        place = operation.handle = _Place(span, before)
        attach(set_value(_HERE, place, set_span_in_context(span, before)))

    def ended(self, operation: Operation) -> None:
        place = _place(operation)
        if place is None:
            return
        span = place.span
        try:
            if span.is_recording():
                self._complete(span, operation)
        finally:
            # What is kept for links and late children needs no more than the ids.
            place.span, place.ended = NonRecordingSpan(span.get_span_context()), True
            _step_back(place)
            span.end(_nanoseconds(operation.ended))

    def _complete(self, span: Span, operation: Operation) -> None:
        span.set_attributes(last_attributes(operation))
        if isinstance(operation, ChatOperation) and not operation.named:
            span.update_name(span_name(operation))
        if is_failure(operation):
            detail = operation.detail if self._content else None
            span.set_status(Status(StatusCode.ERROR, detail or operation.error))

    def noted(self, operation: Operation, name: str, at: float, facts: Mapping[str, str]) -> None:
        place = _place(operation)
        if place is not None:
            place.span.add_event(f"retinue.{name}", {f"retinue.{key}": facts[key] for key in facts}, _nanoseconds(at))


def _place(operation: Operation | None) -> _Place | None:
    return None if operation is None else operation.handle


def _step_back(place: _Place) -> None:
    """Make the context current that was so before; nothing to do where another task told of the end."""
    if get_value(_HERE) is not place:
        return
    here, context = place, get_current()
    while isinstance(here, _Place) and here.ended:  # ends may come in another order than beginnings
        context = here.before
        here = get_value(_HERE, context)
    attach(context)
    place.before = Context()  # a context holds whole spans, and a leg that waits is remembered


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
