"""Runs on a server that speaks the task protocol."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from ..core.backend import BackendProfile, RunRequest
from ..core.context import CancellationToken
from ..core.errors import DecisionRefused, ExecutionBackendError
from ..core.events import Custom, ErrorRaised, Event, RunFinished, RunStarted
from ..core.messages import Message
from ..core.runs import REMOTE_KEY, RunResult, RunStatus
from ..core.state import PersistedState
from ..core.together import until_stopped
from ..wire.task_protocol import RemoteTask
from .http_client import EventsNotOffered
from .remote import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    STOP_SECONDS,
    TERMINATION,
    RemoteBackend,
    retry,
    seconds_for,
    submit_patience,
    texts_to_send,
    why_stopped,
)
from .task_client import HttpTaskClient

_STATUS = {"success": RunStatus.COMPLETED, "error": RunStatus.FAILED, "cancelled": RunStatus.CANCELLED}


class TaskHttpBackend(RemoteBackend[HttpTaskClient]):
    """Executes runs through a task client. The task on the server has the same id as the run here."""

    def __init__(self, client: HttpTaskClient, agent_id: str, *, patience: float | None = None) -> None:
        super().__init__(client, patience)
        self._agent_id = agent_id

    def profile(self) -> BackendProfile:
        return BackendProfile(
            cancellation="remote_abort",
            continuation="remote",
            decisions="durable",
            waits="input",
            transcript="user_messages",
        )

    async def run(self, request: RunRequest) -> RunResult:
        if not request.is_dispatched:
            await self._submit(request)
        with self._callers.waiting(request.identity.run_id, request.cancellation):
            if request.accepted is not None:
                request.accepted()
            follower = TaskFollower(self.client, request, self._patience)
            status, state = await self._attend(follower, request)
        if not follower.has_events:
            state = replace(state, open=False)
        return _result(request, status, state, follower.refused)

    async def follow_rest(self, request: RunRequest) -> None:
        """Copy what background tasks add to the log of a run after its end, until they have ended."""
        token, patient = request.cancellation, CancellationToken()  # a cancel needs the server, which may be away
        follower = TaskFollower(self.client, replace(request, cancellation=patient), self._patience)
        async with until_stopped(follower.follow_rest(), token.wait()) as work:
            if not work.done():
                await retry(lambda: self.client.cancel(request.identity.run_id, tasks=True), self._patience, patient)
            await work

    async def _submit(self, request: RunRequest) -> None:
        """Send the run to the server. If this raises, the server has not accepted it."""
        identity = request.identity
        text = "\n\n".join(texts_to_send(request))
        known = {
            "user_id": identity.user_id,
            "session_id": identity.thread_id,
            "parent_session_id": identity.parent_thread_id,
        }
        context = {name: value for name, value in known.items() if value is not None}
        try:
            await retry(
                lambda: self.client.submit(identity.run_id, self._agent_id, text, context, request.limits),
                submit_patience(request, self._patience),
                request.cancellation,
            )
        except ConnectionError as exc:
            raise ExecutionBackendError(identity.agent, str(exc)) from exc

    async def _attend(self, follower: TaskFollower, request: RunRequest) -> tuple[RunStatus, RemoteTask]:
        """Follow the task until it ends or waits; stop it if the request is cancelled or its time is over."""
        token = request.cancellation
        async with until_stopped(follower.follow(), token.wait(), seconds_for(request)) as work:
            if not token.is_set() and work.done():
                return _outcome_of(work)
            if work.done() and (ended := _outcome_of(work))[1].has_ended:
                return ended
            state = await self._stop(request.identity.run_id)
            if follower.has_events:  # what the run did until it stopped
                await asyncio.wait({work}, timeout=STOP_SECONDS)
        if state.status == "success":
            return RunStatus.COMPLETED, state
        status, reason = why_stopped(request)
        more = "" if state.has_ended else f"; {state.error or 'the server has not stopped it yet'}"
        return status, RemoteTask(
            "cancelled", state.result, f"{reason}{more}", usage=state.usage, steps=state.steps, open=state.open
        )

    async def _stop(self, task_id: str) -> RemoteTask:
        """Ask the server to stop a task, and wait a limited time for its end."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.client.cancel(task_id)
        except (ConnectionError, ExecutionBackendError, TimeoutError) as exc:
            return RemoteTask("running", None, f"the server could not be reached ({exc})")
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self.client.wait(task_id, STOP_SECONDS)
        except (ConnectionError, ExecutionBackendError, TimeoutError):
            return RemoteTask("running")


def _outcome_of(work: asyncio.Task[RemoteTask]) -> tuple[RunStatus, RemoteTask]:
    try:
        state = work.result()
    except (ConnectionError, ExecutionBackendError) as exc:
        return RunStatus.FAILED, RemoteTask("error", None, str(exc))
    return _STATUS.get(state.status, RunStatus.SUSPENDED), state


def _result(request: RunRequest, status: RunStatus, state: RemoteTask, refused: str | None) -> RunResult:
    identity = request.identity
    answer = (Message.assistant(state.result),) if state.result else ()
    error = None if status is RunStatus.COMPLETED else state.error or "the server gave no reason"
    if status is RunStatus.SUSPENDED:
        error = refused or state.error
    return RunResult(
        status=status,
        run_id=identity.run_id,
        thread_id=identity.thread_id,
        response=state.result,
        output=state.output,
        steps=state.steps,
        state=PersistedState(extensions={REMOTE_KEY: _noted(identity.run_id, state)}),
        usage=state.usage,
        error=error,
        termination=state.termination or TERMINATION.get(status, "error"),
        messages=(*request.messages, *answer),
        suspended=state.awaiting if status is RunStatus.SUSPENDED else {},
    )


def _noted(task_id: str, state: RemoteTask) -> dict[str, Any]:
    noted = {"task_id": task_id, "status": state.status}
    return {**noted, "open": True} if state.open else noted


class TaskFollower:
    """Follows one task: passes decisions on, and copies its events in order until it has ended or waits.

    Invariant: an event is passed on only if it is the one after `seen`, so none is lost or repeated, whatever the
    connection does.
    """

    def __init__(self, client: HttpTaskClient, request: RunRequest, patience: float) -> None:
        self._client, self._request, self._patience = client, request, patience
        self._task_id, self._token = request.identity.run_id, request.cancellation
        self._seen, self._status = request.seen, ""
        self.has_events = request.emit_remote is not None
        """True unless the server has only status and result."""
        self._leg_ended = False
        self._missing_before = 0
        self._noticed: str | None = None
        self.refused: str | None = None
        """Why the server refused a decision."""

    async def follow(self) -> RemoteTask:
        """Wait until the task has ended or waits, and return its state. Short outages of the server are retried."""
        if self._request.decisions and not self._token.is_set():
            try:
                await self._decide()
            except ConnectionError as exc:  # the questions stay open
                self.refused = f"the decision could not be sent: {exc}"
                return RemoteTask("running")
        pause, stuck_since = FIRST_PAUSE, 0.0
        goal, settled = 0, None
        while True:
            state = await retry(lambda: self._client.state(self._task_id), self._patience, self._token)
            self._report(state)
            # Background tasks may append events without end, so read only up to the number that the state had first.
            now = (state.status, tuple(state.awaiting)) if state.is_settled else None
            goal, settled = (goal if now == settled else state.seq), now
            is_read = not self.has_events or (self._seen >= goal and not self._is_before_decisions(state))
            stuck_since = (stuck_since or time.monotonic()) if state.is_settled and not is_read else 0.0
            if state.is_settled and (is_read or time.monotonic() - stuck_since > self._patience):
                return await self._with_result(state)
            seen = self._seen
            # The end of a leg may be seen a moment before the state says so, and so may its beginning.
            if self.has_events and not (state.seq <= seen and (self._leg_ended or state.is_settled)):
                await self._read(goal if state.is_settled else 0)
            if self._seen > seen:
                pause, stuck_since = FIRST_PAUSE, 0.0
                continue
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            if pause >= LONGEST_PAUSE:
                self._leg_ended = False
            pause = min(pause * 2, LONGEST_PAUSE)

    async def follow_rest(self) -> None:
        """Copy the events after the end of the run, until the log there has ended."""
        pause = FIRST_PAUSE
        while True:
            state = await retry(lambda: self._client.state(self._task_id), self._patience, self._token)
            if self._seen >= state.seq and not state.open:
                return
            seen = self._seen
            await self._read(0, to_end=True)
            if not self.has_events:
                raise ConnectionError("the server has no events of the task any more")
            pause = FIRST_PAUSE if self._seen > seen else min(pause * 2, LONGEST_PAUSE)
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _decide(self) -> None:
        try:
            await retry(
                lambda: self._client.resume(self._task_id, self._request.decisions), self._patience, self._token
            )
        except DecisionRefused as exc:  # another client may have answered there: the next state from the server decides
            self.refused = str(exc)
            if self._request.emit is not None:
                self._request.emit(ErrorRaised(message=self.refused, code="decision_refused"))

    def _is_before_decisions(self, state: RemoteTask) -> bool:
        """Return whether a state is older than the decisions just sent: it still has their questions."""
        if self.refused is not None or self._seen > self._request.seen:
            return False
        return any("/".join(ticket.path) in self._request.decisions for ticket in state.awaiting.values())

    async def _read(self, until: int, *, to_end: bool = False) -> None:
        """Copy events until number `until`, until the run there has ended or waits, or until the connection ends. With
        `to_end`, do not stop at the end of the run."""
        assert self._request.emit_remote is not None
        stream = self._client.events(self._task_id, self._seen)
        try:
            async for events in stream:
                for event in events:
                    self._pass_notice(event)
                    if event.seq <= self._seen:
                        continue
                    if event.seq > self._seen + 1 and self._missing_before != event.seq:
                        self._missing_before = event.seq  # the next attempt shows whether the server has dropped some
                        return
                    self._request.emit_remote(event)
                    self._seen = event.seq
                    if not event.ns and isinstance(event, RunStarted | RunFinished):
                        self._leg_ended = isinstance(event, RunFinished)  # background tasks may continue after it
                if (self._leg_ended and not to_end) or (until and self._seen >= until):
                    return
        except EventsNotOffered:
            self.has_events = False
        except ConnectionError:
            pass  # the state tells whether the server is away
        finally:
            with suppress(ConnectionError):
                await stream.aclose()

    def _pass_notice(self, event: Event) -> None:
        """Pass on, once, a notice of the server that the run there has lost its owner or has one again."""
        code = event.code if isinstance(event, ErrorRaised) and not event.seq else None
        if isinstance(event, ErrorRaised) and code is not None and code != self._noticed:
            assert self._request.emit is not None
            self._request.emit(ErrorRaised(message=event.message, code=code))
        self._noticed = code

    def _report(self, task: RemoteTask) -> None:
        """Report the status whenever it changes."""
        if task.status != self._status and self._request.emit is not None:
            data = {"type": "remote_task", "task_id": self._task_id, "status": task.status}
            self._request.emit(Custom(data=data))
        self._status = task.status

    async def _with_result(self, state: RemoteTask) -> RemoteTask:
        """Return a state with its result, which some servers send only with the wait request."""
        if state.status != "success" or state.result is not None:
            return state
        try:
            waited = await self._client.wait(self._task_id, 30)
        except (ConnectionError, ExecutionBackendError):
            return state
        return waited if waited.status == "success" else state
