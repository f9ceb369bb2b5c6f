"""JSON is compressed for clients that take it; events leave at once and are not."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from retinue import Runtime

from .agents import speaker
from .serving import Site, serving

RUNS = "/api/v1/runs"
WORDS = ["word " * 400, "more " * 20_000]


async def raw(site: Site, path: str, accepted: str | None) -> tuple[bytes, Any]:
    """Return a body as it comes, and the headers."""
    headers = {} if accepted is None else {"accept-encoding": accepted}
    skipped = () if accepted is not None else ("accept-encoding",)
    async with site.session.get(path, headers=headers, skip_auto_headers=skipped, auto_decompress=False) as response:
        assert response.status == 200
        return await response.read(), response.headers


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5, br", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000", False),
        ("br", False),
        ("", False),
        (None, False),
    ],
)
async def test_json_is_compressed_for_who_takes_it(accepted: str | None, is_compressed: bool) -> None:
    async with serving(Runtime(agents=[speaker(*WORDS)])) as site:
        run_id = (await site.start("speaker"))["run_id"]
        await site.result(run_id)
        for path in ("result", "snapshot"):
            body, headers = await raw(site, f"{RUNS}/{run_id}/{path}", accepted)
            assert headers.get("content-encoding") == ("gzip" if is_compressed else None)
            assert (headers["vary"], headers["content-length"]) == ("accept-encoding", str(len(body)))
            whole = gzip.decompress(body) if is_compressed else body
            assert WORDS[1] in json.dumps(json.loads(whole))
            assert not is_compressed or len(body) < len(whole) / 20
        small, headers = await raw(site, f"{RUNS}?limit=1&status=failed", accepted)
        assert "content-encoding" not in headers
        assert json.loads(small) == {"items": [], "next_cursor": None}
        events, headers = await raw(site, f"{RUNS}/{run_id}/events", accepted)
        assert "content-encoding" not in headers
        assert events.startswith(b": open\n\nid: 1\n")
