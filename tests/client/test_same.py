"""One program, on a runtime and on a client of a server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    Decision,
    DecisionRefused,
    HarnessAgent,
    Limits,
    Message,
    Plugin,
    Registrar,
    Run,
    RunStatus,
    Runtime,
    StateKey,
    SubagentDeclaration,
    ThreadBusy,
    ToolContext,
    UnknownAgent,
    UnknownRun,
    tool,
)
from retinue.testing import ScriptedModel, call, say

from ..server.agents import Gate, boss, speaker
from .homes import home, normal, read_back

pytestmark = pytest.mark.parametrize("kind", ["local", "server"])
found = StateKey("found", list[str], persistent=True)


@dataclass
class Report:
    title: str
    pages: int


class Keys(Plugin):
    def register(self, r: Registrar) -> None:
        r.key(found)


@tool
async def look(ctx: ToolContext) -> str:
    """Look."""
    return f"{ctx.context['place']}: {', '.join(ctx.state(found))}"


def looker() -> Agent:
    turns = [[call("look", {}, id="look_1")], say("seen")]
    return Agent("looker", ScriptedModel(turns), tools=[look], plugins=[Keys()])


@pytest.fixture(params=["memory:", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param if request.param == "memory:" else f"sqlite:///{tmp_path}/runs.db"


async def test_run_gives_the_result(kind: str, url: str) -> None:
    async with home(kind, url, [speaker("a", "b")]) as it:
        result = await it.run("speaker", "go", thread_id="t1")
        assert (result.status, result.response, result.thread_id) == (RunStatus.COMPLETED, "ab", "t1")
        assert [(str(message)) for message in result.messages] == ["user: go", "assistant: ab"]
        assert result.usage.requests == 1
        assert await it.result(result.run_id) == result
        assert [message.text for message in await it.messages("t1")] == ["go", "ab"]
        assert await it.messages("nowhere") == ()
        again = await it.run("speaker", [Message.user("more"), Message.user("now")], thread_id="t1")
        assert again.status is RunStatus.COMPLETED
        assert [message.text for message in await it.messages("t1")] == ["go", "ab", "more", "now", "ab"]


async def test_the_events_are_those_of_a_local_run(kind: str, url: str) -> None:
    async with Runtime(agents=[boss()]) as runtime:
        local = [event async for event in runtime.stream("boss", "go")]
    async with home(kind, url, [boss()]) as it:
        run = it.stream("boss", "go")
        events = [event async for event in run]
        assert normal(events) == normal(read_back(local))
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [event async for event in run] == events
        assert [event async for event in run.follow(3)] == events[3:]
        assert {event.run_id for event in [event async for event in run.events]} == {run.run_id}
        stored = it.events(run.run_id, after=2)
        assert [await anext(stored) for _ in events[2:]] == events[2:]
        assert (run.ended, (await run.result()).status) == (True, RunStatus.SUSPENDED)


async def test_the_handle_of_an_answer_shows_what_follows(kind: str, url: str) -> None:
    async with home(kind, url, [boss()]) as it:
        first = await it.run("boss", "go")
        run = it.stream_resume(first.run_id, {"task_1/pay_1": Decision.approve()})
        await run.stored()
        assert isinstance(run, Run)
        assert (run.run_id, run.thread_id) == (first.run_id, first.thread_id)
        events = [event async for event in run]
        assert (events[0].kind, events[-1].kind) == ("run_started", "run_finished")
        assert (await run.result()).response == "boss: clerk: paid 3"
        whole = [event async for event in it.events(run.run_id)]
        assert whole[-len(events) :] == events


async def test_children_are_watched_by_themselves(kind: str, url: str) -> None:
    helper = Agent("helper", ScriptedModel(lambda request: say("he", chunks=["h", "e"])), description="Helps.")
    turns = [[call("task", {"subagent_type": "helper", "description": "x"}, id="task_1")], say("done")]
    async with home(kind, url, [Agent("lead", ScriptedModel(turns), subagents=[helper])]) as it:
        run = it.stream("lead", "go")
        children = [child async for child in run.children]
        assert [(child.name, child.ns, child.call_id) for child in children] == [
            ("helper", ("tools:task_1",), "task_1")
        ]
        assert await children[0].text == "he"
        assert [event.kind async for event in children[0]][-1] == "run_finished"
        outcome = await children[0].result()
        assert (outcome.status, outcome.response) == (RunStatus.COMPLETED, "he")
        assert children[0].thread_id == outcome.thread_id != ""
        assert await run.text == "done"
        parts = [part async for part in run.parts(["updates", "messages"])]
        assert {part["ns"] for part in parts} == {(), ("tools:task_1",)}


async def test_an_agent_object_types_the_output(kind: str, url: str) -> None:
    reporter = Agent("reporter", ScriptedModel(lambda request: say('{"title": "x", "pages": 3}')), output=Report)
    async with home(kind, url, [reporter]) as it:
        result = await it.run(reporter, "go")
        assert result.output == Report("x", 3)
        assert (await it.result(result.run_id)).output == Report("x", 3)
        assert (await it.stream(reporter, "go").result()).output == Report("x", 3)


async def test_context_state_and_limits_reach_the_run(kind: str, url: str) -> None:
    async with home(kind, url, [looker()]) as it:
        options: dict[str, Any] = {"context": {"place": "here"}, "state": {found: ["a", "b"]}}
        result = await it.run("looker", "go", limits=Limits(steps=5), **options)
        assert result.messages[2].text == "here: a, b"
        assert result.state[found] == ["a", "b"]
        with pytest.raises(ConfigurationError, match="has no option 'contxt'"):
            await it.run("looker", "go", contxt={})  # pyright: ignore[reportCallIssue]


async def test_an_approval_below_is_given_at_the_root(kind: str, url: str) -> None:
    async with home(kind, url, [boss()]) as it:
        run = it.stream("boss", "go")
        waiting = await run.result()
        assert list(waiting.suspended) == ["pay_1"]
        assert waiting.suspended["pay_1"].path == ("task_1", "pay_1")
        with pytest.raises(DecisionRefused, match="nope"):
            await it.resume(run.run_id, {"nope": Decision.approve()})
        with pytest.raises(DecisionRefused):
            await it.resume(run.run_id, {"pay_1": Decision.approve(args={"amount": "much"})})
        decisions = {"pay_1": Decision.approve(args={"amount": 7})}
        result = await it.resume(run.run_id, decisions)
        assert result.response == "boss: clerk: paid 7"
        rejected = await it.resume((await it.run("boss", "go")).run_id, {"pay_1": Decision.reject("too much")})
        assert "too much" in (rejected.response or "")


async def test_a_run_is_cancelled(kind: str, url: str) -> None:
    gate = Gate()
    async with home(kind, url, [gate.agent()]) as it:
        run = it.stream("gated", "go")
        gate.say("x")
        async for event in run:
            if event.kind == "text_delta":
                break
        assert not run.ended
        result = await run.cancel("enough")
        assert (result.status, result.error) == (RunStatus.CANCELLED, "enough")
        other = it.stream("gated", "go")
        await other.stored()
        assert (await it.cancel(other.run_id, reason="stop")).status is RunStatus.CANCELLED
        assert (await other.result()).error == "stop"


async def test_a_fork_takes_another_course(kind: str, url: str) -> None:
    async with home(kind, url, [boss()]) as it:
        run = it.stream("boss", "go")
        last = [event async for event in run][-1]
        fork = await it.fork(run.run_id, at=last.seq, decisions={"pay_1": Decision.reject("no")})
        assert fork.run_id not in ("", run.run_id)
        events = [event async for event in fork]
        assert events[0].kind == "run_started"
        assert events[-1].response == (await fork.result()).response  # pyright: ignore[reportAttributeAccessIssue]
        assert (await it.result(run.run_id)).status is RunStatus.SUSPENDED
        with pytest.raises(ConfigurationError, match="cannot be forked"):
            await it.fork(run.run_id, at=2)


async def test_errors_have_the_same_classes(kind: str, url: str) -> None:
    gate = Gate()
    async with home(kind, url, [gate.agent(), boss()]) as it:
        with pytest.raises(UnknownAgent, match=r"unknown agent 'nobody'; known: boss, clerk, gated"):
            await it.run("nobody", "go")
        for ask in (it.result, it.cancel):
            with pytest.raises(UnknownRun, match="run_nope"):
                await ask("run_nope")
        with pytest.raises(UnknownRun):
            await it.resume("run_nope", {"x": Decision.cancel()})
        with pytest.raises(UnknownRun):
            await anext(it.events("run_nope"))
        with pytest.raises(ConfigurationError, match="input is empty"):
            await it.run("boss", " ")
        held = it.stream("gated", "go", thread_id="t1")
        await held.stored()
        with pytest.raises(ThreadBusy) as busy:
            await it.run("gated", "go", thread_id="t1")
        assert (busy.value.thread_id, busy.value.run_id) == ("t1", held.run_id)
        gate.say("x", None)
        assert (await held.result()).response == "x"


async def test_a_refused_start_is_raised_where_the_handle_is_used(kind: str, url: str) -> None:
    gate = Gate()
    async with home(kind, url, [gate.agent()]) as it:
        held = it.stream("gated", "go", thread_id="t1")
        await held.stored()
        with pytest.raises(ThreadBusy):
            async for _ in it.stream("gated", "go", thread_id="t1"):
                pass
        with pytest.raises(ThreadBusy):
            await it.stream("gated", "go", thread_id="t1").result()
        await held.cancel()


async def test_follow_waits_for_background_tasks(kind: str, tmp_path: Path) -> None:
    gate = Gate()
    worker = gate.agent("worker")
    turns = [call("agent_spawn", {"agent_id": "worker", "task": "x", "timeout_seconds": 0}), say("started")]
    declared = SubagentDeclaration("worker", "Works.", model=worker.model)
    lead = HarnessAgent("lead", ScriptedModel(turns), workspace=tmp_path, subagents=[declared], general_purpose=False)
    async with home(kind, f"sqlite:///{tmp_path}/runs.db", [lead]) as it:
        run = it.stream("lead", "go")
        assert (await run.result()).response == "started"
        events = run.follow()
        async for event in events:
            if event.kind == "run_finished" and not event.ns:
                break
        gate.say("done", None)
        rest = [event async for event in events]
        assert [event.delta for event in rest if event.kind == "text_delta"] == ["done"]
        assert [event.status for event in rest if event.kind == "task_updated"][-1] == "COMPLETED"
        assert [event async for event in it.events(run.run_id)] == [event async for event in run.follow()]


async def two_words(events: AsyncIterator[Any]) -> list[str]:
    words: list[str] = []
    async for event in events:
        if event.kind == "text_delta":
            words.append(event.delta)
            if len(words) == 2:
                break
    return words


async def test_leaving_the_iteration_leaves_the_run(kind: str, url: str) -> None:
    gate = Gate()
    async with home(kind, url, [gate.agent()]) as it:
        run = it.stream("gated", "go")
        gate.say("a", "b")
        assert await two_words(aiter(run)) == ["a", "b"]
        assert await two_words(it.events(run.run_id)) == ["a", "b"]
        gate.say("c", None)
        assert await run.text == "abc"
        assert (await run.result()).response == "abc"
