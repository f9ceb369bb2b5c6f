"""Runs on a server that speaks the task protocol, and the HTTP client for it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from ..core.backend import BackendProfile, RunRequest
from ..core.context import CancellationToken
from ..core.errors import ExecutionBackendError
from ..core.events import Custom
from ..core.lifecycle import RunStatus
from ..core.messages import Message
from ..core.runs import RunResult
from ..core.secrets import redact, secrets_of
from ..core.state import PersistedState
from ..wire.task_protocol import TASKS_PATH, RemoteTask, TaskSubmission, decode_task, encode, task_path

if TYPE_CHECKING:
    import aiohttp

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


CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 120.0
MOST_BYTES = 20_000_000
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_SHOWN = 300
_ERROR_BODY = 64 * 1024


class TaskHttpBackend:
    """Executes runs through a task client. A run has a local id, by which the server knows its task too."""

    def __init__(self, client: HttpTaskClient, agent_id: str, *, patience: float | None = None) -> None:
        self.client, self._agent_id = client, agent_id
        self._patience = PATIENCE if patience is None else patience
        self._tokens: dict[str, list[CancellationToken]] = {}
        """The tokens of the callers that wait for each run."""

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
            status, state = await self._wait_for_end(identity.run_id, token, seconds, _progress(request))
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
            await _retry(
                lambda: self.client.submit(identity.run_id, self._agent_id, text, context),
                patience,
                request.cancellation,
            )
        except ConnectionError as exc:
            raise ExecutionBackendError(identity.agent, str(exc)) from exc

    async def _wait_for_end(
        self, task_id: str, token: CancellationToken, seconds: float, report: Callable[[RemoteTask], None]
    ) -> tuple[RunStatus, RemoteTask]:
        """Ask until the task has ended, is to be stopped, or takes too long. A server may be away for a while."""
        deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
        stopped = asyncio.create_task(token.wait())
        try:
            while True:
                try:
                    state = await _retry(lambda: self.client.state(task_id), self._patience, token)
                except (ConnectionError, ExecutionBackendError) as exc:
                    return RunStatus.FAILED, RemoteTask("error", None, str(exc))
                report(state)
                if state.has_ended:
                    return _STATUS[state.status], await self._with_result(task_id, state)
                if token.is_set():
                    return await self._stopped(task_id, RunStatus.CANCELLED, token.reason)
                if (left := deadline - time.monotonic()) <= 0:
                    return await self._stopped(task_id, RunStatus.TIMEOUT, f"it took longer than {seconds:g} s")
                await asyncio.wait({stopped}, timeout=min(pause, left))
                pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            stopped.cancel()

    async def _with_result(self, task_id: str, state: RemoteTask) -> RemoteTask:
        """Return a state with its result, which some servers send only to those who wait."""
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
            return RemoteTask("running", None, f"the server could not be reached ({exc})")
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


def _progress(request: RunRequest) -> Callable[[RemoteTask], None]:
    """Return a function that reports the status of a remote task whenever it changes."""
    last = ""

    def report(task: RemoteTask) -> None:
        nonlocal last
        if task.status != last and request.emit is not None:
            last, data = task.status, {"type": "remote_task", "task_id": request.identity.run_id, "status": task.status}
            request.emit(Custom(data=data))

    return report


async def _retry(ask: Callable[[], Awaitable[T]], patience: float, token: CancellationToken) -> T:
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


class HttpTaskClient:
    """Speaks to one server. `submit` may be repeated with the same id. A final refusal raises ExecutionBackendError,
    a failure that may pass raises ConnectionError. The headers come from the declaration and go with every request to
    that address: no redirect is followed, and their credentials are redacted in all that the server returns."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, name: str = "") -> None:
        self._url, self._headers, self._name = url.rstrip("/"), dict(headers or {}), name or url
        self._secrets = secrets_of(self._headers)
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def submit(self, task_id: str, agent_id: str, text: str, context: dict[str, str]) -> None:
        body = encode(TaskSubmission(task_id, agent_id, text, dict(context)))
        status, data = await self._ask("POST", TASKS_PATH, body)
        if status == 409:
            return  # it has the task already, and may have ended it
        if status >= 400:
            raise self._refused(status, data, "did not take the task")

    async def state(self, task_id: str) -> RemoteTask:
        return await self._task(task_path(task_id))

    async def wait(self, task_id: str, seconds: float) -> RemoteTask:
        path = f"{task_path(task_id, 'wait')}?timeout_seconds={max(int(seconds), 1)}"
        return await self._task(path, seconds + 60)

    async def cancel(self, task_id: str) -> None:
        status, data = await self._ask("POST", task_path(task_id, "cancel"), b"")
        if status >= 400 and status != 404:
            raise self._refused(status, data, "did not take the cancel")

    async def close(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _task(self, path: str, seconds: float = ANSWER_SECONDS) -> RemoteTask:
        status, data = await self._ask("GET", path, None, seconds)
        if status == 404:
            return RemoteTask("error", None, "the server does not know the task any more")
        if status >= 400:
            raise self._refused(status, data, "did not say how the task stands")
        try:
            return self._redacted(decode_task(data))
        except ValueError as exc:
            raise ExecutionBackendError(
                self._name, f"{self._url} did not answer as a task server ({self._words(str(exc))}): check the url"
            ) from None

    def _redacted(self, task: RemoteTask) -> RemoteTask:
        status, result, error = [
            text and redact(text, self._secrets) for text in (task.status, task.result, task.error)
        ]
        return RemoteTask(status or "", result, error, task.task_id)

    async def _ask(
        self, method: str, path: str, body: bytes | None, seconds: float = ANSWER_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body of an answer. What may pass (no connection, 5xx) raises ConnectionError."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        headers = {"content-type": "application/json", **self._headers} if body else self._headers
        try:
            async with self._session().request(
                method, self._url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                data = await response.content.read(MOST_BYTES + 1)
                while len(data) <= MOST_BYTES and (more := await response.content.read(MOST_BYTES + 1 - len(data))):
                    data += more
                status = response.status
        except aiohttp.InvalidURL:
            raise ExecutionBackendError(self._name, f"{self._url} is not an address that can be asked") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            reason = self._words(str(exc)) or type(exc).__name__
            raise ConnectionError(f"{self._url} cannot be reached ({reason})") from None
        if len(data) > MOST_BYTES:
            raise ExecutionBackendError(self._name, f"{self._url} sent more than {MOST_BYTES:,} bytes")
        if status in _TRANSIENT:
            raise ConnectionError(f"{self._url} answered {status}: {self._words(data)}")
        if 300 <= status < 400:
            raise ExecutionBackendError(
                self._name, f"{self._url} answered {status}, a redirect, which is not followed: correct the url"
            )
        return status, data

    def _refused(self, status: int, data: bytes, what: str) -> ExecutionBackendError:
        advice = ": check the headers of the declaration" if status in (401, 403) else ""
        return ExecutionBackendError(self._name, f"{self._url} {what}: {status} {self._words(data)}{advice}")

    def _words(self, said: bytes | str) -> str:
        """Return the beginning of a text for a message, without credentials, also without half of one."""
        cut = len(said) > _ERROR_BODY
        text = said[:_ERROR_BODY].decode(errors="replace") if isinstance(said, bytes) else said[:_ERROR_BODY]
        text = redact(text, self._secrets)
        if cut and self._secrets:
            text = text[: -len(self._secrets[0])]
        return " ".join(text.split())[:_SHOWN]

    def _session(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            self._sessions = {known: kept for known, kept in self._sessions.items() if not known.is_closed()}
            session = self._sessions[loop] = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=0)
            )
        return session
