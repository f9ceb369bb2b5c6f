"""The sink that sends spans and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError
from .reader import Observer, TreeReader

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

INSTRUMENTATION = "retinue"


class Telemetry(TreeReader):
    """A sink that makes OpenTelemetry spans and metrics of runs: `Runtime(sinks=[Telemetry()])`.

    Without providers it uses those the process has set, with whatever exports them. `content=True` also sends what was
    said: messages, arguments, results and the texts of errors. A failing exporter does not hurt a run.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        content: bool = False,
    ) -> None:
        try:
            from opentelemetry.metrics import get_meter
            from opentelemetry.trace import get_tracer

            from .metrics import Metrics
            from .spans import Spans
        except ImportError as exc:
            raise ConfigurationError('Telemetry needs: pip install "retinue[otel]"') from exc
        spans = Spans(get_tracer(INSTRUMENTATION, tracer_provider=tracer_provider), content=content)
        observers: list[Observer] = [spans, Metrics(get_meter(INSTRUMENTATION, meter_provider=meter_provider))]
        super().__init__(observers, content=content)
