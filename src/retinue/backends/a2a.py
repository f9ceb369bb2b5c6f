"""Runs on servers that speak A2A: a run is a task there, and its thread is a context."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, cast

from a2a.types import a2a_pb2 as pb
from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.concurrency import FIRST_PAUSE, Backoff, cancel_all, join, until_stopped, wait_for_first
from ..core.content import to_json_bytes
from ..core.decisions import Decision
from ..core.errors import ExecutionBackendError, RetinueError
from ..core.messages import Message, TextPart
from ..core.results import SuspendTicket
from ..core.runs import RunResult, RunStatus
from .a2a_client import A2AClient, UnknownTask, is_id
from .a2a_task import STATUS, TaskView, data_of
from .http_client import MOST_BYTES, NotOffered, NotSent
from .remote import MOST_WORDS, STOP_SECONDS, Follower, Outcome, RemoteBackend, reason_of

ACCEPT_SECONDS = 1.0
"""Seconds in which a server should name the task that is to be stopped."""
MOST_QUESTIONS = 100
"""Questions after which a task is given up: it accepts no answer."""
SILENCE_SECONDS = 60.0
"""Seconds without an event after which a stream counts as broken: the task is then looked at again."""
OLD_SECONDS = 5.0
"""Seconds for which a task may show a question after it was answered."""
MOST_REPORTS = 1000
MOST_ASKED = 100_000
"""Bytes of the data beside a question."""
_FAILURES = (ConnectionError, ExecutionBackendError, NotOffered, UnknownTask)
"""What a request to a server raises."""


class A2ABackend(RemoteBackend[A2AClient]):
    """Executes runs through an A2A client. A run has a local id; the server chooses the id of its task."""

    capabilities = dataclasses.replace(RemoteBackend.capabilities, waits="input_and_auth", output="text_and_artifacts")

    def follower(self, request: RunRequest) -> A2AFollower:
        return A2AFollower(self, request)


class A2AFollower(Follower[A2AClient]):
    """One run and its task. `view` is the task as it is known so far.

    Events of a stream have no numbers, so a subscription may give what a snapshot has already. Invariant: text comes from
    the answer to a message, whose events are all there and in order, or from snapshots. An update of a subscription only
    says that there is more: the next snapshot has it. Text is emitted only if it continues what was emitted before."""

    def __init__(self, backend: A2ABackend, request: RunRequest) -> None:
        super().__init__(backend, request)
        self._tasks = backend.tasks
        context_id = str(request.remote.get("context_id", "") or request.identity.thread_id)
        self.view = TaskView(str(self.noted.get("task_id", "")), context_id)
        self._asked_before = int(self.noted.get("questions", 0))
        self._is_in_step = True
        self._reported: tuple[str, str | None]
        self._reported, self._reports = (str(request.remote.get("status", "")), None), 0
        self._old: tuple[str, str] | None = None
        """The id and text of a question that was answered; the server may show it for a while."""
        self._old_until = 0.0
        self._has_other = False
        """True if the server sent something about another task."""
        self._is_streamed = False
        """True if the last news came from a stream, and not from a snapshot."""
        self._has_gap = False
        """True if something may have been missed: a snapshot is needed."""
        self._changed = asyncio.Event()
        """Set when a subscription has said that there is more."""

    @property
    def has_ended(self) -> bool:
        return self.view.has_ended

    @property
    def is_complete(self) -> bool:
        return self.view.state == "completed"

    @property
    def _questions(self) -> int:
        """The number of questions so far, including an open one."""
        return self._asked_before + (self.view.is_waiting and self.refused is None)

    def ids(self) -> dict[str, Any]:
        view = self.view
        known = {"protocol": "a2a", "task_id": view.task_id, "context_id": view.context_id, "status": view.state}
        return {**known, "questions": self._questions}

    def release(self) -> None:
        if self._tasks.get(self.view.task_id) == self.run_id:
            del self._tasks[self.view.task_id]

    def result(self, status: RunStatus, error: str | None) -> RunResult:
        view, is_complete = self.view, status is RunStatus.COMPLETED
        # A server may show a stopped task without what it has streamed.
        text = view.answer() if is_complete else view.text() or self._streamed.text
        response = None if status.is_waiting else text or None
        more = view.parts() if is_complete else []
        said = [TextPart(response)] if response else []
        return self._make_result(
            status,
            error,
            response,
            Message.assistant([*said, *more]) if more else None,
            output=data_of(more),
            steps=view.steps,
            usage=view.usage,
            suspended=self._tickets(status) if status.is_waiting else {},
        )

    def _tickets(self, status: RunStatus) -> dict[str, SuspendTicket]:
        """Return the question of a task that waits, as a ticket."""
        action = "auth" if status is RunStatus.WAITING_AUTH else "input"
        name = f"{action}_{self._questions}"
        asked: Any = self.view.asked_data()
        if asked is not None and len(to_json_bytes(asked)) > MOST_ASKED:
            asked = None
        message = self._said() or f"it waits for {action}"
        ticket = SuspendTicket(f"{self.run_id}-{name}", f"a2a:{action}_required", message, asked, path=(name,))
        if isinstance(asked, dict) and isinstance(schema := cast("dict[str, Any]", asked).get("schema"), dict):
            with suppress(RetinueError):  # only our own server sends the schema of an answer in this form
                return {name: replace(ticket, response_schema=cast("dict[str, Any]", schema))}
        return {name: ticket}

    async def follow(self) -> Outcome:
        try:
            if self.request.is_dispatched:
                await self._find_again()
                if self.request.decisions and not self._token.is_set():
                    reason = await self._decide(next(iter(self.request.decisions.values())))
                    if reason is not None:
                        problem = await self._stop_there()
                        return RunStatus.CANCELLED, reason if problem is None else f"{reason}; {problem}"
            else:
                await self._send_first()
            await self._settle()
        except ExecutionBackendError:  # the server breaks the protocol: stop reading
            if self.accepted.is_set():
                await self._stop_there()
            raise
        if self._is_streamed and self.view.has_ended and self.view.task_id:
            await self._confirm()
        return await self._outcome()

    async def _outcome(self) -> Outcome:
        view, status = self.view, STATUS[self.view.state]
        if status.is_waiting and self._questions > MOST_QUESTIONS:
            await self._stop_there()
            return RunStatus.FAILED, f"it has asked {MOST_QUESTIONS} times and was stopped"
        if status is RunStatus.FAILED:
            said = self._said() or "the server gave no reason"
            return status, f"it refused the task: {said}" if view.state == "rejected" else said
        if status is RunStatus.CANCELLED:
            return status, self._said() or "it was cancelled at the server"
        return status, self.refused

    async def stop(self, work: asyncio.Task[Outcome]) -> str | None:
        await wait_for_first(self.accepted.wait(), join([work]), seconds=ACCEPT_SECONDS)
        await cancel_all([work])
        if not self.accepted.is_set() and not work.cancelled() and (problem := work.exception()) is not None:
            raise problem
        return await self._stop_there()

    async def _stop_there(self) -> str | None:
        """Ask the server to stop the task and wait a limited time for its end. Return a problem, if there is one."""
        if not self.view.task_id:
            return None if self.view.has_ended else "the server has not said which task it is: it may go on there"
        problem = None
        try:
            async with asyncio.timeout(STOP_SECONDS):
                try:
                    self._load(await self._client.cancel(self.view.task_id))
                except NotOffered as exc:
                    problem = f"the server does not stop it ({exc})"
        except UnknownTask:
            return None
        except (ConnectionError, ExecutionBackendError, TimeoutError) as exc:
            return f"the server could not be reached ({exc})"
        with suppress(*_FAILURES, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while not self.view.has_ended:
                    self._load(await self._client.task(self.view.task_id))
                    if problem is not None:
                        break
                    await asyncio.sleep(0 if self.view.has_ended else FIRST_PAUSE)
        self._report_state()
        return None if self.view.has_ended else problem or "the server has not stopped it yet"

    # --- the first message, and the answers

    async def _send_first(self) -> None:
        """Send the task, unless the server has it already; raise ExecutionBackendError if the server does not accept it."""
        texts, patience = self._texts_to_send(), self._submit_patience
        try:
            await self._retry(self._client.open, patience)
            if self.request.may_be_sent and await self._retry(lambda: self._find(self.run_id), patience):
                self._has_gap = True
                return
            await self._send(self.run_id, texts)
        except ConnectionError:
            self._client.forget_card()
            raise
        except (NotOffered, UnknownTask) as exc:
            self._client.forget_card()
            raise self._client.error(f"did not take the task: {exc}") from exc
        if not self.accepted.is_set():
            raise self._client.error("answered nothing")

    async def _send(self, message_id: str, parts: list[Any]) -> None:
        """Send a message and read the events that follow. A broken connection after the first event is not an error."""
        deadline = time.monotonic() + self._connect_patience
        while True:
            taken, task_id = False, self.view.task_id
            limits = None if task_id else self.request.limits
            stream = self._client.send(message_id, self.view.context_id, parts, task_id, limits)
            try:
                async for _ in self._events(stream, is_first=not task_id):
                    taken = True
                return
            except NotSent:
                if taken or time.monotonic() >= deadline or self._token.is_set():
                    raise
                await asyncio.sleep(FIRST_PAUSE)
            except NotOffered:
                if not self._client.can_stream:
                    raise
                self._client.stop_streaming()
            except ConnectionError as exc:
                self._has_gap = True
                if not taken and not await self._was_taken(message_id):
                    problem = f"{exc}; it is not known whether the server has the message"
                    raise ConnectionError(problem) from None
                return

    async def _was_taken(self, message_id: str) -> bool:
        """Return whether the server has a message whose answer was lost."""
        try:
            if self.view.task_id:
                await self._look()
                return message_id in self.view.message_ids or not self.view.is_waiting
            return await self._retry(lambda: self._find(message_id))
        except _FAILURES:
            return False

    async def _find(self, message_id: str) -> bool:
        """Look for the task of a message among those of the conversation, then among all: a server may choose the id of
        the conversation."""
        for context_id in (self.view.context_id, ""):
            try:
                found = (await self._client.tasks(context_id)).tasks
            except (NotOffered, ExecutionBackendError):
                return False
            ours = [task for task in found if any(one.message_id == message_id for one in task.history)]
            if ours:
                self._begin(ours[0].id, ours[0].context_id)
                return True
        return False

    async def _find_again(self) -> None:
        """Find the task of a run that was sent before, perhaps by another process."""
        if self.view.task_id:
            self._tasks[self.view.task_id] = self.run_id
        elif not await self._retry(lambda: self._find(self.run_id)):
            raise ConnectionError(f"{self._client.url} does not know the task any more")
        self._has_gap = True

    async def _decide(self, decision: Decision) -> str | None:
        """Pass an answer on, unless the server has it already or another client has answered there. If a human ends the
        task instead, return the reason."""
        await self._look()
        if not self.view.is_waiting:
            return None
        if decision.action == "cancel":
            return decision.reason or "cancelled by a decision"
        message_id = f"{self.run_id}-{decision.id}"
        if message_id in self.view.message_ids:
            return None
        if decision.payload is None or decision.payload == "":
            if self.view.state != "auth_required":  # a login elsewhere needs no message: read the task again
                self.refused = "the question needs an answer: write Decision.resume(text)"
            return None
        self._old, self._old_until = self._shown(), time.monotonic() + OLD_SECONDS
        try:
            await self._send(message_id, [decision.payload])
            if self._has_other and self.view.is_waiting:
                raise ConnectionError("the server made another task of it and cannot continue one")
        except _FAILURES as exc:
            self._old = None
            self._refuse(f"the answer could not be sent: {reason_of(exc)}")
            await self._look()
        return None

    # --- what happens to the task

    async def _settle(self) -> None:
        """Follow the task until it has ended or waits. Pauses grow, unless text comes."""
        backoff = Backoff()
        while not self._is_settled() or self._has_gap:
            size = self._streamed.size
            await self._look()
            if self._is_settled():
                return
            if self._client.can_stream:
                await self._watch()
                if self._streamed.size > size:
                    backoff.reset()
            await backoff.wait()

    async def _watch(self) -> None:
        """Read a subscription, and snapshots as it says that there is more, until either shows the end or breaks."""
        self._changed.clear()
        async with until_stopped(self._read_subscription(), self._look_at_changes()) as reading:
            if reading.done():
                reading.result()

    async def _read_subscription(self) -> None:
        with suppress(NotOffered, ConnectionError):  # it has none, or the task has just ended; the next snapshot tells
            async for _ in self._events(self._client.subscribe(self.view.task_id), is_exact=False):
                pass

    async def _look_at_changes(self) -> None:
        backoff = Backoff()
        with suppress(*_FAILURES):  # `_settle` meets it again
            while not self._is_settled():
                await self._changed.wait()
                await backoff.wait()
                self._changed.clear()
                await self._look()

    async def _confirm(self) -> None:
        """Use the artifacts of a last snapshot, if it has any: some servers stream only states, and a proxy may repeat an
        event. If the server cannot show the task, keep what was streamed."""
        with suppress(*_FAILURES, TimeoutError):
            async with asyncio.timeout(2 * STOP_SECONDS):
                task = await self._retry(lambda: self._client.task(self.view.task_id), STOP_SECONDS)
            shown = TaskView()
            shown.load(task)
            if (task.id, shown.state) == (self.view.task_id, self.view.state) and (shown.text() or shown.parts()):
                self._load(task)
                self._compare_text()

    async def _look(self) -> None:
        """Read a snapshot of the task."""
        task_id = self.view.task_id
        if not task_id:
            raise ConnectionError(f"{self._client.url} gave no task, only a message that was lost")

        async def ask() -> pb.Task:
            task = await self._client.task(task_id)
            if task.id != task_id:  # a proxy mixes up the answers
                raise ConnectionError(f"{self._client.url} answered about another task")
            return task

        try:
            task = await self._retry(ask)
        except UnknownTask:
            raise ConnectionError("the server does not know the task any more") from None
        except NotOffered as exc:
            raise ConnectionError(f"{self._client.url} does not show the task: {exc}") from None
        self._has_gap = self._is_streamed = False
        self._load(task)
        self._compare_text()
        self._report_state()

    async def _events(
        self, stream: AsyncGenerator[pb.StreamResponse], *, is_first: bool = False, is_exact: bool = True
    ) -> AsyncGenerator[None]:
        """Apply the events of a stream, until it ends or the task has ended or waits.

        Other work has its turn after each, also while the server sends faster than this can read."""
        async with aclosing(stream):
            while True:
                try:
                    async with asyncio.timeout(None if is_first and not self.accepted.is_set() else SILENCE_SECONDS):
                        update = await anext(stream)
                except StopAsyncIteration:
                    self._old = None
                    return
                except TimeoutError:
                    raise ConnectionError(f"{self._client.url} is silent") from None
                self._take(update, is_exact)
                yield
                if self._is_settled():
                    return
                await asyncio.sleep(0)

    def _take(self, update: pb.StreamResponse, is_exact: bool) -> None:
        kind = update.WhichOneof("payload")
        found: Any = getattr(update, kind or "task")
        task_id: str = "" if kind == "message" else found.id if kind == "task" else found.task_id
        if not self.accepted.is_set():
            if kind is None:
                return
            self._begin(task_id, found.context_id, is_message=kind == "message")
        elif kind != "message" and task_id != self.view.task_id:
            self._has_other = True
            return
        self._is_streamed, self._has_gap = True, self._has_gap or not is_exact
        if kind == "artifact_update" and not is_exact:
            self._changed.set()
            return
        fresh = self.view.apply(update)
        self._check_size()
        if kind == "artifact_update":
            self._add_text(fresh)
        else:
            if kind == "task":
                self._compare_text()
            self._report_state()

    def _begin(self, task_id: str, context_id: str, is_message: bool = False) -> None:
        """Store the ids of the task that the server has created."""
        if not is_message and not is_id(task_id):
            raise self._client.error("gave the task an id that cannot be used")
        if self._tasks.get(task_id, self.run_id) != self.run_id:
            raise self._client.error("gave the task the id of another run's")
        if task_id:
            self.view.task_id = task_id
            self._tasks[task_id] = self.run_id
        if is_id(context_id):
            self.view.context_id = context_id
        self.accept()
        self._note()

    def _load(self, task: pb.Task) -> None:
        self.view.load(task)
        self._check_size()

    def _check_size(self) -> None:
        if self.view.size > MOST_BYTES:
            raise self._client.error(f"sent artifacts of more than {MOST_BYTES:,} bytes")

    def _compare_text(self) -> None:
        """Emit what a snapshot has after the emitted text."""
        fresh = self._streamed.rest_of(self.view.text())
        self._is_in_step = fresh is not None
        if fresh:
            self._emit_text(fresh)

    def _add_text(self, fresh: str | None) -> None:
        """Emit the text that is new at the end; nothing if the text has changed in another way, until the next snapshot."""
        self._is_in_step = self._is_in_step and fresh is not None
        if fresh and self._is_in_step:
            self._emit_text(fresh)

    def _said(self) -> str:
        return self.view.question()[:MOST_WORDS].strip()

    def _report_state(self) -> None:
        """Report the state, and what the server says about it, when they change."""
        view = self.view
        said = "" if view.has_ended else self._said()
        if self._reported in ((view.state, said), (view.state, None)):
            return
        self._reported = view.state, said
        self._reports += 1
        if self._reports <= MOST_REPORTS or view.is_settled:
            more = {"message": said} if said else {}
            self._report(view.state, task_id=view.task_id, context_id=view.context_id, **more)

    def _is_settled(self) -> bool:
        """Return whether the task has ended, or waits for something other than the answer just sent."""
        if not self.view.is_settled or self._old is None:
            return self.view.is_settled
        return not self.view.is_waiting or self._shown() != self._old or time.monotonic() > self._old_until

    def _shown(self) -> tuple[str, str]:
        said = self.view.said
        return ("", "") if said is None else (said.message_id, self.view.question())
