"""One run at a time on a thread, whoever asks; runs that are cancelled from elsewhere; owners that wake up late."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, Run, RunStatus, Runtime, ThreadBusy, tool
from retinue.stores import MemoryStore
from retinue.testing import ScriptedModel, call, say

from ..prepared import PYTHON
from ..waiting import expire_lease, let_others_run, until


class Gate:
    """A tool that lets a run go on when the test says so."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.open = asyncio.Event()

    def agent(self) -> Agent:
        @tool
        async def wait(name: str) -> str:
            """Wait for the gate."""
            self.entered.append(name)
            await self.open.wait()
            return f"{name} went through"

        def turn(request: Any) -> Any:
            last = request.messages[-1]
            return say(last.text) if last.role == "tool" else call("wait", {"name": last.text})

        return Agent("a", ScriptedModel(turn), tools=[wait])


@asynccontextmanager
async def two_nodes(url: str, gate: Gate) -> AsyncIterator[tuple[Runtime, Runtime]]:
    """Two runtimes on one store, or one twice where there is no store to share."""
    if url == "memory:":
        async with Runtime([gate.agent()]) as runtime:
            yield runtime, runtime
        return
    async with Runtime.open(url, [gate.agent()]) as first, Runtime.open(url, [gate.agent()]) as second:
        yield first, second


async def queue(runtime: Runtime, input: str) -> Run:
    """Start a run that waits for its turn, and return when its place in the queue is stored."""
    run = runtime.stream("a", input, thread_id="t", when_busy="enqueue")
    if isinstance(runtime.store, MemoryStore):
        await let_others_run()
    else:
        await until(lambda: runtime.store.load_run(run.run_id))
    return run


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request, tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return _url(request, tmp_path)


def _url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/app.db"


async def test_a_second_run_is_refused(anywhere: str) -> None:
    gate = Gate()
    async with two_nodes(anywhere, gate) as (first, second):
        run = first.stream("a", "one", thread_id="t")
        await until(lambda: gate.entered)
        with pytest.raises(ThreadBusy, match=run.run_id):
            await second.run("a", "two", thread_id="t")
        gate.open.set()
        assert (await run.result()).response == "one went through"
        assert (await second.run("a", "three", thread_id="t")).response == "three went through"
        with pytest.raises(ConfigurationError, match="when_busy"):
            second.stream("a", "x", when_busy="shove")  # pyright: ignore[reportArgumentType]


async def test_runs_wait_their_turn_in_order(anywhere: str) -> None:
    gate = Gate()
    async with two_nodes(anywhere, gate) as (first, second):
        runs = [first.stream("a", "one", thread_id="t")]
        await until(lambda: gate.entered)
        for place, name in enumerate(["two", "three", "four"]):
            runs.append(await queue((second, first, second)[place], name))
        with pytest.raises(ThreadBusy):
            await second.run("a", "five", thread_id="t")
        gate.open.set()
        results = [await run.result() for run in runs]
        assert [result.response for result in results] == [f"{name} went through" for name in gate.entered]
        assert gate.entered == ["one", "two", "three", "four"]
        thread = await second.store.load_thread("t")
        assert thread is not None
        assert [m.text for m in thread.messages if m.role == "user"] == gate.entered


async def test_a_newer_run_ends_the_one_before(anywhere: str) -> None:
    gate = Gate()
    async with two_nodes(anywhere, gate) as (first, second):
        old = first.stream("a", "one", thread_id="t")
        await until(lambda: gate.entered)
        new = second.stream("a", "two", thread_id="t", when_busy="interrupt")
        assert (await old.result()).status is RunStatus.CANCELLED
        await until(lambda: len(gate.entered) == 2)
        gate.open.set()
        assert (await new.result()).response == "two went through"


async def test_a_run_that_waits_for_its_turn_can_be_cancelled(anywhere: str) -> None:
    gate = Gate()
    async with two_nodes(anywhere, gate) as (first, second):
        run = first.stream("a", "one", thread_id="t")
        await until(lambda: gate.entered)
        queued = await queue(second, "two")
        assert (await queued.cancel()).status is RunStatus.CANCELLED
        gate.open.set()
        assert (await run.result()).status is RunStatus.COMPLETED
        assert gate.entered == ["one"]
        assert (await second.run("a", "three", thread_id="t")).status is RunStatus.COMPLETED


async def test_a_newer_run_ends_also_those_that_wait(anywhere: str) -> None:
    gate = Gate()
    async with two_nodes(anywhere, gate) as (first, second):
        old = first.stream("a", "one", thread_id="t")
        await until(lambda: gate.entered)
        queued = await queue(second, "two")
        new = first.stream("a", "three", thread_id="t", when_busy="interrupt")
        ended = [await old.result(), await queued.result()]
        assert [result.status for result in ended] == [RunStatus.CANCELLED] * 2
        await until(lambda: len(gate.entered) == 2)
        gate.open.set()
        assert (await new.result()).response == "three went through"
        kinds = [event.kind async for event in second.events(queued.run_id)]
        assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")


async def test_a_run_is_cancelled_by_another_runtime(stored: str) -> None:
    gate = Gate()
    async with two_nodes(stored, gate) as (first, second):
        run = first.stream("a", "one", thread_id="t")
        await until(lambda: gate.entered)
        result = await second.cancel(run.run_id, reason="enough")
        assert (result.status, result.error) == (RunStatus.CANCELLED, "enough")
        assert (await run.result()).status is RunStatus.CANCELLED


LATE = """
import asyncio, sys
from retinue import Agent, Runtime, tool
from retinue.testing import ScriptedModel, call, say
async def main():
    @tool
    async def slow() -> str:
        "Wait for a line."
        print("in", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        return "slow is done"
    def turn(request):
        last = request.messages[-1]
        return say(last.text) if last.role == "tool" else call("slow", {})
    async with Runtime.open(sys.argv[1], [Agent("a", ScriptedModel(turn), tools=[slow])]) as runtime:
        run = runtime.stream("a", "go", thread_id="t")
        print(run.run_id, flush=True)
        result = await run.result()
        print(result.response, flush=True)
asyncio.run(main())
"""


async def test_an_owner_that_wakes_up_late_cannot_write(stored: str) -> None:
    """A process is stopped until its lease is over; another takes its run over; the first wakes up and is too late."""
    url = stored
    process = subprocess.Popen([PYTHON, "-c", LATE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    run_id = (await asyncio.to_thread(process.stdout.readline)).strip()
    assert (await asyncio.to_thread(process.stdout.readline)).strip() == "in"
    os.kill(process.pid, signal.SIGSTOP)
    try:
        async with Runtime.open(url, recover=False) as looking:
            await expire_lease(looking.store, run_id)

        @tool
        async def slow() -> str:
            """Is not called: the call was interrupted, and it may not be run twice."""
            raise AssertionError

        def turn(request: Any) -> Any:
            last = request.messages[-1]
            return say(last.text[:28]) if last.role == "tool" else call("slow", {})

        async with Runtime.open(url, [Agent("a", ScriptedModel(turn), tools=[slow])]) as runtime:
            result = await runtime.result(run_id)
            assert result.response == "interrupted, outcome unknown"
            before = [event.kind async for event in runtime.events(run_id)]
            os.kill(process.pid, signal.SIGCONT)
            said, _ = await asyncio.to_thread(process.communicate, "go\n")
            assert said.strip() == "interrupted, outcome unknown", "it says what the new owner stored"
            record = await runtime.store.load_run(run_id)
            assert record is not None
            assert record.result is not None
            assert record.result.response == "interrupted, outcome unknown"
        async with Runtime.open(url) as runtime:
            assert [event.kind async for event in runtime.events(run_id)] == before
    finally:
        process.kill()
        process.communicate()
