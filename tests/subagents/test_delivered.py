"""`agent_send` to a sub-agent that works in the background: it reads the message on its way, and nobody waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, HarnessAgent, RunStatus, Runtime, tool
from retinue.testing import ScriptedModel, call, say


@pytest.mark.parametrize("place", ["memory:", "sqlite:///{}/app.db"])
async def test_it_is_delivered_and_the_answer_of_the_task_heeds_it(place: str, tmp_path: Path) -> None:
    begun, gate, told = asyncio.Event(), asyncio.Event(), list[str]()

    @tool
    async def work() -> str:
        """Work."""
        begun.set()
        await gate.wait()
        return "worked"

    def worker(request: Any) -> Any:
        heard = [message.text for message in request.messages if message.role == "user"]
        return say(f"heard {heard}") if request.messages[-1].role != "user" or len(heard) > 1 else call("work")

    async def boss(request: Any) -> Any:
        answers = [message.text for message in request.messages if message.role == "tool"]
        if not answers:
            return call("agent_spawn", {"agent_id": "worker", "task": "one", "timeout_seconds": 0}, id="c1")
        last = answers[-1]
        if "status: accepted" in last:
            await begun.wait()
            key = last.splitlines()[0].removeprefix("agent_key: ")
            return call("agent_send", {"agent_key": key, "message": "two"}, id="c2")
        told.append(last)
        if "delivered" in last:
            gate.set()
            task_id = next(
                line.removeprefix("task_id: ")
                for message in request.messages
                for line in message.text.splitlines()
                if line.startswith("task_id: ")
            )
            return call("task_output", {"task_id": task_id}, id="c3")
        return say("done")

    (tmp_path / "ws").mkdir()
    team = HarnessAgent(
        "boss",
        ScriptedModel(boss),
        subagents=[Agent("worker", ScriptedModel(worker), tools=[work])],
        workspace=tmp_path / "ws",
        general_purpose=False,
    )
    async with Runtime.open(place.format(tmp_path), [team]) as runtime:
        result = await runtime.run("boss", "go")
        assert result.status is RunStatus.COMPLETED
    assert told[0].splitlines()[1:] == ["status: delivered"]
    assert "heard ['one', 'two']" in told[1]
