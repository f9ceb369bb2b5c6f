"""Trace context of requests: the spans of a run hang under the span of the client that started it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec


def traced(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a request's headers that tools read in `ctx.context`."""
    return {"traceparent": headers["traceparent"]} if "traceparent" in headers else {}


@contextmanager
def remote_trace(headers: Mapping[str, str]) -> Generator[None]:
    """Make the span that `traceparent` names the current one. Without OpenTelemetry this does nothing."""
    if "traceparent" not in headers or find_spec("opentelemetry") is None:
        yield
        return
    from opentelemetry.context import attach, detach
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = attach(TraceContextTextMapPropagator().extract(dict(headers)))
    try:
        yield
    finally:
        detach(token)
