"""Metrics count what runs did and tell series apart by few names."""

from __future__ import annotations

from typing import Any

from inline_snapshot import snapshot

from retinue import Agent, Runtime, ToolResult, Usage, tool
from retinue.testing import ScriptedModel, call, fail, say
from tests.telemetry.collector import Collector

spent = Usage(requests=1, input_tokens=100, output_tokens=20, cost=0.25)


@tool
async def work() -> str:
    """Work."""
    return "ok"


def parent_and_child() -> Agent:
    child = Agent("child", ScriptedModel([call("work"), say("ok", usage=spent)], name="small"), tools=[work])
    turns = [call("task", {"subagent_type": "child", "description": "x"}), say("ok", usage=spent)]
    return Agent("parent", ScriptedModel(turns), subagents=[child])


def counted(got: Collector, name: str) -> list[tuple[dict[str, Any], Any]]:
    """Series with their counts, or sums where there is no count; times differ each time."""
    return [(about, value[0] if isinstance(value, tuple) else value) for about, value in got.points(name)]


async def test_a_tree_in_numbers() -> None:
    got = Collector()
    await Runtime([parent_and_child()], sinks=[got.sink]).run("parent", "go")
    assert counted(got, "retinue.runs") == snapshot(
        [
            ({"gen_ai.agent.name": "child", "retinue.run.status": "completed", "retinue.run.is_child": True}, 1),
            ({"gen_ai.agent.name": "parent", "retinue.run.status": "completed", "retinue.run.is_child": False}, 1),
        ]
    )
    assert counted(got, "retinue.runs.active") == snapshot(
        [({"gen_ai.agent.name": "parent"}, 0), ({"gen_ai.agent.name": "child"}, 0)]
    )
    assert counted(got, "retinue.steps") == snapshot(
        [({"gen_ai.agent.name": "parent"}, 2), ({"gen_ai.agent.name": "child"}, 2)]
    )
    assert counted(got, "retinue.cost") == snapshot(
        [
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "small",
                    "gen_ai.response.model": "small",
                    "gen_ai.agent.name": "child",
                },
                0.25,
            ),
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "scripted",
                    "gen_ai.response.model": "scripted",
                    "gen_ai.agent.name": "parent",
                },
                0.25,
            ),
        ]
    )
    assert got.points("gen_ai.client.token.usage") == snapshot(
        [
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "small",
                    "gen_ai.response.model": "small",
                    "gen_ai.token.type": "input",
                },
                (1, 100),
            ),
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "small",
                    "gen_ai.response.model": "small",
                    "gen_ai.token.type": "output",
                },
                (1, 20),
            ),
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "scripted",
                    "gen_ai.response.model": "scripted",
                    "gen_ai.token.type": "input",
                },
                (1, 100),
            ),
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "scripted",
                    "gen_ai.response.model": "scripted",
                    "gen_ai.token.type": "output",
                },
                (1, 20),
            ),
        ]
    )
    assert counted(got, "gen_ai.client.operation.duration") == snapshot(
        [
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "scripted",
                    "gen_ai.response.model": "scripted",
                },
                2,
            ),
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "small",
                    "gen_ai.response.model": "small",
                },
                2,
            ),
        ]
    )
    assert counted(got, "gen_ai.client.operation.time_to_first_chunk") == snapshot(
        [
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "scripted",
                    "gen_ai.response.model": "scripted",
                },
                2,
            ),
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "small",
                    "gen_ai.response.model": "small",
                },
                2,
            ),
        ]
    )
    assert counted(got, "gen_ai.invoke_agent.duration") == snapshot(
        [({"gen_ai.agent.name": "child"}, 1), ({"gen_ai.agent.name": "parent"}, 1)]
    )
    assert got.points("gen_ai.invoke_agent.inference_calls") == snapshot(
        [({"gen_ai.agent.name": "child"}, (1, 2)), ({"gen_ai.agent.name": "parent"}, (1, 2))]
    )
    assert got.points("gen_ai.invoke_agent.tool_calls") == snapshot(
        [({"gen_ai.agent.name": "child"}, (1, 1)), ({"gen_ai.agent.name": "parent"}, (1, 1))]
    )
    assert counted(got, "gen_ai.execute_tool.duration") == snapshot(
        [
            ({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "work", "gen_ai.agent.name": "child"}, 1),
            ({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "task", "gen_ai.agent.name": "parent"}, 1),
        ]
    )


async def test_what_fails_or_waits_is_counted_as_that() -> None:
    @tool
    async def ask() -> ToolResult:
        """Ask."""
        return ToolResult.suspended("may I?")

    got = Collector()
    broken = Agent("broken", ScriptedModel([fail(OSError("down"))]))
    waiting = Agent("waiting", ScriptedModel([call("ask")]), tools=[ask])
    runtime = Runtime([broken, waiting], sinks=[got.sink])
    await runtime.run("broken", "go")
    await runtime.run("waiting", "go")
    assert counted(got, "retinue.runs") == snapshot(
        [
            ({"gen_ai.agent.name": "broken", "retinue.run.status": "failed", "retinue.run.is_child": False}, 1),
            ({"gen_ai.agent.name": "waiting", "retinue.run.status": "suspended", "retinue.run.is_child": False}, 1),
        ]
    )
    assert counted(got, "retinue.runs.active") == snapshot(
        [({"gen_ai.agent.name": "broken"}, 0), ({"gen_ai.agent.name": "waiting"}, 0)]
    )
    assert counted(got, "gen_ai.client.operation.duration") == snapshot(
        [
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "scripted",
                    "error.type": "OSError",
                },
                1,
            ),
            (
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.provider.name": "testing",
                    "gen_ai.request.model": "scripted",
                    "gen_ai.response.model": "scripted",
                },
                1,
            ),
        ]
    )
    assert counted(got, "gen_ai.invoke_agent.duration") == snapshot(
        [({"gen_ai.agent.name": "broken", "error.type": "OSError"}, 1), ({"gen_ai.agent.name": "waiting"}, 1)]
    )
