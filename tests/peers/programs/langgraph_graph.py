"""A graph for `langgraph dev`."""

import asyncio

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt


class Words(BaseChatModel):
    """Says the words of the last message after its first."""

    @property
    def _llm_type(self):
        return "words"

    def _generate(self, messages, stop=None, run_manager=None, **options):
        text = messages[-1].content.partition(" ")[2]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    async def _astream(self, messages, stop=None, run_manager=None, **options):
        for number, word in enumerate(messages[-1].content.split()[1:]):
            await asyncio.sleep(0.05)
            yield ChatGenerationChunk(message=AIMessageChunk(content=f" {word}" if number else word))


async def talk(state):
    verb, _, rest = state["messages"][-1].content.partition(" ")
    if verb == "ask":
        return {"messages": [AIMessage(f"You said {interrupt(rest)}.")]}
    if verb == "hang":
        await asyncio.Event().wait()
    return {"messages": [await Words().ainvoke(state["messages"])]}


building = StateGraph(MessagesState)
building.add_node("talk", talk)
building.add_edge(START, "talk")
building.add_edge("talk", END)
graph = building.compile()
