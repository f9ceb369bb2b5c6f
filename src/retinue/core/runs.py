"""Runs: ids, life cycle, identity, lineage, limits, usage and result."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import StrEnum
from math import isfinite
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, Generic, cast

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import force_setattr, replace
from typing_extensions import TypeVar

from .content import MAX_ID_BYTES, id_problem
from .errors import ConfigurationError, RunNotCompleted
from .messages import Message
from .receipts import Receipt
from .results import SuspendTicket
from .state import PersistedState

if TYPE_CHECKING:
    from .context import ToolContext


_BYTES = 10
_ready: list[str] = []
"""Made in bulk, because one call of the system costs as much as a short tool call."""

if sys.platform != "win32":
    os.register_at_fork(after_in_child=_ready.clear)  # or two processes would use the same ids


def unique() -> str:
    """Return twenty hexadecimal digits that are unique and cannot be guessed."""
    while True:
        try:
            return _ready.pop()
        except IndexError:  # also where another thread took the last one
            digits = os.urandom(_BYTES * 128).hex()
            _ready.extend([digits[place : place + 2 * _BYTES] for place in range(0, len(digits), 2 * _BYTES)])


class RunStatus(StrEnum):
    """The status of a run."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    SUSPENDED = "suspended"
    """A call of it waits for a human: `RunResult.suspended` has the tickets."""
    WAITING_INPUT = "waiting_input"
    """A child on another server waits for an answer to its question."""
    WAITING_AUTH = "waiting_auth"
    """A child on another server waits for credentials."""

    @property
    def is_terminal(self) -> bool:
        return self in ENDED

    @property
    def is_waiting(self) -> bool:
        """True while the run waits for a human."""
        return self in WAITING


WAITING = (RunStatus.SUSPENDED, RunStatus.WAITING_INPUT, RunStatus.WAITING_AUTH)
ENDED = frozenset({RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.TIMEOUT})

RUN_MOVES: Mapping[RunStatus, frozenset[RunStatus]] = {
    RunStatus.RUNNING: ENDED.union(WAITING),
    **dict.fromkeys(WAITING, frozenset({RunStatus.RUNNING, RunStatus.CANCELLED, RunStatus.FAILED})),
    **dict.fromkeys(ENDED, frozenset[RunStatus]()),
}

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
        thread_id, user_id = self.thread_id, self.user_id
        if user_id is None and type(thread_id) is str and thread_id.isascii() and thread_id.isprintable():
            if len(thread_id) <= MAX_ID_BYTES:
                return  # as most are
        if type(thread_id) is not str or not (user_id is None or type(user_id) is str):
            name = "thread_id" if type(self.thread_id) is not str else "user_id"
            value: Any = getattr(self, name)
            raise ConfigurationError(f"{name} is text, not {short_repr(value)}: write {name}={short_repr(value)!r}")
        for name, value in (("thread_id", self.thread_id), ("user_id", self.user_id or "")):
            if (problem := id_problem(value)) is not None:
                raise ConfigurationError(f"{name} cannot be used: {problem}: {value!r:.60}")


def check_ids(thread_id: str | None, user_id: str | None) -> None:
    """Raise ConfigurationError for an empty id: often a variable that is not set, and never meant as a new thread or nobody."""
    for name, value in (("thread_id", thread_id), ("user_id", user_id)):
        if value == "":
            raise ConfigurationError(f"{name} is empty: give an id, or leave it out")


class ParentContext(Struct, frozen=True, kw_only=True, gc=False):
    """The lineage of a child. A run without it is the root of its own log, which the runtime stores, continues and answers like
    any other; with an engine it is not stored. The limits, permissions and usage of the run that starts it do not include it."""

    parent_run_id: str | None = None
    parent_thread_id: str | None = None
    parent_tool_call_id: str | None = None
    user_id: str | None = None
    depth: int = 0
    context: Mapping[str, Any] = {}

    @classmethod
    def of(cls, ctx: ToolContext) -> ParentContext:
        """The lineage of a child that this call starts."""
        return cls(
            parent_run_id=ctx.run.run_id,
            parent_thread_id=ctx.run.thread_id,
            parent_tool_call_id=ctx.call_id,
            user_id=ctx.run.user_id,
            depth=ctx.run.depth + 1,
            context=dict(ctx.context),
        )


MOST = 2**53
"""The largest count that is kept: larger whole numbers are not exact in JSON."""


def bounded(count: float) -> Any:
    """Return a count from outside as one that can be added: from 0 to `MOST`. One that is no number counts as 0."""
    if isinstance(count, float) and not isfinite(count):
        return 0
    return min(max(count, 0), MOST)


FRACTIONS = ("cost", "waited")
"""The fields of a usage that are not whole numbers."""


class Usage(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Usage of models; it adds up.

    Each field is a number from 0 to 2**53, whoever reports it and however it is made: fields outside are bounded, a part of a token
    is cut off, and one that is no number is 0. So a sum never falls, and every log that holds usage can be read.
    """

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
    waited: float = 0.0
    """Seconds that requests have waited for a provider that took no more."""

    def __post_init__(self) -> None:
        requests, read, written = self.requests, self.input_tokens, self.output_tokens
        cached, kept, thought, cost = self.cached_tokens, self.cache_write_tokens, self.reasoning_tokens, self.cost
        waited = self.waited
        if type(requests) is type(read) is type(written) is type(cached) is type(kept) is type(thought) is int:
            if (
                type(cost) is type(waited) is float
                and requests >= 0 <= read
                and written >= 0 <= cached
                and kept >= 0 <= thought
            ):
                if requests + read + written + cached + kept + thought <= MOST and 0 <= cost <= MOST >= waited >= 0:
                    return  # as nearly all are
        for name in self.__struct_fields__:
            value: Any = getattr(self, name)
            if not isinstance(value, int | float):
                raise ConfigurationError(f"Usage.{name} is {short_repr(value)}: give a number")
            force_setattr(self, name, float(bounded(value)) if name in FRACTIONS else int(bounded(value)))

    def __add__(self, other: Usage) -> Usage:
        if self is NO_USAGE or other is NO_USAGE:
            return other if self is NO_USAGE else self
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            cost=self.cost + other.cost,
            waited=self.waited + other.waited,
        )

    def __sub__(self, other: Usage) -> Usage:
        """Return what this has more than another, field by field."""
        return Usage(**{name: getattr(self, name) - getattr(other, name) for name in self.__struct_fields__})

    def at_least(self, other: Usage) -> Usage:
        """Return the larger of each field of both."""
        return Usage(**{name: max(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__})

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


NO_USAGE = Usage()
"""The usage of a new run: adding to it computes nothing."""


MAX_SPAWN_DEPTH = 3
"""The default limit of depth. The root is at depth 0."""


class Limits(
    Struct, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """Limits that a run and everything under it share. A field that is left out is not set.

    A root for which they are not set may nest 3 deep, start 256 children and make 32 calls in parallel, and the others do not limit
    it. For a child, only the limits above it hold then.
    """

    depth: int | UnsetType = UNSET
    children: int | UnsetType = UNSET
    parallel: int | UnsetType = UNSET
    steps: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value: Any = getattr(self, name)
            if value is UNSET or (value is None and name not in _WITH_DEFAULTS):
                continue
            least = 1 if name == "parallel" else 0
            allowed = (int, float) if name in ("cost", "seconds") else int
            if isinstance(value, bool) or not isinstance(value, allowed) or not value >= least:
                kind = "number" if isinstance(allowed, tuple) else "whole number"
                raise ConfigurationError(f"Limits.{name} must be at least {least}, got {value!r:.80}: give a {kind}")
            if value > MOST:  # nothing reaches it, and arithmetic with a larger one may fail
                force_setattr(self, name, MOST)

    def get(self, name: str) -> float | None:
        """Return a limit by its name; None if it is not set."""
        value = getattr(self, name)
        return None if value is UNSET else value

    def narrowed(self, other: Limits | None) -> Limits:
        """Return the lower of each limit of both. One that is set in neither stays so."""
        if other is None or other == NO_LIMITS:
            return self
        if self == NO_LIMITS:
            return other
        found: dict[str, Any] = {}
        for name in self.__struct_fields__:
            given = [one for one in (self.get(name), other.get(name)) if one is not None]
            if given:
                found[name] = min(given)
        return Limits(**found)

    def with_defaults(self) -> Limits:
        """Return these limits as they hold for a root: those that are not set have their default."""
        unset = {name: value for name, value in _WITH_DEFAULTS.items() if getattr(self, name) is UNSET}
        return replace(self, **unset) if unset else self


_WITH_DEFAULTS = {"depth": MAX_SPAWN_DEPTH, "children": 256, "parallel": 32}

NO_LIMITS = Limits()
"""The limits of an agent that sets none."""

DEFAULT_LIMITS = NO_LIMITS.with_defaults()
"""The limits of a root for which nobody sets any."""


def limits_of_run(own: Limits, given: Limits | None, *, over_network: bool) -> Limits | None:
    """Return the limits of a new run: those its agent sets, narrowed by those its caller gives. None if neither sets any.

    Every way to start a run asks here, so no caller can lift what an agent sets. A caller in this process is the program that has the
    agent: where the agent leaves a limit unset, that caller may go beyond its default. A caller `over_network` is somebody
    else, and the defaults count as set. Who calls over a network is decided by the routes of `server/` alone: HTTP, A2A and the task
    protocol say True, everything else says False.
    """
    if over_network:
        return own.with_defaults().narrowed(given)
    limits = own if given is None else own.narrowed(given)
    return None if limits is NO_LIMITS or limits == NO_LIMITS else limits


def check_limits(given: Any, owner: str = "") -> None:
    """Raise ConfigurationError for what is not limits."""
    if not isinstance(given, Limits):
        raise ConfigurationError(f"{owner}limits is not {given!r}: write Limits(depth=…, tokens=…)")


class Above(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The runs above a placed run, which is the root of its own log."""

    log_id: str
    """The log of its parent."""
    run_id: str
    """The id it has in that log."""
    limits: Limits
    """Its grant: the limits for it and everything under it. It may ask for more."""
    hooks_of: tuple[str, ...] = ()
    """The agents above whose inherited hooks apply to it, the highest first."""


class Grant(Struct, frozen=True, gc=False):
    """The part of the limits above that a child elsewhere may use. No other run uses that part until the child has ended."""

    run_id: str
    """The run whose call started the child."""
    limits: Limits


class Child(Struct, frozen=True):
    """One of several children to start together."""

    agent: Any
    """An agent or its name."""
    input: str | Message | tuple[Message, ...]
    seed: Any = None
    timeout: float | None = None
    limits: Limits | None = None


class ChildErrorForwarding(StrEnum):
    """The treatment of a child's errors by a passthrough sink."""

    WRAP = "wrap"
    """Show them as diagnostics in the call's output."""
    RAW = "raw"
    """Pass them on as error events, for an audience that knows they do not end the parent."""
    DROP = "drop"


REMOTE_KEY = "retinue.remote"
"""The state key of a run elsewhere that holds its ids there."""


class RunResult(Struct, Generic[Out], frozen=True, kw_only=True, gc=False):
    """The outcome of a run that has ended or waits."""

    status: RunStatus
    run_id: str
    thread_id: str
    response: str | None = None
    """The last text the assistant said in this run."""
    output: Out | None = None
    """The structured answer; None if the agent has no output type, or the run did not complete. See `unwrap`."""
    steps: int = 0
    state: PersistedState
    usage: Usage = Usage()
    error: str | None = None
    termination: str = "natural"
    """natural, max_steps, limit:<name>, budget:<per>/<window>, blocked, cancelled, suspended, timeout or error."""
    messages: tuple[Message, ...] = ()
    """The messages of this run, its input first, without the system message."""
    suspended: dict[str, SuspendTicket] = {}
    """The open tickets of a suspended run and its children: a ticket by the id of its call or, where calls of several
    children have the same, by its path: `call/call`."""
    receipt: Receipt | None = None
    """What the run and everything below it did: the runtime's account, not the run's."""

    def __post_init__(self) -> None:
        if self.status.__class__ is not RunStatus:  # a backend may write it as a word
            force_setattr(self, "status", RunStatus(self.status))

    def unwrap(self) -> Out:
        """Return the structured answer; raise RunNotCompleted if the run has not given it. The answer of an agent without
        an output type is None."""
        has_answered = self.status is RunStatus.COMPLETED and (self.output is not None or self.termination == "natural")
        if not has_answered:
            raise RunNotCompleted(self)
        return cast("Out", self.output)
