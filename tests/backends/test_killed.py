"""Runs elsewhere go on when the process that asked for them is killed, and the next one waits for them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, RunStatus, Runtime, ToolContext, tool
from retinue.backends.tasks_http import HttpTaskClient, TaskHttpBackend
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, call, say
from tests import inside
from tests.remote.server import TaskServer

from ..prepared import PYTHON
from ..waiting import until

ROOT = Path(__file__).parents[2]
FAR = Agent("far", backend="there")


def parent(kind: str) -> Agent:
    """An agent that has another work elsewhere, one way or the other."""

    @tool(idempotent=True)
    async def delegate(ctx: ToolContext) -> str:
        """Delegate."""
        return str((await ctx.run_child("far", "work")).response)

    calls = {
        "task": call("task", {"subagent_type": "far", "description": "work"}, id="c1"),
        "as_tool": call("agent_run_far", {"prompt": "work"}, id="c1"),
        "run_child": call("delegate", {}, id="c1"),
    }
    model = ScriptedModel(
        lambda request: say(f"told: {last.text}") if (last := request.messages[-1]).role == "tool" else calls[kind]
    )
    return Agent("parent", model, tools=[delegate, FAR.as_tool()], subagents=[FAR])


def opened(database: str, server: str, kind: str, **options: Any) -> Runtime:
    backend = TaskHttpBackend(HttpTaskClient(server), "worker")
    return Runtime.open(database, [parent(kind), FAR], backends={"there": backend}, **options)


async def start(database: str, server: str, kind: str) -> None:
    async with opened(database, server, kind, lease=1.0) as runtime:
        run = runtime.stream("parent", "go")
        sys.stdout.write(f"{run.run_id}\n")
        sys.stdout.flush()
        await until(lambda: run.ended and not inside.is_waiting_for_others(runtime))  # also if the log is lost
        sys.stdout.write("nothing is waited for\n")
        sys.stdout.flush()
        await run.result()


class Far:
    """A server whose answer can be kept back."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def answer(self, request: Any) -> Any:
        await self.may_answer.wait()
        return say("worked")


@asynccontextmanager
async def far_server() -> AsyncIterator[tuple[Far, TaskServer]]:
    far = Far()
    async with Runtime([Agent("worker", ScriptedModel(far.answer))]) as runtime, TaskServer(runtime) as server:
        yield far, server


async def is_accepted(database: str, run_id: str) -> bool:
    """Return whether it is stored that the server has the child of a run."""
    async with Runtime.open(database, recover=False) as looking:
        store: Any = looking.store
        log = await store.read_log(run_id)
        return log is not None and any(
            row.event.ns for row in log.rows if row.event and row.event.kind == "run_started"
        )


@asynccontextmanager
async def dispatched(database: str, server: TaskServer, kind: str) -> AsyncIterator[tuple[Any, str]]:
    """Another process that waits for the server, and the id of its run."""
    code = f"import asyncio; from tests.backends.test_killed import start; asyncio.run(start(*{(database, server.url, kind)!r}))"
    process = subprocess.Popen([PYTHON, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        run_id = (await asyncio.to_thread(process.stdout.readline)).strip()
        await server.has_work.wait()
        await until(lambda: is_accepted(database, run_id))
        yield process, run_id
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("kind", ["task", "as_tool", "run_child"])
async def test_the_next_process_waits_for_the_same_run(tmp_path: Path, kind: str, has_ended: bool) -> None:
    database = f"sqlite:///{tmp_path}/app.db"
    async with far_server() as (far, server):
        async with dispatched(database, server, kind) as (process, run_id):
            process.kill()
            process.wait()
        (remote,) = server.runs.values()
        assert not remote.ended
        if has_ended:
            far.may_answer.set()
            await remote.result()
        async with opened(database, server.url, kind) as runtime, asyncio.timeout(90):
            far.may_answer.set()
            result = await runtime.result(run_id)
            events: list[Any] = [event async for event in runtime.events(run_id)]
    assert (result.status, result.response) == (RunStatus.COMPLETED, "told: worked")
    assert len(server.submissions) == 1
    own = [event.kind for event in events if event.ns and event.kind != "custom"]
    assert own == ["run_started", "text_delta", "run_finished"]
    around = [event.kind for event in events if event.kind.startswith("child_")]
    assert around == ["child_started", "child_finished"]
    assert {event.run_id for event in events if event.ns} == {server.submissions[0].task_id}


async def test_a_process_that_loses_its_log_leaves_the_run_elsewhere_alone(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/app.db"
    store: Any = open_store(database)
    async with far_server() as (far, server), dispatched(database, server, "task") as (process, run_id):
        assert await store.claim(run_id, "another", 60.0, gone=await store.owner_of(run_id)) == 2
        assert await asyncio.to_thread(process.stdout.readline) == "nothing is waited for\n"
        assert process.poll() is None
        (remote,) = server.runs.values()
        assert not remote.ended
        far.may_answer.set()
        assert (await remote.result()).response == "worked"
    await store.close()
