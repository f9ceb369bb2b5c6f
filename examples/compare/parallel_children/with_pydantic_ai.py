import asyncio

from pydantic_ai import Agent, RunContext

researcher = Agent("anthropic:claude-sonnet-4-6", instructions="Research one topic.")
lead = Agent("anthropic:claude-sonnet-4-6", instructions="Give each topic to a researcher.")


@lead.tool
async def research(ctx: RunContext[object], topic: str) -> str:
    """Research one topic."""
    async with researcher.run_stream(topic, usage=ctx.usage) as run:
        async for delta in run.stream_text(delta=True):
            print(ctx.tool_call_id, delta)
        return await run.get_output()


async def main() -> None:
    async with lead.run_stream("Compare Rust and Go.") as run:
        async for delta in run.stream_text(delta=True):
            print("", delta)


asyncio.run(main())
