"""R10: nothing starts before what it depends on is stored, and messages arrive in the order of their calls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, HarnessAgent, RunStatus, Runtime
from retinue.testing import ScriptedModel, call, say

from .support import Effects, ends_of, node, whole_log
from .teams import lookers


@pytest.mark.parametrize("calls", [1, 2, 3])
async def test_the_answer_of_the_model_is_stored_before_its_calls_start(
    url: str, tmp_path: Path, effects: Effects, calls: int
) -> None:
    """A process dies the moment a tool begins. The next one does not ask the model for that answer again."""
    with node("dies_in_tool", url, tmp_path, calls) as first:
        run_id = (await asyncio.to_thread(first.line)).split()[1]
        await asyncio.to_thread(first.wait)
    assert effects.lines[:2] == ["model 1", "look"]
    async with Runtime.open(url, [lookers(effects, calls)]) as runtime, asyncio.timeout(90):
        result = await runtime.result(run_id)
        assert ends_of(await whole_log(runtime, run_id)) == {run_id: ["completed"]}
    assert result.response == f"looked {calls} times"
    assert [line for line in effects.lines if line.startswith("model")] == ["model 1", "model 2"]


async def test_two_messages_of_one_step_arrive_in_their_order(sqlite_url: str, tmp_path: Path) -> None:
    heard: list[str] = []

    def work(request: Any) -> Any:
        heard.append(request.messages[-1].text)
        return say(f"heard {request.messages[-1].text}")

    def lead(request: Any) -> Any:
        turns = sum(message.role == "assistant" for message in request.messages)
        if turns == 0:
            return call("agent_spawn", {"agent_id": "worker", "label": "w", "task": "zero"}, id="s")
        if turns <= ROUNDS:
            return [
                call("agent_send", {"label": "w", "message": f"{turns}-{number}"}, id=f"m{turns}-{number}")
                for number in range(3)
            ]
        return say("done")

    worker = Agent("worker", ScriptedModel(work))
    boss = HarnessAgent(
        "boss",
        ScriptedModel(lead),
        subagents=[worker],
        workspace=tmp_path / "ws",
        general_purpose=False,
        max_steps=ROUNDS + 2,
    )
    async with Runtime.open(sqlite_url, [boss]) as runtime, asyncio.timeout(90):
        result = await runtime.run("boss", "go", thread_id="t")
    assert result.status is RunStatus.COMPLETED
    assert heard == ["zero", *[f"{turn}-{number}" for turn in range(1, ROUNDS + 1) for number in range(3)]]


ROUNDS = 10
