"""What type checkers must find out by themselves; `scripts/check` checks it with mypy and pyright."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from pydantic import BaseModel

from retinue import (
    Agent,
    Block,
    Plugin,
    Registrar,
    ResumeMode,
    Run,
    RunResult,
    Runtime,
    StateCommand,
    StateKey,
    SuspendTicket,
    ToolContext,
    ToolOutput,
    tool,
)
from retinue.client import Client
from retinue.events import ErrorRaised, TextDelta, ToolCallFinished
from retinue.messages import Message
from retinue.plugins import AfterToolContext, BeforeToolContext, InferenceContext


@dataclass
class Findings:
    items: list[str]


class Report(BaseModel):
    title: str


assert_type(SuspendTicket("t", "ask", "Sure?", {}, resume_mode="use_decision").resume_mode, ResumeMode)
plain = Agent("a", "openai:gpt-4o", "Be brief.", max_steps=3)
typed = Agent("b", "openai:gpt-4o", output=Findings, subagents=[plain, "c"])
lists = Agent("c", "openai:gpt-4o", output=list[Report])
either = Agent("d", "openai:gpt-4o", output=int | str)
assert_type(plain, Agent[None])
assert_type(typed, Agent[Findings])
assert_type(lists, Agent[list[Report]])
assert_type(either, Agent[Any])
agents: list[Agent] = [plain, typed, lists]

findings = StateKey("findings", Findings, persistent=True)
seen = StateKey("seen", set[str], update=str, reduce=lambda s, url: s | {url}, merge="commutative")
count = StateKey("count", int, default=3)
assert_type(findings, StateKey[Findings, Findings])
assert_type(seen, StateKey[set[str], str])
assert_type(count, StateKey[int, int])


@tool
async def greet(name: str, ctx: ToolContext, times: int = 1) -> ToolOutput:
    """Greet."""
    assert_type(ctx.state(seen), set[str])
    assert_type(ctx.state(findings).items, list[str])
    outcome = await ctx.run_child(typed, f"Research {name}")
    assert_type(outcome, RunResult[Findings])
    assert_type(outcome.state[findings], Findings)
    await ctx.report_activity("reading", name)
    await ctx.report_activity_delta("reading", [{"op": "replace", "path": "", "value": name}])
    await ctx.report_progress("running", "half", 0.5)
    ctx.report_progress("done")
    await ctx.stream_output(name)
    ctx.emit({"name": name})
    assert_type(await ctx.run_child("b", "by name"), RunResult[Any])
    return ToolOutput(name * times, update={seen: name})


@tool(name="double", retries=2)
def twice(number: int) -> int:
    """Double."""
    return 2 * number


assert_type(twice(number=3), int)


class Guard(Plugin):
    def register(self, r: Registrar) -> None:
        r.key(seen)
        r.hook("before_tool", self.before)
        r.hook("after_tool", self.after, priority=10)
        r.hook("before_inference", self.inference)

    def before(self, ctx: BeforeToolContext) -> Block | None:
        return Block("no") if ctx.call.name == "greet" and len(ctx.state(seen)) > 3 else None

    async def after(self, ctx: AfterToolContext) -> StateCommand | None:
        return StateCommand().update(seen, ctx.result.text)

    def inference(self, ctx: InferenceContext) -> None:
        assert_type(ctx.request.messages, tuple[Message, ...])


async def use_a_server() -> None:
    async with Client("http://localhost:8000", token="secret") as client:
        assert_type((await client.run(typed, "go")).output, Findings | None)
        assert_type((await client.run(typed, "go")).unwrap(), Findings)
        assert_type(client.stream(lists, "go"), Run[list[Report]])
        home: Client | Runtime = client
        async for event in home.stream("b", "go"):
            if event.kind == "text_delta":
                assert_type(event.delta, str)


async def use() -> None:
    async with Runtime.open("memory:", agents, recover=False) as runtime:
        result = await runtime.run(typed, "go", thread_id="t")
        assert_type(result.output, Findings | None)
        assert_type(result.unwrap(), Findings)
        if result.output is not None:
            assert_type(result.output, Findings)
        assert_type((await runtime.run("b", "go")).unwrap(), Any)
        run = runtime.stream(lists, "go")
        assert_type(run, Run[list[Report]])
        assert_type((await run.result()).output, list[Report] | None)
        assert_type((await run.result()).unwrap(), list[Report])
        async for event in run:
            if event.kind == "text_delta":
                assert_type(event.delta, str)
            elif event.kind == "tool_call_finished":
                assert_type(event, ToolCallFinished)
            elif event.kind == "unknown":
                assert_type(event.original, dict[str, Any])
            if isinstance(event, ErrorRaised):
                assert_type(event.fatal, bool)
            match event:
                case TextDelta(delta=text):
                    assert_type(text, str)
                case _:
                    pass
