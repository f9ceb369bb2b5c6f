"""R19: what is stored says everything: that a background child began, and an output as its type."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, HarnessAgent, RunStatus, Runtime
from retinue.testing import ScriptedModel, call, say

from .support import ends_of, whole_log


@dataclass
class City:
    name: str
    people: int
    rivers: list[str] = field(default_factory=list)


TEXT = '{"name": "Rome", "people": 2700000, "rivers": ["Tiber"]}'
ROME = City("Rome", 2_700_000, ["Tiber"])


def geographer() -> Agent:
    return Agent("geographer", ScriptedModel(lambda request: say(TEXT)), output=City)


async def test_a_stored_output_is_of_its_type(url: str) -> None:
    async with Runtime.open(url, [geographer()]) as first:
        result = await first.run("geographer", "Rome?", thread_id="t")
        assert result.output == ROME
    async with Runtime.open(url, [geographer()]) as second:
        stored = await second.result(result.run_id)
        assert stored.output == ROME
        assert stored == result


async def test_the_output_of_a_run_of_another_node_is_of_its_type(url: str) -> None:
    async with Runtime.open(url, [geographer()]) as first, Runtime.open(url, [geographer()]) as second:
        run = first.stream("geographer", "Rome?", thread_id="t")
        await run.result()
        assert (await second.result(run.run_id)).output == ROME


async def test_who_does_not_know_the_agent_reads_the_output_as_json(url: str) -> None:
    async with Runtime.open(url, [geographer()]) as first:
        run_id = (await first.run("geographer", "Rome?", thread_id="t")).run_id
    async with Runtime.open(url) as reader:
        output = (await reader.result(run_id)).output
        assert output == {"name": "Rome", "people": 2_700_000, "rivers": ["Tiber"]}


def boss(folder: Path, count: int) -> Agent:
    """Starts background children and ends at once."""

    def lead(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("started")
        spawn = {"agent_id": "worker", "task": "work", "timeout_seconds": 0}
        return [call("agent_spawn", spawn, id=f"c{number}") for number in range(count)]

    worker = Agent("worker", ScriptedModel(lambda request: say("worked")))
    return HarnessAgent("boss", ScriptedModel(lead), subagents=[worker], workspace=folder, general_purpose=False)


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_background_children_that_begin_late_are_announced(
    request: pytest.FixtureRequest, sqlite_url: str, tmp_path: Path, kind: str
) -> None:
    urls = {"memory": "memory:", "sqlite": sqlite_url}
    url = urls.get(kind) or request.getfixturevalue("postgres_url")
    async with Runtime.open(url, [boss(tmp_path / "ws", 4)]) as runtime, asyncio.timeout(90):
        result = await runtime.run("boss", "go", thread_id="t")
        assert (result.status, result.response) == (RunStatus.COMPLETED, "started")
        events = await whole_log(runtime, result.run_id)
    children = {event.run_id for event in events if event.kind == "run_started"} - {result.run_id}
    assert len(children) == 4
    assert ends_of(events) == {result.run_id: ["completed"], **dict.fromkeys(children, ["completed"])}
    started = [event.child_run_id for event in events if event.kind == "child_started"]
    assert sorted(started) == sorted(children)
    first = {run_id: min(event.seq for event in events if event.run_id == run_id) for run_id in children}
    announced = {event.child_run_id: event.seq for event in events if event.kind == "child_started"}
    assert all(announced[run_id] < first[run_id] for run_id in children)
    assert [event.kind for event in events if event.run_id == result.run_id][-1] == "run_finished"
