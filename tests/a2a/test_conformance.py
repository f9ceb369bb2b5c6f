"""The backend for A2A keeps the contract of backends, over each transport, with streams and without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue.backends.a2a import A2ABackend
from retinue.backends.a2a_client import A2AClient
from retinue.core.backend import Backend
from retinue.testing import BackendSuite

from .processes import Sample


class Harness:
    def __init__(self, server: Sample) -> None:
        self._server = server
        self.backend: Backend = A2ABackend(A2AClient(server.url, origins=server.origins))
        self.broken: Backend = A2ABackend(A2AClient("http://127.0.0.1:9"), patience=0.1)

    def starts(self, run_id: str) -> int:
        return len(self.sent(run_id))

    def is_at_work(self, run_id: str) -> bool:
        return self.starts(run_id) > sum(said["message_id"] == run_id for said in self._server.asked("end"))

    def sent(self, run_id: str) -> Sequence[str]:
        return [said["text"] for said in self._server.asked() if said["message_id"] == run_id]


SETTINGS: dict[str, dict[str, Any]] = {
    "jsonrpc": {},
    "rest": {"transports": ["HTTP+JSON"]},
    "grpc": {"transports": ["GRPC"]},
    "polling": {"streaming": False},
    "grpc-polling": {"transports": ["GRPC"], "streaming": False},
}


@pytest.fixture(scope="module", params=SETTINGS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    started = Sample(tmp_path_factory.mktemp("a2a"), **SETTINGS[request.param])
    asyncio.run(started.start())
    yield started
    started.kill()


@pytest.mark.parametrize("check", BackendSuite.names())
async def test_contract(check: str, server: Sample) -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[Harness]:
        harness = Harness(server)
        try:
            yield harness
        finally:
            for backend in (harness.backend, harness.broken):
                closing: Any = backend
                await closing.close()

    await getattr(BackendSuite(make), check)()
