"""Background work of a runtime: task services, their voices in the log, and children that wait for a human."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from ..core.context import CancellationToken, ToolContext
from ..core.decisions import Decision
from ..core.errors import DecisionRefused, ExecutionBackendError
from ..core.events import TaskUpdated
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..loop.children import give_slot_back
from ..loop.recovery import close_runs
from ..loop.scope import RunScope
from ..tasks.repository import TaskRepository
from ..tasks.service import Silence, TaskService, Voice
from ..tasks.task import TaskRecord
from .local import LocalBackend


class LocalBackground:
    """The background of one runtime."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend
        self._services: dict[int, TaskService] = {}
        self._questions: dict[str, _Question] = {}

    def service(self, repository: TaskRepository) -> TaskService:
        made = self._services.get(id(repository))
        if made is None:
            made = self._services[id(repository)] = TaskService(repository)
        return made

    def voice(self, ctx: ToolContext, record: TaskRecord, service: TaskService) -> Voice:
        scope = self._backend.hold(ctx.run.run_id)
        return Silence() if scope is None else LogVoice(self._backend, scope, ctx, record, service)

    def is_recovered(self, ctx: ToolContext) -> bool:
        scope = self._backend.scope_of(ctx.run.run_id)
        return scope is not None and scope.log.told is not None

    def close_children(self, ctx: ToolContext, reason: str) -> None:
        if (scope := self._backend.scope_of(ctx.run.run_id)) is not None:
            close_runs(scope.log, (*scope.ns, f"tools:{ctx.call_id}"), reason)

    def give_slot_back(self, ctx: ToolContext) -> None:
        if (scope := self._backend.scope_of(ctx.run.run_id)) is not None:
            give_slot_back(scope, ctx.call_id)

    def detach(self, run_id: str) -> None:
        self._backend.detach(run_id)

    async def next_leg(self, run_id: str, token: CancellationToken, answered: Callable[[], None]) -> RunResult:
        question = self._question(run_id)

        def give_up() -> None:
            question.loop.call_soon_threadsafe(question.take, None)

        token.on_set(give_up)
        try:
            decisions = await question.decisions
            answered()
            result = await self._go_on(run_id, decisions, token)
        except BaseException as exc:
            if not question.result.done():
                question.result.set_exception(ExecutionBackendError(run_id, f"it could not go on: {exc!r}"))
                question.result.exception()  # nobody need be waiting
            raise
        finally:
            token.forget(give_up)
            if self._questions.get(run_id) is question:
                del self._questions[run_id]
        question.result.set_result(result)
        return result

    def _question(self, run_id: str) -> _Question:
        made = self._questions.get(run_id)
        if made is None:
            made = self._questions[run_id] = _Question()
            child = self._backend.waiting_child(run_id)
            if child is not None and (answers := child.answers_before()):  # it went on, in a process that has ended
                made.take(child.take(answers))
        return made

    async def _go_on(
        self, run_id: str, decisions: Mapping[str, Decision] | None, token: CancellationToken
    ) -> RunResult:
        if decisions is not None:
            return await self._backend.go_on(run_id, decisions, token)
        result = await self._backend.give_up(run_id)
        if result is None:
            raise ExecutionBackendError(run_id, "it is not there any more")
        return result

    def has(self, run_id: str) -> bool:
        """Whether there is a background child of that id that waits for a human, or has been answered."""
        return self._backend.waiting_child(run_id) is not None

    async def answer(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult | None:
        """Answer a background child that waits; its result, or where it waits next. None where there is none."""
        child = self._backend.waiting_child(run_id)
        if child is None:
            return None
        if child.result is None or child.result.status is not RunStatus.SUSPENDED:
            under_way = self._questions.get(run_id)
        else:
            under_way = self._question(run_id)  # it may be answered before anybody has come to ask it
        answers = child.match(decisions)
        if under_way is None:
            return child.result
        if not answers:
            return await asyncio.shield(under_way.result) if under_way.decisions.done() else child.result
        if under_way.decisions.done():
            raise DecisionRefused(f"run {run_id!r} is running, it waits for nothing")
        child.note_answers(answers)
        under_way.take(child.take(answers))
        return await asyncio.shield(under_way.result)

    def leave(self) -> None:
        """Leave tasks to whoever goes on with their runs."""
        for service in self._services.values():
            service.leave()

    async def close(self, grace: float) -> None:
        await asyncio.gather(*[service.close(grace) for service in self._services.values()])


class _Question:
    """What a child waits for, and what will come of the answer."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.decisions: asyncio.Future[Mapping[str, Decision] | None] = self.loop.create_future()
        self.result: asyncio.Future[RunResult] = self.loop.create_future()

    def take(self, decisions: Mapping[str, Decision] | None) -> None:
        if not self.decisions.done():
            self.decisions.set_result(decisions)


class LogVoice:
    """Tells of a task in a log, as the task's own events: under the namespace of its child, with its id as run id."""

    def __init__(
        self, backend: LocalBackend, scope: RunScope, ctx: ToolContext, record: TaskRecord, service: TaskService
    ) -> None:
        self._backend, self._scope, self._record = backend, scope, record
        self._call_id, self._ns = ctx.call_id, (*scope.ns, f"tools:{ctx.call_id}")
        self._service = service
        scope.log.holders[record.task_id] = self._cancel
        scope.log.held.add(self._ns)

    def tell(self, task_id: str, status: str) -> None:
        told = TaskUpdated(
            task_id=task_id,
            status=str(status),
            call_id=self._call_id,
            run_id=task_id,
            parent_run_id=self._scope.run_id,
            agent=self._record.sub_agent_id,
            ns=self._ns,
        )
        self._scope.log.append(told)

    def close(self) -> None:
        self._scope.log.held.discard(self._ns)
        self._scope.log.release(self._record.task_id)
        self._backend.release(self._scope.run_id)

    async def _cancel(self, reason: str) -> None:
        await self._service.cancel(self._record.scope, self._record.task_id)
