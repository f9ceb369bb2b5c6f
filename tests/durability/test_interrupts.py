"""Many runs that interrupt each other on one thread. The last one completes and none hangs."""

from __future__ import annotations

import asyncio
from typing import Any

from retinue import Agent, RunStatus, Runtime, tool
from retinue.testing import ScriptedModel, call, say

from ..effort import share
from ..logs import ends_of, whole_log

RUNS = share(40, 25)
GAPS = (0.001, 0.004) * share(5, 1)
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


async def test_the_last_of_many_runs_that_interrupt_each_other_completes(url: str) -> None:
    """A race, tried with two rhythms."""
    async with Runtime.open(url, [worker()]) as runtime:
        for storm, gap in enumerate(GAPS):
            runs = []
            for number in range(RUNS):
                runs.append(runtime.stream("a", f"{number}", thread_id=f"t{storm}", when_busy="interrupt"))
                await asyncio.sleep(gap)
            statuses = [result.status for result in await asyncio.gather(*[run.result() for run in runs])]
            assert set(statuses) <= {RunStatus.CANCELLED, RunStatus.COMPLETED}
            last = await runs[-1].result()
            assert (last.status, last.response) == (RunStatus.COMPLETED, "done")
            assert ends_of(await whole_log(runtime, last.run_id)) == {last.run_id: ["completed"]}
            after = await runtime.run("a", "after", thread_id=f"t{storm}")
            assert after.status is RunStatus.COMPLETED
