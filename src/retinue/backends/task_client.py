"""The HTTP client of the task protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core.errors import ExecutionBackendError
from ..wire.task_protocol import TASKS_PATH, RemoteTask, TaskSubmission, decode_task, encode, task_path

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 120.0
MOST_BYTES = 20_000_000
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_SHOWN = 300


class HttpTaskClient:
    """Speaks to one server. `submit` may be repeated with the same id. A final refusal raises ExecutionBackendError,
    a failure that may pass raises ConnectionError. The headers come from the declaration, go with every request, and appear nowhere else."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, name: str = "") -> None:
        self._url, self._headers, self._name = url.rstrip("/"), dict(headers or {}), name or url
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
            return decode_task(data)
        except ValueError as exc:
            raise ExecutionBackendError(
                self._name, f"{self._url} did not answer as a task server ({exc}): check the url"
            ) from None

    async def _ask(
        self, method: str, path: str, body: bytes | None, seconds: float = ANSWER_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body of an answer. What may pass (no connection, 5xx) raises ConnectionError."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        headers = {"content-type": "application/json", **self._headers} if body else self._headers
        try:
            async with self._session().request(
                method, self._url + path, data=body, headers=headers, timeout=timeout
            ) as response:
                data = await response.content.read(MOST_BYTES + 1)
                while len(data) <= MOST_BYTES and (more := await response.content.read(MOST_BYTES + 1 - len(data))):
                    data += more
                status = response.status
        except aiohttp.InvalidURL:
            raise ExecutionBackendError(self._name, f"{self._url} is not an address that can be asked") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            reason = " ".join(str(exc).split())[:_SHOWN] or type(exc).__name__
            raise ConnectionError(f"{self._url} cannot be reached ({reason})") from None
        if len(data) > MOST_BYTES:
            raise ExecutionBackendError(self._name, f"{self._url} sent more than {MOST_BYTES:,} bytes")
        if status in _TRANSIENT:
            raise ConnectionError(f"{self._url} answered {status}: {_words(data)}")
        return status, data

    def _refused(self, status: int, data: bytes, what: str) -> ExecutionBackendError:
        advice = ": check the headers of the declaration" if status in (401, 403) else ""
        return ExecutionBackendError(self._name, f"{self._url} {what}: {status} {_words(data)}{advice}")

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


def _words(data: bytes) -> str:
    return " ".join(data[: 4 * _SHOWN].decode(errors="replace").split())[:_SHOWN]
