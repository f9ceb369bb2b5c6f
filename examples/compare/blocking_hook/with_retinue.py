from retinue import Agent, Block, Runtime, tool
from retinue.plugins import BeforeToolContext, hook


@hook("before_tool")
def no_large_refunds(ctx: BeforeToolContext) -> Block | None:
    if ctx.call.name == "refund" and ctx.call.args["amount"] > 100:
        return Block("Refunds over 100 need a manager.")
    return None


@tool
async def refund(amount: float) -> str:
    """Refund an amount."""
    return f"Refunded {amount}."


agent = Agent("till", "anthropic:claude-sonnet-4-6", tools=[refund], plugins=[no_large_refunds])
print(Runtime([agent]).run_sync("till", "Refund 500.").response)
