"""A server is killed while a client follows a run, and started again on the same port."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from retinue import RunStatus
from retinue.client import Client
from tests.prepared import PYTHON

from .node import TOKEN, WORDS


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@asynccontextmanager
async def node(folder: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [PYTHON, "-m", "tests.client.node", str(folder), str(port)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("moment", ["text_delta", "tool_call_ready"])
async def test_a_killed_server_loses_and_repeats_nothing(moment: str, tmp_path: Path) -> None:
    port = free_port()
    async with Client(f"http://127.0.0.1:{port}", token=TOKEN) as client:
        async with node(tmp_path, port) as first:
            run = client.stream("digger", "go")
            waiting = asyncio.create_task(client.run("digger", "go too"))
            events = aiter(run)
            seen = [await anext(events)]
            while seen[-1].kind != moment:
                seen.append(await anext(events))
            assert not run.ended
            first.send_signal(signal.SIGKILL)
            await first.wait()
        (tmp_path / "go").touch()
        async with node(tmp_path, port):
            seen += [event async for event in events]
            result = await run.result()
            assert result.status is RunStatus.COMPLETED
            assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
            assert [event async for event in client.events(run.run_id)] == seen
            assert result.response == "".join(WORDS)
            if moment == "tool_call_ready":
                assert [event.delta for event in seen if event.kind == "text_delta"] == 2 * WORDS
            assert (await waiting).status is RunStatus.COMPLETED


async def test_a_server_that_is_started_late_gets_the_run_once(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "go").touch()
    async with Client(f"http://127.0.0.1:{port}", token=TOKEN) as client:
        run = client.stream("digger", "go")
        async with node(tmp_path, port):
            assert (await run.result()).status is RunStatus.COMPLETED
