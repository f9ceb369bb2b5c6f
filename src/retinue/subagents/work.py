"""Work for a sub-agent: awaited, in the background, or awaited first and moved to the background after a timeout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from msgspec import Struct

from ..core.agents import Agent
from ..core.backend import Resolver, RunRequest
from ..core.concurrency import GRACE, CancellationToken, join, supervise, wait_for_first
from ..core.context import TIMED_OUT, ToolContext
from ..core.errors import ExecutionBackendError
from ..core.messages import Message, as_messages
from ..core.runs import RunIdentity, RunResult, RunStatus
from ..core.state import PersistedState
from ..tasks.repository import TaskRepository
from ..tasks.service import TASK_CANCELLED, TaskService, Waits, Work
from ..tasks.task import TaskRecord, TaskScope, TaskStatus, at
from .catalog import Catalog, Entry
from .declarations import RemoteSubagentStub, remote_stub
from .spawned import Spawned, Turns

if TYPE_CHECKING:
    from ..backends.background import LocalBackground

OnTimeout = Literal["promote", "cancel"]

LOOK_EVERY = 2.0
"""Seconds between two looks at a remote task that waits for a human."""
_TRANSPORTS = {"tasks": "task-protocol"}
"""The `transport_type` of remote work, where it is not the name of the protocol."""


class ChildJob(Struct):
    """One message for one sub-agent."""

    entry: Entry
    agent: Agent
    spawned: Spawned
    text: str
    ctx: ToolContext
    run_id: str
    token: CancellationToken
    in_background: bool = False
    turn: asyncio.Lock | None = None
    """Held while it is this message's turn."""
    queued: asyncio.Task[bool] | None = None
    """Its place among the messages for this sub-agent."""

    @property
    def transport(self) -> str | None:
        """The way to reach a remote sub-agent; None for one that is not remote."""
        agent = self.agent
        return _TRANSPORTS.get(agent.protocol, agent.protocol) if isinstance(agent, RemoteSubagentStub) else None

    @property
    def is_elsewhere(self) -> bool:
        """True if another backend executes it. It has started once that backend has accepted it."""
        return self.ctx.resolver.is_elsewhere(self.agent, self.ctx.run.run_id, self.run_id)

    @classmethod
    def of(cls, entry: Entry, agent: Agent, spawned: Spawned, text: str, ctx: ToolContext) -> ChildJob:
        return cls(entry, agent, spawned, text, ctx, f"run_{stable_id(ctx, 'run').hex[:20]}", CancellationToken())

    @property
    def task_id(self) -> str:
        """The id of its task, also before it becomes one."""
        return f"task_{stable_id(self.ctx, 'task')}"

    def end_turn(self) -> None:
        """Let the next message in."""
        queued, self.queued = self.queued, None
        if queued is not None and not queued.done():
            queued.cancel()
        elif queued is not None and not queued.cancelled() and self.turn is not None:
            self.turn.release()


def stable_id(ctx: ToolContext, what: str) -> UUID:
    """Return an unguessable id for a call; the same id when the call runs again."""
    said = f"{what}/{ctx.run.run_id}/{ctx.call_id}".encode()
    return UUID(bytes=blake2b(said, digest_size=16).digest(), version=4)


class Workers:
    """Runs sub-agents, each on one message at a time."""

    def __init__(self, parent: str, catalog: Catalog, repository: TaskRepository, on_timeout: OnTimeout) -> None:
        self._parent, self._catalog, self.repository, self._on_timeout = parent, catalog, repository, on_timeout
        self.turns = Turns()

    async def wait_for(self, job: ChildJob, seconds: float) -> RunResult | TaskRecord:
        """Return the result or, if it takes longer, the task of the work."""
        if (recovered := await self._recovered_task(job)) is not None:
            return recovered
        self._enqueue(job)
        running = asyncio.create_task(self._run(job), name=job.run_id)
        try:
            done = await join([running], seconds)
            may_go_on = done or self._has_begun(job)
            if not may_go_on or (not done and self._on_timeout == "cancel"):
                job.token.set(TIMED_OUT)
                done = await join([running], GRACE if may_go_on else None)
        except asyncio.CancelledError:
            job.token.set(job.ctx.cancellation.reason or "cancelled")
            running.add_done_callback(lambda work: work.cancelled() or work.exception())  # nobody else reads it
            await join([running], GRACE)
            raise
        return running.result() if done else await self._promote(job, running)

    def _has_begun(self, job: ChildJob) -> bool:
        """Return whether work that is late can become a task: not if the backend that should execute it has not accepted it."""
        is_queued = job.queued is not None and not job.queued.done()
        return is_queued or not job.is_elsewhere or _background(job.ctx).child_status(job.ctx, job.run_id) is not None

    async def watch_remote_task(self, record: TaskRecord, resolver: Resolver) -> None:
        """Watch a remote task that another process has started."""
        if record.status.is_terminal or not record.is_remote:
            return
        entry = (await self._catalog.load_entries()).get(record.sub_agent_id)
        if entry is None or entry.declaration is None or not entry.declaration.is_remote:
            return
        plan, seconds = resolver.resolve(remote_stub(entry.declaration)), entry.declaration.timeout

        async def work(token: CancellationToken, waits: Waits) -> RunResult:
            run = RunIdentity(record.run_id or "", record.sub_session_id or "", record.sub_agent_id)
            said = as_messages(record.input)
            request = RunRequest(
                agent=plan.agent, identity=run, messages=said, cancellation=token, timeout=seconds, is_dispatched=True
            )
            # Only the owner of its log can answer a question; this process only checks if it was answered.
            while (outcome := await plan.backend.run(request)).status.is_waiting and not token.is_set():
                waits(_questions(outcome))
                await wait_for_first(token.wait(), seconds=LOOK_EVERY)
            return outcome

        background: LocalBackground = resolver.background
        background.service(self.repository).attach(record, work)

    async def is_busy_elsewhere(self, spawned: Spawned, ctx: ToolContext) -> bool:
        """Return whether a run of another process has the conversation of a sub-agent."""
        session_id = spawned.session_id
        if self.turns.is_working(session_id) or self.turns.is_held(session_id, ctx):
            return False  # here: messages wait their turn
        return await _background(ctx).is_held_elsewhere(ctx, session_id)

    def deliver(self, spawned: Spawned, text: str, ctx: ToolContext) -> bool:
        """Give a message to a sub-agent that works in the background; return False if it does not."""
        message = Message.user(text, id=f"message_{stable_id(ctx, 'message').hex}")
        return _background(ctx).deliver(ctx, spawned.session_id, message)

    def service(self, ctx: ToolContext) -> TaskService:
        return _background(ctx).service(self.repository)

    def scope(self, ctx: ToolContext) -> TaskScope:
        return TaskScope(self._parent, ctx.run.thread_id, ctx.run.user_id)

    async def start(self, job: ChildJob) -> TaskRecord:
        """Run it in the background."""
        if (recovered := await self._recovered_task(job)) is not None:
            return recovered
        job.in_background = True
        self._enqueue(job)
        if not job.is_elsewhere:  # it may start after the run that starts it has ended
            session_id = job.spawned.session_id
            _background(job.ctx).announce_child(job.ctx, job.agent, job.text, job.run_id, session_id)

        async def work(token: CancellationToken, waits: Waits) -> RunResult:
            return await self._follow(job, await self._run(job), waits)

        return await self._begin(job, TaskStatus.PENDING, work, job.end_turn)

    async def _recovered_task(self, job: ChildJob) -> TaskRecord | None:
        """Return the task that a call had started before its process died; it is resumed separately."""
        if not _background(job.ctx).is_recovered(job.ctx):
            return None
        return await self.repository.get(self.scope(job.ctx), job.task_id)

    async def resume(self, record: TaskRecord, ctx: ToolContext) -> None:
        """Continue a task whose process died."""
        background, service = _background(ctx), self.service(ctx)
        given_up = "its task was given up on when its process had ended"
        if record.status.is_terminal:
            background.close_task(ctx, record, given_up)
            return
        entry = (await self._catalog.load_entries()).get(record.sub_agent_id)
        key, session_id, run_id = record.agent_key or "", record.sub_session_id or "", record.run_id or ""
        spawned = Spawned(key, record.sub_agent_id, session_id, None, ctx.run.depth + 1, ctx.run.user_id)

        async def work(token: CancellationToken, waits: Waits) -> RunResult:
            if entry is None:
                raise ExecutionBackendError(record.sub_agent_id, "it is not declared any more")
            agent = await entry.agent(ctx)
            job = ChildJob(entry, agent, spawned, record.input, ctx, run_id, token, in_background=True)
            if record.cancel_requested and not job.is_elsewhere:
                return await self._end_cancelled(job)
            self._enqueue(job)
            return await self._follow(job, await self._run(job), waits)

        reporter = background.reporter(ctx, record, service)
        ended = await service.resume(record, work, reporter, CancellationToken())
        if ended is not None:  # meanwhile
            background.close_task(ctx, ended, given_up)
            reporter.close()

    async def _end_cancelled(self, job: ChildJob) -> RunResult:
        """End a child whose task was cancelled while no process worked on it, without running it again."""
        background, status = _background(job.ctx), _background(job.ctx).child_status(job.ctx, job.run_id)
        if status is not None and status.is_terminal:
            return await self._child(job)  # only its result
        job.token.set(TASK_CANCELLED)
        if status is None:
            return _never_began(job)
        return await background.give_up(job.ctx, job.agent, job.run_id, TASK_CANCELLED)

    async def _promote(self, job: ChildJob, running: asyncio.Task[RunResult]) -> TaskRecord:
        job.in_background = True
        _background(job.ctx).detach(job.run_id)

        async def work(token: CancellationToken, waits: Waits) -> RunResult:
            return await self._follow(job, await running, waits)

        try:
            return await self._begin(job, TaskStatus.RUNNING, work)
        except BaseException:
            job.token.set("it could not be written down as a task")
            raise

    async def _begin(
        self, job: ChildJob, status: TaskStatus, work: Work, at_end: Callable[[], None] | None = None
    ) -> TaskRecord:
        """Store the task of a job and execute it."""
        background, service = _background(job.ctx), self.service(job.ctx)
        run, spawned, now = job.ctx.run, job.spawned, at(time.time())
        record = TaskRecord(
            task_id=job.task_id,
            sub_agent_id=spawned.agent_id,
            parent_agent_id=self._parent,
            parent_session_id=run.thread_id,
            user_id=run.user_id,
            status=status,
            input=job.text,
            agent_key=spawned.agent_key,
            sub_session_id=spawned.session_id,
            parent_run_id=run.run_id,
            parent_tool_call_id=job.ctx.call_id,
            run_id=job.run_id,
            log_id=background.log_id(job.ctx),
            transport_type=job.transport,
            node=service.node if status is TaskStatus.RUNNING else None,
            created_at=now,
            last_updated_at=now,
        )
        reporter = background.reporter(job.ctx, record, service)
        return await service.start(record, work, reporter, job.token, at_end)

    async def _run(self, job: ChildJob) -> RunResult:
        ctx, session_id = job.ctx, job.spawned.session_id
        if not await self._wait_for_turn(job):
            return _never_began(job)
        try:
            if self.turns.is_held(session_id, ctx):
                problem = "it waits for a decision: send your message when it has gone on"
                raise ExecutionBackendError(job.entry.id, problem)
            outcome = await self._child(job)
            if outcome.status.is_waiting:
                self.turns.hold(outcome.thread_id, ctx, beyond_run=job.in_background)
            else:
                self.turns.release(outcome.thread_id)
            return outcome
        finally:
            job.end_turn()

    async def _child(self, job: ChildJob) -> RunResult:
        """Run the child, or continue it after a wait."""
        declared = job.entry.declaration
        return await job.ctx.run_child(
            job.agent,
            job.text,
            thread_id=job.spawned.session_id,
            timeout=None if declared is None else declared.timeout,
            limits=None if declared is None else declared.limits,
            cancellation=job.token,
            detached=job.in_background,
            run_id=job.run_id,
        )

    def _enqueue(self, job: ChildJob) -> None:
        """Queue after the earlier messages: the order of the calls is the order of the conversation."""
        job.turn = self.turns.of(job.spawned.session_id)
        job.queued = asyncio.create_task(job.turn.acquire())

    async def _wait_for_turn(self, job: ChildJob) -> bool:
        """Wait for the earlier messages; return False if this one was cancelled meanwhile."""
        queued, token = job.queued, job.token
        if queued is None:
            return False
        if not queued.done():
            _background(job.ctx).give_slot_back(job.ctx)  # the message before it may need the slot to end

        end = await supervise(queued, token=token, grace=None)
        if token.is_set():
            job.end_turn()
            return False
        end.result()
        return True

    async def _follow(self, job: ChildJob, outcome: RunResult, waits: Waits) -> RunResult:
        """Continue a child each time a human has answered, until it ends."""
        background, ctx, run_id, token = _background(job.ctx), job.ctx, job.run_id, job.token
        try:
            while outcome.status.is_waiting:
                waits(_questions(outcome))
                is_answered = await background.wait_for_answer(ctx, run_id, token, lambda: waits(None))
                if is_answered or job.is_elsewhere:  # its backend sees the token, and stops it there
                    outcome = await self._child(job)
                else:
                    outcome = await background.give_up(ctx, job.agent, run_id, token.reason or "cancelled")
        finally:
            self.turns.release(job.spawned.session_id)
        return outcome


def _questions(outcome: RunResult) -> str:
    return "; ".join([ticket.message or ticket.action for ticket in outcome.suspended.values()])


def _background(ctx: ToolContext) -> LocalBackground:
    return ctx.resolver.background


def _never_began(job: ChildJob) -> RunResult:
    """Return the result of work that was cancelled before its turn."""
    reason = job.token.reason or "cancelled"
    status = RunStatus.TIMEOUT if reason == TIMED_OUT else RunStatus.CANCELLED
    thread_id, state = job.spawned.session_id, PersistedState()
    return RunResult(
        status=status, run_id=job.run_id, thread_id=thread_id, state=state, error=reason, termination=status.value
    )
