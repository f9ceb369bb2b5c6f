"""The tool contract, and tools that the client answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from .errors import ConfigurationError
from .results import ResumeMode, SuspendTicket, ToolOutput, ToolResult
from .schema import with_defaults

if TYPE_CHECKING:
    from .context import ToolContext


def _no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


class ToolDescriptor(Struct, frozen=True):
    """The description of a tool: the model calls it by `name`, records name it by `id`."""

    id: str
    name: str
    description: str
    parameters: dict[str, Any] = field(default_factory=_no_parameters)
    category: str | None = None
    metadata: dict[str, Any] = {}

    def with_parameters(self, schema: dict[str, Any]) -> ToolDescriptor:
        """The same with a JSON Schema for its arguments."""
        return replace(self, parameters=schema)

    def with_category(self, category: str) -> ToolDescriptor:
        return replace(self, category=category)

    def with_metadata(self, metadata: dict[str, Any]) -> ToolDescriptor:
        """The same with notes that are not shown to the model."""
        return replace(self, metadata=metadata)


class Tool(ABC):
    """Subclass it if a decorated function is not enough: give a `descriptor` and write `execute`."""

    descriptor: ToolDescriptor
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
