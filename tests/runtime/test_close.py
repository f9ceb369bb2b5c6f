"""`runtime.close()` closes everything, whatever comes out of one of its runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ModelRequest, RunStatus, Runtime, TextChunk, tool
from retinue.models import ModelChunk
from retinue.testing import ScriptedModel, ScriptError, call, say


class Unscripted:
    """A model that is at work until it is stopped, and then fails in a way that comes out of the run."""

    name = "testing:unscripted"

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ScriptError("the model was asked for something that it does not have") from None
        yield TextChunk("never")


def waiter(entered: asyncio.Event) -> Agent:
    @tool
    async def wait() -> str:
        """Wait for ever."""
        entered.set()
        await asyncio.Event().wait()
        return "never"

    def turn(request: Any) -> Any:
        return say("done") if request.messages[-1].role == "tool" else call("wait", {})

    return Agent("waiter", ScriptedModel(turn), tools=[wait])


def open_files(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # it was the one that lists them
    return [file for file in found if file.startswith(str(folder))]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")
async def test_close_does_not_raise_what_a_run_raises_and_closes_the_store(sqlite_url: str, tmp_path: Path) -> None:
    entered, model = asyncio.Event(), Unscripted()
    runtime = Runtime.open(sqlite_url, [Agent("bad", model), waiter(entered)], on_close="cancel")
    await runtime.__aenter__()
    bad = runtime.stream("bad", "go", thread_id="t1")
    good = runtime.stream("waiter", "go", thread_id="t2")
    await asyncio.wait_for(asyncio.gather(model.asked.wait(), entered.wait()), 90)
    assert open_files(tmp_path)
    await asyncio.wait_for(runtime.close(), 90)
    assert open_files(tmp_path) == []
    assert (await good.result()).status is RunStatus.CANCELLED
    async with Runtime.open(sqlite_url, recover=False) as reader, asyncio.timeout(90):
        assert (await reader.result(good.run_id)).status is RunStatus.CANCELLED
        assert (await reader.result(bad.run_id)).status in (RunStatus.CANCELLED, RunStatus.FAILED)


async def test_close_ends_the_other_runs_where_one_raises() -> None:
    """The same in memory."""
    entered, model = asyncio.Event(), Unscripted()
    runtime = Runtime([Agent("bad", model), waiter(entered)])
    runtime.stream("bad", "go")
    good = runtime.stream("waiter", "go")
    await asyncio.wait_for(asyncio.gather(model.asked.wait(), entered.wait()), 90)
    await asyncio.wait_for(runtime.close(), 90)
    assert (await good.result()).status is RunStatus.CANCELLED


@pytest.mark.usefixtures("new_connections")
async def test_close_closes_the_connections_to_postgres(postgres_url: str, postgres_server: Any) -> None:
    def connections() -> int:
        with postgres_server.connect() as connection:
            query = b"SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
            return connection.execute(query).fetchone()[0]

    before, model = connections(), Unscripted()
    runtime = Runtime.open(postgres_url, [Agent("bad", model)])
    await runtime.__aenter__()
    runtime.stream("bad", "go", thread_id="t")
    await asyncio.wait_for(model.asked.wait(), 90)
    assert connections() > before
    await asyncio.wait_for(runtime.close(), 90)
    async with asyncio.timeout(90):  # the server needs a moment to notice
        while connections() > before:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
