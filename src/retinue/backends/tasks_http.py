"""Runs on a server that speaks the task protocol."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from msgspec.structs import replace

from ..core.backend import RunRequest
from ..core.concurrency import Backoff, CancellationToken, until_stopped
from ..core.content import to_json_bytes
from ..core.decisions import Decision
from ..core.errors import DecisionRefused, ExecutionBackendError
from ..core.events import ErrorRaised, Event, RunFinished, RunStarted
from ..core.runs import Limits, RunResult, RunStatus
from ..log.read import Cursor
from ..wire.resources import decisions_json
from ..wire.task_protocol import (
    TASKS_PATH,
    RemoteTask,
    TaskCancel,
    TaskSubmission,
    decode_event,
    decode_task,
    task_path,
)
from .http_client import ANSWER_SECONDS, NOT_OFFERED, HttpClient, NotOffered
from .remote import STOP_SECONDS, Follower, Outcome, RemoteBackend, retry

_STATUS = {"success": RunStatus.COMPLETED, "error": RunStatus.FAILED, "cancelled": RunStatus.CANCELLED}


class HttpTaskClient(HttpClient):
    """The client of a task server. `submit` may be repeated with the same id."""

    async def submit(
        self, task_id: str, agent_id: str, text: str, context: dict[str, str], limits: Limits | None = None
    ) -> None:
        body = to_json_bytes(TaskSubmission(task_id, agent_id, text, dict(context), limits))
        # With 409 it has the task already, and may have ended it.
        await self.ask("POST", TASKS_PATH, body, refusal="did not take the task", expected=(409,))

    async def state(self, task_id: str) -> RemoteTask:
        return await self._task(task_id, task_path(task_id))

    async def wait(self, task_id: str, seconds: float) -> RemoteTask:
        path = f"{task_path(task_id, 'wait')}?timeout_seconds={max(int(seconds), 1)}"
        return await self._task(task_id, path, seconds + 60)

    async def cancel(self, task_id: str, *, tasks: bool = False) -> None:
        """Ask the server to stop a task; its background tasks continue, unless `tasks` is true."""
        body = to_json_bytes(TaskCancel(tasks)) if tasks else b""
        path = task_path(task_id, "cancel")
        await self.ask("POST", path, body, refusal="did not take the cancel", expected=(404,))

    async def resume(self, task_id: str, decisions: Mapping[str, Decision]) -> None:
        """Pass decisions on; raise DecisionRefused if the server refuses them. Idempotent for the same decisions."""
        body = to_json_bytes({"decisions": decisions_json(decisions)})
        status, data = await self.ask("POST", task_path(task_id, "resume"), body, expected=range(400, 600))
        if status >= 400:
            what = "takes no decisions" if status in NOT_OFFERED else "refused the decision"
            raise DecisionRefused(f"{self.url} {what}: {status} {self.words(data)}")

    async def events(self, task_id: str, after: int) -> AsyncGenerator[list[Event]]:
        """Yield the events of a task after number `after` as they come, until the server ends the stream.

        NotOffered where the server has none, ConnectionError where the stream breaks or cannot be read."""
        try:
            async with aclosing(self.stream(f"{task_path(task_id, 'events')}?after={after}")) as stream:
                async for found in stream:
                    if events := [decode_event(data) for _, _, data in found if data]:
                        yield events
        except ValueError as exc:
            reason = self.words(str(exc)) or type(exc).__name__
            raise ConnectionError(f"the events of {self.url} cannot be read ({reason})") from None

    async def _task(self, task_id: str, path: str, seconds: float = ANSWER_SECONDS) -> RemoteTask:
        refusal = "did not say how the task stands"
        status, data = await self.ask("GET", path, refusal=refusal, expected=(404,), seconds=seconds)
        if status == 404:
            return RemoteTask("error", None, "the server does not know the task any more")
        task = self.decode(decode_task, data, "a task server")
        if task.task_id not in ("", task_id):  # a proxy mixes up the answers
            raise ConnectionError(f"{self.url} answered about another task")
        return task


class TaskHttpBackend(RemoteBackend[HttpTaskClient]):
    """Executes runs through a task client. The task on the server has the same id as the run here."""

    def follower(self, request: RunRequest) -> TaskFollower:
        return TaskFollower(self, request)

    async def follow_rest(self, request: RunRequest) -> None:
        """Copy what background tasks add to the log of a run after its end, until they have ended."""
        token, patient = request.cancellation, CancellationToken()  # a cancel needs the server, which may be away
        follower = self.follower(replace(request, cancellation=patient))
        async with until_stopped(follower.follow_rest(), token.wait()) as work:
            if not work.done():
                await retry(lambda: self.client.cancel(request.identity.run_id, tasks=True), self.patience, patient)
            await work


class TaskFollower(Follower[HttpTaskClient]):
    """Follows one task: passes decisions on, and copies its events in order until it has ended or waits.

    Each event is passed on once, whatever the connection does: `Cursor` has the rule.
    """

    def __init__(self, backend: TaskHttpBackend, request: RunRequest) -> None:
        super().__init__(backend, request)
        self._cursor, self._status = Cursor(request.seen), ""
        self.state = RemoteTask("running")
        self._has_events = request.emit_remote is not None
        """True unless the server has only status and result."""
        self._leg_ended = False
        self._noticed: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.state.has_ended

    @property
    def is_complete(self) -> bool:
        return self.state.status == "success"

    def ids(self) -> dict[str, Any]:
        noted = {"task_id": self.run_id, "status": self.state.status}
        return {**noted, "open": True} if self.state.open and self._has_events else noted

    def result(self, status: RunStatus, error: str | None) -> RunResult:
        state = self.state
        return self._make_result(
            status,
            error,
            state.result,
            output=state.output,
            steps=state.steps,
            usage=state.usage,
            termination=state.termination,
            suspended=state.awaiting if status is RunStatus.SUSPENDED else {},
            receipt=state.receipt,
        )

    async def submit(self) -> None:
        identity = self.request.identity
        text = "\n\n".join(self._texts_to_send())
        known = {
            "user_id": identity.user_id,
            "session_id": identity.thread_id,
            "parent_session_id": identity.parent_thread_id,
        }
        context = {name: value for name, value in known.items() if value is not None}
        await self._retry(
            lambda: self._client.submit(self.run_id, self._agent, text, context, self.request.limits),
            self._submit_patience,
        )
        self.accept()

    async def withdraw(self) -> None:
        await self._client.cancel(self.run_id)

    async def stop(self, work: asyncio.Task[Outcome]) -> str | None:
        state, problem = RemoteTask("running"), "the server has not stopped it yet"
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._client.cancel(self.run_id)
        except (ConnectionError, ExecutionBackendError, TimeoutError) as exc:
            problem = f"the server could not be reached ({exc})"
        else:
            with suppress(ConnectionError, ExecutionBackendError, TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    state = await self._client.wait(self.run_id, STOP_SECONDS)
        if self._has_events:  # what the run did until it stopped
            await asyncio.wait({work}, timeout=STOP_SECONDS)
        if state.status == "success":
            self.state = state
            return None
        self.state = RemoteTask(
            "cancelled", state.result, usage=state.usage, steps=state.steps, open=state.open, receipt=state.receipt
        )
        return None if state.has_ended else state.error or problem

    async def follow(self) -> Outcome:
        try:
            self.state = await self._settled()
        except (ConnectionError, ExecutionBackendError) as exc:
            self.state = RemoteTask("error", None, str(exc))
        status = _STATUS.get(self.state.status, RunStatus.SUSPENDED)
        if status is RunStatus.SUSPENDED:
            return status, self.refused or self.state.error
        return status, None if self.is_complete else self.state.error or "the server gave no reason"

    async def _settled(self) -> RemoteTask:
        """Return the state of the task once it has ended or waits, and its events were copied."""
        if self.request.decisions and not self._token.is_set():
            try:
                await self._decide()
            except ConnectionError as exc:  # the questions stay open
                self.refused = f"the decision could not be sent: {exc}"
                return RemoteTask("running")
        backoff, stuck_since = Backoff(), 0.0
        goal, settled = 0, None
        while True:
            state = await self._load_state()
            # Background tasks may append events without end, so read only up to the number that the state had first.
            now = (state.status, tuple(state.awaiting)) if state.is_settled else None
            goal, settled = (goal if now == settled else state.seq), now
            is_read = not self._has_events or (self._cursor.seq >= goal and not self._is_before_decisions(state))
            stuck_since = (stuck_since or time.monotonic()) if state.is_settled and not is_read else 0.0
            if state.is_settled and (is_read or time.monotonic() - stuck_since > self._patience):
                return await self._with_result(state)
            seen = self._cursor.seq
            # The end of a leg may be seen a moment before the state says so, and so may its beginning.
            if self._has_events and not (state.seq <= seen and (self._leg_ended or state.is_settled)):
                await self._read(goal if state.is_settled else 0)
            if self._cursor.seq > seen:
                backoff.reset()
                stuck_since = 0.0
                continue
            if backoff.is_longest:
                self._leg_ended = False
            await backoff.wait()

    async def follow_rest(self) -> None:
        """Copy the events after the end of the run, until the log there has ended."""
        backoff = Backoff()
        while True:
            state = await self._load_state()
            if self._cursor.seq >= state.seq and not state.open:
                return
            seen = self._cursor.seq
            await self._read(0, to_end=True)
            if not self._has_events:
                raise ConnectionError("the server has no events of the task any more")
            if self._cursor.seq > seen:
                backoff.reset()
            await backoff.wait()

    async def _load_state(self) -> RemoteTask:
        """Return the state of the task; report its status if that has changed."""
        state = await self._retry(lambda: self._client.state(self.run_id))
        if state.status != self._status:
            self._report(state.status, task_id=self.run_id)
        self._status = state.status
        return state

    async def _decide(self) -> None:
        try:
            await self._retry(lambda: self._client.resume(self.run_id, self.request.decisions))
        except DecisionRefused as exc:  # another client may have answered there: the next state from the server decides
            self._refuse(str(exc))

    def _is_before_decisions(self, state: RemoteTask) -> bool:
        """Return whether a state is older than the decisions just sent: it still has their questions."""
        if self.refused is not None or self._cursor.seq > self.request.seen:
            return False
        return any("/".join(ticket.path) in self.request.decisions for ticket in state.awaiting.values())

    async def _read(self, until: int, *, to_end: bool = False) -> None:
        """Copy events until number `until`, until the run there has ended or waits, or until the connection ends. With
        `to_end`, do not stop at the end of the run."""
        assert self.request.emit_remote is not None
        stream = self._client.events(self.run_id, self._cursor.seq)
        try:
            async for events in stream:
                for event in events:
                    self._pass_notice(event)
                    if not self._cursor.accept(event):
                        continue
                    self.request.emit_remote(event)
                    if not event.ns and isinstance(event, RunStarted | RunFinished):
                        self._leg_ended = isinstance(event, RunFinished)  # background tasks may continue after it
                if (self._leg_ended and not to_end) or (until and self._cursor.seq >= until):
                    return
        except NotOffered:
            self._has_events = False
        except ConnectionError:
            pass  # the state tells whether the server is away
        finally:
            with suppress(ConnectionError):
                await stream.aclose()

    def _pass_notice(self, event: Event) -> None:
        """Pass on, once, a notice of the server that the run there has lost its owner or has one again."""
        code = event.code if isinstance(event, ErrorRaised) and not event.seq else None
        if isinstance(event, ErrorRaised) and code is not None and code != self._noticed:
            self._emit(ErrorRaised(message=event.message, code=code))
        self._noticed = code

    async def _with_result(self, state: RemoteTask) -> RemoteTask:
        """Return a state with its result, which some servers send only with the wait request."""
        if state.status != "success" or state.result is not None:
            return state
        try:
            waited = await self._client.wait(self.run_id, 30)
        except (ConnectionError, ExecutionBackendError):
            return state
        return waited if waited.status == "success" else state
