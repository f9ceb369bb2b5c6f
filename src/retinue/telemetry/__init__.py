"""Telemetry: spans, metrics and log lines, all made from events."""

# fmt: off
from .logs import JsonLogFormatter, RunLogFilter, RunLogSink
from .sink import Telemetry

__all__ = [
    "JsonLogFormatter", "RunLogFilter", "RunLogSink", "Telemetry",
]
