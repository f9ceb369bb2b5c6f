"""Runs on a server that speaks the task protocol."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ..core.backend import BackendProfile, RunRequest
from ..core.context import CancellationToken
from ..core.errors import ExecutionBackendError
from ..core.events import Custom
from ..core.lifecycle import RunStatus
from ..core.messages import Message
from ..core.runs import RunResult
from ..core.state import PersistedState
from ..wire.task_protocol import RemoteTask
from .task_client import HttpTaskClient

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
PATIENCE = 60.0
"""Seconds for which a server may be unreachable before a run there is given up on."""
SUBMIT_PATIENCE = 10.0
STOP_SECONDS = 2.0
"""Seconds in which a server should take a cancel, and again in which the task should have stopped."""
DEADLINE = 7200.0
"""Seconds a remote run may take where nobody says otherwise."""
REMOTE_KEY = "retinue.remote"
"""The state key of a result that holds the id of the remote task."""

_STATUS = {"success": RunStatus.COMPLETED, "error": RunStatus.FAILED, "cancelled": RunStatus.CANCELLED}
_TERMINATION = {RunStatus.COMPLETED: "natural", RunStatus.CANCELLED: "cancelled", RunStatus.TIMEOUT: "timeout"}


class TaskHttpBackend:
    """Executes runs through a task client. A run has a local id, by which the server knows its task too."""

    def __init__(self, client: HttpTaskClient, agent_id: str, *, patience: float | None = None) -> None:
        self.client, self._agent_id = client, agent_id
        self._patience = PATIENCE if patience is None else patience
        self._tokens: dict[str, list[CancellationToken]] = {}
        """Those who wait for each run: more than one where it was asked for again."""

    def profile(self) -> BackendProfile:
        return BackendProfile(cancellation="remote_abort", continuation="remote", transcript="user_messages")

    async def close(self) -> None:
        await self.client.close()

    async def abort(self, run_id: str) -> None:
        for token in self._tokens.get(run_id, ()):
            token.set("aborted")

    async def run(self, request: RunRequest) -> RunResult:
        identity, token = request.identity, request.cancellation
        if not request.is_dispatched:
            await self._submit(request)
        waiting = self._tokens.setdefault(identity.run_id, [])
        waiting.append(token)
        if request.accepted is not None:
            request.accepted()
        seconds = DEADLINE if request.timeout is None else request.timeout
        try:
            status, state = await self._to_the_end(identity.run_id, token, seconds, _Progress(request))
        finally:
            waiting.remove(token)
            if not waiting:
                self._tokens.pop(identity.run_id, None)
        return self._result(identity.run_id, identity.thread_id, request.messages, status, state)

    async def _submit(self, request: RunRequest) -> None:
        """Give the server the run; until it has taken it nothing has happened."""
        identity = request.identity
        text = "\n\n".join([message.text for message in request.remote_messages() if message.text])
        if not text:
            raise ExecutionBackendError(identity.agent, "there is no text to send: a remote agent reads user messages")
        known = {
            "user_id": identity.user_id,
            "session_id": identity.thread_id,
            "parent_session_id": identity.parent_thread_id,
        }
        context = {name: value for name, value in known.items() if value is not None}
        # A task can wait for its server; a call that waits itself should know soon.
        patience = self._patience if request.detached else min(SUBMIT_PATIENCE, self._patience)
        try:
            await _patiently(
                lambda: self.client.submit(identity.run_id, self._agent_id, text, context),
                patience,
                request.cancellation,
            )
        except ConnectionError as exc:
            raise ExecutionBackendError(identity.agent, str(exc)) from exc

    async def _to_the_end(
        self, task_id: str, token: CancellationToken, seconds: float, tell: Callable[[RemoteTask], None]
    ) -> tuple[RunStatus, RemoteTask]:
        """Ask until the task has ended, is to be stopped, or takes too long. A server may be away for a while."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(stopped.set)

        token.on_set(stop)
        try:
            while True:
                try:
                    state = await _patiently(lambda: self.client.state(task_id), self._patience, token)
                except (ConnectionError, ExecutionBackendError) as exc:
                    return RunStatus.FAILED, RemoteTask("error", None, str(exc))
                tell(state)
                if state.has_ended:
                    return _STATUS[state.status], await self._whole(task_id, state)
                if token.is_set():
                    return await self._stopped(task_id, RunStatus.CANCELLED, token.reason)
                if (left := deadline - time.monotonic()) <= 0:
                    return await self._stopped(task_id, RunStatus.TIMEOUT, f"it took longer than {seconds:g} s")
                await _either(stopped, min(pause, left))
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            token.forget(stop)

    async def _whole(self, task_id: str, state: RemoteTask) -> RemoteTask:
        """A state with its result; some servers tell it only to those who wait."""
        if state.status != "success" or state.result is not None:
            return state
        try:
            waited = await self.client.wait(task_id, 30)
        except (ConnectionError, ExecutionBackendError):
            return state
        return waited if waited.status == "success" else state

    async def _stopped(self, task_id: str, status: RunStatus, reason: str | None) -> tuple[RunStatus, RemoteTask]:
        """Stop a task, and say how it ended: it may have been done already."""
        state = await self._stop(task_id)
        if state.status == "success":
            return RunStatus.COMPLETED, state
        more = "" if state.has_ended else f"; {state.error or 'the server has not stopped it yet'}"
        return status, RemoteTask("cancelled", state.result, f"{reason or 'cancelled'}{more}")

    async def _stop(self, task_id: str) -> RemoteTask:
        """Have the server stop a task, and wait for its end for a while."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.client.cancel(task_id)
        except (ConnectionError, ExecutionBackendError, TimeoutError) as exc:
            return RemoteTask("running", None, f"the server could not be told ({exc})")
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self.client.wait(task_id, STOP_SECONDS)
        except (ConnectionError, ExecutionBackendError, TimeoutError):
            return RemoteTask("running")

    def _result(
        self, run_id: str, thread_id: str, said: tuple[Message, ...], status: RunStatus, state: RemoteTask
    ) -> RunResult:
        answer = (Message.assistant(state.result),) if state.result else ()
        elsewhere = {"task_id": run_id, "status": state.status}
        return RunResult(
            status=status,
            run_id=run_id,
            thread_id=thread_id,
            response=state.result,
            state=PersistedState(extensions={REMOTE_KEY: elsewhere}),
            error=None if status is RunStatus.COMPLETED else state.error or "the server gave no reason",
            termination=_TERMINATION.get(status, "error"),
            messages=(*said, *answer),
        )


class _Progress:
    """Tells how a remote task stands, whenever that changes."""

    def __init__(self, request: RunRequest) -> None:
        self._emit, self._task_id, self._last = request.emit, request.identity.run_id, ""

    def __call__(self, state: RemoteTask) -> None:
        if state.status != self._last and self._emit is not None:
            self._last = state.status
            self._emit(Custom(data={"type": "remote_task", "task_id": self._task_id, "status": state.status}))


async def _patiently(ask: Callable[[], Awaitable[T]], patience: float, token: CancellationToken) -> T:
    """Retry while the server cannot be reached, until patience ends or the token is set."""
    deadline, pause = time.monotonic() + patience, FIRST_PAUSE
    while True:
        try:
            return await ask()
        except ConnectionError:
            if time.monotonic() >= deadline or token.is_set():
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(pause * 2, LONGEST_PAUSE)


async def _either(stopped: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stopped.wait(), seconds)
    except TimeoutError:
        return
