"""Log lines of runs, and the ids of the current run on every log line. Standard library only."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from ..core.runs import RunStatus
from ..wire.tree import CallNode, Node, RunNode, StepNode
from .conventions import is_failure, provider_and_model
from .sink import TreeReader

Ids = dict[str, Any]


class _Place:
    """The ids of work in progress, and the place that was current before it."""

    __slots__ = ("before", "ended", "ids")

    def __init__(self, ids: Ids, before: _Place | None) -> None:
        self.ids, self.before, self.ended = ids, before, False


_here: ContextVar[_Place | None] = ContextVar("retinue_log_place", default=None)


class RunLogSink(TreeReader):
    """A sink that logs what begins and ends, without content: runs at INFO, calls at DEBUG, failures at WARNING.

    The ids are fields of each record, and `RunLogFilter` puts them on every other record that is made inside a run.
    """

    def __init__(self, logger: logging.Logger | str = "retinue.runs") -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        super().__init__([self])

    def began(self, node: Node) -> None:
        place = node.handle = _Place(_ids(node), _here.get())
        _here.set(place)
        if isinstance(node, RunNode):
            self._logger.info("run of %s started", node.agent, extra=place.ids | {"event": "run_started"})

    def ended(self, node: Node) -> None:
        place: _Place | None = node.handle
        if place is None:
            return
        level = logging.INFO if isinstance(node, RunNode) else logging.DEBUG
        level = logging.WARNING if is_failure(node) else level
        if self._logger.isEnabledFor(level):
            what, status, facts = _told(node)
            extra = place.ids | facts | {"event": what, "status": status, "seconds": round(node.seconds, 6)}
            words = what.removesuffix("_finished").replace("_", " ")
            target = node.tool if isinstance(node, CallNode) else f"of {node.agent}"
            self._logger.log(level, "%s %s: %s", words, target, status, extra=extra)
        place.ended = True
        if _here.get() is place:
            here: _Place | None = place
            while here is not None and here.ended:
                here = here.before
            _here.set(here)

    def noted(self, node: Node, name: str, at: float, facts: Mapping[str, Any]) -> None:
        place: _Place | None = node.handle
        if place is not None:
            told = " ".join([f"{key}={value}" for key, value in facts.items()])
            level = logging.WARNING if name == "error" else logging.INFO
            self._logger.log(level, "%s in run of %s: %s", name, node.agent, told, extra=place.ids | {"event": name})


class RunLogFilter(logging.Filter):
    """Adds the ids of the current run and call to records. On a handler it covers the log lines of tools and libraries."""

    def filter(self, record: logging.LogRecord) -> bool:
        place = _here.get()
        fields = record.__dict__
        for name, value in ({} if place is None else place.ids).items():
            fields.setdefault(name, value)
        for name, value in _trace_ids().items():
            fields.setdefault(name, value)
        return True


class JsonLogFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and every extra field of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in record.__dict__.items():
            if name not in _STANDARD and value is not None:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, ensure_ascii=False, default=str)


_STANDARD = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"})


def _ids(node: Node) -> Ids:
    run = node if isinstance(node, RunNode) else node.parent
    ids: Ids = {"run_id": node.run_id, "agent": node.agent}
    if isinstance(run, RunNode):
        ids["thread_id"] = run.thread_id
        if run.parent is not None:
            ids["parent_run_id"] = run.parent.run_id
    if isinstance(node, CallNode):
        ids["call_id"] = node.call_id
    return ids


def _told(node: Node) -> tuple[str, str, dict[str, Any]]:
    """Return the event name, the status and the other fields of a log line."""
    facts: dict[str, Any] = {} if node.error_type is None else {"error": node.error_type}
    match node:
        case RunNode():
            usage = {"tokens": node.leg_usage.tokens, "cost": node.leg_usage.cost}
            if node.status is not RunStatus.COMPLETED:
                facts["termination"] = node.termination
            return "run_finished", node.status.value, facts | usage
        case CallNode():
            return "tool_call_finished", node.status.value, facts | {"tool": node.tool}
        case StepNode():
            facts["model"] = provider_and_model(node.model)[1]
            usage = {"tokens": node.usage.tokens, "cost": node.usage.cost}
            return "inference_finished", node.stop_reason or node.error_type or "", facts | usage


def _trace_ids() -> dict[str, str]:
    """Return the ids of the current span if OpenTelemetry is loaded; nothing is imported for it."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    span = trace.get_current_span().get_span_context()
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"} if span.is_valid else {}
