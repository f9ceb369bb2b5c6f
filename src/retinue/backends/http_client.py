"""The HTTP client of servers that execute runs: bounds on what they send, their errors, and no leak of credentials."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Container, Generator, Mapping
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, TypeVar

from ..core.errors import ExecutionBackendError
from ..core.secrets import redact, secrets_of
from ..wire.sse import EventDecoder, EventTooLong, read_event

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 120.0
SILENCE_SECONDS = 15.0
"""Seconds without a byte, also of a heartbeat, after which a stream of events counts as broken."""
MOST_BYTES = 20_000_000
"""Bytes of one answer, of one event of a stream, and of the artifacts of a task."""
TURN = 50
"""Events of a stream that are read before other work has its turn."""
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
NOT_OFFERED = frozenset({404, 405, 501})
_DENIED = (401, 403, "UNAUTHENTICATED", "PERMISSION_DENIED")
NO_ADDRESS = "is not an address that can be asked"
_SHOWN = 300
_ERROR_BODY = 64 * 1024


class NotSent(ConnectionError):
    """No connection was made, so the server has not seen the request."""


class Garbled(ConnectionError):
    """A request or an answer that cannot be read: damaged on its way, or from another kind of server."""


class NotOffered(Exception):
    """The server does not have this operation, or not for a task in this state."""


def trace_headers() -> dict[str, str]:
    """Return the headers that name the current span, so that spans of the server hang under it (W3C Trace Context);
    empty if there is none, or OpenTelemetry is not used."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


async def whole_chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yield the body of a response chunk by chunk, each once its end has come.

    A damaged chunk has no end where it should be. Its bytes may look like an event that nobody sent, so none is used.
    Raises ConnectionError for a chunk that is too large.
    """
    is_chunked = "chunked" in response.headers.get("transfer-encoding", "").lower()
    held = bytearray()
    while True:
        async with asyncio.timeout(SILENCE_SECONDS):  # the HTTP client waits forever after a damaged chunk
            data, is_end = await response.content.readchunk()
        if not data and not is_end:
            return
        held += data
        if len(held) > MOST_BYTES:
            raise ConnectionError(f"a piece of the answer has more than {MOST_BYTES:,} bytes")
        if held and (is_end or not is_chunked):
            yield bytes(held)
            held.clear()


class ServerClient:
    """Speaks to one server. A final refusal raises ExecutionBackendError, a failure that may pass raises ConnectionError.
    The headers come from the declaration and go with every request to that address: no redirect is followed, and their
    credentials are redacted in all that the server returns."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, name: str = "") -> None:
        self.url, self._headers, self.name = url.rstrip("/"), dict(headers or {}), name or url
        self._secrets = secrets_of(self._headers)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        raise NotImplementedError

    def error(self, what: str) -> ExecutionBackendError:
        """Return the final error for what this server is, did or did not do."""
        return ExecutionBackendError(self.name, f"{self.url} {what}")

    def refused(self, status: int | str, said: bytes | str, what: str) -> ExecutionBackendError:
        advice = ": check the headers of the declaration" if status in _DENIED else ""
        return self.error(f"{what}: {status} {self.words(said)}{advice}")

    def untrusted(self, reason: str) -> ExecutionBackendError:
        """Return the error for a certificate that is not trusted."""
        problem = f"has a certificate that is not trusted ({self.words(reason)})"
        return self.error(f"{problem}: name its authority in the file $SSL_CERT_FILE")

    def problem_of_status(self, status: int, said: bytes | str) -> Exception | None:
        """Return the error for a status that has nothing to do with the request: a failure that may pass, or a redirect."""
        if status in _TRANSIENT:
            return ConnectionError(f"{self.url} answered {status}: {self.words(said)}")
        if 300 <= status < 400:
            return self.error(f"answered {status}, a redirect, which is not followed: correct the url")
        return None

    def words(self, said: bytes | str) -> str:
        """Return the beginning of a text for a message, without credentials, also without half of one."""
        cut = len(said) > _ERROR_BODY
        text = said[:_ERROR_BODY].decode(errors="replace") if isinstance(said, bytes) else said[:_ERROR_BODY]
        text = redact(text, self._secrets)
        if cut and self._secrets:
            text = text[: -len(self._secrets[0])]
        return " ".join(text.split())[:_SHOWN]


class HttpClient(ServerClient):
    """Speaks plain HTTP to a server."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, name: str = "") -> None:
        super().__init__(url, headers, name)
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def stream(
        self, path: str, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[list[tuple[str, str, bytes]]]:
        """Yield the name, id and data of server-sent events as they come, until the server ends the stream. Other work has
        its turn after `TURN` events, also if they came together.

        NotOffered where the server has none, ConnectionError where the stream breaks."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        given = {"accept": "text/event-stream", **self._headers, **(headers or {})}
        url = self.url + path
        with self._our_errors(f"the events of {self.url} cannot be read"):
            async with self._session().get(url, headers=given, timeout=timeout, allow_redirects=False) as response:
                if response.status in _TRANSIENT or response.status == 400:  # the request may have been damaged
                    raise ConnectionError(f"{self.url} answered {response.status}")
                if response.status in NOT_OFFERED:
                    raise NotOffered
                if response.status >= 300:
                    raise self.refused(response.status, b"", "did not send the events of the task")
                if response.content_type != "text/event-stream":
                    raise ConnectionError(f"{self.url} answered {response.content_type}")
                decoder, read = EventDecoder(MOST_BYTES), 0
                async with aclosing(whole_chunks(response)) as chunks:
                    async for data in chunks:
                        found = decoder.split(data)
                        for place in range(0, len(found), TURN):
                            yield [read_event(self.without_secrets(block)) for block in found[place : place + TURN]]
                            read += len(found[place : place + TURN])
                            if read >= TURN:
                                read = 0
                                await asyncio.sleep(0)

    @contextmanager
    def _our_errors(self, problem: str) -> Generator[None]:
        """Raise errors of the HTTP client as ours."""
        import aiohttp

        try:
            yield
        except aiohttp.InvalidURL:
            raise self.error(NO_ADDRESS) from None
        except aiohttp.ClientConnectorCertificateError as exc:
            raise self.untrusted(str(exc)) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as exc:
            raise NotSent(f"{problem} ({self.words(str(exc)) or type(exc).__name__})") from None
        except (aiohttp.ClientError, TimeoutError, OSError, EventTooLong) as exc:
            raise ConnectionError(f"{problem} ({self.words(str(exc)) or type(exc).__name__})") from None

    def without_secrets(self, data: bytes) -> bytes:
        return redact(data.decode(errors="replace"), self._secrets).encode() if self._secrets else data

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        refusal: str = "",
        expected: Container[int] = (),
        seconds: float = ANSWER_SECONDS,
    ) -> tuple[int, bytes]:
        """Return status and body of an answer. Transient failures (no connection, 5xx) raise ConnectionError.

        A status of an error that is not `expected` raises ExecutionBackendError; `refusal` says what the server did not do."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS)
        headers = {**trace_headers(), **self._headers}
        if body:
            headers.setdefault("content-type", "application/json")
        with self._our_errors(f"{self.url} cannot be reached"):
            async with self._session().request(
                method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                data = await response.content.read(MOST_BYTES + 1)
                while len(data) <= MOST_BYTES and (more := await response.content.read(MOST_BYTES + 1 - len(data))):
                    data += more
                status = response.status
        if len(data) > MOST_BYTES:
            raise self.error(f"sent more than {MOST_BYTES:,} bytes")
        if (problem := self.problem_of_status(status, data)) is not None:
            raise problem
        if status == 400:
            raise Garbled(f"{self.url} could not read the request: {status} {self.words(data)}")
        if status > 400 and status not in expected:
            raise self.refused(status, data, refusal)
        return status, data

    def decode(self, decode: Callable[[bytes], T], data: bytes, kind: str) -> T:
        """Decode an answer without its credentials. Raise Garbled if it is not one of this kind of server."""
        try:
            return decode(self.without_secrets(data))
        except ValueError as exc:
            problem = f"{self.url} did not answer as {kind} ({self.words(str(exc))}): check the url"
            raise Garbled(problem) from None

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
