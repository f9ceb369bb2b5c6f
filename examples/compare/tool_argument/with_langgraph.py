import asyncio

from langchain.agents import create_agent
from langchain.tools import tool
from pydantic import BaseModel, Field


class Order(BaseModel):
    item: str
    count: int = Field(gt=0)


@tool
async def place_order(order: Order) -> str:
    """Place an order."""
    return f"Ordered {order.count} x {order.item}."


agent = create_agent("anthropic:claude-sonnet-4-6", [place_order], system_prompt="Help customers to order.")
question = {"messages": [{"role": "user", "content": "Two ropes, please."}]}
print(asyncio.run(agent.ainvoke(question))["messages"][-1].text)
