"""What holds for every engine: whoever starts a run needs no agents, any worker does the work."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest

from retinue import (
    Agent,
    Decision,
    HarnessAgent,
    Limits,
    ParentContext,
    RunResult,
    RunStatus,
    Runtime,
    run_child_agent,
    tool,
)
from retinue.core.context import ToolContext
from retinue.core.errors import ConfigurationError, DecisionRefused, RunElsewhere, UnknownRun
from retinue.core.model import ModelRequest
from retinue.storage.sql import SqlStore
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from .. import inside
from ..story import check_order
from ..waiting import until
from .crew import Gate, asked, crew, results
from .team import Site

# --- starting and following


async def test_a_client_without_agents_starts_and_follows(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("echo", "hello")
        events = [event async for event in run]
        check_order(events)
        result = await run.result()
        assert (result.status, result.response, result.run_id) == (RunStatus.COMPLETED, "echo: hello", run.run_id)
        assert await run.text == "echo: hello"
        assert [part["type"] async for part in run.parts("messages")] != []
        assert run.ended
        assert await client.load(run.run_id) is None
        messages = await client.messages(run.thread_id)
        assert [message.text for message in messages] == ["hello", "echo: hello"]


async def test_what_is_given_reaches_the_worker(site: Site) -> None:
    seen: list[Any] = []

    @tool
    def look(ctx: ToolContext) -> str:
        """Look."""
        seen.append((ctx.context["tenant"], ctx.run.user_id))
        return "seen"

    def turn(request: ModelRequest) -> ScriptedTurn:
        return say("done") if results(request) else call("look", {})

    agent = Agent("looker", ScriptedModel(turn), tools=[look])
    async with site.worker([agent]), site.client() as client:
        result = await client.run("looker", "go", user_id="ann", context={"tenant": "t1"}, thread_id="talk")
        assert (result.status, result.thread_id) == (RunStatus.COMPLETED, "talk")
    assert seen == [("t1", "ann")]


async def test_a_client_narrows_the_limits_that_only_the_worker_knows(site: Site) -> None:
    """What the client leaves unset stays with the worker's agent."""

    @tool
    def work() -> str:
        """Work."""
        return "worked"

    def turn(request: ModelRequest) -> ScriptedTurn:
        return call("work", {})

    agent = Agent("spender", ScriptedModel(turn), tools=[work], limits=Limits(steps=3))
    async with site.worker([agent]), site.client() as client:
        for given, steps in ((None, 3), (Limits(), 3), (Limits(steps=50, children=1_000), 3), (Limits(steps=2), 2)):
            result = await client.run("spender", "go", limits=given)
            assert (result.termination, result.steps) == ("limit:steps", steps), given
        await client.schedule("spender", "go", at=datetime.now(), thread_id="planned")

        async def planned() -> RunResult | None:
            found = await client.store.list_runs(thread_id="planned")
            return found[0].result if found else None

        result = await until(planned)
        assert (result.termination, result.steps) == ("limit:steps", 3)


async def test_children_are_followed_by_their_handles(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("boss", "go")
        child = await anext(aiter(run.children))
        assert (child.name, child.ns) == ("clerk", ("tools:task_1",))
        assert (await run.result()).status is RunStatus.SUSPENDED
        assert (await child.cancel("too dear")).status is RunStatus.CANCELLED
        assert "too dear" in ((await client.result(run.run_id)).response or "")


async def test_one_worker_of_several_has_each_run(site: Site) -> None:
    async with site.worker(slots=4), site.worker(slots=4), site.client() as client:
        runs = await asyncio.gather(*[client.run("echo", f"n{number}") for number in range(40)])
        assert [run.response for run in runs] == [f"echo: n{number}" for number in range(40)]
        for run in runs:
            assert [event.kind async for event in client.events(run.run_id)].count("run_finished") == 1


async def test_the_same_id_is_the_same_run(site: Site) -> None:
    async with site.worker(), site.client() as client:
        first = await client.run("echo", "hello", run_id="run_mine", thread_id="talk")
        again = await client.run("echo", "hello", run_id="run_mine", thread_id="talk")
        assert first == again


async def test_a_runtime_of_sync_callers(site: Site) -> None:
    async with site.worker():

        def start() -> str | None:
            with site.client() as client:
                return client.run_sync("echo", "hello").response

        assert await asyncio.to_thread(start) == "echo: hello"


# --- answers


async def test_answers_reach_a_worker_that_did_not_ask(site: Site) -> None:
    async with site.client() as client:
        async with site.worker():
            run = client.stream("boss", "go")
            waiting = await run.result()
            assert (waiting.status, list(waiting.suspended)) == (RunStatus.SUSPENDED, ["pay_1"])
        answering = asyncio.create_task(client.resume(run.run_id, {"pay_1": (decision := Decision.approve())}))
        async with site.worker():
            result = await answering
            assert result.response == "boss: clerk: paid 3"
            assert await client.resume(run.run_id, {"pay_1": decision}) == result
            with pytest.raises(DecisionRefused):
                await client.resume(run.run_id, {"pay_1": Decision.approve()})
        events = [event async for event in client.events(run.run_id)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_a_wrong_answer_changes_nothing(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("clerk", "go")
        assert (await run.result()).status is RunStatus.SUSPENDED
        before = [event.seq async for event in run]
        with pytest.raises(DecisionRefused, match="pay_7"):
            await client.resume(run.run_id, {"pay_7": Decision.approve()})
        assert [event.seq async for event in run] == before
        assert (await client.resume(run.run_id, {"pay_1": Decision.reject("no")})).status is RunStatus.COMPLETED


async def test_an_answer_is_streamed(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("clerk", "go")
        await run.result()
        rest = client.stream_resume(run.run_id, {"pay_1": Decision.approve()})
        kinds = [event.kind async for event in rest]
        assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")
        assert (await rest.result()).response == "clerk: paid 3"


async def test_a_fork_is_worked_on_too(site: Site) -> None:
    async with site.worker(), site.client() as client:
        run = client.stream("clerk", "go")
        waiting = await run.result()
        assert waiting.status is RunStatus.SUSPENDED
        last = [event.seq async for event in run][-1]
        fork = await client.fork(run.run_id, at=last, decisions={"pay_1": Decision.reject("no")})
        assert (await fork.result()).status is RunStatus.COMPLETED
        assert fork.run_id != run.run_id
        again = await client.fork(run.run_id, at=last)
        assert (await again.result()).status is RunStatus.SUSPENDED
        assert (await client.resume(again.run_id, {"pay_1": Decision.approve()})).response == "clerk: paid 3"
        ended = client.stream("echo", "one")
        await ended.result()
        more = await client.fork(ended.run_id, at=[event.seq async for event in ended][-1], input="two")
        assert (await more.result()).response == "echo: two"


# --- cancels


async def test_cancel_before_any_worker_has_it(site: Site) -> None:
    async with site.client() as client:
        run = client.stream("echo", "go")
        assert (await run.cancel("not needed")).status is RunStatus.CANCELLED
        async with site.worker():
            assert (await client.run("echo", "go", thread_id=run.thread_id)).response == "echo: go"
        assert [event.kind async for event in client.events(run.run_id)].count("run_finished") == 1


async def test_an_id_is_enough_as_soon_as_it_is_known(site: Site) -> None:
    async with site.client() as client:
        run = client.stream("echo", "go", thread_id="talk")
        refused = client.stream("echo", "go", thread_id="talk")
        with pytest.raises(UnknownRun):
            await client.cancel(refused.run_id)
        assert (await client.cancel(run.run_id)).status is RunStatus.CANCELLED
        async with site.worker():
            run = client.stream("echo", "go")
            assert [event.kind async for event in client.events(run.run_id)][-1] == "run_finished"
            assert (await client.result(client.stream("echo", "again").run_id)).response == "echo: again"


async def test_a_delayed_run_that_is_cancelled_does_nothing(site: Site) -> None:
    gate = Gate()
    async with site.worker([gate.agent()]), site.client() as client:
        for _ in range(5):
            run = client.stream("held", "go", delay=3600)
            await run.stored()
            assert (await run.cancel("not needed")).status is RunStatus.CANCELLED
    assert gate.entries == 0


async def test_cancel_while_it_waits_for_an_answer(site: Site) -> None:
    async with site.client() as client:
        async with site.worker():
            run = client.stream("boss", "go")
            await run.result()
        assert (await run.cancel()).status is RunStatus.CANCELLED


async def test_cancel_while_a_worker_has_it(site: Site) -> None:
    gate = Gate()
    async with site.worker([gate.agent()]) as worker, site.client() as client:
        run = client.stream("held", "go")
        await gate.entered.wait()
        assert (await client.cancel(run.run_id)).status is RunStatus.CANCELLED
        await until(lambda: not worker.at_work)


# --- workers


async def test_a_drained_worker_hands_over(site: Site) -> None:
    """The call that is at work finishes, the next step is another worker's."""
    gate = Gate()
    async with site.client() as client:
        async with site.worker([gate.agent()]):
            run = client.stream("held", "go")
            await gate.entered.wait()
            asyncio.get_running_loop().call_soon(gate.go.set)
        async with site.worker([gate.agent()]):
            assert (await run.result()).response == "let go"
        assert gate.entries == 1
        finished = [event async for event in client.events(run.run_id) if event.kind == "tool_call_finished"]
        assert [event.status for event in finished] == ["succeeded"]


async def test_what_does_not_finish_in_time_is_handed_over(site: Site) -> None:
    gate = Gate()
    async with site.client() as client:
        async with site.worker([gate.agent()], grace=0.0):
            run = client.stream("held", "go")
            await gate.entered.wait()
        gate.go.set()
        async with site.worker([gate.agent()]):
            result = await run.result()
        assert result.status is RunStatus.COMPLETED  # the model reads that the outcome of its call is unknown
        assert gate.entries == 1


async def test_a_worker_without_the_agent_leaves_the_run(site: Site) -> None:
    async with site.client() as client, site.worker([Agent("other", ScriptedModel([]))]):
        run = client.stream("echo", "go")
        await run.stored()
        async with site.worker():
            assert (await run.result()).response == "echo: go"


async def test_workers_serve_their_queues_only(site: Site) -> None:
    async with site.client() as client, site.worker(queues=["slow"]) as slow, site.worker() as other:
        assert (await client.run("echo", "1", queue="slow")).response == "echo: 1"
        assert (await client.run("echo", "2")).response == "echo: 2"
        assert slow.info.queues == ("slow",)
        assert other.info.queues == ("default",)


async def test_a_run_of_a_queue_that_nobody_serves_is_reported(site: Site) -> None:
    async with site.client() as client, site.worker():
        inside.report_unserved_after(client, 0.05)
        for options, agent, reason in (
            ({"queue": "gpu"}, "echo", "no worker serves queue 'gpu' .served: default."),
            ({}, "nobody", "no worker of queue 'default' has agent 'nobody'"),
        ):
            run = client.stream(agent, "go", **options)  # type: ignore[arg-type]
            event = await anext(aiter(run))
            assert (event.kind, event.seq, event.run_id) == ("error", 0, run.run_id)
            assert (event.code, event.fatal) == ("queue_unserved", False)  # type: ignore[union-attr]
            with pytest.raises(AssertionError, match=reason):
                raise AssertionError(event.message)  # type: ignore[union-attr]
            assert (await run.cancel()).status is RunStatus.CANCELLED
            assert 0 not in [event.seq async for event in client.events(run.run_id)]


async def test_nodes_without_an_engine_leave_its_runs(site: Site) -> None:
    async with site.client() as client, Runtime.open(site.url, crew()) as node:
        run = client.stream("echo", "go")
        await run.stored()
        assert await node.recover() == []
        with pytest.raises(RunElsewhere):
            await node.load(run.run_id)
        async with site.worker():
            assert (await node.result(run.run_id)).response == "echo: go"


async def test_a_lost_owner_is_replaced(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is frozen past its lease is fenced: another continues, and the first writes nothing more."""
    gate = Gate()

    async with site.client() as client, site.worker([gate.agent()], lease=1.0) as frozen:
        inside.stop_heartbeats(monkeypatch)
        run = client.stream("held", "go")
        await gate.entered.wait()
        async with site.worker([gate.agent()]):
            assert (await run.result()).status is RunStatus.COMPLETED
        gate.go.set()
        await until(lambda: not frozen.at_work)
        events = [event async for event in client.events(run.run_id)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [event.kind for event in events].count("run_finished") == 1


async def test_a_tree_works_in_one_process(site: Site) -> None:
    """Children stay with their parent, and limits on them are exact."""
    children = 60

    def turn(request: ModelRequest) -> ScriptedTurn:
        said = results(request)
        if said:
            return say(f"{len(said)} answers")
        return [call("task", {"subagent_type": "leaf", "description": f"{n}"}, id=f"t{n}") for n in range(children)]

    leaf = Agent("leaf", ScriptedModel(lambda request: say(f"leaf {asked(request)}")))
    root = Agent("root", ScriptedModel(turn), subagents=[leaf])
    async with site.worker([root]), site.client() as client:
        run = client.stream("root", "go")
        assert (await run.result()).response == f"{children} answers"
        kinds = Counter([event.kind async for event in run])
        assert (kinds["child_started"], kinds["child_finished"]) == (children, children)


async def test_a_task_outlives_the_run_that_started_it(site: Site, tmp_path: Any) -> None:
    gate = Gate()

    def turn(request: ModelRequest) -> ScriptedTurn:
        if results(request):
            return say("started")
        return call("agent_spawn", {"agent_id": "held", "task": "go", "timeout_seconds": 0})

    def harness() -> HarnessAgent:
        return HarnessAgent("root", ScriptedModel(turn), workspace=tmp_path, subagents=[gate.agent()])

    async with site.client() as client:
        async with site.worker([harness()], grace=0.0):
            run = client.stream("root", "go")
            assert (await run.result()).response == "started"
            await gate.entered.wait()
        gate.go.set()
        async with site.worker([harness()]):
            ended = [event async for event in client.events(run.run_id) if event.kind == "task_updated"]
        assert ended[-1].status == "COMPLETED"


async def test_a_task_of_a_run_without_lineage_leaves_no_record_without_a_log(site: Site, tmp_path: Any) -> None:
    @tool
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        return (await run_child_agent(ctx.resolver, "alone", "x", parent=ParentContext())).response or ""

    def spawn(request: ModelRequest) -> ScriptedTurn:
        spawned = call("agent_spawn", {"agent_id": "echo", "task": "go", "timeout_seconds": 0})
        return say("started") if results(request) else spawned

    def turn(request: ModelRequest) -> ScriptedTurn:
        said = results(request)
        return say(said[-1]) if said else call("delegate", {})

    echo = Agent("echo", ScriptedModel(lambda request: say("hi")))
    agents = [
        Agent("root", ScriptedModel(turn), tools=[delegate]),
        HarnessAgent("alone", ScriptedModel(spawn), workspace=tmp_path, subagents=[echo]),
    ]
    async with site.worker(agents), site.client() as client:
        assert (await client.run("root", "go")).response == "started"
        await until(lambda: any('"COMPLETED"' in path.read_text() for path in tmp_path.rglob("tasks/*.json")))
        assert isinstance(client.store, SqlStore)
        found = "SELECT run_id FROM runs WHERE NOT EXISTS (SELECT 1 FROM logs WHERE logs.log_id = runs.log_id)"
        assert list(await client.store.database.rows(found)) == []


# --- mistakes


async def test_mistakes_raise_where_they_are_made(site: Site) -> None:
    async with site.client() as client:
        with pytest.raises(ConfigurationError, match="context 'x' cannot be stored"):
            client.stream("echo", "go", context={"x": object()})
        with pytest.raises(ConfigurationError, match="model was given as an object"):
            client.stream("echo", "go", model=ScriptedModel([]))
        with pytest.raises(ConfigurationError, match="give them to the Runtime of the workers"):
            client.stream("echo", "go", sinks=[lambda event: None])
        with pytest.raises(ConfigurationError, match="a queue is named with letters"):
            client.stream("echo", "go", queue="a b")
        with pytest.raises(ConfigurationError, match="exactly one of at="):
            await client.schedule("echo", "go")
        with pytest.raises(ConfigurationError, match="cron 'every day'"):
            await client.schedule("echo", "go", cron="every day")


def test_an_engine_needs_a_shared_store() -> None:
    for made in (lambda: Runtime(engine="postgres"), lambda: Runtime.open("sqlite:///x.db", engine="postgres")):
        with pytest.raises(ConfigurationError, match="needs a PostgreSQL database"):
            made()


@pytest.mark.parametrize("engine", ["redis", "", 5])
def test_an_unknown_engine(site: Site, engine: Any) -> None:
    for url in (site.url, "sqlite:///x.db"):
        with pytest.raises(ConfigurationError, match=f"there is no engine {engine!r}: write 'postgres' or"):
            Runtime.open(url, engine=engine)


async def test_options_of_engines_need_one() -> None:
    async with Runtime(crew()) as runtime:
        with pytest.raises(ConfigurationError, match="for runs on an engine"):
            runtime.stream("echo", "go", queue="gpu")
        with pytest.raises(ConfigurationError, match="needs an engine"):
            await runtime.schedule("echo", "go", cron="0 3 * * *")


async def test_a_run_that_no_worker_can_begin_fails_with_the_reason(site: Site) -> None:
    async with site.worker(), site.client() as client:
        result = await client.run("echo", "go", model="nope:x")
        assert result.status is RunStatus.FAILED
        assert "nope" in (result.error or "")
        assert (await client.run("echo", "go", thread_id=result.thread_id)).response == "echo: go"
    async with site.client() as client:
        run = client.stream("echo", "go", model="nope:x")
        assert (await run.cancel()).status is RunStatus.CANCELLED


async def test_numbers_that_are_none(site: Site) -> None:
    async with site.client() as client:
        for options in ({"priority": "high"}, {"priority": 2**70}):
            with pytest.raises(ConfigurationError, match="priority is a whole number"):
                client.stream("echo", "go", **options)  # type: ignore[arg-type]
        for delay in ("x", None, float("inf"), float("nan"), -1, timedelta(1)):
            with pytest.raises(ConfigurationError, match="delay is a number of seconds"):
                client.stream("echo", "go", delay=delay)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="not a time that can be waited for"):
            await client.schedule("echo", "go", at=datetime.min)
        with pytest.raises(ConfigurationError, match="write minute hour day month weekday"):
            await client.schedule("echo", "go", cron="* * * * * *")


async def test_an_id_is_enough_to_ask_again(site: Site) -> None:
    async with site.worker(), site.client() as client:
        assert await client.run("echo", "go", run_id="run_mine") == await client.run("echo", "go", run_id="run_mine")
