"""The task service: executes tasks in this process, and handles those of other processes through their records."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from secrets import token_hex
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.concurrency import GRACE, Backoff, CancellationToken, Jobs, cancel_all, join
from ..core.errors import RetinueError
from ..core.processes import process_identity
from ..core.receipts import Receipt
from ..core.runs import RunResult, RunStatus
from ..core.tools import finished_calls
from .repository import TaskRepository
from .sweeper import Sweeper, is_abandoned, is_unwatched
from .task import TaskRecord, TaskScope, TaskStatus, await_human, beat, begin, finish, request_cancel, take_over

_log = logging.getLogger(__name__)

TASK_CANCELLED = "the task was cancelled"

Work = Callable[[CancellationToken, "Waits"], Coroutine[Any, Any, RunResult]]
"""Does the work of a task. It stops when the token is set, and calls the second argument when it waits for a human."""
Waits = Callable[[str | None], None]


class TaskReporter:
    """Reports the status of a task to its audience; closed when the task has ended. This one has no audience."""

    @property
    def is_lost(self) -> bool:
        """True if another process continues the run that started the task, and the task with it."""
        return False

    def report(self, task_id: str, status: str) -> None: ...

    def close(self) -> None: ...


class LocalTask(Struct, eq=False):
    """The handle of a task that this process executes."""

    record: TaskRecord
    token: CancellationToken
    reporter: TaskReporter
    at_end: Callable[[], None] | None = None
    """Called once when the task is over here."""
    is_looked_on: bool = False
    """True if it is executed elsewhere and was not started here: it continues when this process ends."""
    ended: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    job: asyncio.Task[None] | None = None
    notes: Jobs = msgspec.field(default_factory=partial(Jobs, "a task record could not be written"))
    """Writes in progress about its waits."""
    last_beat: float = msgspec.field(default_factory=time.monotonic)


class TaskService:
    """The tasks of one repository: start, adopt, await and cancel them. Close it with the runtime."""

    def __init__(self, repository: TaskRepository, clock: Callable[[], float] = time.time) -> None:
        self.repository, self._clock = repository, clock
        self.node = f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}@{process_identity()}"
        self._local: dict[str, LocalTask] = {}
        self._sweeper = Sweeper(repository, clock)
        self._watch: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._next_sweep: float | None = None
        self._troubled: set[TaskScope | None] = set()
        """Sessions whose records cannot be read or written just now, and None if the last sweep failed: this was logged."""
        self._closing = False
        self.watchers: dict[str, Callable[[TaskRecord], Awaitable[None]]] = {}
        """For each agent: watches a remote task of it whose process is gone."""
        self._left = set[str]()
        """The logs whose tasks are left to others."""

    async def start(
        self,
        record: TaskRecord,
        work: Work,
        reporter: TaskReporter | None = None,
        token: CancellationToken | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> TaskRecord:
        """Store a task, then execute it. A RUNNING task is work that has started, with its token. It outlives its parent run."""
        task = LocalTask(record, token or CancellationToken(), reporter or TaskReporter(), at_end)
        self._local[record.task_id] = task
        try:
            await self.repository.add(record)
        except BaseException:
            self._drop(task)
            raise
        task.reporter.report(record.task_id, record.status)
        self._execute_here(task, work)
        return record

    async def resume(
        self, record: TaskRecord, work: Work, reporter: TaskReporter, token: CancellationToken
    ) -> TaskRecord | None:
        """Continue a task whose process is gone, unless it is executed here.

        If it has ended, return its record; the caller then closes the reporter.
        """
        if record.task_id not in self._local:
            scope, task_id = record.scope, record.task_id
            now = await self.repository.update(scope, task_id, lambda old: take_over(old, self._clock(), self.node))
            if now is not None and now.status.is_terminal:
                return now
            if now is not None:
                self._execute_here(LocalTask(now, token, reporter), work)
                return None
        reporter.close()
        return None

    def attach(self, record: TaskRecord, work: Work) -> None:
        """Watch a task that is executed elsewhere, unless this process does so already."""
        if record.task_id not in self._local:
            self._execute_here(LocalTask(record, CancellationToken(), TaskReporter(), is_looked_on=True), work)

    def as_shown(self, record: TaskRecord) -> TaskRecord:
        """Return a record as models see it: a task of this process is running, also before its record says so."""
        begins = record.status is TaskStatus.PENDING and record.task_id in self._local
        return msgspec.structs.replace(record, status=TaskStatus.RUNNING) if begins else record

    def _execute_here(self, task: LocalTask, work: Work) -> None:
        self._local[task.record.task_id] = task
        task.job = asyncio.create_task(self._execute(task, work), name=task.record.task_id)
        self.watch()

    async def wait(self, scope: TaskScope, task_id: str, seconds: float) -> TaskRecord | None:
        """Return a task of any process once it has ended, or as it is after `seconds`."""
        deadline = time.monotonic() + max(seconds, 0)
        backoff = Backoff(0.02, self.repository.settings.look_every, factor=1.5)
        while True:
            record = await self.repository.get(scope, task_id)
            left = deadline - time.monotonic()
            if record is None or record.status.is_terminal or left <= 0:
                return record
            task = self._local.get(task_id)
            if task is not None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(task.ended.wait(), left)
            elif is_abandoned(record):
                await self.sweep()
            else:
                await asyncio.sleep(min(backoff.next(), left))

    async def cancel(self, scope: TaskScope, task_id: str, grace: float = GRACE) -> TaskRecord | None:
        """Request that a task stops, and wait up to `grace` seconds for its end."""
        record = await self.repository.update(scope, task_id, lambda old: request_cancel(old, self._clock()))
        if record is None or record.status.is_terminal:
            return record
        if (task := self._local.get(task_id)) is not None:
            task.token.set(TASK_CANCELLED)
        return await self.wait(scope, task_id, grace)

    async def sweep(self, *, trust_clock: bool = False) -> list[TaskRecord]:
        """End the tasks whose executors are gone, and return them; watch remote tasks that no process watches."""
        ended = await self._sweeper.sweep(self._local.keys(), trust_clock=trust_clock)
        for record in self._sweeper.unwatched:
            await self._watch_again(record)
        return ended

    async def watch_unwatched(self, records: Iterable[TaskRecord]) -> None:
        """Watch the remote tasks among these whose processes are gone, without waiting for the next sweep."""
        is_ours = self._watch is not None and self._watch.get_loop() is asyncio.get_running_loop()
        for record in records:
            if is_ours and not self._closing and record.task_id not in self._local and is_unwatched(record):
                await self._watch_again(record)

    async def _watch_again(self, record: TaskRecord) -> None:
        """Watch a remote task whose process is gone, unless another process has begun to."""
        watch, gone = self.watchers.get(record.parent_agent_id), record.node

        def take(old: TaskRecord) -> TaskRecord | None:
            return take_over(old, self._clock(), self.node) if old.node == gone else None

        if watch is not None:
            now = await self.repository.update(record.scope, record.task_id, take)
            if now is not None and now.node == self.node:
                await watch(now)

    def watch(self) -> None:
        """Start the watch, unless it runs: it sweeps for orphans and writes the heartbeats of this process."""
        self._woken.set()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._keep_watch(), name="retinue-tasks")

    def leave(self, logs: Collection[str]) -> None:
        """Leave the tasks of these logs as they are: the next owner of the logs continues them."""
        self._left.update(logs)

    def _is_left(self, task: LocalTask) -> bool:
        """Return whether a task is left to the next owner of its log."""
        return task.record.log_id in self._left or task.reporter.is_lost

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
        await join(jobs, grace)
        left = [job for job in jobs if not job.done()]
        if self._watch is not None:
            left.append(self._watch)
        await cancel_all(left, grace)

    def _drop(self, task: LocalTask) -> None:
        self._local.pop(task.record.task_id, None)
        task.ended.set()
        if task.at_end is not None:
            task.at_end()
        task.reporter.close()

    async def _execute(self, task: LocalTask, work: Work) -> None:
        """Execute a task and write its end, also if it fails."""
        try:
            try:
                ending = await self._work(task, work)
            except asyncio.CancelledError:
                if not task.is_looked_on:
                    await self._finish(task, _End(TaskStatus.CANCELLED, error=task.token.reason or "its process ended"))
                raise
            await self._finish(task, ending)
        finally:
            self._drop(task)

    async def _work(self, task: LocalTask, work: Work) -> _End:
        """Do the work of a task and return its end."""
        try:
            if task.record.status is TaskStatus.PENDING and not await self._begin(task):
                return _End(TaskStatus.CANCELLED, error="it was cancelled before it began")
            outcome = await work(task.token, lambda question: self._note_wait(task, question))
        except Exception as exc:
            # Our errors say what is wrong; a traceback of our own code would not help.
            trace = None if isinstance(exc, RetinueError) else exc
            _log.error("task %s failed: %s", task.record.task_id, exc, exc_info=trace)
            return _End(TaskStatus.FAILED, error=f"{type(exc).__name__}: {exc}")
        end = _end_of(outcome)
        if task.token.is_set() and end.status is not TaskStatus.COMPLETED:
            return replace(end, status=TaskStatus.CANCELLED, error=task.token.reason)
        return end

    async def _begin(self, task: LocalTask) -> bool:
        scope, task_id = task.record.scope, task.record.task_id
        record = await self.repository.update(scope, task_id, lambda old: begin(old, self._clock(), self.node))
        if record is None or record.status is not TaskStatus.RUNNING:
            return False
        task.reporter.report(record.task_id, record.status)
        return True

    async def _finish(self, task: LocalTask, end: _End) -> None:
        """Write the end of a task; retry for as long as this process lives."""
        if self._is_left(task):
            return
        await join(task.notes)
        settings = self.repository.settings
        backoff = Backoff(settings.look_every, settings.heartbeat)
        while True:
            try:
                await self._write_end(task, end)
                return
            except Exception as exc:
                _log.error("the end of task %s (%s) cannot be written: %s", task.record.task_id, end.status, exc)
                if self._closing:
                    return  # the sweeper of any process will find the record without a sign of life
            await backoff.wait()

    async def _write_end(self, task: LocalTask, end: _End) -> None:
        kept, text = None, end.text
        try:
            kept = await self.repository.keep_result(task.record, text) if text else None
        except Exception as exc:
            _log.warning("task %s: its result stays in its record, as %s", task.record.task_id, exc)

        def write(record: TaskRecord) -> TaskRecord | None:
            shown = text if kept is None or text is None else f"{text[:1000]}…"
            now = self._clock()
            return finish(record, end.status, now, result=shown, result_file=kept, error=end.error, receipt=end.receipt)

        record = await self.repository.update(task.record.scope, task.record.task_id, write)
        task.reporter.report(task.record.task_id, end.status if record is None else record.status)

    def _note_wait(self, task: LocalTask, question: str | None) -> None:
        """Record that a human is asked, or (None) has answered."""
        if self._is_left(task):
            return
        scope, task_id = task.record.scope, task.record.task_id

        async def write() -> None:
            await self.repository.update(scope, task_id, lambda old: await_human(old, self._clock(), question))
            task.reporter.report(task_id, TaskStatus.RUNNING)

        task.notes.start(write())

    async def _keep_watch(self) -> None:
        settings = self.repository.settings
        if self._next_sweep is None:
            self._next_sweep = time.monotonic()  # the first one at once: it may be after a long downtime
        while True:
            try:
                for scope in {task.record.scope for task in self._local.values()}:
                    await self._check_session(scope)
                if time.monotonic() >= self._next_sweep:
                    await self.sweep()
                    soon = self._sweeper.proof if self._sweeper.suspects else settings.sweep_every
                    self._next_sweep = time.monotonic() + min(soon, settings.sweep_every)
                    self._troubled.discard(None)
            except Exception as exc:
                if not isinstance(exc, RetinueError):
                    _log.exception("looking after tasks failed; it is tried again")
                else:
                    self._log_once(None, "lost tasks cannot be looked for, which is tried again: %s", exc)
                self._next_sweep = time.monotonic() + settings.sweep_every
            self._woken.clear()
            if self._local:
                await asyncio.sleep(settings.look_every)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), max(self._next_sweep - time.monotonic(), 0.01))

    async def _check_session(self, scope: TaskScope) -> None:
        """Check the tasks of one session. A failure is logged once, and does not affect other sessions."""
        try:
            await self._check_tasks(scope)
            self._troubled.discard(scope)
        except RetinueError as exc:
            self._log_once(scope, "the tasks of session %s cannot be looked after: %s", scope.session_id, exc)

    def _log_once(self, trouble: TaskScope | None, message: str, *args: object) -> None:
        if trouble not in self._troubled:
            self._troubled.add(trouble)
            _log.error(message, *args)

    async def _check_tasks(self, scope: TaskScope) -> None:
        """Stop the tasks that were cancelled or given up on, and write heartbeats for the others."""
        now, settings = time.monotonic(), self.repository.settings
        due: list[LocalTask] = []
        records = {record.task_id: record for record in await self.repository.list(scope)}
        for task in list(self._local.values()):
            record = records.get(task.record.task_id)
            if record is None or task.job is None:
                continue
            if record.cancel_requested:
                task.token.set(TASK_CANCELLED)
            elif record.status.is_terminal:
                task.token.set("another process has given up on it")
            elif now - task.last_beat >= settings.heartbeat:
                due.append(task)
        if due:
            known = await self.repository.liveness(scope)  # a task whose life is known needs no heartbeat
            beating = [task.record for task in due if task.record.task_id not in known]
            now_alive = partial(beat, now=self._clock(), node=self.node)
            await asyncio.gather(*[self.repository.update(one.scope, one.task_id, now_alive) for one in beating])
            for task in due:
                task.last_beat = now


class _End(Struct, frozen=True):
    """The end of a task."""

    status: TaskStatus
    text: str | None = None
    error: str | None = None
    receipt: Receipt | None = None


def _end_of(outcome: RunResult) -> _End:
    """Return the end of a task from the result of its child."""
    if outcome.status is RunStatus.COMPLETED:
        return _End(TaskStatus.COMPLETED, outcome.response or "", receipt=outcome.receipt)
    if outcome.status is RunStatus.CANCELLED:
        return _End(TaskStatus.CANCELLED, outcome.response, outcome.error, outcome.receipt)
    text = "\n".join([part for part in (outcome.response, finished_calls(outcome)) if part]) or None
    return _End(TaskStatus.FAILED, text, outcome.error or outcome.termination, outcome.receipt)
