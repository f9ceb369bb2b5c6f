"""Agents with children go on after kill -9, and each child in its place."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from retinue import RunStatus, Runtime

from ..waiting import until
from . import family
from .scene import Play, Spot, died, kill, name_of, recover, recovering, same, seen, undisturbed


@pytest.mark.parametrize(
    ("play", "point"),
    [
        (family.one_task, "look:A2"),
        (family.one_task, "look:B1"),
        (family.one_task, "helper:3"),
        (family.one_task, "boss:2"),
        (family.one_task, "boss:3"),
        (family.as_tool, "look:A2"),
        (family.as_tool, "boss:2"),
        (family.spawned, "look:A2"),
        (family.spawned, "boss:2"),
        (family.tasks, "look:B2"),
        (family.tasks, "boss:2"),
        (family.narrow, "look:C2"),
        (family.narrow, "boss:2"),
        (family.by_hand_again, "look:A2"),
        (family.by_hand_again, "delegated"),
        (family.by_hand_once, "boss:2"),
        (family.overtaking, "boss:2"),
        (family.shuffled, "look:B2"),
        (family.shuffled, "delegated"),
        (family.several, "look:B2"),
        (family.several, "boss:2"),
        (family.typed, "look:A1"),
        (family.typed, "counted"),
        (family.typed, "boss:2"),
        (family.few_children, "boss:2"),
        (family.few_children, "boss:4"),
        (family.few_tokens, "boss:2"),
        (family.few_tokens, "look:21"),
        (family.few_tokens, "boss:3"),
        (family.few_steps, "look:22"),
        (family.few_steps, "boss:3"),
    ],
)
async def test_nobody_can_tell_that_it_died(spot: Spot, other: Spot, play: Play, point: str) -> None:
    played = await died(spot, play, point)
    plain = await undisturbed(other, play)
    parallel = play in (family.tasks, family.narrow, family.several, family.spawned, family.shuffled)
    same(plain, played, ordered=not parallel)
    # What the process died in is done again, as is what ran beside it; nothing else is.
    assert set(played.done) == set(plain.done)
    again = {what: count - plain.done[what] for what, count in played.done.items() if count != plain.done[what]}
    again.pop("delegate", None)
    assert set(again.values()) <= ({1, 2} if parallel else {1}), again
    assert len(again) == 1 or (parallel and len(again) == 2) or point in ("delegated", "counted"), again


async def test_a_call_by_hand_that_may_not_run_twice_ends_its_child(spot: Spot) -> None:
    played = await died(spot, family.by_hand_once, "look:A2")
    ns = ("tools:tA",)
    assert played.kinds(ns)[-3:] == ["tool_call_finished", "step_finished", "run_finished"]
    assert played.of(ns)[-1].status is RunStatus.CANCELLED  # type: ignore[attr-defined]
    assert [event.status for event in played.all("child_finished")] == [RunStatus.CANCELLED]
    assert played.calls() == {"kA1": "succeeded", "kA2": "cancelled", "tA": "failed"}
    assert played.result.status is RunStatus.COMPLETED
    assert played.texts()[2][1].startswith("interrupted, outcome unknown")
    assert played.done == {
        "boss:1": 1,
        "delegate": 1,
        "helper:1": 1,
        "look A1": 1,
        "helper:2": 1,
        "look A2": 1,
        "boss:2": 1,
    }
    assert played.result.usage.input_tokens == 300, "what the child used was used"


@pytest.mark.parametrize(
    "point", ["look:A1", "helper:1:1", "helper:2", "helper:2:1", "look:A2", "helper:3:1", "streamed"]
)
async def test_what_a_child_streamed_is_whole(spot: Spot, point: str) -> None:
    played = await died(spot, family.streamed, point)
    assert played.texts()[2][1] == "First. Second. Third. in 3"
    text = "".join([event.delta for event in played.all("text_delta", ("tools:tA",))])
    if point.count(":") < 2:
        assert text == "First. Second. Third."
        shown = [event.delta for event in played.all("tool_call_stream_delta")]
        assert "".join([delta for delta in shown if "interrupted" not in delta]) == text


async def test_a_child_has_what_is_left_of_its_time(spot: Spot) -> None:
    played = await died(spot, family.in_time, "rest:0")
    assert played.texts()[2][1] == RunStatus.TIMEOUT
    assert played.result.response == "All done."


async def test_two_deaths_below_each_other(spot: Spot, other: Spot) -> None:
    played = await died(spot, family.one_task, "look:A2", "helper:3", "look:B2", "boss:3")
    same(await undisturbed(other, family.one_task), played)


async def test_a_task_goes_on_when_its_run_has_ended(spot: Spot) -> None:
    kill(spot, name_of(family.background), "look:A2")
    async with recovering(spot, family.background) as runtime:
        run_id = (spot.folder / "run_id").read_text()
        assert (await runtime.store.load_run(run_id)).status == "completed"  # type: ignore[union-attr]
        # Its thread is for others, also while the task goes on.
        assert (await runtime.run("boss", "more", thread_id="thread-1")).response == "Still there."
        played = await asyncio.wait_for(seen(spot, runtime), 90)
        assert [run.status for run in await runtime.store.list_runs(status="completed")] == ["completed"] * 2
    assert [event.status for event in played.all("task_updated")][-1] == "COMPLETED"
    assert played.done["look A2"] == 2
    assert played.done["look A1"] == 1
    assert played.result.response == "It is under way."
    assert played.kinds().count("run_finished") == 1


async def test_a_follower_in_another_process_sees_no_hole(spot: Spot) -> None:
    kill(spot, name_of(family.one_task), "look:B1")
    run_id = (spot.folder / "run_id").read_text()
    seen_there: list[Any] = []

    async def follow(runtime: Runtime) -> None:
        async for event in runtime.events(run_id):
            seen_there.append(event)

    async with Runtime.open(spot.url, recover=False) as onlooker:
        following = asyncio.create_task(follow(onlooker))
        stored: Any = onlooker.store
        before = len((await stored.read_events(run_id, 0, 1_000))[0])
        assert before > 20
        await until(lambda: len(seen_there) == before)
        told: list[Any] = []
        played = await recover(spot, family.one_task, sinks=[told.append])
        await asyncio.wait_for(following, 90)
    assert [event.seq for event in seen_there] == list(range(1, len(played.events) + 1))
    assert [event.kind for event in seen_there] == [event.kind for event in played.events]
    assert [event.seq for event in told] == list(range(before + 1, len(played.events) + 1))


@pytest.mark.parametrize("point", ["ask:A", "look:B", "helper:3", "boss:2"])
async def test_a_tree_that_had_its_answers(spot: Spot, point: str) -> None:
    kill(spot, name_of(family.patient), point)
    run_id = (spot.folder / "run_id").read_text()
    async with recovering(spot, family.patient) as runtime:
        result = await runtime.result(run_id)
        events: list[Any] = [event async for event in runtime.events(run_id)]
    assert (result.status, result.response) == (RunStatus.COMPLETED, "All done.")
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for child in {event.run_id for event in events}:
        kinds = [event.kind for event in events if event.run_id == child]
        assert kinds[0] == "run_started"
        assert kinds[-1] == "run_finished"
        assert kinds.count("run_started") == kinds.count("run_finished") == 2
        assert kinds.count("inference_finished") == (2 if child == run_id else 3)
    ended = [event.call_id for event in events if event.kind == "tool_call_finished" and event.status != "suspended"]
    assert sorted(ended) == ["kA", "kB", "lA", "lB", "tA", "tB", "tC"]
    texts = {message.tool_call_id: message.text for message in result.messages if message.tool_call_id}
    assert texts["tC"].startswith("interrupted" if point == "ask:C" else "C: yes")
    assert (texts["tA"], texts["tB"]) == ("A is done", "B is done")
    assert {count for what, count in spot.done().items() if what.startswith("ask")} == {2}
    assert result.usage.input_tokens == 300


async def test_a_child_that_nobody_asks_for_again_ends(spot: Spot) -> None:
    played = await died(spot, family.fickle, "look:A2")
    assert played.texts()[2][1] == "by myself"
    assert played.of(("tools:tA",))[-1].status is RunStatus.CANCELLED  # type: ignore[attr-defined]
    assert [event.status for event in played.all("child_finished")] == [RunStatus.CANCELLED]
    assert played.calls() == {"kA1": "succeeded", "kA2": "cancelled", "tA": "succeeded"}
