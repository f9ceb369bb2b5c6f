"""What telemetry costs: the same work without it and with it, interleaved."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from benchmarks.ours import BenchModel, Counting, lookup
from retinue import Agent, NullSink, Runtime, Sink, Telemetry
from retinue.telemetry import RunLogSink

STEPS, DELTAS = 200, 5_000


class _Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def _providers() -> tuple[TracerProvider, MeterProvider]:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Nowhere(), schedule_delay_millis=60_000, max_queue_size=1_000_000))
    return provider, MeterProvider([InMemoryMetricReader()])


def _sent() -> Telemetry:
    tracers, meters = _providers()
    return Telemetry(tracer_provider=tracers, meter_provider=meters)


def _unsampled() -> Telemetry:
    return Telemetry(tracer_provider=TracerProvider(sampler=ALWAYS_OFF), meter_provider=MeterProvider())


WITH: dict[str, Callable[[], list[Sink]]] = {
    "off": list,
    "a sink that does nothing": lambda: [NullSink()],
    "log lines, none enabled": lambda: [RunLogSink()],
    "traced, not sampled": lambda: [_unsampled()],
    "spans and metrics": lambda: [_sent()],
}


async def steps(sinks: list[Sink]) -> float:
    """Seconds of CPU for a step with a tool call and a commit."""
    model = BenchModel(STEPS)
    agent = Agent("bench", model, "Look things up.", [lookup], [Counting()], max_steps=STEPS + 1)
    began = time.process_time()
    result = await Runtime([agent], sinks=sinks).run("bench", "go")
    assert result.status == "completed", result.error
    return (time.process_time() - began) / STEPS


async def deltas(sinks: list[Sink]) -> float:
    """Seconds of CPU for a streamed piece of text."""
    runtime = Runtime([Agent("bench", BenchModel(0, DELTAS))], sinks=sinks)
    began = time.process_time()
    async for _ in runtime.stream("bench", "go"):
        pass
    return (time.process_time() - began) / DELTAS


def sdk_alone() -> float:
    """Seconds of CPU that the SDK takes for what a step sends, called by hand: two spans and four measurements."""
    tracers, meters = _providers()
    tracer, meter = tracers.get_tracer("bench"), meters.get_meter("bench")
    seconds, first, used, count = (meter.create_histogram(n) for n in ("a", "b", "c", "d"))
    began_with: dict[str, str | int] = {f"gen_ai.first.{n}": "value" for n in range(7)}
    ended_with: dict[str, str | int] = {f"gen_ai.last.{n}": "value" for n in range(4)}
    about = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "bench", "gen_ai.request.model": "model"}
    began = time.process_time()
    with tracer.start_as_current_span("invoke_agent bench"):
        for _ in range(STEPS):
            for name in ("chat model", "execute_tool lookup"):
                with tracer.start_as_current_span(name, attributes=began_with) as span:
                    span.set_attributes(ended_with)
            for instrument in (seconds, first, used, count):
                instrument.record(0.1, about)
    return (time.process_time() - began) / STEPS


def rows(rounds: int) -> list[dict[str, float | str]]:
    """For each way of watching: microseconds a step and a delta, and how many times that is of nothing."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in WITH}
    alone: list[float] = []
    for number in range(rounds + 1):
        for name, make in WITH.items():
            sinks = make()
            figures = asyncio.run(steps(sinks)), asyncio.run(deltas(sinks))
            if number:  # the first round fills caches
                taken[name].append(figures)
        alone.append(sdk_alone())
    off = taken["off"]
    table: list[dict[str, float | str]] = []
    for name, figures in taken.items():
        row: dict[str, float | str] = {"what": name}
        for index, kind in enumerate(("step", "delta")):
            row[f"{kind} µs"] = statistics.median([each[index] for each in figures]) * 1e6
            pairs = zip(figures, off, strict=True)
            row[f"{kind} ratio"] = statistics.median([each[index] / base[index] for each, base in pairs])
        table.append(row)
    bare = statistics.median(alone[1:])
    share = statistics.median([seconds / base[0] for seconds, base in zip(alone[1:], off, strict=True)])
    table.append({"what": "of it the SDK by itself", "step µs": bare * 1e6, "step ratio": share})
    return table


def show(rounds: int) -> None:
    print(f"{'':28}{'a step':>10}{'':>9}{'a delta':>12}")
    for row in rows(rounds):
        line = f"{row['what']:28}{row['step µs']:>7.1f} µs{row['step ratio']:>8.2f}x"
        if "delta µs" in row:
            line += f"{row['delta µs']:>9.2f} µs{row['delta ratio']:>8.2f}x"
        print(line)
