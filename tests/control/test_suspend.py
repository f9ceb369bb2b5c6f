"""Humans in the loop: suspended calls, and how they go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import (
    Agent,
    Decision,
    DecisionRefused,
    HookContext,
    Plugin,
    Registrar,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    Suspend,
    SuspendTicket,
    ThreadBusy,
    ToolContext,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.testing import ScriptedModel, call, say
from tests.story import story

APPROVAL = {"type": "object", "properties": {"approved": {"type": "boolean"}}, "required": ["approved"]}


def asking(mode: str, schema: dict[str, Any] | None = None) -> tuple[Any, list[Any]]:
    """A tool that waits for a human the first time it runs; and what it saw each time."""
    seen: list[Any] = []

    @tool
    async def send(to: str, ctx: ToolContext) -> Any:
        """Send."""
        seen.append((to, ctx.resume_input))
        if ctx.resume_input is None:
            ticket = SuspendTicket(f"t-{ctx.call_id}", "approve", f"Send to {to}?", {"to": to}, schema, mode)  # pyright: ignore[reportArgumentType]
            return ToolResult.suspended(f"Send to {to}?", ticket=ticket)
        return f"sent to {to}"

    return send, seen


def runtime_of(*turns: Any, tools: Any = (), **options: Any) -> tuple[Runtime, ScriptedModel]:
    model = ScriptedModel(turns)
    return Runtime([Agent("a", model, tools=tools, **options)]), model


def tool_texts(result: RunResult) -> list[str]:
    return [m.text for m in result.messages if m.role == "tool"]


async def test_the_three_modes_really_differ() -> None:
    outcomes: dict[str, Any] = {}
    for mode in ("replay", "use_decision", "pass_decision"):
        send, seen = asking(mode)
        runtime, _ = runtime_of(call("send", {"to": "ann"}, id="c1"), say("done"), tools=[send])
        waiting = await runtime.run("a", "go")
        assert (waiting.status, waiting.termination) == (RunStatus.SUSPENDED, "suspended")
        assert waiting.suspended["c1"].message == "Send to ann?"
        result = await runtime.resume(waiting.run_id, {"c1": Decision.resume({"to": "bob"})})
        assert (result.status, result.run_id) == (RunStatus.COMPLETED, waiting.run_id)
        outcomes[mode] = (tool_texts(result), seen)
    assert outcomes == {
        "replay": (["sent to ann"], [("ann", None), ("ann", {"to": "bob"})]),
        "use_decision": (['{"to":"bob"}'], [("ann", None)]),
        "pass_decision": (["sent to bob"], [("ann", None), ("bob", {"to": "bob"})]),
    }


async def test_arguments_that_come_from_a_decision_are_checked_like_any_others() -> None:
    for payload, problem in (
        ({"to": 5}, 'to: 5 is not of type "string"'),
        ("ann", '"ann" is not of type "object"'),
    ):
        send, _ = asking("pass_decision")
        runtime, _ = runtime_of(call("send", {"to": "ann"}, id="c1"), say("done"), tools=[send])
        waiting = await runtime.run("a", "go")
        with pytest.raises(DecisionRefused, match=problem):
            await runtime.resume(waiting.run_id, {"c1": Decision.resume(payload)})
        assert (await runtime.result(waiting.run_id)).status is RunStatus.SUSPENDED


async def test_two_calls_answered_one_by_one_out_of_order() -> None:
    send, seen = asking("replay")
    asked = [call("send", {"to": name}, id=f"c-{name}") for name in ("ann", "bob")]
    runtime, model = runtime_of(asked, say("done"), tools=[send])
    run = runtime.stream("a", "go", thread_id="t")
    first = await run.result()
    assert list(first.suspended) == ["c-ann", "c-bob"]
    second_run = runtime.stream_resume(first.run_id, {"t-c-bob": Decision.resume({"ok": 1})})
    second = await second_run.result()
    assert (second.status, list(second.suspended)) == (RunStatus.SUSPENDED, ["c-ann"])
    assert len(model.requests) == 1
    third_run = runtime.stream_resume(first.run_id, {"c-ann": Decision.resume({"ok": 2})})
    third = await third_run.result()
    assert third.status is RunStatus.COMPLETED
    assert tool_texts(third) == ["sent to ann", "sent to bob"]
    assert [m.tool_call_id for m in model.requests[1].messages if m.role == "tool"] == ["c-ann", "c-bob"]
    assert seen == [("ann", None), ("bob", None), ("bob", {"ok": 1}), ("ann", {"ok": 2})]
    legs = [[e async for e in leg] for leg in (run, second_run, third_run)]
    assert [event.seq for leg in legs for event in leg] == list(range(1, sum(map(len, legs)) + 1))
    assert [line for line in story(legs[0]) if "_finished" in line] == [
        "inference_finished tool_calls",
        "tool_call_finished 'c-ann' suspended 'Send to ann?'",
        "tool_call_finished 'c-bob' suspended 'Send to bob?'",
        "step_finished 1",
        "run_finished suspended suspended None None",
    ]
    assert [e.kind for e in legs[1]] == [
        "run_started",
        "messages_snapshot",
        "step_started",
        "tool_call_resumed",
        "tool_call_finished",
        "step_finished",
        "run_finished",
    ]
    assert [e.kind for e in legs[2]] == [
        "run_started",
        "messages_snapshot",
        "step_started",
        "tool_call_resumed",
        "tool_call_finished",
        "step_finished",
        "step_started",
        "text_delta",
        "inference_finished",
        "step_finished",
        "run_finished",
    ]


async def test_three_parallel_calls_one_fails_one_times_out_one_suspends() -> None:
    send, _ = asking("replay")

    @tool
    async def explode() -> None:
        """Fail."""
        raise RuntimeError("boom")

    @tool(timeout=0.01)
    async def sleep() -> None:
        """Sleep."""
        await asyncio.sleep(60)

    asked = [call("explode", id="c1"), call("sleep", id="c2"), call("send", {"to": "ann"}, id="c3")]
    runtime, model = runtime_of(asked, say("done"), tools=[send, explode, sleep])
    run = runtime.stream("a", "go")
    waiting = await run.result()
    assert list(waiting.suspended) == ["c3"]
    lines = story([e async for e in run])
    assert [line for line in lines if line.startswith("tool_call_finished")] == [
        "tool_call_finished c1 failed 'internal: RuntimeError: boom'",
        "tool_call_finished c3 suspended 'Send to ann?'",
        "tool_call_finished c2 failed 'timeout: no result after 0.01 s'",
    ]
    result = await runtime.resume(waiting.run_id, {"c3": Decision.resume({})})
    assert tool_texts(result) == ["internal: RuntimeError: boom", "timeout: no result after 0.01 s", "sent to ann"]
    assert len(model.requests) == 2


async def test_a_call_may_wait_several_times_in_a_row() -> None:
    times = 0

    @tool
    async def confirm(ctx: ToolContext) -> Any:
        """Ask three times."""
        nonlocal times
        times += 1
        return ToolResult.suspended(f"sure? {times}") if times < 4 else f"sure: {ctx.resume_input}"

    runtime, _ = runtime_of(call("confirm", id="c1"), say("done"), tools=[confirm])
    result = await runtime.run("a", "go")
    for n in (1, 2, 3):
        assert result.suspended["c1"].message == f"sure? {n}"
        result = await runtime.resume(result.run_id, {"c1": Decision.resume(n)})
    assert tool_texts(result) == ["sure: 3"]


async def test_the_same_decision_twice_is_one() -> None:
    send, seen = asking("replay")
    asked = [call("send", {"to": name}, id=f"c-{name}") for name in ("ann", "bob")]
    runtime, _ = runtime_of(asked, say("done"), tools=[send])
    waiting = await runtime.run("a", "go")
    decision = {"c-ann": Decision.resume({}, id="d1")}
    first = await runtime.resume(waiting.run_id, decision)
    assert await runtime.resume(waiting.run_id, decision) == first
    last = await runtime.resume(waiting.run_id, {**decision, "c-bob": Decision.resume({}, id="d2")})
    assert last.status is RunStatus.COMPLETED
    assert await runtime.resume(waiting.run_id, {"c-bob": Decision.resume({}, id="d2")}) == last
    assert len(seen) == 4


async def test_decisions_that_do_not_fit_are_refused_and_change_nothing() -> None:
    send, seen = asking("replay", APPROVAL)
    runtime, _ = runtime_of(call("send", {"to": "ann"}, id="c1"), say("done"), tools=[send])
    waiting = await runtime.run("a", "go")
    run_id = waiting.run_id
    for decisions, problem in (
        ({"c9": Decision.resume({"approved": True})}, "does not wait for 'c9'; it waits for: c1"),
        ({"c1": Decision.resume({"approved": "yes"})}, "on ticket 't-c1' does not fit its schema"),
        ({"c1": Decision.resume({"approved": True}), "t-c1": Decision.cancel()}, "'c1' is decided on twice"),
        ({}, "no decision was given"),
    ):
        with pytest.raises(DecisionRefused, match=problem):
            await runtime.resume(run_id, decisions)
    assert len(seen) == 1
    result = await runtime.resume(run_id, {"c1": Decision.resume({"approved": True})})
    assert result.status is RunStatus.COMPLETED
    with pytest.raises(DecisionRefused, match="is completed, it waits for nothing"):
        await runtime.resume(run_id, {"c1": Decision.resume({"approved": True})})


async def test_a_cancelled_decision_is_told_to_the_model() -> None:
    send, seen = asking("replay")
    runtime, model = runtime_of(call("send", {"to": "ann"}, id="c1"), say("understood"), tools=[send])
    waiting = await runtime.run("a", "go")
    result = await runtime.resume(waiting.run_id, {"c1": Decision.cancel("she left")})
    assert tool_texts(result) == ["cancelled: she left"]
    assert model.requests[1].messages[-1].text == "cancelled: she left"
    assert len(seen) == 1


async def test_a_waiting_run_holds_its_thread_until_it_is_answered_or_cancelled() -> None:
    send, _ = asking("replay")
    runtime, _ = runtime_of(call("send", {"to": "ann"}, id="c1"), say("hello"), tools=[send])
    waiting = await runtime.run("a", "go", thread_id="t")
    with pytest.raises(ThreadBusy):
        runtime.stream("a", "again", thread_id="t")
    result = await runtime.cancel(waiting.run_id)
    assert result.status is RunStatus.CANCELLED
    assert tool_texts(result) == ["cancelled: the call was cancelled before it finished"]
    kinds = [e.kind async for e in runtime.events(waiting.run_id)]
    assert kinds[-4:] == ["run_started", "messages_snapshot", "tool_call_finished", "run_finished"]
    assert (await runtime.run("a", "again", thread_id="t")).response == "hello"


async def test_a_hook_may_suspend_and_sees_the_decision_when_it_comes() -> None:
    class Ask(Plugin):
        name = "ask"

        def register(self, r: Registrar) -> None:
            r.hook("before_tool", self.ask)

        def ask(self, ctx: HookContext) -> Suspend | None:
            assert ctx.call is not None
            if ctx.decision is not None:
                return None
            return Suspend(SuspendTicket(f"ask-{ctx.call.id}", "approve", "May I?", ctx.call.args))

    ran: list[Any] = []

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        ran.append(ctx.resume_input)
        return "worked"

    runtime, _ = runtime_of(call("work", id="c1"), say("done"), tools=[work], plugins=[Ask()])
    waiting = await runtime.run("a", "go")
    assert (waiting.status, ran) == (RunStatus.SUSPENDED, [])
    result = await runtime.resume(waiting.run_id, {"ask-c1": Decision.resume({"by": "ann"})})
    assert (tool_texts(result), ran) == (["worked"], [{"by": "ann"}])


async def test_state_survives_the_wait_and_is_committed_when_the_call_ends() -> None:
    steps: StateKey[list[str], str] = StateKey(
        "steps", list[str], update=str, reduce=lambda a, b: [*a, b], persistent=True
    )

    class Steps(Plugin):
        name = "steps"

        def register(self, r: Registrar) -> None:
            r.key(steps)

    @tool
    async def ask(ctx: ToolContext) -> ToolOutput:
        """Ask."""
        if ctx.resume_input is None:
            return ToolOutput(ToolResult.suspended("sure?"), update={steps: "asked"})
        return ToolOutput(f"after {ctx.state(steps)}", update={steps: "answered"})

    runtime, _ = runtime_of(call("ask", id="c1"), say("done"), tools=[ask], plugins=[Steps()])
    waiting = await runtime.run("a", "go")
    assert waiting.state[steps] == ["asked"]
    result = await runtime.resume(waiting.run_id, {"c1": Decision.resume(True)})
    assert result.state[steps] == ["asked", "answered"]
    assert tool_texts(result) == ["after ['asked']"]


async def test_a_resumed_run_can_be_cancelled_while_it_works() -> None:
    begun = asyncio.Event()

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        if ctx.resume_input is None:
            return ToolResult.suspended("sure?")
        begun.set()
        await asyncio.sleep(60)

    runtime, _ = runtime_of(call("ask", id="c1"), tools=[ask])
    waiting = await runtime.run("a", "go")
    leg = runtime.stream_resume(waiting.run_id, {"c1": Decision.resume(True)})
    await begun.wait()
    result = await leg.cancel()
    assert result.status is RunStatus.CANCELLED
    assert [e.kind async for e in leg][-1] == "run_finished"
