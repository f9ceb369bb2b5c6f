"""The page at `/` and its files below `/ui/`: built from `clients/page` by `scripts/page`, and part of the package.

They need no token, hold nothing of a user, and load nothing from other places.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .compression import takes_gzip

_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "cache-control": "no-cache",  # a browser asks each time whether its copy is current
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


class _File(NamedTuple):
    body: bytes
    packed: bytes
    media: str
    tag: str


@cache
def _read_files() -> dict[str, _File]:
    """Return the files of the page by their paths."""
    root = files("retinue.server").joinpath("web")
    found = {"/": root.joinpath("index.html")}
    found |= {f"/ui/{file.name}": file for file in root.joinpath("ui").iterdir()}
    return {path: _prepared(file.name, file.read_bytes()) for path, file in found.items()}


def _prepared(name: str, body: bytes) -> _File:
    media = _MEDIA[name[name.rindex(".") :]]
    tag = hashlib.sha256(body).hexdigest()[:20]
    return _File(body, gzip.compress(body, 9, mtime=0), media, f'W/"{tag}"')


async def _send(request: Request) -> Response:
    file = _read_files()[request.scope["route"].path]
    headers = {**_HEADERS, "etag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if not takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(file.body, headers=headers, media_type=file.media)
    return Response(file.packed, headers={**headers, "content-encoding": "gzip"}, media_type=file.media)


def routes() -> Iterable[Route]:
    """Return the routes of the page's own files."""
    return [Route(path, _send) for path in _read_files()]
