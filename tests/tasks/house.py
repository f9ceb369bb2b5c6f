"""A boss that is woken by its tasks, which end when the gates of their names are opened."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from typing import Any

from retinue import Agent, HarnessAgent, Runtime, ToolContext, ToolResult, tool
from retinue.core.stores import RunRecord
from retinue.tasks import TaskRecord, TaskScope
from retinue.testing import ScriptedModel, call, say

from ..waiting import until

NEWS = "<task-notification>"


@tool
async def ask(ctx: ToolContext) -> ToolResult | str:
    """Ask a human."""
    return ToolResult.suspended("well?") if ctx.resume_input is None else f"said {ctx.resume_input}"


class House:
    """The boss does what its last message says:

    `do a b` starts tasks, `think` waits for the gate "thought", `look` waits for the gate "looked" and makes another step,
    `ask` asks a human. To news it answers with the tasks that they are of. The clerk does the same, on the same threads.
    """

    def __init__(self, **boss: Any) -> None:
        self.gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.thinking = asyncio.Event()
        given: dict[str, Any] = {"wake_on_task_end": True, "general_purpose": False, **boss}
        worker = Agent("worker", ScriptedModel(self._work), description="Works.")
        self.boss = HarnessAgent("boss", ScriptedModel(self._turn), tools=[ask], subagents=[worker], **given)
        self.clerk = Agent("clerk", ScriptedModel(self._turn), tools=[ask])
        self.agents = [self.boss, self.clerk]

    async def _turn(self, request: Any) -> Any:
        last = request.messages[-1 - request.transient]  # before the summary of the tasks
        if last.role == "tool":
            return say("begun")
        if last.text.startswith(NEWS):
            return say(f"told of {told_of(last.text)}")
        verb, *names = last.text.split()
        if verb == "do":
            given = [{"agent_id": "worker", "task": name, "timeout_seconds": 0} for name in names]
            return [call("agent_spawn", one, id=f"spawn_{one['task']}") for one in given]
        if verb in ("think", "look"):
            self.thinking.set()
            await self.gates["thought" if verb == "think" else "looked"].wait()
        if verb == "look":
            return call("agent_list")
        return call("ask", id="ask_1") if verb == "ask" else say("nothing new")

    async def _work(self, request: Any) -> Any:
        name = request.messages[-1].text
        await self.gates[name].wait()
        if name.startswith("bad"):
            raise RuntimeError(f"result of {name}")
        return say(f"result of {name}")

    async def tasks(self) -> dict[str, TaskRecord]:
        """The tasks of thread t, by what they do."""
        assert self.boss.task_repository is not None
        return {record.input: record for record in await self.boss.task_repository.list(TaskScope("boss", "t"))}

    async def end(self, *names: str) -> None:
        """Let tasks end, and wait until their records say so."""
        for name in names:
            self.gates[name].set()

        async def have_ended() -> bool:
            records = await self.tasks()
            return all(records[name].status.is_terminal for name in names)

        await until(have_ended)


def told_of(text: str) -> str:
    """The tasks whose results are in a text."""
    return " ".join(sorted(set(re.findall(r"result of (\w+)", text))))


async def runs_of(runtime: Runtime, thread_id: str = "t") -> list[RunRecord]:
    """The runs of a thread, oldest first."""
    return (await runtime.store.list_runs(thread_id))[::-1]


async def answers(runtime: Runtime, number: int, thread_id: str = "t") -> list[str | None]:
    """What the runs of a thread answered, once so many have ended."""

    async def have_ended() -> bool:
        return sum(record.has_ended for record in await runs_of(runtime, thread_id)) >= number

    await until(have_ended)
    return [record.result and record.result.response for record in await runs_of(runtime, thread_id)]
