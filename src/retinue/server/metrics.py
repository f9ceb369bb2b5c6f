"""Figures of the server, as Prometheus reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)


class Metrics:
    """Counts of requests, their seconds, open streams and sent events."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: Counter[tuple[str, float]] = Counter()
        self._total_seconds: Counter[str] = Counter()
        self.requests = 0
        """The number of requests that are being handled."""
        self.streams = 0
        self.events_sent = 0

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests[method, route, status] += 1
        self._total_seconds[route] += seconds  # pyright: ignore[reportArgumentType]
        for bound in BUCKETS:
            if seconds <= bound:
                self._seconds[route, bound] += 1

    def lines(self) -> Iterable[str]:
        yield "# TYPE retinue_http_requests_total counter"
        for (method, route, status), count in sorted(self._requests.items()):
            yield f'retinue_http_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}'
        yield "# TYPE retinue_http_request_seconds histogram"
        counts: Counter[str] = Counter()
        for (_, route, _), count in self._requests.items():
            counts[route] += count
        for route, count in sorted(counts.items()):
            for bound in BUCKETS:
                shown = f'{{route="{route}",le="{bound:g}"}} {self._seconds[route, bound]}'
                yield f"retinue_http_request_seconds_bucket{shown}"
            yield f'retinue_http_request_seconds_bucket{{route="{route}",le="+Inf"}} {count}'
            yield f'retinue_http_request_seconds_sum{{route="{route}"}} {self._total_seconds[route]:.6f}'
            yield f'retinue_http_request_seconds_count{{route="{route}"}} {count}'
        yield "# TYPE retinue_http_requests_active gauge"
        yield f"retinue_http_requests_active {self.requests}"
        yield "# TYPE retinue_streams gauge"
        yield f"retinue_streams {self.streams}"
        yield "# TYPE retinue_events_sent_total counter"
        yield f"retinue_events_sent_total {self.events_sent}"
