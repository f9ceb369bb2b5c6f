"""What hooks did before kill -9 stays done, and what they asked for stays asked for."""

from __future__ import annotations

import pytest

from retinue import RunStatus

from . import hooked
from .scene import Spot, died, same, undisturbed


@pytest.mark.parametrize(
    ("point", "again"),
    [
        ("look:a", {"look a", "before_tool c1"}),
        ("m:1", {"m:1"}),
        ("m:2", {"m:2"}),
        ("m:3", {"m:3"}),
        ("hook:step_start 1", {"step_start 1"}),
        ("hook:before_inference 2", {"before_inference 2"}),
        ("hook:after_inference 2", {"after_inference 2"}),
        ("hook:before_tool c1", {"before_tool c1"}),
        ("hook:step_end 1", {"step_end 1"}),
        ("hook:run_end 3", {"run_end 3"}),
    ],
)
async def test_hooks_in_every_phase(spot: Spot, other: Spot, point: str, again: set[str]) -> None:
    played = await died(spot, hooked.everything, point)
    plain = await undisturbed(other, hooked.everything)
    same(plain, played)
    # A hook that clashes is run twice in its phase, and its phase again where it had committed nothing.
    assert 0 <= played.done.pop("rename too") - plain.done.pop("rename too") <= 2
    assert 0 <= played.done.pop("rename") - plain.done.pop("rename") <= 1
    assert {what for what, count in played.done.items() if count != plain.done[what]} == again
    assert [event.data for event in played.all("custom")] == [event.data for event in plain.all("custom")]
    deltas = [(event.revision, event.delta, event.call_id) for event in played.all("state_delta")]
    assert deltas == [(event.revision, event.delta, event.call_id) for event in plain.all("state_delta")]


async def test_a_call_is_interrupted_until_its_hooks_are_done(spot: Spot) -> None:
    """The end of a call and what its hooks change are one row: before it, nobody knows what came of the call."""
    played = await died(spot, hooked.everything, "hook:after_tool c2")
    assert played.calls() == {"c1": "succeeded", "c2": "failed"}
    assert played.done["work b"] == 1
    assert played.result.status is RunStatus.COMPLETED


async def test_state_that_never_leaves_the_run_is_restored(spot: Spot) -> None:
    played = await died(spot, hooked.everything, "m:3")
    assert played.result.state.extensions["hooked.name"].endswith("run_end")
    assert "hooked.count" not in played.result.state.extensions
    assert {count for what, count in played.done.items() if what.startswith("mail")} == {1}
    assert played.done["bump"] == 3


@pytest.mark.parametrize("point", ["m:2", "look:seen", "m:3", "look:last"])
async def test_calls_that_hooks_intercepted(spot: Spot, other: Spot, point: str) -> None:
    played = await died(spot, hooked.gated, point)
    same(await undisturbed(other, hooked.gated), played, ordered=False)
    assert played.calls() == {
        "c1": "failed",
        "c2": "succeeded",
        "c3": "succeeded",
        "c4": "failed",
        "c5": "succeeded",
        "c6": "succeeded",
    }
    assert played.result.termination == "limit:enough"
    assert played.result.status is RunStatus.COMPLETED
    assert played.done["work free"] == 1
    assert "work hidden" not in played.done


async def test_who_was_committed_first_is_again(spot: Spot) -> None:
    played = await died(spot, hooked.overtaken, "m:2")
    assert played.calls() == {"c2": "succeeded", "c1": "failed"}
    assert played.result.state.extensions == {"solo.last": "y"}
    texts = {message.tool_call_id: message.text for message in played.result.messages if message.tool_call_id}
    assert texts["c2"] == "marked y"
    assert "solo.last" in texts["c1"]


@pytest.mark.parametrize("point", ["look:b", "m:3"])
async def test_what_failed_is_not_tried_again(spot: Spot, other: Spot, point: str) -> None:
    played = await died(spot, hooked.unsure, point)
    assert played.texts() == (await undisturbed(other, hooked.unsure)).texts()
    assert {count for what, count in played.done.items() if what.startswith("mail")} == {1}
    codes = [event.code for event in played.all("error")]
    assert codes.count("dead_letter") == 3
    assert codes.count("hook_failed") == 3 + (point == "m:3"), "a hook that has committed nothing may run again"


async def test_a_hook_that_was_set_aside_is_again(spot: Spot, other: Spot) -> None:
    played = await died(spot, hooked.signed, "m:2")
    same(await undisturbed(other, hooked.signed), played)
    assert played.calls() == {"c2": "succeeded", "c1": "succeeded"}
    assert played.result.state.extensions == {"hooked.name": " c2 c1"}
