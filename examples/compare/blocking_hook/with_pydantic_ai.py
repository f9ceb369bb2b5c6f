from typing import Any

from pydantic_ai import Agent, RunContext, ToolDefinition
from pydantic_ai.capabilities import Hooks
from pydantic_ai.exceptions import SkipToolExecution
from pydantic_ai.messages import ToolCallPart

hooks = Hooks[object]()


@hooks.on.before_tool_execute
async def no_large_refunds(
    ctx: RunContext[object], *, call: ToolCallPart, tool_def: ToolDefinition, args: dict[str, Any]
) -> dict[str, Any]:
    if call.tool_name == "refund" and args["amount"] > 100:
        raise SkipToolExecution("Refunds over 100 need a manager.")
    return args


agent = Agent("anthropic:claude-sonnet-4-6", capabilities=[hooks])


@agent.tool_plain
async def refund(amount: float) -> str:
    """Refund an amount."""
    return f"Refunded {amount}."


print(agent.run_sync("Refund 500.").output)
