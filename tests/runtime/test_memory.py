"""What has ended does not stay in memory, and watching many children takes time in proportion."""

from __future__ import annotations

import asyncio
import gc
import linecache
import sys
import tracemalloc
from collections.abc import Awaitable
from typing import Any

import pytest

from retinue import Agent, Limits, Run, RunStatus, Runtime
from retinue.stores import MemoryStore
from retinue.testing import ScriptedModel, call, say

from ..effort import share

pytestmark = pytest.mark.no_fold_check
SIZE = 10_000
"""Characters that each run says: what a kept run weighs at least."""


def talker() -> Agent:
    """Says a long text that no other run says."""
    count = 0

    def turn(request: Any) -> Any:
        nonlocal count
        count += 1
        return say(f"{count:08}" + "x" * (SIZE - 8))

    model = ScriptedModel(turn)

    class Forgetful(list[Any]):
        def append(self, request: Any) -> None:
            """Keep nothing: what the model was asked is not what is measured."""

    model.requests = Forgetful()
    return Agent("a", model)


NOT_OURS = [
    tracemalloc.Filter(False, name) for name in ("<frozen importlib*>", linecache.__file__, tracemalloc.__file__)
]
"""What a process allocates when it first needs a module or shows a traceback, whichever test it is in."""


def in_use() -> int:
    """Return the bytes that are in use."""
    gc.collect()
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(NOT_OURS).traces)


async def growth(first: Awaitable[None], then: Awaitable[None]) -> int:
    """Return how many more bytes are in use after some work than before it, once other work has been done."""
    tracemalloc.start()
    try:
        await first
        before = in_use()
        await then
        await asyncio.sleep(0)
        return in_use() - before
    finally:
        tracemalloc.stop()


def runs_in_memory() -> set[int]:
    """Return the handles of runs that this process has, also those of other tests."""
    gc.collect()
    return {id(thing) for thing in gc.get_objects() if type(thing) is Run}


async def test_ended_runs_that_are_stored_do_not_stay_in_memory(sqlite_url: str) -> None:
    runs = share(300, 100)
    async with Runtime.open(sqlite_url, [talker()]) as runtime:

        async def some(count: int) -> None:
            for _ in range(count):
                assert (await runtime.run("a", "go")).status is RunStatus.COMPLETED

        before = runs_in_memory()
        grown = await growth(some(50), some(runs))
        assert grown < runs * SIZE / 4, f"{grown / runs:,.0f} bytes a run stay, of {SIZE:,} that it said"
        kept = len(runs_in_memory() - before)
        assert kept < 50, f"{kept} runs that have ended are in memory"


async def test_streamed_runs_that_are_stored_do_not_stay_in_memory(sqlite_url: str) -> None:
    """As above, with many events a run: they are what weighs."""
    pieces = 500

    def turn(request: Any) -> Any:
        return say("ab" * pieces, chunks=["ab"] * pieces)

    async with Runtime.open(sqlite_url, [Agent("a", ScriptedModel(turn))]) as runtime:

        async def some(count: int) -> None:
            for _ in range(count):
                run = runtime.stream("a", "go")
                assert sum([event.kind == "text_delta" async for event in run]) == pieces
                await run.result()  # when it is stored

        grown = await growth(some(20), some(60))
        assert grown < 60 * pieces * 20, f"{grown / 60 / pieces:,.0f} bytes an event stay in memory"


async def test_conversations_without_a_thread_are_bounded_in_memory() -> None:
    """Nobody can ask for the thread of such a run again except by its result.

    Some may be kept, as the runs are; what is kept must not grow with their number.
    """
    runs = share(2000, 220)
    runtime = Runtime([talker()], store=MemoryStore(max_runs=runs // 2))

    async def some() -> None:
        for _ in range(runs):
            await runtime.run("a", "go")

    grown = await growth(some(), some())  # after the first, as many are kept as may be
    assert grown < runs * SIZE / 4, f"{grown / runs:,.0f} bytes a run stay, of {SIZE:,} that it said"
    await runtime.close()


async def test_a_named_thread_stays_in_memory() -> None:
    """The other side: a conversation that has a name is for the next run, however many others there were."""
    runs = share(1500, 220)
    agent = Agent("a", ScriptedModel(lambda request: say(str(len(request.messages)))))
    runtime = Runtime([agent], store=MemoryStore(max_runs=runs // 2))
    await runtime.run("a", "first", thread_id="kept")
    for _ in range(runs):
        await runtime.run("a", "go")
    assert (await runtime.run("a", "second", thread_id="kept")).response == "3"
    await runtime.close()


def manager(children: int) -> Agent:
    """Starts that many children in one step."""
    child = Agent("child", ScriptedModel(lambda request: say("done")))

    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("all done")
        arguments = {"subagent_type": "child", "description": "go"}
        return [call("task", arguments, id=f"c{number}") for number in range(children)]

    return Agent("boss", ScriptedModel(turn), subagents=[child])


async def watched(children: int) -> int:
    """Return how many calls of functions a run takes while each of its children is watched to its end."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    async with Runtime([manager(children)]) as runtime:
        sys.setprofile(count)
        try:
            run = runtime.stream("boss", "go", limits=Limits(children=children + 1))
            jobs = [asyncio.create_task(child.result()) async for child in run.children]
            results = await asyncio.gather(*jobs)
            assert (await run.result()).status is RunStatus.COMPLETED
        finally:
            sys.setprofile(None)
        assert [result.status for result in results] == [RunStatus.COMPLETED] * children
        return calls


async def test_watching_many_children_takes_work_in_proportion() -> None:
    """Sixteen times the children take about sixteen times the work, where each does not read the whole log."""
    few, many = await watched(20), await watched(320)
    assert many < 20 * few, f"20 children: {few} calls, 320 children: {many}"
