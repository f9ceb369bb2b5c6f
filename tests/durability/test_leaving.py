"""A runtime that leaves what runs to the next: a deployment is no reason to begin anew."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, Decision, HarnessAgent, ModelRequest, Run, RunStatus, Runtime, tool
from retinue.core.events import TaskUpdated
from retinue.errors import RuntimeClosed, StoreError
from retinue.log.fold import fold_all
from retinue.log.owned import LiveLog
from retinue.models import ModelChunk, TextChunk
from retinue.runtime.live import LiveRun
from retinue.tasks import TaskScope, TaskStatus, service
from retinue.tasks.task import give_up
from retinue.testing import ScriptedModel, ScriptedTurn, call, say

from .. import inside
from ..waiting import let_others_run, until
from . import family
from .scene import Play, Spot, is_free, same, seen, turn_of, undisturbed
from .test_asking import Desk, agents, start
from .test_release_races import Gate


async def leave(spot: Spot, play: Play, when: str) -> None:
    """Play a scene in a runtime that is closed when something was done. Nobody can wait for its lease to end."""
    scene = play(spot)
    async with Runtime.open(spot.url, scene.agents, lease=3600) as runtime:
        run = runtime.stream(scene.agents[0].name, scene.says, thread_id="thread-1", **scene.options)
        (spot.folder / "run_id").write_text(run.run_id)
        await until(lambda: when in spot.done())


@pytest.mark.parametrize(
    ("play", "when"),
    [
        (family.one_task, "look A2"),
        (family.one_task, "helper:3"),
        (family.tasks, "look B2"),
        (family.spawned, "look A2"),
        (family.several, "look B1"),
        (family.streamed, "helper:2"),
    ],
)
async def test_nobody_can_tell_that_it_was_left(
    spot: Spot, other: Spot, play: Play, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    await leave(spot, play, when)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.WARNING] == []
    async with Runtime.open(spot.url, play(spot).agents) as runtime:
        played = await seen(spot, runtime)
    plain = await undisturbed(other, play)
    same(plain, played, ordered=play in (family.one_task, family.streamed))
    assert set(played.done) == set(plain.done)


async def test_tasks_are_left_too(spot: Spot) -> None:
    await leave(spot, family.background, "look A1")
    async with Runtime.open(spot.url, family.background(spot).agents) as runtime:
        played = await asyncio.wait_for(seen(spot, runtime), 90)
    assert [event.status for event in played.all("task_updated")][-1] == TaskStatus.COMPLETED
    assert {what: count for what, count in played.done.items() if what.startswith("look")} == {
        "look A1": 1,
        "look A2": 1,
    }


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("input", ["wait", "wait ann"])
async def test_a_task_that_ends_while_it_is_left_ends_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, input: str
) -> None:
    """Nobody has written its end, so its log must not end either."""
    desk, hand_over = Desk(tmp_path, f"sqlite:///{tmp_path}/app.db"), LiveRun.hand_over

    async def let_pass(*_: str) -> None:
        pass

    async def let_the_task_end(run: LiveRun) -> None:
        """By now it is left, and its log is not handed over yet. Its last model call has just begun."""
        monkeypatch.setattr(LiveLog, "hold", let_pass)
        if jobs := [job for job in asyncio.all_tasks() if job.get_name().startswith("task_")]:
            desk.let_tasks_end()
            await asyncio.wait(jobs)
            await let_others_run()
        await hand_over(run)

    async with desk.open() as first:
        run_id = (await first.run("boss", input, thread_id="t")).run_id
        await until((tmp_path / "waits").exists)  # a task that has not come so far begins nothing once it is left
        monkeypatch.setattr(LiveRun, "hand_over", let_the_task_end)
    async with desk.open() as second:
        if "ann" in input:
            assert (await second.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED
        assert await desk.task_ended(second, run_id) == TaskStatus.COMPLETED
        store: Any = second.store
        await until(lambda: is_free(store, run_id))
        assert (await store.read_log(run_id)).ended
    repository: Any = agents(tmp_path)[0].task_repository  # type: ignore[attr-defined]
    (record,) = await repository.list(TaskScope("boss", "t", None))
    assert (record.status, record.result) == (TaskStatus.COMPLETED, "end: there it is")


@pytest.mark.usefixtures("no_grace")
async def test_a_task_that_is_given_up_on_while_it_is_taken_over_ends_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweeper may end its record after the next owner has read it as open."""
    desk = Desk(tmp_path, f"sqlite:///{tmp_path}/app.db")
    async with desk.open() as first:
        run_id = (await first.run("boss", "wait", thread_id="t")).run_id
    monkeypatch.setattr(service, "take_over", lambda record, now, node: give_up(record, now, "it is silent"))
    async with desk.open() as second:
        assert await asyncio.wait_for(desk.task_ended(second, run_id), 90) == TaskStatus.FAILED
        store: Any = second.store
        await until(lambda: is_free(store, run_id))
        stored = await store.read_log(run_id)
    assert stored.ended
    assert all(run.is_over for run in fold_all(stored.rows).runs.values())


@pytest.mark.usefixtures("no_grace")
async def test_a_run_that_ends_while_it_is_left_keeps_its_task(tmp_path: Path) -> None:
    """Its end may be stored with what hands the log over: the log must be found all the same."""
    said, may_end, may_work = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow:
        """A model that starts a task, and then does not come to its end for long."""

        name = "slow"

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
            if turn_of(request) == 1:
                spawn = {"agent_id": "helper", "task": "wait", "timeout_seconds": 0}
                async for chunk in ScriptedModel([call("agent_spawn", spawn, id="c1")]).stream(request):
                    yield chunk
            else:
                yield TextChunk("It ")
                said.set()
                await may_end.wait()
                yield TextChunk("ends.")

    @tool(idempotent=True)
    async def wait() -> str:
        """Wait."""
        await may_work.wait()
        return "there it is"

    def bosses() -> list[Agent]:
        helper = Agent("helper", ScriptedModel([call("wait", {}), say("done")]), tools=[wait])
        (tmp_path / "ws").mkdir(exist_ok=True)
        return [HarnessAgent("boss", Slow(), subagents=[helper], workspace=tmp_path / "ws", general_purpose=False)]

    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, bosses()) as first:
        gate = Gate(first.store, lambda batch: said.is_set())
        run = first.stream("boss", "go")
        await gate.reached.wait()  # rows are being stored, so the next write waits
        closed = asyncio.create_task(first.close())
        await let_others_run()
        may_end.set()
        await let_others_run()
        gate.open.set()
        await closed
    may_work.set()
    async with Runtime.open(url, bosses()) as second:
        assert (await second.result(run.run_id)).status is RunStatus.COMPLETED
        events = [event async for event in second.events(run.run_id)]
    updates = [event.status for event in events if isinstance(event, TaskUpdated)]
    assert updates[-1] == TaskStatus.COMPLETED


@pytest.mark.usefixtures("no_grace")
async def test_a_log_whose_task_has_no_stored_end_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a task that is stopped at the close of its runtime may not be written then."""
    desk = Desk(tmp_path, f"sqlite:///{tmp_path}/app.db")
    async with desk.open(on_close="cancel") as first:
        run_id = (await first.run("boss", "wait", thread_id="t")).run_id
        inside.fail_to_end_tasks(monkeypatch, OSError("the disk is full"))
    monkeypatch.undo()
    desk.let_tasks_end()
    async with desk.open(recover=False) as looking:
        reader: Any = looking.store
        assert not (await reader.read_log(run_id)).ended
    async with desk.open() as second:
        store: Any = second.store
        assert TaskStatus(await asyncio.wait_for(desk.task_ended(second, run_id), 90)).is_terminal
        await until(lambda: is_free(store, run_id))
        assert (await store.read_log(run_id)).ended


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_what_waits_is_left_with_its_tasks(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path}/app.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    desk = Desk(tmp_path, url)
    async with desk.open() as first:
        run_id = (await start(first, "wait ann")).run_id
    desk.let_tasks_end()
    async with desk.open() as second:
        assert (await second.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED
        assert await desk.task_ended(second, run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid ann"]


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("input", ["wait", "wait ann", "ask ann"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_what_was_taken_over_is_handed_over_with_its_tasks(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, input: str
) -> None:
    """A run that another process started is not cancelled by the end of the one that continued it, nor are its tasks."""
    url = f"sqlite:///{tmp_path}/app.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    desk = Desk(tmp_path, url)
    async with desk.open() as first:
        run_id = (await first.run("boss", input, thread_id="t")).run_id
        own = (await first.run("boss", "wait", thread_id="own")).run_id
    for _ in range(2):
        async with desk.open(on_close="cancel") as second:
            await until(lambda: second.store.owner_of(run_id))  # type: ignore[attr-defined]  # its task is taken up
            mine = (await second.run("boss", "wait")).run_id
        async with desk.open(recover=False) as looking:
            assert await desk.task_ended(looking, mine) == TaskStatus.CANCELLED
    async with desk.open() as third:
        if "ann" in input:
            assert (await third.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED
        if "ask" in input:
            child = await desk.child_of(third, run_id)
            await third.store.load_run(child)
            answer = asyncio.create_task(third.resume(child, {"w1": Decision.resume("yes")}))
            desk.let_tasks_end()
            assert (await answer).response == "end: there it is"
        desk.let_tasks_end()
        for one in (run_id, own):
            assert await desk.task_ended(third, one) == TaskStatus.COMPLETED
    async with desk.open() as last:
        assert await last.store.open_logs() == []  # type: ignore[attr-defined]


async def held_run(runtime: Runtime, gate: Gated) -> Run:
    """Start a run that calls a tool twice, and return when the first call is at work."""
    run = runtime.stream("boss", "go")
    await gate.begun.wait()
    return run


class Gated:
    """An agent whose tool waits, and what its model and its tool have done."""

    def __init__(self) -> None:
        self.begun, self.go, self.done = asyncio.Event(), asyncio.Event(), list[str]()

    def agent(self, name: str = "boss") -> Agent:
        @tool
        async def stay(n: int) -> str:
            """Wait."""
            self.done.append(f"tool {n}")
            self.begun.set()
            await self.go.wait()
            return f"stayed {n}"

        def turn(request: ModelRequest) -> ScriptedTurn:
            made = turn_of(request)
            self.done.append(f"model {made}")
            return call("stay", {"n": made}, id=f"c{made}") if made < 3 else say("done")

        return Agent(name, ScriptedModel(turn), tools=[stay])


async def test_a_runtime_with_a_store_leaves_what_runs(spot: Spot) -> None:
    gate = Gated()
    async with Runtime.open(spot.url, [gate.agent()], lease=3600) as first:
        run = await held_run(first, gate)
        waiting = [asyncio.create_task(run.result()), asyncio.create_task(first.result(run.run_id))]
        closed = asyncio.create_task(first.close(3600))
        await let_others_run()
        gate.go.set()
        await closed
    assert gate.done == ["model 1", "tool 1"], "nothing begins while it stops"
    for asked in (*waiting, run.result(), first.result(run.run_id)):
        with pytest.raises(RuntimeClosed, match="the next runtime that opens its store continues the run") as found:
            await asked
        assert pickle.loads(pickle.dumps(found.value)).run_id == run.run_id
    async with Runtime.open(spot.url, [gate.agent()], lease=3600) as second:
        assert (await second.result(run.run_id)).response == "done"
        events = [event async for event in second.events(run.run_id)]
    assert gate.done == ["model 1", "tool 1", "model 2", "tool 2", "model 3"], "each once"
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert [event for event in events if event.kind == "error"] == []


async def test_a_model_call_that_runs_is_paid_once(spot: Spot) -> None:
    """Its answer is stored, and the call that it asks for does not begin."""
    said, go, asked = asyncio.Event(), asyncio.Event(), list[int]()

    class Slow:
        name = "slow"

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
            asked.append(turn_of(request))
            said.set()
            await go.wait()
            turn = call("look", {}) if turn_of(request) == 1 else say("done")
            async for chunk in ScriptedModel([turn]).stream(request):
                yield chunk

    looked = list[int]()

    @tool
    async def look() -> str:
        """Look."""
        looked.append(1)
        return "seen"

    agents = [Agent("boss", Slow(), tools=[look])]
    async with Runtime.open(spot.url, agents, lease=3600) as first:
        run = first.stream("boss", "go")
        await said.wait()
        closed = asyncio.create_task(first.close(3600))
        await let_others_run()
        go.set()
        await closed
    assert (asked, looked) == ([1], [])
    async with Runtime.open(spot.url, agents, lease=3600) as second:
        assert (await second.result(run.run_id)).response == "done"
    assert (asked, looked) == ([1, 2], [1])


async def test_a_run_that_answers_while_it_is_left_ends_here(spot: Spot) -> None:
    said, go = asyncio.Event(), asyncio.Event()

    class Slow:
        name = "slow"

        async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
            said.set()
            await go.wait()
            yield TextChunk("done")

    async with Runtime.open(spot.url, [Agent("boss", Slow())], lease=3600) as runtime:
        run = runtime.stream("boss", "go")
        await said.wait()
        closed = asyncio.create_task(runtime.close(3600))
        await let_others_run()
        go.set()
        await closed
    assert (await run.result()).response == "done"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("input", ["run", "task"])
async def test_another_runtime_continues_what_was_left(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, input: str
) -> None:
    """It does not wait for its next look, which is after half a lease."""
    url = f"sqlite:///{tmp_path}/app.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    gate, desk = Gated(), Desk(tmp_path, url)
    known = [gate.agent()] if input == "run" else []
    async with Runtime.open(url, known or agents(tmp_path), lease=3600) as second:
        first = Runtime.open(url, known or agents(tmp_path), lease=3600)
        async with first:
            if input == "run":
                run_id = (await held_run(first, gate)).run_id
            else:
                run_id = (await first.run("boss", "wait", thread_id="t")).run_id
            closed = asyncio.create_task(first.close(0 if input == "task" else 3600))
            await let_others_run()
            gate.go.set()
            await closed
        if input == "run":
            assert (await second.result(run_id)).response == "done"
        else:
            desk.let_tasks_end()
            assert await desk.task_ended(second, run_id) == TaskStatus.COMPLETED


async def test_delegated_work_is_left_with_its_run(spot: Spot) -> None:
    """A call that waits for a child runs nothing itself: the child counts."""
    gate = Gated()
    boss = Agent("lead", ScriptedModel(lead_turn), subagents=[gate.agent()])
    async with Runtime.open(spot.url, [boss], lease=3600) as first:
        run = first.stream("lead", "go")
        await gate.begun.wait()
        closed = asyncio.create_task(first.close(3600))
        await let_others_run()
        assert not closed.done(), "the tool of the child runs"
        gate.go.set()
        await closed
    async with Runtime.open(spot.url, [boss], lease=3600) as second:
        assert (await second.result(run.run_id)).response == "all done"
    assert gate.done == ["model 1", "tool 1", "model 2", "tool 2", "model 3"]


class Held:
    """Holds a coroutine function of an object back when it has done its work."""

    def __init__(self, owner: Any, name: str) -> None:
        self.reached, self.open, self._work = asyncio.Event(), asyncio.Event(), getattr(owner, name)
        setattr(owner, name, self._later)

    async def _later(self, *args: Any, **options: Any) -> Any:
        found = await self._work(*args, **options)
        self.reached.set()
        await self.open.wait()
        return found


async def test_a_run_that_is_taken_over_while_its_process_stops_is_left_too(spot: Spot) -> None:
    gate = Gated()
    async with Runtime.open(spot.url, [gate.agent()]) as first:
        run = await held_run(first, gate)
        closed = asyncio.create_task(first.close(3600))
        await let_others_run()
        gate.go.set()
        await closed
    own = Gated()
    second = Runtime.open(spot.url, [gate.agent(), own.agent("own")], lease=3600, recover=False)
    async with second:
        second.stream("own", "go")
        await own.begun.wait()  # so the close takes its time
        held = Held(inside.registry_of(second), "follow_rests")
        taking = asyncio.create_task(second.load(run.run_id))
        await held.reached.wait()  # the run is claimed, and its log is read
        closed = asyncio.create_task(second.close(3600))
        await let_others_run()
        held.open.set()
        await taking
        own.go.set()
        await closed
    assert gate.done == ["model 1", "tool 1"], "nothing begins while it stops"
    async with Runtime.open(spot.url, [gate.agent()], lease=3600) as third:
        assert (await third.result(run.run_id)).response == "done"
    assert gate.done == ["model 1", "tool 1", "model 2", "tool 2", "model 3"], "each once"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_claim_in_progress_keeps_no_lease_when_its_process_stops(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    url = f"sqlite:///{tmp_path}/app.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    gate = Gated()
    async with Runtime.open(url, [gate.agent()]) as first:
        run = await held_run(first, gate)
    async with Runtime.open(url, [gate.agent()], lease=3600, recover=False) as second:
        held = Held(second.store, "claim")
        taking = asyncio.create_task(second.load(run.run_id))
        await held.reached.wait()
        await second.close()
        held.open.set()
        with pytest.raises(StoreError, match="it was closed"):
            await taking
    async with Runtime.open(url, recover=False) as looking:
        store: Any = looking.store
        assert [log.expired for log in await store.open_logs(run.run_id)] == [True], "others need not wait"


def lead_turn(request: ModelRequest) -> ScriptedTurn:
    if turn_of(request) == 1:
        return call("task", {"subagent_type": "boss", "description": "go"}, id="t1")
    return say("all done")


class Stop(Exception):
    """The program of a user has failed."""


@pytest.mark.parametrize("stop", [Stop, asyncio.CancelledError, KeyboardInterrupt])
async def test_a_program_that_fails_cancels_what_runs(spot: Spot, stop: type[BaseException]) -> None:
    gate, runs = Gated(), list[Run]()

    async def work() -> None:
        async with Runtime.open(spot.url, [gate.agent()]) as runtime:
            runs.append(await held_run(runtime, gate))
            raise stop

    with pytest.raises(stop):
        await work()
    (run,) = runs
    assert (await run.result()).status is RunStatus.CANCELLED
    async with Runtime.open(spot.url, [gate.agent()]) as runtime:
        assert (await runtime.result(run.run_id)).status is RunStatus.CANCELLED


@pytest.mark.parametrize("options", [{"on_close": "cancel"}, {}])
async def test_what_cannot_be_left_is_cancelled(spot: Spot, options: dict[str, Any]) -> None:
    gate = Gated()
    async with Runtime.open(spot.url if options else "memory:", [gate.agent()], **options) as runtime:
        run = await held_run(runtime, gate)
    result = await run.result()
    assert (result.status, result.error) == (RunStatus.CANCELLED, "the runtime was closed")


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("fails", [False, True])
def test_a_runtime_without_await_follows_the_same_rule(tmp_path: Path, fails: bool) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    desk = Desk(tmp_path, url)
    with pytest.raises(Stop) if fails else nullcontext(), Runtime.open(url, agents(tmp_path)) as first:
        run_id = first.run_sync("boss", "wait", thread_id="t").run_id
        if fails:
            raise Stop

    async def ended() -> str:
        async with desk.open() as second:
            desk.let_tasks_end()
            return await desk.task_ended(second, run_id)

    assert asyncio.run(ended()) == (TaskStatus.CANCELLED if fails else TaskStatus.COMPLETED)


def test_misuse(tmp_path: Path) -> None:
    odd: Any = "abandon"
    with pytest.raises(ConfigurationError, match="on_close is 'cancel' or 'leave', not 'abandon'"):
        Runtime.open(f"sqlite:///{tmp_path}/app.db", on_close=odd)
    with pytest.raises(ConfigurationError, match="needs a store"):
        Runtime(on_close="leave")
