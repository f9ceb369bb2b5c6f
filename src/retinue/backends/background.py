"""Background work of a runtime: task services, their events in the log, and children that wait for a human."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import CancellationToken
from ..core.context import ToolContext
from ..core.decisions import Decision
from ..core.errors import DecisionRefused, ExecutionBackendError
from ..core.events import TaskUpdated
from ..core.messages import Message, as_messages
from ..core.rows import Answer, Ending
from ..core.runs import RunIdentity, RunResult, RunStatus
from ..core.stores import RunRecord
from ..log.owned import LiveLog
from ..log.state import RunState
from ..loop.execution import Execution, close_run, start_leg
from ..loop.steering import add_messages, refusal
from ..loop.tickets import match_decisions
from ..tasks.repository import TaskRepository
from ..tasks.service import TaskReporter, TaskService
from ..tasks.task import TaskRecord
from .local import LocalBackend


class LocalBackground:
    """The background of one runtime. A child that was detached lives until it ends, its token is set, or the runtime is
    closed."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._services: dict[int, TaskService] = {}
        self._answers: dict[str, asyncio.Future[bool]] = {}
        """For each background child that waits: True once it was answered, False once it is given up."""

    def service(self, repository: TaskRepository) -> TaskService:
        """Return the service of a repository; a runtime has one for each."""
        if id(repository) not in self._services:
            self._services[id(repository)] = TaskService(repository)
        return self._services[id(repository)]

    def reporter(self, ctx: ToolContext, record: TaskRecord, service: TaskService) -> TaskReporter:
        """Return the reporter of a task: it writes to the log of the parent run, which stays open until the task ends."""
        x = self._backend.hold(ctx.run.run_id)
        return TaskReporter() if x is None else LogReporter(self._backend, x, ctx, record, service)

    def log_id(self, ctx: ToolContext) -> str | None:
        """Return the id of the stored log of a call; None if nothing is stored."""
        x = self._backend.execution_of(ctx.run.run_id)
        return None if x is None or x.log.writer is None else x.log.writer.log_id

    def is_recovered(self, ctx: ToolContext) -> bool:
        """Return whether the call belongs to a run that was recovered after its process died."""
        x = self._backend.execution_of(ctx.run.run_id)
        return x is not None and x.log.is_resumed

    async def is_held_elsewhere(self, ctx: ToolContext, thread_id: str) -> bool:
        """Return whether a run of another log, in any process, has the thread of a conversation."""
        x = self._backend.execution_of(ctx.run.run_id)
        if x is None or x.log.writer is None:
            return False
        return await x.log.writer.holder_of(thread_id) not in (None, x.log.writer.log_id)

    def child_status(self, ctx: ToolContext, run_id: str) -> RunStatus | None:
        """Return the status of a child that this run has started; None if it has not begun."""
        x = self._backend.execution_of(ctx.run.run_id)
        child = None if x is None else x.log.tree.runs.get(run_id)
        return None if child is None else child.status

    def deliver(self, ctx: ToolContext, thread_id: str, message: Message) -> bool:
        """Give a message to the background child that works on a conversation; its model reads it with its next request.

        Return False if there is none in this process, or if it takes no more messages."""
        x = self._backend.execution_of(ctx.run.run_id)
        for run in () if x is None else x.log.tree.open.values():
            child = self._backend.execution_of(run.run_id)
            is_at_work = run.request.detached and run.status is RunStatus.RUNNING and child is not None
            if is_at_work and run.identity.thread_id == thread_id and child is not None:
                if message.id not in run.added and refusal(child.log, run, child.agent.max_steps):
                    return False
                add_messages(child.log, run, (message,))
                return True
        return False

    def announce_child(self, ctx: ToolContext, agent: Agent, text: str, run_id: str, thread_id: str) -> None:
        """Write to the log that a child was started. It may begin after its parent has ended."""
        x = self._backend.execution_of(ctx.run.run_id)
        if x is None:
            return
        identity = RunIdentity(run_id, thread_id, agent.name, parent_tool_call_id=ctx.call_id)
        request = RunRequest(
            agent=agent, identity=identity, messages=as_messages(text), cancellation=CancellationToken()
        )
        self._backend.announce(x, request)

    def close_task(self, ctx: ToolContext, record: TaskRecord, reason: str) -> None:
        """Report the end of a task whose process died before it could, and end its child if no process continues it."""
        x = self._backend.execution_of(ctx.run.run_id)
        if x is None:
            return
        child = x.log.tree.runs.get(record.run_id or "")
        if child is not None and not child.is_over:
            close_run(x.log, child, Ending(RunStatus.CANCELLED, "cancelled", reason))
        task = x.log.tree.tasks.get(record.task_id)
        if task is None or task.is_open:
            _report(x, ctx.call_id, record, record.status)

    def give_slot_back(self, ctx: ToolContext) -> None:
        """Release the slot of this call, because it waits for a child; the call never takes it back."""
        if (x := self._backend.execution_of(ctx.run.run_id)) is not None:
            x.give_slot_back(ctx.call_id)

    def detach(self, run_id: str) -> None:
        """Let a child outlive its call."""
        self._backend.detach(run_id)

    async def wait_for_answer(
        self, ctx: ToolContext, run_id: str, token: CancellationToken, answered: Callable[[], None]
    ) -> bool:
        """Wait until a suspended detached child is answered, then call `answered`; False if the token was set."""
        answer, loop = self._answer(run_id), asyncio.get_running_loop()

        def refuse() -> None:
            if not answer.done():
                answer.set_result(False)

        try:
            with token.calling(partial(loop.call_soon_threadsafe, refuse)):
                await answer
            if answer.result():
                answered()
            return answer.result()
        finally:
            self._answers.pop(run_id, None)

    def _answer(self, run_id: str) -> asyncio.Future[bool]:
        """Return a future that is done when a child is answered; the answer may come before a caller waits."""
        return self._answers.setdefault(run_id, asyncio.get_running_loop().create_future())

    async def give_up(self, ctx: ToolContext, agent: Agent, run_id: str, reason: str) -> RunResult:
        """End a detached child that waits, or is not at work here; its conversation stays."""
        x = self._backend.execution_of(ctx.run.run_id)
        if x is None:
            raise ExecutionBackendError(run_id, "the run that started it is not there any more")
        return await self._backend.give_up(x, agent, run_id, reason)

    def accept(self, log: LiveLog, run_id: str, decisions: Mapping[str, Decision]) -> RunRecord | None:
        """Start a leg of a suspended background child; it continues with `go_on`, once the record returned is stored.

        Return None if the decisions were accepted before. Raise DecisionRefused if the child does not wait for them.
        """
        child = log.tree.runs.get(run_id)
        if child is None or not child.request.detached:
            raise DecisionRefused(f"run {run_id!r} waits for nothing")
        answers = match_decisions(log.tree, child, decisions)
        if not answers:
            return None
        if self._answer(run_id).done():
            raise DecisionRefused(f"run {run_id!r} is about to end, it waits for nothing")
        return self.begin_leg(log, child, tuple(answers))

    def begin_leg(self, log: LiveLog, child: RunState, answers: tuple[Answer, ...] = ()) -> RunRecord:
        """Start a leg of a background child that waits; return its record."""
        start_leg(log, child, answers)
        return RunRecord(identity=child.identity, started_at=child.since, log_id=log.log_id)

    def go_on(self, run_id: str) -> None:
        """Continue a background child whose answer is stored."""
        answer = self._answer(run_id)
        if not answer.done():
            answer.set_result(True)

    def leave(self, logs: Collection[str]) -> None:
        """Stop the tasks of these logs without ending them: the next owner continues them."""
        for service in self._services.values():
            service.leave(logs)

    async def close(self, grace: float) -> None:
        await asyncio.gather(*[service.close(grace) for service in self._services.values()])


class LogReporter(TaskReporter):
    """Reports a task in a log, as the task's own events: under the namespace of its child, with its id as run id."""

    def __init__(
        self, backend: LocalBackend, x: Execution, ctx: ToolContext, record: TaskRecord, service: TaskService
    ) -> None:
        self._backend, self._x, self._record, self._service = backend, x, record, service
        self._call_id = ctx.call_id
        x.log.holders.setdefault(record.task_id, self._cancel)

    @property
    def is_lost(self) -> bool:
        return self._x.log.lost

    def report(self, task_id: str, status: str) -> None:
        _report(self._x, self._call_id, self._record, status)

    def close(self) -> None:
        log, task_id = self._x.log, self._record.task_id
        task = log.tree.tasks.get(task_id)
        # A task that was left, or whose end could not be stored, is still open, so its log must stay open.
        has_ended = log.lost or task is None or not task.is_open
        if has_ended and log.holders.get(task_id) == self._cancel:  # else another reporter works on it
            log.release(task_id)
        self._backend.release(self._x.run_id)

    async def _cancel(self, reason: str) -> None:
        await self._service.cancel(self._record.scope, self._record.task_id)


def _report(x: Execution, call_id: str, record: TaskRecord, status: str) -> None:
    """Report the status of a task that a call of this run has started."""
    child = x.state.children.get(record.run_id or "")
    x.log.append_stamped(
        TaskUpdated(
            task_id=record.task_id,
            status=str(status),
            call_id=call_id,
            run_id=record.task_id,
            parent_run_id=x.run_id,
            agent=record.sub_agent_id,
            ns=(*x.state.ns, f"tools:{call_id}") if child is None else child.ns,
        )
    )
