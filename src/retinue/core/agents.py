"""Agents: the specs of runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from types import UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict, Unpack, overload
from unicodedata import category, normalize

from .content import is_no_type
from .errors import ConfigurationError, as_tuple
from .functions import FunctionTool, as_tool
from .messages import Message
from .model import Model
from .output import OutputFormat
from .plugins import Plugin, check_plugin
from .receipts import Receipts
from .runs import NO_LIMITS, Limits, Out, check_limits
from .schema import ArgumentCheck
from .tools import AgentTool, TaskTool, Tool, ToolDescriptor, TransferTool, check_queue, descriptor_of

if TYPE_CHECKING:
    from .backend import Resolver
    from .context import ToolContext
    from .messages import ToolCall
    from .runs import RunIdentity

Conflicts = Literal["error", "last_wins"]

RESULT_LIMIT = 80_000

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
NAME_RULE = "a letter or digit of any script, then up to 63 letters, digits, '_' or '-'"
"""The rule for names of agents, for people."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class AgentOptions(TypedDict, total=False):
    """The keyword options of an `Agent`, which describes them."""

    subagents: Iterable[Agent | str]
    handoffs: Iterable[Agent | str]
    description: str
    max_steps: int
    limits: Limits
    conflicts: Conflicts
    result_limit: int
    receipts: Receipts
    settings: Mapping[str, Any]
    backend: str | None
    queue: str | None


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Agent(Generic[Out]):
    """An agent: what `Runtime.run` runs. It is a spec, so it can run many times at once; making one does no I/O.

        agent = Agent("guide", "openai:gpt-4o", "Answer in one sentence.", tools=[weather])
        result = Runtime([agent]).run_sync("guide", "What should I wear in Rome?")

    name: a letter or digit of any script, then letters, digits, "_" or "-". Other agents and `Runtime.run` name it so.
    model: "provider:model", or a Model object. None for a child takes the model of its parent.
    instructions: the system prompt.
    tools: functions, made tools with `@tool` or as they are, and `Tool` objects.
    plugins: `Plugin` objects, such as `Permissions(…)`: hooks, state keys and more tools.
    subagents: agents or their names, to which the model delegates with the tool `task(subagent_type, description)`.
    handoffs: agents or their names that may take a run over; each gives a tool `transfer_to_<name>`.
    description: says to other agents what this one is for.
    max_steps: the number of model calls after which a run fails.
    limits: `Limits(…)` of depth, children, tokens, cost and time, for the whole tree of a run.
    output: the type of the final answer, such as a dataclass or a pydantic model; `result.unwrap()` has that type.
    conflicts: "error" fails a call that writes a state key another call of its step wrote; "last_wins" does not.
    result_limit: the number of characters of one tool result that the model reads.
    receipts: when the model reads the runtime's receipt behind what a sub-agent says: "auto" where a call failed or was
        denied, a limit was hit or work is open, "always" or "never".
    settings: settings for every request to the model, such as {"temperature": 0}.
    backend: the name of a backend in `Runtime(backends=…)` that executes it as a child; None is this process.
    queue: with an engine, the queue whose workers execute it, also as a child; None is where its parent works.
    """

    name: str
    model: str | Model | None = None
    instructions: str = ""
    tools: Iterable[Tool | Callable[..., Any]] = ()
    plugins: Iterable[Plugin] = ()
    subagents: Iterable[Agent | str] = field(default=(), kw_only=True)
    handoffs: Iterable[Agent | str] = field(default=(), kw_only=True)
    description: str = field(default="", kw_only=True)
    max_steps: int = field(default=16, kw_only=True)
    limits: Limits = field(default=NO_LIMITS, kw_only=True)
    output: type[Out] | UnionType | None = field(default=None, kw_only=True)
    conflicts: Conflicts = field(default="error", kw_only=True)
    result_limit: int = field(default=RESULT_LIMIT, kw_only=True)
    receipts: Receipts = field(default="auto", kw_only=True)
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    backend: str | None = field(default=None, kw_only=True)
    queue: str | None = field(default=None, kw_only=True)
    toolbox: Toolbox = field(init=False, repr=False)
    output_format: OutputFormat | None = field(init=False, repr=False)
    system: Message | None = field(init=False, repr=False)
    """The instructions as the model reads them, with the shape of the answer where there is one."""
    is_woken: bool = field(init=False, repr=False, default=False)
    """True if a task that ends while its conversation has no run starts a new run."""

    if TYPE_CHECKING:  # the dataclass makes it at run time; these overloads give `result.unwrap()` its type

        @overload
        def __init__(
            self: Agent[None],
            name: str,
            model: str | Model | None = None,
            instructions: str = "",
            tools: Iterable[Tool | Callable[..., Any]] = (),
            plugins: Iterable[Plugin] = (),
            *,
            output: None = None,
            **options: Unpack[AgentOptions],
        ) -> None: ...
        @overload
        def __init__(
            self,
            name: str,
            model: str | Model | None = None,
            instructions: str = "",
            tools: Iterable[Tool | Callable[..., Any]] = (),
            plugins: Iterable[Plugin] = (),
            *,
            output: type[Out],
            **options: Unpack[AgentOptions],
        ) -> None: ...
        @overload
        def __init__(
            self: Agent[Any],
            name: str,
            model: str | Model | None = None,
            instructions: str = "",
            tools: Iterable[Tool | Callable[..., Any]] = (),
            plugins: Iterable[Plugin] = (),
            *,
            output: Any,
            **options: Unpack[AgentOptions],
        ) -> None: ...
        def __init__(self, *args: Any, **options: Any) -> None: ...

    def __post_init__(self) -> None:
        name = agent_name(self.name)
        if name is None:
            raise ConfigurationError(f"agent name {self.name!r}: use {NAME_RULE}")
        object.__setattr__(self, "name", name)
        owner = f"agent {name!r}"
        if self.model is not None:
            check_model(self.model, owner)
        _check_options(self, owner)
        for option in ("subagents", "handoffs"):
            given = as_tuple(getattr(self, option), owner, option)
            for one in given:
                if not isinstance(one, Agent | str) and (option == "handoffs" or type(self) is Agent):
                    raise ConfigurationError(f"{owner}: {option} has agents or their names, not {one!r:.80}")
            object.__setattr__(self, option, given)
        targets = [target if isinstance(target, str) else target.name for target in self.handoffs]
        given = as_tuple(self.tools, owner, "tools")
        tools = (*[as_tool(candidate) for candidate in given], *map(TransferTool, targets))
        object.__setattr__(self, "tools", tools)
        plugins = as_tuple(self.plugins, owner, "plugins")
        for plugin in plugins:
            check_plugin(plugin, owner)
        names = [plugin.name for plugin in plugins]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"{owner} has two plugins named {name!r}: rename one")
        object.__setattr__(self, "plugins", plugins)
        object.__setattr__(self, "output_format", None if self.output is None else OutputFormat(self.output, owner))
        object.__setattr__(self, "toolbox", Toolbox(tools, owner))
        shape = "" if self.output_format is None else self.output_format.instructions
        text = "\n\n".join([part for part in (self.instructions, shape) if part])
        object.__setattr__(self, "system", Message.system(text) if text else None)

    def as_tool(self) -> Tool:
        """Return a tool `agent_run_<name>` with which another agent delegates to this one."""
        return AgentTool(self)

    # --- methods that a runtime calls; kinds of agents override them

    def delegation_tools(self, resolver: Resolver) -> Iterable[Tool]:
        """Return the tools with which the model delegates to the sub-agents."""
        children = [resolver.resolve(child).agent for child in self.subagents]
        return (TaskTool({child.name: child for child in children}),) if children else ()

    def check_parts(self) -> None:
        """Raise ConfigurationError if the arguments do not fit together. A runtime calls it when an agent is added."""

    async def resume_tasks(self, run: RunIdentity, context_for: Callable[[ToolCall], ToolContext]) -> None:
        """Continue the background tasks that a run had when its process died."""

    async def ended_tasks(self, run: RunIdentity, told: Mapping[str, Any]) -> Sequence[str]:
        """Return the ended tasks of a conversation that, by its stored state, were not reported to it."""
        return ()


def linked_agents(agent: Agent) -> Iterable[Agent]:
    """Return the agents that another one refers to as objects."""
    tools = [bound.tool.agent for bound in agent.toolbox.values() if isinstance(bound.tool, AgentTool)]
    return [other for other in (*agent.subagents, *agent.handoffs, *tools) if isinstance(other, Agent)]


def agent_name(given: Any) -> str | None:
    """Return the name of an agent in its one form (NFC); None if it is no name."""
    if not isinstance(given, str):
        return None
    if _PLAIN_NAME.fullmatch(given):
        return given
    name = normalize("NFC", given)
    kinds = [category(character) for character in name]
    if not 1 <= len(name) <= 64 or not (kinds[0] == "Nd" or kinds[0][0] == "L"):
        return None
    is_name = all(kind == "Nd" or kind[0] in "LM" or one in "_-" for one, kind in zip(name, kinds, strict=True))
    return name if is_name else None


def check_model(model: Any, owner: str) -> None:
    """Raise ConfigurationError if it is not a model; the error says what to write instead."""
    if isinstance(model, str):
        if not model or " " in model.partition(":")[0]:
            raise ConfigurationError(f"{owner}: model is 'provider:model', such as 'openai:gpt-4o', not {model!r:.80}")
    elif isinstance(model, type) or not callable(getattr(model, "stream", None)):
        raise ConfigurationError(f"{owner}: model is a 'provider:model' string or a Model object, not {model!r:.80}")


def _check_options(agent: Agent, owner: str) -> None:
    """Raise ConfigurationError for an argument of the wrong type; the error says what to write instead."""
    given: Any = agent
    if not isinstance(given.instructions, str):
        advice = "write Agent(name, model, instructions)"
        raise ConfigurationError(f"{owner}: instructions is text, not {given.instructions!r}: {advice}")
    if not isinstance(given.description, str):
        raise ConfigurationError(f"{owner}: description is text, not {given.description!r:.80}")
    if isinstance(given.max_steps, bool) or not isinstance(given.max_steps, int) or given.max_steps < 1:
        raise ConfigurationError(f"{owner}: max_steps must be at least 1, got {given.max_steps!r}")
    if isinstance(given.result_limit, bool) or not isinstance(given.result_limit, int) or given.result_limit < 1:
        raise ConfigurationError(f"{owner}: result_limit must be at least 1 character, got {given.result_limit!r}")
    check_limits(given.limits, f"{owner}: ")
    if not isinstance(given.settings, Mapping):
        raise ConfigurationError(f'{owner}: settings is a dict, such as {{"temperature": 0}}, not {given.settings!r}')
    if agent.queue is not None:
        check_queue(agent.queue, owner)
    if agent.conflicts not in ("error", "last_wins"):
        raise ConfigurationError(f"{owner}: conflicts is 'error' or 'last_wins', not {agent.conflicts!r}")
    if given.receipts not in ("auto", "always", "never"):
        raise ConfigurationError(f"{owner}: receipts is 'auto', 'always' or 'never', not {given.receipts!r:.80}")
    if is_no_type(given.output):
        raise ConfigurationError(
            f"{owner}: output is a type, such as int, list[str] or a dataclass, not {given.output!r}"
        )


class Toolbox(dict[str, "BoundTool"]):
    """An agent's tools by the name the model calls. Names and ids are unique."""

    def __init__(self, tools: Iterable[Tool], owner: str) -> None:
        super().__init__()
        self._owner = owner
        self._ids: set[str] = set()
        self._descriptors: tuple[ToolDescriptor, ...] | None = None
        for tool in tools:
            self.add(tool)

    def add(self, tool: Tool) -> None:
        bound = BoundTool(tool, self._owner)
        descriptor = bound.descriptor
        if descriptor.name in self:
            raise ConfigurationError(f"{self._owner} has two tools named {descriptor.name!r}: rename one")
        if descriptor.id in self._ids:
            raise ConfigurationError(f"{self._owner} has two tools with the id {descriptor.id!r}: change one")
        self[descriptor.name] = bound
        self._ids.add(descriptor.id)

    @property
    def descriptors(self) -> tuple[ToolDescriptor, ...]:
        """The descriptors that the model reads; made once."""
        if self._descriptors is None or len(self._descriptors) != len(self):
            self._descriptors = tuple([bound.descriptor for bound in self.values()])
        return self._descriptors

    def extended(self, tools: Iterable[Tool]) -> Toolbox:
        """Return this toolbox with more tools; itself if there are none."""
        more = list(tools)
        if not more:
            return self
        return Toolbox([*(bound.tool for bound in self.values()), *more], self._owner)


class BoundTool:
    """A tool with its descriptor read once and its schema compiled."""

    __slots__ = ("check", "descriptor", "options", "tool", "validates")

    def __init__(self, tool: Tool, owner: str) -> None:
        try:
            descriptor = descriptor_of(tool)
        except ConfigurationError as exc:
            raise ConfigurationError(f"{owner}: {exc}") from None
        if iscoroutinefunction(tool.validate_args):
            raise ConfigurationError(
                f"{owner}: validate_args of {descriptor.name!r} is async; write `def validate_args`"
            )
        name, parameters = descriptor.name, descriptor.parameters
        if not _TOOL_NAME.fullmatch(name):
            rule = "must be 1 to 128 ASCII letters, digits, '_', '-' or '.': models accept no others"
            raise ConfigurationError(f"{owner}: tool name {name!r} {rule}")
        self.tool, self.descriptor, self.options = tool, descriptor, descriptor.options
        self.validates = getattr(tool.validate_args, "__func__", None) is not Tool.validate_args
        """True if it checks more than its schema."""
        self.check = ArgumentCheck(parameters, name, isinstance(tool, FunctionTool) and parameters is tool.plain_schema)
        if parameters.get("type", "object") != "object":
            raise ConfigurationError(
                f"{owner}: the parameters of {name!r} must be of type object, as arguments have names"
            )
