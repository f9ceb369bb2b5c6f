"""Plugins: what an agent is extended with, and the hooks, actions and effects they bring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import Struct

from .decisions import Decision
from .errors import ConfigurationError, KeyAlreadyRegistered
from .messages import Message, ToolCall
from .results import SuspendTicket, ToolResult
from .runs import RunIdentity, Usage
from .state import Snapshot, StateCommand, StateKey

if TYPE_CHECKING:
    from .agents import Agent
    from .model import ModelRequest
    from .tools import Tool

Phase = Literal[
    "run_start",
    "step_start",
    "before_inference",
    "after_inference",
    "before_tool",
    "after_tool",
    "step_end",
    "run_end",
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Block(Struct, frozen=True):
    """The call is not made: it fails with the reason, and the run goes on or, where asked, ends."""

    reason: str
    end_run: bool = False


class Suspend(Struct, frozen=True):
    """The call waits for a human."""

    ticket: SuspendTicket


class SetResult(Struct, frozen=True):
    """The call is not made: this is its result."""

    result: ToolResult


Intercept = Block | Suspend | SetResult


class HookContext(Struct, frozen=True, kw_only=True):
    """What a hook sees: the state when its phase began, and of the rest what its phase has."""

    phase: Phase
    run: RunIdentity
    agent: Agent
    snapshot: Snapshot
    messages: tuple[Message, ...] = ()
    request: ModelRequest | None = None
    call: ToolCall | None = None
    result: ToolResult | None = None
    decision: Decision | None = None
    """What a human decided, where the call was suspended before."""
    step: int = 0
    usage: Usage = Usage()
    compacted: int = 0
    """How many messages of the conversation the model reads as a summary."""
    elapsed: Callable[[], float] = float
    """Seconds since the run began, by the run's own clock."""

    def state(self, key: StateKey[Any, Any]) -> Any:
        """The value of a key when the phase began, or its default."""
        return self.snapshot[key]


HookReturn = StateCommand | Intercept | None
HookFunction = Callable[[HookContext], HookReturn | Awaitable[HookReturn]]
ResultKeeper = Callable[[ToolCall, str, RunIdentity], str]
"""Takes a call, the whole text of its result and whose call it is, beside the event loop; returns what the model is
told of it."""

Handler = Callable[[Any, HookContext], StateCommand | None | Awaitable[StateCommand | None]]


class Hook(Struct, frozen=True):
    """A function registered for a phase. An optional one may fail without failing the run."""

    phase: Phase
    function: HookFunction
    plugin: str
    priority: int = 100
    optional: bool = False
    inherited: bool = False

    @property
    def label(self) -> str:
        return f"hook {getattr(self.function, '__name__', 'hook')!r} of plugin {self.plugin!r}"


class Action(Struct, frozen=True):
    """The base of what a command can schedule, and of effects: a record with a JSON form.

    Subclass it for an action of your own (`frozen=True`), and register who carries it out with `r.action(Kind, handler)`
    or `r.effect(Kind, handler)`."""


class AddContextMessage(Action, frozen=True, tag="add_context_message"):
    """Action: the model reads this message in the next request only."""

    text: str


class AddSystemText(Action, frozen=True, tag="add_system_text"):
    """Action: the system message of the next request goes on with this text."""

    text: str


class ExcludeTools(Action, frozen=True, tag="exclude_tools"):
    """Action: the next request does not offer these tools."""

    names: tuple[str, ...]


class IncludeTools(Action, frozen=True, tag="include_tools"):
    """Action: the next request offers only these tools."""

    names: tuple[str, ...]


class OverrideSettings(Action, frozen=True, tag="override_settings"):
    """Action: model settings for the next request, over the agent's."""

    settings: dict[str, Any]


StepAction = AddContextMessage | AddSystemText | ExcludeTools | IncludeTools | OverrideSettings


class TransferTo(Action, frozen=True, tag="hand_off"):
    """Action: after this step another agent goes on with the run."""

    to: str
    reason: str = ""


class StopRun(Action, frozen=True, tag="stop_run"):
    """Action: the run ends with this step, completed or failed, as `limit:<name>`."""

    name: str
    reason: str
    completed: bool = False


class UseSummary(Action, frozen=True, tag="compact"):
    """Action: from now on the model reads `summary` in place of the first `count` messages of the conversation.

    The conversation itself stays whole."""

    count: int
    summary: str


class AddMessage(Action, frozen=True, tag="add_message"):
    """Action: the conversation goes on with this message, for good. The model reads it as the user's; users need not."""

    text: str


RunAction = TransferTo | StopRun | UseSummary | AddMessage


class Plugin:
    """Subclass it, give it a `name`, and register keys, tools and hooks in `register`."""

    name: str = ""
    inherited: bool = False
    """Whether its hooks also hold for every run below the agent's: what must not be got around by delegating."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("name"):
            cls.name = cls.__name__

    def register(self, r: Registrar) -> None:
        """Called once for each run the plugin takes part in."""


class Registrar:
    """Collects what a plugin registers, so that it can be installed whole."""

    __slots__ = ("actions", "effects", "hooks", "keeper", "keys", "plugin", "tools")

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.keys: list[StateKey[Any, Any]] = []
        self.tools: list[Tool] = []
        self.hooks: list[Hook] = []
        self.actions: dict[type, Handler] = {}
        self.effects: dict[type, Handler] = {}
        self.keeper: ResultKeeper | None = None

    def key(self, key: StateKey[Any, Any]) -> None:
        """Make a state key known to the agent."""
        if any(key.name == known.name for known in self.keys):
            raise KeyAlreadyRegistered(key.name, self.plugin.name)
        self.keys.append(key)

    def tool(self, tool: Tool) -> None:
        """Give the agent a tool."""
        self.tools.append(tool)

    def hook(self, phase: Phase, function: HookFunction, *, priority: int = 100, optional: bool = False) -> None:
        """Call `function` in a phase. Lower priorities come first, equal ones in order of registration."""
        if phase not in PHASES:
            raise ConfigurationError(
                f"plugin {self.plugin.name!r}: there is no phase {phase!r}; phases are {', '.join(PHASES)}"
            )
        self.hooks.append(Hook(phase, function, self.plugin.name, priority, optional, self.plugin.inherited))

    def action(self, kind: type, handler: Handler) -> None:
        """Let `handler` carry out scheduled actions of a type, at the end of the phase that scheduled them."""
        self.actions[kind] = handler

    def results(self, keeper: ResultKeeper) -> None:
        """Let `keeper` put results that are too long for the model somewhere, and say in words where."""
        self.keeper = keeper

    def effect(self, kind: type, handler: Handler) -> None:
        """Let `handler` carry out effects of a type, after the commit of the command that asked for them."""
        self.effects[kind] = handler
