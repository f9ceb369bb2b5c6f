from retinue import Agent, HookContext, Runtime, tool
from retinue.plugins import StopPolicy


class StopOnSameCall(StopPolicy):
    def reason(self, ctx: HookContext) -> str | None:
        calls = [(call.name, str(call.args)) for message in ctx.messages for call in message.tool_calls]
        return "the model repeats a call" if len(calls) > len(set(calls)) else None


@tool
async def look(place: str) -> str:
    """Look for the key."""
    return "not here"


agent = Agent("seeker", "anthropic:claude-sonnet-4-6", tools=[look], plugins=[StopOnSameCall()])
result = Runtime([agent]).run_sync("seeker", "Find the key.")
print(result.status, result.error)
