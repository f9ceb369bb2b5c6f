"""The HTTP client of the task protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING

from ..core.decisions import Decision
from ..core.errors import DecisionRefused, ExecutionBackendError
from ..core.events import Event
from ..core.runs import Limits
from ..core.secrets import redact, secrets_of
from ..wire.sse import EventDecoder, EventTooLong
from ..wire.task_protocol import (
    TASKS_PATH,
    RemoteTask,
    TaskCancel,
    TaskDecisions,
    TaskSubmission,
    decode_event,
    decode_task,
    encode,
    task_path,
)
from .tracing import trace_headers

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 30.0
ANSWER_SECONDS = 120.0
SILENCE_SECONDS = 15.0
"""Seconds without a byte, also of a heartbeat, after which a stream of events counts as broken."""
MOST_BYTES = 20_000_000
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_NOT_OFFERED = frozenset({404, 405, 501})
_SHOWN = 300
_ERROR_BODY = 64 * 1024


class Garbled(ConnectionError):
    """A request or an answer that nobody can read: spoiled on its way, or not of a task server at all."""


class EventsNotOffered(Exception):
    """The server has no events of tasks, only their status and result."""


class HttpTaskClient:
    """Speaks to one server. `submit` may be repeated with the same id. A final refusal raises ExecutionBackendError,
    a failure that may pass raises ConnectionError. The headers come from the declaration and go with every request to
    that address: no redirect is followed, and their credentials are redacted in all that the server returns."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, name: str = "") -> None:
        self._url, self._headers, self._name = url.rstrip("/"), dict(headers or {}), name or url
        self._secrets = secrets_of(self._headers)
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def submit(
        self, task_id: str, agent_id: str, text: str, context: dict[str, str], limits: Limits | None = None
    ) -> None:
        body = encode(TaskSubmission(task_id, agent_id, text, dict(context), limits))
        status, data = await self._ask("POST", TASKS_PATH, body)
        if status == 409:
            return  # it has the task already, and may have ended it
        if status >= 400:
            raise self._refused(status, data, "did not take the task")

    async def state(self, task_id: str) -> RemoteTask:
        return await self._task(task_id, task_path(task_id))

    async def wait(self, task_id: str, seconds: float) -> RemoteTask:
        path = f"{task_path(task_id, 'wait')}?timeout_seconds={max(int(seconds), 1)}"
        return await self._task(task_id, path, seconds + 60)

    async def cancel(self, task_id: str, *, tasks: bool = False) -> None:
        """Have a task stopped; its background tasks go on, unless `tasks` says otherwise."""
        body = encode(TaskCancel(tasks)) if tasks else b""
        status, data = await self._ask("POST", task_path(task_id, "cancel"), body)
        if status >= 400 and status != 404:
            raise self._refused(status, data, "did not take the cancel")

    async def resume(self, task_id: str, decisions: Mapping[str, Decision]) -> None:
        """Pass decisions on. The same ones again change nothing. DecisionRefused where the server does not take them."""
        status, data = await self._ask("POST", task_path(task_id, "resume"), encode(TaskDecisions(dict(decisions))))
        if status in _NOT_OFFERED:
            raise DecisionRefused(f"{self._url} takes no decisions: {status} {self._words(data)}")
        if status >= 400:
            raise DecisionRefused(f"{self._url} refused the decision: {status} {self._words(data)}")

    async def events(self, task_id: str, after: int) -> AsyncGenerator[list[Event]]:
        """Yield the events of a task after number `after` as they come, until the server ends the stream.

        EventsNotOffered where the server has none, ConnectionError where the stream breaks or cannot be read."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        headers = {"accept": "text/event-stream", **self._headers}
        url, decoder = f"{self._url}{task_path(task_id, 'events')}?after={after}", EventDecoder(MOST_BYTES)
        try:
            async with self._session().get(url, headers=headers, timeout=timeout, allow_redirects=False) as response:
                if response.status in _TRANSIENT:
                    raise ConnectionError(f"{self._url} answered {response.status}")
                if response.status in _NOT_OFFERED:
                    raise EventsNotOffered
                if response.status >= 300:
                    raise self._refused(response.status, b"", "did not send the events of the task")
                if response.content_type != "text/event-stream":
                    raise ConnectionError(f"{self._url} answered {response.content_type}")
                chunks = aiter(response.content.iter_any())
                while True:
                    async with asyncio.timeout(SILENCE_SECONDS):  # the HTTP client waits for ever after a spoiled chunk
                        data = await anext(chunks, b"")
                    if not data:
                        return
                    if found := decoder.feed(data):
                        yield [decode_event(self._without_secrets(one)) for one in found]
        except aiohttp.InvalidURL:
            raise ExecutionBackendError(self._name, f"{self._url} is not an address that can be asked") from None
        except aiohttp.ClientConnectorCertificateError as exc:
            raise self._untrusted(exc) from None
        except (aiohttp.ClientError, TimeoutError, OSError, EventTooLong, ValueError) as exc:
            reason = self._words(str(exc)) or type(exc).__name__
            raise ConnectionError(f"the events of {self._url} cannot be read ({reason})") from None

    async def close(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _task(self, task_id: str, path: str, seconds: float = ANSWER_SECONDS) -> RemoteTask:
        status, data = await self._ask("GET", path, None, seconds)
        if status == 404:
            return RemoteTask("error", None, "the server does not know the task any more")
        if status >= 400:
            raise self._refused(status, data, "did not say how the task stands")
        try:
            task = decode_task(self._without_secrets(data))
        except ValueError as exc:
            problem = f"{self._url} did not answer as a task server ({self._words(str(exc))}): check the url"
            raise Garbled(problem) from None
        if task.task_id not in ("", task_id):  # something between here and the server mixes up its answers
            raise ConnectionError(f"{self._url} answered about another task")
        return task

    def _without_secrets(self, data: bytes) -> bytes:
        return redact(data.decode(errors="replace"), self._secrets).encode() if self._secrets else data

    async def _ask(
        self, method: str, path: str, body: bytes | None, seconds: float = ANSWER_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body of an answer. What may pass (no connection, 5xx) raises ConnectionError."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        headers = {**trace_headers(), **self._headers}
        if body:
            headers.setdefault("content-type", "application/json")
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
        except aiohttp.ClientConnectorCertificateError as exc:
            raise self._untrusted(exc) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            reason = self._words(str(exc)) or type(exc).__name__
            raise ConnectionError(f"{self._url} cannot be reached ({reason})") from None
        if len(data) > MOST_BYTES:
            raise ExecutionBackendError(self._name, f"{self._url} sent more than {MOST_BYTES:,} bytes")
        if status in _TRANSIENT:
            raise ConnectionError(f"{self._url} answered {status}: {self._words(data)}")
        if status == 400:
            raise Garbled(f"{self._url} could not read the request: {status} {self._words(data)}")
        if 300 <= status < 400:
            raise ExecutionBackendError(
                self._name, f"{self._url} answered {status}, a redirect, which is not followed: correct the url"
            )
        return status, data

    def _refused(self, status: int, data: bytes, what: str) -> ExecutionBackendError:
        advice = ": check the headers of the declaration" if status in (401, 403) else ""
        return ExecutionBackendError(self._name, f"{self._url} {what}: {status} {self._words(data)}{advice}")

    def _untrusted(self, exc: Exception) -> ExecutionBackendError:
        problem = f"{self._url} has a certificate that is not trusted ({self._words(str(exc))})"
        return ExecutionBackendError(self._name, f"{problem}: name its authority in the file $SSL_CERT_FILE")

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
                cookie_jar=aiohttp.DummyCookieJar(),
                # A connection for each request: whatever is between here and the server, an answer cannot be that to
                # an earlier request.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
            )
        return session
