"""The state of a run at any event, and new runs that continue from there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Block,
    ConfigurationError,
    Decision,
    DecisionRefused,
    Limits,
    Message,
    Plugin,
    Registrar,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    ToolContext,
    ToolOutput,
    ToolResult,
    UnknownRun,
    tool,
)
from retinue.errors import NoForkPlace
from retinue.log.fork import ForkMarks
from retinue.testing import ScriptedModel, call, say

COUNT: StateKey[int, int] = StateKey("travel.count", int, reduce=lambda a, b: a + b, update=int, merge="commutative")
"""Not persistent: only the private part of the log has it."""


class Counts(Plugin):
    name = "counts"

    def register(self, r: Registrar) -> None:
        r.key(COUNT)


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/app.db"


def agents(done: list[str]) -> list[Agent]:
    """A boss that looks, has a child pay with permission, looks again and answers."""

    @tool
    async def look(what: str, ctx: ToolContext) -> ToolOutput:
        """Look."""
        done.append(f"look {what}")
        return ToolOutput(f"{what} {ctx.state(COUNT)}", {COUNT: 1})

    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay."""
        if ctx.resume_input is None:
            return ToolResult.suspended(f"pay {to}?")
        done.append(f"paid {to} {ctx.resume_input}")
        return f"paid {to} {ctx.resume_input}"

    def turn(request: Any) -> Any:
        said = [m for m in request.messages if m.role == "assistant"]
        last = request.messages[-1].text
        match len(said):
            case 0:
                return call("look", {"what": "a"}, id="l1")
            case 1:
                return call("task", {"subagent_type": "payer", "description": "pay ann"}, id="t1")
            case 2:
                return call("look", {"what": last}, id="l2")
            case _:
                return say(f"end: {last}")

    def paying(request: Any) -> Any:
        last = request.messages[-1]
        return say(last.text) if last.role == "tool" else call("pay", {"to": "ann"}, id="p1")

    payer = Agent("payer", ScriptedModel(paying), tools=[pay])
    return [Agent("boss", ScriptedModel(turn), "You lead.", [look], [Counts()], subagents=[payer])]


async def log_of(runtime: Runtime, run_id: str) -> list[Any]:
    """The events until the run's present end."""
    found: list[Any] = []
    event: Any
    async for event in runtime.events(run_id):
        found.append(event)
        if event.kind == "run_finished" and not event.ns and event.status in ("completed", "suspended"):
            stands = (await runtime.state_at(run_id, event.seq)).status
            if stands.is_terminal or (await runtime.result(run_id)).status is RunStatus.SUSPENDED:
                break
    return found


async def test_a_fork_answers_differently_and_repeats_nothing(url: str) -> None:
    done: list[str] = []
    async with Runtime.open(url, agents(done)) as runtime:
        waiting = await runtime.run("boss", "go", thread_id="t", user_id="u")
        assert waiting.status is RunStatus.SUSPENDED
        events = await log_of(runtime, waiting.run_id)
        fork = await runtime.fork(waiting.run_id, at=events[-1].seq, decisions={"p1": Decision.resume("B")})
        forked = await fork.result()
        assert (forked.status, forked.response) == (RunStatus.COMPLETED, "end: paid ann B 1")
        original = await runtime.resume(waiting.run_id, {"p1": Decision.resume("A")})
        assert original.response == "end: paid ann A 1"
        assert done == ["look a", "paid ann B", "look paid ann B", "paid ann A", "look paid ann A"]
        assert forked.run_id != original.run_id
        assert forked.thread_id not in ("t", original.thread_id)
        copied = [event async for event in runtime.events(forked.run_id)]
        assert [event.seq for event in copied] == list(range(1, len(copied) + 1))
        assert {event.run_id for event in copied}.isdisjoint({event.run_id for event in events})
        assert {event.ns for event in copied} == {event.ns for event in events}
        thread = await runtime.store.load_thread(forked.thread_id)
        assert thread is not None
        assert [m.text for m in thread.messages] == [m.text for m in forked.messages]


async def test_a_fork_between_steps_goes_on_as_the_run_did(url: str) -> None:
    done: list[str] = []
    async with Runtime.open(url, agents(done)) as runtime:
        waiting = await runtime.run("boss", "go")
        await runtime.resume(waiting.run_id, {"p1": Decision.resume("A")})
        events = await log_of(runtime, waiting.run_id)
        steps = [event.seq for event in events if event.kind == "step_finished" and not event.ns]
        fork = await runtime.fork(waiting.run_id, at=steps[0])
        assert (await fork.result()).status is RunStatus.SUSPENDED, "it asks for permission again"
        again = await runtime.resume(fork.run_id, {"p1": Decision.resume("C")})
        assert again.response == "end: paid ann C 1"
        assert done.count("look a") == 1


async def test_a_fork_after_the_end_needs_an_input(url: str) -> None:
    async with Runtime.open(url, agents([])) as runtime:
        waiting = await runtime.run("boss", "go")
        await runtime.resume(waiting.run_id, {"p1": Decision.resume("A")})
        last = (await log_of(runtime, waiting.run_id))[-1].seq
        with pytest.raises(ConfigurationError, match="give the fork an input"):
            await runtime.fork(waiting.run_id, at=last)
        fork = await runtime.fork(waiting.run_id, at=last, input="and now?")
        assert (await fork.result()).response == "end: and now?"


async def test_a_fork_after_the_last_step_ends_as_the_run_did_or_continues_with_an_input(url: str) -> None:
    done: list[str] = []
    async with Runtime.open(url, agents(done)) as runtime:
        waiting = await runtime.run("boss", "go")
        ended = await runtime.resume(waiting.run_id, {"p1": Decision.resume("A")})
        steps = [event.seq async for event in runtime.events(ended.run_id) if event.kind == "step_finished"]
        before = list(done)
        again = await (await runtime.fork(ended.run_id, at=steps[-1])).result()
        assert (again.status, again.response, done) == (ended.status, ended.response, before)
        assert again.run_id != ended.run_id
        fork = await runtime.fork(ended.run_id, at=steps[-1], input="and now?")
        assert (await fork.result()).response == "end: and now?"


async def test_a_fork_of_a_blocked_run_continues_with_an_input(url: str) -> None:
    class Guard(Plugin):
        def register(self, r: Registrar) -> None:
            r.hook("before_tool", lambda context: Block("not here", end_run=True))

    @tool
    def open_door() -> str:
        """Open the door."""
        return "open"

    def turn(request: Any) -> Any:
        return say("as you say") if request.messages[-1].text == "leave it" else call("open_door")

    agent = Agent("a", ScriptedModel(turn), tools=[open_door], plugins=[Guard()])
    async with Runtime.open(url, [agent]) as runtime:
        blocked = await runtime.run("a", "go")
        assert (blocked.status, blocked.termination) == (RunStatus.FAILED, "blocked")
        last = (await log_of(runtime, blocked.run_id))[-1].seq
        result = await (await runtime.fork(blocked.run_id, at=last, input="leave it")).result()
        assert (result.status, result.response, result.error) == (RunStatus.COMPLETED, "as you say", None)


async def test_a_fork_where_work_is_in_progress_is_refused_with_the_nearest_places(url: str) -> None:
    async with Runtime.open(url, agents([])) as runtime:
        waiting = await runtime.run("boss", "go")
        events = await log_of(runtime, waiting.run_id)
        ready = next(event.seq for event in events if event.kind == "tool_call_ready")
        with pytest.raises(ConfigurationError, match=rf"cannot be forked at event {ready}.*it can be at: 1, \d+"):
            await runtime.fork(waiting.run_id, at=ready)
        with pytest.raises(
            ConfigurationError, match=rf"event 999, its log has events 1 to {events[-1].seq}; it can be"
        ):
            await runtime.fork(waiting.run_id, at=999)
        with pytest.raises(DecisionRefused, match=f"run '{waiting.run_id}' waits for nothing at event 1: fork it with"):
            await runtime.fork(waiting.run_id, at=1, decisions={"p1": Decision.resume("A")})
        with pytest.raises(DecisionRefused, match="does not wait for 'p9'"):
            await runtime.fork(waiting.run_id, at=events[-1].seq, decisions={"p9": Decision.resume("x")})
        with pytest.raises(ConfigurationError, match="give the fork decisions"):
            await runtime.fork(waiting.run_id, at=events[-1].seq, input="more")
        with pytest.raises(UnknownRun):
            await runtime.fork("run_of_nobody", at=1)


async def test_the_state_at_every_event_is_there(url: str) -> None:
    async with Runtime.open(url, agents([])) as runtime:
        waiting = await runtime.run("boss", "go")
        events = await log_of(runtime, waiting.run_id)
        by_kind = {event.kind: event.seq for event in events if not event.ns}
        first = await runtime.state_at(waiting.run_id, by_kind["run_started"])
        assert (first.status, [m.text for m in first.messages]) == (RunStatus.RUNNING, ["go"])
        for event in events:
            state = await runtime.state_at(waiting.run_id, event.seq)
            assert state.run_id == waiting.run_id
        last = await runtime.state_at(waiting.run_id, events[-1].seq)
        assert (last.status, last.revision, list(last.calls)) == (RunStatus.SUSPENDED, 1, ["t1"])
        assert last.values == {"travel.count": 1}, "private state is there, too"
        with pytest.raises(ConfigurationError, match="has events 1 to"):
            await runtime.state_at(waiting.run_id, 10_000)


@pytest.mark.parametrize(
    ("own", "given", "steps", "children"),
    [
        (Limits(steps=5), Limits(steps=99), 5, 256),
        (Limits(steps=5), Limits(children=300), 5, 300),
        (Limits(), Limits(steps=5), 5, 256),
        (Limits(children=7, steps=9), Limits(steps=5), 5, 7),
    ],
)
async def test_a_fork_and_a_later_process_have_the_limits_of_the_run(
    own: Limits, given: Limits, steps: int, children: int, tmp_path: Path
) -> None:
    """Those that nobody set, too: they are neither lost nor tightened on the way through the store."""

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask once."""
        return "answered" if ctx.resume_input is not None else ToolResult.suspended("go on?")

    def turn(request: Any) -> Any:
        return call("ask", {}, id=f"c{len(request.messages)}")

    agent, place = Agent("asker", ScriptedModel(turn), tools=[ask], limits=own), f"sqlite:///{tmp_path}/db"
    async with Runtime.open(place, [agent]) as runtime:
        run = runtime.stream("asker", "go", limits=given)
        at = (await run.result()) and [event.seq async for event in run][-1]
    ends: list[tuple[str, int]] = []
    async with Runtime.open(place, [agent]) as runtime:
        forked = await runtime.fork(run.run_id, at=at)
        for result in (await runtime.result(run.run_id), await runtime.result(forked.run_id)):
            found = result
            while found.status is RunStatus.SUSPENDED:
                found = await runtime.resume(found.run_id, {next(iter(found.suspended)): Decision.resume("yes")})
            last = [event.seq async for event in runtime.events(found.run_id)][-1]
            limits = (await runtime.state_at(found.run_id, last)).request.limits
            assert limits is not None
            assert (limits.depth, limits.children, limits.parallel) == (3, children, 32)
            ends.append((found.termination, found.steps))
    assert ends == [("limit:steps", steps)] * 2


async def test_a_fork_at_a_message_replaces_what_the_user_said_and_continues_what_the_model_said(url: str) -> None:
    heard: list[list[str]] = []

    def turn(request: Any) -> Any:
        heard.append([message.text for message in request.messages])
        return say(f"answer {len(request.messages)}")

    agent = Agent("a", ScriptedModel(turn))
    async with Runtime.open(url, [agent]) as runtime:
        await runtime.run("a", "before", thread_id="t1")
        given = [Message.user("one", id="m-one"), Message.user("two")]
        result = await runtime.run("a", given, thread_id="t1")
        _, second, answer = result.messages
        assert (second.text, answer.text) == ("two", "answer 4")
        before = ["before", "answer 1"]

        async def forked(message_id: str | None, input: str | None = None) -> tuple[RunResult, list[str]]:
            fork = await runtime.fork(result.run_id, message_id=message_id, input=input)
            ended = await fork.result()
            assert ended.status is RunStatus.COMPLETED
            said = [one.text for one in await runtime.messages(fork.thread_id)]
            assert said == [*heard[-1], ended.response]
            assert [one.text for one in await runtime.messages("t1")] == [*before, "one", "two", "answer 4"]
            return ended, heard[-1]

        assert (await forked("m-one", "other"))[1] == [*before, "other"]
        ended, said = await forked(second.id, "other")
        assert said == [*before, "one", "other"]
        assert ended.messages[1].id != second.id
        assert (await forked(second.id))[1] == [*before, "one", "two"]
        ended, said = await forked(answer.id, "and now?")
        assert said == [*before, "one", "two", "answer 4", "and now?"]
        # What was said to a fork is replaced in the same way.
        again = await runtime.fork(ended.run_id, message_id=ended.messages[-2].id, input="or now?")
        assert (await again.result()).status is RunStatus.COMPLETED
        assert heard[-1] == [*before, "one", "two", "answer 4", "or now?"]
        with pytest.raises(NoForkPlace, match="no such message of its own") as caught:
            await runtime.fork(result.run_id, message_id="m-none")
        assert caught.value.places
        assert pickle.loads(pickle.dumps(caught.value)).places == caught.value.places
        for wrong in ({}, {"at": 1, "message_id": "m-one"}):
            with pytest.raises(ConfigurationError, match="either at=event number or message_id"):
                await runtime.fork(result.run_id, **wrong)


async def test_the_messages_at_which_a_log_is_marked_can_be_forked_and_no_others(url: str) -> None:
    done: list[str] = []
    async with Runtime.open(url, agents(done)) as runtime:
        waiting = await runtime.run("boss", "go")
        ended = await runtime.resume(waiting.run_id, {"p1": Decision.resume("A")})
        marks = ForkMarks(ended.run_id)
        for event in await log_of(runtime, ended.run_id):
            marks(event)
        own = [message for message in ended.messages if message.role in ("user", "assistant")]
        assert marks.message_ids <= {message.id for message in own}
        for message in own:
            if message.id in marks.message_ids:
                fork = await runtime.fork(ended.run_id, message_id=message.id, input="and now?")
                assert (await fork.result()).status.is_waiting or (await fork.result()).status.is_terminal
            else:
                with pytest.raises(ConfigurationError):
                    await runtime.fork(ended.run_id, message_id=message.id, input="and now?")
