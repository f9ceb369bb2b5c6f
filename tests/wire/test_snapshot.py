"""A snapshot and the events after it are the whole: a page that paints one and follows loses nothing."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from retinue import (
    Agent,
    Message,
    RunStatus,
    Runtime,
    ToolContext,
    tool,
)
from retinue.events import (
    ErrorRaised,
    ReasoningDelta,
    RunFinished,
    RunStarted,
    StepStarted,
    TextDelta,
    ToolCallArgsDelta,
    ToolCallStarted,
)
from retinue.testing import ScriptedModel, call, say, think
from retinue.wire.snapshot import SnapshotTree

from ..effort import share
from ..prefix.generate import make
from ..prefix.scenes import SCENES
from ..prefix.tape import undisturbed


def wire(tree: SnapshotTree) -> Any:
    """Return a snapshot as a client has it."""
    return json.loads(json.dumps(tree.snapshot()))


def check(events: list[Any], places: int | None = None) -> int:
    """Check that each snapshot, with the events after it, comes to the snapshot of the end. Return how many were checked."""
    last = wire(SnapshotTree(events))
    step = 1 if places is None else max(1, len(events) // places)
    for k in range(1, len(events), step):
        restored = SnapshotTree.of(wire(SnapshotTree(events[:k])))
        for event in events[k:]:
            restored(event)
        assert wire(restored) == last, f"after {k} of {len(events)} events ({events[k - 1].kind})"
    return len(range(1, len(events), step))


@pytest.mark.parametrize("name", SCENES)
async def test_a_snapshot_and_the_rest_are_the_whole(name: str) -> None:
    scene = SCENES[name]
    end = await undisturbed(scene.plan, scene.limits)
    check(end.events, share(10_000, 25))


async def test_a_snapshot_and_the_rest_are_the_whole_in_random_programs() -> None:
    for seed in range(share(100, 5)):
        scene = make(Random(seed))
        end = await undisturbed(scene.plan, scene.limits)
        assert check(end.events, share(10_000, 25))


async def test_streamed_output_of_a_call_is_shown_while_it_runs_alone() -> None:
    """Its child's text is the child's own; what came before the child, and what comes after its end, is no output."""

    @tool
    async def work(ctx: ToolContext) -> str:
        """Work."""
        ctx.stream_output("looking ")
        ctx.stream_output("around")
        await ctx.run_child("helper", "Help.")
        ctx.stream_output("a word too late")
        return "done"

    model = ScriptedModel([[think("so "), call("work", id="c1")], say("All done.", chunks=["All ", "done."])])
    agents = [Agent("boss", model, tools=[work]), Agent("helper", ScriptedModel([say("Here.")]))]
    run = Runtime(agents).stream("boss", "Go.")
    events = [event async for event in run]
    shown: list[str] = []
    for k in range(1, len(events) + 1):
        output = wire(SnapshotTree(events[:k]))["run"]["calls"]
        shown += [one["output"] for one in output if not shown or one["output"] != shown[-1]]
    assert shown == ["", "looking ", "looking around", ""]
    assert check(events) == len(events) - 1
    assert wire(SnapshotTree(events))["run"]["open_message"] is None


async def test_the_answer_in_progress_is_whole_in_a_snapshot() -> None:
    """Text, reasoning and the arguments that are still coming; a stopped answer stays for people to read."""
    base: dict[str, Any] = {"run_id": "r", "agent": "boss"}
    events: list[Any] = [
        RunStarted(**base, seq=1, thread_id="t", messages=(Message.user("Go."),)),
        StepStarted(**base, seq=2, step=1),
        ReasoningDelta(**base, seq=3, delta="why ", message_id="m1"),
        TextDelta(**base, seq=4, delta="x" * 500, message_id="m1"),
        TextDelta(**base, seq=5, delta=" end", message_id="m1"),
        ToolCallStarted(**base, seq=6, call_id="c1", tool_name="work", message_id="m1"),
        ToolCallArgsDelta(**base, seq=7, call_id="c1", delta='{"a":'),
    ]
    run = wire(SnapshotTree(events))["run"]
    assert run["open_message"] == {
        "id": "m1",
        "text": "x" * 500 + " end",
        "reasoning": "why ",
        "calls": {"c1": '{"a":'},
    }
    assert run["tail"] == "x" * 396 + " end"
    dropped = wire(SnapshotTree([*events, ErrorRaised(**base, seq=8, message="gone", dropped_message_id="m1")]))["run"]
    assert (dropped["open_message"], dropped["calls"], dropped["tail"]) == (None, [], "")
    ended = RunFinished(**base, seq=8, status=RunStatus.CANCELLED, termination="cancelled")
    assert wire(SnapshotTree([*events, ended]))["run"]["open_message"]["text"].endswith(" end")


def test_a_notice_has_no_place_in_the_log() -> None:
    tree = SnapshotTree([RunStarted(run_id="r", agent="a", seq=4, thread_id="t")])
    tree(ErrorRaised(run_id="r", agent="a", message="the queue is not served", code="queue_unserved"))
    assert tree.seq == 4
