"""A server that never accepts a run: the call that starts it gets an error, soon, and no task is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import HarnessAgent, RunStatus, Runtime
from retinue.core.concurrency import Backoff
from retinue.testing import say

from .test_remote import orchestrator, spawn

PROTOCOLS = ["tasks", "a2a", "langgraph"]


def spawning(url: str, folder: Path, protocol: str) -> HarnessAgent:
    return orchestrator(url, folder, lambda told: say(told[0]) if told else spawn("look"), protocol=protocol)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time."""
    pauses, wait, sleep = list[float](), Backoff.wait, asyncio.sleep

    async def noted(self: Any, problem: Exception | None = None, at_least: float = 0.0) -> None:
        pauses.append(self.pause)
        await wait(self, problem, at_least)

    async def short(seconds: float) -> None:
        await sleep(min(seconds, 0.05))

    monkeypatch.setattr(Backoff, "wait", noted)
    monkeypatch.setattr(asyncio, "sleep", short)
    return pauses


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_refused_connection_is_an_error_after_a_few_attempts(
    tmp_path: Path, protocol: str, paused: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.backends.remote.CONNECT_PATIENCE", 0.0, raising=False)
    agent = spawning("http://127.0.0.1:9", tmp_path, protocol)
    async with Runtime([agent]) as runtime:
        result = await runtime.run(agent, "go")
    assert result.status is RunStatus.COMPLETED
    assert (result.response or "").startswith("Error: ")
    assert "cannot be reached" in (result.response or "")
    assert len(paused) <= 2, "a server that refuses connections is not waited for"


class Silent:
    """A server that takes requests and answers none. `requests` are their first lines."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            self.requests.append((await reader.readuntil(b"\r\n")).decode().strip())
            await reader.read()


@asynccontextmanager
async def silent() -> AsyncGenerator[Silent]:
    there = Silent()
    server = await asyncio.start_server(there.answer, "127.0.0.1", 0)
    there.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield there


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_spawn_that_no_server_has_accepted_becomes_no_task(
    tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.subagents.tools.seconds_of", lambda given: 0.2)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr("retinue.backends.remote.STOP_SECONDS", 0.1)
    async with silent() as there:
        agent = spawning(there.url, tmp_path, protocol)
        async with Runtime([agent]) as runtime:
            run = runtime.stream(agent, "go", thread_id="t1")
            events = [event async for event in run]
            said = (await run.result()).response or ""
        assert said.startswith("Error: ")
        assert f"{there.url} had not accepted it" in said
        assert not [event for event in events if event.kind == "task_updated" or event.ns]
        if protocol == "tasks":
            assert there.requests[0].startswith("POST /tasks ")
            assert there.requests[-1].split()[1].endswith("/cancel"), "it may have the task"
