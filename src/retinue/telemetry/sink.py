"""Sinks that read events as a tree of runs: they report what begins and ends to observers, which send spans and metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import ConfigurationError
from ..core.events import Event
from ..core.results import ToolCallStatus
from ..wire.tree import CallNode, Node, RunNode, RunTree, StepNode

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


_log = logging.getLogger(__name__)

KEPT_RUNS = 10_000
"""Ended runs that are kept because they wait, or because a background child may begin late."""


class Observer(Protocol):
    """Receives the runs, model calls and tool calls of a log. Each leg of a resumed run begins and ends."""

    def began(self, node: Node) -> None: ...

    def ended(self, node: Node) -> None: ...

    def noted(self, node: Node, name: str, at: float, facts: Mapping[str, Any]) -> None:
        """A handoff, a wait for the provider or a non-fatal error happened in it."""
        ...


class TreeReader(RunTree):
    """Reports to observers and forgets what has ended. An observer's exception is logged and stops nothing."""

    def __init__(self, observers: Sequence[Observer], *, content: bool = False) -> None:
        super().__init__(content=content)
        self._observers = tuple(observers)
        self._kept: dict[str, None] = {}
        self._lock = threading.Lock()
        self._has_failed = False

    def find_run(self, event: Event) -> RunNode | None:
        return self.runs.get(event.run_id)

    def node_began(self, node: Node) -> None:
        if isinstance(node, RunNode):
            self._kept.pop(node.run_id, None)
        self._report(lambda observer: observer.began(node))

    def node_ended(self, node: Node) -> None:
        self._report(lambda observer: observer.ended(node))
        match node:
            case RunNode():
                self._forget(node)
            case StepNode(parent=RunNode() as run):
                node.messages, node.message = (), None
                del run.steps[:-1]
            case CallNode(parent=RunNode() as run):
                node.args = node.result = None
                if not _is_needed(node):
                    run.calls.pop(node.call_id, None)
            case _:
                pass

    def node_noted(self, node: Node, name: str, at: float, facts: Mapping[str, Any]) -> None:
        self._report(lambda observer: observer.noted(node, name, at, facts))

    def _forget(self, run: RunNode) -> None:
        """Keep a run that waits, or that may still get children; of those, only so many."""
        run.steps, run.said, run.results, run.messages, run.response = [], [], {}, (), None
        run.calls = {call_id: call for call_id, call in run.calls.items() if _is_needed(call)}
        if isinstance(run.parent, CallNode):
            run.parent.children.pop(run.run_id, None)
        if not run.status.is_waiting and not run.calls:
            self.runs.pop(run.run_id, None)
            return
        with self._lock:
            self._kept[run.run_id] = None
            if len(self._kept) > KEPT_RUNS:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
                self.runs.pop(oldest, None)

    def _report(self, say: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                say(observer)
            except Exception:
                # Only the first failure in full: an exporter that is down would fill the log.
                level = logging.DEBUG if self._has_failed else logging.ERROR
                self._has_failed = True
                _log.log(level, "telemetry failed and continues; further failures are logged at DEBUG", exc_info=True)


def _is_needed(call: CallNode) -> bool:
    return call.status is ToolCallStatus.SUSPENDED or call.is_task or bool(call.starting)


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

            from .spans import Metrics, Spans
        except ImportError as exc:
            raise ConfigurationError('Telemetry needs: pip install "retinue[otel]"') from exc
        spans = Spans(get_tracer(INSTRUMENTATION, tracer_provider=tracer_provider), content=content)
        observers: list[Observer] = [spans, Metrics(get_meter(INSTRUMENTATION, meter_provider=meter_provider))]
        super().__init__(observers, content=content)
