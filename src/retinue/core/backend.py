"""Port: backends, which execute runs here or elsewhere, and their capabilities."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args, get_type_hints

from msgspec import Struct, field

from .agents import Agent
from .budgets import Budgets
from .concurrency import CancellationToken
from .context import ToolContext
from .decisions import Decision
from .errors import ConfigurationError
from .events import Event, Sink
from .gate import Gates
from .messages import Message, Role, ToolCall, Visibility
from .model import Model
from .rows import PlacedCall
from .runs import Above, Child, Limits, RunIdentity, RunResult, Usage
from .state import PersistedState
from .tools import Tool


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendProfile:
    """The capabilities of a backend, each with its lowest level first. Only a local one takes a state seed.

    The runtime believes a profile: it refuses a request that needs more before it is dispatched, and it fails a run that
    waits though its profile says that it cannot wait or be answered. `dataclasses.replace` changes a profile."""

    cancellation: Literal["none", "cooperative", "remote_abort"] = "none"
    """How a run is stopped. With "none" the runtime stops waiting at once, and says that the run may go on."""
    continuation: Literal["none", "in_process", "remote"] = "none"
    """Where a conversation (`thread_id`) is kept for a second run."""
    decisions: Literal["none", "durable"] = "none"
    """How a run that waits is answered."""
    persistence: Literal["ephemeral", "stored"] = "ephemeral"
    """How long a run lives: with this process, or longer. A background task of a stored log needs "stored"."""
    waits: Literal["none", "input", "input_and_auth"] = "none"
    """The things that a run may wait for: answers, or answers and credentials."""
    transcript: Literal["single_prompt", "user_messages", "full"] = "single_prompt"
    """The messages that a run may begin with."""
    output: Literal["text", "text_and_artifacts"] = "text"
    """The form of an answer. The output type of an agent needs "text_and_artifacts"."""

    @classmethod
    def full_local(cls) -> BackendProfile:
        """A run in this process."""
        return cls(
            cancellation="cooperative",
            continuation="in_process",
            decisions="durable",
            persistence="stored",
            waits="input_and_auth",
            transcript="full",
            output="text_and_artifacts",
        )

    @classmethod
    def remote_stateless_text(cls) -> BackendProfile:
        """The least a remote can do: text in, text out."""
        return cls()

    def __post_init__(self) -> None:
        for name, level in asdict(self).items():
            if level not in _LEVELS[name]:
                raise ConfigurationError(f"BackendProfile({name}={level!r}): it is one of {', '.join(_LEVELS[name])}")

    def check(self, needs: Mapping[str, str]) -> list[str]:
        """Return a sentence for each need that this backend does not meet; a higher level than needed is enough."""
        actual = asdict(self)
        problems = [f"unknown capability {name!r}" for name in needs if name not in _LEVELS]
        for name, wanted in needs.items():
            levels = _LEVELS.get(name, ())
            if levels and wanted not in levels:
                problems.append(f"{name}: {wanted!r} is not one of {', '.join(levels)}")
            elif levels and levels.index(actual[name]) < levels.index(wanted):
                problems.append(f"{name}: needs {wanted!r}, has {actual[name]!r}")
        return problems


_LEVELS: Mapping[str, tuple[str, ...]] = {name: get_args(hint) for name, hint in get_type_hints(BackendProfile).items()}


class RunRequest(Struct, kw_only=True):
    """Everything a backend needs to execute one run."""

    agent: Agent
    identity: RunIdentity
    messages: tuple[Message, ...]
    """The new input."""
    seed: PersistedState = field(default_factory=PersistedState)
    limits: Limits | None = None
    """None if not set. For a backend elsewhere: also within what the limits above still allow."""
    cancellation: CancellationToken
    context: Mapping[str, Any] = {}
    model: str | Model | None = None
    """Instead of the agent's own."""
    override: str | Model | None = None
    """Replaces every model of this run and of everything below it, for tests; not stored."""
    sink: Sink | None = None
    """Receives this run's own events, beside the log."""
    timeout: float | None = None
    """Seconds after which the run is stopped as TIMEOUT."""
    keeps_thread: bool = False
    """True if a child continues its stored thread and stores it again; otherwise it starts fresh."""
    digest: str = ""
    """Of a root run: a digest of the caller's request, to detect the reuse of an id for another request."""
    detached: bool = False
    """True if a child outlives the call that started it: it has its own token, and a human may answer it."""
    wakes: bool = False
    """True for a root run without input, which is started because a background task has ended."""
    queue: str | None = None
    """Of a placed child: the queue whose workers execute it."""
    call: PlacedCall | None = None
    """Of a placed tool call: the call that the run consists of."""
    above: Above | None = None
    """Of a placed run, where it is executed: the runs above it, which are in another log."""

    accepted: Callable[[], None] | None = None
    """For a backend elsewhere: called once the run was dispatched. `run` raises only before that."""
    emit: Callable[[Event], None] | None = None
    """For a backend elsewhere: appends an event of this run to its log, from the event loop. Only text and reasoning
    deltas, activities and `custom` are allowed. After the end it does nothing."""
    is_dispatched: bool = False
    """For a backend elsewhere: the run was accepted before, perhaps by another process. Wait for its result only."""
    may_be_sent: bool = False
    """For a backend elsewhere: an earlier process stored the id of the run, and may have sent it. Check whether the server
    has it; if that is not possible, send it under the same id."""
    emit_remote: Callable[[Event], None] | None = None
    """For a backend elsewhere that can read the log of the run there: appends an event of that log, of the run itself or
    of one below it. Its number, run ids and namespace are translated. Call it in the order of the events."""
    seen: int = 0
    """The number of the last event passed to `emit_remote`, also by an earlier process."""
    streamed: str = ""
    """For a backend elsewhere: the joined text deltas of this run that the log already has."""
    remote: Mapping[str, Any] = {}
    """For a backend elsewhere: the ids that it last stored with `note_remote`; for a new run, those of its conversation."""
    note_remote: Callable[[Mapping[str, Any]], None] | None = None
    """For a backend elsewhere: stores the ids that an accepted run has there, as the state key `retinue.remote`. The
    process that continues the run gets them as `remote`; the next run of the conversation gets `context_id`."""
    decisions: Mapping[str, Decision] = {}
    """For a backend elsewhere: decisions on the tickets of its last result, by path (`call/call`). The same decision may
    come again."""

    def remote_messages(self) -> tuple[Message, ...]:
        """The messages for a backend elsewhere: visible user messages, and nothing else of the conversation."""
        return tuple([m for m in self.messages if m.role is Role.USER and m.visibility is Visibility.ALL])


class Backend(Protocol):
    """Contract of a backend, which `retinue.testing.BackendSuite` checks.

    `run` returns every terminal or waiting status as a result. It raises ExecutionBackendError only if the run could not
    be set up or dispatched; then no event of it exists. It sends `remote_messages` and nothing else of the conversation,
    unless its transcript is "full".
    When the request's token is set, it stops the run and returns after the end. When the coroutine itself is cancelled,
    the run continues: another process may wait for it with `is_dispatched`.
    """

    def profile(self) -> BackendProfile: ...

    def run(self, request: RunRequest) -> Coroutine[Any, Any, RunResult]: ...

    async def abort(self, run_id: str) -> None:
        """Stop a run that this backend executes; do nothing if there is none."""
        ...


class ExecutionPlan(Struct, frozen=True, gc=False):
    """An agent, and the backend that executes it."""

    agent: Agent
    backend: Backend
    is_local: bool = True


RunChildAgent = Callable[..., Coroutine[Any, Any, RunResult[Any]]]
"""`subagents.child.run_child_agent`, which core cannot import."""


class Resolver(Protocol):
    """Finds agents by name and the models of agents. Errors name what is missing."""

    def agent(self, name: str) -> Agent: ...

    def model_of(self, agent: Agent, override: str | Model | None = None) -> Model: ...

    def resolve(self, agent: str | Agent) -> ExecutionPlan: ...

    def is_elsewhere(self, agent: Agent, parent_run_id: str, run_id: str) -> bool:
        """Return whether a child is, or would be, executed by another backend than the local one."""
        ...

    overrides: list[str | Model]
    """The models of `Runtime.override` that are in force, the innermost last."""

    def place_call(self, run: Any, tool: Tool, state: Any, call: ToolCall, resume_input: Any) -> Any:
        """Return a coroutine that has another worker make a call of an execution (`run`), and returns its `CallOutcome`;
        None if the call is to be made here."""
        ...

    async def stop_waiting(self, tree: Any, reason: str, runs: Iterable[Any] | None = None) -> None:
        """Ask the backends of suspended runs elsewhere to stop them: these runs of a log, or all."""
        ...

    def check_subagents(self, agent: Agent) -> None:
        """Raise ConfigurationError if an agent below this one names a model that cannot be used."""
        ...

    background: Any
    """The `LocalBackground` of the runtime, for tools that start background work."""

    @property
    def gates(self) -> Gates:
        """The gates of the runtime, which its model calls pass."""
        ...

    prices: bool
    """True if `price` knows any price."""

    budgets: Budgets
    """The budgets that model calls are charged to."""

    def price(self, model: str, usage: Usage) -> float | None:
        """Return the cost of a model call; None if it is not known."""
        ...

    def context_window(self, model: Model, used: float = 0) -> int:
        """Return the tokens that a model can read, or a careful guess, which is logged once half of it is `used`."""
        ...

    async def refuse_child(self, ctx: ToolContext) -> tuple[str, int] | None:
        """Return the name and value of the limit that forbids a child of this call, or None."""
        ...

    @property
    def run_child_agent(self) -> RunChildAgent: ...

    def run_children(
        self, ctx: ToolContext, children: Sequence[Child], **options: Any
    ) -> Coroutine[Any, Any, list[RunResult]]:
        """Start several child runs."""
        ...


ChildInput = str | Message | Iterable[Message]
