"""The state of runs. Start here to understand what a run is.

Only the fold (fold.py) changes a RunState. `next_move` says where the loop stands, for a run that is new, running or
read back from a store.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from ..core.decisions import Decision
from ..core.errors import IllegalMove
from ..core.events import Namespace
from ..core.messages import Message, Role, ToolCall
from ..core.plugins import StepAction, StopRun, TransferTo
from ..core.receipts import Receipt
from ..core.results import CALL_MOVES, SuspendTicket, ToolCallStatus
from ..core.rows import Ending, Job, StoredRequest
from ..core.rules import Rules
from ..core.runs import ENDED, NO_USAGE, REMOTE_KEY, WAITING, Grant, RunIdentity, RunStatus, Usage
from ..core.stores import LogSummary
from ..core.window import NO_WINDOW, ContextWindow
from .receipts import Tally


class _Empty(dict[Any, Any]):
    """An empty, immutable dict. Fields without entries share it, because most runs use few of their dicts."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a default of a dataclass needs one

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("make a dict of your own first")


EMPTY: dict[Any, Any] = _Empty()
NO_REQUEST = StoredRequest()
RUNNING = RunStatus.RUNNING
CALL_NEW, CALL_RUNNING, CALL_SUSPENDED = ToolCallStatus.NEW, ToolCallStatus.RUNNING, ToolCallStatus.SUSPENDED
"""Aliases, because reading a member of an enum is slow and the loop does it often."""


def _new_list() -> list[Message]:  # `list[Message]` as a factory is slow: it tries to note its type on the list
    return []


def _new_set() -> set[str]:
    return set()


_ENDED_TASKS = frozenset({"COMPLETED", "FAILED", "CANCELLED"})


class Asked(Struct, gc=False):
    """The questions that a call has asked, one after the other."""

    tickets: tuple[str, ...] = ()
    """The ids of its tickets, in order."""
    is_elsewhere: bool = False
    """A run on another server or in another log has asked: its ids were chosen there."""
    stands_in: bool = True
    """The call has only waited for the questions of its children."""


class ChildRef(Struct, gc=False):
    """A child, as recorded at the call that started it."""

    number: int
    run_id: str
    agent: str
    ns: Namespace
    asked: Any = None
    abandoned: bool = False
    """It was started by an attempt that failed."""
    is_announced: bool = True
    """Its start is in the log. Until a backend elsewhere has accepted it, only its number is reserved."""
    ended: bool = False
    """The parent has emitted its `child_finished`."""


class CallState(Struct, gc=False):
    """One call of the step in progress. Its message id is fixed at the start, so it does not depend on which call ends first."""

    call: ToolCall
    message_id: str
    status: ToolCallStatus = CALL_NEW
    entered: bool = False
    """The tool itself has started: if the process dies now, its outcome is unknown."""
    placed: str = ""
    """The run id of the call, if it is placed on another worker."""
    resumes: int = 0
    ticket: SuspendTicket | None = None
    decision: Decision | None = None
    """The decision with which it was resumed last; None if that decision was for a call of a child."""
    message: Message | None = None
    """The message for the model, once the call has ended."""
    admitted: bool = False
    """The before_tool hooks have admitted it."""
    asked_by: str | None = None
    """The hook that suspended it."""
    answered: frozenset[str] = frozenset()
    """The hooks that suspended it and were answered."""
    rules: tuple[Rules, ...] = ()
    """Permission rules for arguments that a decision changes."""
    children: dict[int, ChildRef] = EMPTY
    """The children it started, by number."""

    def move(self, wanted: ToolCallStatus) -> None:
        """Change the status; raise if the life cycle of calls does not allow it."""
        if wanted not in CALL_MOVES[self.status]:
            raise IllegalMove(f"call {self.call.id!r}", self.status, wanted)
        self.status = wanted


_LEGAL_CALL_ID = re.compile(r"(?!ticket_)[A-Za-z0-9_.+=@$#-]{1,256}")
"""Ids that cannot be confused with a path, a namespace, a child's number or a ticket."""
_HASH = 4


def with_hash(call_id: str, ns: Namespace) -> str:
    """Return a call id with the hash of a namespace, as 8 hex digits; it stays legal."""
    made = hashlib.blake2b("|".join(ns).encode(), digest_size=_HASH).hexdigest()
    return f"{call_id[: 255 - 2 * _HASH]}_{made}"


class RemoteCalls(Struct, gc=False):
    """The ids that calls of a run elsewhere, and of the runs below it, have in the log here."""

    names: dict[tuple[Namespace, str], str] = {}
    """The id here, by the namespace here and the id there."""
    used: set[tuple[Namespace, str]] = set()
    below: set[tuple[Namespace, str]] = set()
    """For each namespace the ids of the calls of all runs below it."""

    def add(self, ns: Namespace, call_id: str, name: str) -> None:
        self.names[ns, call_id] = name
        self.used.add((ns, name))
        self.below.update([(ns[:depth], name) for depth in range(len(ns))])

    def is_taken(self, ns: Namespace, name: str) -> bool:
        """Return whether a run, or one above or below it, has a call with this id."""
        return (ns, name) in self.below or any((ns[:depth], name) in self.used for depth in range(len(ns) + 1))


@dataclass(slots=True)  # not a Struct: each event sets fields, which would take twice as long
class RunState:
    """The whole state of one run. Plain data: only `fold` changes it."""

    identity: RunIdentity
    ns: Namespace
    request: StoredRequest = NO_REQUEST
    first_agent: str = ""
    handoffs: tuple[str, ...] = ()
    """The agents that took the run over, in order."""
    status: RunStatus = RunStatus.RUNNING
    leg: int = 0
    leg_from: int = 0
    """The number of the last event before its present or last leg."""
    ending: Ending | None = None
    """The ending that was decided, until the run has ended."""
    has_fatal_error: bool = False
    """The error that ends the run has been emitted."""
    output: Any = None
    messages: list[Message] = field(default_factory=_new_list)
    """The conversation, with the messages of earlier runs."""
    own_from: int = 0
    """The index of this run's first own message."""
    awaits_history: bool = False
    """The next row holds the conversation that this run continues."""
    queued: tuple[Message, ...] = ()
    """Messages that were added to it and that its model has not read."""
    added: frozenset[str] = frozenset()
    """The ids of all messages that were added to it."""
    message_count: int = 0
    """The number of message ids used so far."""
    used_call_ids: set[str] = field(default_factory=_new_set)
    """The ids of its calls, with those of the conversation that it continues."""
    call_ids_below: set[str] | frozenset[str] = frozenset()
    """The ids of the calls of all runs below it."""
    remote_calls: RemoteCalls | None = None
    """The calls of a run elsewhere."""
    window: ContextWindow = NO_WINDOW
    """What the model reads of the conversation."""
    values: dict[str, Any] = EMPTY
    """All state values by key name; as JSON where they were read from a store."""
    foreign: dict[str, Any] = EMPTY
    revision: int = 0
    step: int = 0
    step_open: bool = False
    answered: bool = False
    """The model has answered in this step."""
    is_settled: bool = False
    """The answer does not end the run (a retry or a handoff follows), and the step has no work left."""
    asked_calls: bool = False
    dropped: int = 0
    """The number of partial answers of this step that were dropped and retried."""
    drafts: dict[str, str] = EMPTY
    """The calls that the model is still streaming, with the names of their tools."""
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
    """The limit that is reached: the model gets one more turn to answer."""
    limit_step: int = 0
    limit_over: bool = False
    """The model asked for calls again after the limit was reached."""
    marks: frozenset[str] = frozenset()
    """The hook phases of this step that have committed something."""
    jobs: tuple[Job, ...] = ()
    job_count: int = 0
    output_tries: int = 0
    pending: dict[str, Decision | None] = EMPTY
    """Decisions on calls that have not been resumed yet; None if the decision is for a call of a child."""
    decided: dict[str, tuple[str, ...]] = EMPTY
    """The accepted decisions by id, each with the names by which its call could be addressed."""
    asked: dict[tuple[str, ...], Asked] = EMPTY
    """All questions that this run has ever asked, by their path from it: names must not pass from one to another."""
    addressed: dict[str, tuple[str, ...]] = EMPTY
    """The names that accepted decisions were addressed to, each with the path of the call that got its decision."""
    tickets: tuple[SuspendTicket, ...] = ()
    """The questions of a suspended run elsewhere. Decisions on them are in `pending`, by path."""
    refused: str | None = None
    """Why the server of this run, or of one below it, refused the last decision."""
    remote_seq: int = 0
    """For a run elsewhere: the number of its last event that is not a delta, there and here."""
    remote_at: int = 0
    child_counts: dict[str, int] = EMPTY
    """The number of children that each call has started."""
    children: dict[str, ChildRef] = EMPTY
    """All children, by run id."""
    stop_reason: str = ""
    """Why the model ended its last answer."""
    total: Usage = NO_USAGE
    """The usage of this run and of everything below it."""
    last_call: Usage = NO_USAGE
    """The usage of its last model call, by which the next one is estimated."""
    total_steps: int = 0
    total_children: int = 0
    tally: Tally | None = None
    """What its calls did; None until one has ended."""
    reported: Receipt | None = None
    """The receipt of a run elsewhere, which came with its end."""
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
        """Return this run's part of the conversation, with the results of ended calls in an open step."""
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
        """Return the seconds of work until now, without the time before it started and the time it was suspended."""
        is_at_work = self.leg > 0 and self.status is RunStatus.RUNNING
        return self.worked + max(0.0, now - self.since) if is_at_work else self.worked

    def note_asked(
        self, path: tuple[str, ...], ticket_id: str, *, is_elsewhere: bool = False, stands_in: bool = False
    ) -> None:
        """Note a question for good. Called by the fold only."""
        if self.asked is EMPTY:
            self.asked = {}
        asked = self.asked.setdefault(path, Asked(is_elsewhere=is_elsewhere))
        asked.stands_in = asked.stands_in and stands_in
        if ticket_id not in asked.tickets:
            asked.tickets = (*asked.tickets, ticket_id)

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
    open: dict[str, RunState] = field(default_factory=dict[str, RunState])
    """The runs that have begun and not ended, by id."""
    tasks: dict[str, TaskState] = EMPTY
    grants: dict[str, Grant] = EMPTY
    """The grants of open children on other workers and servers, by run id."""
    placed_calls: frozenset[str] = frozenset()
    """The placed calls without an outcome yet, by their run ids."""
    seq: int = 0
    sub: int = 0
    last_at: float = 0.0

    def free_call_id(self, run: RunState, wanted: str) -> str | None:
        """Return the id for a new call that the model calls `wanted`: that, or that with a hash. None if neither will do.

        Invariant: no two calls of a run, or of a run and one above or below it, have the same id. Only the owner of a log
        appends, and it checks an id and appends the first event of its call without an `await` in between. Parallel
        siblings may share ids: their namespaces differ. The name depends on the log alone, so every process makes the same.
        """
        if _LEGAL_CALL_ID.fullmatch(wanted) is None:
            return None
        if not self.is_taken(run, wanted):
            return wanted
        made = with_hash(wanted, run.ns)
        return None if self.is_taken(run, made) else made

    def is_taken(self, run: RunState, call_id: str) -> bool:
        """Return whether a run, or one above or below it, has a call with this id."""
        return call_id in run.used_call_ids or call_id in run.call_ids_below or self.is_above(run, call_id)

    def is_above(self, run: RunState, call_id: str) -> bool:
        """Return whether a run above has a call with this id."""
        above = self.parent_of(run)
        while above is not None:
            if call_id in above.used_call_ids:
                return True
            above = self.parent_of(above)
        return False

    def note_calls(self, run: RunState, call_ids: Iterable[str]) -> None:
        """Note the ids of new calls of a run. Only the fold calls this."""
        call_ids = tuple(call_ids)
        if run.used_call_ids.issuperset(call_ids):  # the model has streamed their starts
            return
        run.used_call_ids.update(call_ids)
        above = self.parent_of(run)
        while above is not None:
            if isinstance(above.call_ids_below, frozenset):
                above.call_ids_below = set()
            above.call_ids_below.update(call_ids)
            above = self.parent_of(above)

    def parent_of(self, run: RunState) -> RunState | None:
        above = run.identity.parent_run_id
        return None if above is None else self.runs.get(above)

    def children_of(self, run: RunState) -> Iterator[RunState]:
        """Return the children that have started."""
        return (self.runs[run_id] for run_id in list(run.children) if run_id in self.runs)

    def stands_in(self, call: CallState) -> bool:
        """Return whether a suspended call waits for the questions of its children, not for one of its own."""
        children = [self.runs.get(ref.run_id) for ref in call.children.values()]
        return any(child is not None and child.waits and not child.request.detached for child in children)

    def summary(self) -> LogSummary:
        """Return what lists of threads show of a log whose root has begun. It takes time for each run that is open."""
        root = next(iter(self.runs.values()))
        if not self.open and not self.tasks:
            status = "completed" if root.status in (RunStatus.COMPLETED, RunStatus.CANCELLED) else "failed"
            return LogSummary(status=status, usage=root.total)
        questions = sum(self._questions_of(run) for run in self.open.values())
        if questions or root.waits:
            status = "waiting"
        elif self.open or any(task.is_open for task in self.tasks.values()):
            status = "running"
        else:
            status = "completed" if root.status in (RunStatus.COMPLETED, RunStatus.CANCELLED) else "failed"
        children = len(self.open) - (root.run_id in self.open)
        return LogSummary(status=status, questions=questions, children=children, usage=root.total)

    def _questions_of(self, run: RunState) -> int:
        """Return how many questions a run asks."""
        if run.waits and run.tickets:  # it is elsewhere
            return len(run.tickets)
        asking = [call for call in run.calls.values() if call.status is CALL_SUSPENDED and call.ticket is not None]
        return sum(1 for call in asking if not self.stands_in(call))

    def has_open_tasks(self) -> bool:
        """Return whether background tasks are open, here or in the log of a run elsewhere that has ended."""
        return any(task.is_open for task in self.tasks.values()) or bool(self.open_rests())

    def open_rests(self) -> list[RunState]:
        """Return the runs elsewhere that have ended and still have open background tasks there."""
        return [run for run in self.runs.values() if run.is_over and run.values.get(REMOTE_KEY, EMPTY).get("open")]


Move = Literal["finish", "run_jobs", "open_step", "ask_model", "run_calls", "suspend", "close_step"]


def next_move(run: RunState) -> Move:
    """Return the next move of the loop, from the state alone."""
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


def with_ids(messages: Iterable[Message], run_id: str, count: int = 0) -> tuple[Message, ...]:
    """Return the input of a run with an id for each message that has none; `count` ids of the run are used already."""
    numbered = enumerate(messages, count + 1)
    return tuple([one if one.id else replace(one, id=f"{run_id}-m{number}") for number, one in numbered])
