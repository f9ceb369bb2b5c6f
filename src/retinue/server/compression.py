"""Compression of answers: JSON and text that a client takes as gzip. Streams of events are never compressed: each event
must leave at once."""

from __future__ import annotations

import asyncio
import gzip

from starlette.requests import Request
from starlette.responses import Response

LEAST = 1_000
"""Bytes below which compression saves nothing."""
_AT_ONCE = 50_000
"""Bytes above which another thread compresses: the event loop has other work."""
_LEVEL = 4
_MEDIA = ("application/json", "text/")


async def compress(request: Request, response: Response) -> Response:
    """Return a response, with its body as gzip if that helps and the client takes it."""
    media = response.headers.get("content-type", "")
    body = getattr(response, "body", None)  # a stream has none
    if not isinstance(body, bytes) or len(body) < LEAST or not media.startswith(_MEDIA):
        return response
    response.headers.add_vary_header("accept-encoding")
    if "content-encoding" in response.headers or not takes_gzip(request.headers.get("accept-encoding", "")):
        return response
    if len(body) < _AT_ONCE:
        response.body = gzip.compress(body, _LEVEL)
    else:
        response.body = await asyncio.to_thread(gzip.compress, body, _LEVEL)
    response.headers["content-encoding"] = "gzip"
    response.headers["content-length"] = str(len(response.body))
    return response


def takes_gzip(accepted: str) -> bool:
    """Return whether a client takes gzip: it names it, with a quality above 0."""
    for one in accepted.split(","):
        name, *fields = [part.strip().lower() for part in one.split(";")]
        if name == "gzip":
            return not any(field.startswith("q=") and not field[2:].strip("0.") for field in fields)
    return False
