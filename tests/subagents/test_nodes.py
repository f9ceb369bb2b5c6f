"""Two nodes on one database: the conversation of a sub-agent is with one run at a time, whichever node has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import Decision, HarnessAgent, ModelRequest, Runtime, ToolContext, ToolResult, tool
from retinue.testing import call, say
from tests.subagents.stage import harness, said, send, spawn, stage, told
from tests.waiting import until

GP = "general-purpose"
BUSY = (
    "Error: agent:general-purpose:<1> is busy: it works on an earlier message in another process, or waits there for a "
    "decision. Look at its task with task_list(), and {} when that has ended."
)


class Nodes:
    """Two runtimes on one database, each with its own harness in the same folder. A child told `wait` waits for `gate`."""

    def __init__(self, a: Runtime, b: Runtime, first: HarnessAgent, second: HarnessAgent, gate: asyncio.Event) -> None:
        self.a, self.b, self.first, self.second, self.gate = a, b, first, second, gate

    async def spawn_in_background(self, task: str = "wait") -> str:
        """Have the first node start a sub-agent with the label x; return the run that did."""
        stage(self.first).go_on(spawn(GP, task, label="x", timeout_seconds=0), say("end"))
        run = self.a.stream("boss", "go", thread_id="s1")
        await run.result()
        await until(lambda: stage(self.first).of_children)
        return run.run_id

    async def ask(self, *turns: Any) -> list[str]:
        """Have the model of the second node take these turns; return what its tools answer."""
        stage(self.second).go_on(*turns, say("end"))
        return told(await self.b.run("boss", "more", thread_id="s1"))

    async def child_of(self, run_id: str) -> str:
        async for event in self.a.events(run_id):
            if event.kind == "child_started":
                return event.child_run_id
        raise AssertionError("it has no child")

    async def waits(self, run_id: str) -> bool:
        record = await self.a.store.load_run(run_id)
        return record is not None and record.result is not None and record.result.status.is_waiting

    async def ended(self, run_id: str) -> None:
        async for _ in self.a.events(run_id):
            pass


@tool
def confirm(ctx: ToolContext) -> Any:
    """Ask a human."""
    return ToolResult.suspended("sure?") if ctx.resume_input is None else f"human said {ctx.resume_input}"


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with two_nodes(tmp_path) as made:
        yield made


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[Nodes]:
    gate = asyncio.Event()

    async def child(request: ModelRequest) -> Any:
        text = request.messages[-1].text
        if text == "wait":
            await gate.wait()
        return call("confirm", id="c1") if text == "ask" else say(f"did {text}")

    made = [harness(folder, child=child, tools=[confirm]) for _ in range(2)]
    for one in made:
        stage(one).parent_turns.clear()
    url = f"sqlite:///{folder}/app.db"
    async with Runtime.open(url, [made[0]]) as a, Runtime.open(url, [made[1]]) as b:
        yield Nodes(a, b, made[0], made[1], gate)
        gate.set()


@pytest.mark.parametrize("background", [False, True])
async def test_a_message_is_refused_while_another_node_has_the_sub_agent(nodes: Nodes, background: bool) -> None:
    run_id = await nodes.spawn_in_background()
    given: dict[str, Any] = {"timeout_seconds": 0} if background else {}
    assert await nodes.ask(send("two", label="x", **given)) == [BUSY.format("send your message")]
    assert stage(nodes.second).of_children == []
    nodes.gate.set()
    await nodes.ended(run_id)
    (answer,) = await nodes.ask(send("three", label="x"))
    assert answer.endswith("status: ok\nreply:\ndid three")
    assert said(stage(nodes.second).of_children[-1]) == ["wait", "did wait", "three"]


async def test_another_node_cannot_close_a_sub_agent_at_work(nodes: Nodes) -> None:
    run_id = await nodes.spawn_in_background()
    closing = call("agent_close", {"label": "x"})
    assert await nodes.ask(closing) == [BUSY.format("close it")]
    nodes.gate.set()
    await nodes.ended(run_id)
    assert await nodes.ask(closing) == ["agent_key: agent:general-purpose:<1>\nstatus: closed"]


async def test_one_that_waits_for_a_human_is_busy_for_other_nodes(nodes: Nodes) -> None:
    run_id = await nodes.spawn_in_background("ask")
    child_id = await nodes.child_of(run_id)
    await until(lambda: nodes.waits(child_id))
    assert await nodes.ask(send("two", label="x")) == [BUSY.format("send your message")]
    await nodes.b.resume(child_id, {"c1": Decision.resume("yes")})
    await nodes.ended(run_id)
    await nodes.ask(send("three", label="x"))
    assert said(stage(nodes.second).of_children[-1]) == ["ask", "", "human said yes", "did human said yes", "three"]
