"""Runs as a caller sees them: threads, handles, readers, cancelling, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, cast

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    Event,
    Message,
    Plugin,
    Registrar,
    RunStatus,
    Runtime,
    StateKey,
    TextChunk,
    ThreadBusy,
    ToolCallStatus,
    ToolContext,
    ToolOutput,
    UnknownAgent,
    UnknownRun,
    tool,
)
from retinue.errors import UnknownKey
from retinue.testing import RecordingSink, ScriptedModel, call, say

from ..waiting import let_others_run


@tool
async def hang() -> None:
    """Hang."""
    await asyncio.sleep(60)


def hanging(**options: Any) -> Runtime:
    return Runtime([Agent("a", ScriptedModel([call("hang", id="c1")]), tools=[hang], **options)])


async def test_a_run_starts_at_once_and_has_its_id() -> None:
    runtime = Runtime([Agent("a", ScriptedModel([say("hi")]))])
    run = runtime.stream("a", "go", thread_id="t1")
    assert run.run_id.startswith("run_")
    assert (run.thread_id, run.agent) == ("t1", "a")
    assert (await run.result()).run_id == run.run_id


async def test_input_may_be_text_a_message_or_several() -> None:
    model = ScriptedModel(lambda request: say(f"{len(request.messages)} messages"))
    runtime = Runtime([Agent("a", model, "Count.")])
    assert (await runtime.run("a", "x")).response == "2 messages"
    assert (await runtime.run("a", Message.user("x"))).response == "2 messages"
    assert (await runtime.run("a", [Message.user("x"), Message.user("y")])).response == "3 messages"
    assert [m.role for m in model.requests[0].messages] == ["system", "user"]


async def test_a_thread_keeps_the_conversation_and_its_state() -> None:
    visits: StateKey[int, int] = StateKey("visits", int, reduce=lambda a, b: a + b, scope="thread", persistent=True)
    scratch: StateKey[int, int] = StateKey("scratch", int, reduce=lambda a, b: a + b, persistent=True)

    class Visits(Plugin):
        name = "visits"

        def register(self, r: Registrar) -> None:
            r.key(visits)
            r.key(scratch)

    @tool
    async def visit() -> ToolOutput:
        """Visit."""
        return ToolOutput("ok", update={visits: 1, scratch: 1})

    model = ScriptedModel([call("visit", id="same"), say("one"), call("visit", id="same"), say("two")])
    runtime = Runtime([Agent("a", model, tools=[visit], plugins=[Visits()])])
    first = await runtime.run("a", "first", thread_id="t")
    second = await runtime.run("a", "second", thread_id="t")
    assert (first.state[visits], second.state[visits], second.state[scratch]) == (1, 2, 1)
    assert [m.text for m in model.requests[2].messages] == ["first", "", "ok", "one", "second"]
    assert [m.text for m in second.messages] == ["second", "", "ok", "two"]
    ids = [m.tool_calls[0].id for m in model.requests[3].messages if m.tool_calls]
    assert (len(set(ids)), ids[0]) == (2, "same")


async def test_requests_never_change_afterwards() -> None:
    model = ScriptedModel([call("nothing"), say("ok")])
    await Runtime([Agent("a", model)]).run("a", "go")
    assert [len(request.messages) for request in model.requests] == [1, 3]


@pytest.mark.parametrize("bad", ["a:b", "a|b", "a~b", "a b", "a\nb", "a\0b", "", "x" * 300])
async def test_call_ids_that_would_break_a_namespace_are_replaced_once(bad: str) -> None:
    model = ScriptedModel([[call("nothing", id=bad), call("nothing", id="ok"), call("nothing", id="ok")], say("x")])
    sink = RecordingSink()
    result = await Runtime([Agent("a", model)]).run("a", "go", sinks=[sink])
    (asked,) = [m for m in result.messages if m.tool_calls]
    ids = [c.id for c in asked.tool_calls]
    assert (len(set(ids)), ids[1]) == (3, "ok")
    assert all(not set(i) & set(":|~\0 \n\t") and 0 < len(i) <= 256 for i in ids)
    assert [e.call_id for e in sink.of("tool_call_started")] == ids
    assert [m.tool_call_id for m in result.messages if m.role == "tool"] == ids


async def test_whatever_is_wrong_with_a_request_raises_at_once() -> None:
    runtime = Runtime([Agent("a", ScriptedModel([])), Agent("b"), Agent("c", "nowhere:x"), Agent("d", "plain")])
    with pytest.raises(UnknownAgent, match="unknown agent 'x'; known: a, b, c, d"):
        runtime.stream("x", "go")
    with pytest.raises(ConfigurationError, match="agent 'b' has no model"):
        runtime.stream("b", "go")
    with pytest.raises(ConfigurationError, match="agent 'c': unknown model provider 'nowhere' in 'nowhere:x'"):
        runtime.stream("c", "go")
    with pytest.raises(ConfigurationError, match="model 'plain' is not of the form 'provider:model'"):
        runtime.stream("d", "go")
    with pytest.raises(UnknownKey, match="'k' is not registered"):
        runtime.stream("a", "go", state={StateKey("k", int): 1})
    with pytest.raises(
        UnknownRun, match="unknown run 'r'; a sub-agent that a run waits for is found under its root run"
    ):
        runtime.events("r")
    with pytest.raises(ConfigurationError, match="two agents are named 'a'"):
        Runtime([Agent("a"), Agent("a")])


async def test_state_may_be_given_to_a_run() -> None:
    key: StateKey[int, int] = StateKey("k", int)

    class Keys(Plugin):
        name = "keys"

        def register(self, r: Registrar) -> None:
            r.key(key)

    @tool
    async def read(ctx: ToolContext) -> int:
        """Read."""
        return ctx.state(key)

    agent = Agent("a", ScriptedModel([call("read"), say("ok")]), tools=[read], plugins=[Keys()])
    result = await Runtime([agent]).run("a", "go", state={key: 41})
    assert [m.text for m in result.messages if m.role == "tool"] == ["41"]
    assert key not in result.state


async def test_a_thread_carries_one_run_at_a_time() -> None:
    runtime = hanging()
    run = runtime.stream("a", "go", thread_id="t")
    with pytest.raises(ThreadBusy, match=f"thread 't' is busy with run '{run.run_id}'"):
        runtime.stream("a", "go", thread_id="t")
    await run.cancel()
    again = runtime.stream("a", "go", thread_id="t", model=ScriptedModel([say("ok")]))
    assert (await again.result()).response == "ok"


async def test_readers_go_at_their_own_pace_and_may_leave() -> None:
    class Fast:
        name = "test:fast"

        async def stream(self, request: Any) -> Any:
            for i in range(200):
                yield TextChunk(str(i))
                await asyncio.sleep(0)

    run = Runtime([Agent("a", cast(Any, Fast()))]).stream("a", "go")

    async def read(pause: float) -> list[Event]:
        found: list[Event] = []
        async for event in run:
            found.append(event)
            if pause and event.seq % 50 == 0:
                await asyncio.sleep(pause)
        return found

    async def leave() -> None:
        async for event in run:
            if event.seq == 5:
                return

    slow, fast, _ = await asyncio.gather(read(0.01), read(0), leave())
    late = [event async for event in run]
    assert slow == fast == late
    assert (await run.result()).status is RunStatus.COMPLETED


async def test_events_can_be_read_from_any_place() -> None:
    runtime = Runtime([Agent("a", ScriptedModel([say("hi")]))])
    run = runtime.stream("a", "go")
    everything = [event async for event in runtime.events(run.run_id)]
    assert [event async for event in runtime.events(run.run_id, after=3)] == everything[3:]
    assert everything[-1].kind == "run_finished"


async def test_cancelling_the_caller_of_run_cancels_the_run() -> None:
    begun, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def work() -> None:
        """Work."""
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    runtime = Runtime([Agent("a", ScriptedModel([call("work")]), tools=[work])])
    running = asyncio.create_task(runtime.run("a", "go"))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stopped.is_set()


async def test_giving_up_waiting_for_a_result_does_not_stop_the_run() -> None:
    release = asyncio.Event()

    @tool
    async def work() -> str:
        """Work."""
        await release.wait()
        return "worked"

    run = Runtime([Agent("a", ScriptedModel([call("work"), say("ok")]), tools=[work])]).stream("a", "go")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await run.result()
    release.set()
    assert (await run.result()).response == "ok"


async def test_a_run_may_be_cancelled_before_it_began_and_twice() -> None:
    runtime = hanging()
    run = runtime.stream("a", "go")
    first = await run.cancel()
    again = await asyncio.gather(run.cancel(), runtime.cancel(run.run_id))
    assert first.status is RunStatus.CANCELLED
    assert again == [first, first]
    kinds = [event.kind async for event in run]
    assert kinds == ["run_started", "run_finished"]


async def test_what_does_not_stop_is_left_behind() -> None:
    begun, may_stop, stopped, asked = asyncio.Event(), asyncio.Event(), asyncio.Event(), 0

    @tool
    async def stubborn() -> str:
        """Ignore being cancelled."""
        begun.set()
        while not may_stop.is_set():
            try:
                await may_stop.wait()
            except asyncio.CancelledError:
                continue
        stopped.set()
        return "finally"

    def answer(request: Any) -> Any:
        nonlocal asked
        asked += 1
        return call("stubborn", id="c1")

    run = Runtime([Agent("a", ScriptedModel(answer), tools=[stubborn])]).stream("a", "go", thread_id="t")
    await begun.wait()
    result = await run.cancel(grace=0.05)
    assert result.status is RunStatus.CANCELLED
    kinds = [event.kind async for event in run]
    assert kinds[-3:] == ["tool_call_finished", "step_finished", "run_finished"]
    may_stop.set()
    await stopped.wait()
    await let_others_run()
    assert asked == 1
    assert [event.kind async for event in run] == kinds


async def test_a_blocking_tool_does_not_hold_the_cancel_up() -> None:
    begun, release = threading.Event(), threading.Event()

    @tool
    def block(ctx: ToolContext) -> None:
        """Block."""
        begun.set()
        release.wait()
        ctx.stream_output("too late")

    run = Runtime([Agent("a", ScriptedModel([call("block")]), tools=[block])]).stream("a", "go")
    await asyncio.to_thread(begun.wait)
    result = await run.cancel(grace=0.02)
    release.set()
    await asyncio.sleep(0.02)
    assert result.status is RunStatus.CANCELLED
    assert [event.kind async for event in run][-1] == "run_finished"


async def test_a_blocking_tool_that_cannot_notice_a_cancel_is_left_behind_at_once() -> None:
    begun, release = threading.Event(), threading.Event()

    @tool
    def block() -> None:
        """Block."""
        begun.set()
        release.wait()

    run = Runtime([Agent("a", ScriptedModel([call("block")]), tools=[block])]).stream("a", "go")
    await asyncio.to_thread(begun.wait)
    async with asyncio.timeout(4):
        assert (await run.cancel()).status is RunStatus.CANCELLED
    release.set()


async def test_a_cancel_waits_for_a_blocking_tool_that_stops_by_itself() -> None:
    begun, cleaned_up = threading.Event(), threading.Event()

    @tool
    def work(ctx: ToolContext) -> None:
        """Work until told to stop, then clean up."""
        begun.set()
        while not ctx.cancellation.is_set():
            time.sleep(0.005)
        time.sleep(0.02)
        cleaned_up.set()
        ctx.cancellation.raise_if_set()

    run = Runtime([Agent("a", ScriptedModel([call("work", id="c1")]), tools=[work])]).stream("a", "go")
    await asyncio.to_thread(begun.wait)
    result = await run.cancel()
    assert cleaned_up.is_set()
    assert result.status is RunStatus.CANCELLED
    ends = [event.status async for event in run if event.kind == "tool_call_finished"]
    assert ends == [ToolCallStatus.CANCELLED]


async def test_closing_stops_everything_and_takes_no_more() -> None:
    async with Runtime([Agent("a", ScriptedModel(lambda r: call("hang")), tools=[hang])]) as runtime:
        runs = [runtime.stream("a", "go") for _ in range(3)]
        await asyncio.sleep(0.01)
    results = [await run.result() for run in runs]
    assert {(r.status, r.error) for r in results} == {(RunStatus.CANCELLED, "the runtime was closed")}
    with pytest.raises(ConfigurationError, match="closed"):
        runtime.stream("a", "go")


async def test_a_sink_that_fails_is_dropped_and_the_run_goes_on() -> None:
    calls: list[int] = []

    def broken(event: Event) -> None:
        calls.append(event.seq)
        raise RuntimeError("sink")

    good = RecordingSink()
    result = await Runtime([Agent("a", ScriptedModel([say("ok")]))], sinks=[broken, good]).run("a", "go")
    assert result.response == "ok"
    assert calls == [1]
    assert good.kinds[-1] == "run_finished"


async def test_parallel_writers_of_one_exclusive_key_are_told() -> None:
    key: StateKey[str, str] = StateKey("winner", str, persistent=True)

    class Keys(Plugin):
        name = "keys"

        def register(self, r: Registrar) -> None:
            r.key(key)

    @tool
    async def claim(who: str) -> ToolOutput:
        """Claim."""
        return ToolOutput(f"{who} won", update={key: who})

    script = [[call("claim", {"who": w}, id=f"c_{w}") for w in ("ann", "bob")], say("ok")]
    agent = Agent("a", ScriptedModel(script), tools=[claim], plugins=[Keys()])
    result = await Runtime([agent]).run("a", "go")
    assert result.state[key] == "ann"
    first, second = [m.text for m in result.messages if m.role == "tool"]
    assert first == "ann won"
    assert second == (
        "execution_failed: call 'c_bob' could not commit its state: state key 'winner' was already written "
        "by parallel call 'c_ann'; the write of call 'c_bob' was dropped"
    )
    relaxed = Agent("a", ScriptedModel(script), tools=[claim], plugins=[Keys()], conflicts="last_wins")
    assert (await Runtime([relaxed]).run("a", "go")).state[key] == "bob"


async def test_a_command_that_cannot_be_committed_fails_its_call_only() -> None:
    key = StateKey("nowhere", int)

    @tool
    async def write() -> ToolOutput:
        """Write."""
        return ToolOutput("wrote", update={key: 1})

    agent = Agent("a", ScriptedModel([call("write", id="c1"), say("ok")]), tools=[write])
    result = await Runtime([agent]).run("a", "go")
    (text,) = [m.text for m in result.messages if m.role == "tool"]
    assert "'c1'" in text
    assert "'nowhere' is not registered" in text
    assert result.response == "ok"
