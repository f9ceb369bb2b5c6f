"""Two `retinue serve` processes on one PostgreSQL: each follows, answers and cancels the runs of the other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ..waiting import until
from .processes import Served, served

RUNS = "/api/v1/runs"
AGENTS = "tests.server.served:runtime"


@asynccontextmanager
async def two(url: str, folder: Path) -> AsyncIterator[tuple[Served, Served]]:
    async with (
        served(AGENTS, "--db", url, folder=folder) as first,
        served(AGENTS, "--db", url, folder=folder) as second,
    ):
        yield first, second


async def test_each_follows_answers_and_cancels_runs_of_the_other(postgres_url: str, tmp_path: Path) -> None:
    async with two(postgres_url, tmp_path) as servers:
        for here, there in (servers, servers[::-1]):
            run_id = (await here.site.start("boss"))["run_id"]
            events = there.site.events(f"{RUNS}/{run_id}/events")
            seen = [await anext(events)]
            while seen[-1].data.get("status") != "suspended" or seen[-1].data["ns"]:
                seen.append(await anext(events))
            decision = {"decisions": {"task_1/pay_1": {"action": "resume", "payload": {"approved": True}}}}
            assert (await there.site.post(f"{RUNS}/{run_id}/decisions", decision)).status == 202
            seen += [event async for event in events]
            assert seen[-1].data["response"] == "boss: clerk: paid 3"
            assert [event.data["seq"] for event in seen] == list(range(1, len(seen) + 1))
            assert seen == await here.site.all_events(f"{RUNS}/{run_id}/events")

            run_id = (await here.site.start("waiter", "never"))["run_id"]
            followed = asyncio.create_task(there.site.all_events(f"{RUNS}/{run_id}/events"))
            cancelled = await there.site.post(f"{RUNS}/{run_id}/cancel")
            assert (cancelled.status, cancelled.body["status"]) == (200, "cancelled")
            assert (await followed)[-1].data["status"] == "cancelled"
            assert (await here.site.result(run_id))["status"] == "cancelled"


async def test_a_killed_server_costs_only_time(postgres_url: str, tmp_path: Path) -> None:
    async with two(postgres_url, tmp_path) as (first, second):
        port = int(first.site.url.rpartition(":")[2])
        works = (await first.site.start("waiter", "it"))["run_id"]
        waits = (await first.site.start("payer"))["run_id"]
        await first.site.result(waits)
        await until((tmp_path / "it.pids").exists)
        events = second.site.events(f"{RUNS}/{works}/events")
        seen = [await anext(events)]
        await first.end(signal.SIGKILL)
        (tmp_path / "it").touch()
        seen += [event async for event in events]
        assert seen[-1].data["response"] == "done: it came"
        assert [event.data["seq"] for event in seen] == list(range(1, len(seen) + 1))
        decision = {"decisions": {"pay_1": {"action": "resume", "payload": {"approved": True}}}}
        assert (await second.site.post(f"{RUNS}/{waits}/decisions", decision)).status == 202
        assert (await second.site.result(waits))["response"] == "done: paid 3"

        # The other way round: it comes back on its port, and takes over from the second.
        async with served(AGENTS, "--db", postgres_url, folder=tmp_path, port=port) as again:
            assert again.site.url == first.site.url
            works = (await second.site.start("waiter", "more"))["run_id"]
            await until((tmp_path / "more.pids").exists)
            await second.end(signal.SIGKILL)
            (tmp_path / "more").touch()
            assert (await again.site.result(works))["response"] == "done: more came"
            last = await again.site.all_events(f"{RUNS}/{works}/events")
            assert [event.data["seq"] for event in last] == list(range(1, len(last) + 1))
    assert len(set((tmp_path / "it.pids").read_text().split())) == 2
    assert len(set((tmp_path / "more.pids").read_text().split())) == 2
