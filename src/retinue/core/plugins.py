"""Plugins, and what their hooks return: intercepts of a tool call, and actions."""

from __future__ import annotations

from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import Struct

from .errors import ConfigurationError
from .messages import ReceiptPart
from .results import SuspendTicket, ToolResult

if TYPE_CHECKING:
    from .hooks import Registrar

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
    """The call is not made and fails with the reason. With `end_run` the run ends too."""

    reason: str
    end_run: bool = False

    def __post_init__(self) -> None:
        given: Any = self
        if not isinstance(given.reason, str) or not isinstance(given.end_run, bool):
            shown = short_repr((given.reason, given.end_run))
            raise ConfigurationError(f"Block takes a reason, as text, and end_run, not {shown}: write Block('why')")


class Suspend(Struct, frozen=True):
    """The call waits for a human."""

    ticket: SuspendTicket

    def __post_init__(self) -> None:
        given: Any = self.ticket
        if not isinstance(given, SuspendTicket):
            raise ConfigurationError(f"Suspend takes a SuspendTicket, not {given!r:.80}")


class SetResult(Struct, frozen=True):
    """The call is not made: this is its result."""

    result: ToolResult

    def __post_init__(self) -> None:
        given: Any = self.result
        if not isinstance(given, ToolResult):
            raise ConfigurationError(f"SetResult takes a ToolResult, not {given!r:.80}: write ToolResult.success(…)")


Intercept = Block | Suspend | SetResult


class Action(Struct, frozen=True):
    """The base of actions and effects: a record with a JSON form.

    Subclass it (`frozen=True`) and register a handler with `r.action(Kind, handler)` or `r.effect(Kind, handler)`."""


class AddContextMessage(Action, frozen=True, tag="add_context_message"):
    """Action: the model reads this message in the next request only."""

    text: str


class AddSystemText(Action, frozen=True, tag="add_system_text"):
    """Action: add this text to the system message of the next request."""

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
    """Action: after this step another agent continues the run."""

    to: str
    reason: str = ""


class StopRun(Action, frozen=True, tag="stop_run"):
    """Action: the run ends with this step, completed or failed, as `limit:<name>`."""

    name: str
    reason: str
    completed: bool = False


class UseSummary(Action, frozen=True, tag="compact"):
    """Action: the model reads `summary` instead of the first `count` messages from now on.

    The conversation itself stays whole."""

    count: int
    summary: str


class AddMessage(Action, frozen=True, tag="add_message"):
    """Action: add this message to the conversation for good, as the user's. Only the model reads it."""

    text: str
    receipts: tuple[ReceiptPart, ...] = ()
    """The receipts of background tasks that it is about."""


RunAction = TransferTo | StopRun | UseSummary | AddMessage


class Plugin:
    """Subclass it, give it a `name`, and register keys, tools and hooks in `register`."""

    name: str = ""
    inherited: bool | None = None
    """Whether its hooks also apply to every run below. If not set, `before_tool` hooks do, so that delegation does not bypass
    them, and hooks of other phases do not."""

    def inherits(self, phase: Phase) -> bool:
        """Return whether its hooks of a phase apply to runs below, too."""
        return phase == "before_tool" if self.inherited is None else self.inherited

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("name"):
            cls.name = cls.__name__

    def register(self, r: Registrar) -> None:
        """Say what the plugin has. It is called when an agent is set up for its runs, perhaps more than once."""


def check_plugin(given: Any, owner: str) -> None:
    """Raise ConfigurationError for what is not a plugin."""
    if not isinstance(given, Plugin):
        hint = f"write {given.__name__}()" if isinstance(given, type) else "subclass Plugin"
        raise ConfigurationError(f"{owner}: {given!r} is not a plugin object: {hint}")
