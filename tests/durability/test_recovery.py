"""One agent goes on after kill -9, wherever it died."""

from __future__ import annotations

import pytest

from retinue import RunStatus, Runtime

from ..waiting import let_others_run
from . import solo
from .scene import Spot, died, kill, name_of, recover, recovering, same, undisturbed

UNKNOWN = "interrupted, outcome unknown"


async def test_a_tool_that_may_not_run_twice_is_interrupted(spot: Spot) -> None:
    played = await died(spot, solo.plain, "work:b")
    assert played.done == {"m:1": 1, "look a": 1, "m:2": 1, "work b": 1, "m:3": 1}
    assert played.calls() == {"c1": "succeeded", "c2": "failed"}
    assert played.result.status is RunStatus.COMPLETED
    assert played.texts()[4][1].startswith(UNKNOWN)
    assert played.result.state.extensions == {"solo.seen": ["a"]}
    step = ["step_started", "text_delta", "tool_call_started", "tool_call_args_delta", "inference_finished"]
    ended = ["tool_call_finished", "step_finished"]
    last = ["step_started", *["text_delta"] * 4, "inference_finished", "step_finished", "run_finished"]
    first = [*step, "tool_call_ready", "state_delta", *ended]
    assert played.kinds() == ["run_started", *first, *step, "tool_call_ready", *ended, *last]


@pytest.mark.parametrize(("point", "again"), [("look:a", "look a"), ("m:1", "m:1"), ("m:2", "m:2"), ("m:3", "m:3")])
async def test_nobody_can_tell_that_it_died(spot: Spot, other: Spot, point: str, again: str) -> None:
    played = await died(spot, solo.plain, point)
    same(await undisturbed(other, solo.plain), played)
    assert played.done == {"m:1": 1, "look a": 1, "m:2": 1, "work b": 1, "m:3": 1, again: 2}


@pytest.mark.parametrize(("chunk", "dropped_calls"), [(2, 0), (4, 1)])
async def test_an_answer_that_streamed_in_begins_anew(spot: Spot, chunk: int, dropped_calls: int) -> None:
    played = await died(spot, solo.streaming, f"m:1:{chunk}")
    [error] = played.all("error")
    deltas = [event.message_id for event in played.all("text_delta")]
    assert (error.code, error.dropped_message_id) == ("interrupted", deltas[0])
    ids = list(dict.fromkeys(deltas))
    assert ids[:2] == [deltas[0], f"{deltas[0]}r1"]
    said = "".join([event.delta for event in played.all("text_delta") if event.message_id == ids[1]])
    assert said == "I will look"
    assert [message.id for message in played.result.messages][1] == ids[1]
    assert [text for _, text in played.texts()] == ["go", "I will look", "looked a", "It is done."]
    assert list(played.calls().values()) == ["cancelled"] * dropped_calls + ["succeeded"]
    assert played.done == {"m:1": 2, "look a": 1, "m:2": 1}


async def test_an_answer_may_be_cut_off_again_and_again(spot: Spot) -> None:
    played = await died(spot, solo.streaming, "m:1:1", "m:1:2", "m:1:4", "m:2:1")
    errors = [error for error in played.all("error") if error.code != "worker_lost"]
    first = played.all("text_delta")[0].message_id
    dropped = [error.dropped_message_id for error in errors]
    assert dropped[:3] == [first, f"{first}r1", f"{first}r2"]
    assert [error.code for error in errors] == ["interrupted"] * 4
    assert [text for _, text in played.texts()] == ["go", "I will look", "looked a", "It is done."]
    assert list(played.calls().values()) == ["cancelled", "succeeded"]


async def test_three_deaths_in_a_row(spot: Spot) -> None:
    played = await died(spot, solo.longer, "look:a", "work:b", "m:4:1")
    assert played.done == {"m:1": 1, "look a": 2, "m:2": 1, "work b": 1, "m:3": 1, "work c": 1, "m:4": 2}
    assert played.calls() == {"c1": "succeeded", "c2": "failed", "c3": "succeeded"}
    assert played.result.response == "Four."
    assert played.result.state.extensions == {"solo.seen": ["a", "c"]}


@pytest.mark.parametrize("point", ["linger", "m:2"])
async def test_the_same_call_wins_a_key(spot: Spot, point: str) -> None:
    played = await died(spot, solo.conflict, point)
    assert played.calls()["c3"] == "succeeded"
    assert [played.calls()["c1"], played.calls()["c2"]] == ["failed", "failed"]
    assert played.result.state.extensions == {"solo.last": "z"}
    assert {key: count for key, count in played.done.items() if key.startswith("mark ")} == {
        "mark x": 1,
        "mark y": 1,
        "mark z": 1,
    }
    by_call = {message.tool_call_id: message.text for message in played.result.messages if message.tool_call_id}
    assert "solo.last" in by_call["c1"]
    assert by_call["c3"] == "marked z"


@pytest.mark.parametrize("point", ["work:b", "look:c", "m:5", "run_end"])
async def test_a_second_run_of_a_thread(spot: Spot, point: str) -> None:
    scene = solo.history(spot)
    async with Runtime.open(spot.url, scene.agents) as runtime:
        await runtime.run("solo", "go", thread_id="thread-1")
    played = await died(spot, solo.history, point)
    worked = "worked b" if point != "work:b" else UNKNOWN
    said = [message.text for message in played.thread.messages]
    assert [text.partition(":")[0] for text in said] == [
        "go", "", "looked a", "First.", "again", "", worked, "", "looked c", "Second."
    ]  # fmt: skip
    seen = ["a", "b", "c"] if point != "work:b" else ["a", "c"]
    assert played.result.state.extensions == {"solo.seen": seen}
    assert played.thread.state.extensions == {"solo.seen": seen}
    assert played.kinds().count("messages_snapshot") == 1
    assert len({message.id for message in played.thread.messages}) == len(played.thread.messages)


@pytest.mark.parametrize("point", ["n:3", "look:b", "n:4"])
async def test_another_agent_had_taken_over(spot: Spot, other: Spot, point: str) -> None:
    played = await died(spot, solo.handed, point)
    same(await undisturbed(other, solo.handed), played)
    assert [event.to_agent for event in played.all("handoff")] == ["second"]
    assert played.of()[-1].agent == "second"


@pytest.mark.parametrize("point", ["look:a", "m:2", "m:3"])
async def test_an_answer_with_a_type(spot: Spot, other: Spot, point: str) -> None:
    played = await died(spot, solo.answering, point)
    assert played.result.output == solo.Answer(42)
    same(await undisturbed(other, solo.answering), played)
    assert [event.code for event in played.all("error") if event.code != "interrupted"] == ["output_invalid"]


@pytest.mark.parametrize("point", ["look:2", "m:3", "m:4"])
async def test_what_was_spent_stays_spent(spot: Spot, other: Spot, point: str) -> None:
    played = await died(spot, solo.limited, point)
    same(await undisturbed(other, solo.limited), played)
    assert played.result.response == "Enough."


async def test_time_that_was_used_stays_used(spot: Spot, other: Spot) -> None:
    played = await died(spot, solo.slow, "m:2")
    same(await undisturbed(other, solo.slow), played)
    assert played.done == {"m:1": 1, "rest": 2, "m:2": 2}
    assert played.result.termination == "limit:seconds"


async def test_a_runtime_that_does_not_recover_leaves_it(spot: Spot) -> None:
    kill(spot, name_of(solo.plain), "m:1")
    async with recovering(spot, solo.plain, recover=False) as runtime:
        await let_others_run()
        assert [run.status for run in await runtime.store.list_runs()] == ["running"]
        assert spot.done() == {"m:1": 1}
    assert (await recover(spot, solo.plain)).result.status is RunStatus.COMPLETED
