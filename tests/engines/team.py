"""Runtimes that share an engine: clients without agents, and workers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from retinue import Agent, Runtime
from retinue.workers import Worker

from .crew import crew

LEASE = 60.0


class Site:
    """A database and an engine."""

    def __init__(self, url: str, engine: str) -> None:
        self.url, self.engine = url, engine

    def client(self, agents: Iterable[Agent] = ()) -> Runtime:
        return Runtime.open(self.url, agents, engine=self.engine)

    @asynccontextmanager
    async def worker(
        self,
        agents: Iterable[Agent] | None = None,
        *,
        queues: Sequence[str] = ("default",),
        slots: int = 8,
        grace: float = 10.0,
        lease: float = LEASE,
    ) -> AsyncGenerator[Worker]:
        """A worker that can claim; it is drained at the end."""
        given = crew() if agents is None else agents
        async with Runtime.open(self.url, given, engine=self.engine, on_close="leave", lease=lease) as runtime:
            worker, stop, ready = (
                Worker(runtime, queues=queues, slots=slots, grace=grace),
                asyncio.Event(),
                asyncio.Event(),
            )
            working = asyncio.create_task(worker.run(stop, ready.set))
            try:
                await asyncio.wait({working, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
                yield worker
            finally:
                stop.set()
                await working


async def events_of(client: Runtime, run_id: str) -> list[Any]:
    """The events of a log: no number is missing."""
    events = [event async for event in client.events(run_id)]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


async def is_quiet(client: Runtime) -> bool:
    """Nobody has a log, and nobody needs to."""
    return not await client.store.open_logs()  # type: ignore[attr-defined]
