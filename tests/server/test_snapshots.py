"""Snapshots over HTTP: at every place of a log, whoever has it, the events after a snapshot continue it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from retinue import Agent, Child, RunStatus, Runtime, ToolContext, Usage, tool
from retinue.core.events import Event, event_from_json
from retinue.core.processes import process_identity
from retinue.core.rows import LogRow
from retinue.core.runs import RunIdentity
from retinue.core.stores import LogBatch, RunRecord
from retinue.models import CallChunk, ModelChunk, ModelRequest, ReasoningChunk, TextChunk, TurnEnd
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, call, say, think
from retinue.wire.snapshot import SnapshotTree

from ..effort import share
from ..prefix.generate import make
from ..prefix.scenes import SCENES
from ..prefix.tape import undisturbed
from .agents import Gate
from .serving import Site, serving

RUNS = "/api/v1/runs"
ELSEWHERE = f"{process_identity()}/elsewhere"
"""An owner that is alive and not the runtime that serves."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


def tree_json(tree: SnapshotTree) -> Any:
    """Return a tree as a client has it; `status` is that of the run's record."""
    return json.loads(json.dumps(tree.snapshot()))


async def taken(site: Site, run_id: str) -> dict[str, Any]:
    """Return the snapshot of a run, without the status of its record."""
    answer = await site.get(f"{RUNS}/{run_id}/snapshot")
    assert answer.status == 200, answer
    return {name: value for name, value in answer.body.items() if name != "status"}


def check(snapshots: Sequence[Any], events: Sequence[Event]) -> None:
    """Check that each snapshot is the whole of what came before it, and with what came after it that of the end."""
    last = tree_json(SnapshotTree(events))
    for snapshot in snapshots:
        assert snapshot == tree_json(SnapshotTree(events[: snapshot["seq"]])), f"at {snapshot['seq']}"
        tree = SnapshotTree.of(snapshot)
        for event in events[snapshot["seq"] :]:
            tree(event)
        assert tree_json(tree) == last, f"after {snapshot['seq']}"


async def check_stored(url: str, runs: Sequence[Sequence[Event]], chance: Random) -> int:
    """Have another process store each log in batches of random sizes, take a snapshot after each, and check them. Return
    how many snapshots were taken."""
    count = 0
    async with serving(Runtime.open(url)) as site:
        store: Any = open_store(url)
        await store.open()
        try:
            for number, events in enumerate(runs):
                log_id = f"log-{number}"
                identity = RunIdentity(run_id=log_id, thread_id=log_id, agent="a")
                record = RunRecord(identity=identity, started_at=1.0, log_id=log_id)
                await store.begin_run(record, b"{}", ELSEWHERE, 3600.0)
                snapshots: list[Any] = []
                done = 0
                while done < len(events):
                    size = chance.choice([1, 1, 2, 3, chance.randint(1, 60)])
                    rows = [LogRow(event.seq, 0, event) for event in events[done : done + size]]
                    await store.write(LogBatch(log_id=log_id, epoch=1, rows=rows))
                    done += len(rows)
                    snapshots.append(await taken(site, log_id))
                    assert snapshots[-1]["seq"] == done
                check(snapshots, events)
                count += len(snapshots)
        finally:
            await store.close()
    return count


async def test_the_rest_continues_a_snapshot_of_recorded_runs(url: str) -> None:
    """Recorded programs, one for each feature, read on a server that does not own their logs."""
    names = sorted(SCENES)
    chosen = names if share(1, 0) else names[:: 1 + len(names) // 12]
    ends = [await undisturbed(SCENES[name].plan, SCENES[name].limits) for name in chosen]
    assert await check_stored(url, [end.events for end in ends], Random(1)) > 30


async def test_the_rest_continues_a_snapshot_of_random_runs(url: str) -> None:
    scenes = [make(Random(seed)) for seed in range(share(60, 4))]
    ends = [await undisturbed(scene.plan, scene.limits) for scene in scenes]
    assert await check_stored(url, [end.events for end in ends], Random(2))


class Babbler:
    """A model that thinks and talks in pieces, then asks for a call, and ends after its result."""

    name = "testing:babbler"

    def __init__(self, chance: Random, tool_name: str) -> None:
        self._chance, self._tool = chance, tool_name

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        for number in range(self._chance.randint(2, 12)):
            yield self._chance.choice([TextChunk, TextChunk, ReasoningChunk])(f"word{number} ")
            await asyncio.sleep(0)
        if request.messages[-1].role == "tool":
            yield TurnEnd("stop", Usage())
            return
        for name, piece in ((self._tool, '{"times"'), ("", ": "), ("", f"{self._chance.randint(0, 9)}}}")):
            yield CallChunk(0, "", name, piece)
            await asyncio.sleep(0)
        yield TurnEnd("tool_calls", Usage())


@tool
async def hand_out(ctx: ToolContext, times: int) -> str:
    """Talk, then have others talk at once."""
    await mumble_on(ctx, times)
    await ctx.run_children([Child("middle" if ctx.run.depth == 0 else "leaf", f"part {n}") for n in range(3)])
    await mumble_on(ctx, times)
    return "handed out"


@tool
async def mumble(ctx: ToolContext, times: int) -> str:
    """Talk alone."""
    await mumble_on(ctx, times)
    return "mumbled"


async def mumble_on(ctx: ToolContext, times: int) -> None:
    for number in range(times):
        ctx.stream_output(f"out{number} ")
        ctx.report_activity_delta("plan", [])
        await asyncio.sleep(0)


async def babble(chance: Random) -> list[Any]:
    """Return the events of a tree of runs that talk all at once. Some are stopped in the middle of a sentence."""
    agents = [Agent(name, Babbler(chance, "hand_out"), tools=[hand_out]) for name in ("top", "middle")]
    runtime = Runtime([*agents, Agent("leaf", Babbler(chance, "mumble"), tools=[mumble])])
    run = runtime.stream("top", "Go.")
    stop_at = chance.choice([0, chance.randint(5, 200)])
    async for event in run:
        if event.seq == stop_at:
            await run.cancel()
    return await runtime.log(run.run_id).so_far()


async def test_the_rest_continues_a_snapshot_of_runs_that_talk_at_once(url: str) -> None:
    runs = [await babble(Random(seed)) for seed in range(share(40, 5))]
    assert {run[-1].status for run in runs} == {RunStatus.COMPLETED, RunStatus.CANCELLED}
    assert await check_stored(url, runs, Random(3)) > 60


@pytest.mark.parametrize("place", ["memory", "sqlite", "postgres"])
async def test_the_rest_continues_a_snapshot_of_a_run_at_work(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Snapshots of the server that does the work, between the words of two children."""
    urls = {"memory": lambda: "memory:", "sqlite": lambda: f"sqlite:///{tmp_path}/a.db"}
    url = urls[place]() if place in urls else request.getfixturevalue("postgres_url")
    gates = [Gate(), Gate()]

    @tool
    async def ask_both(ctx: ToolContext) -> str:
        """Ask both."""
        ctx.stream_output("asking ")
        await ctx.run_children([Child(f"child{n}", f"part {n}") for n in range(2)])
        return "asked"

    top = Agent("top", ScriptedModel([[think("hm"), call("ask_both", {}, id="c1")], say("End.")]), tools=[ask_both])
    agents = [top, *[gate.agent(f"child{n}") for n, gate in enumerate(gates)]]
    async with serving(Runtime.open(url, agents=agents)) as site:
        run_id = (await site.start("top"))["run_id"]
        stream = site.events(f"{RUNS}/{run_id}/events")
        snapshots: list[Any] = []
        for n, word in ((0, "a "), (1, "b "), (0, "c "), (0, None), (1, "d "), (1, None)):
            gates[n].say(word)
            wanted = "text_delta" if word else "run_finished"
            while (await anext(stream)).event != wanted:
                pass
            snapshots.append(await taken(site, run_id))
        async for _ in stream:
            pass
        snapshots.append(await taken(site, run_id))
        events = [event_from_json(one.data) for one in await site.all_events(f"{RUNS}/{run_id}/events")]
        check(snapshots, events)
        said = [
            [
                child["open_message"]["text"] if child["open_message"] else None
                for child in one["run"]["calls"][0]["children"]
            ]
            for one in snapshots
        ]
        assert said == [
            ["a ", None],
            ["a ", "b "],
            ["a c ", "b "],
            [None, "b "],
            [None, "b d "],
            [None, None],
            [None, None],
        ]
