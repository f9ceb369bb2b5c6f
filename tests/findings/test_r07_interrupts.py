"""R7: many runs that interrupt each other on one thread. The last one completes and none hangs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import Agent, RunStatus, Runtime, tool
from retinue.testing import ScriptedModel, call, say

from .support import ends_of, whole_log

RUNS = 40
GAPS = (0.001, 0.004) * 5
"""Seconds between two runs of a storm: the first is the worst for SQLite, the second for PostgreSQL."""


def worker() -> Agent:
    """Takes a few turns of the event loop, so that interrupts come at every moment of a run."""

    @tool
    async def work() -> str:
        """Work for a moment."""
        await asyncio.sleep(0.02)
        return "worked"

    def turn(request: Any) -> Any:
        last = request.messages[-1]
        return say("done") if last.role == "tool" else call("work", {})

    return Agent("a", ScriptedModel(turn), tools=[work])


@pytest.mark.timeout(120)
async def test_the_last_of_many_runs_that_interrupt_each_other_completes(url: str) -> None:
    """A race, tried with two rhythms. Slow: 4 s, and 15 s where it fails."""
    async with Runtime.open(url, [worker()]) as runtime:
        for storm, gap in enumerate(GAPS):
            runs = []
            for number in range(RUNS):
                runs.append(runtime.stream("a", f"{number}", thread_id=f"t{storm}", when_busy="interrupt"))
                await asyncio.sleep(gap)
            done, late = await asyncio.wait([asyncio.create_task(run.result()) for run in runs], timeout=8)
            for task in late:
                task.cancel()
            assert not late, f"{len(late)} of {RUNS} runs of storm {storm} neither start nor end"
            statuses = [task.result().status for task in done]
            assert set(statuses) <= {RunStatus.CANCELLED, RunStatus.COMPLETED}
            last = await runs[-1].result()
            assert (last.status, last.response) == (RunStatus.COMPLETED, "done")
            assert ends_of(await whole_log(runtime, last.run_id)) == {last.run_id: ["completed"]}
            after = await asyncio.wait_for(runtime.run("a", "after", thread_id=f"t{storm}"), 90)
            assert after.status is RunStatus.COMPLETED
