"""A front end that knows sub-agents as calls named `task`, in TypeScript, run by Node against a real server.

`front_end/handler.ts` is the front end as it is published; nothing of it is changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Child, HarnessAgent, ModelRequest, Runtime, SubagentDeclaration, ToolContext, tool
from retinue.testing import ScriptedModel, call, say

from ..node import run_typescript
from ..remote.server import TaskServer
from ..server.serving import TOKEN, asking, serving

FOLDER = Path(__file__).parent / "front_end"


class Stage:
    """What the agents of one scenario share."""

    def __init__(self, workspace: Path, remote: str) -> None:
        self.workspace, self.remote, self.opened = workspace, remote, asyncio.Event()


@tool
async def look() -> str:
    """Look."""
    return "nothing"


def worker(name: str, *, ids: str = "c1") -> Agent:
    """An agent that looks once and says what it was asked, under an id that others use too."""

    def turn(request: ModelRequest) -> Any:
        asked = next(message.text for message in request.messages if message.role == "user")
        return say(f"{name} did: {asked}") if request.messages[-1].role == "tool" else call("look", {}, id=ids)

    return Agent(name, ScriptedModel(turn), tools=[look], description=name)


def delegate(agent: str, call_id: str) -> Any:
    return call("task", {"subagent_type": agent, "description": f"for {agent}"}, id=call_id)


def nesting() -> Agent:
    """An agent that delegates under the id of the call that started it."""
    model = ScriptedModel([delegate("leaf", "c1"), say("middle is done")])
    return Agent("middle", model, subagents=[worker("leaf")], description="middle")


def by_task(stage: Stage) -> Agent:
    model = ScriptedModel([[delegate("w1", "c1"), delegate("w2", "c2")], call("look", {}, id="c3"), say("end")])
    return Agent("root", model, subagents=[worker("w1"), worker("w2")], tools=[look])


def nested(stage: Stage) -> Agent:
    return Agent("root", ScriptedModel([delegate("middle", "c1"), say("end")]), subagents=[nesting()])


def by_agent_tool(stage: Stage) -> Agent:
    model = ScriptedModel([call("agent_run_w1", {"prompt": "look around"}, id="c1"), say("end")])
    return Agent("root", model, tools=[worker("w1").as_tool()])


@tool
async def research(topic: str, ctx: ToolContext) -> str:
    """Have somebody research."""
    return f"report: {(await ctx.run_child(worker('w1'), f'Research: {topic}')).response}"


@tool
async def fan_out(ctx: ToolContext) -> str:
    """Ask three at once."""
    asked = [Child(worker(f"w{number}"), f"part {number}") for number in (1, 2, 3)]
    return " | ".join([str(result.response) for result in await ctx.run_children(asked)])


def by_hand(stage: Stage) -> Agent:
    model = ScriptedModel([[delegate("w2", "c1"), call("research", {"topic": "Rust"}, id="c2")], say("end")])
    return Agent("root", model, tools=[research], subagents=[worker("w2")])


def several(stage: Stage) -> Agent:
    return Agent("root", ScriptedModel([call("fan_out", {}, id="c1"), say("end")]), tools=[fan_out])


def harness(stage: Stage, model: Callable[[ModelRequest], Any], **options: Any) -> HarnessAgent:
    @tool
    async def wait_for_the_end() -> str:
        """Wait until the root has ended."""
        await stage.opened.wait()
        return "it has ended"

    def background(request: ModelRequest) -> Any:
        is_done = request.messages[-1].role == "tool"
        return say("worked on") if is_done else call("wait_for_the_end", {}, id="c1")

    late = Agent("late", ScriptedModel(background), tools=[wait_for_the_end], description="late")
    known = [worker("w1"), late, SubagentDeclaration("far", "far away", url=stage.remote)]
    return HarnessAgent("root", ScriptedModel(model), workspace=stage.workspace, subagents=known, **options)


def spawn(agent: str, call_id: str, **more: Any) -> Any:
    return call("agent_spawn", {"agent_id": agent, "task": f"for {agent}", **more}, id=call_id)


def turns(*given: Any) -> Callable[[ModelRequest], Any]:
    """A model that takes turns, whatever news of tasks stand between."""

    def turn(request: ModelRequest) -> Any:
        done = sum(message.role == "assistant" for message in request.messages)
        one = given[done] if done < len(given) else say("end")
        return one(request) if callable(one) else one

    return turn


def spawned(stage: Stage) -> Agent:
    return harness(stage, turns(spawn("w1", "c1")))


def sent(stage: Stage) -> Agent:
    def again(request: ModelRequest) -> Any:
        answer = next(message.text for message in request.messages if message.role == "tool")
        (key,) = [line.split(": ")[1] for line in answer.splitlines() if line.startswith("agent_key")]
        return call("agent_send", {"agent_key": key, "message": "once more"}, id="c2")

    return harness(stage, turns(spawn("w1", "c1", label="one"), again))


def in_background(stage: Stage) -> Agent:
    return harness(stage, turns([spawn("late", "c1", timeout_seconds=0), spawn("w1", "c2")]))


def remote(stage: Stage) -> Agent:
    return harness(stage, turns(spawn("far", "c1")))


ALL = {
    by_task: {"c1": ("w1", "for w1", "w1 did: for w1"), "c2": ("w2", "for w2", "w2 did: for w2")},
    nested: {"c1": ("middle", "for middle", "middle is done")},
    by_agent_tool: {"c1": ("w1", "look around", "w1 did: look around")},
    by_hand: {
        "c1": ("w2", "for w2", "w2 did: for w2"),
        "c2": ("w1", "Research: Rust", "report: w1 did: Research: Rust"),
    },
    several: {
        "c1": ("w1", "part 1", "w1 did: part 1 | w2 did: part 2 | w3 did: part 3"),
        "c1~2": ("w2", "part 2", "w2 did: part 2"),
        "c1~3": ("w3", "part 3", "w3 did: part 3"),
    },
    spawned: {"c1": ("w1", "for w1", "w1 did: for w1")},
    sent: {"c1": ("w1", "for w1", "w1 did: for w1"), "c2": ("w1", "once more", "w1 did: for w1")},
    in_background: {"c1": ("late", "for late", "worked on"), "c2": ("w1", "for w1", "w1 did: for w1")},
    remote: {"c1": ("far", "for far", "middle is done")},
}
"""The sub-agents of each scenario: type, description, and the end of the result."""


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
async def test_the_front_end_shows_every_sub_agent_from_its_start_to_its_end(make: Any, tmp_path: Path) -> None:
    program = tmp_path / "front_end.ts"
    handler = (FOLDER / "handler.ts").read_text("utf-8")
    program.write_text((FOLDER / "client.ts").read_text("utf-8").replace("HANDLER", f"\n{handler}", 1), "utf-8")
    far = Agent("far", nesting().model, subagents=[worker("leaf")])
    async with Runtime([far]) as there, TaskServer(there, has_events=True) as server:
        stage = Stage(tmp_path / "work", server.url)
        runtime = Runtime.open(f"sqlite:///{tmp_path}/a.db", [make(stage)])
        async with serving(runtime) as site, asking(site.url, TOKEN) as client:
            run_id = (await client.start("root"))["run_id"]
            url = f"{site.url}/api/v1/runs/{run_id}/parts?modes=updates,messages"
            watching = asyncio.create_task(run_typescript(program, url, TOKEN))
            assert (await client.result(run_id))["response"] == "end"
            stage.opened.set()  # a background child goes on only now
            live = json.loads(await watching)
            replayed = json.loads(await run_typescript(program, url, TOKEN))
    for seen in (live, replayed):
        assert seen["problems"] == []
        assert seen["routed"].keys() == seen["subagents"].keys() == ALL[make].keys()
        for call_id, (kind, description, result) in ALL[make].items():
            agent = seen["subagents"][call_id]
            assert (agent["type"], agent["description"], agent["status"]) == (kind, description, "complete")
            assert agent["result"].endswith(result)
