"""Work for a sub-agent: awaited, in the background, or awaited until it takes too long and then in the background."""

from __future__ import annotations

import asyncio
import time
from os import urandom
from typing import Literal
from uuid import uuid4

from msgspec import Struct

from ..core.agents import Agent
from ..core.context import CancellationToken, ToolContext
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..tasks.background import Background
from ..tasks.repository import TaskRepository
from ..tasks.service import Waits, Work
from ..tasks.task import TaskRecord, TaskStatus, at
from .catalog import Entry
from .spawned import Spawned, Turns

OnTimeout = Literal["promote", "cancel"]

GRACE = 5.0
"""Seconds a cancelled call waits for its child to stop."""
TIMED_OUT = "timeout"
"""The reason with which a run is cancelled that took too long."""


class Commission(Struct):
    """One message for one sub-agent."""

    entry: Entry
    agent: Agent
    spawned: Spawned
    text: str
    ctx: ToolContext
    run_id: str
    token: CancellationToken
    in_background: bool = False

    @classmethod
    def of(cls, entry: Entry, agent: Agent, spawned: Spawned, text: str, ctx: ToolContext) -> Commission:
        return cls(entry, agent, spawned, text, ctx, f"run_{urandom(10).hex()}", CancellationToken())


class Workers:
    """Has sub-agents work, one message at a time each."""

    def __init__(self, agent_name: str, repository: TaskRepository, on_timeout: OnTimeout) -> None:
        self._agent_name, self.repository, self._on_timeout = agent_name, repository, on_timeout
        self.turns = Turns()

    async def wait_for(self, commission: Commission, seconds: float) -> RunResult | TaskRecord:
        """The result, or, where it takes longer than that, the task that the work has become."""
        token = commission.token
        running = asyncio.create_task(self._run(commission), name=commission.run_id)
        try:
            done, _ = await asyncio.wait({running}, timeout=seconds)
            if not done and self._on_timeout == "cancel":
                token.set(TIMED_OUT)
                done, _ = await asyncio.wait({running}, timeout=GRACE)
        except asyncio.CancelledError:
            token.set(commission.ctx.cancellation.reason or "cancelled")
            await asyncio.wait({running}, timeout=GRACE)
            raise
        return running.result() if done else await self._promote(commission, running)

    async def start(self, commission: Commission) -> TaskRecord:
        """Let it run in the background."""
        commission.in_background = True

        async def work(token: CancellationToken, waits: Waits) -> RunResult:
            return await self._to_the_end(commission, await self._run(commission), waits)

        return await self._begin(commission, TaskStatus.PENDING, work)

    async def _promote(self, commission: Commission, running: asyncio.Task[RunResult]) -> TaskRecord:
        commission.in_background = True
        background: Background = commission.ctx.resolver.background
        background.detach(commission.run_id)

        async def work(token: CancellationToken, waits: Waits) -> RunResult:
            return await self._to_the_end(commission, await running, waits)

        try:
            return await self._begin(commission, TaskStatus.RUNNING, work)
        except BaseException:
            commission.token.set("it could not be written down as a task")
            raise

    async def _begin(self, commission: Commission, status: TaskStatus, work: Work) -> TaskRecord:
        background: Background = commission.ctx.resolver.background
        service = background.service(self.repository)
        record = self._record(commission, status, service.node)
        voice = background.voice(commission.ctx, record, service)
        return await service.start(record, work, voice, commission.token)

    def _record(self, commission: Commission, status: TaskStatus, node: str) -> TaskRecord:
        run, spawned, now = commission.ctx.run, commission.spawned, at(time.time())
        return TaskRecord(
            task_id=f"task_{uuid4()}",
            sub_agent_id=spawned.agent_id,
            parent_agent_id=self._agent_name,
            parent_session_id=run.thread_id,
            user_id=run.user_id,
            status=status,
            input=commission.text,
            agent_key=spawned.agent_key,
            sub_session_id=spawned.session_id,
            parent_run_id=run.run_id,
            parent_tool_call_id=commission.ctx.call_id,
            run_id=commission.run_id,
            node=node if status is TaskStatus.RUNNING else None,
            created_at=now,
            last_updated_at=now,
        )

    async def _run(self, commission: Commission) -> RunResult:
        declared = commission.entry.declaration
        async with self.turns.of(commission.spawned.session_id):
            return await commission.ctx.run_child(
                commission.agent,
                commission.text,
                thread_id=commission.spawned.session_id,
                timeout=None if declared is None else declared.timeout,
                limits=None if declared is None else declared.limits,
                cancellation=commission.token,
                detached=commission.in_background,
                run_id=commission.run_id,
            )

    async def _to_the_end(self, commission: Commission, outcome: RunResult, waits: Waits) -> RunResult:
        """See a child through its waits for humans."""
        background: Background = commission.ctx.resolver.background
        while outcome.status is RunStatus.SUSPENDED:
            waits("; ".join([ticket.message or ticket.action for ticket in outcome.suspended.values()]))
            outcome = await background.next_leg(commission.run_id, commission.token)
            waits(None)
        return outcome
