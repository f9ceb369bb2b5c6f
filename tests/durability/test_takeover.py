"""Several nodes take over orphaned runs, or answer one ticket, at the same moment. Each run ends once."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from retinue import DecisionRefused, RunResult, RunStatus, Runtime

from ..logs import ends_of, whole_log
from ..payers import Effects, payer, yes
from .nodes import node

RUNS = 40


async def test_three_nodes_that_start_together_end_each_orphaned_run_once(url: str, tmp_path: Path) -> None:
    """Takes about 5 s: it starts four processes."""
    with ExitStack() as stack:
        first = stack.enter_context(node("crowd", url, tmp_path, RUNS))
        others = [stack.enter_context(node("taker", url, tmp_path, f"n{number}")) for number in range(3)]
        run_ids = [(await asyncio.to_thread(first.line)).split()[1] for _ in range(RUNS)]
        first.kill()
        for other in others:
            await asyncio.to_thread(other.expect, "ready")
        for other in others:
            other.tell()
        async with Runtime.open(url, recover=False) as reader, asyncio.timeout(90):
            for run_id in run_ids:
                await reader.result(run_id)
        for other in others:
            other.tell()
        for other in others:
            await asyncio.to_thread(other.wait)
    async with Runtime.open(url, recover=False) as reader:
        results = [await reader.result(run_id) for run_id in run_ids]
        assert Counter((result.status.value, result.error) for result in results) == {("completed", None): RUNS}
        for run_id in run_ids:
            assert ends_of(await whole_log(reader, run_id)) == {run_id: ["completed"]}


async def suspend_many(url: str, effects: Effects, count: int) -> list[str]:
    async with Runtime.open(url, [payer(effects)]) as runtime:
        results = [await runtime.run("payer", f"pay {number}") for number in range(count)]
    assert {result.status for result in results} == {RunStatus.SUSPENDED}
    return [result.run_id for result in results]


async def test_of_two_humans_who_answer_on_two_nodes_one_decides(url: str, effects: Effects) -> None:
    run_ids = await suspend_many(url, effects, 12)
    async with Runtime.open(url, [payer(effects)]) as one, Runtime.open(url, [payer(effects)]) as two:
        for number, run_id in enumerate(run_ids):
            async with asyncio.timeout(90):
                said = await asyncio.gather(
                    one.resume(run_id, {"p1": yes()}), two.resume(run_id, {"p1": yes()}), return_exceptions=True
                )
            results = [result for result in said if isinstance(result, RunResult)]
            refusals = [refusal for refusal in said if isinstance(refusal, DecisionRefused)]
            assert (len(results), len(refusals)) == (1, 1), said
            assert (results[0].status, results[0].response) == (RunStatus.COMPLETED, f"done: paid {number}")
    await check_completed(url, effects, run_ids)


async def test_the_same_decision_on_two_nodes_gives_both_the_same_result(url: str, effects: Effects) -> None:
    run_ids = await suspend_many(url, effects, 12)
    async with Runtime.open(url, [payer(effects)]) as one, Runtime.open(url, [payer(effects)]) as two:
        for run_id in run_ids:
            decisions = {"p1": yes()}
            async with asyncio.timeout(90):
                said = await asyncio.gather(
                    one.resume(run_id, decisions), two.resume(run_id, decisions), return_exceptions=True
                )
            assert [getattr(result, "status", result) for result in said] == [RunStatus.COMPLETED] * 2
            assert [getattr(result, "response", None) for result in said] == [said[0].response] * 2  # type: ignore[union-attr]
    await check_completed(url, effects, run_ids)


async def test_a_ticket_that_two_nodes_answer_never_fails_its_run(url: str, effects: Effects) -> None:
    """As above, whatever the loser is told: the call is made once and the run stays completed."""
    run_ids = await suspend_many(url, effects, 40)
    async with Runtime.open(url, [payer(effects)]) as one, Runtime.open(url, [payer(effects)]) as two:
        async with asyncio.timeout(90):
            for number, run_id in enumerate(run_ids):
                first = asyncio.create_task(one.resume(run_id, {"p1": yes()}))
                await asyncio.sleep(number * 0.0002)  # so that the second comes at every moment of the first
                second = two.resume(run_id, {"p1": yes()})
                await asyncio.gather(first, second, return_exceptions=True)
    await check_completed(url, effects, run_ids)


async def check_completed(url: str, effects: Effects, run_ids: list[str]) -> None:
    assert sorted(effects.lines) == sorted([f"paid {number}" for number in range(len(run_ids))])
    async with Runtime.open(url, recover=False) as reader:
        for run_id in run_ids:
            result = await reader.result(run_id)
            assert (result.status, result.error) == (RunStatus.COMPLETED, None)
            assert ends_of(await whole_log(reader, run_id)) == {run_id: ["completed"]}


pytestmark = pytest.mark.timeout(90)
