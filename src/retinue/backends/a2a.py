"""Runs on servers that speak A2A: a run is a task there, and its thread is a context."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, cast

from msgspec.structs import replace

from ..core.backend import BackendProfile, RunRequest
from ..core.errors import ExecutionBackendError, RetinueError
from ..core.messages import Message, Part, TextPart
from ..core.results import SuspendTicket
from ..core.runs import REMOTE_KEY, RunResult, RunStatus
from ..core.state import PersistedState
from ..core.together import until_stopped
from .a2a_client import A2AClient
from .a2a_follower import A2AFollower, Given
from .a2a_task import STATUS, data_of
from .remote import STOP_SECONDS, TERMINATION, RemoteBackend, seconds_for, why_stopped

ACCEPT_SECONDS = 1.0
"""Seconds in which a server should name the task that is to be stopped."""
MOST_QUESTIONS = 100
"""Questions after which a task is given up: it accepts no answer."""


class A2ABackend(RemoteBackend[A2AClient]):
    """Executes runs through an A2A client. A run has a local id; the server chooses the id of its task."""

    def __init__(self, client: A2AClient, *, patience: float | None = None) -> None:
        super().__init__(client, patience)
        self._tasks: dict[str, str] = {}
        """The runs at work, by the ids of their tasks."""

    def profile(self) -> BackendProfile:
        return BackendProfile(
            cancellation="remote_abort",
            continuation="remote",
            decisions="durable",
            waits="input_and_auth",
            transcript="user_messages",
            output="text_and_artifacts",
        )

    async def run(self, request: RunRequest) -> RunResult:
        token = request.cancellation
        if not request.is_dispatched and token.is_set():
            raise ExecutionBackendError(request.identity.agent, "it was cancelled before it was sent")
        follower = A2AFollower(self.client, request, self._patience, self._tasks)
        with self._callers.waiting(request.identity.run_id, token):
            try:
                status, error = await self._attend(follower, request)
            finally:
                follower.release()
        return _result(request, follower, status, error)

    async def _attend(self, follower: A2AFollower, request: RunRequest) -> tuple[RunStatus, str | None]:
        """Follow the task until it ends or waits; stop it if the request is cancelled or its time is over."""
        token = request.cancellation
        async with until_stopped(follower.follow(), token.wait(), seconds_for(request)) as work:
            if work.done() and (not token.is_set() or follower.view.has_ended):
                return await self._outcome(follower, work)
            status, reason = why_stopped(request)
            known = asyncio.create_task(follower.accepted.wait())
            await asyncio.wait({known, work}, timeout=ACCEPT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            known.cancel()
            work.cancel()
            await asyncio.wait({work})
            if not follower.accepted.is_set() and not work.cancelled() and (problem := work.exception()) is not None:
                raise problem
        problem = await follower.stop(STOP_SECONDS)
        if follower.view.state == "completed":
            return RunStatus.COMPLETED, None
        return status, reason if problem is None else f"{reason}; {problem}"

    async def _outcome(self, follower: A2AFollower, work: asyncio.Task[None]) -> tuple[RunStatus, str | None]:
        """Return the result of a task that is no longer followed; raise if the server never accepted it."""
        view, given = follower.view, work.exception()
        if isinstance(given, Given):
            problem = await follower.stop(STOP_SECONDS)
            return RunStatus.CANCELLED, given.reason if problem is None else f"{given.reason}; {problem}"
        if given is not None:
            if not follower.accepted.is_set() or not isinstance(given, ConnectionError | ExecutionBackendError):
                raise given
            if isinstance(given, ExecutionBackendError):  # the server breaks the protocol: stop reading
                await follower.stop(STOP_SECONDS)
                return RunStatus.FAILED, given.reason
            return RunStatus.FAILED, str(given)
        status = STATUS[view.state]
        if status.is_waiting and follower.questions > MOST_QUESTIONS:
            await follower.stop(STOP_SECONDS)
            return RunStatus.FAILED, f"it has asked {MOST_QUESTIONS} times and was stopped"
        if status is RunStatus.FAILED:
            said = follower.words(view.question()) or "the server gave no reason"
            return status, f"it refused the task: {said}" if view.state == "rejected" else said
        if status is RunStatus.CANCELLED:
            return status, follower.words(view.question()) or "it was cancelled at the server"
        return status, follower.refused


def _result(request: RunRequest, follower: A2AFollower, status: RunStatus, error: str | None) -> RunResult:
    identity, view = request.identity, follower.view
    is_complete = status is RunStatus.COMPLETED
    response = None if status.is_waiting else (view.answer() if is_complete else view.text()) or None
    more = view.parts() if is_complete else []
    said: list[Part] = [TextPart(response)] if response else []
    answer = (Message.assistant([*said, *more]),) if said or more else ()
    return RunResult(
        status=status,
        run_id=identity.run_id,
        thread_id=identity.thread_id,
        response=response,
        output=data_of(more),
        steps=view.steps,
        usage=view.usage,
        state=PersistedState(extensions={REMOTE_KEY: follower.ids()}),
        error=error,
        termination=TERMINATION.get(status, "error"),
        messages=(*request.messages, *answer),
        suspended=_tickets(follower, status),
    )


def _tickets(follower: A2AFollower, status: RunStatus) -> dict[str, SuspendTicket]:
    """Return the question of a task that waits, as a ticket."""
    if not status.is_waiting:
        return {}
    action = "auth" if status is RunStatus.WAITING_AUTH else "input"
    name = f"{action}_{follower.questions}"
    asked: Any = follower.asked_data()
    message = follower.words(follower.view.question()) or f"it waits for {action}"
    ticket = SuspendTicket(f"{follower.run_id}-{name}", f"a2a:{action}_required", message, asked, path=(name,))
    if isinstance(asked, dict) and isinstance(schema := cast("dict[str, Any]", asked).get("schema"), dict):
        with suppress(RetinueError):  # only our own server sends the schema of an answer in this form
            return {name: replace(ticket, response_schema=cast("dict[str, Any]", schema))}
    return {name: ticket}
