"""A call with two children that wait, one answered before a restart and one after it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from retinue import Limits, RunResult, RunStatus, Runtime

from ..logs import ends_of, whole_log
from ..payers import EACH, Effects, payers, ticket_of, yes
from .nodes import node


async def first_half(url: str, effects: Effects) -> str:
    """Suspend the run with two tickets and answer one, in a runtime that is closed then."""
    async with Runtime.open(url, payers(effects)) as runtime:
        waiting = await runtime.run("boss", "go", thread_id="t")
        assert {ticket.path[-1] for ticket in waiting.suspended.values()} == {"p-ann", "p-bob"}
        half = await runtime.resume(waiting.run_id, {ticket_of(waiting.suspended, "p-ann"): yes()})
        assert [ticket.path[-1] for ticket in half.suspended.values()] == ["p-bob"]
        return half.run_id


async def killed_first_half(url: str, folder: Path) -> str:
    """As `first_half`, in a process that is killed then."""
    with node("half_answered", url, folder) as first:
        run_id = (await asyncio.to_thread(first.line)).split()[1]
        first.kill()
    return run_id


@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_the_answered_child_does_not_wait_again(url: str, tmp_path: Path, effects: Effects, how: str) -> None:
    run_id = await (first_half(url, effects) if how == "closed" else killed_first_half(url, tmp_path))
    assert effects.lines == ["paid ann"]
    async with Runtime.open(url, payers(effects)) as runtime, asyncio.timeout(90):
        before = await runtime.result(run_id)
        assert [ticket.path[-1] for ticket in before.suspended.values()] == ["p-bob"]
        result = await runtime.resume(run_id, {ticket_of(before.suspended, "p-bob"): yes()})
        assert not result.suspended
        assert (result.status, result.response) == (RunStatus.COMPLETED, "paid ann and paid bob")
        assert effects.lines == ["paid ann", "paid bob"]
        events = await whole_log(runtime, run_id)
    assert sorted(ends_of(events).values()) == [["completed"]] * 3


@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_usage_and_ends_of_children_are_complete_after_a_restart(
    url: str, tmp_path: Path, effects: Effects, how: str
) -> None:
    """Each child ends once, and all model calls count."""
    run_id = await (first_half(url, effects) if how == "closed" else killed_first_half(url, tmp_path))
    async with Runtime.open(url, payers(effects)) as runtime, asyncio.timeout(90):
        result = await finished(runtime, await runtime.result(run_id))
        assert result.status is RunStatus.COMPLETED
        assert (result.usage.requests, result.usage.tokens) == (6, 6 * EACH.tokens)
        events = await whole_log(runtime, run_id)
    started = {event.child_run_id for event in events if event.kind == "child_started"}
    last = {event.child_run_id: event.status for event in events if event.kind == "child_finished"}
    assert last == dict.fromkeys(started, RunStatus.COMPLETED)
    terminal = [event for event in events if event.kind == "child_finished" and event.status == "completed"]
    assert Counter(event.child_run_id for event in terminal) == dict.fromkeys(started, 1)
    assert [event.usage.tokens for event in events if event.kind == "run_finished"][-1] == 6 * EACH.tokens


@pytest.mark.parametrize("calls", [6, 7, 8])
async def test_a_token_limit_counts_what_was_used_before_a_restart(url: str, effects: Effects, calls: int) -> None:
    """A run with tokens for about its six model calls ends in the same way, restarted or not."""
    ends = []
    for restarted in (False, True):
        first = Runtime.open(url, payers(effects))
        limits = Limits(tokens=calls * EACH.tokens)
        async with asyncio.timeout(90):
            async with first:
                result = await first.run("boss", "go", limits=limits)
                result = await first.resume(result.run_id, {ticket_of(result.suspended, "p-ann"): yes()})
                if not restarted:
                    result = await finished(first, result)
            if restarted:
                async with Runtime.open(url, payers(effects)) as second:
                    result = await finished(second, result)
        ends.append((result.status, result.termination, result.response, result.usage))
    assert ends[0] == ends[1]


async def finished(runtime: Runtime, result: RunResult) -> RunResult:
    """Answer what waits until nothing does."""
    while result.suspended:
        result = await runtime.resume(result.run_id, {key: yes() for key in result.suspended})
    return result
