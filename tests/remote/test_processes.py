"""Servers as processes: each side is killed and started again, and a proxy in between spoils the traffic."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.waiting import until

from ..effort import share
from .nodes import Node, nodes
from .proxy import Proxy
from .test_remote_events import check_copy

REPORT = "Report number 1: there is nothing at all in the ground."
YES = {"action": "resume", "payload": {"approved": True}}


async def check_logs(above: Node, run_id: str, below: Node, kinds: tuple[str, ...] = ()) -> None:
    """Check that the log of a run has each event of the run below it once, and in order."""
    (remote,) = await below.runs()
    events = await above.events(run_id)
    check_copy(events, await below.events(remote))
    starts = [event.run_id for event in events if event.kind == "run_started"]
    assert len({event.run_id for event in events if event.kind == "run_started"}) == len({*starts})
    last = events[-1]
    assert (last.kind, last.run_id) == ("run_finished", run_id)


def digging(node: Node, number: int) -> Path:
    return node.folder / f"digging_{number}"


@pytest.mark.parametrize("killed", ["server", "parent", "both"])
async def test_a_side_is_killed_while_the_remote_run_works(tmp_path: Path, killed: str) -> None:
    async with nodes(tmp_path / "n", "boss", "researcher") as (boss, far):
        run_id = await boss.run("research")
        await until(digging(far, 0).exists)
        await boss.seen(run_id, lambda event: event.kind == "tool_call_ready" and event.tool_name == "dig")
        for node in {"server": [far], "parent": [boss], "both": [boss, far]}[killed]:
            node.kill()
        (far.folder / "go").touch()
        for node in {"server": [far], "parent": [boss], "both": [far, boss]}[killed]:
            await node.start()
        result = await boss.result(run_id)
        assert result["status"] == "completed"
        assert result["response"].endswith(REPORT)
        await check_logs(boss, run_id, far)


async def test_three_levels_an_approval_and_kills_in_between(tmp_path: Path) -> None:
    """The question is asked on the third server and answered at the first, after each of them was started anew."""
    async with nodes(tmp_path / "n", "chief", "boss", "researcher") as (chief, boss, far):
        (far.folder / "go").touch()
        run_id = await chief.run("research and ask")
        waiting = await chief.result(run_id)
        assert waiting["status"] == "suspended"
        ((name, ticket),) = waiting["suspended"].items()
        assert (name, len(ticket["path"])) == ("/".join(ticket["path"]), 4)
        for node in (far, boss, chief):
            await node.restart()
        await chief.answer(run_id, {name: {**YES, "id": "d1"}})
        await boss.restart()
        result = await chief.result(run_id)
        assert result["status"] == "completed", result
        assert REPORT in result["response"]
        await chief.answer(run_id, {name: {**YES, "id": "d1"}})
        (middle,) = await boss.runs()
        await check_logs(boss, middle, far)
        await check_logs(chief, run_id, boss)
        events = await chief.events(run_id)
        assert result["usage"]["requests"] == sum(event.kind == "inference_finished" for event in events) == 11


async def test_the_conversation_goes_on_there(tmp_path: Path) -> None:
    async with nodes(tmp_path / "n", "boss", "researcher") as (boss, far):
        (far.folder / "go").touch()
        run_id = await boss.run("research twice")
        result = await boss.result(run_id)
        assert "Report number 2: there is nothing" in result["response"]
        assert len(await far.runs()) == 2


async def test_a_cancel_reaches_the_third_server(tmp_path: Path) -> None:
    async with nodes(tmp_path / "n", "chief", "boss", "researcher") as (chief, boss, far):
        run_id = await chief.run("research")
        await until(digging(far, 0).exists)
        async with chief.site() as site:
            answer = await site.post(f"/api/v1/runs/{run_id}/cancel")
        assert answer.body["status"] == "cancelled"
        for node in (boss, far):
            (remote,) = await node.runs()
            assert (await node.result(remote))["status"] == "cancelled"


async def test_spoiled_traffic_changes_nothing(tmp_path: Path) -> None:
    """The parent reaches its server through a proxy that delays, cuts, truncates and duplicates."""
    for seed in range(share(60, 3)):
        folder = tmp_path / f"n{seed}"
        async with nodes(folder, "researcher") as (far,), Proxy(far.port, seed, faults=15) as proxy:
            (far.folder / "go").touch()
            boss = Node(folder / "boss", "boss", proxy.url)
            await boss.start()
            try:
                run_id = await boss.run("research and ask")
                waiting = await boss.result(run_id)
                assert waiting["status"] == "suspended", (seed, proxy.done, waiting)
                proxy.left = 15
                (name,) = waiting["suspended"]
                await boss.answer(run_id, {name: YES})
                result = await boss.result(run_id)
                assert result["status"] == "completed", (seed, proxy.done, result)
                assert result["response"].endswith(REPORT)
                await check_logs(boss, run_id, far)
            finally:
                boss.kill()


async def test_spoiled_traffic_and_kills_at_random_moments(tmp_path: Path) -> None:
    for seed in range(share(40, 2)):
        random, folder = Random(seed), tmp_path / f"n{seed}"
        async with nodes(folder, "researcher") as (far,), Proxy(far.port, seed, faults=10) as proxy:
            (far.folder / "go").touch()
            boss = Node(folder / "boss", "boss", proxy.url)
            await boss.start()
            try:
                run_id = await boss.run("research")
                ended = asyncio.create_task(_result_whatever_happens(boss, run_id))
                for _ in range(4):
                    await _some_events(random.choice([boss, far]), random.randint(1, 40))
                    await random.choice([boss, far]).restart()
                result = await ended
                assert result["status"] == "completed", (seed, proxy.done, result)
                assert result["response"].endswith(REPORT)
                await check_logs(boss, run_id, far)
            finally:
                boss.kill()


async def _result_whatever_happens(node: Node, run_id: str) -> Any:
    while True:
        try:
            return await node.result(run_id)
        except OSError:
            await asyncio.sleep(0.01)


async def _some_events(node: Node, count: int) -> None:
    """Return when a run of a node has some events, or has ended."""
    if not (runs := await node.runs()):
        return
    async with node.site() as site:
        async for _ in site.events(f"/api/v1/runs/{runs[-1]}/events?after=0"):
            count -= 1
            if not count:
                return
