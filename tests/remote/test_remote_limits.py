"""The limits of a tree hold for its runs on other servers, over any number of servers."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue import A2AAgent, Agent, Limits, Runtime, ToolContext, tool
from retinue.core.runs import Usage
from retinue.events import InferenceFinished, RunFinished
from retinue.server import create_app
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from tests.server.serving import TOKEN, listening, serving
from tests.waiting import until

from .. import inside
from .server import TaskServer

pytestmark = pytest.mark.usefixtures("short_pauses")

SPENT = Usage(requests=1, input_tokens=90, output_tokens=10)
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def delegating(name: str, stub: Agent, **options: Any) -> Agent:
    """An agent that gives all its work to another, and repeats what it is told."""

    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(f"{name}: {request.messages[-1].text}", usage=SPENT)
        return [say("", usage=SPENT), call("task", {"subagent_type": stub.name, "description": "go"}, id=f"c_{name}")]

    return Agent(name, ScriptedModel(turn), subagents=[stub], **options)


def working(steps: int = 20, **options: Any) -> Agent:
    """An agent that works for some steps."""

    @tool
    def work() -> str:
        """Work."""
        return "worked"

    def turn(request: Any) -> Any:
        done = sum(message.role == "tool" for message in request.messages)
        return say("all done", usage=SPENT) if done >= steps else [say("x", usage=SPENT), call("work")]

    return Agent("worker", ScriptedModel(turn), tools=[work], max_steps=50, **options)


class Hub:
    """Servers that know each other's addresses before they have started."""

    def __init__(self) -> None:
        self.apps: dict[str, ASGIApp] = {}

    def app(self, name: str) -> ASGIApp:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await self.apps[name](scope, receive, send)

        return serve


def stub_of(name: str, url: str, protocol: str) -> Agent:
    if protocol == "a2a":
        return A2AAgent(name, f"{url}/a2a/{name}", headers=HEADERS)
    return RemoteSubagentStub(name, url=url, headers=HEADERS)


@pytest.mark.parametrize("protocol", ["tasks", "a2a"])
@pytest.mark.parametrize("depth", [0, 1, 3, 5])
async def test_a_cycle_of_servers_ends_at_the_depth_of_its_root(depth: int, protocol: str) -> None:
    hub, limits = Hub(), Limits(depth=8)
    async with AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(listening(hub.app(name))) for name in ("ping", "pong")}
        stubs = {name: stub_of(name, url, protocol) for name, url in urls.items()}
        runtimes = {
            name: await stack.enter_async_context(Runtime([delegating(name, stubs[other], limits=limits)]))
            for name, other in (("ping", "pong"), ("pong", "ping"))
        }
        hub.apps |= {name: create_app(runtime, auth=TOKEN) for name, runtime in runtimes.items()}
        result = await runtimes["ping"].run("ping", "go", limits=Limits(depth=depth))
        runs = [run for runtime in runtimes.values() for run in await runtime.store.list_runs()]
    assert len(runs) == depth + 1
    assert (result.response or "").endswith("agents may be nested 0 deep: do this yourself"), result.response
    assert result.usage.requests == 2 * (depth + 1), "the usage of all servers adds up"


async def test_what_the_tree_has_left_is_sent() -> None:
    async with Runtime([working(1)]) as far, TaskServer(far, has_events=True) as server:
        lead = delegating("lead", RemoteSubagentStub("worker", url=server.url))
        async with Runtime([lead]) as runtime:
            limits = Limits(depth=2, children=5, parallel=4, steps=10, tokens=2_000, seconds=1_000)
            await runtime.run("lead", "go", limits=limits)
        sent = server.submissions[0].limits
        assert (sent.depth, sent.children, sent.parallel, sent.cost) == (1, 4, 4, None)
        assert sent.steps == 8, "one step is done, and one is kept for the answer of the parent"
        assert 1_650 < sent.tokens < 1_800, "100 are used, and the answer of the parent is reserved"
        assert 900 < sent.seconds < 1_000


async def test_a_declared_limit_of_a_remote_sub_agent_is_sent() -> None:
    async with Runtime([working(1)]) as far, TaskServer(far, has_events=True) as server:
        stub = RemoteSubagentStub("worker", url=server.url, limits=Limits(steps=3))
        async with Runtime([delegating("lead", stub)]) as runtime:
            await runtime.run("lead", "go")
        assert (server.submissions[0].limits.steps, server.submissions[0].limits.depth) == (3, 2)


async def test_a_server_keeps_to_the_limits_of_the_parent_and_to_its_own() -> None:
    async with serving(Runtime([working(limits=Limits(steps=9, depth=1))])) as site:
        body = {"task_id": "t1", "agent_id": "worker", "input": "go", "context": {}}
        for number, (given, steps) in enumerate([(None, 9), ({"steps": 4}, 4), ({"steps": 12, "depth": 7}, 9)]):
            await site.post("/tasks", {**body, "task_id": f"t{number}", "limits": given})
            ended = (await site.get(f"/tasks/t{number}/wait?timeout_seconds=30")).body
            assert (ended["termination"], ended["steps"]) == ("limit:steps", steps)
        again = await site.post("/tasks", {**body, "task_id": "t1", "limits": {"steps": 2}})
        assert again.status == 200, "a repeat has other limits, because some are used up"
        for bad in ({"steps": -1}, {"steps": "x"}, [1], {"depth": None}):
            refused = await site.post("/tasks", {**body, "task_id": "t9", "limits": bad})
            assert (refused.status, refused.body["code"]) == (422, "invalid_body"), bad
        assert (await site.get("/tasks/t9")).status == 404


async def test_a_server_that_ignores_limits_is_stopped_when_they_are_passed() -> None:
    async with Runtime([working()]) as far, TaskServer(far, has_events=True) as server:
        lead = delegating("lead", RemoteSubagentStub("worker", url=server.url))
        async with Runtime([lead]) as runtime:
            run = runtime.stream("lead", "go", limits=Limits(tokens=1_000))
            events = [event async for event in run]
            result = await run.result()
        child = next(event for event in events if isinstance(event, RunFinished) and event.ns)
        assert (child.status, child.termination) == ("cancelled", "cancelled")
        assert "the limit on tokens is reached" in (child.error or "")
        (there,) = server.runs.values()
        assert (await there.result()).status == "cancelled"
        answers = [event for event in events if isinstance(event, InferenceFinished) and event.ns]
        assert 9 <= len(answers) < 20
        assert result.usage.tokens >= 1_000


@pytest.mark.parametrize("has_events", [True, False], ids=["with events", "with states only"])
@pytest.mark.parametrize("used", [{"input_tokens": -(10**9), "cost": -1e6}, {"input_tokens": -1, "requests": -(10**9)}])
async def test_a_server_cannot_give_back_what_a_tree_has_used(used: dict[str, float], has_events: bool) -> None:
    """The lead would delegate for ever; the server says each time that less than nothing was used."""
    async with Runtime([working(2)]) as far, TaskServer(far, has_events=has_events) as server:
        server.says_used = used
        stub = RemoteSubagentStub("worker", url=server.url)
        ask = [say("", usage=SPENT), call("task", {"subagent_type": "worker", "description": "go"})]
        lead = Agent("lead", ScriptedModel(lambda request: ask), subagents=[stub])
        async with Runtime([lead]) as runtime:
            run = runtime.stream("lead", "go", limits=Limits(tokens=1_000))
            events = [event async for event in run]
            result = await run.result()
    assert (result.termination, len(server.submissions)) == ("limit:tokens", 7)
    assert 700 <= result.usage.tokens <= 1_000
    spent = [event.usage for event in events if isinstance(event, InferenceFinished | RunFinished)]
    assert min(min(one.tokens, one.requests, one.cost) for one in spent) >= 0


async def test_a_server_that_says_it_used_everything_ends_the_tree_and_not_its_log(tmp_path: Path) -> None:
    async with Runtime([working(2)]) as far, TaskServer(far, has_events=True) as server:
        server.says_used = {"input_tokens": 10**18, "cached_tokens": 2**63 - 1, "cost": 1e300}
        lead = delegating("lead", RemoteSubagentStub("worker", url=server.url))
        async with Runtime.open(f"sqlite:///{tmp_path}/db", [lead]) as runtime:
            result = await runtime.run("lead", "go", limits=Limits(tokens=1_000))
            stored = await runtime.result(result.run_id)
    assert (stored.usage.input_tokens, stored.usage.cost) == (2**53, 2**53), "sums stay exact in JSON"
    assert stored == result


async def test_children_of_a_remote_run_count_in_the_tree() -> None:
    below = Agent("below", ScriptedModel(lambda request: say("done")))
    async with Runtime([delegating("middle", below)]) as far, TaskServer(far, has_events=True) as server:
        stub = RemoteSubagentStub("middle", url=server.url)

        def turn(request: Any) -> Any:
            told = [message.text for message in request.messages if message.role == "tool"]
            return say(told[-1]) if len(told) == 2 else call("task", {"subagent_type": "middle", "description": "go"})

        async with Runtime([Agent("lead", ScriptedModel(turn), subagents=[stub])]) as runtime:
            result = await runtime.run("lead", "go", limits=Limits(children=2))
    assert "may start 2 children" in (result.response or "")


def fan_out(stub: Agent, counts: list[int]) -> Agent:
    """An agent that gives work to another, as many times at once in each step; then it repeats what it is told."""

    def turn(request: Any) -> Any:
        asked = sum(message.role == "assistant" for message in request.messages)
        if asked == len(counts):
            return say("; ".join(message.text for message in request.messages if message.role == "tool"), usage=SPENT)
        given = {"subagent_type": stub.name, "description": "go"}
        return [say("", usage=SPENT), *[call("task", given, id=f"c_{asked}_{n}") for n in range(counts[asked])]]

    return Agent("lead", ScriptedModel(turn), subagents=[stub])


@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "in memory"])
@pytest.mark.parametrize("limits", [Limits(steps=20), Limits(tokens=2_000)], ids=["steps", "tokens"])
@pytest.mark.parametrize("protocol", ["tasks", "a2a"])
async def test_remote_runs_at_once_share_what_is_left(
    protocol: str, limits: Limits, is_stored: bool, tmp_path: Path
) -> None:
    async with Runtime([working()]) as far, listening(create_app(far, auth=TOKEN)) as url:
        lead = fan_out(stub_of("worker", url, protocol), [3])
        async with Runtime.open(f"sqlite:///{tmp_path}/a.db", [lead]) if is_stored else Runtime([lead]) as runtime:
            run = runtime.stream("lead", "go", limits=limits)
            events = [event async for event in run]
            result = await run.result()
    used = [event.steps for event in events if isinstance(event, RunFinished) and event.ns]
    assert len(used) == 3
    assert min(used) >= 4
    assert max(used) - min(used) <= 1, "each gets the same part"
    assert sum(used) + result.steps <= 20
    assert result.usage.tokens <= 2_000
    assert result.status == "completed"


async def test_what_a_remote_run_did_not_use_comes_back() -> None:
    async with Runtime([working(1)]) as far, TaskServer(far, has_events=True) as server:
        lead = fan_out(RemoteSubagentStub("worker", url=server.url), [1, 1])
        async with Runtime([lead]) as runtime:
            await runtime.run("lead", "go", limits=Limits(steps=12, children=5))
        first, second = [one.limits for one in server.submissions]
        assert (first.steps, first.children) == (10, 4)
        assert (second.steps, second.children) == (7, 3), "what the first had left is there again"


async def test_a_fork_holds_no_part_of_its_limits_for_a_run_that_has_ended(tmp_path: Path) -> None:
    async with Runtime([working(1)]) as far, TaskServer(far, has_events=True) as server:
        lead = fan_out(RemoteSubagentStub("worker", url=server.url), [1, 1])
        async with Runtime.open(f"sqlite:///{tmp_path}/a.db", [lead]) as runtime:
            run = runtime.stream("lead", "go", limits=Limits(steps=20))
            steps = [event.seq async for event in run if event.kind == "step_finished" and not event.ns]
            fork = await runtime.fork(run.run_id, at=steps[0])
            live = inside.owned_run(runtime, fork.run_id)
            assert live is not None
            held = [dict(live.log.tree.grants)]
            async for _ in fork:
                held.append(dict(live.log.tree.grants))
    assert all(len(grants) <= 1 for grants in held)
    assert held[0] == held[-1] == {}


async def test_a_remote_run_that_ignores_its_part_does_not_use_that_of_another() -> None:
    runs, is_first_over = list[str](), asyncio.Event()

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work; all but the first run wait until that has ended."""
        runs.append(ctx.run.run_id)
        if ctx.run.run_id != runs[0]:
            await is_first_over.wait()
        return "worked"

    worker = Agent("worker", ScriptedModel(lambda request: [say("x", usage=SPENT), call("work")]), tools=[work])
    async with Runtime([worker]) as far, TaskServer(far, has_events=True) as server:
        lead = fan_out(RemoteSubagentStub("worker", url=server.url), [2])
        async with Runtime([lead]) as runtime:
            ends: list[RunFinished] = []
            async for event in runtime.stream("lead", "go", limits=Limits(tokens=1_600)):
                if isinstance(event, RunFinished) and event.ns:
                    ends.append(event)
                    is_first_over.set()
    spent = re.search("the limit on tokens is reached: ([0-9,]+) of 1,600 used", ends[0].error or "")
    assert spent is not None
    assert int(spent[1].replace(",", "")) < 1_200, "the part of the other is not used yet"


async def test_a_tool_that_starts_a_remote_run_may_start_another_beside_it() -> None:
    @tool
    async def both(ctx: ToolContext) -> str:
        """Start one child, and another while it works."""
        first = asyncio.create_task(ctx.run_child("worker", "go"))
        await until(lambda: len(server.submissions) == 1)
        second = await ctx.run_child("worker", "go")
        return f"{(await first).status} {second.status}"

    async with Runtime([working(1)]) as far, TaskServer(far, has_events=True) as server:
        stub = RemoteSubagentStub("worker", url=server.url)
        lead = Agent("lead", ScriptedModel([call("both"), say("done")]), tools=[both])
        async with Runtime([lead, stub]) as runtime:
            await runtime.run("lead", "go", limits=Limits(steps=40))
        first, second = [one.limits for one in server.submissions]
    assert (first.steps, first.children) == (20, 63)
    assert second.steps >= 10
    assert second.children > 40
