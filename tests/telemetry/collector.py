"""Spans and metrics in memory, and how tests look at them."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from retinue import Telemetry


class _Counting(SpanProcessor):
    """Counts the spans that have begun and not ended."""

    def __init__(self) -> None:
        self.open = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.open += 1

    def on_end(self, span: ReadableSpan) -> None:
        self.open -= 1


class Collector:
    """A telemetry sink, and what it has sent."""

    def __init__(self, *, content: bool = False) -> None:
        self._exporter, self._counting, self._reader = InMemorySpanExporter(), _Counting(), InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer_provider.add_span_processor(self._counting)
        self.meter_provider = MeterProvider([self._reader])
        self.sink = Telemetry(tracer_provider=self.tracer_provider, meter_provider=self.meter_provider, content=content)

    @property
    def open(self) -> int:
        return self._counting.open

    @property
    def spans(self) -> list[ReadableSpan]:
        """What has been exported, in order of its beginning."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def span(self, name: str, number: int = 0) -> ReadableSpan:
        return [span for span in self.spans if span.name == name][number]

    def tree(self) -> list[str]:
        """One line a span, children below their parents."""
        return _below(self.spans, None, "")

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """The series of a metric: their attributes, and their sum, or count and sum."""
        data: Any = self._reader.get_metrics_data()
        if data is None:
            return []
        metrics = [m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics if m.name == name]
        return [(dict(p.attributes), _value(p)) for metric in metrics for p in metric.data.data_points]


def _value(point: Any) -> Any:
    return point.value if hasattr(point, "value") else (point.count, point.sum)


def every(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes."""
    return dict(span.attributes or {})


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes, without the ids that differ each time."""
    drop = ("retinue.run.id", "retinue.run.parent_id", "gen_ai.conversation.id", "gen_ai.response.time_to_first_chunk")
    return {key: value for key, value in every(span).items() if key not in drop}


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def trace_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id


def _below(spans: list[ReadableSpan], parent: int | None, indent: str) -> list[str]:
    known = {span_id(span) for span in spans}
    lines: list[str] = []
    for span in spans:
        above = None if span.parent is None else span.parent.span_id
        if above == parent or (parent is None and above not in known):
            mark = "" if span.status.is_unset else f" [{span.status.status_code.name}: {span.status.description}]"
            lines += [f"{indent}{span.name}{mark}", *_below(spans, span_id(span), indent + "  ")]
    return lines
