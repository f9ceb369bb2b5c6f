"""Runs that were left by a dead process, and what becomes of them."""

from __future__ import annotations

import asyncio
import logging

import pytest

from retinue import RunStatus, Runtime
from retinue.testing import ScriptError

from . import solo
from .scene import Spot, check, died, kill, name_of, recover, recovering, seen


async def test_a_state_key_that_is_gone_fails_with_the_reason(spot: Spot) -> None:
    kill(spot, name_of(solo.plain), "m:2")
    played = await recover(spot, solo.forgetful)
    assert played.result.status is RunStatus.FAILED
    assert played.result.error is not None
    assert "solo.seen" in played.result.error
    assert played.calls() == {"c1": "succeeded"}
    async with recovering(spot, solo.plain) as runtime:
        assert (await runtime.run("solo", "more", thread_id="thread-1")).status is RunStatus.COMPLETED


async def test_a_run_of_somebody_else_is_left_alone(spot: Spot, caplog: pytest.LogCaptureFixture) -> None:
    kill(spot, name_of(solo.plain), "work:b")
    with caplog.at_level(logging.WARNING):
        async with recovering(spot, solo.nobody) as runtime:
            for _ in range(3):
                assert await runtime.recover() == []
            assert [run.status for run in await runtime.store.list_runs()] == ["running"]
    assert [record.message for record in caplog.records if "no agent is named" in record.message] != []
    assert len([record for record in caplog.records if "no agent is named" in record.message]) == 1
    played = await recover(spot, solo.plain)
    assert played.result.status is RunStatus.COMPLETED
    assert played.done["work b"] == 1


async def test_a_run_that_breaks_down_leaves_its_thread(spot: Spot) -> None:
    kill(spot, name_of(solo.plain), "m:2")
    async with recovering(spot, solo.broken) as runtime:
        run_id = (spot.folder / "run_id").read_text()
        with pytest.raises(ScriptError):
            await runtime.result(run_id)
        events = [event async for event in runtime.events(run_id)]
    check(events)
    async with recovering(spot, solo.plain) as runtime:
        assert (await runtime.result(run_id)).status is RunStatus.FAILED
        assert (await runtime.run("solo", "more", thread_id="thread-1")).status is RunStatus.COMPLETED


async def test_one_that_cannot_go_on_does_not_stand_in_the_way(spot: Spot) -> None:
    kill(spot, name_of(solo.older), "work:b")
    first = (spot.folder / "run_id").read_text()
    (spot.folder / "run_id").unlink()
    kill(spot, name_of(solo.elsewhere), "work:b")
    async with Runtime.open(spot.url, solo.plain(spot).agents) as runtime:
        failed = await runtime.result(first)
        assert (failed.status, "solo.gone" in str(failed.error)) == (RunStatus.FAILED, True)
        assert (await seen(spot, runtime)).result.status is RunStatus.COMPLETED


async def test_a_run_that_was_cancelled_is_not_gone_on_with(spot: Spot) -> None:
    played = await died(spot, solo.unwanted, "stopping")
    assert played.result.status is RunStatus.CANCELLED
    assert played.result.error == "not wanted"
    assert [text for _, text in played.texts()][:4] == ["go", "", "looked a", "I linger. "]
    assert played.calls() == {"c1": "succeeded", "c2": "cancelled"}
    assert [message.text for message in played.thread.messages] == [text for _, text in played.texts()]
    assert played.done.get("m:3") is None


async def test_a_crowd_is_recovered_at_once(spot: Spot) -> None:
    kill(spot, name_of(solo.many), "crowd")
    run_ids = (spot.folder / "run_ids").read_text().split()
    assert len(run_ids) == solo.CROWD
    async with recovering(spot, solo.many) as runtime:
        results = await asyncio.gather(*[runtime.result(run_id) for run_id in run_ids])
        assert {result.response for result in results} == {"It is done."}
        for run_id in run_ids[::20]:
            check([event async for event in runtime.events(run_id)])


@pytest.mark.parametrize("point", ["look:a", "m:2", "look:b"])
async def test_runs_that_wait_for_a_thread_come_in_their_order(spot: Spot, point: str) -> None:
    kill(spot, name_of(solo.queued), point)
    async with recovering(spot, solo.queued) as runtime:
        later = await asyncio.wait_for(runtime.result((spot.folder / "later_id").read_text()), 90)
        first = await runtime.result((spot.folder / "run_id").read_text())
        thread = await runtime.store.load_thread("thread-1")
    assert (first.response, later.response) == ("First.", "Second.")
    assert thread is not None
    said = [message.text for message in thread.messages]
    assert said == ["go", "", "looked a", "First.", "again", "", "looked b", "Second."]
    assert thread.state.extensions == {"solo.seen": ["a", "b"]}
