"""The state of runs. Start here to understand what a run is.

Only the fold (fold.py) changes a RunState. `next_move` says where the loop stands, for a run that is new, running or
read back from a store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct

from ..core.decisions import Decision
from ..core.errors import IllegalMove
from ..core.events import Namespace
from ..core.messages import Message, Role, ToolCall
from ..core.plugins import StepAction, StopRun, TransferTo, UseSummary
from ..core.results import CALL_MOVES, SuspendTicket, ToolCallStatus
from ..core.rows import Ending, Job, StoredRequest
from ..core.rules import Rules
from ..core.runs import ENDED, NO_USAGE, REMOTE_KEY, WAITING, Grant, RunIdentity, RunStatus, Usage


class _Empty(dict[Any, Any]):
    """A dict that stays empty. All that have no entries share one: most runs need few of their dicts."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a default of a dataclass needs one

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("make a dict of your own first")


EMPTY: dict[Any, Any] = _Empty()
NO_REQUEST = StoredRequest()
RUNNING = RunStatus.RUNNING
CALL_NEW, CALL_RUNNING, CALL_SUSPENDED = ToolCallStatus.NEW, ToolCallStatus.RUNNING, ToolCallStatus.SUSPENDED
"""Names of their own, because reading a member of an enum is slow and the loop does it often."""


def _new_list() -> list[Message]:  # `list[Message]` as a factory is slow: it tries to note its type on the list
    return []


def _new_set() -> set[str]:
    return set()


_ENDED_TASKS = frozenset({"COMPLETED", "FAILED", "CANCELLED"})


class ChildRef(Struct, gc=False):
    """A child as the call that started it knows it."""

    number: int
    run_id: str
    agent: str
    ns: Namespace
    asked: Any = None
    abandoned: bool = False
    """It belongs to an attempt that failed."""
    is_announced: bool = True
    """It was announced; else only its place is reserved, before a backend elsewhere has accepted it."""
    ended: bool = False
    """The parent has emitted its `child_finished`."""


class CallState(Struct, gc=False):
    """One call of the step in progress. Its message has an id from the start, so ids do not depend on who is first."""

    call: ToolCall
    message_id: str
    status: ToolCallStatus = CALL_NEW
    entered: bool = False
    """The tool itself has started: its outcome is unknown if the process ends now."""
    placed: str = ""
    """The id of the run that it is, if another worker executes it."""
    resumes: int = 0
    ticket: SuspendTicket | None = None
    decision: Decision | None = None
    """The decision with which it was resumed last; None where the decision was on a call of a child."""
    message: Message | None = None
    """The message for the model, once the call has ended."""
    admitted: bool = False
    """The hooks before the tool have let it pass."""
    asked_by: str | None = None
    """The hook that suspended it."""
    answered: frozenset[str] = frozenset()
    """The hooks that suspended it and have their answer."""
    rules: tuple[Rules, ...] = ()
    """Rules for new arguments that a decision gives it."""
    children: dict[int, ChildRef] = EMPTY
    """The children it started, by number."""

    def move(self, wanted: ToolCallStatus) -> None:
        """Change the status, where the life cycle of calls allows it."""
        if wanted not in CALL_MOVES[self.status]:
            raise IllegalMove(f"call {self.call.id!r}", self.status, wanted)
        self.status = wanted


@dataclass(slots=True)  # not a Struct: setting its fields, as each event does, would take twice as long
class RunState:
    """Everything there is to know of one run. Plain data: only `fold` changes it."""

    identity: RunIdentity
    ns: Namespace
    request: StoredRequest = NO_REQUEST
    first_agent: str = ""
    handoffs: tuple[str, ...] = ()
    """The agents that took the run over, in order."""
    status: RunStatus = RunStatus.RUNNING
    leg: int = 0
    ending: Ending | None = None
    """The ending that was decided on, until the run has ended."""
    has_fatal_error: bool = False
    """The error that ends the run has been emitted."""
    output: Any = None
    messages: list[Message] = field(default_factory=_new_list)
    """The conversation, with what was said before this run."""
    own_from: int = 0
    """The place of this run's first own message."""
    awaits_history: bool = False
    """The conversation that it continues is in the next row."""
    message_count: int = 0
    """The number of message ids used so far."""
    used_call_ids: set[str] = field(default_factory=_new_set)
    compacted: UseSummary | None = None
    values: dict[str, Any] = EMPTY
    """All state values by key name; as JSON where they were read from a store."""
    foreign: dict[str, Any] = EMPTY
    revision: int = 0
    step: int = 0
    step_open: bool = False
    answered: bool = False
    """The model has answered in this step."""
    is_settled: bool = False
    """The answer is not the end of the run, and nothing is left to do in this step."""
    asked_calls: bool = False
    dropped: int = 0
    """The number of answers of this step that were dropped and begun anew."""
    drafts: dict[str, str] = EMPTY
    """The calls that the model is asking for, with the names of their tools."""
    calls: dict[str, CallState] = EMPTY
    """The calls of this step until all have ended."""
    open_calls: int = 0
    step_values: dict[str, Any] | None = None
    """The state that the calls of this step see."""
    step_revision: int = 0
    writers: dict[str, str] = EMPTY
    """The call of this step that wrote a key, by key name."""
    offered: tuple[str, ...] | None = None
    step_actions: tuple[StepAction, ...] = ()
    """Actions of hooks for the next request."""
    next_agent: TransferTo | None = None
    stopping: StopRun | None = None
    blocked: str | None = None
    limit: str | None = None
    """The limit that was reached: the model gets one more turn to answer."""
    limit_step: int = 0
    limit_over: bool = False
    """The model asked for calls again after the limit was reached."""
    marks: frozenset[str] = frozenset()
    """The hook phases of this step that have committed something."""
    jobs: tuple[Job, ...] = ()
    job_count: int = 0
    output_tries: int = 0
    pending: dict[str, Decision | None] = EMPTY
    """Decisions on calls that have not been resumed yet; None where the decision is on a call of a child."""
    decided: dict[str, tuple[str, ...]] = EMPTY
    """The decisions that were accepted: what each could be named by, by its id."""
    tickets: tuple[SuspendTicket, ...] = ()
    """The questions of a run elsewhere that waits. Decisions on them are in `pending`, by path."""
    refused: str | None = None
    """The reason for which a server, of this run or of one below it, did not take the last decision."""
    remote_seq: int = 0
    """The number of the last event of its log elsewhere that is no delta, and the number it has here."""
    remote_at: int = 0
    child_counts: dict[str, int] = EMPTY
    """The number of children that each call has started."""
    children: dict[str, ChildRef] = EMPTY
    """All children, by run id."""
    stop_reason: str = ""
    """The reason for which the model ended its last answer."""
    total: Usage = NO_USAGE
    """The usage of this run and of everything below it."""
    last_call: Usage = NO_USAGE
    """The usage of its last model call, by which the next one is estimated."""
    total_steps: int = 0
    total_children: int = 0
    worked: float = 0.0
    """Seconds of work in earlier legs and processes."""
    since: float = 0.0
    """The time at which the present leg began."""

    @property
    def run_id(self) -> str:
        return self.identity.run_id

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    @property
    def waits(self) -> bool:
        return self.status in WAITING

    def own_messages(self) -> tuple[Message, ...]:
        """This run's part of the conversation, with the results of calls that have ended in a step that has not."""
        own = self.messages[self.own_from :]
        if self.calls:
            own += [call.message for call in self.calls.values() if call.message is not None]
        return tuple(own)

    def response(self) -> str | None:
        """The last text the assistant said in this run."""
        messages = self.messages
        for place in range(len(messages) - 1, self.own_from - 1, -1):
            message = messages[place]
            if message.role is Role.ASSISTANT and (text := message.text):
                return text
        return None

    def elapsed(self, now: float) -> float:
        """Seconds of work until now; the time a human took does not count."""
        return self.worked + max(0.0, now - self.since) if self.status is RunStatus.RUNNING else self.worked

    def open(self) -> Iterator[CallState]:
        """The calls that have not ended, in call order."""
        return (call for call in list(self.calls.values()) if call.message is None)


class TaskState(Struct, gc=False):
    """A background task under a log."""

    run_id: str
    """The run whose call started it."""
    call_id: str
    status: str

    @property
    def is_open(self) -> bool:
        return self.status.upper() not in _ENDED_TASKS


@dataclass(slots=True)
class LogState:
    """The fold of a log: its runs and tasks."""

    runs: dict[str, RunState] = field(default_factory=dict[str, RunState])
    tasks: dict[str, TaskState] = EMPTY
    grants: dict[str, Grant] = EMPTY
    """What the children on other workers and servers may use that have not ended, by run id."""
    placed_calls: frozenset[str] = frozenset()
    """The placed calls whose outcome has not come, by the ids they have as runs."""
    seq: int = 0
    sub: int = 0
    last_at: float = 0.0

    def parent_of(self, run: RunState) -> RunState | None:
        above = run.identity.parent_run_id
        return None if above is None else self.runs.get(above)

    def children_of(self, run: RunState) -> Iterator[RunState]:
        """The children that have begun."""
        return (self.runs[run_id] for run_id in list(run.children) if run_id in self.runs)

    def has_open_tasks(self) -> bool:
        """Return whether background tasks are at work, here or left elsewhere by a run that has ended there."""
        return any(task.is_open for task in self.tasks.values()) or bool(self.open_rests())

    def open_rests(self) -> list[RunState]:
        """Return the runs elsewhere that have ended and have background tasks at work there."""
        return [run for run in self.runs.values() if run.is_over and run.values.get(REMOTE_KEY, EMPTY).get("open")]


Move = Literal["finish", "run_jobs", "open_step", "ask_model", "run_calls", "suspend", "close_step"]


def next_move(run: RunState) -> Move:
    """Return what the loop does next."""
    if run.ending is not None:
        return "finish"
    if run.jobs:
        return "run_jobs"
    if run.open_calls:
        for call in run.calls.values():
            if is_runnable(run, call):
                return "run_calls" if run.step_open else "open_step"
        if run.blocked is None:
            return "suspend"
    if not run.step_open:
        return "open_step"
    return "close_step" if run.answered else "ask_model"


def is_runnable(run: RunState, call: CallState) -> bool:
    """Return whether a call has work to do: it is new, was in progress, or has its decision."""
    return call.message is None and (call.status is not CALL_SUSPENDED or call.call.id in run.pending)


def message_id(run: RunState, number: int) -> str:
    return f"{run.identity.run_id}-m{number}"
