"""Trace context for requests to other servers, so that their spans hang under ours (W3C Trace Context)."""

from __future__ import annotations

import sys


def trace_headers() -> dict[str, str]:
    """Return the headers that name the current span; empty if there is none, or OpenTelemetry is not used."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers
