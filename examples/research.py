"""A tool that delegates: which state goes into the child and which comes back is decided here, in plain code."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from retinue import (
    Agent,
    MutationBatch,
    NullSink,
    ParentContext,
    PersistedState,
    Plugin,
    Registrar,
    RunResult,
    RunStatus,
    Runtime,
    StateCommand,
    StateKey,
    StateStore,
    Tool,
    ToolContext,
    ToolDescriptor,
    ToolOutput,
    ToolResult,
    run_child_agent,
    tool,
)
from retinue.testing import ScriptedModel, call, say


@dataclass
class ResearchConfig:
    topic: str = ""
    max_sources: int = 0


@dataclass
class ResearchFindings:
    items: list[str] = field(default_factory=list[str])


@dataclass
class ResearchSummary:
    topic: str = ""
    items: list[str] = field(default_factory=list[str])


config = StateKey("research.config", ResearchConfig, persistent=True)
findings = StateKey("research.findings", ResearchFindings, persistent=True)
summary = StateKey("research.summary", ResearchSummary, persistent=True)


class ResearchPlugin(Plugin):
    name = "research"

    def register(self, r: Registrar) -> None:
        r.key(config)
        r.key(findings)
        r.key(summary)


class ResearchTool(Tool):
    """Succeeds with what the child has to say, however it ended; only a completed child's findings are exported."""

    descriptor = ToolDescriptor(
        "research_topic", "research_topic", "Deep-dive research on a topic with cited sources"
    ).with_parameters(
        {
            "type": "object",
            "properties": {"topic": {"type": "string"}, "max_sources": {"type": "integer", "minimum": 1}},
            "required": ["topic"],
        }
    )

    async def execute(self, args: dict[str, Any], ctx: ToolContext) -> ToolOutput:
        topic, max_sources = args["topic"], args.get("max_sources", 5)
        outcome = await run_child_agent(
            ctx.resolver,
            "researcher",
            f"Research: {topic}",
            parent=ParentContext.of(ctx),
            sink=NullSink(),
            seed=build_seed(topic, max_sources),
            cancellation=ctx.cancellation,
        )
        told = {
            "child_status": outcome.status.value,
            "response": outcome.response,
            "child_run_id": outcome.run_id,
            "steps": outcome.steps,
        }
        return ToolOutput.with_command(ToolResult.success(told), build_export(outcome, topic))


def build_seed(topic: str, max_sources: int) -> PersistedState:
    """Parent to child: a temporary store as a typed encoder. `{config: ResearchConfig(…)}` is the short form."""
    scratch = StateStore()
    scratch.install(ResearchPlugin())
    scratch.commit(MutationBatch().update(config, ResearchConfig(topic, max_sources)))
    return scratch.export_persisted()


def build_export(outcome: RunResult, topic: str) -> StateCommand:
    """Child to parent: stricter than the result, only a completed child may write."""
    command = StateCommand()
    if outcome.status is not RunStatus.COMPLETED or findings not in outcome.state:
        return command
    return command.update(summary, ResearchSummary(topic, outcome.state[findings].items))


@tool
async def search(query: str, ctx: ToolContext) -> ToolOutput:
    """Search; the seed says how many sources are wanted."""
    wanted = ctx.state(config)
    found = [f"source {n} on {wanted.topic}: {query}" for n in range(1, wanted.max_sources + 1)]
    return ToolOutput(found, update={findings: ResearchFindings(found)})


# Scripts stand in for models, so that the example runs without a key.
researcher = Agent(
    "researcher",
    ScriptedModel(
        lambda request: say("Found them.") if request.messages[-1].role == "tool" else call("search", {"query": "news"})
    ),
    "Research what you are asked.",
    [search],
    [ResearchPlugin()],
)
parent = Agent(
    "parent",
    ScriptedModel([call("research_topic", {"topic": "rust", "max_sources": 2}), say("Rust is fine.")]),
    "Delegate research.",
    [ResearchTool()],
    [ResearchPlugin()],
)


async def main() -> None:
    run = Runtime([parent, researcher]).stream("parent", "What is new in Rust?")
    async for event in run:
        print(event.seq, "/".join(event.ns) or "-", event.agent, event.kind)
    result = await run.result()
    print(result.status, result.response, result.state[summary])


if __name__ == "__main__":
    asyncio.run(main())
