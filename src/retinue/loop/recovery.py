"""What a run that goes on after its process ended must know of what was told before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..core.codec import to_json_bytes
from ..core.events import (
    ChildFinished,
    ChildStarted,
    ErrorRaised,
    Event,
    InferenceFinished,
    Namespace,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StateDelta,
    StepStarted,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallStarted,
)
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.messages import Message, ToolCall
from ..core.runs import RunResult, Usage
from .log import EventLog
from .outcomes import cancelled
from .past import Clock, Order, Pause, Spent
from .scope import Ending, RunScope

_SAME_BY: dict[str, tuple[str, ...]] = {
    "run_started": (),
    "run_finished": (),
    "messages_snapshot": (),
    "state_snapshot": (),
    "step_started": ("step",),
    "step_finished": ("step",),
    "inference_finished": ("step",),
    "tool_call_ready": ("call_id",),
    "tool_call_finished": ("call_id",),
    "tool_call_resumed": ("call_id",),
    "child_started": ("child_run_id",),
    "child_finished": ("child_run_id",),
    "handoff": ("to_agent",),
}
"""By what an event that the loop tells again is known for the same. What tools tell is not told again."""


def _same(run_id: str, step: int, event: Event) -> tuple[Any, ...] | None:
    """What an event is known by; what can be told alike in several steps is looked for in its own."""
    if isinstance(event, ErrorRaised):
        # That a model is asked again is told while it answers: what is recorded of its answer does not tell it again.
        return None if event.retry_model is not None else (run_id, "error", step, event.message, event.code)
    if isinstance(event, StateDelta):  # one that differs is the truth now, and told
        return run_id, "state_delta", event.revision, to_json_bytes(event.delta)
    if event.kind == "custom":
        bare = replace(event, seq=0, at=0.0, run_id="", parent_run_id=None, agent="", ns=())
        return run_id, "custom", step, to_json_bytes(bare)
    fields = _SAME_BY.get(event.kind)
    if fields is None:
        return None
    waits = getattr(event, "status", None) == "suspended"  # an end is an end, whatever it would be now
    return run_id, event.kind, waits, *[getattr(event, name) for name in fields]


class CutOff(Struct):
    """A message that streamed in when the process ended."""

    message_id: str
    calls: dict[str, str] = {}
    """The calls it had begun to ask for, with the names of their tools."""
    drops: int = 0
    """How often it was begun anew before."""
    dropped: bool = False


class Told:
    """What the log of a recovered run holds already: telling it again adds nothing."""

    def __init__(self, events: Iterable[Event], pauses: Iterable[Pause] = ()) -> None:
        self._left: Counter[tuple[Any, ...]] = Counter()
        self._cut_off: dict[str, CutOff] = {}
        self._calls: dict[str, set[str]] = {}
        self.spent = Spent()
        self.clock = Clock(pauses)
        self.order = Order()
        steps: dict[str, int] = {}
        for event in events:
            if isinstance(event, StepStarted):
                steps[event.run_id] = event.step
            if (same := _same(event.run_id, steps.get(event.run_id, 0), event)) is not None:
                self._left[same] += 1
            self._follow_stream(event)
            self.spent.follow(event)
            self.clock.follow(event)
            self.order.follow(event)

    def takes(self, run_id: str, step: int, event: Event) -> bool:
        """Whether an event was told before; each that was counts once."""
        same = _same(run_id, step, event)
        count = self._left.get(same, 0) if same is not None else 0
        if same is None or not count:
            return False
        if count == 1:
            del self._left[same]
        else:
            self._left[same] = count - 1
        return True

    def calls_of(self, run_id: str) -> set[str]:
        """The ids of the calls that a run's model has asked for, also of those that were taken back."""
        return self._calls.get(run_id, set())

    def cut_off(self, run_id: str, message_id: str) -> CutOff | None:
        """What was told of a run's message that never came to its end."""
        found = self._cut_off.pop(run_id, None)
        return found if found is not None and found.message_id.startswith(message_id) else None

    def _follow_stream(self, event: Event) -> None:
        run_id = event.run_id
        if isinstance(event, TextDelta | ReasoningDelta | ToolCallStarted):
            current = self._cut_off.get(run_id)
            if current is None or current.dropped:
                drops = current.drops if current is not None else 0
                current = self._cut_off[run_id] = CutOff(event.message_id, {}, drops)
            if isinstance(event, ToolCallStarted):
                self._calls.setdefault(run_id, set()).add(event.call_id)
                current.calls[event.call_id] = event.tool_name
        elif isinstance(event, InferenceFinished | RunFinished):
            self._cut_off.pop(run_id, None)
        elif isinstance(event, ToolCallFinished) and run_id in self._cut_off:
            self._cut_off[run_id].calls.pop(event.call_id, None)
        elif isinstance(event, ErrorRaised) and event.dropped_message_id is not None and run_id in self._cut_off:
            current = self._cut_off[run_id]
            current.dropped, current.drops = True, current.drops + 1


class RecoveredScope(RunScope):
    """A run in a log that another process began."""

    __slots__ = ()

    def emit(self, event: Event) -> None:
        if self.sealed:
            return
        told = self.log.told.takes(self.run_id, self.step, event)
        if not told:
            super().emit(event)
        if isinstance(event, ToolCallFinished):
            self.log.told.order.ended(self, event.call_id, again=told)

    def retell(self, text: str) -> None:
        """Let the one who listens to this run alone know what it had said."""
        retell = getattr(self.sink, "retell", None)
        if retell is not None and text:
            retell(text)

    def finish(self, ending: Ending) -> RunResult:
        """As for any run; children that nobody asked for again end before it."""
        spent = self.log.told.spent
        spent.close(self.run_id)
        if spent.has_open_under(self.ns) and ending.status.is_terminal:
            _close_below(self.log, self.ns)
        return super().finish(ending)

    def count_call(self, call_id: str) -> None:
        for usage in self._spend(self.log.told.spent.take_call(self.run_id, call_id)):
            self.usage += usage

    def take_result(self, result: RunResult) -> None:
        super().take_result(result)
        self._spend(self.log.told.spent.take_run(self.run_id))

    def _spend(self, found: tuple[int, list[Usage]]) -> list[Usage]:
        """Count what was used against the budget."""
        children, usages = found
        for _ in range(children):
            self.budget.count_child()
        for usage in usages:
            self.budget.spend(usage)
        return usages


class _OpenRun(Struct):
    """A run whose end was not told, as its events say."""

    started: RunStarted
    calls: dict[str, str] = {}
    told_by: ChildStarted | None = None


def close_runs(log: EventLog, above: Namespace, reason: str, *, status: RunStatus = RunStatus.CANCELLED) -> None:
    """Tell the end of every run at or below a place in the log that nobody will go on with, the deepest first."""
    _close(log, _open_runs(log.events, above), reason, status)


def _close_below(log: EventLog, ns: Namespace) -> None:
    """Tell the end of the runs below one that ends, which had not been found again; not of what tasks go on with."""
    deeper = [run for run in _open_runs(log.events, ()) if _is_under(run.started.ns, ns)]
    left = [run for run in deeper if not any(run.started.ns[: len(held)] == held for held in log.held)]
    _close(log, left, "nobody asked for it again", RunStatus.CANCELLED)


def _close(log: EventLog, runs: list[_OpenRun], reason: str, status: RunStatus) -> None:
    """Tell the end of runs, the deepest first."""
    for run in sorted(runs, key=lambda run: -len(run.started.ns)):
        started = run.started
        for call_id, name in run.calls.items():
            dropped = cancelled(ToolCall(call_id, name, {}), reason)
            message = Message.tool(dropped.result.text, tool_call_id=call_id, name=name)
            _tell(
                log,
                started,
                ToolCallFinished(
                    call_id=call_id, tool_name=name, status=dropped.status, result=dropped.result, message=message
                ),
            )
        if log.told is not None:
            log.told.spent.close(started.run_id)
        _tell(log, started, RunFinished(status=status, termination=_termination(status), error=reason))
        if (by := run.told_by) is not None:
            ended = ChildFinished(
                call_id=by.call_id, child_run_id=by.child_run_id, child_agent=by.child_agent, status=status
            )
            log.append(replace(ended, run_id=by.run_id, parent_run_id=by.parent_run_id, agent=by.agent, ns=by.ns))


def _termination(status: RunStatus) -> str:
    return "error" if status is RunStatus.FAILED else "cancelled"


def _tell(log: EventLog, run: Event, event: Event) -> None:
    log.append(replace(event, run_id=run.run_id, parent_run_id=run.parent_run_id, agent=run.agent, ns=run.ns))


def _open_runs(events: Iterable[Event], above: Namespace) -> list[_OpenRun]:
    found: dict[str, _OpenRun] = {}
    children: dict[str, ChildStarted] = {}
    for event in events:
        if isinstance(event, ChildStarted):
            children[event.child_run_id] = event
        if not _is_below(event.ns, above):
            continue
        if isinstance(event, RunStarted):
            found[event.run_id] = _OpenRun(event, {}, children.get(event.run_id))
        elif isinstance(event, RunFinished) and event.status is not RunStatus.SUSPENDED:
            found.pop(event.run_id, None)
        elif event.run_id in found:
            _follow_call(found[event.run_id], event)
    return list(found.values())


def _is_below(ns: Namespace, above: Namespace) -> bool:
    """Whether a place is that one or deeper; the second child of a call counts as the call's."""
    last = len(above) - 1
    if last < 0:
        return True
    return len(ns) > last and ns[:last] == above[:last] and ns[last].partition("~")[0] == above[last]


def _is_under(ns: Namespace, above: Namespace) -> bool:
    """Whether a place is that of a child of a run, or deeper."""
    return len(ns) > len(above) and ns[: len(above)] == above


def _follow_call(run: _OpenRun, event: Event) -> None:
    if isinstance(event, ToolCallStarted | ToolCallReady):
        run.calls[event.call_id] = event.tool_name
    elif isinstance(event, ToolCallFinished) and event.status is not ToolCallStatus.SUSPENDED:
        run.calls.pop(event.call_id, None)
