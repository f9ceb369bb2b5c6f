"""Task records in a workspace: one JSON file a session, `agents/<agent>/tasks/<session>.json`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..core.concurrency import join
from ..core.errors import FileMissing, FilesystemError, TaskStoreError
from ..core.filesystem import Filesystem, Stamp, name_of_part
from ..core.functions import in_thread
from .repository import Records, SessionRecords, TaskSettings, is_long, open_scopes
from .task import TaskRecord, TaskScope, encoded

_decode = msgspec.json.Decoder(dict[str, TaskRecord]).decode
_FileChange = Callable[[Records], Any]
_encode = msgspec.json.Encoder().encode


def holds_tasks(names: tuple[str, ...]) -> bool:
    """Return whether a folder of a workspace holds task records: `agents/<agent>/tasks`, and what is below."""
    return len(names) > 2 and names[0].lower() == "agents" and names[2].lower() == "tasks"


class _Contents(Struct, gc=False):
    """A file as it was read or written last: its bytes and its records."""

    data: bytes = b""
    records: dict[str, TaskRecord] = {}
    lines: dict[str, bytes] = {}
    stamp: Stamp | None = None


class _Records(dict[str, TaskRecord]):
    """Records, and the ids of those that were changed."""

    __slots__ = ("changed",)

    def __init__(self, records: dict[str, TaskRecord]) -> None:
        super().__init__(records)
        self.changed: dict[str, None] = {}

    def __setitem__(self, task_id: str, record: TaskRecord) -> None:
        super().__setitem__(task_id, record)
        self.changed[task_id] = None


class _Batch:
    """Changes to one file that are written together, after the batch before them."""

    def __init__(self, write: Callable[[_Batch], Coroutine[Any, Any, list[Any]]]) -> None:
        self.changes: list[_FileChange] = []
        self.is_open = True
        """False once it is being written: it takes no more changes."""
        self.written = asyncio.create_task(write(self))
        """Returns the outcome of each change."""


class WorkspaceTaskRepository(SessionRecords):
    """Visible to every process that works on the same files. Writes that arrive during one are joined."""

    def __init__(self, filesystem: Filesystem, agent: str, settings: TaskSettings | None = None) -> None:
        self.settings = settings or TaskSettings()
        self._filesystem, self._folder, self._agent = filesystem, f"agents/{agent}/tasks", agent
        self._read: dict[str, _Contents] = {}
        self._batches: dict[tuple[asyncio.AbstractEventLoop, str], _Batch] = {}
        """The last batch of each session, while it is not written. Event loops do not wait for each other."""

    def __repr__(self) -> str:
        return f"WorkspaceTaskRepository({self._filesystem!r}, {self._agent!r})"

    async def everything(self) -> Sequence[TaskRecord]:
        """Return every task of this agent, of all sessions and users."""
        sessions = await in_thread(self._filesystem.stamps, {"path": self._folder, "suffix": ".json"})
        found = [await self._read_file(name.removesuffix(".json")) for name in sorted(sessions)]
        return [record for records in found for record in records.values()]

    async def keep_result(self, record: TaskRecord, text: str) -> str | None:
        if not is_long(text):
            return None
        # No file of records has a name that ends so, whatever a session is called.
        folder = f"{self._folder}/{name_of_part(record.parent_session_id)}.results"
        path = f"{folder}/{record.task_id}.txt"
        await in_thread(self._filesystem.write, {"path": path, "data": text.encode(errors="replace")})
        return path

    async def read_result(self, record: TaskRecord) -> str | None:
        if record.result_file is None:
            return record.result
        try:
            data: bytes = await in_thread(self._filesystem.read, {"path": record.result_file})
        except FilesystemError as exc:
            return f"{record.result or ''}\n[the whole result cannot be read: {exc}]"
        return data.decode(errors="replace")

    async def open_scopes(self) -> Sequence[TaskScope]:
        return await in_thread(self._open_scopes, {})

    def _open_scopes(self) -> list[TaskScope]:
        found: list[TaskRecord] = []
        for name in self._filesystem.stamps(self._folder, ".json"):
            try:
                records = self._fresh(name.removesuffix(".json")).records
            except TaskStoreError:
                continue  # the agent of that session gets the error
            found += records.values()
        return open_scopes(found)

    def _path(self, session_id: str) -> str:
        return self._path_of(name_of_part(session_id))

    def _path_of(self, name: str) -> str:
        return f"{self._folder}/{name}.json"

    async def _current(self, session_id: str) -> dict[str, TaskRecord]:
        return await self._read_file(name_of_part(session_id))

    async def _read_file(self, name: str) -> dict[str, TaskRecord]:
        """Return the records of the file of a session; read again only if the file has changed."""
        kept = self._read.get(name)
        if self._filesystem.is_local:
            stamp = self._filesystem.stamp(self._path_of(name))
            if stamp is None:
                return {}
            if kept is not None and kept.stamp == stamp:
                return kept.records
        return (await in_thread(self._fresh, {"name": name})).records

    def _fresh(self, name: str) -> _Contents:
        """Read a file, unless it has not changed. Blocking."""
        path, kept = self._path_of(name), self._read.get(name)
        stamp = self._filesystem.stamp(path)
        if kept is not None and stamp is not None and kept.stamp == stamp:
            return kept
        try:
            with self._filesystem.open(path) as stream:
                data = stream.read()
        except FileMissing:
            return _Contents()
        # The stamp is older than the data: what is written in between is noticed the next time.
        made = self._read[name] = self._parsed(name, data, stamp)
        return made

    def _parsed(self, name: str, data: bytes, stamp: Stamp | None) -> _Contents:
        kept = self._read.get(name)
        if kept is not None and kept.data == data:
            return _Contents(data, kept.records, kept.lines, stamp)
        try:
            records = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            problem = f"it is not a file of task records ({exc}): mend it, or move it away"
            raise TaskStoreError(self._path_of(name), problem) from None
        return _Contents(data, records, {}, stamp)

    async def _write(self, session_id: str, change: _FileChange) -> Any:
        """Write a change together with the others that wait, and return its outcome."""
        key = asyncio.get_running_loop(), name_of_part(session_id)
        batch = last = self._batches.get(key)
        if batch is None or not batch.is_open or batch.written.done():  # one that was cancelled is done
            batch = self._batches[key] = _Batch(lambda made: self._write_batch(key, made, last))
        batch.changes.append(change)
        place = len(batch.changes) - 1
        outcome = (await asyncio.shield(batch.written))[place]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _write_batch(self, key: Any, batch: _Batch, last: _Batch | None) -> list[Any]:
        try:
            if last is not None:
                await join([last.written])
            batch.is_open = False
            return await in_thread(self._write_now, {"name": key[1], "changes": batch.changes})
        finally:
            if self._batches.get(key) is batch:
                del self._batches[key]

    def _write_now(self, name: str, changes: list[_FileChange]) -> list[Any]:
        """Read, change and write back a file as one atomic step. Blocking."""
        outcomes: list[Any] = []
        made = _Contents()

        def apply(data: bytes | None) -> bytes | None:
            nonlocal made
            before = _Contents() if data is None else self._parsed(name, data, None)
            records = _Records(before.records)
            outcomes[:] = [_outcome(change, records) for change in changes]
            if not records.changed:
                made = before
                return None
            lines = dict(before.lines)  # of all records or, where others have written, of none
            for task_id in list(records.changed if lines else records):
                records[task_id], body = encoded(records[task_id])
                lines[task_id] = _encode(task_id) + b": " + body
            written = b"{\n" + b",\n".join(lines.values()) + b"\n}\n"
            made = _Contents(written, records, lines)
            return written

        made.stamp = self._filesystem.update(self._path_of(name), apply)
        self._read[name] = made
        return outcomes


def _outcome(change: _FileChange, records: dict[str, TaskRecord]) -> Any:
    """Return what a change returned or raised: one that fails does not affect the others."""
    try:
        return change(records)
    except Exception as exc:
        return exc
