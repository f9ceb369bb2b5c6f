import asyncio

from deepagents import SubAgent, create_deep_agent
from langchain.messages import AIMessageChunk

researcher: SubAgent = {
    "name": "researcher",
    "description": "Researches one topic.",
    "system_prompt": "Research one topic.",
}
lead = create_deep_agent(
    "anthropic:claude-sonnet-4-6", system_prompt="Give each topic to a researcher.", subagents=[researcher]
)


async def main() -> None:
    question = {"messages": [{"role": "user", "content": "Compare Rust and Go."}]}
    async for ns, (chunk, _) in lead.astream(question, stream_mode="messages", subgraphs=True):
        if isinstance(chunk, AIMessageChunk) and chunk.text:
            print(ns, chunk.text)


asyncio.run(main())
