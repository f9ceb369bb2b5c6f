"""The output of a stored run has its type again."""

from __future__ import annotations

from dataclasses import dataclass, field

from retinue import Agent, Runtime
from retinue.testing import ScriptedModel, say


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
