"""Port: what can execute a run, here or elsewhere, and what each kind of backend can do."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct, field
from msgspec.structs import asdict

from .agents import Agent
from .children import Child
from .context import CancellationToken, ToolContext
from .events import Sink
from .messages import Message, Role, Visibility
from .model import Model
from .runs import Limits, RunIdentity, RunResult, Usage
from .state import PersistedState


class BackendProfile(Struct, frozen=True, kw_only=True):
    """What a backend can do. Whether it takes a state seed is not a dimension: only a local one does."""

    cancellation: Literal["none", "cooperative", "remote_abort"] = "none"
    continuation: Literal["none", "in_process", "remote"] = "none"
    decisions: Literal["none", "durable"] = "none"
    persistence: Literal["ephemeral", "stored"] = "ephemeral"
    waits: Literal["none", "input", "input_and_auth"] = "none"
    transcript: Literal["full", "user_messages", "single_prompt"] = "single_prompt"
    output: Literal["text", "text_and_artifacts"] = "text"

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

    def check(self, needs: Mapping[str, str]) -> list[str]:
        """Every need this backend does not meet, in words; empty where it meets all."""
        actual = asdict(self)
        unknown = [f"unknown capability {name!r}" for name in needs if name not in actual]
        missing = [
            f"{name}: needs {wanted!r}, has {actual[name]!r}"
            for name, wanted in needs.items()
            if name in actual and actual[name] != wanted
        ]
        return unknown + missing


class RunRequest(Struct, kw_only=True):
    """Everything a backend needs to execute one run."""

    agent: Agent
    identity: RunIdentity
    messages: tuple[Message, ...]
    """The new input."""
    seed: PersistedState = field(default_factory=PersistedState)
    limits: Limits
    cancellation: CancellationToken
    context: Mapping[str, Any] = {}
    model: str | Model | None = None
    """Instead of the agent's own."""
    sink: Sink | None = None
    """Hears this run's own events, beside the log."""
    timeout: float | None = None
    """Seconds after which the run is stopped as TIMEOUT."""
    keeps_thread: bool = False
    """Whether a child goes on with its thread as it was stored, and leaves it stored; else it starts fresh."""
    detached: bool = False
    """Whether a child outlives the call that started it: it lives by its own token, and a human may answer it."""

    def remote_messages(self) -> tuple[Message, ...]:
        """What a backend elsewhere is sent: what the user said for all to see, and nothing of the conversation else."""
        return tuple([m for m in self.messages if m.role is Role.USER and m.visibility is Visibility.ALL])


class Backend(Protocol):
    """Contract: `run` returns every terminal or waiting status as a result and raises only when the run
    could not be set up or dispatched; then no event of it exists."""

    def profile(self) -> BackendProfile: ...

    def run(self, request: RunRequest) -> Coroutine[Any, Any, RunResult]: ...

    async def abort(self, run_id: str) -> None:
        """Stop a run that this backend executes; nothing happens where there is none."""
        ...


class ExecutionPlan(Struct, frozen=True, gc=False):
    """Which agent is meant, and what executes it."""

    agent: Agent
    backend: Backend
    is_local: bool = True


class Resolver(Protocol):
    """Knows agents by name and models by what agents say of them. Errors name what is missing."""

    def agent(self, name: str) -> Agent: ...

    def model_of(self, agent: Agent, override: str | Model | None = None) -> Model: ...

    def resolve(self, agent: str | Agent) -> ExecutionPlan: ...

    background: Any
    """What tools that start background work need; see `tasks.background`."""

    prices: bool
    """Whether `price` says anything."""

    def price(self, model: str, usage: Usage) -> float | None:
        """What a model call costs; None where that is not known."""
        ...

    def refuse_child(self, ctx: ToolContext) -> tuple[str, int] | None:
        """The name and value of the limit that stands in the way of a child of this call, or None."""
        ...

    def run_child(self, ctx: ToolContext, agent: str | Agent, input: ChildInput, **options: Any) -> ChildWork:
        """Start a child of a call, with everything that goes down filled in."""
        ...

    def run_children(
        self, ctx: ToolContext, children: Sequence[Child], **options: Any
    ) -> Coroutine[Any, Any, list[RunResult]]:
        """Start several."""
        ...


ChildWork = Coroutine[Any, Any, RunResult]
ChildInput = str | Message | Iterable[Message]
