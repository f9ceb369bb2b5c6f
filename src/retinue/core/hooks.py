"""Hooks: functions that plugins register for the phases of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

from msgspec import Struct

from .agents import Agent
from .decisions import Decision
from .errors import ConfigurationError, KeyAlreadyRegistered, RetinueError
from .functions import as_tool
from .messages import Message, ToolCall
from .model import ModelRequest
from .plugins import PHASES, Intercept, Phase, Plugin
from .results import ToolResult
from .rules import Rules
from .runs import RunIdentity, Usage
from .state import Snapshot, StateCommand, StateKey, as_key
from .tools import Tool

V = TypeVar("V")
A = TypeVar("A")


class HookContext(Struct, frozen=True, kw_only=True):
    """The view of a hook: the state when its phase began, and whatever else its phase has."""

    phase: Phase
    run: RunIdentity
    agent: Agent
    snapshot: Snapshot
    messages: tuple[Message, ...]
    request: ModelRequest | None
    call: ToolCall | None
    result: ToolResult | None
    decision: Decision | None
    """The decision of a human, if the call was suspended before."""
    tool: Tool | None = None
    """The tool of the call."""
    step: int = 0
    usage: Usage = Usage()
    compacted: int = 0
    """The number of messages that the model reads as a summary."""
    elapsed: Callable[[], float] = float
    """Return the seconds since the run began, by the run's own clock."""

    def state(self, key: StateKey[V, Any]) -> V:
        """Return the value of a key when the phase began, or its default."""
        return self.snapshot[key]


class InferenceContext(HookContext, frozen=True, kw_only=True):
    """The view of a hook in `before_inference` and `after_inference`: there is a request."""

    request: ModelRequest


class BeforeToolContext(HookContext, frozen=True, kw_only=True):
    """The view of a hook in `before_tool`: there is a call."""

    call: ToolCall


class AfterToolContext(HookContext, frozen=True, kw_only=True):
    """The view of a hook in `after_tool`: there are a call and its result."""

    call: ToolCall
    result: ToolResult


CONTEXTS: dict[Phase, type[HookContext]] = {
    "before_inference": InferenceContext,
    "after_inference": InferenceContext,
    "before_tool": BeforeToolContext,
    "after_tool": AfterToolContext,
}
"""The context of a phase, where it is not a plain HookContext."""

CommandReturn = StateCommand | None | Awaitable[StateCommand | None]
HookReturn = StateCommand | Intercept | None
HookFunction = Callable[[HookContext], HookReturn | Awaitable[HookReturn]]
ResultKeeper = Callable[[ToolCall, str, RunIdentity], str]
"""Stores the whole text of a long result, in a thread, and returns a sentence that tells the model where it is."""

Summarise = Callable[[Sequence[Message]], str | Awaitable[str]]
"""Returns a summary of messages."""


class CompactionPolicy(Struct, frozen=True):
    """Settings that keep the requests of an agent within the window of its model (`loop/compaction.py`)."""

    max_tokens: int | None = None
    """The estimated tokens of messages that a request may have; None is 80 % of the window."""
    keep: int | None = None
    """The number of messages that stay; None is as many as fit well."""
    summarise: Summarise | None = None
    """None: the model of the run writes the summary."""
    window: int | None = None
    """The window of the model in tokens; None is what is known of the model."""


Handler = Callable[[Any, HookContext], CommandReturn]
BeforeToolHook = Callable[[BeforeToolContext], HookReturn | Awaitable[HookReturn]]
AfterToolHook = Callable[[AfterToolContext], CommandReturn]
InferenceHook = Callable[[InferenceContext], CommandReturn]


class HookOptions(TypedDict, total=False):
    """The options of a hook, which `Registrar.hook` describes."""

    priority: int
    optional: bool


class Hook(Struct, frozen=True):
    """A function registered for a phase. An optional one may fail without failing the run."""

    phase: Phase
    function: HookFunction
    plugin: str
    priority: int = 100
    optional: bool = False
    inherited: bool = False
    source: int = 0
    """The identity of the plugin: a run that has the plugin itself does not inherit the hook once more."""
    is_above: bool = False
    """The hook is inherited from a run above. The present agent may lack its keys, actions and effects."""
    rules: Rules | None = None
    """The rules by which it denies calls. A decision whose arguments they deny is refused before the hook runs."""

    @property
    def label(self) -> str:
        return f"hook {getattr(self.function, '__name__', 'hook')!r} of plugin {self.plugin!r}"


class Registrar:
    """Collects what a plugin registers, so that it is installed whole or not at all."""

    __slots__ = ("actions", "effects", "hooks", "keeper", "keys", "plugin", "policy", "tools")

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.keys: list[StateKey[Any, Any]] = []
        self.tools: list[Tool] = []
        self.hooks: list[Hook] = []
        self.actions: dict[type, Handler] = {}
        self.effects: dict[type, Handler] = {}
        self.keeper: ResultKeeper | None = None
        self.policy: CompactionPolicy | None = None

    def key(self, key: StateKey[Any, Any]) -> None:
        """Register a state key."""
        as_key(key)
        if any(key.name == known.name for known in self.keys):
            raise KeyAlreadyRegistered(key.name, self.plugin.name)
        self.keys.append(key)

    def tool(self, tool: Tool | Callable[..., Any]) -> None:
        """Give the agent a tool; a plain function becomes one."""
        self.tools.append(as_tool(tool))

    @overload
    def hook(
        self,
        phase: Literal["before_tool"],
        function: BeforeToolHook,
        *,
        rules: Rules | None = None,
        **options: Unpack[HookOptions],
    ) -> None: ...
    @overload
    def hook(self, phase: Literal["after_tool"], function: AfterToolHook, **options: Unpack[HookOptions]) -> None: ...
    @overload
    def hook(
        self,
        phase: Literal["before_inference", "after_inference"],
        function: InferenceHook,
        **options: Unpack[HookOptions],
    ) -> None: ...
    @overload
    def hook(self, phase: Phase, function: HookFunction, **options: Unpack[HookOptions]) -> None: ...
    def hook(
        self,
        phase: Phase,
        function: Callable[[Any], Any],
        *,
        priority: int = 100,
        optional: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """Call `function` in a phase. Lower priorities come first, equal ones in order of registration."""
        owner = f"plugin {self.plugin.name!r}"
        if phase not in PHASES:
            raise ConfigurationError(f"{owner}: there is no phase {phase!r}; phases are {', '.join(PHASES)}")
        if not callable(cast("Any", function)):
            raise ConfigurationError(f"{owner}: a hook is a function of a HookContext, not {function!r}")
        inherited, source = self.plugin.inherits(phase), id(self.plugin)
        self.hooks.append(Hook(phase, function, self.plugin.name, priority, optional, inherited, source, rules=rules))

    def action(self, kind: type[A], handler: Callable[[A, HookContext], CommandReturn]) -> None:
        """Let `handler` carry out scheduled actions of a type, at the end of the phase that scheduled them."""
        self.actions[kind] = handler

    def effect(self, kind: type[A], handler: Callable[[A, HookContext], CommandReturn]) -> None:
        """Let `handler` carry out effects of a type, after the commit of the command that asked for them."""
        self.effects[kind] = handler

    def results(self, keeper: ResultKeeper) -> None:
        """Let `keeper` store results that are too long for the model."""
        self.keeper = keeper

    def compaction(self, policy: CompactionPolicy) -> None:
        """Keep the requests within the window of the model."""
        self.policy = policy


def registered(plugin: Plugin) -> Registrar:
    """Return what a plugin registers. An exception that it raises is a ConfigurationError with its name."""
    registrar = Registrar(plugin)
    try:
        plugin.register(registrar)
    except RetinueError:
        raise
    except Exception as exc:
        problem = f"{type(exc).__name__}: {exc}"
        raise ConfigurationError(f"plugin {plugin.name!r} failed in register: {problem}") from exc
    return registrar
