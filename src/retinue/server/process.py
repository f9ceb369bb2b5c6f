"""The application as a server process: uvicorn, limits on what comes before a request, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from asyncio import Transport
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..core.concurrency import running, until_stopped
from ..core.errors import ConfigurationError
from .service import Service

GRACE = 10.0
"""Seconds in which requests, model calls and tool calls may finish once the server is told to end."""
MAX_HEAD = 64 * 1024
"""Bytes of the address and the headers of a request; a whole packet more may be read."""
HEAD_SECONDS = 30.0
"""Seconds in which a client must have sent the headers of its request."""
_MAX_MESSAGE = 1_000_000
"""Bytes of a WebSocket message of a client."""
_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class Tls(NamedTuple):
    """The files with which a server speaks TLS: a chain of certificates and its private key, as PEM."""

    cert: str
    key: str

    def check(self) -> None:
        """Raise ConfigurationError if the files cannot be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.cert, self.key, lambda: "")
        except (OSError, ValueError) as exc:  # an SSLError is an OSError
            reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
            raise ConfigurationError(
                f"TLS cannot be used with {self.cert!r} and {self.key!r}: {reason}: give a certificate and its key as "
                "PEM, without a password"
            ) from exc

    def read(self) -> tuple[bytes, bytes]:
        """Return the key and the certificates."""
        return Path(self.key).read_bytes(), Path(self.cert).read_bytes()


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with limits on the size and the time of the headers, and with our shape of errors."""

    _bytes_of_head = 0
    _is_in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._bytes_of_head += len(data)
            if self._bytes_of_head > MAX_HEAD:
                self._refuse(431, "headers_too_large", f"the headers are larger than {MAX_HEAD:,} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "not_http", "this is not an HTTP request")

    def _begin_head(self) -> None:
        self._end_head()
        self._is_in_head, self._bytes_of_head = True, 0
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.give_up)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def give_up(self) -> None:
        """End a connection whose client does not send its headers."""
        if not self.transport.is_closing():
            self._refuse(408, "too_slow", f"the headers did not come within {HEAD_SECONDS:g} seconds")

    def _refuse(self, status: int, code: str, detail: str) -> None:
        body = json.dumps({"detail": detail, "code": code})
        self.transport.write(
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
        )
        self.transport.close()


class _Server(uvicorn.Server):
    """A server that reports when it listens, and leaves signals to the command line."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raise ConfigurationError if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as exc:
        raise ConfigurationError(f"cannot listen on {host!r}: {_reason(exc)}: give another --host") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as exc:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {_reason(exc)}: give another --port, or 0 for any that is free"
        ) from exc
    listener.setblocking(False)
    return listener


def _reason(exc: Exception) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or str(exc)


async def serve(
    app: Starlette,
    listener: socket.socket,
    stop: Coroutine[Any, Any, object],
    on_ready: Callable[[], object],
    grace: float = GRACE,
    tls: Tls | None = None,
) -> None:
    """Serve an application until `stop` is done. Then let requests finish and streams connect elsewhere, and leave the runs.

    The runs begin nothing more from then on, also while requests finish. The caller closes the runtime.
    """
    config = uvicorn.Config(
        app, http=HttpProtocol, ws="websockets-sansio", ws_max_size=_MAX_MESSAGE, log_config=None, access_log=False,
        server_header=False, timeout_graceful_shutdown=max(1, round(grace)),
        ssl_certfile=None if tls is None else tls.cert, ssl_keyfile=None if tls is None else tls.key,
    )  # fmt: skip
    server, service = _Server(config, on_ready), app.state.service
    assert isinstance(service, Service)
    async with until_stopped(server.serve([listener]), stop) as serving:
        service.close()
        async with running(service.runtime._leave_runs(grace)) as leaving:  # pyright: ignore[reportPrivateUsage]  # not for callers
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await service.finish_requests()
            server.should_exit = True
            await serving
            await leaving
