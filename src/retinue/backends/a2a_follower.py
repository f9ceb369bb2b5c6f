"""Follows one task of an A2A server: sends its messages, reads what happens to it, and reports that."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from ..core.backend import RunRequest
from ..core.content import to_json_bytes
from ..core.decisions import Decision
from ..core.errors import ExecutionBackendError
from ..core.events import Custom, ErrorRaised, TextDelta
from .a2a_client import A2AClient, NotOffered, NotSent, UnknownTask, is_id
from .a2a_task import STATUS, TaskView, WireTask, read_task, read_tasks, read_update
from .http_client import MOST_BYTES
from .remote import FIRST_PAUSE, LONGEST_PAUSE, STOP_SECONDS, retry, submit_patience, texts_to_send

SILENCE_SECONDS = 60.0
"""Seconds without an event after which a stream counts as broken: the task is then looked at again."""
OLD_SECONDS = 5.0
"""Seconds for which a task may show a question after it was answered."""
MOST_REPORTS = 1000
MOST_WORDS = 20_000
MOST_ASKED = 100_000
"""Characters of a question, and bytes of the data beside it."""


class Given(Exception):
    """A human has decided that the task ends."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class A2AFollower:
    """One run and its task. `view` is the task as it is known so far.

    Events of a stream have no numbers. So after a break the follower first reads a snapshot, which replaces `view`. It
    emits text only if the text continues what was emitted before."""

    def __init__(self, client: A2AClient, request: RunRequest, patience: float, tasks: dict[str, str]) -> None:
        self._client, self._request, self._patience, self._tasks = client, request, patience, tasks
        self._token, self.run_id, self._name = (
            request.cancellation,
            request.identity.run_id,
            request.identity.agent,
        )
        noted = request.remote
        task_id = str(noted.get("task_id", "")) if request.is_dispatched else ""
        self.view = TaskView(task_id, str(noted.get("context_id", "") or request.identity.thread_id))
        self._asked_before = int(noted.get("questions", 0)) if request.is_dispatched else 0
        self.accepted = asyncio.Event()
        self.refused: str | None = None
        """Why the server refused an answer."""
        self._streamed, self._is_in_step = [request.streamed], True
        self._reported: tuple[str, str | None]
        self._reported, self._reports = (str(noted.get("status", "")), None), 0
        self._old: tuple[str, str] | None = None
        """The id and text of a question that was answered; the server may show it for a while."""
        self._old_until = 0.0
        self._has_other = False
        """True if the server sent something about another task."""
        self._is_streamed = False
        """True if the last news came from a stream, and not from a snapshot."""
        self._has_gap = False
        """True if something may have been missed: a snapshot is needed."""

    @property
    def questions(self) -> int:
        """The number of questions so far, including an open one."""
        waits = self.view.state in STATUS and STATUS[self.view.state].is_waiting
        return self._asked_before + (waits and self.refused is None)

    def ids(self) -> dict[str, Any]:
        """The ids of the task, in their stored form."""
        view = self.view
        known = {"protocol": "a2a", "task_id": view.task_id, "context_id": view.context_id, "status": view.state}
        return {**known, "questions": self.questions}

    def words(self, text: str) -> str:
        return text[:MOST_WORDS].strip()

    def asked_data(self) -> Any:
        asked = self.view.asked_data()
        return None if asked is None or len(to_json_bytes(asked)) > MOST_ASKED else asked

    def release(self) -> None:
        """Note that this follower no longer follows the task."""
        if self._tasks.get(self.view.task_id) == self.run_id:
            del self._tasks[self.view.task_id]

    async def follow(self) -> None:
        """Return when the task has ended or waits. Short outages of the server are retried.

        Raises ExecutionBackendError if the server does not accept the task."""
        if self._request.is_dispatched:
            await self._find_again()
            if self._request.decisions and not self._token.is_set():
                await self._decide(next(iter(self._request.decisions.values())))
        else:
            await self._submit()
        await self._settle()
        if self._is_streamed and self.view.has_ended and self.view.task_id:
            await self._confirm()

    async def stop(self, seconds: float) -> str | None:
        """Ask the server to stop the task and wait a limited time for its end. Return a problem, if there is one."""
        if not self.view.task_id:
            return None if self.view.has_ended else "the server has not said which task it is: it may go on there"
        problem = None
        try:
            async with asyncio.timeout(seconds):
                try:
                    self._load(read_task(await self._client.cancel(self.view.task_id)))
                except NotOffered as exc:
                    problem = f"the server does not stop it ({exc})"
        except UnknownTask:
            return None
        except (ConnectionError, ExecutionBackendError, TimeoutError) as exc:
            return f"the server could not be reached ({exc})"
        with suppress(ConnectionError, ExecutionBackendError, NotOffered, UnknownTask, TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.view.has_ended:
                    self._load(read_task(await self._client.task(self.view.task_id)))
                    if problem is not None:
                        break
                    await asyncio.sleep(0 if self.view.has_ended else FIRST_PAUSE)
        self._report()
        return None if self.view.has_ended else problem or "the server has not stopped it yet"

    # --- the first message, and the answers

    async def _submit(self) -> None:
        """Send the task, unless the server has it already; raise ExecutionBackendError if the server does not accept it."""
        texts, patience = texts_to_send(self._request), submit_patience(self._request, self._patience)
        try:
            await retry(self._client.open, patience, self._token)
            if self._request.may_be_sent and await retry(lambda: self._find(self.run_id), patience, self._token):
                self._has_gap = True
                return
            await self._send(self.run_id, texts, patience)
        except ConnectionError as exc:
            self._client.forget_card()
            raise ExecutionBackendError(self._name, str(exc)) from exc
        except (NotOffered, UnknownTask) as exc:
            self._client.forget_card()
            raise ExecutionBackendError(self._name, f"{self._client.url} did not take the task: {exc}") from exc
        if not self.accepted.is_set():
            raise ExecutionBackendError(self._name, f"{self._client.url} answered nothing")

    async def _send(self, message_id: str, parts: list[Any], patience: float) -> None:
        """Send a message and read the events that follow. A broken connection after the first event is not an error."""
        deadline = time.monotonic() + patience
        while True:
            taken, task_id = False, self.view.task_id
            limits = None if task_id else self._request.limits
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
                return message_id in self.view.message_ids or not self._is_waiting()
            return await retry(lambda: self._find(message_id), self._patience, self._token)
        except (ConnectionError, ExecutionBackendError, NotOffered, UnknownTask):
            return False

    async def _find(self, message_id: str) -> bool:
        """Look for the task of a message among those of the conversation, then among all: a server may choose the id of
        the conversation."""
        for context_id in (self.view.context_id, ""):
            try:
                found = read_tasks(await self._client.tasks(context_id)).tasks
            except (NotOffered, ExecutionBackendError):
                return False
            ours = [task for task in found if any(one.message_id == message_id for one in task.history)]
            if ours:
                self._begin(ours[0].id, ours[0].context_id)
                return True
        return False

    async def _find_again(self) -> None:
        """Find the task of a run that was sent before, perhaps by another process."""
        if self._request.accepted is not None:
            self._request.accepted()
        self.accepted.set()
        if self.view.task_id:
            self._tasks[self.view.task_id] = self.run_id
        elif not await retry(lambda: self._find(self.run_id), self._patience, self._token):
            raise ConnectionError(f"{self._client.url} does not know the task any more")
        self._has_gap = True

    async def _decide(self, decision: Decision) -> None:
        """Pass an answer on, unless the server has it already or another client has answered there."""
        await self._look()
        if not self._is_waiting():
            return
        if decision.action == "cancel":
            raise Given(decision.reason or "cancelled by a decision")
        message_id = f"{self.run_id}-{decision.id}"
        if message_id in self.view.message_ids:
            return
        payload, is_auth = decision.payload, self.view.state == "auth_required"
        if payload is None or payload == "":
            if not is_auth:  # a login elsewhere needs no message: read the task again
                self.refused = "the question needs an answer: write Decision.resume(text)"
            return
        self._old, self._old_until = self._shown(), time.monotonic() + OLD_SECONDS
        try:
            await self._send(message_id, [payload], self._patience)
            if self._has_other and self._is_waiting():
                raise ConnectionError("the server made another task of it and cannot continue one")
        except (ConnectionError, ExecutionBackendError, NotOffered, UnknownTask) as exc:
            reason = exc.reason if isinstance(exc, ExecutionBackendError) else str(exc)
            self.refused, self._old = f"the answer could not be sent: {reason}", None
            if self._request.emit is not None:
                self._request.emit(ErrorRaised(message=self.refused, code="decision_refused"))
            await self._look()

    # --- what happens to the task

    async def _settle(self) -> None:
        """Follow the task until it has ended or waits."""
        pause = FIRST_PAUSE
        while not self._is_settled() or self._has_gap:
            await self._look()
            if self._is_settled():
                return
            if self._client.can_stream:
                try:
                    async for _ in self._events(self._client.subscribe(self.view.task_id)):
                        pause = FIRST_PAUSE
                except NotOffered:  # it has no subscriptions, or the task has just ended
                    pass
                except ConnectionError:
                    self._has_gap = True
                if self._is_settled() and not self._has_gap:
                    self._has_gap = True  # something may have happened before the subscription
                    continue
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _confirm(self) -> None:
        """Use the artifacts of a last snapshot, if it has any: some servers stream only states, and a proxy may repeat an
        event. If the server cannot show the task, keep what was streamed."""

        async def ask() -> WireTask:
            return read_task(await self._client.task(self.view.task_id))

        with suppress(ConnectionError, ExecutionBackendError, NotOffered, UnknownTask, TimeoutError):
            async with asyncio.timeout(2 * STOP_SECONDS):
                task = await retry(ask, STOP_SECONDS, self._token)
            shown = TaskView()
            shown.load(task)
            if (task.id, shown.state) == (self.view.task_id, self.view.state) and (shown.text() or shown.parts()):
                self._load(task)
                self._stream_text(None)

    async def _look(self) -> None:
        """Read a snapshot of the task."""
        task_id = self.view.task_id
        if not task_id:
            raise ConnectionError(f"{self._client.url} gave no task, only a message that was lost")

        async def ask() -> WireTask:
            task = read_task(await self._client.task(task_id))
            if task.id != task_id:  # a proxy mixes up the answers
                raise ConnectionError(f"{self._client.url} answered about another task")
            return task

        try:
            task = await retry(ask, self._patience, self._token)
        except UnknownTask:
            raise ConnectionError("the server does not know the task any more") from None
        except NotOffered as exc:
            raise ConnectionError(f"{self._client.url} does not show the task: {exc}") from None
        self._has_gap = self._is_streamed = False
        self._load(task)
        self._stream_text(None)
        self._report()

    async def _events(self, stream: AsyncGenerator[bytes], is_first: bool = False) -> AsyncGenerator[None]:
        """Apply the events of a stream, until it ends or the task has ended or waits."""
        async with aclosing(stream):
            while True:
                try:
                    async with asyncio.timeout(None if is_first and not self.accepted.is_set() else SILENCE_SECONDS):
                        data = await anext(stream)
                except StopAsyncIteration:
                    self._old = None
                    return
                except TimeoutError:
                    raise ConnectionError(f"{self._client.url} is silent") from None
                self._take(data)
                yield
                if self._is_settled():
                    return

    def _take(self, data: bytes) -> None:
        update, view = read_update(data), self.view
        if not self.accepted.is_set():
            found = update.message or update.task or update.status_update or update.artifact_update
            if found is None:
                return
            self._begin(update.task_id, found.context_id, is_message=update.message is not None)
        elif update.message is None and update.task_id != view.task_id:
            self._has_other = True
            return
        self._is_streamed = True
        fresh = view.apply(update)
        self._check_size()
        self._stream_text(fresh)
        self._report()

    def _begin(self, task_id: str, context_id: str, is_message: bool = False) -> None:
        """Store the ids of the task that the server has created."""
        if not is_message and not is_id(task_id):
            raise ExecutionBackendError(self._name, f"{self._client.url} gave the task an id that cannot be used")
        if self._tasks.get(task_id, self.run_id) != self.run_id:
            raise ExecutionBackendError(self._name, f"{self._client.url} gave the task the id of another run's")
        if task_id:
            self.view.task_id = task_id
            self._tasks[task_id] = self.run_id
        if is_id(context_id):
            self.view.context_id = context_id
        if not self.accepted.is_set():
            self.accepted.set()
            if self._request.accepted is not None:
                self._request.accepted()
        if self._request.note_remote is not None:
            self._request.note_remote(self.ids())

    def _load(self, task: WireTask) -> None:
        self.view.load(task)
        self._check_size()

    def _check_size(self) -> None:
        if self.view.size > MOST_BYTES:
            problem = f"{self._client.url} sent artifacts of more than {MOST_BYTES:,} bytes"
            raise ExecutionBackendError(self._name, problem)

    def _stream_text(self, fresh: str | None) -> None:
        """Emit the text that is new at the end; with `None`, find it by comparison with the emitted text."""
        if fresh is None:
            full, streamed = self.view.text(), "".join(self._streamed)
            self._is_in_step = full.startswith(streamed)
            fresh, self._streamed = full[len(streamed) :], [streamed]
        if fresh and self._is_in_step:
            self._streamed.append(fresh)
            if self._request.emit is not None:
                self._request.emit(TextDelta(delta=fresh))

    def _report(self) -> None:
        """Report the state, and what the server says about it, when they change."""
        view = self.view
        said = self.words(view.question()) if not view.has_ended else ""
        if self._reported in ((view.state, said), (view.state, None)) or self._request.emit is None:
            return
        self._reported = view.state, said
        self._reports += 1
        if self._reports > MOST_REPORTS and not view.is_settled:
            return
        data = {"type": "remote_task", "task_id": view.task_id, "context_id": view.context_id, "status": view.state}
        self._request.emit(Custom(data={**data, "message": said} if said else data))

    def _is_settled(self) -> bool:
        """Return whether the task has ended, or waits for something other than the answer just sent."""
        if not self.view.is_settled or self._old is None:
            return self.view.is_settled
        return not self._is_waiting() or self._shown() != self._old or time.monotonic() > self._old_until

    def _is_waiting(self) -> bool:
        return self.view.is_settled and not self.view.has_ended

    def _shown(self) -> tuple[str, str]:
        said = self.view.said
        return ("", "") if said is None else (said.message_id, said.text)
