"""The connection to one server: requests that are repeated while it is away, and its errors as ours."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ..backends.http_client import CONNECT_SECONDS, SILENCE_SECONDS, trace_headers, whole_chunks
from ..core.concurrency import Backoff, Jobs
from ..core.content import to_json_bytes
from ..core.errors import ConfigurationError, DecisionRefused, RetinueError, RunElsewhere, ServerError, StoreError
from ..core.secrets import redact, secrets_of
from ..wire.sse import EventDecoder, EventTooLong, data_of

ANSWER_SECONDS = 60.0
TRANSIENT = frozenset({408, 425, 429, 502, 503, 504})
MOST_BYTES = 64_000_000
_RETRY = re.compile(rb"^retry: ?(\d{1,6})$", re.M)
_SHOWN = 300
_CAUGHT_UP = b": caught_up"

PROBLEMS = (aiohttp.ClientError, TimeoutError, OSError, EventTooLong)
"""The errors after which a request may be made again."""


def encode_body(body: Any) -> bytes:
    """Return the JSON of a request; a value without a JSON form is the caller's mistake."""
    try:
        return to_json_bytes(body)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigurationError(f"this cannot be sent to a server: {exc}") from None


class Received(msgspec.Struct, frozen=True):
    """The part of a stream of events that came at once."""

    data: list[bytes]
    pause: float = 0.0
    """Seconds after which to connect again, once the stream ends."""
    is_caught_up: bool = False
    """True if everything that is stored has come."""


class Unavailable(Exception):
    """A refusal of a stream that may pass."""

    def __init__(self, problem: RetinueError) -> None:
        super().__init__(problem)
        self.problem = problem


class Connection:
    """Speaks to one server. Its token goes to that address alone: no redirect is followed."""

    def __init__(self, url: str, token: str | None, headers: Mapping[str, str], patience: float) -> None:
        given: Any = url
        if not isinstance(given, str) or urlsplit(given).scheme not in ("http", "https") or not urlsplit(given).netloc:
            raise ConfigurationError(f"the url of a server is like http://localhost:8000, not {url!r}")
        secret: Any = token
        if secret is not None and not (
            isinstance(secret, str) and secret.isascii() and secret.isprintable() and secret.strip()
        ):
            raise ConfigurationError("a token is ASCII text without control characters")
        self.url, self.patience = url.rstrip("/"), patience
        self._headers = {**headers, **({} if token is None else {"authorization": f"Bearer {token}"})}
        self._secrets = secrets_of(self._headers)
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
        self._jobs = Jobs()  # a failure is for the code that awaits the result
        self.is_closed = False

    # --- sessions and jobs, which belong to one event loop each

    def open(self) -> None:
        """Keep connections open between requests, until `close`."""
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = _new_session()

    async def close(self) -> None:
        """Stop the work of this event loop and close its connections."""
        loop = asyncio.get_running_loop()
        await self._jobs.close()
        if (session := self._sessions.pop(loop, None)) is not None:
            await session.close()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Do something until it is done or the connection is closed."""
        return self._jobs.start(work)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncGenerator[aiohttp.ClientSession]:
        """Without `open`, each request has a session of its own, so that there is nothing to close."""
        if self.is_closed:
            raise ConfigurationError("this client is closed")
        kept = self._sessions.get(asyncio.get_running_loop())
        if kept is not None:
            yield kept
            return
        async with _new_session() as session:
            yield session

    # --- requests

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        key: str | None = None,
        seconds: float = ANSWER_SECONDS,
        repeats: bool = True,
        missing: RetinueError | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an answer below 300. Raise what the server refuses, and `missing` if it does not
        know what is asked for."""
        backoff = Backoff(patience=self.patience)
        headers = {**trace_headers(), **self._headers, **({} if key is None else {"idempotency-key": key})}
        if body is not None:
            headers["content-type"] = "application/json"
        while True:
            after = 0.0
            try:
                async with self._session() as session, session.request(
                    method, self._address(path), data=body, headers=headers, allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=seconds, connect=CONNECT_SECONDS),
                ) as response:  # fmt: skip
                    answer = await response.read()
                    if response.status < 300:
                        return response.status, self._decode(response.status, answer)
                    problem = self.refusal(response.status, answer)
                    if response.status not in TRANSIENT or not repeats:
                        is_missing = isinstance(problem, ServerError) and problem.code == "not_found"
                        raise missing if missing is not None and is_missing else problem
                    after = _seconds_in(response.headers.get("retry-after"))
            except PROBLEMS as exc:
                if not repeats and not isinstance(exc, aiohttp.ClientConnectorError):
                    raise ServerError(self.url, None, "unknown_outcome", self._words(exc)) from None
                problem = self.unreachable(exc)
            await backoff.wait(problem, after)

    async def stream(self, path: str) -> AsyncGenerator[Received]:
        """Yield server-sent events as they come."""
        headers = {"accept": "text/event-stream", **self._headers}
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        decoder = EventDecoder(MOST_BYTES)
        async with self._session() as session, session.get(
            self._address(path), headers=headers, timeout=timeout, allow_redirects=False
        ) as response:  # fmt: skip
            if response.status in TRANSIENT:
                raise Unavailable(self.refusal(response.status, await response.read()))
            if response.status != 200 or response.content_type != "text/event-stream":
                raise self.refusal(response.status, await response.read())
            yield Received([])
            async for data in whole_chunks(response):
                hint = _RETRY.search(data) if b"retry:" in data else None
                blocks = decoder.split(data)
                found = [shown for block in blocks if (shown := data_of(block))]
                is_caught_up = any(block.startswith(_CAUGHT_UP) for block in blocks)
                if found or hint or is_caught_up:
                    yield Received(found, 0.0 if hint is None else int(hint[1]) / 1000, is_caught_up)

    def _decode(self, status: int, data: bytes) -> dict[str, Any]:
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            raise self.refusal(status, b"") from None

    def _address(self, path: str) -> str:
        return f"{self.url}/api/v1/{path}"

    # --- errors

    def unreachable(self, exc: BaseException) -> ServerError:
        return ServerError(self.url, None, "unreachable", f"cannot be reached ({self._words(exc)})")

    def closed(self) -> ServerError:
        return ServerError(self.url, None, "closed", "the client was closed; the run continues on the server")

    def refusal(self, status: int, data: bytes) -> RetinueError:
        """Return the error of an answer. Errors that need more than its words are made by their callers."""
        try:
            said = msgspec.json.decode(data, type=_Refusal)
        except msgspec.MsgspecError:
            if 200 <= status < 400:
                return ServerError(self.url, status, "no_server", "this is no Retinue server: correct the url")
            said = _Refusal(self._words(data.decode(errors="replace")) or "without a reason", "refused")
        detail = redact(said.detail, self._secrets)
        if said.code == "decision_refused":
            return DecisionRefused(detail)
        if said.code == "store_unavailable":
            return StoreError(self.url, detail, transient=True)
        if said.code == "owner_silent" and said.run_id is not None:
            return RunElsewhere(said.run_id, "another node, which does not answer")
        if said.code in ("invalid", "invalid_body"):
            return ConfigurationError(detail)
        return ServerError(self.url, status, said.code, detail, said.run_id)

    def _words(self, said: object) -> str:
        text = said if isinstance(said, str) else str(said) or type(said).__name__
        return " ".join(redact(text, self._secrets).split())[:_SHOWN]


class _Refusal(msgspec.Struct):
    detail: str
    code: str
    run_id: str | None = None


def _new_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), connector=aiohttp.TCPConnector(limit=0))


def _seconds_in(header: str | None) -> float:
    return float(header) if header is not None and header.isdigit() and len(header) < 6 else 0.0
