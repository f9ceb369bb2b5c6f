"""The order in which calls end again after their process ended."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from retinue.core.events import ChildStarted, RunFinished, ToolCallFinished
from retinue.core.lifecycle import RunStatus, ToolCallStatus
from retinue.core.messages import Message
from retinue.core.results import ToolResult
from retinue.loop import past
from retinue.loop.past import Order, Spent


class Scene:
    """A run with open calls, some of which ended in a process before."""

    def __init__(self, ended: list[str], others: list[str] | None = None) -> None:
        self.order = Order()
        for call_id in ended:
            self.order.follow(finished(call_id))
        calls = {*ended, *(others or ())}
        status = ToolCallStatus.RUNNING
        self.run: Any = SimpleNamespace(
            run_id="r",
            open_calls={c: SimpleNamespace(status=status, holds_slot=False, call=c) for c in calls},
            budget=None,
        )
        self.known = list(ended)
        self.said: list[str] = []

    async def end(self, call_id: str, status: ToolCallStatus = ToolCallStatus.SUCCEEDED) -> None:
        """What a call does at its end."""
        await self.order.turn(self.run, call_id)
        self.said.append(call_id)
        self.run.open_calls[call_id].status = status
        if status is not ToolCallStatus.SUSPENDED:
            del self.run.open_calls[call_id]
        again = call_id in self.known
        if again:
            self.known.remove(call_id)
        self.order.ended(self.run, call_id, again=again)


def finished(call_id: str) -> ToolCallFinished:
    message = Message.tool("ok", tool_call_id=call_id, name="t")
    status = ToolCallStatus.SUCCEEDED
    return ToolCallFinished(
        run_id="r", call_id=call_id, tool_name="t", status=status, result=ToolResult.success("ok"), message=message
    )


@pytest.mark.parametrize("seed", range(5))
async def test_a_crowd_ends_as_it_did_and_nobody_is_woken_in_vain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, chance = 300, random.Random(seed)
    calls = [f"c{number}" for number in range(count)]
    ended = chance.sample(calls, 200)
    scene = Scene(ended, [call for call in calls if call not in ended])
    looks = 0
    real = past._is_at_work  # pyright: ignore[reportPrivateUsage]

    def look(run: Any, call_id: str) -> bool:
        nonlocal looks
        looks += 1
        return real(run, call_id)

    monkeypatch.setattr(past, "_is_at_work", look)

    async def arrive(call_id: str) -> None:
        await asyncio.sleep(chance.random() / 50)
        await scene.end(call_id)

    await asyncio.gather(*[arrive(call) for call in chance.sample(calls, count)])
    assert scene.said[:200] == ended
    assert sorted(scene.said) == sorted(calls)
    assert looks < 6 * count


async def test_a_call_that_waits_for_a_human_holds_nobody_up() -> None:
    scene = Scene(["a", "b", "a"])
    last = asyncio.create_task(scene.end("b"))
    await asyncio.sleep(0.01)
    assert scene.said == []
    await scene.end("a", ToolCallStatus.SUSPENDED)
    await last
    scene.run.open_calls["a"].status = ToolCallStatus.RUNNING
    await scene.end("a")
    assert scene.said == ["a", "b", "a"]


async def test_a_call_that_does_not_end_again_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(past, "_PATIENCE", 0.05)
    scene = Scene(["a", "b"])
    await scene.end("b")
    assert scene.said == ["b"]
    assert "call a does not end again as it did" in caplog.text


async def test_calls_of_other_steps_and_runs_hold_nobody_up() -> None:
    scene = Scene(["a", "b"])
    del scene.run.open_calls["a"]
    await scene.end("b")
    await scene.order.turn(SimpleNamespace(run_id="other", open_calls={}), "x")


def test_it_is_known_where_children_are_open() -> None:
    spent = Spent()
    inner, outer = ("tools:a", "tools:b"), ("tools:a",)
    spent.follow(ChildStarted(run_id="r", call_id="a", child_run_id="r1", child_agent="x", child_ns=outer))
    spent.follow(ChildStarted(run_id="r1", call_id="b", child_run_id="r2", child_agent="x", child_ns=inner, ns=outer))
    spent.follow(ChildStarted(run_id="r1", call_id="b", child_run_id="r2", child_agent="x", child_ns=inner, ns=outer))
    assert [spent.has_open_under(ns) for ns in ((), outer, inner, ("tools:z",))] == [True, True, False, False]
    spent.follow(RunFinished(run_id="r2", status=RunStatus.COMPLETED, termination="natural"))
    assert [spent.has_open_under(ns) for ns in ((), outer)] == [True, False]
    spent.close("r1")
    spent.close("r1")
    assert not spent.has_open_under(())
