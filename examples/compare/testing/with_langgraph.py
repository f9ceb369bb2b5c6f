import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain.messages import AIMessage
from langchain.tools import tool
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langgraph.graph.state import CompiledStateGraph


@tool
async def price(item: str) -> str:
    """Look a price up."""
    return {"rope": "12 euros"}[item]


def make_agent(model: str | BaseChatModel = "anthropic:claude-sonnet-4-6") -> CompiledStateGraph[Any, Any, Any, Any]:
    return create_agent(model, [price])


class Scripted(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def test_the_price_is_looked_up() -> None:
    call = AIMessage("", tool_calls=[{"name": "price", "args": {"item": "rope"}, "id": "1"}])
    agent = make_agent(Scripted(messages=iter([call, AIMessage("It is 12 euros.")])))
    question = {"messages": [{"role": "user", "content": "How much is rope?"}]}
    result = asyncio.run(agent.ainvoke(question))
    assert [message.text for message in result["messages"][2:]] == ["12 euros", "It is 12 euros."]
