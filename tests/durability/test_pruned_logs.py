"""A reader of a log that is pruned meanwhile comes to an end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import Agent, RetinueError, RunStatus, Runtime, tool
from retinue.stores import Retention
from retinue.testing import ScriptedModel, call, say
from tests.prepared import PYTHON

from ..logs import whole_log

RETINUE = (PYTHON, "-m", "retinue")


@pytest.mark.parametrize("how", ["retention", "command"])
async def test_following_a_log_that_is_pruned_ends(url: str, how: str) -> None:
    gate, entered = asyncio.Event(), asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait for the gate."""
        entered.set()
        await gate.wait()
        return "waited"

    def turn(request: Any) -> Any:
        return say("done") if request.messages[-1].role == "tool" else call("wait", {})

    agent = Agent("a", ScriptedModel(turn), tools=[wait])
    async with Runtime.open(url, [agent]) as first, Runtime.open(url, [agent]) as second, asyncio.timeout(90):
        run = first.stream("a", "go", thread_id="t")
        await entered.wait()
        log = aiter(second.events(run.run_id))
        seen = [await anext(log)]
        gate.set()
        assert (await run.result()).status is RunStatus.COMPLETED
        await whole_log(second, run.run_id)  # it is all stored
        await (prune_by_retention if how == "retention" else prune_by_command)(url, run.run_id)
        try:
            async with asyncio.timeout(90):
                async for event in log:
                    seen.append(event)
        except RetinueError:
            pass  # it may say that the log is gone
        except TimeoutError:
            pytest.fail(f"following went on after {len(seen)} events, though the log is gone")
        assert [event.seq for event in seen] == list(range(1, len(seen) + 1))


async def prune_by_retention(url: str, run_id: str) -> None:
    async with Runtime.open(url, retention=Retention(days=0)) as pruner:
        while await pruner.store.load_run(run_id) is not None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


async def prune_by_command(url: str, run_id: str) -> None:
    async with Runtime.open(url, recover=False) as reader:
        while await reader.store.load_run(run_id) is not None:  # an age of 0 s is a matter of rounding
            process = await asyncio.create_subprocess_exec(
                *RETINUE, "db", "prune", "--db", url, "--older-than", "0s", stdout=asyncio.subprocess.DEVNULL
            )
            assert await process.wait() == 0
