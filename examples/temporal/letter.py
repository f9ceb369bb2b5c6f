"""Agents as steps of a Temporal workflow: a writer drafts a letter, a human approves that it is sent.

pip install ".[temporal]"
temporal server start-dev &
python examples/temporal/letter.py localhost:7233
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from retinue import Agent, Permissions, Runtime, tool
    from retinue.temporal import agent_activities
    from retinue.testing import ScriptedModel, call, say

QUEUE = "letters"


@tool
def send(text: str) -> str:
    """Send a letter."""
    return f"sent: {text}"


writer = Agent("writer", ScriptedModel([say("Dear all, the office is closed on Friday.")]))
clerk = Agent(
    "clerk",
    ScriptedModel([call("send", {"text": "the letter"}, id="send_1"), say("It is on its way.")]),
    tools=[send],
    plugins=[Permissions(ask=["send"])],
)


@workflow.defn
class Letter:
    """Drafts a letter and sends it once somebody agrees."""

    def __init__(self) -> None:
        self.agreed: bool | None = None

    @workflow.signal
    def agree(self, yes: bool) -> None:
        self.agreed = yes

    @workflow.run
    async def run(self, topic: str) -> list[str]:
        draft = await step("run_agent", {"agent": "writer", "input": topic})
        sent = await step("run_agent", {"agent": "clerk", "input": draft["response"]})
        if sent["questions"]:  # the run waits; it needs no worker meanwhile
            await workflow.wait_condition(lambda: self.agreed is not None)
            action = "approve" if self.agreed else "reject"
            decisions = {call_id: {"action": action} for call_id in sent["questions"]}
            sent = await step("answer_agent", {"run_id": sent["run_id"], "decisions": decisions})
        return [draft["response"], sent["response"]]


async def step(name: str, order: dict[str, Any]) -> dict[str, Any]:
    """Run or answer an agent. Temporal tries again elsewhere if the worker is silent for 30 s."""
    return await workflow.execute_activity(
        name, order, start_to_close_timeout=timedelta(hours=1), heartbeat_timeout=timedelta(seconds=30)
    )


async def main(address: str) -> None:
    client = await Client.connect(address)
    # With Runtime.open("postgresql://…") a retry continues the run where the lost worker left it.
    async with Runtime([writer, clerk]) as runtime:
        async with Worker(client, task_queue=QUEUE, workflows=[Letter], activities=agent_activities(runtime)):
            letter = await client.start_workflow(Letter.run, "Friday", id="letter", task_queue=QUEUE)
            await letter.signal(Letter.agree, True)
            print("\n".join(await letter.result()))
    await asyncio.sleep(0.5)  # the SDK may abort if the process ends while it still closes its connections


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
