"""Runs: identity, limits, usage and result."""

from __future__ import annotations

from typing import Any, Generic, cast

from msgspec import Struct
from typing_extensions import TypeVar

from .errors import ConfigurationError
from .lifecycle import RunStatus
from .messages import Message
from .results import SuspendTicket
from .state import PersistedState

Out = TypeVar("Out", covariant=True, default=Any)
"""The type of a structured answer, as `Agent(output=…)` says."""


class RunIdentity(Struct, frozen=True, gc=False):
    """The ids of a run and of its parent."""

    run_id: str
    thread_id: str
    agent: str
    parent_run_id: str | None = None
    parent_thread_id: str | None = None
    parent_tool_call_id: str | None = None
    user_id: str | None = None
    depth: int = 0

    def __post_init__(self) -> None:
        if type(self.thread_id) is not str or not (self.user_id is None or type(self.user_id) is str):
            name = "thread_id" if type(self.thread_id) is not str else "user_id"
            value: Any = getattr(self, name)
            raise ConfigurationError(f"{name} is text, not {value!r}: write {name}={str(value)!r}")


class Usage(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Usage of models; it adds up."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Of the input: read from the provider's cache, mostly cheaper."""
    cache_write_tokens: int = 0
    """Of the input: written to the provider's cache, at some providers dearer."""
    reasoning_tokens: int = 0
    """Of the output."""
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        if self is NO_USAGE:
            return other
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cost=self.cost + other.cost,
        )

    def __sub__(self, other: Usage) -> Usage:
        if other is NO_USAGE:
            return self
        return Usage(
            requests=self.requests - other.requests,
            input_tokens=self.input_tokens - other.input_tokens,
            output_tokens=self.output_tokens - other.output_tokens,
            cached_tokens=self.cached_tokens - other.cached_tokens,
            cache_write_tokens=self.cache_write_tokens - other.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens - other.reasoning_tokens,
            cost=self.cost - other.cost,
        )

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


NO_USAGE = Usage()
"""The usage of a new run: adding to it computes nothing."""


MAX_SPAWN_DEPTH = 3
"""The default limit of depth. The root is at depth 0."""


class Limits(Struct, frozen=True, kw_only=True):
    """Limits that a run and everything under it share. None is no limit."""

    depth: int = MAX_SPAWN_DEPTH
    children: int = 256
    parallel: int = 32
    steps: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value: Any = getattr(self, name)
            least = 1 if name == "parallel" else 0
            allowed = (int, float) if name in ("cost", "seconds") else int
            if value is None and name not in ("depth", "children", "parallel"):
                continue
            if isinstance(value, bool) or not isinstance(value, allowed) or value < least:
                kind = "number" if isinstance(allowed, tuple) else "whole number"
                raise ConfigurationError(f"Limits.{name} must be at least {least}, got {value!r}: give a {kind}")


DEFAULT_LIMITS = Limits()
"""The limits of an agent that sets none; compared by identity."""


class RunResult(Struct, Generic[Out], frozen=True, kw_only=True, gc=False):
    """The outcome of a run that has ended or waits."""

    status: RunStatus
    run_id: str
    thread_id: str
    response: str | None = None
    """The last text the assistant said in this run."""
    output: Out = cast("Out", None)
    """The structured answer; None if the agent has no output type, or the run did not complete."""
    steps: int = 0
    state: PersistedState
    usage: Usage = Usage()
    error: str | None = None
    termination: str = "natural"
    """natural, max_steps, limit:<name>, blocked, cancelled, suspended, timeout or error."""
    messages: tuple[Message, ...] = ()
    """The messages of this run, its input first, without the system message."""
    suspended: dict[str, SuspendTicket] = {}
    """The open tickets of a suspended run and its children: a ticket by the id of its call or, where calls of several
    children have the same, by its path: `call/call`."""
