from pydantic import BaseModel, Field
from pydantic_ai import Agent


class Order(BaseModel):
    item: str
    count: int = Field(gt=0)


agent = Agent("anthropic:claude-sonnet-4-6", instructions="Help customers to order.")


@agent.tool_plain
async def place_order(order: Order) -> str:
    """Place an order."""
    return f"Ordered {order.count} x {order.item}."


print(agent.run_sync("Two ropes, please.").output)
