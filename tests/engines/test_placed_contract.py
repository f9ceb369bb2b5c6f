"""Placed children through the contract of backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue import Agent, Backend, BackendProfile, RunResult, Runtime
from retinue.backends import RunRequest
from retinue.core.events import Event, RunFinished, RunStarted
from retinue.runtime.placed import PlacedBackend, placed_id
from retinue.runtime.worker import Worker
from retinue.testing import BackendSuite, ScriptedModel

from .. import inside
from ..backends.example import answer
from .team import Site


class Queued:
    """Gives each run a queue, as `Placement` does."""

    def __init__(self, backend: PlacedBackend, queue: str | None) -> None:
        self._backend, self._queue = backend, queue

    def profile(self) -> BackendProfile:
        return self._backend.profile()

    async def abort(self, run_id: str) -> None:
        await self._backend.abort(run_id)

    async def run(self, request: RunRequest) -> RunResult:
        request.queue = self._queue
        return await self._backend.run(request)


class PlacedHarness:
    def __init__(self, client: Runtime) -> None:
        backend = inside.placed_backend(client)
        self.backend: Backend = Queued(backend, "gpu")
        self.broken: Backend = Queued(backend, "no queue")
        self.events: list[Event] = []

    def _of(self, run_id: str, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.run_id == placed_id(run_id)]

    def starts(self, run_id: str) -> int:
        return len(self._of(run_id, RunStarted))

    def is_at_work(self, run_id: str) -> bool:
        return self.starts(run_id) > len(self._of(run_id, RunFinished))

    def sent(self, run_id: str) -> Sequence[str]:
        return [message.text for message in self._of(run_id, RunStarted)[0].messages]


@pytest.mark.parametrize("check", BackendSuite.names())
async def test_contract(site: Site, check: str) -> None:
    @asynccontextmanager
    async def placed() -> AsyncGenerator[PlacedHarness]:
        async with site.client() as client:
            harness, stop, ready = PlacedHarness(client), asyncio.Event(), asyncio.Event()
            agents, sinks = [Agent("worker", ScriptedModel(answer))], [harness.events.append]
            async with Runtime.open(site.url, agents, engine=site.engine, on_close="leave", sinks=sinks) as runtime:
                working = asyncio.create_task(Worker(runtime, queues=["gpu"], grace=0.0).run(stop, ready.set))
                try:
                    await ready.wait()
                    yield harness
                finally:
                    stop.set()
                    await working

    await getattr(BackendSuite(placed), check)()
