"""Endpoints of files: those that the agents with a workspace work on.

A filesystem that is divided by user shows each user its own part. One that is not is shown to the local user only, or
to all users where they share files.
"""

from __future__ import annotations

import asyncio
import os
from itertools import dropwhile
from typing import Any

from msgspec import Struct
from starlette.responses import Response

from ..core.errors import FileMissing
from ..core.filesystem import FileEntry, Filesystem, GuardedFilesystem, files_of, is_divided
from ..core.runs import RunIdentity
from ..subagents.harness import HarnessAgent
from ..tasks.files import holds_tasks
from ..wire.resources import page_json
from ..wire.shapes import FileShape, Items, WrittenFile
from .auth import LOCAL
from .http import ApiError, Call, Endpoints, Page, not_found, read_bytes
from .runs import cursor_of, page_after

MOST_BYTES = 20_000_000
_HEADERS = {
    "content-disposition": "attachment",
    "x-content-type-options": "nosniff",
    "content-security-policy": "default-src 'none'; sandbox",
    "cache-control": "no-store",
}


_FILE = "/api/v1/files/{path:path}"
endpoint = Endpoints()


class FilesQuery(Page, frozen=True):
    """The query of a list of files: a folder of an agent's workspace."""

    path: str = ""
    agent: str | None = None


class FileQuery(Struct, frozen=True):
    """The agent in whose workspace a file is; the first that has one if left out."""

    agent: str | None = None


def _files(call: Call) -> Filesystem:
    """Return the files of the user in the workspace of an agent."""
    agents = [agent for agent in call.runtime.agents.values() if isinstance(agent, HarnessAgent)]
    agents = [agent for agent in agents if call.query.agent in (None, agent.name) and not agent.disable_filesystem]
    if not agents:
        raise not_found("workspace")
    files, user = agents[0].files, call.user.id
    if not is_divided(files) and user != LOCAL and not call.service.shared_files:
        raise not_found("workspace")
    if isinstance(files, GuardedFilesystem):
        files = files.without(holds_tasks)
    return files_of(files, RunIdentity("", "", agents[0].name, user_id=user))


def _entries(files: Filesystem, path: str) -> list[FileEntry]:
    """Return the entries of a folder; a workspace in which nothing was written yet has none."""
    try:
        return files.list(path)
    except FileMissing as error:
        if not os.path.isabs(error.path):
            raise
        if path in ("", "."):
            return []
        raise not_found("folder") from error


@endpoint("GET", "/api/v1/files", query=FilesQuery, returns=Items[FileShape])
async def list_files(call: Call) -> Any:
    """List a folder of the workspace of an agent."""
    query: FilesQuery = call.query
    files = _files(call)
    entries = await asyncio.to_thread(_entries, files, query.path)
    if (place := cursor_of(query.cursor)) is not None:
        entries = list(dropwhile(lambda entry: entry.path <= place[1], entries))
    shown, cursor = page_after(entries, query.limit, lambda entry: (0.0, entry.path))
    return page_json([{"path": one.path, "is_dir": one.is_dir, "size": one.size} for one in shown], cursor)


@endpoint("GET", _FILE, query=FileQuery, media="application/octet-stream")
async def read_file(call: Call) -> Response:
    """Read a file."""
    files, path = _files(call), call.param("path")

    def read() -> bytes:
        try:
            with files.open(path) as stream:
                return stream.read(MOST_BYTES + 1)
        except FileMissing as error:
            if not os.path.isabs(error.path):
                raise
            raise not_found("file") from error  # the error names the root folder, which is not for clients

    data = await asyncio.to_thread(read)
    if len(data) > MOST_BYTES:
        raise ApiError(413, "too_large", f"the file is larger than {MOST_BYTES:,} bytes: read it where it is")
    return Response(data, media_type="application/octet-stream", headers=_HEADERS)


@endpoint("PUT", _FILE, scope="run", query=FileQuery, takes="application/octet-stream", returns=WrittenFile)
async def write_file(call: Call) -> Any:
    """Write a file; the body is its content."""
    files, path = _files(call), call.param("path")
    data = await read_bytes(call.request, call.service)
    await asyncio.to_thread(files.write, path, data)
    return {"path": path, "size": len(data)}


@endpoint("DELETE", _FILE, scope="run", query=FileQuery, status=204)
async def delete_file(call: Call) -> Response:
    """Delete a file."""
    files, path = _files(call), call.param("path")

    def delete() -> bool:
        if not files.exists(path):
            return False
        files.delete(path)
        return True

    if not await asyncio.to_thread(delete):
        raise not_found("file")
    return Response(status_code=204)
