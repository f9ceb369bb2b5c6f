"""Runs at the gate of a provider's account: what their logs, trees and terminals show while they wait."""

from __future__ import annotations

import asyncio
from typing import Any

from inline_snapshot import snapshot

from retinue import Agent, Limits, RunStatus, Runtime
from retinue.models.resilience import ResilientModel, RetryPolicy
from retinue.testing import ScriptedModel, call, say
from retinue.wire.snapshot import SnapshotTree
from tests.models.gated import Provider
from tests.virtual import run_virtually

from ..story import story


def lead_of(count: int, model: Any) -> Agent:
    asked = {"subagent_type": "finder", "description": "look"}
    calls = [call("task", asked, id=f"call_{place}") for place in range(count)]
    return Agent("lead", ScriptedModel([calls, say("done")]), subagents=[Agent("finder", model)])


def test_a_wait_is_one_event_and_the_next_event_ends_it() -> None:
    async def work() -> None:
        runtime = Runtime([Agent("a", ResilientModel(Provider(rate=None, down=(0.0, 5.0))))])
        run, tree, waits = runtime.stream("a", "go"), SnapshotTree(), list[Any]()
        events: list[Any] = []
        async for event in run:
            events.append(event)
            tree(event)
            shown: Any = tree.snapshot()
            waits.append(shown["run"]["wait"])
        assert story(events) == snapshot(
            [
                "run_started",
                "step_started 1",
                "inference_waiting overloaded",
                "text_delta hi",
                "inference_finished stop",
                "step_finished 1",
                "run_finished completed natural hi None",
            ]
        )
        waiting = [event for event in events if event.kind == "inference_waiting"]
        assert [(event.reason, event.position, event.message) for event in waiting] == [
            ("overloaded", 0, "nobody answers")
        ]
        shown = [wait and wait["reason"] for wait in waits]
        assert shown == [None, None, "overloaded", *[None] * 4]
        restored = SnapshotTree.of(dict(tree.snapshot() or {}))
        assert restored.snapshot() == tree.snapshot()
        result = await run.result()
        assert result.status is RunStatus.COMPLETED
        assert result.usage.waited > 4

    run_virtually(work())


def test_no_child_is_lost_at_a_limit_and_each_says_where_it_stands() -> None:
    async def work() -> None:
        provider = Provider(retry_after=1.0)
        runtime = Runtime([lead_of(100, ResilientModel(provider))])
        events: list[Any] = [event async for event in runtime.stream("lead", "go")]
        ended = [event.status for event in events if event.kind == "child_finished"]
        assert ended == [RunStatus.COMPLETED] * 100
        waiting = [event for event in events if event.kind == "inference_waiting"]
        assert len({event.run_id for event in waiting}) == len(waiting) > 50
        assert {event.reason for event in waiting} == {"rate_limit"}
        assert max(event.position for event in waiting) > 50
        assert not [event for event in events if event.kind == "error"]

    run_virtually(work())


def test_a_run_that_waits_is_cancelled_at_once() -> None:
    async def work() -> None:
        now = asyncio.get_running_loop().time
        runtime = Runtime([lead_of(30, ResilientModel(Provider(rate=None, down=(0.0, 1e9))))])
        run = runtime.stream("lead", "go")
        async for event in run:
            if event.kind == "inference_waiting":
                break
        began = now()
        await run.cancel()
        assert now() - began < 0.1
        assert (await run.result()).status is RunStatus.CANCELLED

    run_virtually(work())


def test_a_limit_on_time_ends_a_wait() -> None:
    async def work() -> None:
        model = ResilientModel(Provider(rate=None, down=(0.0, 1e9)), RetryPolicy())
        result = await Runtime([Agent("a", model, limits=Limits(seconds=20))]).run("a", "go")
        assert (result.status, result.termination) == (RunStatus.FAILED, "limit:seconds")
        assert 19 < asyncio.get_running_loop().time() < 22

    run_virtually(work())
