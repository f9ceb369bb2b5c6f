"""The shapes of what the HTTP interface returns, for its description. `resources.py` and `snapshot.py` make them."""

from __future__ import annotations

from typing import Any, Generic, TypedDict, TypeVar

from ..core.events import AnyEvent
from ..core.messages import Message
from ..core.receipts import Receipt
from ..core.results import SuspendTicket, ToolCallStatus
from ..core.runs import RunStatus, Usage

T = TypeVar("T")


class Items(TypedDict, Generic[T]):
    """A page of a list."""

    items: list[T]
    next_cursor: str | None


class EventPage(TypedDict):
    """Stored events, as a stream sends them."""

    items: list[AnyEvent]
    next_cursor: str | None
    """The `after` of the next page; of a page that was asked for by `before` alone, the `before` of the one before it."""
    last_seq: int
    """The number of the last stored event of the log."""


class ToolShape(TypedDict):
    name: str
    description: str


class AgentShape(TypedDict):
    name: str
    description: str
    model: str | None
    tools: list[ToolShape]
    subagents: list[str]
    handoffs: list[str]
    max_steps: int
    served: bool
    """False for a sub-agent that is only known because another agent names it."""


class PartShape(TypedDict):
    """A part of a stream, in the shape of LangGraph's."""

    type: str
    ns: list[str]
    data: Any


class RunState(TypedDict):
    """A run by its id, and how it stands."""

    run_id: str
    thread_id: str
    status: str


class RunShape(RunState):
    log_id: str
    """The log that has its events: its own id, or for a background child that of its root run."""
    orphaned: bool
    lost: int
    """How often a process died that worked on it, since it last made progress."""
    agent: str
    user_id: str | None
    parent_run_id: str | None
    started_at: str | None
    ended_at: str | None
    steps: int | None
    usage: Usage | None
    response: str | None
    error: str | None
    termination: str | None
    waits_for: dict[str, Any]


class OneRun(RunShape):
    cost_known: bool
    """False if the price of some of its model calls is not known: they count as 0."""
    can_fork: list[str]
    """The messages of the run at which it can be forked, by id: what its user said, and answers after which nothing worked."""
    input: list[MessageShape]
    """What a run that has not begun is to do; empty once it has."""


class MessageShape(TypedDict):
    id: str | None
    role: str
    text: str
    parts: list[Any]
    tool_calls: list[Any]
    tool_call_id: str | None
    name: str | None


class ResultShape(RunState):
    """The outcome of a run that has ended or waits."""

    response: str | None
    output: Any
    steps: int
    state: dict[str, Any]
    usage: Usage
    error: str | None
    termination: str
    messages: list[MessageShape]
    suspended: dict[str, Any]
    receipt: Receipt | None


class WaitShape(TypedDict):
    """The wait of a run for its model provider."""

    reason: str
    message: str
    until: str
    position: int | None


class NodeShape(TypedDict):
    """A run of a tree."""

    run_id: str
    agent: str
    ns: list[str]
    thread_id: str
    task: str
    model: str
    status: RunStatus
    termination: str
    error: str | None
    response: str | None
    tail: str
    """The end of its text."""
    notes: list[str]
    wait: WaitShape | None
    started_at: str | None
    ended_at: str | None
    steps: int
    usage: Usage
    total_usage: Usage
    children: int
    receipt: Receipt | None
    """What it and the runs below it did, once it has ended or waits."""


class OpenMessageShape(TypedDict):
    """What is there of an answer in progress; of its calls the JSON text of the arguments, by call id."""

    id: str
    text: str
    reasoning: str
    calls: dict[str, str]


class CallShape(TypedDict):
    """A call of a run in a snapshot, with the runs that it started."""

    call_id: str
    tool: str
    status: ToolCallStatus
    step: int
    args: dict[str, Any]
    result: str | None
    output: str
    error: str | None
    is_task: bool
    started_at: str | None
    ended_at: str | None
    ticket: SuspendTicket | None
    starting: list[str]
    children: list[TreeShape]


class TreeShape(NodeShape):
    """A run of a snapshot, with its calls and messages."""

    calls: list[CallShape]
    messages: list[Message]
    queued: list[Message]
    open_message: OpenMessageShape | None


class ChildShape(NodeShape):
    call_id: str
    parent_run_id: str


class QuestionShape(TypedDict):
    call_id: str
    path: str
    run_id: str
    answer_to: str
    agent: str
    ns: list[str]
    tool: str
    args: dict[str, Any]
    ticket: SuspendTicket
    asked_at: str | None


class TaskShape(TypedDict):
    task_id: str
    agent: str
    run_id: str
    """The run whose call started the task."""
    call_id: str | None
    child_run_id: str | None
    """The run that does the work."""
    status: str
    awaiting: str | None
    """The first question that it waits for."""
    started_at: str | None
    updated_at: str | None


class ListedTask(TaskShape):
    log_id: str
    thread_id: str


class AmountShape(TypedDict):
    cost: float
    tokens: int


class BudgetShape(TypedDict):
    """A budget in its present window."""

    budget: str
    """`<per>/<window>`."""
    key: str | None
    """The user or the agent; null for those who have spent nothing."""
    cost: float | None
    """The limit in dollars, where there is one."""
    tokens: int | None
    spent: AmountShape
    held: AmountShape
    """What calls in flight and closing turns hold."""
    renews_at: str


class FileShape(TypedDict):
    path: str
    is_dir: bool
    size: int


class WrittenFile(TypedDict):
    path: str
    size: int


class SnapshotShape(TypedDict):
    seq: int
    run: TreeShape | None
    questions: list[QuestionShape]
    tasks: list[TaskShape]
    status: str


class NewThread(TypedDict):
    thread_id: str
    user_id: str


class ThreadShape(TypedDict):
    thread_id: str
    user_id: str | None
    used_at: str | None
    title: str
    status: str
    questions: int
    """The open questions at any depth."""
    children: int
    """The runs below the root runs that have not ended."""
    usage: Usage


class OneThread(ThreadShape):
    run: RunShape | None
    """Its newest run."""


class ThreadState(TypedDict):
    thread_id: str
    run_id: str | None
    """The run that left the values; None if there is none."""
    revision: int
    """It grows with each commit of the run."""
    values: dict[str, Any]


class UserShape(TypedDict):
    user_id: str
    scopes: list[str]
