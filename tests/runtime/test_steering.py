"""Messages for runs at work: read with the next request, once and in order, whatever the run does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    Decision,
    Limits,
    Message,
    RunStatus,
    Runtime,
    ToolContext,
    ToolResult,
    UnknownRun,
    tool,
)
from retinue.errors import RunEnded
from retinue.events import MessageAdded, MessageDropped
from retinue.testing import ScriptedModel, call, say

from ..waiting import until

Open = Callable[..., Runtime]


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "memory":
        return Runtime
    return lambda agents=(), **options: Runtime.open(f"sqlite:///{tmp_path}/app.db", agents, **options)


class Desk:
    """An agent that makes a call, which waits, and then says what its user has said. It notes its requests."""

    def __init__(self, *turns: Any, **options: Any) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.asked: list[list[tuple[str, str]]] = []

        @tool
        async def work() -> str:
            """Work."""
            self.begun.set()
            await self.gate.wait()
            return "worked"

        @tool
        async def ask(ctx: ToolContext) -> Any:
            """Ask."""
            return ctx.resume_input or ToolResult.suspended("sure?")

        def model(request: Any) -> Any:
            self.asked.append([(message.role.value, message.text) for message in request.messages])
            return turns[min(len(self.asked), len(turns)) - 1] if turns else self._turn()

        self.agent = Agent("desk", ScriptedModel(model), tools=[work, ask], **options)

    def _turn(self) -> Any:
        return call("work", id="w1") if len(self.asked) == 1 else say(f"heard {self.heard(-1)}")

    def heard(self, request: int) -> list[str]:
        """What users have said in a request."""
        return [text for role, text in self.asked[request] if role == "user"]


async def test_it_is_read_after_the_results_of_the_calls(opened: Open) -> None:
    desk = Desk()
    async with opened([desk.agent]) as runtime:
        run = runtime.stream("desk", "go", thread_id="t")
        await desk.begun.wait()
        await run.send("one")
        await runtime.send(run.run_id, Message.user("two", id="mine"))
        await runtime.send(run.run_id, [Message.user("two", id="mine"), Message.user("three")])
        desk.gate.set()
        result = await run.result()
        assert result.response == "heard ['go', 'one', 'two', 'three']"
        assert [role for role, _ in desk.asked[1]] == ["user", "assistant", "tool", "user", "user", "user"]
        events = [event async for event in runtime.events(run.run_id)]
        added = [event for event in events if isinstance(event, MessageAdded)]
        assert [event.message.text for event in added] == ["one", "two", "three"]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        said = [(message.role.value, message.text) for message in await runtime.messages("t")]
        assert said == [*desk.asked[1], ("assistant", result.response)]
        tree = (await runtime.log(run.run_id).tree()).snapshot()
        assert tree is not None
        assert [message["role"] for message in tree["run"]["messages"]] == [role for role, _ in said]
        assert tree["run"]["queued"] == []


async def test_after_the_last_answer_one_more_step_follows(opened: Open) -> None:
    runs: list[Any] = []
    answered, heard = asyncio.Event(), list[list[str]]()

    async def model(request: Any) -> Any:
        heard.append([message.text for message in request.messages])
        if len(heard) == 1:  # it has begun to give its last answer
            await runs[0].send("and this?")
            answered.set()
        return say(f"answer {len(heard)}")

    async with opened([Agent("a", ScriptedModel(model))]) as runtime:
        runs.append(runtime.stream("a", "go"))
        result = await runs[0].result()
        assert answered.is_set()
        assert (result.status, result.response, result.steps) == (RunStatus.COMPLETED, "answer 2", 2)
        assert heard[1] == ["go", "answer 1", "and this?"]
        with pytest.raises(RunEnded):
            await runs[0].send("too late")


async def test_a_run_that_waits_reads_it_after_its_answer(opened: Open) -> None:
    desk = Desk(call("ask", id="a1"), say("done"))
    async with opened([desk.agent]) as runtime:
        run = runtime.stream("desk", "go")
        assert (await run.result()).status is RunStatus.SUSPENDED
        await runtime.send(run.run_id, "by the way")
        assert len(desk.asked) == 1
        tree = (await runtime.log(run.run_id).tree()).snapshot()
        assert tree is not None
        assert [message["parts"][0]["text"] for message in tree["run"]["queued"]] == ["by the way"]
        assert (await runtime.resume(run.run_id, {"a1": Decision.answer("yes")})).status is RunStatus.COMPLETED
        assert [text for _, text in desk.asked[1]][-2:] == ["yes", "by the way"]


async def test_a_run_that_is_stopped_first_says_so(opened: Open) -> None:
    desk = Desk(call("ask", id="a1"), say("done"))
    async with opened([desk.agent]) as runtime:
        run = runtime.stream("desk", "go")
        await run.result()
        await runtime.send(run.run_id, [Message.user("by the way", id="mine")])
        await runtime.cancel(run.run_id, reason="enough")
        events = [event async for event in runtime.events(run.run_id)]
        dropped = [(event.message_id, event.reason) for event in events if isinstance(event, MessageDropped)]
        assert dropped == [("mine", "enough")]
        assert events[-1].kind == "run_finished"


async def test_what_cannot_be_read_any_more_is_refused(opened: Open) -> None:
    desk = Desk(max_steps=1)
    async with opened([desk.agent]) as runtime:
        run = runtime.stream("desk", "go")
        await desk.begun.wait()
        with pytest.raises(match="max_steps=1"):
            await run.send("one")
        with pytest.raises(UnknownRun):
            await runtime.send(run.run_id, "one", ns=("tools:none",))
        with pytest.raises(ConfigurationError, match="the role"):
            await runtime.send(run.run_id, Message.assistant("no", id="x"))
        with pytest.raises(ConfigurationError, match="empty"):
            await run.send("")
        desk.gate.set()
        await run.result()
        with pytest.raises(RunEnded, match="failed"):
            await runtime.send(run.run_id, "one")
        with pytest.raises(UnknownRun):
            await runtime.send("run_none", "one")


async def test_a_run_in_its_closing_turn_refuses_it(opened: Open) -> None:
    desk = Desk(limits=Limits(steps=2))
    runs: list[Any] = []
    problems: list[RunEnded] = []

    async def model(request: Any) -> Any:
        if any("[limit:" in message.text for message in request.messages):
            with pytest.raises(RunEnded, match="limit") as raised:
                await runs[0].send("one more thing")
            problems.append(raised.value)
            return say("the end")
        return call("work", id="w1")

    desk.gate.set()
    agent = Agent("desk", ScriptedModel(model), tools=desk.agent.tools, limits=Limits(steps=2))
    async with opened([agent]) as runtime:
        runs.append(runtime.stream("desk", "go"))
        assert (await runs[0].result()).response == "the end"
    assert len(problems) == 1


def team(desk: Desk) -> Agent:
    task = call("task", {"subagent_type": "desk", "description": "go"}, id="b1")
    return Agent(
        "boss",
        ScriptedModel(lambda r: say(r.messages[-1].text) if len(r.messages) > 1 else task),
        subagents=[desk.agent],
    )


async def test_a_child_is_told_by_its_namespace_and_its_handle(opened: Open) -> None:
    desk = Desk()
    async with opened([team(desk)]) as runtime:
        run = runtime.stream("boss", "go")
        child = await anext(aiter(run.children))
        await desk.begun.wait()
        await child.send("one")
        await runtime.send(run.run_id, "two", ns=child.ns)
        desk.gate.set()
        assert (await run.result()).response == "heard ['go', 'one', 'two']"


async def test_another_process_tells_a_run_that_works_and_one_that_waits(tmp_path: Path) -> None:
    url, working = f"sqlite:///{tmp_path}/app.db", Desk()
    waiting = Desk(call("ask", id="a1"), say("done"))
    waiting.agent = Agent("waiter", waiting.agent.model, tools=waiting.agent.tools)
    agents = [working.agent, waiting.agent]
    async with Runtime.open(url, agents) as first, Runtime.open(url, agents, recover=False) as second:
        run = first.stream("desk", "go")
        await working.begun.wait()
        await second.send(run.run_id, "from there")
        working.gate.set()
        assert (await run.result()).response == "heard ['go', 'from there']"
        with pytest.raises(RunEnded):
            await second.send(run.run_id, "late")
        asked = await first.run("waiter", "go")
        await second.send(asked.run_id, "from there")
        store: Any = second.store
        await until(lambda: _is_free(store, asked.run_id))
        result = await first.resume(asked.run_id, {"a1": Decision.answer("yes")})
        assert result.status is RunStatus.COMPLETED
        assert [text for _, text in waiting.asked[1]][-2:] == ["yes", "from there"]


async def _is_free(store: Any, run_id: str) -> bool:
    return await store.owner_of(run_id) is None


async def test_many_at_once_are_read_once_each(opened: Open) -> None:
    """Messages come while calls run, between steps and as the run ends: each is read once, or refused."""
    heard: list[str] = []
    refused: list[str] = []
    runs: list[Any] = []

    @tool
    async def work() -> str:
        """Work."""
        await asyncio.sleep(0)
        return "worked"

    async def model(request: Any) -> Any:
        heard[:] = [message.text for message in request.messages if message.role == "user"]
        for _ in range(3):
            await asyncio.sleep(0)
        return say("done") if len(heard) > 15 else call("work")

    async def tell(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)
        try:
            await runs[0].send(f"m{number}")
        except RunEnded:
            refused.append(f"m{number}")

    async with opened([Agent("a", ScriptedModel(model), tools=[work], max_steps=1_000)]) as runtime:
        runs.append(runtime.stream("a", "go"))
        await runs[0].stored()
        await asyncio.gather(*[tell(number) for number in range(60)])
        assert (await runs[0].result()).status is RunStatus.COMPLETED
        accepted = [f"m{number}" for number in range(60) if f"m{number}" not in refused]
        assert sorted(heard[1:]) == sorted(accepted)
