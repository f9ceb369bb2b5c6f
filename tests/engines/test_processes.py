"""Workers are processes that are killed, frozen and stopped while they have runs."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from retinue import RunStatus, Runtime
from retinue.core.errors import RetinueError

from ..waiting import until
from .crew import is_marked
from .processes import holder, start_worker, workers
from .team import Site, events_of

LEASE = ("--lease", "2")


def steps(folder: Path) -> dict[str, int]:
    """How often each step was made."""
    return {path.name: len(path.read_text().splitlines()) for path in folder.glob("step-*")}


async def check_log(client: Runtime, run_id: str) -> list[Any]:
    """No number is missing, and the run ended once."""
    events = await events_of(client, run_id)
    assert [event.kind for event in events if not event.ns].count("run_finished") == 1
    return events


async def held(folder: Path, step: int) -> None:
    await until(lambda: is_marked(folder, step))


async def test_another_worker_continues_after_kill_9(site: Site, tmp_path: Path) -> None:
    async with workers(2, site.url, tmp_path, *LEASE, engine=site.engine) as started, site.client() as client:
        (tmp_path / "hold-2").touch()
        run = client.stream("walker", "4")
        await held(tmp_path, 2)
        victim = await holder(started, client, run.run_id)
        assert victim is not None
        await victim.end(signal.SIGKILL)
        (tmp_path / "hold-2").unlink()
        result = await run.result()
        assert (result.status, result.response) == (RunStatus.COMPLETED, "4 steps")
        events = await check_log(client, run.run_id)
        ends = {event.call_id: event.status for event in events if event.kind == "tool_call_finished"}
        assert ends == {"mark_0": "succeeded", "mark_1": "succeeded", "mark_2": "failed", "mark_3": "succeeded"}
        assert steps(tmp_path) == {"step-0": 1, "step-1": 1, "step-2": 1, "step-3": 1}


async def test_sigterm_lets_a_call_finish_and_hands_over(site: Site, tmp_path: Path) -> None:
    async with workers(1, site.url, tmp_path, engine=site.engine) as started, site.client() as client:
        (tmp_path / "hold-1").touch()
        run = client.stream("walker", "3")
        await held(tmp_path, 1)
        started[0].send(signal.SIGTERM)
        started.append(await start_worker(site.url, tmp_path, engine=site.engine))
        assert started[0].process.returncode is None
        (tmp_path / "hold-1").unlink()
        assert await started[0].process.wait() == 0
        assert (await run.result()).response == "3 steps"
        events = await check_log(client, run.run_id)
        assert {event.status for event in events if event.kind == "tool_call_finished"} == {"succeeded"}
        assert steps(tmp_path) == {"step-0": 1, "step-1": 1, "step-2": 1}


async def test_sigterm_leaves_what_does_not_finish(site: Site, tmp_path: Path) -> None:
    async with workers(1, site.url, tmp_path, "--grace", "0", engine=site.engine) as started, site.client() as client:
        (tmp_path / "hold-1").touch()
        run = client.stream("walker", "2")
        await held(tmp_path, 1)
        started[0].send(signal.SIGTERM)
        assert await started[0].process.wait() == 0
        (tmp_path / "hold-1").unlink()
        started.append(await start_worker(site.url, tmp_path, engine=site.engine))
        assert (await run.result()).status is RunStatus.COMPLETED
        assert steps(tmp_path) == {"step-0": 1, "step-1": 1}
        await check_log(client, run.run_id)


async def test_a_frozen_worker_is_fenced(site: Site, tmp_path: Path) -> None:
    async with workers(2, site.url, tmp_path, *LEASE, engine=site.engine) as started, site.client() as client:
        (tmp_path / "hold-1").touch()
        run = client.stream("walker", "3")
        await held(tmp_path, 1)
        frozen = await holder(started, client, run.run_id)
        assert frozen is not None
        frozen.send(signal.SIGSTOP)
        try:
            assert (await run.result()).response == "3 steps"
        finally:
            (tmp_path / "hold-1").unlink()
            frozen.send(signal.SIGCONT)
        events = await check_log(client, run.run_id)
        again = client.stream("walker", "1")
        assert (await again.result()).status is RunStatus.COMPLETED
        assert await check_log(client, run.run_id) == events


async def test_each_worker_does_some_of_many_runs(site: Site, tmp_path: Path) -> None:
    async with workers(3, site.url, tmp_path, "--slots", "4", engine=site.engine) as started, site.client() as client:
        (tmp_path / "hold-0").touch()
        runs = [client.stream("walker", "1", user_id=f"u{number % 5}") for number in range(30)]

        async def owners() -> Counter[str | None]:
            found = [await client.store.owner_of(run.run_id) for run in runs]  # type: ignore[attr-defined]
            return Counter([owner for owner in found if owner is not None])

        async def all_slots() -> bool:
            return sorted((await owners()).values()) == [4, 4, 4]

        await until(all_slots)  # no slot is left free, and none is exceeded
        (tmp_path / "hold-0").unlink()
        results = await asyncio.gather(*[run.result() for run in runs])
        assert {result.status for result in results} == {RunStatus.COMPLETED}
        assert steps(tmp_path) == {"step-0": 30}
        for worker in started:
            worker.send(signal.SIGTERM)
        assert {await worker.process.wait() for worker in started} == {0}


async def test_the_database_is_restarted(site: Site, tmp_path: Path, postgres_server: Any) -> None:
    async with workers(1, site.url, tmp_path, *LEASE, engine=site.engine), site.client() as client:
        (tmp_path / "hold-1").touch()
        run = client.stream("walker", "3")
        await held(tmp_path, 1)
        await asyncio.to_thread(postgres_server.stop)
        await asyncio.to_thread(postgres_server.start)
        (tmp_path / "hold-1").unlink()

        async def ended() -> Any:
            try:
                record = await client.store.load_run(run.run_id)
            except RetinueError:
                return None
            return record is not None and record.has_ended and record

        record = await until(ended)
        assert record.result.status is RunStatus.COMPLETED
        await check_log(client, run.run_id)
