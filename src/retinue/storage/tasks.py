"""Task records in a database: every process that can reach it sees the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

import msgspec

from ..core.errors import StoreError, TaskStoreError
from ..core.runs import WAITING
from ..core.stores import Store
from ..tasks.repository import Change, TaskLiveness, TaskSettings, is_long
from ..tasks.task import TaskRecord, TaskScope, encoded
from .database import IS_EXPIRED, Link
from .stores import sql_store

T = TypeVar("T")

_decode_task = msgspec.json.Decoder(TaskRecord).decode
_AT = "agent = ? AND session_id = ? AND task_id = ?"
_TASK = f"SELECT body FROM tasks WHERE {_AT}"


class SqlTaskRepository:
    """Task records as rows, for agents on any number of machines. An agent sees the tasks under its own name.

    If the run of a task is in the same database, the task is alive while the log of the run has an owner: it needs no
    heartbeats.

    Pass a URL (`sqlite:///app.db`, `postgresql://…`), or an open store to share its connections. Creating one does no
    I/O; `close` closes only what it opened.
    """

    def __init__(self, store: str | Store, settings: TaskSettings | None = None) -> None:
        self.settings = settings or TaskSettings()
        self._database = sql_store(store, "a SqlTaskRepository").database
        self._is_own = isinstance(store, str)
        self.place = self._database.place

    def __repr__(self) -> str:
        return f"SqlTaskRepository({self.place!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the database; a store that was passed in stays open."""
        if self._is_own:
            await self._database.close()

    async def add(self, record: TaskRecord) -> None:
        if not _can_be_stored(record.scope, record.task_id):
            raise TaskStoreError(self.place, f"the ids of task {record.task_id!r} have characters that are not text")
        record, body = encoded(record)
        scope, made = record.scope, list[Any]()  # one success is enough: the job may run twice
        insert = (
            "INSERT INTO tasks (agent, session_id, task_id, user_id, log_id, place, is_open, saved_at, body) "
            # The column is only for logs in this database.
            "VALUES (?, ?, ?, ?, (SELECT log_id FROM logs WHERE log_id = ?), ?, ?, wall_seconds(), ?) "
            "ON CONFLICT (agent, session_id, task_id) DO NOTHING RETURNING task_id"
        )

        def work(link: Link) -> None:
            last = "SELECT MAX(place) FROM tasks WHERE agent = ? AND session_id = ?"
            place = (link.run(last, scope.agent, scope.session_id)[0][0] or 0) + 1
            values = (*_key(scope, record.task_id), scope.user_id, record.log_id, place, _is_open(record), body)
            made.extend(link.run(insert, *values))

        await self._write(scope, record.task_id, work)
        if not made:
            raise TaskStoreError(self.place, f"there is a task {record.task_id} already")

    async def get(self, scope: TaskScope, task_id: str) -> TaskRecord | None:
        if not _can_be_stored(scope, task_id):
            return None
        return self._one(await self._rows(_TASK, *_key(scope, task_id)), scope)

    async def list(self, scope: TaskScope) -> Sequence[TaskRecord]:
        if not _can_be_stored(scope):
            return []
        query = "SELECT user_id, body FROM tasks WHERE agent = ? AND session_id = ? ORDER BY place, task_id"
        found = await self._rows(query, scope.agent, scope.session_id)
        return [self._decode(body, scope) for user_id, body in found if user_id == scope.user_id]

    async def update(self, scope: TaskScope, task_id: str, change: Change) -> TaskRecord | None:
        if not _can_be_stored(scope, task_id):
            return None
        written: TaskRecord | None = None

        def work(link: Link) -> TaskRecord | Exception | None:
            """Lock the record and change it, unless it has ended."""
            nonlocal written
            record = self._one(link.run(_TASK + link.locking, *_key(scope, task_id)), scope)
            if record is None or record.status.is_terminal or record == written:
                return record
            try:
                changed = change(record)
            except Exception as exc:
                return exc  # nothing was written, so the other jobs of this transaction may be committed
            if changed is None or changed == record:
                return record
            written, body = encoded(changed)
            update = f"UPDATE tasks SET is_open = ?, saved_at = wall_seconds(), body = ? WHERE {_AT}"
            link.run(update, _is_open(written), body, *_key(scope, task_id))
            return written

        after = await self._write(scope, task_id, work)
        if isinstance(after, Exception):
            raise after
        return after

    async def keep_result(self, record: TaskRecord, text: str) -> str | None:
        if not is_long(text):
            return None
        data, key = text.encode(errors="replace"), _key(record.scope, record.task_id)
        insert = (
            "INSERT INTO task_results (agent, session_id, task_id, body) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (agent, session_id, task_id) DO UPDATE SET body = excluded.body"
        )

        def work(link: Link) -> None:
            has_ended = f"SELECT task_id FROM tasks WHERE {_AT} AND is_open = 0{link.locking}"
            if not link.run(has_ended, *key):
                link.run(insert, *key, data)

        await self._write(record.scope, record.task_id, work)
        return f"task_results/{record.task_id}"

    async def read_result(self, record: TaskRecord) -> str | None:
        if record.result_file is None:
            return record.result
        key = _key(record.scope, record.task_id)
        found = await self._rows(f"SELECT body FROM task_results WHERE {_AT}", *key)
        if not found:
            return f"{record.result or ''}\n[the whole result is not in {self.place} any more]"
        return bytes(found[0][0]).decode(errors="replace")

    async def everything(self) -> Sequence[TaskRecord]:
        """Return the tasks of every agent, session and user."""
        query = "SELECT agent, session_id, user_id, body FROM tasks ORDER BY agent, session_id, place, task_id"
        return [self._decode(body, TaskScope(*scope)) for *scope, body in await self._rows(query)]

    async def open_scopes(self) -> Sequence[TaskScope]:
        found = await self._rows("SELECT DISTINCT agent, session_id, user_id FROM tasks WHERE is_open = 1")
        ordered = sorted(found, key=lambda row: (row[0], row[1], row[2] or ""))
        return [TaskScope(*row) for row in ordered]

    async def liveness(self, scope: TaskScope) -> Mapping[str, TaskLiveness]:
        if not _can_be_stored(scope):
            return {}
        query = (
            f"SELECT tasks.user_id, task_id, ended, owner, epoch, lease_until, {IS_EXPIRED}, status FROM tasks "
            "LEFT JOIN logs ON logs.log_id = tasks.log_id LEFT JOIN runs ON runs.run_id = tasks.log_id "
            "WHERE tasks.agent = ? AND session_id = ? AND is_open = 1 AND tasks.log_id IS NOT NULL"
        )
        found = await self._rows(query, scope.agent, scope.session_id)
        return {task_id: _liveness(*log) for user_id, task_id, *log in found if user_id == scope.user_id}

    def _one(self, found: Sequence[Any], scope: TaskScope) -> TaskRecord | None:
        """Return the record in the only row, if it is there and of that user."""
        record = self._decode(found[0][0], scope) if found else None
        return record if record is not None and record.user_id == scope.user_id else None

    def _decode(self, body: bytes, scope: TaskScope) -> TaskRecord:
        try:
            return _decode_task(body)
        except (msgspec.MsgspecError, ValueError) as exc:
            what = f"a task of session {scope.session_id!r}"
            raise TaskStoreError(self.place, f"what is stored of {what} cannot be read: {exc}") from exc

    async def _rows(self, query: str, *values: str) -> list[Any]:
        return await _as_task_errors(self._database.rows(query, *values))

    async def _write(self, scope: TaskScope, task_id: str, work: Callable[[Link], T]) -> T:
        return await _as_task_errors(self._database.write(work, f"{scope.session_id}/{task_id}"))


async def _as_task_errors(work: Awaitable[T]) -> T:
    """Turn StoreErrors into TaskStoreErrors."""
    try:
        return await work
    except TaskStoreError:
        raise
    except StoreError as exc:
        raise TaskStoreError(exc.place, exc.problem, transient=exc.transient, damaged=exc.damaged) from exc


def _liveness(
    ended: int | None, owner: str | None, epoch: int, lease_until: float, expired: int | None, status: str | None
) -> TaskLiveness:
    """Return the liveness of a task with such a log; `ended` is None if the log is gone."""
    if ended is None or ended:
        return TaskLiveness(status="lost")
    mark = f"{epoch}/{lease_until}"
    # A lease by another clock cannot be compared with ours, but a living owner renews it.
    if owner is not None:
        return TaskLiveness(status="orphaned" if expired or expired is None else "alive", mark=mark, owner=owner)
    return TaskLiveness(status="waiting" if status in WAITING else "orphaned", mark=mark)


def _key(scope: TaskScope, task_id: str) -> tuple[str, str, str]:
    return scope.agent, scope.session_id, task_id


def _is_open(record: TaskRecord) -> int:
    return int(not record.status.is_terminal)


def _can_be_stored(scope: TaskScope, task_id: str = "") -> bool:
    """Return whether a database can store these ids as text."""
    try:
        return b"\0" not in "".join((scope.agent, scope.session_id, scope.user_id or "", task_id)).encode()
    except UnicodeEncodeError:
        return False
