import asyncio
from typing import Any

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import after_model
from langchain.messages import AIMessage
from langchain.tools import tool
from langgraph.runtime import Runtime


@after_model(can_jump_to=["end"])
def stop_on_same_call(state: AgentState[Any], runtime: Runtime[None]) -> dict[str, Any] | None:
    answers = [message for message in state["messages"] if isinstance(message, AIMessage)]
    calls = [(call["name"], str(call["args"])) for answer in answers for call in answer.tool_calls]
    if len(calls) > len(set(calls)):
        return {"jump_to": "end", "messages": [AIMessage("failed: the model repeats a call")]}
    return None


@tool
async def look(place: str) -> str:
    """Look for the key."""
    return "not here"


agent = create_agent("anthropic:claude-sonnet-4-6", [look], middleware=[stop_on_same_call])
question = {"messages": [{"role": "user", "content": "Find the key."}]}
print(asyncio.run(agent.ainvoke(question))["messages"][-1].text)
