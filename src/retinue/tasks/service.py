"""The task service: executes tasks in this process, and handles those of other processes through their records."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from secrets import token_hex
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from ..core.agents import Agent
from ..core.context import GRACE, CancellationToken, ToolContext
from ..core.errors import RetinueError
from ..core.lifecycle import RunStatus
from ..core.processes import process_identity
from ..core.runs import RunResult
from .lifecycle import await_human, beat, begin, finish, request_cancel, take_over
from .repository import TaskRepository
from .sweeper import Sweeper, is_abandoned
from .task import TaskRecord, TaskScope, TaskStatus

_log = logging.getLogger(__name__)


Work = Callable[[CancellationToken, "Waits"], Coroutine[Any, Any, RunResult]]
"""Does the work of a task. It stops when the token is set, and says through the second when it waits for a human."""
Waits = Callable[[str | None], None]


class TaskReporter(Protocol):
    """Reports the status of a task to its audience; closed when the task has ended."""

    @property
    def is_lost(self) -> bool:
        """True if another process continues the run that started the task, and the task with it."""
        ...

    def report(self, task_id: str, status: str) -> None: ...

    def close(self) -> None: ...


class NullReporter:
    """Reports to nobody."""

    is_lost = False

    def report(self, task_id: str, status: str) -> None:
        return

    def close(self) -> None:
        return


class LocalTask(Struct, eq=False):
    """The handle of a task that this process executes."""

    record: TaskRecord
    token: CancellationToken
    reporter: TaskReporter
    ended: asyncio.Event
    job: asyncio.Task[None] | None = None
    notes: set[asyncio.Task[None]] = msgspec.field(default_factory=set[asyncio.Task[None]])
    """Writes in progress about its waits."""
    last_beat: float = 0.0
    is_looked_on: bool = False
    """It is executed elsewhere, and was not started here: it goes on when this process ends."""


class TaskService:
    """Tasks over one repository. Start work, adopt work that is under way, wait, cancel; close it with the runtime."""

    def __init__(self, repository: TaskRepository, clock: Callable[[], float] = time.time) -> None:
        self.repository, self._clock = repository, clock
        self.node = f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}@{process_identity()}"
        self._local: dict[str, LocalTask] = {}
        self._sweeper = Sweeper(repository, clock)
        self._watch: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._next_sweep: float | None = None
        self._troubled: set[TaskScope] = set()
        """Sessions whose records cannot be read or written just now."""
        self._is_down = False
        """True if the last sweep failed, which was logged then."""
        self._closing = False
        self._left: Collection[str] = ()
        """The logs whose tasks are left to others."""

    async def start(
        self,
        record: TaskRecord,
        work: Work,
        reporter: TaskReporter | None = None,
        token: CancellationToken | None = None,
    ) -> TaskRecord:
        """Write a task down, then let it run; one that is RUNNING already is work under way, with its token.

        It goes on after whoever started it has ended.
        """
        task = LocalTask(record, token or CancellationToken(), reporter or NullReporter(), asyncio.Event())
        task.last_beat = time.monotonic()
        self._local[record.task_id] = task
        try:
            await self.repository.add(record)
        except BaseException:
            self._drop(task)
            raise
        task.reporter.report(record.task_id, record.status)
        task.job = asyncio.create_task(self._execute(task, work), name=record.task_id)
        self.watch()
        return record

    async def resume(self, record: TaskRecord, work: Work, reporter: TaskReporter, token: CancellationToken) -> None:
        """Go on with a task whose process is known to be gone; nothing happens where it has ended, or is at work here."""
        if record.task_id in self._local:
            reporter.close()
            return

        def mine(record: TaskRecord) -> TaskRecord | None:
            return take_over(record, self._clock(), self.node)

        now = await self.repository.update(record.scope, record.task_id, mine)
        if now is None or now.status.is_terminal:
            reporter.close()
            return
        task = LocalTask(now, token, reporter, asyncio.Event())
        task.last_beat = time.monotonic()
        self._local[now.task_id] = task
        task.job = asyncio.create_task(self._execute(task, work), name=now.task_id)
        self.watch()

    def attach(self, record: TaskRecord, work: Work) -> None:
        """Watch over a task that is executed elsewhere and that nobody here watches over yet."""
        if record.task_id in self._local:
            return
        task = LocalTask(record, CancellationToken(), NullReporter(), asyncio.Event(), is_looked_on=True)
        self._local[record.task_id] = task
        task.job = asyncio.create_task(self._execute(task, work), name=record.task_id)
        self.watch()

    async def get(self, scope: TaskScope, task_id: str) -> TaskRecord | None:
        return await self.repository.get(scope, task_id)

    async def wait(self, scope: TaskScope, task_id: str, seconds: float) -> TaskRecord | None:
        """The task when it has ended, or as it is after so long, whichever process executes it."""
        deadline = time.monotonic() + max(seconds, 0)
        pause = 0.02
        while True:
            record = await self.repository.get(scope, task_id)
            left = deadline - time.monotonic()
            if record is None or record.status.is_terminal or left <= 0:
                return record
            task = self._local.get(task_id)
            if task is not None:
                await _within(task.ended.wait(), left)
            elif is_abandoned(record):
                await self.sweep()
            else:
                await asyncio.sleep(min(pause, left))
                pause = min(pause * 1.5, self.repository.settings.look_every)

    async def cancel(self, scope: TaskScope, task_id: str, grace: float = GRACE) -> TaskRecord | None:
        """Ask for a task to stop, and wait a while for it to have stopped."""

        def ask(record: TaskRecord) -> TaskRecord | None:
            return request_cancel(record, self._clock())

        record = await self.repository.update(scope, task_id, ask)
        if record is None or record.status.is_terminal:
            return record
        if (task := self._local.get(task_id)) is not None:
            task.token.set("the task was cancelled")
        return await self.wait(scope, task_id, grace)

    async def sweep(self, *, trust_clock: bool = False) -> list[TaskRecord]:
        """Give up on tasks whose executors are gone; those that were given up on just now."""
        return await self._sweeper.sweep(self._local.keys(), trust_clock=trust_clock)

    def watch(self) -> None:
        """See to it that orphans are found from time to time, and that this process shows that it lives."""
        self._woken.set()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._keep_watch(), name="retinue-tasks")

    def leave(self, logs: Collection[str]) -> None:
        """Leave the records of the tasks of these logs as they are, for whoever continues them."""
        self._left = logs

    def is_left(self, record: TaskRecord) -> bool:
        """Return whether a task is left to whoever continues its log."""
        return record.log_id in self._left

    def _is_left(self, task: LocalTask) -> bool:
        return self.is_left(task.record) or task.reporter.is_lost

    async def close(self, grace: float = GRACE) -> None:
        """Stop the tasks of this process. They end as cancelled, with the reason, unless they are left to others."""
        self._closing = True
        tasks = list(self._local.values())
        for task in tasks:
            if not (task.is_looked_on or self._is_left(task)):
                task.token.set("the runtime was closed")
            elif task.job is not None:
                task.job.cancel()
        jobs = [task.job for task in tasks if task.job is not None]
        if jobs:
            await asyncio.wait(jobs, timeout=grace)
        left = [job for job in jobs if not job.done()]
        if self._watch is not None:
            left.append(self._watch)
        for job in left:
            job.cancel()
        if left:
            await asyncio.wait(left, timeout=grace)

    def _drop(self, task: LocalTask) -> None:
        self._local.pop(task.record.task_id, None)
        task.ended.set()
        task.reporter.close()

    async def _execute(self, task: LocalTask, work: Work) -> None:
        """The life of a task in this process: from its beginning to its last record, whatever happens."""
        try:
            try:
                ending = await self._work(task, work)
            except asyncio.CancelledError:
                if not task.is_looked_on:
                    await self._finish(task, TaskStatus.CANCELLED, None, task.token.reason or "its process ended")
                raise
            await self._finish(task, *ending)
        finally:
            self._drop(task)

    async def _work(self, task: LocalTask, work: Work) -> tuple[TaskStatus, str | None, str | None]:
        """Do the work of a task; how it ended."""
        try:
            if task.record.status is TaskStatus.PENDING and not await self._begin(task):
                return TaskStatus.CANCELLED, None, "it was cancelled before it began"
            outcome = await work(task.token, lambda question: self._note_wait(task, question))
        except Exception as exc:
            _log.error("task %s failed", task.record.task_id, exc_info=exc)
            return TaskStatus.FAILED, None, f"{type(exc).__name__}: {exc}"
        status, text, error = _ending(outcome)
        if task.token.is_set() and status is not TaskStatus.COMPLETED:
            status, error = TaskStatus.CANCELLED, task.token.reason
        return status, text, error

    async def _begin(self, task: LocalTask) -> bool:
        def to_running(record: TaskRecord) -> TaskRecord | None:
            return begin(record, self._clock(), self.node)

        record = await self.repository.update(task.record.scope, task.record.task_id, to_running)
        if record is not None and record.status is TaskStatus.RUNNING:
            task.reporter.report(record.task_id, record.status)
            return True
        return False

    async def _finish(self, task: LocalTask, status: TaskStatus, text: str | None, error: str | None) -> None:
        """Write the end of a task. Where that cannot be done, it is tried again for as long as this process lives."""
        if self._is_left(task):
            return
        if task.notes:
            await asyncio.wait(task.notes)
        pause = self.repository.settings.look_every
        while True:
            try:
                await self._write_end(task, status, text, error)
                return
            except Exception as exc:
                _log.error("the end of task %s (%s) cannot be written: %s", task.record.task_id, status, exc)
                if self._closing:
                    return  # the sweeper of any process will find the record without a sign of life
            await asyncio.sleep(pause)
            pause = min(pause * 2, self.repository.settings.heartbeat)

    async def _write_end(self, task: LocalTask, status: TaskStatus, text: str | None, error: str | None) -> None:
        kept = None
        try:
            kept = await self.repository.keep_result(task.record, text) if text else None
        except Exception as exc:
            _log.warning("task %s: its result stays in its record, as %s", task.record.task_id, exc)

        def end(record: TaskRecord) -> TaskRecord | None:
            shown = text if kept is None or text is None else f"{text[:1000]}…"
            return finish(record, status, self._clock(), result=shown, result_file=kept, error=error)

        record = await self.repository.update(task.record.scope, task.record.task_id, end)
        task.reporter.report(task.record.task_id, status if record is None else record.status)

    def _note_wait(self, task: LocalTask, question: str | None) -> None:
        """A human is asked, or has answered."""
        if self._is_left(task):
            return

        def note(record: TaskRecord) -> TaskRecord | None:
            return await_human(record, self._clock(), question)

        async def write() -> None:
            await self.repository.update(task.record.scope, task.record.task_id, note)
            task.reporter.report(task.record.task_id, TaskStatus.RUNNING)

        job = asyncio.create_task(write())
        task.notes.add(job)
        job.add_done_callback(task.notes.discard)
        job.add_done_callback(_log_failure)

    async def _keep_watch(self) -> None:
        settings = self.repository.settings
        if self._next_sweep is None:
            self._next_sweep = time.monotonic()  # the first one at once: it may be after a long downtime
        while True:
            try:
                for scope in {task.record.scope for task in self._local.values()}:
                    await self._look_after(scope)
                if time.monotonic() >= self._next_sweep:
                    await self.sweep()
                    soon = self._sweeper.proof if self._sweeper.suspects else settings.sweep_every
                    self._next_sweep = time.monotonic() + min(soon, settings.sweep_every)
                    self._is_down = False
            except RetinueError as exc:
                if not self._is_down:
                    self._is_down = True
                    _log.error("lost tasks cannot be looked for, which is tried again: %s", exc)
                self._next_sweep = time.monotonic() + settings.sweep_every
            except Exception:
                _log.exception("looking after tasks failed; it is tried again")
                self._next_sweep = time.monotonic() + settings.sweep_every
            self._woken.clear()
            if self._local:
                await asyncio.sleep(settings.look_every)
            else:
                await _within(self._woken.wait(), max(self._next_sweep - time.monotonic(), 0.01))

    async def _look_after(self, scope: TaskScope) -> None:
        """Look after the tasks of one session; trouble with its records is no trouble for others."""
        try:
            await self._look_after_own(scope)
            self._troubled.discard(scope)
        except RetinueError as exc:
            if scope not in self._troubled:
                self._troubled.add(scope)
                _log.error("the tasks of session %s cannot be looked after: %s", scope.session_id, exc)

    async def _look_after_own(self, scope: TaskScope) -> None:
        """Stop what somebody wants stopped or has given up on, and show that the rest is alive."""
        now, settings = time.monotonic(), self.repository.settings
        due: list[LocalTask] = []
        records = {record.task_id: record for record in await self.repository.list(scope)}
        for task in list(self._local.values()):
            record = records.get(task.record.task_id)
            if record is None or task.job is None:
                continue
            if record.cancel_requested:
                task.token.set("the task was cancelled")
            elif record.status.is_terminal:
                task.token.set("another process has given up on it")
            elif now - task.last_beat >= settings.heartbeat:
                due.append(task)
        if due:
            await self._beat(scope, due)
            for task in due:
                task.last_beat = now

    async def _beat(self, scope: TaskScope, due: list[LocalTask]) -> None:
        """Write heartbeats, but for tasks whose life is known without."""

        def alive(record: TaskRecord) -> TaskRecord | None:
            return beat(record, self._clock(), self.node)

        known = await self.repository.liveness(scope)
        beating = [task.record for task in due if task.record.task_id not in known]
        if beating:
            await self.repository.update_all([(record.scope, record.task_id, alive) for record in beating])


def _ending(outcome: RunResult) -> tuple[TaskStatus, str | None, str | None]:
    """Return status, result and error of a task from those of its child."""
    if outcome.status is RunStatus.COMPLETED:
        return TaskStatus.COMPLETED, outcome.response or "", None
    if outcome.status is RunStatus.CANCELLED:
        return TaskStatus.CANCELLED, outcome.response, outcome.error
    return TaskStatus.FAILED, outcome.response, outcome.error or outcome.termination


async def _within(waiting: Awaitable[Any], seconds: float) -> None:
    try:
        await asyncio.wait_for(waiting, seconds)
    except TimeoutError:
        return


def _log_failure(job: asyncio.Task[None]) -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        _log.error("a task record could not be written", exc_info=error)


class Background(Protocol):
    """Contract: a child that was detached lives until it ends, its token is set, or the runtime is closed."""

    def service(self, repository: TaskRepository) -> TaskService:
        """The service for a repository; one for each in a runtime."""
        ...

    def reporter(self, ctx: ToolContext, record: TaskRecord, service: TaskService) -> TaskReporter:
        """Return what reports a task in the log of the run that started it, which stays open until the task has ended."""
        ...

    def log_id(self, ctx: ToolContext) -> str | None:
        """The stored log that a call is in; None where nothing is stored."""
        ...

    def is_recovered(self, ctx: ToolContext) -> bool:
        """Return whether the call belongs to a run that continues after its process ended."""
        ...

    def announce_child(self, ctx: ToolContext, agent: Agent, text: str, run_id: str, thread_id: str) -> None:
        """Tell that a child was started which begins later, perhaps when its parent has ended."""
        ...

    def close_task(self, ctx: ToolContext, record: TaskRecord, reason: str) -> None:
        """Report the end of a task whose process ended before it could, and end its child where nobody continues it."""
        ...

    def give_slot_back(self, ctx: ToolContext) -> None:
        """Let other calls run in place of this one, for good: it is going to wait for a child."""
        ...

    def detach(self, run_id: str) -> None:
        """Let a child outlive its call."""
        ...

    async def wait_for_answer(
        self, ctx: ToolContext, run_id: str, token: CancellationToken, answered: Callable[[], None]
    ) -> bool:
        """Wait until somebody answers a detached child that waits, and call back; False where the token was set."""
        ...

    async def give_up(self, ctx: ToolContext, agent: Agent, run_id: str, reason: str) -> RunResult:
        """End a detached child that waits for an answer which will not come; its conversation stays."""
        ...
