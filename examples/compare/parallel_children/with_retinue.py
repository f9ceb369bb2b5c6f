import asyncio

from retinue import Agent, Runtime

researcher = Agent(
    "researcher", "anthropic:claude-sonnet-4-6", "Research one topic.", description="Researches one topic."
)
lead = Agent("lead", "anthropic:claude-sonnet-4-6", "Give each topic to a researcher.", subagents=[researcher])


async def main() -> None:
    async for event in Runtime([lead]).stream("lead", "Compare Rust and Go."):
        if event.kind == "text_delta":
            print(event.ns, event.delta)


asyncio.run(main())
