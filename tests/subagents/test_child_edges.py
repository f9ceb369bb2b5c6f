"""Where children meet bad luck: each of these went wrong once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Child,
    ConfigurationError,
    Decision,
    ExecutionBackendError,
    ExecutionFailed,
    Limits,
    Plugin,
    Registrar,
    RetinueError,
    RunStatus,
    Runtime,
    StateKey,
    StreamingPassthroughSink,
    ToolContext,
    ToolResult,
    tool,
)
from retinue.testing import RecordingSink, ScriptedModel, ScriptError, call, say
from tests.busy import Busy

from .. import inside


def echo(name: str = "echo") -> Agent:
    return Agent(name, ScriptedModel(lambda r: say(f"{name}: {r.messages[-1].text}")))


@tool
async def ask(ctx: ToolContext) -> Any:
    """Ask a human."""
    return ToolResult.suspended("?") if ctx.resume_input is None else f"answered {ctx.resume_input}"


def asker(name: str = "asker") -> Agent:
    def answer(request: Any) -> Any:
        return (
            say(f"{name}: {request.messages[-1].text}") if request.messages[-1].role == "tool" else call("ask", id="q")
        )

    return Agent(name, ScriptedModel(answer), tools=[ask])


def boss(function: Any, *more: Any, **options: Any) -> Runtime:
    script = [[call(function.name, id="c1"), *more], say("done")]
    return Runtime([Agent("boss", ScriptedModel(script), tools=[function], **options)])


def texts(result: Any) -> list[str]:
    return [m.text for m in result.messages if m.role == "tool"]


async def test_a_tool_that_goes_on_gets_each_child_back_whatever_the_order() -> None:
    plain, waits = echo(), asker()

    @tool
    async def delegate(ctx: ToolContext) -> Any:
        """Two chains side by side, the second of which waits at its end."""

        async def chain(name: str, *agents: Agent) -> list[Any]:
            return [await ctx.run_child(agent, f"{name}{n}") for n, agent in enumerate(agents)]

        a, b = await asyncio.gather(chain("a", plain, plain), chain("b", plain, waits))
        if b[1].status is RunStatus.SUSPENDED:
            return ToolResult.suspended("wait")
        return [outcome.response for outcome in (*a, *b)]

    runtime = boss(delegate)
    waiting = await runtime.run("boss", "go")
    result = await runtime.resume(waiting.run_id, {"q": Decision.resume("yes")})
    assert texts(result) == ['["echo: a0","echo: a1","echo: b0","asker: answered yes"]']


async def test_a_call_that_leaves_its_child_behind_keeps_no_slot() -> None:
    child = echo()
    left: list[Any] = []

    @tool
    async def leave(ctx: ToolContext) -> str:
        """Start a child and go."""
        left.append(asyncio.create_task(ctx.run_child(child, "x")))
        await asyncio.sleep(0)
        return "left"

    script = [call("leave", id=f"c{n}") for n in range(3)]
    agent = Agent("boss", ScriptedModel([*script, say("done")]), tools=[leave], limits=Limits(parallel=1))
    result = await asyncio.wait_for(Runtime([agent]).run("boss", "go"), 90)
    assert result.response == "done"
    await asyncio.gather(*left, return_exceptions=True)


@pytest.mark.parametrize("place", ["memory:", "sqlite:///{}/app.db"])
async def test_a_child_that_a_tool_left_at_work_ends_with_the_run(place: str, tmp_path: Path) -> None:
    asked, answer, left = asyncio.Event(), asyncio.Event(), list[Any]()

    async def respond(request: Any) -> Any:
        asked.set()
        await answer.wait()
        return say("too late")

    @tool
    async def leave(ctx: ToolContext) -> str:
        """Start a child and go."""
        left.append(asyncio.create_task(ctx.run_child("slow", "x")))
        await asked.wait()
        return "left"

    agents = [
        Agent("slow", ScriptedModel(respond)),
        Agent("boss", ScriptedModel([call("leave"), say("done")]), tools=[leave]),
    ]
    async with Runtime.open(place.format(tmp_path), agents) as runtime:
        run = runtime.stream("boss", "go")
        assert (await run.result()).status is RunStatus.COMPLETED
        answer.set()
        await asyncio.gather(*left, return_exceptions=True)
        ends = [
            e async for e in runtime.events(run.run_id) if e.kind in ("run_finished", "child_finished", "text_delta")
        ]
    assert [
        (e.kind, e.agent, getattr(e, "status", e)) for e in ends if e.agent == "slow" or e.kind != "text_delta"
    ] == [
        ("run_finished", "slow", RunStatus.CANCELLED),
        ("child_finished", "boss", RunStatus.CANCELLED),
        ("run_finished", "boss", RunStatus.COMPLETED),
    ]


async def test_a_child_that_a_failed_call_left_at_work_ends_with_the_call() -> None:
    asked = asyncio.Event()

    async def respond(request: Any) -> Any:
        asked.set()
        await asyncio.sleep(3600)

    child = Agent("slow", ScriptedModel(respond))

    @tool
    async def both(ctx: ToolContext) -> None:
        """Start two children, of which one cannot be set up: `gather` does not stop the other."""

        async def later() -> None:
            await asked.wait()
            await ctx.run_child("nobody", "x")

        await asyncio.gather(ctx.run_child(child, "x"), later())

    sink = RecordingSink()
    async with boss(both) as runtime:
        await runtime.run("boss", "go", sinks=[sink])
    ends = sink.of("run_finished", "child_finished", "tool_call_finished")
    assert [(e.kind, e.status) for e in ends] == [
        ("run_finished", "cancelled"),
        ("child_finished", "cancelled"),
        ("tool_call_finished", "failed"),
        ("run_finished", "completed"),
    ]


@pytest.mark.parametrize("how", ["gather", "task", "timeout"])
async def test_the_work_of_a_child_that_nobody_waits_for_is_stopped(how: str) -> None:
    at_work, stopped, worked_on, left = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[Any]()

    @tool
    async def work() -> None:
        """Work for a while."""
        at_work.set()
        try:
            await asyncio.sleep(3600)
            worked_on.set()
        except asyncio.CancelledError:
            stopped.set()
            raise

    child = Agent("child", ScriptedModel([call("work")]), tools=[work])

    @tool
    async def start(ctx: ToolContext) -> str:
        """Start a child, and do not wait for it."""

        async def fail() -> None:
            await at_work.wait()
            raise ExecutionFailed("no")

        timeout = 3600 if how == "timeout" else None  # such a child has an asyncio task of its own
        started = ctx.run_child(child, "x", timeout=timeout)
        if how == "gather":
            await asyncio.gather(started, fail())
        left.append(asyncio.create_task(started))
        await at_work.wait()
        return "left"

    assert (await boss(start).run("boss", "go")).status is RunStatus.COMPLETED
    async with asyncio.timeout(5):
        await stopped.wait()
        for waiting in left:  # whoever waits for it gets its result
            assert (await waiting).status is RunStatus.CANCELLED
    assert not worked_on.is_set()


async def test_a_tool_may_start_a_child_while_another_ends() -> None:
    @tool
    async def work() -> str:
        """Work."""
        await asyncio.sleep(0.01)
        return "worked"

    worker = Agent(
        "worker", ScriptedModel(lambda r: say("ok") if r.messages[-1].role == "tool" else call("work")), tools=[work]
    )

    @tool
    async def go(ctx: ToolContext) -> str:
        """Two children, one a little later."""

        async def later() -> None:
            await asyncio.sleep(0.005)
            await ctx.run_child(worker, "b")

        await asyncio.gather(ctx.run_child(worker, "a"), later())
        return "ok"

    runtime = boss(go, call("work"), limits=Limits(parallel=1))
    agent = runtime.agents["boss"]
    wide = Agent("boss", agent.model, tools=[go, work], limits=Limits(parallel=1))
    result = await asyncio.wait_for(Runtime([wide]).run("boss", "go"), 90)
    assert texts(result) == ["ok", "worked"]


async def test_children_of_one_call_that_ask_alike_can_each_be_answered() -> None:
    agent = asker()

    @tool
    async def delegate(ctx: ToolContext) -> Any:
        """Three of a kind."""
        outcomes = await ctx.run_children([Child(agent, "same") for _ in range(3)])
        if any(outcome.status is RunStatus.SUSPENDED for outcome in outcomes):
            return ToolResult.suspended("wait")
        return sorted([outcome.response or "" for outcome in outcomes])

    runtime = boss(delegate)
    result = await runtime.run("boss", "go")
    assert sorted(result.suspended) == ["c1/q", "c1~2/q", "c1~3/q"]
    for n, key in enumerate(("c1~2/q", "c1/q", "c1~3/q")):
        result = await runtime.resume(result.run_id, {key: Decision.resume(n)})
    assert texts(result) == ['["asker: answered 0","asker: answered 1","asker: answered 2"]']


async def test_a_child_with_a_set_in_its_seed_is_found_again() -> None:
    tags, orders = StateKey("tags", set[int]), iter(([0, 8], [8, 0]))

    class Keys(Plugin):
        def register(self, r: Registrar) -> None:
            r.key(tags)

    child = Agent("child", ScriptedModel([call("ask", id="q"), say("answered")]), tools=[ask], plugins=[Keys()])

    @tool
    async def delegate(ctx: ToolContext) -> ToolResult:
        """Delegate, with a set that iterates in another order each time, as text does in another process."""
        outcome = await ctx.run_child(child, "x", seed={tags: set(next(orders))})
        return ToolResult.suspended("?") if outcome.status.is_waiting else ToolResult.success(outcome.response)

    async with boss(delegate) as runtime:
        result = await runtime.run("boss", "go")
        result = await runtime.resume(result.run_id, {"q": Decision.resume("yes")})
        places = {event.ns async for event in runtime.events(result.run_id)}
    assert texts(result) == ["answered"]
    assert places == {(), ("tools:c1",)}


async def test_the_call_above_stands_for_the_one_thing_that_waits_below() -> None:
    for key in ("c1", "child_c1"):
        runtime = Runtime(
            [
                Agent(
                    "boss",
                    ScriptedModel([call("task", {"subagent_type": "asker", "description": "x"}, id="c1"), say("ok")]),
                    subagents=[asker()],
                )
            ]
        )
        waiting = await runtime.run("boss", "go")
        result = await runtime.resume(waiting.run_id, {key: Decision.resume("yes")})
        assert texts(result) == ["asker: answered yes"]


async def test_no_two_children_share_a_namespace_even_late() -> None:
    child, late = echo(), list[Any]()

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """One child now, one later."""
        await ctx.run_child(child, "now")

        async def later() -> None:
            await asyncio.sleep(0.01)
            await ctx.run_child(child, "later")

        late.append(asyncio.create_task(later()))
        return "ok"

    @tool
    async def wait() -> str:
        """Wait for it."""
        await late[0]
        return "ok"

    sink = RecordingSink()
    agent = Agent("boss", ScriptedModel([call("delegate", id="c1"), call("wait"), say("done")]), tools=[delegate, wait])
    await Runtime([agent]).run("boss", "go", sinks=[sink])
    assert [e.child_ns for e in sink.of("child_started")] == [("tools:c1",), ("tools:c1~2",)]


async def test_what_a_cancelled_child_used_is_counted_and_told() -> None:
    begun = asyncio.Event()

    @tool
    async def hang() -> None:
        """Hang."""
        begun.set()
        await asyncio.sleep(60)

    child = Agent("child", ScriptedModel([call("hang")]), tools=[hang])

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        await ctx.run_child(child, "x", timeout=60)
        return "never"

    sink = RecordingSink()
    run = boss(delegate).stream("boss", "go", sinks=[sink])
    await begun.wait()
    result = await run.cancel()
    assert result.usage.requests == 2
    assert [e.status for e in sink.of("child_finished")] == ["cancelled"]


async def test_the_roots_limits_hold_however_little_a_child_says() -> None:
    def deeper(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(request.messages[-1].text)
        return call("task", {"subagent_type": "agent", "description": "deeper"})

    agent = Agent("agent", ScriptedModel(deeper), subagents=["agent"])
    sink = RecordingSink()
    await Runtime([agent]).run("agent", "go", limits=Limits(depth=5), sinks=[sink])
    assert max(len(e.ns) for e in sink.events) == 5


async def test_children_that_cannot_be_set_up_are_results_among_the_others() -> None:
    child = echo()

    @tool
    async def delegate(ctx: ToolContext) -> list[str]:
        """Delegate."""
        outcomes = await ctx.run_children([Child(child, "a"), Child("nobody", "b"), Child(child, "c")])
        return [outcome.response or (outcome.error or "").partition(":")[0] for outcome in outcomes]

    assert texts(await boss(delegate).run("boss", "go")) == [
        '["echo: a","agent \'nobody\' could not be run","echo: c"]'
    ]


MISTAKES: dict[str, tuple[Any, str]] = {
    "none at a time": (lambda ctx: ctx.run_children([Child(echo(), "x")], limit=0), "at least 1, not 0"),
    "a limit of text": (lambda ctx: ctx.run_children([Child(echo(), "x")], limit="2"), "at least 1, not '2'"),
    "one child": (lambda ctx: ctx.run_children(Child(echo(), "x")), "children is a list, even of one"),
    "a child by name": (lambda ctx: ctx.run_children(["echo"]), "takes Child(agent, input), not 'echo'"),
    "a timeout of text": (lambda ctx: ctx.run_child(echo(), "x", timeout="5"), "a number of seconds, not '5'"),
    "no token": (lambda ctx: ctx.run_child(echo(), "x", cancellation=3), "is a CancellationToken, such as"),
}


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_child_that_is_asked_for_wrongly_is_refused_with_what_to_write(name: str) -> None:
    ask_for, sentence = MISTAKES[name]

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        with pytest.raises(RetinueError) as caught:
            await ask_for(ctx)
        return str(caught.value)

    sink = RecordingSink()
    assert sentence in texts(await boss(delegate).run("boss", "go", sinks=[sink]))[0]
    assert not sink.of("child_started")


class Broken(Plugin):
    name = "broken"

    def register(self, r: Registrar) -> None:
        raise KeyError("no such table")


async def test_a_plugin_that_cannot_be_installed_is_an_error_of_the_set_up() -> None:
    broken = Agent("broken", ScriptedModel([]), plugins=[Broken()])

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        with pytest.raises(ExecutionBackendError) as caught:
            await ctx.run_child(broken, "x")
        return str(caught.value)

    sink, reason = RecordingSink(), "plugin 'broken' failed in register: KeyError: 'no such table'"
    assert reason in texts(await boss(delegate).run("boss", "go", sinks=[sink]))[0]
    assert not sink.of("child_started")
    with pytest.raises(ConfigurationError, match=reason):
        await Runtime([broken]).run("broken", "go")


async def test_the_children_of_a_failed_attempt_are_given_up() -> None:
    attempts = 0

    @tool(retries=1)
    async def delegate(ctx: ToolContext) -> Any:
        """Fail once."""
        nonlocal attempts
        attempts += 1
        outcome = await ctx.run_child(asker(), f"attempt {attempts}")
        if attempts == 1:
            raise RuntimeError("again")
        return ToolResult.suspended("wait") if outcome.status is RunStatus.SUSPENDED else outcome.response

    sink = RecordingSink()
    waiting = await boss(delegate).run("boss", "go", sinks=[sink])
    assert [ticket.path for ticket in waiting.suspended.values()] == [("c1~2", "q")]
    ended = [e.status for e in sink.of("child_finished")]
    assert ended == ["suspended", "cancelled", "suspended"]


async def test_nothing_is_left_behind_by_a_run_that_raised() -> None:
    runtime: Any = Runtime([Agent("a", ScriptedModel([]))])
    with pytest.raises(ScriptError):
        await runtime.run("a", "go")
    assert inside.executions(runtime) == {}
    assert inside.waiting_lines(runtime) == [[]]


async def test_a_sink_given_again_hears_the_rest() -> None:
    buffers: list[str] = []

    @tool
    async def delegate(ctx: ToolContext) -> Any:
        """Stream a child that asks."""
        sink = StreamingPassthroughSink(ctx.call_id, ctx.tool_name, ctx.sink)
        outcome = await ctx.run_child(child, "x", sink=sink)
        buffers.append(sink.buffer)
        return ToolResult.suspended("wait") if outcome.status is RunStatus.SUSPENDED else "ok"

    child = asker()
    runtime = boss(delegate)
    waiting = await runtime.run("boss", "go")
    await runtime.resume(waiting.run_id, {"q": Decision.resume("yes")})
    assert buffers == ["", "asker: answered yes"]


async def test_agents_made_on_the_spot_do_not_get_in_each_others_way() -> None:
    @tool
    async def delegate(name: str, ctx: ToolContext) -> str:
        """Make a team and use it."""
        helper = Agent("helper", ScriptedModel(lambda r: say(f"helped {name}")))
        go = call("task", {"subagent_type": "helper", "description": "x"})
        lead = Agent("lead", ScriptedModel([go, say("ok")]), subagents=[helper])
        outcome = await ctx.run_child(lead, "x")
        return outcome.messages[-2].text

    script = [[call("delegate", {"name": n}) for n in ("ann", "bob")], say("done")]
    runtime = Runtime([Agent("boss", ScriptedModel(script), tools=[delegate])])
    assert texts(await runtime.run("boss", "go")) == ["helped ann", "helped bob"]
    assert list(runtime.agents) == ["boss"]


async def test_closing_stops_children_that_were_left_behind() -> None:
    hanging, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def hang() -> None:
        """Hang."""
        hanging.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()

    child = Agent("child", ScriptedModel([call("hang")]), tools=[hang])
    left: list[Any] = []

    @tool
    async def leave(ctx: ToolContext) -> str:
        """Start a child and go."""
        left.append(asyncio.create_task(ctx.run_child(child, "x")))
        await hanging.wait()
        return "left"

    async with boss(leave) as runtime:
        run = runtime.stream("boss", "go")
        await run.result()
    assert stopped.is_set()
    await asyncio.gather(*left, return_exceptions=True)


async def test_a_child_that_could_not_be_set_up_takes_no_number() -> None:
    child = echo()

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Fail, then succeed."""
        for wrong in (
            {"seed": {StateKey("nowhere", int): 1}},
            {"seed": 5},
            {"input": []},
            {"input": 5},
            {"agent": None},
        ):
            given: Any = {"agent": child, "input": "x", **wrong}
            with pytest.raises(ExecutionBackendError):
                await ctx.run_child(given.pop("agent"), given.pop("input"), **given)
        await ctx.run_child(child, "x")
        return "ok"

    sink = RecordingSink()
    result = await boss(delegate).run("boss", "go", sinks=[sink])
    assert texts(result) == ["ok"]
    assert [e.child_ns for e in sink.of("child_started")] == [("tools:c1",)]


async def test_cancelling_a_tree_that_waits_tells_how_its_children_ended() -> None:
    @tool
    async def delegate(ctx: ToolContext) -> Any:
        """Delegate."""
        await ctx.run_child(asker(), "x")
        return ToolResult.suspended("wait")

    sink = RecordingSink()
    runtime = boss(delegate)
    waiting = await runtime.run("boss", "go", sinks=[sink])
    await runtime.cancel(waiting.run_id)
    assert [e.status for e in sink.of("child_finished")] == ["suspended", "cancelled"]


async def test_a_child_may_have_a_narrower_limit_on_parallel_calls() -> None:
    busy = Busy()
    script = [[call("work") for _ in range(6)], say("ok")]
    child = Agent("child", ScriptedModel(script), tools=[busy.tool], limits=Limits(parallel=2))

    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        return (await ctx.run_child(child, "x")).response or ""

    assert texts(await asyncio.wait_for(boss(delegate).run("boss", "go"), 90)) == ["ok"]
    assert busy.most == 2
