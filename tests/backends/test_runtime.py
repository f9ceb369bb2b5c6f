"""Agents that run on a named backend, as children of agents that run here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from retinue import (
    Agent,
    BackendProfile,
    CancellationToken,
    Child,
    ConfigurationError,
    ExecutionBackendError,
    HarnessAgent,
    Limits,
    Message,
    ParentContext,
    RunResult,
    RunStatus,
    Runtime,
    StateKey,
    ToolContext,
    Usage,
    run_child_agent,
    tool,
)
from retinue.backends import RunRequest
from retinue.core.events import Custom, StepStarted, TextDelta
from retinue.testing import ScriptedModel, call, say

from ..folding import FoldCheck
from .example import ExampleBackend, Workshop

pytestmark = pytest.mark.usefixtures("fold_check")

FAR = Agent("far", backend="there", description="Works elsewhere.")
Body = Callable[[ToolContext], Any]


class Stage:
    """A parent whose only tool is a function of its context, and a child elsewhere."""

    def __init__(self, body: Body | None = None, backend: ExampleBackend | None = None, **parent: Any) -> None:
        self.workshop = Workshop()
        self.backend = backend or ExampleBackend(self.workshop)
        self.backend.workshop = self.workshop
        self.given: list[Any] = []

        @tool(idempotent=True)
        async def delegate(ctx: ToolContext) -> str:
            """Delegate."""
            assert body is not None
            try:
                self.given.append(await body(ctx))
            except ExecutionBackendError as exc:
                self.given.append(exc)
            return "ok"

        options: dict[str, Any] = {"tools": [delegate], "turns": [call("delegate", {}, id="c1"), say("done")], **parent}
        self.parent = Agent("parent", ScriptedModel(options.pop("turns")), **options)
        self.events: list[Any] = []
        self.runtime = Runtime([self.parent, FAR], backends={"there": self.backend}, sinks=[self.events.append])

    async def run(self, **options: Any) -> RunResult:
        async with self.runtime as runtime:
            return await runtime.run("parent", "go", **options)

    def child(self, ns: str = "tools:c1") -> list[str]:
        """The kinds of events under a call."""
        return [event.kind for event in self.events if event.ns == (ns,)]


def told(result: RunResult) -> list[str]:
    return [message.text for message in result.messages if message.role == "tool"]


WHOLE = ["run_started", "custom", "text_delta", "text_delta", "run_finished"]


async def test_as_a_task_of_the_model(fold_check: FoldCheck) -> None:
    asks = call("task", {"subagent_type": "far", "description": "echo hello there"}, id="c1")
    stage = Stage(tools=[], subagents=[FAR], turns=[asks, say("done")])
    result = await stage.run()
    assert told(result) == ["hello there"]
    assert stage.child() == WHOLE
    assert fold_check.problems == []
    around = [event.kind for event in stage.events if not event.ns and event.kind.startswith("child_")]
    assert around == ["child_started", "child_finished"]
    (request,) = stage.backend.requests
    assert (request.identity.parent_tool_call_id, request.identity.depth) == ("c1", 1)
    assert stage.backend.is_closed


async def test_as_a_tool() -> None:
    stage = Stage(tools=[FAR.as_tool()], turns=[call("agent_run_far", {"prompt": "echo hi"}, id="c1"), say("done")])
    assert told(await stage.run()) == ["hi"]
    assert stage.child() == ["run_started", "custom", "text_delta", "run_finished"]


async def test_what_it_says_is_told_once_under_one_id() -> None:
    stage = Stage(lambda ctx: ctx.run_child("far", "echo hello there"))
    await stage.run()
    deltas = [event for event in stage.events if isinstance(event, TextDelta) and event.ns]
    assert "".join([event.delta for event in deltas]) == "hello there "
    assert {event.message_id for event in deltas} == {f"{stage.given[0].run_id}-m2"}


async def test_usage_and_steps_add_up_and_count_against_limits() -> None:
    again = [call("delegate", {}, id=f"c{number}") for number in range(5)]
    stage = Stage(lambda ctx: ctx.run_child("far", "echo hello"), turns=[*again, say("done")])
    result = await stage.run(limits=Limits(tokens=250))
    outcome = stage.given[0]
    assert (outcome.usage.tokens, outcome.steps) == (110, 1)
    assert len(stage.given) == 3, "its tokens are not counted"
    assert result.usage.input_tokens >= 300
    assert result.termination == "limit:tokens"


async def test_a_backend_cannot_give_back_what_was_used() -> None:
    backend = ExampleBackend(None)
    backend.usage = Usage(requests=-5, input_tokens=-(10**9), cost=-1e6)
    spent = Usage(requests=1, input_tokens=100)
    stage = Stage(
        lambda ctx: ctx.run_child("far", "echo hello"),
        backend=backend,
        turns=lambda request: [say("", usage=spent), call("delegate")],
    )
    result = await stage.run(limits=Limits(tokens=700))
    assert (result.termination, len(stage.given)) == ("limit:tokens", 4)
    assert {outcome.usage for outcome in stage.given} == {Usage()}
    assert (result.usage.cost, result.usage.requests) == (0, 5)


@pytest.mark.parametrize(("limits", "says"), [({"children": 2}, "may start 2 children"), ({"depth": 0}, "0 deep")])
async def test_limits_hold_for_children_that_are_just_dispatched(limits: dict[str, int], says: str) -> None:
    async def five(ctx: ToolContext) -> list[RunResult]:
        return await ctx.run_children([Child("far", f"slow {number}") for number in range(5)])

    stage = Stage(five)
    await stage.run(limits=Limits(**limits))
    (results,) = stage.given
    started = [result for result in results if result.status is RunStatus.COMPLETED]
    assert len(started) == len(stage.backend.requests) == limits.get("children", 0)
    assert all(says in (result.error or "") for result in results if result not in started)


async def test_children_of_one_call_have_places_of_their_own() -> None:
    stage = Stage(lambda ctx: ctx.run_children([Child("far", f"slow {number}") for number in "AB"]))
    await stage.run()
    assert [result.response for result in stage.given[0]] == ["A", "B"]
    short = ["run_started", "custom", "text_delta", "run_finished"]
    assert (stage.child(), stage.child("tools:c1~2")) == (short, short)


async def test_a_seed_is_refused() -> None:
    stage = Stage(lambda ctx: ctx.run_child("far", "echo hello", seed={StateKey("k", str): "v"}))
    await stage.run()
    assert "takes no state seed" in str(stage.given[0])
    assert (stage.backend.requests, stage.child()) == ([], [])


class Answer(Struct):
    number: int


async def test_what_its_backend_cannot_do_is_refused_before_dispatch() -> None:
    typed = Agent("typed", backend="there", output=Answer)
    stage = Stage(lambda ctx: ctx.run_child(typed, [Message.user("echo one"), Message.user("two")]))
    await stage.run()
    assert str(stage.given[0]) == (
        "agent 'typed' could not be run: its backend cannot do this: transcript: needs 'user_messages', has "
        "'single_prompt': give it one user message; output: needs 'text_and_artifacts', has 'text': leave out the "
        "output type of the agent"
    )
    assert (stage.backend.requests, stage.child()) == ([], [])
    assert [event.kind for event in stage.events if event.kind == "child_started"] == []


async def test_more_than_is_needed_is_enough() -> None:
    able = ExampleBackend(None, BackendProfile.full_local())
    stage = Stage(lambda ctx: ctx.run_child("far", [Message.user("echo one"), Message.user("two")]), able)
    await stage.run()
    assert stage.given[0].response == "one\ntwo"


async def test_a_message_that_may_not_be_sent_is_no_message() -> None:
    stage = Stage(lambda ctx: ctx.run_child("far", [Message.system("rules")]))
    await stage.run()
    assert "there is no user message that it may be sent" in str(stage.given[0])


@pytest.mark.parametrize("continuation", ["none", "remote"])
async def test_a_conversation_goes_on_only_where_the_backend_can(continuation: Any) -> None:
    async def twice(ctx: ToolContext) -> list[Any]:
        parent = ParentContext.of(ctx)
        asked: list[Any] = []
        for text in ("echo one", "echo two"):
            try:
                asked.append(await run_child_agent(ctx.resolver, "far", text, parent=parent, thread_id="t9"))
            except ExecutionBackendError as exc:
                asked.append(exc)
        return asked

    stage = Stage(twice, ExampleBackend(None, BackendProfile(continuation=continuation)))
    await stage.run()
    first, second = stage.given[0]
    assert first.response == "one"
    thread = await stage.runtime.store.load_thread("t9")
    assert thread is not None
    texts = [message.text for message in thread.messages]
    if continuation == "none":
        assert "continuation: needs 'in_process', has 'none'" in str(second)
        assert texts == ["echo one", "one"]
    else:
        assert second.response == "two"
        assert texts == ["echo one", "one", "echo two", "two"]


def test_an_unknown_backend_is_an_error_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"agent 'far' runs on backend 'there'; Runtime\(backends=…\) has: b"):
        Runtime([FAR], backends={"b": ExampleBackend(None)})
    with pytest.raises(ConfigurationError, match=r"Runtime\(backends=…\) has: none"):
        Runtime([Agent("parent", ScriptedModel([]), subagents=[FAR])])


async def test_an_unknown_backend_of_an_agent_given_as_an_object() -> None:
    stage = Stage(lambda ctx: ctx.run_child(Agent("lost", backend="nowhere"), "echo hello"))
    await stage.run()
    assert str(stage.given[0]) == (
        "agent 'lost' could not be run: agent 'lost' runs on backend 'nowhere'; Runtime(backends=…) has: there"
    )


async def test_it_is_not_run_here() -> None:
    async with Runtime([FAR], backends={"there": ExampleBackend(None)}) as runtime:
        with pytest.raises(ConfigurationError, match="runs on backend 'there', which executes children only"):
            await runtime.run("far", "echo hello")


async def test_cancel_goes_down_and_waits_for_the_end() -> None:
    stage = Stage(lambda ctx: ctx.run_child("far", "hang"))
    async with stage.runtime as runtime:
        run = runtime.stream("parent", "go")
        async with asyncio.timeout(90):
            while not stage.workshop.jobs:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await run.cancel()).status is RunStatus.CANCELLED
        (job,) = stage.workshop.jobs.values()
        assert job.cancelled()
    assert stage.child() == ["run_started", "run_finished"]
    ends = [(event.ns, event.status) for event in stage.events if event.kind == "run_finished"]
    assert ends == [(("tools:c1",), RunStatus.CANCELLED), ((), RunStatus.CANCELLED)]


async def test_a_token_stops_the_child_alone() -> None:
    async def stopped(ctx: ToolContext) -> RunResult:
        token = CancellationToken()
        asyncio.get_running_loop().call_later(0.1, token.set, "not wanted")
        return await ctx.run_child("far", "hang", cancellation=token)

    stage = Stage(stopped)
    assert (await stage.run()).status is RunStatus.COMPLETED
    assert (stage.given[0].status, stage.given[0].error) == (RunStatus.CANCELLED, "not wanted")


async def test_a_child_that_takes_too_long() -> None:
    stage = Stage(lambda ctx: ctx.run_child("far", "hang", timeout=0.1))
    assert (await stage.run()).status is RunStatus.COMPLETED
    outcome = stage.given[0]
    assert (outcome.status, outcome.termination) == (RunStatus.TIMEOUT, "timeout")
    assert outcome.error == "it took longer than 0.1 s"
    (job,) = stage.workshop.jobs.values()
    assert job.cancelled()


@pytest.mark.parametrize("is_agents", [False, True])
async def test_a_child_whose_limit_on_time_is_reached(is_agents: bool) -> None:
    limits = Limits(seconds=0.1)
    far = Agent("far", backend="there", limits=limits) if is_agents else FAR
    given: dict[str, Any] = {} if is_agents else {"limits": limits}
    stage = Stage(lambda ctx: ctx.run_child(far, "hang", **given))
    assert (await stage.run(limits=Limits(seconds=3600))).status is RunStatus.COMPLETED
    outcome = stage.given[0]
    assert (outcome.status, outcome.termination) == (RunStatus.FAILED, "limit:seconds")
    assert re.fullmatch(r"the limit on seconds is reached: [\d.]+ of 0.1 used", outcome.error or "")
    (job,) = stage.workshop.jobs.values()
    assert job.cancelled()


async def test_the_shorter_of_timeout_and_limit_counts() -> None:
    hour = Limits(seconds=3600)
    stage = Stage(lambda ctx: ctx.run_child("far", "hang", timeout=0.1, limits=hour))
    await stage.run()
    assert stage.given[0].status is RunStatus.TIMEOUT


async def test_a_background_child_watches_the_limit_on_time_above_it(tmp_path: Path) -> None:
    now = 0.0

    def turn(request: Any) -> Any:
        nonlocal now
        if now:
            return say("started")
        now = 3599.9
        return call("agent_spawn", {"agent_id": "far", "task": "hang", "timeout_seconds": 0}, id="c1")

    boss = HarnessAgent("boss", ScriptedModel(turn), workspace=tmp_path, subagents=[FAR])
    async with Runtime([boss], backends={"there": ExampleBackend(Workshop())}, clock=lambda: now) as runtime:
        result = await runtime.run("boss", "go", limits=Limits(seconds=3600))
        ends = [event async for event in runtime.events(result.run_id) if event.kind == "run_finished" and event.ns]
    assert [(event.status, event.termination) for event in ends] == [(RunStatus.FAILED, "limit:seconds")]


class Odd(ExampleBackend):
    """Does something of its own once a run was accepted, or before."""

    def __init__(self, act: Callable[[RunRequest], Any], *, accepts: bool = True) -> None:
        super().__init__(None)
        self._act, self._accepts = act, accepts

    async def run(self, request: RunRequest) -> RunResult:
        if self._accepts and request.accepted is not None:
            request.accepted()
            request.accepted = None
        self._act(request)
        return await super().run(request)


def broken(request: RunRequest) -> None:
    raise OSError("it broke")


async def test_what_raises_before_acceptance_leaves_nothing() -> None:
    stage = Stage(lambda ctx: ctx.run_child("far", "echo hello"), Odd(broken, accepts=False))
    await stage.run()
    assert str(stage.given[0]) == "agent 'far' could not be run: OSError: it broke"
    assert stage.child() == []
    assert [event.kind for event in stage.events if event.kind.startswith("child_")] == []


async def test_what_raises_after_acceptance_is_a_failed_run() -> None:
    stage = Stage(lambda ctx: ctx.run_child("far", "echo hello"), Odd(broken))
    await stage.run()
    assert (stage.given[0].status, stage.given[0].error) == (RunStatus.FAILED, "OSError: it broke")
    assert stage.child() == ["run_started", "error", "run_finished"]


@pytest.mark.parametrize("fields", [{"error": ValueError("x")}, {"steps": None}, {"response": 5}])
async def test_a_result_that_is_not_valid_is_a_failed_run(fields: dict[str, Any]) -> None:
    class Wrong(ExampleBackend):
        async def run(self, request: RunRequest) -> RunResult:
            return replace(await super().run(request), **fields)

    stage = Stage(lambda ctx: ctx.run_child("far", "echo hello"), Wrong(None))
    await stage.run()
    assert (stage.given[0].status, "no valid RunResult" in stage.given[0].error) == (RunStatus.FAILED, True)
    assert stage.child()[-1] == "run_finished"


async def test_what_is_emitted_after_the_end_is_dropped() -> None:
    kept: list[Any] = []
    stage = Stage(lambda ctx: ctx.run_child("far", "echo hello"), Odd(lambda request: kept.append(request.emit)))

    def late(request: Any) -> Any:
        if not kept:
            return call("delegate", {}, id="c1")
        kept[0](Custom(data={"late": True}))
        kept[0](StepStarted(step=9, model=""))
        return say("done")

    stage.parent = Agent("parent", ScriptedModel(late), tools=stage.parent.tools)
    stage.runtime = Runtime([stage.parent, FAR], backends={"there": stage.backend}, sinks=[stage.events.append])
    await stage.run()
    assert stage.child() == ["run_started", "custom", "text_delta", "run_finished"]


async def test_only_what_is_for_watching_can_be_emitted() -> None:
    stage = Stage(
        lambda ctx: ctx.run_child("far", "echo hello"),
        Odd(lambda request: request.emit and request.emit(StepStarted(step=1, model=""))),
    )
    await stage.run()
    assert stage.given[0].error == "TypeError: a backend emits what is for watching only, not 'step_started'"
    assert stage.child() == ["run_started", "error", "run_finished"]


async def test_spawned_by_a_harness_it_becomes_a_task_and_goes_on(tmp_path: Path) -> None:
    spawn = {"agent_id": "far", "task": "slow hello", "timeout_seconds": 0}

    def turn(request: Any) -> Any:
        answers = [message.text for message in request.messages if message.role == "tool"]
        if not answers:
            return call("agent_spawn", spawn, id="c1")
        if len(answers) == 1:
            return call("task_output", {"task_id": answers[0].split("task_id: ")[1].split()[0]}, id="c2")
        return say("done")

    boss = HarnessAgent("boss", ScriptedModel(turn), workspace=tmp_path, subagents=[FAR], general_purpose=False)
    workshop, events = Workshop(), list[Any]()
    backends = {"there": ExampleBackend(workshop)}
    async with Runtime([boss], backends=backends, sinks=[events.append]) as runtime:
        result = await runtime.run("boss", "go")
    assert told(result)[1].endswith("\n\nResult:\nhello")
    own = [event.kind for event in events if event.ns == ("tools:c1",) and event.kind != "task_updated"]
    assert own == ["run_started", "custom", "text_delta", "run_finished"]


async def test_without_lineage() -> None:
    stage = Stage(lambda ctx: run_child_agent(ctx.resolver, "far", "echo hello", parent=ParentContext()))
    await stage.run()
    assert stage.given[0].response == "hello"
    assert stage.child() == []


@pytest.mark.parametrize("transcript", ["user_messages", "full"])
async def test_a_backend_gets_only_what_may_leave_unless_its_transcript_is_full(transcript: Any) -> None:
    said = [
        Message.system("secret"),
        Message.user("echo hello"),
        Message.assistant("earlier"),
        Message.user("for the model", visibility="internal"),
    ]
    stage = Stage(
        lambda ctx: run_child_agent(ctx.resolver, "far", said, parent=ParentContext.of(ctx)),
        ExampleBackend(None, BackendProfile(cancellation="cooperative", persistence="stored", transcript=transcript)),
    )
    await stage.run()
    assert stage.given[0].response == "hello"
    texts = [message.text for message in stage.backend.requests[0].messages]
    assert texts == ([message.text for message in said] if transcript == "full" else ["echo hello"])
