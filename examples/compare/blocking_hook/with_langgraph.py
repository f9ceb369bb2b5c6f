import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ToolCallRequest, wrap_tool_call
from langchain.messages import ToolMessage
from langchain.tools import tool
from langgraph.types import Command


@wrap_tool_call
async def no_large_refunds(
    request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
) -> ToolMessage | Command[Any]:
    call = request.tool_call
    if call["name"] == "refund" and call["args"]["amount"] > 100:
        return ToolMessage("Refunds over 100 need a manager.", tool_call_id=call["id"], status="error")
    return await handler(request)


@tool
async def refund(amount: float) -> str:
    """Refund an amount."""
    return f"Refunded {amount}."


agent = create_agent("anthropic:claude-sonnet-4-6", [refund], middleware=[no_large_refunds])
question = {"messages": [{"role": "user", "content": "Refund 500."}]}
print(asyncio.run(agent.ainvoke(question))["messages"][-1].text)
