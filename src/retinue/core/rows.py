"""The rows of a log. A row is a public event, a private part that only the runtime reads, or both.

The fold of a log's rows is the state of its runs (`log/state.py`), so a row holds whatever a run needs to continue.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from .decisions import Decision
from .events import ChildStarted, Event
from .messages import Message, ToolCall
from .plugins import Phase, RunAction, StepAction
from .results import SuspendTicket
from .rules import Rules
from .runs import Above, Grant, Limits, RunIdentity, RunStatus, Usage
from .window import ContextWindow, Cut

LoopAction = StepAction | RunAction
"""Actions that the loop carries out itself."""

RowKind = Literal["", "commit", "entered", "done", "resumed", "remote"]


class PlacedCall(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A tool call that is a run of its own, for workers of the tool's queue."""

    call: ToolCall
    run: RunIdentity
    """The run that asks for it."""
    values: dict[str, Any] = {}
    """The state that the call sees, as JSON."""
    revision: int = 0
    resume_input: Any = None
    deadline: float | None = None


class StoredRequest(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The part of a run's request that is needed to continue it."""

    limits: Limits | None = None
    """None if not set: the run then has the limits of its parent."""
    context: dict[str, Any] = {}
    model: str | None = None
    timeout: float | None = None
    keeps_thread: bool = False
    detached: bool = False
    queue: str | None = None
    """Of a placed child, in the log of its parent: the queue whose workers execute it, in a log of its own."""
    above: Above | None = None
    """Of a placed child, in its own log: the runs above it."""
    call: PlacedCall | None = None
    """Of a placed call, in its own log: the one call that the run makes for a run of another log."""
    wakes: bool = False
    """The run was started because a background task has ended."""
    problem: str | None = None
    """The reason why the run cannot be continued in another process: something could not be stored."""


class Ending(Struct, frozen=True, gc=False, omit_defaults=True):
    """The end of a run or of a leg: status and reason."""

    status: RunStatus
    termination: str
    error: str | None = None
    code: str | None = None
    """The code of the error event, if it is more precise than the termination."""


class Answer(Struct, frozen=True, gc=False):
    """A decision and the call it is on: the path of call ids from the root, and the names it can be answered by."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    decision: Decision
    target: str = ""
    """The name by which the decision addressed the call."""


class Job(Struct, frozen=True, gc=False, omit_defaults=True):
    """An action or effect that a plugin's handler carries out after the commit that asked for it."""

    number: int
    what: Literal["action", "effect"]
    name: str
    """The type, as `module:class`."""
    given: Any
    """The action or effect itself; as JSON where it was read from a store."""
    phase: Phase
    rounds: int = 0
    """The number of actions that led to it, one scheduling the next."""


class Private(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """The private part of a row. Which fields are set depends on the event, or on `kind` where there is none."""

    kind: RowKind = ""
    """The kind of a row without an event: a commit of hooks, a tool that starts, a job that is done, a new owner, an
    event of a remote log that is not copied here."""
    run_id: str = ""
    at: float = 0.0
    identity: RunIdentity | None = None
    request: StoredRequest | None = None
    values: dict[str, Any] = {}
    """The state a run begins with."""
    foreign: dict[str, Any] = {}
    """Thread state under keys that the run does not know, kept unchanged."""
    answers: tuple[Answer, ...] = ()
    """The decisions with which a run continues."""
    writes: dict[str, Any] = {}
    """The new values of all keys that a commit wrote; as JSON where they were read from a store."""
    revision: int = 0
    actions: tuple[LoopAction, ...] = ()
    jobs: tuple[Job, ...] = ()
    done: int = 0
    """The number of the job that is done."""
    phase: Phase | None = None
    """The hook phase that this commit completes."""
    call_id: str = ""
    placed: str = ""
    """Of a tool that starts: the run id of the placed call that another worker makes."""
    hooked: bool = False
    """True if hooks run before the tool of a ready call: a row `entered` marks the start of the tool."""
    offered: tuple[str, ...] | None = None
    """The tools that the model was offered, if not all."""
    blocked: str | None = None
    """Why a hook wants the run to end."""
    limit: str | None = None
    """The limit that was reached: calls were refused, or the model must answer now."""
    admitted: bool = False
    """The before_tool hooks have admitted the call."""
    asked_by: str | None = None
    """The hook that suspended the call."""
    rules: tuple[Rules, ...] = ()
    """Permission rules for arguments that a decision on the suspended call changes."""
    message: Message | None = None
    """A message that joins the conversation."""
    messages: tuple[Message, ...] = ()
    """Messages that join the conversation as the run ends."""
    usage: Usage | None = None
    """The usage of a run elsewhere, with its end: no other event of the run has it."""
    refused_handoff: bool = False
    """The target of a handoff cannot continue the run."""
    output_tried: bool = False
    """The answer did not fit the output type."""
    ending: Ending | None = None
    """The ending of the run, in the first row that belongs to it."""
    asked: Any = None
    """The agent, messages and seed of a child: they tell the children of a call apart."""
    child: ChildStarted | None = None
    """A child that starts after its parent has ended, or whose number is reserved."""
    reserved: bool = False
    """The child is only reserved: a backend elsewhere has not accepted it yet."""
    abandoned: bool = False
    """The children of the call belong to a failed attempt: later attempts do not find them."""
    detached: bool = False
    """From now on the run outlives the call that started it."""
    remote: int = 0
    """The number of this event in the log of a run elsewhere, which `run_id` stands for. The fold notes only that."""
    renamed: dict[str, str] = {}
    """Of an event of a run elsewhere: the ids that its new calls have here, by their id there, where they differ."""
    tickets: tuple[SuspendTicket, ...] = ()
    """The questions of a run elsewhere, with its end: each has its path from that run."""
    grants: dict[str, Grant | None] = {}
    """The new grants of placed children, by run id; None for a child that was not placed after all."""
    granted: Limits | None = None
    """The new grant of a placed run, in its own log."""
    window: ContextWindow | None = None
    """What earlier runs of the thread have cut from what the model reads."""
    cut: Cut | None = None
    """What a compaction has cut."""
    estimate: int = 0
    """The estimated tokens of the request that was answered."""
    prefix: tuple[str, ...] = ()
    """The parts of the prefix of a request, where they have changed."""


class LogRow(Struct, frozen=True, gc=False):
    """One row of a log. A row without an event has the `seq` of the event before it, and `sub` counts from 1."""

    seq: int
    sub: int
    event: Event | None
    private: Private | None = None
    history: tuple[str, int] | None = None
    """Of a `messages_snapshot` that is written: a thread whose first messages, so many, it begins with. The store has them,
    and need not store them again. No row that is read has it."""
