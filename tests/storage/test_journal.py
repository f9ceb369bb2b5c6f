"""A recorded run, told again: the loop makes the same decisions without model or tools."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue import (
    Agent,
    JournalMismatch,
    Limits,
    MemoryJournal,
    Plugin,
    Registrar,
    Run,
    Runtime,
    StateKey,
    ToolOutput,
    Usage,
    tool,
)
from retinue.testing import ScriptedModel, call, say

order: StateKey[list[str], str] = StateKey(
    "order", list[str], update=str, reduce=lambda a, b: [*a, b], merge="commutative", persistent=True
)


class Order(Plugin):
    name = "order"

    def register(self, r: Registrar) -> None:
        r.key(order)


def make(ran: list[str]) -> Any:
    @tool
    async def work(name: str, delay: float = 0.0, fails: bool = False) -> ToolOutput:
        """Work."""
        ran.append(name)
        await asyncio.sleep(delay)
        if fails:
            raise RuntimeError(name)
        return ToolOutput(f"did {name}", update={order: name})

    return work


TELLING = ("tool_call_finished", "state_delta", "inference_finished", "step_started", "run_finished")


async def decisions(run: Run) -> list[Any]:
    """What the loop did, without the times at which it did it, and without who was ready when."""
    kept = [event async for event in run if event.kind in TELLING]
    return [(e.kind, e.run_id, getattr(e, "call_id", None), getattr(e, "message", None)) for e in kept]


async def record(script: list[Any], limits: Limits | None = None) -> tuple[MemoryJournal, list[Any], Any]:
    model = ScriptedModel(script)
    run = Runtime([Agent("a", model, "Be brief.", [make([])], [Order()])]).stream("a", "go", limits=limits)
    told = await decisions(run)
    journal = run.journal
    assert isinstance(journal, MemoryJournal)
    return journal, told, await run.result()


async def replay(journal: MemoryJournal, limits: Limits | None = None, input: str = "go") -> tuple[list[Any], Any]:
    ran: list[str] = []
    retold = journal.replay()
    agent = Agent("a", ScriptedModel([]), "Be brief.", [make(ran)], [Order()])
    run = Runtime([agent], make_journal=lambda: retold).stream("a", input, limits=limits)
    told = await decisions(run)
    result = await run.result()
    retold.assert_told()
    assert ran == []
    return told, result


async def test_a_replayed_run_decides_the_same_and_does_nothing() -> None:
    script = [
        [call("work", {"name": "slow", "delay": 0.02}, id="c:1"), call("work", {"name": "fast"}, id="c2")],
        call("work", {"name": "bad", "fails": True}, id="c3"),
        [call("nowhere", {}, id="c4"), call("work", "{", id="c5")],
        say("done", usage=Usage(requests=1, input_tokens=5, output_tokens=2)),
    ]
    journal, told, result = await record(script)
    assert result.state[order] == ["fast", "slow"]
    assert await replay(journal) == (told, result)


async def test_limits_are_decided_on_recorded_time() -> None:
    limits = Limits(seconds=0.05)
    script = [call("work", {"name": "a", "delay": 0.06}), say("late")]
    journal, told, result = await record(script, limits)
    assert result.response == "late"
    assert [m.text.partition("]")[0] for m in result.messages if m.role == "user"] == ["go", "[limit:seconds"]
    assert await replay(journal, limits) == (told, result)


async def test_a_different_question_is_noticed() -> None:
    journal, _, _ = await record([call("work", {"name": "a"}, id="c1"), say("done")])
    agent = Agent("a", ScriptedModel([]), "Be brief.", [make([])], [Order()])
    with pytest.raises(JournalMismatch, match="replay diverged at model:1"):
        await Runtime([agent], make_journal=journal.replay).run("a", [])
    impatient = Agent("a", ScriptedModel([]), "Be brief.", [make([])], [Order()], max_steps=1)
    retold = journal.replay()
    await Runtime([impatient], make_journal=lambda: retold).run("a", "go")
    with pytest.raises(JournalMismatch, match="replay diverged at model:2"):
        retold.assert_told()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.002]), st.booleans()), min_size=1, max_size=4), max_size=3
    ),
    st.integers(1, 3),
)
def test_any_run_can_be_told_again(steps: list[list[tuple[float, bool]]], parallel: int) -> None:
    script: list[Any] = [
        [
            call("work", {"name": f"{i}.{j}", "delay": delay, "fails": fails}, id=f"c{i}-{j}")
            for j, (delay, fails) in enumerate(step)
        ]
        for i, step in enumerate(steps)
    ]

    async def main() -> None:
        limits = Limits(parallel=parallel)
        journal, told, result = await record([*script, say("done")], limits)
        assert await replay(journal, limits) == (told, result)

    asyncio.run(main())


async def test_a_run_with_children_is_told_again_without_them() -> None:
    answers: list[str] = []

    def reply(request: Any) -> Any:
        answers.append(request.messages[-1].text)
        return say("report")

    def boss(model: ScriptedModel) -> Agent:
        return Agent("boss", model, subagents=[Agent("worker", ScriptedModel(reply))])

    calls = [call("task", {"subagent_type": "worker", "description": str(n)}, id=f"c{n}") for n in range(3)]
    run = Runtime([boss(ScriptedModel([calls, say("done")]))]).stream("boss", "go")
    result = await run.result()
    journal = run.journal
    assert isinstance(journal, MemoryJournal)
    assert sorted(e.key for e in journal.entries if e.kind == "child") == [f"child:tools:c{n}:0" for n in range(3)]
    retold = journal.replay()
    again = await Runtime([boss(ScriptedModel([]))], make_journal=lambda: retold).run("boss", "go")
    retold.assert_told()
    assert (again.response, again.messages) == (result.response, result.messages)
    assert sorted(answers) == ["0", "1", "2"]
