"""python -m benchmarks.crowd URL: a run of a thousand children that dies when half of them have worked.

Prints the id of the run first. What it takes to continue it is measured by `benchmarks.stores`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from retinue import Agent, CallChunk, Limits, ModelRequest, Runtime, TextChunk, TurnEnd, tool
from retinue.models import ModelChunk

CHILDREN = 1_000


class Boss:
    """Has every child work at once."""

    name = "bench:boss"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if request.messages[-1].role == "tool":
            yield TextChunk("done")
            yield TurnEnd()
            return
        for number in range(CHILDREN):
            asked = f'{{"subagent_type":"child","description":"do {number}"}}'
            yield CallChunk(number, f"call_{number}", "task", asked)
        yield TurnEnd("tool_calls")


class Child:
    """Asks for one call, and answers."""

    name = "bench:child"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if request.messages[-1].role == "tool":
            yield TextChunk("done")
            yield TurnEnd()
        else:
            yield CallChunk(0, "look", "look", "{}")
            yield TurnEnd("tool_calls")


def agents(deadly: int = 0) -> list[Agent]:
    """A boss with a child, whose process dies with a call of that number."""
    called = 0

    @tool(idempotent=True)
    async def look() -> str:
        """Look something up; some take longer."""
        nonlocal called
        called += 1
        mine = called
        await asyncio.sleep((mine % 7) / 100)
        if mine == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return "found"

    child: Any = Agent("child", Child(), tools=[look])
    return [Agent("boss", Boss(), subagents=[child], limits=Limits(parallel=CHILDREN, children=CHILDREN))]


async def main(url: str) -> None:
    async with Runtime.open(url, agents(deadly=CHILDREN // 2)) as runtime:
        run = runtime.stream("boss", "go")
        print(run.run_id, flush=True)
        await run.result()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
