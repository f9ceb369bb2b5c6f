"""The rows of a log. A row is a public event, a private part that only the runtime reads, or both.

The fold of a log's rows is the state of its runs (`loop/state.py`), so a row holds whatever a run needs to continue.
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
    """The call that the run consists of, which a run of another log has asked for."""
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
    """Of a row without an event: a commit of hooks, a tool that starts, a job that is done, a new owner, an
    event of a remote log that is not repeated here."""
    run_id: str = ""
    at: float = 0.0
    identity: RunIdentity | None = None
    request: StoredRequest | None = None
    values: dict[str, Any] = {}
    """The state a run begins with."""
    foreign: dict[str, Any] = {}
    """Thread state for which the run has no key, kept as it is."""
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
    """Of a tool that starts: the id of the run that the call is, which another worker executes."""
    hooked: bool = False
    """True if hooks run before the tool of a ready call: a row `entered` marks the start of the tool."""
    offered: tuple[str, ...] | None = None
    """The tools that the model was offered, where not all."""
    blocked: str | None = None
    """Why a hook wants the run to end."""
    limit: str | None = None
    """The limit that was reached: calls were refused, or the model must answer now."""
    admitted: bool = False
    """The hooks before the tool have let the call pass."""
    asked_by: str | None = None
    """The hook that suspended the call."""
    rules: tuple[Rules, ...] = ()
    """Rules for new arguments that a decision on the suspended call gives it."""
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
    """A child that begins when its parent has ended, or whose place is reserved."""
    reserved: bool = False
    """The child is not announced yet: a backend elsewhere has still to accept it."""
    abandoned: bool = False
    """The children of the call belong to an attempt that failed: a later one does not find them."""
    detached: bool = False
    """The run outlives the call that started it from now on."""
    remote: int = 0
    """The number of this event in the log of a run elsewhere, which `run_id` stands for. The fold notes only that."""
    tickets: tuple[SuspendTicket, ...] = ()
    """The questions of a run elsewhere, with its end: each has its path from that run."""
    grants: dict[str, Grant | None] = {}
    """What placed children may use from now on, by run id; None for one that was not placed after all."""
    granted: Limits | None = None
    """What a placed run may use from now on, in its own log."""


class LogRow(Struct, frozen=True, gc=False):
    """One row of a log. A row without an event has the `seq` of the event before it, and `sub` counts from 1."""

    seq: int
    sub: int
    event: Event | None
    private: Private | None = None
