from pydantic import BaseModel, Field

from retinue import Agent, Runtime, tool


class Order(BaseModel):
    item: str
    count: int = Field(gt=0)


@tool
async def place_order(order: Order) -> str:
    """Place an order."""
    return f"Ordered {order.count} x {order.item}."


agent = Agent("shop", "anthropic:claude-sonnet-4-6", "Help customers to order.", tools=[place_order])
print(Runtime([agent]).run_sync("shop", "Two ropes, please.").response)
