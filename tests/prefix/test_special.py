"""Prefixes of runs that need more than a store: cancels, clocks, remote children, promoted work, threads with a past."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from retinue import Agent, BackendProfile, Decision, Limits, Message, PersistedState, RunResult, RunStatus, Runtime
from retinue.core.backend import RunRequest
from retinue.core.events import Custom, RunFinished, StateDelta, ToolCallReady
from retinue.core.results import ToolCallStatus
from retinue.core.stores import Wish
from retinue.log.fold import fold_all
from retinue.log.owned import LiveLog
from retinue.loop.tickets import encode_decisions
from retinue.stores import ThreadRecord

from .. import inside
from ..effort import IS_LONG
from ..folding import checked_folds
from .ends import UNKNOWN, check_log, cut_of, same_end, texts
from .program import Call, World
from .scenes import CANCELS, SCENES, Scene, below, boss, look, work
from .tape import End, Tape, a_store, answer_all, build, continued, undisturbed


def some(cuts: list[int]) -> list[int]:
    """Every prefix in a long test, else every second."""
    return cuts if IS_LONG else cuts[::2]


# --- cancels


def asked_for(tape: Tape) -> int:
    """After how many rows the cancel was asked for: the tool that does so had started."""
    return next(
        number
        for number, row in enumerate(tape.rows, 1)
        if isinstance(row.event, ToolCallReady) and row.event.tool_name == "halt"
    )


def check_cancelled(whole: End, other: End, tape: Tape, cut: int) -> None:
    check_log(other)
    assert (other.result.status, other.result.termination) == (RunStatus.CANCELLED, "cancelled")
    assert all(run.status is not RunStatus.COMPLETED or run is not other.tree for run in other.tree.runs.values())
    for what in cut_of(tape, cut, other.world).ended:
        assert not other.world.ran[what], f"{what} was done again"


@pytest.mark.parametrize("name", CANCELS)
async def test_every_prefix_of_a_cancelled_run(name: str) -> None:
    """Before the cancel was asked for the run asks again; after that the wish in the inbox is carried out."""
    scene = CANCELS[name]
    whole = await undisturbed(scene.plan)
    assert whole.result.status is RunStatus.CANCELLED
    asked = asked_for(whole.tape)
    for cut in whole.tape.cuts():
        wishes = whole.wishes if cut >= asked else None
        other = await continued(whole.tape, cut, scene.plan, wishes=wishes)
        check_cancelled(whole, other, whole.tape, cut)


@pytest.mark.parametrize("name", CANCELS)
async def test_a_cancel_that_was_not_stored_is_not_carried_out(name: str) -> None:
    """Nobody was told that it counts. What had been closed stays closed, and the run comes to some end."""
    scene = CANCELS[name]
    whole = await undisturbed(scene.plan)
    for cut in whole.tape.cuts()[asked_for(whole.tape) :]:
        other = await continued(whole.tape, cut, scene.plan)
        check_log(other)
        assert other.result.status in (RunStatus.CANCELLED, RunStatus.COMPLETED)


# --- decisions in the inbox


async def test_the_next_owner_makes_facts_of_decisions_that_nobody_heard() -> None:
    """The first answer to a ticket counts, another is refused, and the same one again is answered as before."""
    scene = Scene(boss((work("a1", waits=1), look("a2", waits=1))))
    whole = await undisturbed(scene.plan)
    run_id = whole.result.run_id
    waits = next(n for n, row in enumerate(whole.tape.rows, 1) if isinstance(row.event, RunFinished))
    yes = Decision.resume({"key": "a1", "n": 1}, id="yes")
    late = Decision.resume({"key": "a1", "n": 1}, id="late")
    said = {"w1": {"c-a1": yes}, "w2": {"c-a1": late}, "w3": {"t-a1-0": yes}, "w4": {"c-a9": late}}
    wishes = [
        Wish(log_id=run_id, wish_id=name, run_id=run_id, kind="decide", body=encode_decisions(decisions))
        for name, decisions in said.items()
    ]
    async with a_store() as store:
        await build(store, whole.tape, waits, wishes, bare=True)
        world = World(scene.plan)
        async with Runtime(world.agents(), store=store) as runtime:
            with store.watch(run_id) as watch:
                while not all([await store.reply_to(run_id, name) for name in said]):
                    await watch.wait(1)
            result = await answer_all(runtime, run_id, world)
            replies = [(await store.reply_to(run_id, name) or b"").decode() for name in said]
            rows = (await store.read_log(run_id)).rows
    assert (result.status, world.ran) == (RunStatus.COMPLETED, {"a1#1": 1, "a2#1": 1})
    decided = [row.event.decision.id for row in rows if row.event is not None and row.event.kind == "tool_call_resumed"]
    assert decided[0] == "yes"
    assert "late" not in decided
    assert ["refused" in reply for reply in replies] == [False, True, False, True]


# --- time


class Clock:
    """Stands still unless a tool takes its time."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def slow(self, world: World) -> None:
        """Let every tool take ten seconds."""

        async def on_run(key: str) -> None:
            self.now += 10

        world.on_run = on_run


@pytest.mark.parametrize(
    "scene",
    [
        Scene(boss(*[(look(f"a{number}"),) for number in range(5)]), Limits(seconds=25)),
        Scene(
            boss(
                (Call(key="do B", does="task", children=(below("B", (look("b1"),), (look("b2"),)),)),),
                (look("a1"),),
                (look("a2"),),
            ),
            Limits(seconds=25),
        ),
        Scene(boss((look("a1", waits=1),), (look("a2"),), (look("a3"),)), Limits(seconds=25)),
    ],
)
async def test_time_in_which_nobody_worked_does_not_count(scene: Scene) -> None:
    clock = Clock(1_000)
    whole = await undisturbed(scene.plan, scene.limits, prepare=clock.slow, clock=clock)
    assert (whole.result.error or "").startswith("the limit on seconds is reached")
    for cut in some(whole.tape.cuts()):
        last = whole.tape.rows[cut - 1].event if cut else None
        if isinstance(last, StateDelta):
            continue  # the tool worked for ten seconds that count, and works for ten more
        late = Clock(50_000)
        other = await continued(whole.tape, cut, scene.plan, prepare=late.slow, clock=late)
        check_log(other)
        same_end(whole, other, cut_of(whole.tape, cut, other.world))


# --- a thread with a past


async def test_every_prefix_of_a_run_on_a_thread_with_a_past() -> None:
    said = (Message.user("hello", id="m1"), Message.assistant("hello yourself", id="m2"))
    history = ThreadRecord(
        thread_id="thread-1", messages=said, state=PersistedState(extensions={"p.thread": ["old"], "who.knows": 1})
    )
    plan = boss((work("a1"), look("a2")), (work("a3", waits=1),))
    whole = await undisturbed(plan, history=history)
    assert whole.result.state.extensions["p.thread"] == ["a1", "a2", "a3", "old"]
    for cut in some(whole.tape.cuts()):
        other = await continued(whole.tape, cut, plan)
        check_log(other)
        left = cut_of(whole.tape, cut, other.world)
        same_end(whole, other, left)
        (run,) = other.tree.runs.values()
        assert texts(run, left.unknown)[:2] == [("user", "", "hello"), ("assistant", "", "hello yourself")]
        assert (run.own_from, run.foreign) == (2, {"who.knows": 1})


# --- work that is promoted to the background


async def test_prefixes_of_a_run_that_promotes_a_child() -> None:
    """A child that takes longer than its caller waits becomes a task; from then on it lives by itself."""
    spawn = Call(key="do B", does="promoted", children=(below("B", (look("b1"),), (work("b2"),)),))
    plan = boss((spawn,), (Call(key="out", does="output", of="do B"),))

    def prepare(world: World) -> None:
        async def on_run(key: str) -> None:
            while key == "b1" and not world.repository.records:  # until it is a task  # noqa: ASYNC110
                await asyncio.sleep(0.005)

        world.on_run = on_run

    whole = await undisturbed(plan, prepare=prepare)
    assert "B is done" in whole.result.messages[-2].text
    detached = next(n for n, row in enumerate(whole.tape.rows, 1) if row.private is not None and row.private.detached)
    places = [cut for cut in whole.tape.cuts() if cut >= detached - 1]
    assert len(places) > 15
    for cut in places[:2] + places[2::3]:
        for late in (False, True):
            other = await continued(whole.tape, cut, plan, late=late, prepare=prepare)
            check_log(other)
            assert (other.result.status, other.result.response) == (RunStatus.COMPLETED, "all done")
            known = cut_of(whole.tape, cut, other.world)
            assert {run.status for run in other.tree.runs.values()} == {RunStatus.COMPLETED}
            for what in known.ended:
                assert not other.world.ran[what]


# --- background children that wait


async def test_the_next_owner_stores_that_a_background_child_waits() -> None:
    """Whoever is to answer it finds it by its record, which may not have been stored with its last row."""
    plan = SCENES["background that waits"].plan
    whole = await undisturbed(plan)
    waits = [
        number
        for number, row in enumerate(whole.tape.rows, 1)
        if isinstance(row.event, RunFinished) and row.event.status is RunStatus.SUSPENDED
    ]
    assert len(waits) > 1, "it waits more than once"
    for cut in waits:
        other = await continued(whole.tape, cut, plan, bare=True)
        check_log(other)
        same_end(whole, other, cut_of(whole.tape, cut, other.world))


# --- remote children


class Elsewhere:
    """A server that runs tasks by their ids, and outlives the processes that submit them."""

    def __init__(self) -> None:
        self.submitted: Counter[str] = Counter()

    def profile(self) -> BackendProfile:
        return BackendProfile.remote_stateless_text()

    def run(self, request: RunRequest) -> Coroutine[Any, Any, RunResult]:
        return self._run(request)

    async def _run(self, request: RunRequest) -> RunResult:
        run_id, asked = request.identity.run_id, request.messages[-1].text
        if not request.is_dispatched:
            self.submitted[run_id] += 1
        if request.accepted is not None:
            request.accepted()
        await asyncio.sleep(0)
        if request.emit is not None:
            request.emit(Custom(data={"working": asked}))
        await asyncio.sleep(0.005)
        return RunResult(
            status=RunStatus.COMPLETED,
            run_id=run_id,
            thread_id=request.identity.thread_id,
            response=f"did {asked}",
            state=PersistedState(extensions={"retinue.remote": {"task_id": run_id}}),
            messages=(*request.messages, Message.assistant(f"did {asked}")),
        )

    async def abort(self, run_id: str) -> None:
        return


class Far(World):
    """A world with an agent elsewhere."""

    def agents(self) -> list[Agent]:
        return [*super().agents(), Agent("far", backend="elsewhere", description="Works elsewhere.")]


async def far_run(plan: Any, server: Elsewhere, run: Any) -> Any:
    """Run something with the remote agent known."""
    from . import tape as module

    kept, module.World = module.World, Far  # type: ignore[misc]
    try:
        return await run
    finally:
        module.World = kept  # type: ignore[misc]


@pytest.mark.parametrize("does", ["lead", "hand"])
async def test_every_prefix_of_a_run_with_remote_children(does: str) -> None:
    far = tuple([below(label, agent="far") for label in "BC"])
    plan = boss((Call(key="a1", does=does, together=True, children=far), look("a2")), (work("a3"),))
    server = Elsewhere()
    whole = await far_run(plan, server, undisturbed(plan, backends={"elsewhere": server}))
    assert whole.result.messages[2].text == "a1: completed: did do B, completed: did do C"
    assert set(server.submitted.values()) == {1}
    assert len(server.submitted) == 2
    for cut in some(whole.tape.cuts()):
        again = Elsewhere()
        begun = [run for run in whole.tape.state(cut).runs.values() if run.identity.agent == "far"]
        other = await far_run(plan, again, continued(whole.tape, cut, plan, backends={"elsewhere": again}))
        check_log(other)
        assert not {run.run_id for run in begun} & set(again.submitted), "a remote child was submitted twice"
        left = cut_of(whole.tape, cut, other.world)
        same_end(whole, other, left)
        if does == "hand" and "a1" in left.unknown:
            assert not again.submitted
            assert texts(other.tree.runs[other.result.run_id], set())[2][2] == "a1 must be known"


# --- without a store


@pytest.mark.parametrize(
    "name", ["parallel calls", "hooks", "replay", "nested", "two children wait", "handoff", "few steps"]
)
async def test_every_prefix_without_a_store(name: str) -> None:
    """The in-memory runtime continues a log by the same code."""
    scene = SCENES[name]
    with checked_folds() as check:
        world = World(scene.plan)
        async with Runtime(world.agents()) as runtime:
            run = runtime.stream("boss", f"do {scene.plan.label}", limits=scene.limits)
            result = await answer_all(runtime, run.run_id, world)
            log = next(shadow.log for shadow in check.shadows.values() if run.run_id in shadow.log.tree.runs)
            rows = log.rows()
        for cut in range(1, len(rows) + 1, 2):
            await _continue_in_memory(scene, rows[:cut], run.run_id, result, world)


async def _continue_in_memory(scene: Scene, rows: list[Any], run_id: str, whole: RunResult, first: World) -> None:
    world, tree = World(scene.plan), fold_all(rows)
    async with Runtime(world.agents()) as runtime:
        unknown = {
            call.call.args.get("key", "")
            for run in tree.runs.values()
            for call in run.open()
            if call.status is ToolCallStatus.RUNNING and call.entered
        }
        log = await inside.continue_in_memory(runtime, rows, tree, run_id)
        result = await asyncio.wait_for(answer_all(runtime, run_id, world), 90)
        assert (result.status, result.response) == (whole.status, whole.response)
        for ours, theirs in zip(whole.messages, result.messages, strict=True):
            assert theirs.text == ours.text or theirs.text.startswith(UNKNOWN) or unknown
        check_rows(log)


def check_rows(log: LiveLog) -> None:
    assert [event.seq for event in log.events] == list(range(1, len(log.events) + 1))
    assert all(run.is_over for run in log.tree.runs.values())


async def test_a_store_that_has_only_the_request_begins_the_run() -> None:
    whole = await undisturbed(SCENES["nothing"].plan)
    other = await continued(whole.tape, 0, SCENES["nothing"].plan)
    assert [event.kind for event in other.events] == [event.kind for event in whole.events]
    async with a_store() as store:
        assert await store.open_logs() == []
