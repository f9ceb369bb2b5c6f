"""The HTTP client under an A2A client: it reaches only allowed servers, keeps no cookies and limits what it reads."""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import AsyncGenerator
from typing import Any, cast
from urllib.parse import urlsplit

import certifi
import httpx

from .http_client import CONNECT_SECONDS, MOST_BYTES

_ZONELESS = re.compile(rb'"timestamp"\s*:\s*"[0-9]{4}-[0-9-]+T[0-9:.]+"')

Origin = tuple[str, str, int]


class TooMuch(Exception):
    """A server sends more than the limit."""


def origin_of(url: str) -> Origin:
    """Return scheme, host and port of an address; ValueError where it has none."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(f"{url!r} is no address of a server")
    return scheme, parts.hostname, parts.port or {"http": 80, "https": 443}[scheme]


def make_http_client(origins: frozenset[Origin], seconds: float) -> httpx.AsyncClient:
    """Return a client for these origins only."""
    timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS, read=None, pool=None)
    # If the network repeats a request, a server that must close the connection answers only the first.
    headers = {"accept-encoding": "identity", "connection": "close"}
    return httpx.AsyncClient(transport=_Guarded(origins), timeout=timeout, follow_redirects=False, headers=headers)


class _Guarded(httpx.AsyncBaseTransport):
    """Refuses requests to other origins, cookies and compressed answers."""

    def __init__(self, origins: frozenset[Origin]) -> None:
        # A new connection for each request: an answer cannot belong to an earlier request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        verify = _make_ssl_context() if any(scheme == "https" for scheme, _, _ in origins) else False
        self._origins = origins
        self._inner = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if origin_of(str(request.url)) not in self._origins:
            raise httpx.UnsupportedProtocol("the card leads to another server", request=request)
        response = await self._inner.handle_async_request(request)
        dropped = (b"set-cookie", b"content-length")
        headers = [(name, value) for name, value in response.headers.raw if name.lower() not in dropped]
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise TooMuch("sent compressed data, which was not asked for")
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        stream = _Bounded(response.stream, is_stream)
        return httpx.Response(response.status_code, headers=headers, stream=stream, extensions=response.extensions)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Bounded(httpx.AsyncByteStream):
    """The lines of a stream, or an answer as a whole. No line is longer than an answer may be."""

    def __init__(self, stream: Any, is_stream: bool) -> None:
        self._stream, self._is_stream = stream, is_stream

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        kept: list[bytes] = []
        size = 0
        async for data in self._stream:
            cut = data.rfind(b"\n") + 1 if self._is_stream else 0
            if cut:
                lines = b"".join([*kept, data[:cut]])
                yield b"".join([_with_zones(line) for line in lines.splitlines(keepends=True)])
                kept, size, data = [], 0, data[cut:]
            kept.append(data)
            size += len(data)
            if size > MOST_BYTES:
                raise TooMuch(f"sent more than {MOST_BYTES:,} bytes")
        yield _with_zones(b"".join(kept))

    async def aclose(self) -> None:
        await self._stream.aclose()


def _make_ssl_context() -> ssl.SSLContext:
    """Return the SSL context: it trusts the authorities in `$SSL_CERT_FILE`, or those of the system."""
    context = ssl.create_default_context()
    if "SSL_CERT_FILE" not in os.environ and not context.get_ca_certs():
        context.load_verify_locations(certifi.where())
    return context


def _with_zones(data: bytes) -> bytes:
    """Return JSON, or a line of a stream, whose statuses have times with a zone: some servers leave it out, and the SDK
    reads no such time."""
    if _ZONELESS.search(data) is None:
        return data
    start = data.find(b"{")
    try:
        found: Any = json.loads(data[start:])
    except (ValueError, RecursionError):
        return data
    _add_zones(found)
    return data[:start] + json.dumps(found).encode() + (b"\n" if data.endswith(b"\n") else b"")


def _add_zones(value: Any) -> None:
    values: list[Any] = cast("list[Any]", value) if isinstance(value, list) else []
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        when, state = fields.get("timestamp"), fields.get("state")
        if isinstance(state, str) and isinstance(when, str) and _ZONELESS.fullmatch(f'"timestamp":"{when}"'.encode()):
            fields["timestamp"] = f"{when}Z"
        values = [one for name, one in fields.items() if name not in ("parts", "metadata")]
    for one in values:
        _add_zones(one)
