"""A background task is at work while its worker is killed or stopped, after its run has ended: another continues it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from retinue import Agent, HarnessAgent
from retinue.stores import SqlTaskRepository
from retinue.tasks import TaskRecord, TaskScope, TaskStatus
from retinue.testing import ScriptedModel

from ..waiting import until
from .crew import make_mark, walker
from .placing import sender
from .processes import WorkerProcess, holder, start_worker
from .team import Site, is_quiet
from .test_processes import LEASE, check_log, held, steps


def agents() -> list[Agent]:
    """The agents of a worker process: `sender` has the steps of `walker` made in the background."""
    folder = Path(os.environ["CREW_FOLDER"])
    steps = Agent("walker", ScriptedModel(walker), description="walks", tools=[make_mark(folder)], max_steps=100)
    tasks = SqlTaskRepository((folder / "database").read_text())
    office = HarnessAgent(
        "sender",
        ScriptedModel(sender),
        workspace=folder / "office",
        subagents=[steps],
        general_purpose=False,
        task_repository=tasks,
    )
    return [office]


@asynccontextmanager
async def two_workers(site: Site, folder: Path, *options: str) -> AsyncGenerator[list[WorkerProcess]]:
    (folder / "database").write_text(site.url)
    (folder / "office").mkdir()
    target = "tests.engines.test_task_processes:agents"
    started = [await start_worker(site.url, folder, *options, engine=site.engine, target=target) for _ in range(2)]
    try:
        yield started
    finally:
        for worker in started:
            await worker.end()


@pytest.mark.parametrize(("signum", "options"), [(signal.SIGKILL, LEASE), (signal.SIGTERM, ("--grace", "0"))])
async def test_another_worker_continues_a_task_whose_run_has_ended(
    site: Site, tmp_path: Path, signum: int, options: tuple[str, ...]
) -> None:
    (tmp_path / "hold-1").touch()
    async with two_workers(site, tmp_path, *options) as started, site.client() as client:
        run = client.stream("sender", "walker 3", thread_id="talk")
        assert (await run.result()).response == "begun"
        await held(tmp_path, 1)
        victim = await holder(started, client, run.run_id)
        assert victim is not None, "the log of an open task has an owner"
        await victim.end(signum)
        (tmp_path / "hold-1").unlink()
        async with SqlTaskRepository(client.store) as tasks:

            async def ended() -> list[TaskRecord]:
                found = await tasks.list(TaskScope("sender", "talk"))
                return [record for record in found if record.status.is_terminal]

            (record,) = await until(ended)
            assert (record.status, record.result) == (TaskStatus.COMPLETED, "3 steps")
        await until(lambda: is_quiet(client))
        events = await check_log(client, run.run_id)
        ends = {event.call_id: event.status for event in events if event.kind == "tool_call_finished"}
        assert ends == {"spawn_1": "succeeded", "mark_0": "succeeded", "mark_1": "failed", "mark_2": "succeeded"}
        assert steps(tmp_path) == {"step-0": 1, "step-1": 1, "step-2": 1}
        told = (await client.run("sender", "news", thread_id="talk")).response or ""
        assert "3 steps" in told
