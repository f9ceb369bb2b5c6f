from retinue import Agent, Runtime, tool
from retinue.testing import ScriptedModel, call, say


@tool
async def price(item: str) -> str:
    """Look a price up."""
    return {"rope": "12 euros"}[item]


agent = Agent("shop", "anthropic:claude-sonnet-4-6", tools=[price])


def test_the_price_is_looked_up() -> None:
    runtime = Runtime([agent])
    with runtime.override(model=ScriptedModel([call("price", {"item": "rope"}), say("It is 12 euros.")])):
        result = runtime.run_sync("shop", "How much is rope?")
    assert [message.text for message in result.messages[2:]] == ["12 euros", "It is 12 euros."]
