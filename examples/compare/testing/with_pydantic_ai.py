from pydantic_ai import Agent, ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

agent = Agent("anthropic:claude-sonnet-4-6", defer_model_check=True)


@agent.tool_plain
async def price(item: str) -> str:
    """Look a price up."""
    return {"rope": "12 euros"}[item]


def script(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    if len(messages) == 1:
        return ModelResponse([ToolCallPart("price", {"item": "rope"})])
    return ModelResponse([TextPart("It is 12 euros.")])


def test_the_price_is_looked_up() -> None:
    with agent.override(model=FunctionModel(script)):
        result = agent.run_sync("How much is rope?")
    returned = result.all_messages()[2].parts[0]
    assert isinstance(returned, ToolReturnPart)
    assert [returned.content, result.output] == ["12 euros", "It is 12 euros."]
