"""A log as a list of runs: of each run how it stands, and the end of its text. It keeps no messages, arguments or results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from ..core.events import (
    ErrorRaised,
    Event,
    InferenceFinished,
    Namespace,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StepStarted,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallResumed,
)
from .resources import iso

TAIL = 200
_TASK = 160


class Row(Struct, kw_only=True):
    """A run of the list."""

    ns: str
    """Its namespace, joined by `|`."""
    run_id: str
    parent_run_id: str | None
    agent: str
    task: str = ""
    """The first line of what it is to do."""
    status: str = "running"
    steps: int = 0
    calls: int = 0
    """The tool calls that it has begun."""
    doing: str = ""
    """A tool that works for it now."""
    wait: str | None = None
    """The reason why it waits for its model provider."""
    tokens: int = 0
    cost: float = 0.0
    started_at: str | None = None
    ended_at: str | None = None


class _Run(Struct):
    """Facts of a run that are kept beside its row."""

    row: Row
    at_work: dict[str, str] = field(default_factory=dict[str, str])
    """The tool of each call that works, by call id."""
    known_calls: set[str] = field(default_factory=set[str])
    message_id: str = ""
    text: str = ""
    """The end of the answer in progress."""
    said: str = ""
    """The end of the last answer with text."""


class Roster:
    """Reads the events of a log in order. `changed` and `spoken` name the runs whose row or text has changed, oldest first."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._runs: dict[str, _Run] = {}
        self.seq = 0
        self.changed: dict[str, None] = {}
        self.urgent: dict[str, None] = {}
        """The runs that have begun, ended, waited or continued."""
        self.spoken: dict[str, None] = {}
        for event in events:
            self(event)

    def row(self, run_id: str) -> Row:
        return self._runs[run_id].row

    def rows(self) -> list[Row]:
        return [run.row for run in self._runs.values()]

    def tail(self, run_id: str) -> str:
        """Return the end of the text of a run: of the answer in progress, else of the last answer with text."""
        run = self._runs[run_id]
        return run.text or run.said

    def counts(self, ns: Namespace) -> Mapping[str, int]:
        """Return how many runs below a namespace have each status."""
        return Counter(run.row.status for run in self._runs.values() if is_below(run.row, ns))

    def __call__(self, event: Event) -> None:
        self.seq = max(self.seq, event.seq)
        if isinstance(event, RunStarted):
            self._started(event)
        elif (run := self._runs.get(event.run_id)) is not None:
            self._read(event, run)

    def _started(self, event: RunStarted) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            row = Row(
                ns="|".join(event.ns), run_id=event.run_id, parent_run_id=event.parent_run_id, agent=event.agent,
                started_at=iso(event.at),
            )  # fmt: skip
            run = self._runs[event.run_id] = _Run(row)
        said = event.messages[-1].text.strip() if event.messages else ""
        run.row.task = said.partition("\n")[0][:_TASK] or run.row.task
        run.row.status, run.row.ended_at, run.row.wait = "running", None, None
        run.text = run.message_id = ""
        self._note(event, is_urgent=True)

    def _read(self, event: Event, run: _Run) -> None:
        row = run.row
        match event:
            case TextDelta() | ReasoningDelta():
                self._add_text(event, run)
                if row.wait is None:
                    return
                row.wait = None
            case StepStarted():
                row.steps = max(row.steps, event.step)
            case InferenceFinished():
                usage = event.usage
                row.tokens += usage.input_tokens + usage.output_tokens
                row.cost, row.wait = row.cost + usage.cost, None
                run.said, run.text, run.message_id = event.message.text[-TAIL:] or run.said, "", ""
                self.spoken[event.run_id] = None
            case ToolCallReady() | ToolCallResumed():
                run.at_work[event.call_id] = event.tool_name
                run.known_calls.add(event.call_id)
                row.calls, row.doing = len(run.known_calls), event.tool_name
            case ToolCallFinished():
                run.at_work.pop(event.call_id, None)
                row.doing = next(reversed(run.at_work.values()), "")
            case ErrorRaised():
                if event.retry_model is not None:
                    row.wait = event.code or "unknown"
                self._drop_text(event, run)
            case RunFinished():
                row.status, row.ended_at, row.wait, row.doing = event.status.value, iso(event.at), None, ""
                run.at_work.clear()
                self._note(event, is_urgent=True)
            case _:
                return
        self._note(event)

    def _add_text(self, event: TextDelta | ReasoningDelta, run: _Run) -> None:
        if isinstance(event, ReasoningDelta):
            return
        if event.message_id != run.message_id:
            run.message_id, run.text = event.message_id, ""
        run.text = (run.text + event.delta)[-TAIL:]
        self.spoken[event.run_id] = None

    def _drop_text(self, event: ErrorRaised, run: _Run) -> None:
        if event.dropped_message_id is not None and event.dropped_message_id == run.message_id:
            run.text = run.message_id = ""
            self.spoken[event.run_id] = None

    def _note(self, event: Event, *, is_urgent: bool = False) -> None:
        self.changed[event.run_id] = None
        if is_urgent:
            self.urgent[event.run_id] = None


def is_below(row: Row, ns: Namespace) -> bool:
    """Return whether the run of a row is below a namespace, at any depth."""
    found = tuple(row.ns.split("|")) if row.ns else ()
    return len(found) > len(ns) and found[: len(ns)] == ns


def row_json(row: Row, tail: str | None = None) -> dict[str, Any]:
    return asdict(row) if tail is None else {**asdict(row), "tail": tail}
