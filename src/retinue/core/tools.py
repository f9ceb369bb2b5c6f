"""The tool contract, tools that the client answers, and tools that delegate: handoff, `agent_run_<name>` and `task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from msgspec import Struct, field
from msgspec.structs import replace

from .content import to_json_text
from .errors import ConfigurationError
from .messages import DataPart, Role
from .plugins import TransferTo
from .results import ResumeMode, SuspendTicket, ToolOutput, ToolResult
from .runs import REMOTE_KEY, RunResult, RunStatus
from .schema import with_defaults
from .state import StateCommand

if TYPE_CHECKING:
    from .agents import Agent
    from .context import ToolContext


class ToolOptions(Struct, frozen=True, kw_only=True, gc=False):
    """The settings that the runtime has for the calls of a tool."""

    timeout: float | None = None
    """Seconds one attempt may take."""
    retries: int = 0
    """The number of further attempts after a failure; none after wrong arguments, a denial or a cancel."""
    result_limit: int | None = None
    """Characters of the result the model reads; None leaves it to the agent."""
    idempotent: bool = False
    """True if running a call twice is the same as running it once."""
    queue: str | None = None
    """With an engine, the queue whose workers make its calls; None is where the run works."""

    def __post_init__(self) -> None:
        given: Any = self
        if given.queue is not None:
            check_queue(given.queue, "@tool")
        if not (given.timeout is None or (isinstance(given.timeout, int | float) and given.timeout > 0)):
            raise ConfigurationError(
                f"@tool: timeout is a number of seconds, such as timeout=30, not {short_repr(given.timeout)}"
            )
        for option in ("retries", "result_limit"):
            value: Any = getattr(self, option)
            if not ((value is None and option != "retries") or (isinstance(value, int) and value >= 0)):
                advice = f"{option} is a whole number, such as {option}=3"
                raise ConfigurationError(f"@tool: {advice}, not {short_repr(value)}")
        if not isinstance(given.idempotent, bool):
            raise ConfigurationError(f"@tool: idempotent is True or False, not {short_repr(given.idempotent)}")


NO_OPTIONS = ToolOptions()


class OptionWords(TypedDict, total=False):
    """The keywords of `ToolOptions`, which describes them."""

    timeout: float | None
    retries: int
    result_limit: int | None
    idempotent: bool
    queue: str | None


class ToolDescriptor(Struct, frozen=True):
    """The description of a tool: the model calls it by `name`, records name it by `id`.

    It is the only place where the runtime reads settings of a tool: attributes of a tool object are its own."""

    id: str
    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    category: str | None = None
    metadata: dict[str, Any] = {}
    options: ToolOptions = NO_OPTIONS

    def __post_init__(self) -> None:
        for name in ("id", "name", "description"):
            value: Any = getattr(self, name)
            if not isinstance(value, str):
                advice = "write ToolDescriptor(id, name, description)"
                raise ConfigurationError(f"ToolDescriptor: {name} is text, not {short_repr(value)}: {advice}")
        options: Any = self.options
        if not isinstance(options, ToolOptions):
            advice = "write ToolDescriptor(…).with_options(timeout=30)"
            raise ConfigurationError(f"ToolDescriptor: options is not {short_repr(options)}: {advice}")

    def with_parameters(self, schema: dict[str, Any]) -> ToolDescriptor:
        """The same with a JSON Schema for its arguments."""
        return replace(self, parameters=schema)

    def with_category(self, category: str) -> ToolDescriptor:
        return replace(self, category=category)

    def with_metadata(self, metadata: dict[str, Any]) -> ToolDescriptor:
        """The same with notes that are not shown to the model."""
        return replace(self, metadata=metadata)

    def with_options(self, **options: Unpack[OptionWords]) -> ToolDescriptor:
        """The same with settings for its calls: timeout, retries, result_limit, idempotent and queue."""
        return replace(self, options=replace(self.options, **options))


class Tool(ABC):
    """Subclass it if a decorated function is not enough: give a `descriptor` and write `execute`."""

    descriptor: ToolDescriptor

    @property
    def name(self) -> str:
        return descriptor_of(self).name

    def validate_args(self, args: dict[str, Any]) -> None:
        """Check what the schema cannot say, after it; may raise a ToolError."""
        return None

    def complete_args(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return valid arguments with the defaults of those that were omitted. Permission rules compare these."""
        return with_defaults(descriptor_of(self).parameters, args)

    @abstractmethod
    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolOutput | ToolResult | Any:
        """Do the work. Returns a ToolOutput, a ToolResult or any value that has a JSON form."""


def descriptor_of(tool: Tool) -> ToolDescriptor:
    """Return the descriptor of a tool, which may be an attribute or a method."""
    given: Any = getattr(tool, "descriptor", None)
    found: Any = given() if callable(given) else given
    if not isinstance(found, ToolDescriptor):
        problem = "has no descriptor" if found is None else f"has a {type(found).__name__} as its descriptor"
        raise ConfigurationError(f"tool class {type(tool).__name__} {problem}: give it a ToolDescriptor")
    return found


class FrontEndTool(Tool):
    """A tool that exists only in the client: its call is suspended, and the client's answer becomes the result."""

    def __init__(self, name: str, description: str, parameters: dict[str, Any] | None = None) -> None:
        self.descriptor = ToolDescriptor(name, name, description)
        if parameters is not None:
            self.descriptor = self.descriptor.with_parameters(parameters)

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolResult:
        ticket = SuspendTicket(
            f"frontend_{ctx.call_id}",
            f"tool:{self.name}",
            f"{self.name} is done by the client",
            args,
            resume_mode=ResumeMode.USE_DECISION,
        )
        return ToolResult.suspended(ticket.message, ticket=ticket)


class TransferTool(Tool):
    """Hands the run over to another agent, after this step."""

    def __init__(self, target: str) -> None:
        self.target = target
        name = f"transfer_to_{target}"
        text = f"Hand the conversation over to {target}, who goes on from here."
        reason = {"type": "string", "description": "Why, in a few words."}
        described = ToolDescriptor(name, name, text, _object({"reason": reason}, []))
        self.descriptor = described.with_options(idempotent=True)

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolOutput:
        command = StateCommand().schedule(TransferTo(self.target, args.get("reason", "")))
        return ToolOutput.with_command(ToolResult.success(f"{self.target} goes on from here."), command)


class AgentTool(Tool):
    """Delegates to one agent: the model writes a prompt and reads the answer."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        name = f"agent_run_{agent.name}"
        prompt = {"type": "string", "description": "The whole task: the agent sees nothing else.", "minLength": 1}
        text = agent.description or f"Give a task to the agent {agent.name} and get its answer."
        described = ToolDescriptor(name, name, text, _object({"prompt": prompt}, ["prompt"]))
        self.descriptor = described.with_options(idempotent=True)  # a second call finds the child and continues it

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolResult:
        return answer_of(await ctx.run_child(self.agent, args["prompt"]), self.agent.name, ctx)


class TaskTool(Tool):
    """Delegates to one of an agent's sub-agents; the child reads only the description of the task."""

    def __init__(self, subagents: Mapping[str, Agent]) -> None:
        self._known = dict(subagents)
        listed = "\n".join(f"- {name}: {agent.description or 'no description'}" for name, agent in self._known.items())
        text = (
            "Give a task to a sub-agent, which works on it alone and returns one report. It sees only the "
            "description, so write everything it needs. Make several calls at once for independent tasks.\n"
            f"Sub-agents:\n{listed}"
        )
        properties = {
            "subagent_type": {"type": "string", "description": f"One of: {', '.join(self._known)}."},
            "description": {"type": "string", "description": "The whole task.", "minLength": 1},
        }
        described = ToolDescriptor("task", "task", text, _object(properties, ["subagent_type", "description"]))
        self.descriptor = described.with_options(idempotent=True)

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolResult:
        name = args["subagent_type"]
        if name not in self._known:
            known = ", ".join(self._known)
            return ToolResult.error(f"there is no sub-agent {name!r}; known: {known}", code="unknown_subagent")
        return answer_of(await ctx.run_child(self._known[name], args["description"]), name, ctx)


def answer_of(outcome: RunResult, name: str, ctx: ToolContext) -> ToolResult:
    """Return a child's outcome as a tool result: its answer, its error with its partial text, or a suspension."""
    metadata = {"child_run_id": outcome.run_id, "child_status": str(outcome.status), "steps": outcome.steps}
    if outcome.status is RunStatus.COMPLETED:
        data = outcome.response or "" if outcome.output is None else outcome.output
        return ToolResult(data=data, message=text_beside_data(outcome), metadata=metadata)
    if outcome.status.is_waiting:
        ticket = SuspendTicket(
            f"child_{ctx.call_id}", f"agent:{name}", f"{name} waits for a decision", path=_path_elsewhere(outcome, ctx)
        )
        return ToolResult.suspended(ticket.message, ticket=ticket)
    text = f"sub-agent {name} did not complete: {outcome.status}"
    if outcome.error:
        text += f": {outcome.error}"
    if outcome.response:
        text += f"\nWhat it had by then:\n{outcome.response}"
    if calls := finished_calls(outcome):
        text += f"\n{calls}"
    is_refused = outcome.termination.startswith("budget:")
    failed = ToolResult.error(text, code=outcome.termination if is_refused else outcome.status.value)
    return ToolResult("", failed.status, failed.data, failed.message, None, metadata)


MOST_CALLS = 50
"""Finished calls that a run hands over, the newest; with `_FIRST_LINE` characters of each result."""
_FIRST_LINE = 200
_CUT, _REFUSED = ("limit:", "budget:"), ("[limit:", "[budget:")


def finished_calls(outcome: RunResult) -> str:
    """Return the calls that a run had finished when a limit ended it, each with the first line of its result; "" for a run
    that no limit has ended, or that has made no call."""
    cut = outcome.termination.startswith(_CUT) or outcome.termination in ("max_steps", "timeout")
    done = [message for message in outcome.messages if message.role is Role.TOOL] if cut else []
    done = [message for message in done if not message.text.startswith(_REFUSED)]
    if not done:
        return ""
    lines = [f"- {message.name}: {_first_line(message.text)}" for message in done[-MOST_CALLS:]]
    left = len(done) - len(lines)
    return "\n".join(["Calls that it had finished:", *([f"- {left} earlier ones"] if left else []), *lines])


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _FIRST_LINE else f"{line[:_FIRST_LINE]}…"


def _path_elsewhere(outcome: RunResult, ctx: ToolContext) -> tuple[str, ...]:
    """Return the path of the one question of a child on another server, whose calls this log may not have."""
    if REMOTE_KEY not in outcome.state.extensions or len(outcome.suspended) != 1:
        return ()
    (ticket,) = outcome.suspended.values()
    return (ctx.call_id, *ticket.path)


def text_beside_data(outcome: RunResult) -> str | None:
    """Return the text and the data of an answer that has both, for the model; None if it has one of them."""
    parts = outcome.messages[-1].parts if outcome.messages else ()
    if not outcome.response or outcome.output is None or not any(isinstance(part, DataPart) for part in parts):
        return None
    return f"{outcome.response}\n{to_json_text(outcome.output)}"


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def check_queue(queue: Any, owner: str = "") -> str:
    """Return the name of a queue; raise ConfigurationError if it cannot be one."""
    if not isinstance(queue, str) or not queue or len(queue) > 100 or not all(c.isalnum() or c in "-_." for c in queue):
        where = f"{owner}: " if owner else ""
        raise ConfigurationError(f"{where}a queue is named with letters, digits, '-', '_' and '.', not {queue!r}")
    return queue
