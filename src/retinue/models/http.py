"""Endpoints, and the HTTP client: a POST with a streamed answer. The only module that imports aiohttp."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit, urlunsplit

from ..core.errors import (
    ConfigurationError,
    ModelError,
    ModelNotFound,
    ModelResponseInvalid,
    ModelStreamBroken,
    ModelTimeout,
    ModelUnavailable,
)
from ..core.gate import Account
from ..core.secrets import redact, secrets_of, sort_secrets
from .refusals import error_in_body, error_of_status

if TYPE_CHECKING:
    import aiohttp


SHOWN = 500
"""The longest error message in characters; the quoted words of the server come last."""

_KEYLESS = "models of ollama, vllm and llamacpp need no key"


class Endpoint:
    """A base address and the headers of every request. Its repr shows no secret."""

    __slots__ = ("_secrets", "base_url", "headers", "name")

    def __init__(self, name: str, base_url: str, headers: Mapping[str, str]) -> None:
        self.name, self.base_url, self.headers = name, base_url.rstrip("/"), dict(headers)
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{name}: base_url {_without_secrets(base_url)!r} is not an http(s) address")
        if "@" in parts.netloc:
            raise ConfigurationError(
                f"{name}: base_url has a password in it: pass it in headers={{'Authorization': …}}"
            )
        if parts.query or parts.fragment:
            raise ConfigurationError(
                f"{name}: base_url has a '?' or '#' in it: end it before that, and pass a key as api_key=… or in headers"
            )
        for header, value in self.headers.items():
            if not value.isascii() or not value.isprintable():
                raise ConfigurationError(
                    f"{name}: the value of the header {header!r} has characters that cannot be sent"
                )
        self._secrets = secrets_of(self.headers)

    def __repr__(self) -> str:
        return f"<endpoint {self.base_url} of {self.name}>"

    @property
    def account(self) -> Account:
        """The account that the requests count for."""
        parts = urlsplit(self.base_url)
        return Account(self.name, f"{parts.scheme}://{parts.netloc}", "\n".join(secrets_of(self.headers)))

    def hide(self, *secrets: str) -> None:
        """Redact these in messages too, URL-quoted or not."""
        self._secrets = sort_secrets([*self._secrets, *secrets])

    @contextlib.contextmanager
    def own_errors(self) -> Generator[None]:
        """Raise model errors with the name of this endpoint, without its secrets, and then cut."""
        try:
            yield
        except ModelError as exc:
            if exc.model == self.name:
                raise
            message = redact_message(exc.message, self._secrets)
            raise type(exc)(message, self.name, exc.status, exc.retry_after) from None


def redact_message(text: str, secrets: Iterable[str]) -> str:
    """Return a text for a message: without secrets, then cut."""
    text = redact(text, secrets)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


def find_key(name: str, given: str | None, variable: str | None, *, required: bool = True) -> str | None:
    """Return the given key, else the one in the environment; raise an error that names the variable if there is none."""
    if given:
        return given.strip()
    found = os.environ.get(variable, "").strip() if variable else ""
    if found:
        return found
    if required:
        raise ConfigurationError(f"{name} needs a key: set {variable} in the environment or pass api_key=…; {_KEYLESS}")
    return None


CONNECT_TIMEOUT = 20.0
IDLE_TIMEOUT = 300.0
"""Seconds a server may be silent; a reasoning model may send nothing for minutes."""
_ERROR_BODY = 64 * 1024
_ERROR_SECONDS = 10.0
"""Seconds to read the body of an error: a failing server may send it byte by byte."""
_DRAIN = 0.25
"""Seconds to wait for the end of the body after the last event, so that the connection can be reused."""


class Heard(Protocol):
    """Is called with the headers of a response, before its body is read."""

    def __call__(self, headers: Mapping[str, str], *, is_accepted: bool) -> None: ...


class HttpClient:
    """Connections to one endpoint, kept alive between requests, one session for each event loop."""

    def __init__(self, endpoint: Endpoint, idle_timeout: float = IDLE_TIMEOUT) -> None:
        if not idle_timeout > 0:
            raise ConfigurationError(f"{endpoint.name}: idle_timeout must be more than 0 seconds, got {idle_timeout}")
        self.endpoint, self.idle_timeout = endpoint, idle_timeout
        self._proxy = _proxy_of(endpoint.base_url)
        if self._proxy is not None:
            login = urlsplit(self._proxy).netloc.rpartition("@")[0]
            endpoint.hide(login, login.partition(":")[2])  # aiohttp quotes the address of the proxy in its errors
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        weakref.finalize(self, _abandon, self._sessions)

    async def post(self, path: str, body: bytes, is_done: Callable[[], bool], heard: Heard) -> AsyncIterator[bytes]:
        """Send JSON and yield the pieces of the answer as they come, until it ends or `is_done`. `heard` is called with the
        head of the response.

        Every failure is a ModelError, with the words of the server: `own_errors` makes it fit to be shown.
        """
        import aiohttp

        endpoint, where = self.endpoint, self.endpoint.base_url
        try:
            async with self._session().post(
                endpoint.base_url + path,
                data=body,
                headers=endpoint.headers,
                allow_redirects=False,
                proxy=self._proxy,
            ) as response:
                is_accepted = response.status == 200
                heard(response.headers, is_accepted=is_accepted)
                if not is_accepted or response.content_type in ("text/html", "application/json"):
                    raise await self._refusal(response)
                content = response.content
                while piece := await content.readany():
                    yield piece
                    if is_done():
                        await _drain(content)
                        break
        except aiohttp.ClientConnectorError as exc:
            reason = _reason(exc.os_error)
            raise ModelUnavailable(f"cannot connect to {where}: is the server running? ({reason})") from None
        except (TimeoutError, aiohttp.ServerTimeoutError) as exc:
            slow = isinstance(exc, aiohttp.ConnectionTimeoutError)
            silent = f"no connection within {CONNECT_TIMEOUT:g} s" if slow else self.silence()
            raise ModelTimeout(f"{where}: {silent}") from None
        except aiohttp.InvalidURL:
            raise ModelNotFound(f"{where} is not a valid address: correct base_url") from None
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, OSError) as exc:
            problem = f"the connection to {where} broke before the answer was complete ({_reason(exc)})"
            raise ModelStreamBroken(problem) from None
        except (aiohttp.ClientError, ValueError) as exc:
            raise ModelResponseInvalid(f"{where} did not answer with valid HTTP ({_reason(exc)})") from None

    def silence(self) -> str:
        return f"the server was silent for {self.idle_timeout:g} s: raise idle_timeout if the model needs longer"

    async def _refusal(self, response: aiohttp.ClientResponse) -> ModelError:
        """Return the error for a response that is not an event stream."""
        body = bytearray()
        with contextlib.suppress(TimeoutError):  # use what has arrived by then
            async with asyncio.timeout(min(_ERROR_SECONDS, self.idle_timeout)):
                while len(body) < _ERROR_BODY and (piece := await response.content.readany()):
                    body += piece
        where = self.endpoint.base_url
        text = bytes(body[:_ERROR_BODY])
        if response.status != 200:
            return error_of_status(response.status, text, response.headers, where)
        if (error := error_in_body(text, where)) is not None:
            return error
        kind = response.content_type
        return ModelResponseInvalid(f"{where} sent {kind} instead of an event stream: check base_url and the server")

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            import aiohttp

            _abandon({known: self._sessions.pop(known) for known in list(self._sessions) if known.is_closed()})
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=self.idle_timeout)
            session = self._sessions[loop] = aiohttp.ClientSession(
                # Limits(parallel=…) decides the number of concurrent requests, not the pool.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                timeout=timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={
                    "content-type": "application/json",
                    "accept": "text/event-stream",
                    "accept-encoding": "identity",
                },
            )
        return session

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()


def _proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for this address. aiohttp could find it too, but also reads ~/.netrc."""
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    if parts.hostname == "localhost" or (parts.hostname or "").startswith(("127.", "::1")):
        return None  # a server on this machine
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def _reason(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__


async def _drain(content: aiohttp.StreamReader) -> None:
    """Read the rest of the body after the last event; it is short if the server ends the response."""
    try:
        async with asyncio.timeout(_DRAIN):
            while await content.readany():
                pass
    except Exception:  # an error here changes nothing: the answer is complete
        return


def _abandon(sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession]) -> None:
    """Close sessions whose event loop has ended: aiohttp would warn about each."""
    for session in sessions.values():
        connector = session.connector
        session.detach()
        if connector is not None:
            next(iter(connector.close().__await__()), None)  # its first step closes what can be closed
    sessions.clear()
