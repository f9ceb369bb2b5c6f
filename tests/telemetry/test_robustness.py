"""What fails in telemetry hurts no run, and one sink serves any number of threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from retinue import Agent, Event, RunStatus, Runtime, Telemetry, tool
from retinue.testing import RecordingSink, ScriptedModel, call, say
from tests.telemetry.agents import leaf, tree
from tests.telemetry.collector import Collector, trace_id


async def test_what_is_not_sampled_costs_no_attributes_and_stays_whole() -> None:
    heard: list[Any] = []
    provider = TracerProvider(sampler=ALWAYS_OFF)

    @tool
    async def see() -> str:
        """See the current span."""
        heard.append(trace.get_current_span())
        return "ok"

    agent = Agent("a", ScriptedModel([call("see"), say("ok")]), tools=[see])
    result = await Runtime([agent], sinks=[Telemetry(tracer_provider=provider)]).run("a", "go")
    assert result.status is RunStatus.COMPLETED
    assert [(span.is_recording(), span.get_span_context().is_valid) for span in heard] == [(False, True)]


class Broken(Telemetry):
    """Its providers fail at every turn."""

    def __init__(self) -> None:
        super().__init__(tracer_provider=_Failing(), meter_provider=_Failing())  # pyright: ignore[reportArgumentType]


class _Failing:
    """A provider that works until something is recorded."""

    def get_tracer(self, *args: Any, **options: Any) -> Any:
        return self

    get_meter = get_tracer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            return self.get_tracer
        raise RuntimeError(f"no {name}")


async def test_what_fails_in_telemetry_does_not_hurt_the_run(caplog: pytest.LogCaptureFixture) -> None:
    heard = RecordingSink()
    result = await Runtime([leaf()], sinks=[Broken(), heard]).run("leaf", "go")
    assert result.status is RunStatus.COMPLETED
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "telemetry failed and continues" in caplog.text
    assert heard.events[-1].kind == "run_finished"


async def test_an_exporter_that_raises_does_not_hurt_the_run() -> None:
    class Raising(SpanProcessor):
        def on_end(self, span: Any) -> None:
            raise OSError("collector is down")

    got = Collector()
    got.tracer_provider.add_span_processor(Raising())
    result = await Runtime([tree()], sinks=[got.sink]).run("root", "go")
    assert result.status is RunStatus.COMPLETED
    assert (got.open, len(got.spans)) == (0, 12)
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_what_to_install_is_said() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import retinue; from retinue.telemetry import RunLogSink, Telemetry; RunLogSink(); Telemetry()"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'Telemetry needs: pip install "retinue[otel]"' in out.stderr


async def test_events_of_runs_nobody_saw_begin_are_ignored() -> None:
    heard = RecordingSink()
    await Runtime([tree()], sinks=[heard]).run("root", "go")
    got = Collector()
    for event in heard.events:
        if event.kind != "run_started":
            got.sink(event)
    got.sink(Event(run_id="x"))
    assert got.spans == []


def test_one_sink_serves_runtimes_in_many_threads() -> None:
    got = Collector()

    def work() -> None:
        async def main() -> None:
            runtime = Runtime([leaf()], sinks=[got.sink])
            await asyncio.gather(*[runtime.run("leaf", "x") for _ in range(25)])

        asyncio.run(main())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got.open == 0
    runs = [span for span in got.spans if span.name == "invoke_agent leaf"]
    assert len(runs) == len({trace_id(span) for span in got.spans}) == 100
    assert len(got.spans) == 400
