"""Workers of two queues as processes, one of which is killed while a placed child works."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import Decision, RunStatus, Runtime
from retinue.runtime.placed import placed_id
from retinue.runtime.placed_calls import call_run_id

from ..waiting import until
from .crew import is_marked
from .processes import WorkerProcess, holder, start_worker
from .team import Site

TARGET = "tests.engines.placing:agents_of_process"
LEASE = ("--lease", "2")


@asynccontextmanager
async def four_workers(site: Site, folder: Path, target: str = TARGET) -> AsyncGenerator[list[WorkerProcess]]:
    """Two of each queue."""
    queues = ["default", "default", "gpu", "gpu"]
    options: dict[str, Any] = {"engine": site.engine, "target": target}
    started = list(
        await asyncio.gather(
            *[start_worker(site.url, folder, *LEASE, "--queues", queue, **options) for queue in queues]
        )
    )
    try:
        yield started
    finally:
        await asyncio.gather(*[worker.end() for worker in started])


def steps(folder: Path) -> dict[str, int]:
    """How often each step was made."""
    return {path.name: len(path.read_text().splitlines()) for path in sorted(folder.glob("step-*"))}


async def child_of(client: Runtime, run_id: str) -> str:
    async for event in client.events(run_id):
        if event.kind == "run_started" and event.ns:
            return event.run_id
    raise AssertionError("it has no child")


async def check_log(client: Runtime, run_id: str) -> list[Any]:
    """No number is missing, each run ended once, and no event of the child is there twice."""
    events: list[Any] = [event async for event in client.events(run_id)]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    ends = Counter(event.ns for event in events if event.kind == "run_finished")
    assert ends == {(): 1, ("tools:task_1",): 1}
    calls = Counter((event.kind, event.call_id) for event in events if event.kind.startswith("tool_call_finished"))
    assert set(calls.values()) == {1}
    return events


@pytest.mark.parametrize("victims", ["child", "parent", "both"])
async def test_kill_9_while_a_placed_child_works(site: Site, tmp_path: Path, victims: str) -> None:
    async with four_workers(site, tmp_path) as started, site.client() as client:
        (tmp_path / "hold-2").touch()
        run = client.stream("guide", "5")
        await run.stored()
        child = await child_of(client, run.run_id)
        await until(lambda: is_marked(tmp_path, 2))
        named = {"child": [placed_id(child)], "parent": [run.run_id], "both": [run.run_id, placed_id(child)]}
        for log_id in named[victims]:
            victim = await holder(started, client, log_id)
            assert victim is not None
            await victim.end(signal.SIGKILL)
        (tmp_path / "hold-2").unlink()
        result = await run.result()
        assert (result.status, result.response) == (RunStatus.COMPLETED, "5 steps")
        assert steps(tmp_path) == {f"step-{number}": 1 for number in range(5)}
        events = await check_log(client, run.run_id)
        ends = {event.call_id: event.status for event in events if event.kind == "tool_call_finished" and event.ns}
        is_killed = victims != "parent"  # a call that may not be made twice has an unknown outcome then
        assert ends == {f"mark_{number}": "failed" if number == 2 and is_killed else "succeeded" for number in range(5)}


async def test_a_question_outlives_every_worker(site: Site, tmp_path: Path) -> None:
    async with site.client() as client:
        async with four_workers(site, tmp_path):
            run = client.stream("chief", "three coins")
            assert (await run.result()).status is RunStatus.SUSPENDED
        async with four_workers(site, tmp_path):
            result = await client.resume(run.run_id, {"task_1/pay_1": Decision.approve()})
            assert (result.status, result.response) == (RunStatus.COMPLETED, "clerk: paid 3")


@pytest.mark.parametrize("victim", ["call", "run"])
@pytest.mark.parametrize("tool", ["once", "again"])
async def test_kill_9_while_a_placed_call_works(site: Site, tmp_path: Path, tool: str, victim: str) -> None:
    """A call that may not be made twice is not; a worker of the run that is killed does not matter to the call."""
    (tmp_path / "hold").touch()
    target = "tests.engines.toolbox:agents_of_process"
    async with four_workers(site, tmp_path, target) as started, site.client() as client:
        run = client.stream("user", tool)
        await until((tmp_path / "made").exists)
        await until(lambda: _has_streamed(client, run.run_id))
        call_log = placed_id(call_run_id(run.run_id, "call_1", 0))
        killed = await holder(started, client, call_log if victim == "call" else run.run_id)
        assert killed is not None
        await killed.end(signal.SIGKILL)
        (tmp_path / "hold").unlink()
        result = await run.result()
        assert result.status is RunStatus.COMPLETED
        is_unknown = victim == "call" and tool == "once"
        assert ("outcome unknown" in (result.response or "")) is is_unknown
        assert (result.response == "held") is not is_unknown
        made = len((tmp_path / "made").read_text().split())
        assert made == (2 if victim == "call" and tool == "again" else 1)
        events: list[Any] = [event async for event in client.events(run.run_id)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        deltas = [event.delta for event in events if event.kind == "tool_call_stream_delta"]
        assert deltas == (["one "] if is_unknown else ["one "] * made + ["two"])


async def _has_streamed(client: Runtime, run_id: str) -> bool:
    found = await client.store.read_events(run_id)  # type: ignore[attr-defined]
    return found is not None and any(event.kind == "tool_call_stream_delta" for event in found[0])
