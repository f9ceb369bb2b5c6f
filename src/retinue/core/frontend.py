"""Front-end tools: they exist only in the client, which answers for them."""

from __future__ import annotations

from typing import Any

from .context import ToolContext
from .results import ResumeMode, SuspendTicket, ToolResult
from .tools import Tool, ToolDescriptor


class FrontEndTool(Tool):
    """Suspends its call with the arguments on a ticket; the client's answer becomes the result."""

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
