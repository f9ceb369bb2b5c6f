"""One SQLite file: threads, runs and the events of every log, for as many processes of this machine as like."""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from ..core.codec import to_json_value
from ..core.errors import StoreError
from ..core.events import Event, event_from_json, event_to_json
from ..core.runs import RunIdentity, RunResult
from ..core.stores import Durability, RunRecord, ThreadRecord
from .migrations import MIGRATIONS, SCHEMA_VERSION

T = TypeVar("T")

_BUSY_SECONDS = 10.0
_encode = msgspec.json.Encoder().encode
_thread = msgspec.json.Decoder(ThreadRecord).decode
_result = msgspec.json.Decoder(RunResult).decode
_identity = msgspec.json.Decoder(RunIdentity).decode
_any = msgspec.json.Decoder().decode

Work = Callable[[sqlite3.Connection], Any]


class SqliteStore:
    """Keeps everything in one file, in WAL mode, through one connection and one thread of this process.

    What waits for a commit is committed together, so that many runs cost little more than one.
    """

    def __init__(self, path: str, durability: Durability = "process") -> None:
        self.path, self._durability = path, durability
        self._jobs: queue.SimpleQueue[tuple[Work, asyncio.AbstractEventLoop, asyncio.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._worker: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"SqliteStore({self.path!r})"

    async def open(self) -> None:
        """Make or migrate the file; raises StoreError where it cannot be used."""
        await self._do(lambda connection: None)

    async def load_thread(self, thread_id: str) -> ThreadRecord | None:
        row = await self._row("SELECT body FROM threads WHERE thread_id = ?", thread_id)
        return None if row is None else _thread(row[0])

    async def save_thread(self, record: ThreadRecord) -> None:
        body = _encode(record)
        await self._do(
            lambda connection: connection.execute(
                "INSERT INTO threads (thread_id, user_id, body) VALUES (?, ?, ?) "
                "ON CONFLICT (thread_id) DO UPDATE SET user_id = excluded.user_id, body = excluded.body",
                (record.thread_id, record.user_id, body),
            )
        )

    async def load_run(self, run_id: str) -> RunRecord | None:
        row = await self._row("SELECT identity, started_at, result FROM runs WHERE run_id = ?", run_id)
        return None if row is None else _run(row)

    async def save_run(self, record: RunRecord) -> None:
        identity, result = record.identity, None
        if record.result is not None:
            result = _encode(msgspec.structs.replace(record.result, output=to_json_value(record.result.output)))
        status = "running" if record.result is None else record.result.status.value
        values = (
            identity.run_id,
            identity.thread_id,
            identity.user_id,
            identity.agent,
            status,
            record.started_at,
            _encode(identity),
            result,
        )
        await self._do(
            lambda connection: connection.execute(
                "INSERT INTO runs (run_id, thread_id, user_id, agent, status, started_at, identity, result) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (run_id) DO UPDATE SET status = excluded.status, "
                "result = excluded.result",
                values,
            )
        )

    async def list_runs(self, thread_id: str | None = None) -> list[RunRecord]:
        where, values = ("WHERE thread_id = ?", (thread_id,)) if thread_id is not None else ("", ())
        found = await self._do(
            lambda connection: connection.execute(
                f"SELECT identity, started_at, result FROM runs {where} ORDER BY started_at DESC, rowid DESC", values
            ).fetchall()
        )
        return [_run(row) for row in found]

    async def append_events(self, log_id: str, events: Sequence[Event], *, ended: bool = False) -> None:
        rows = [(log_id, event.seq, event.kind, _encode(event_to_json(event))) for event in events]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT INTO events (log_id, seq, kind, body) VALUES (?, ?, ?, ?)", rows)
            connection.execute(
                "INSERT INTO logs (log_id, ended) VALUES (?, ?) ON CONFLICT (log_id) DO UPDATE SET ended = excluded.ended",
                (log_id, int(ended)),
            )

        await self._do(write)

    async def read_events(self, log_id: str, after: int = 0, limit: int = 1000) -> tuple[list[Event], bool] | None:
        def read(connection: sqlite3.Connection) -> tuple[list[tuple[bytes]], bool] | None:
            # First whether it has ended: what is written between the two looks is then still read.
            log = connection.execute("SELECT ended FROM logs WHERE log_id = ?", (log_id,)).fetchone()
            if log is None:
                return None
            query = "SELECT body FROM events WHERE log_id = ? AND seq > ? ORDER BY seq LIMIT ?"
            return connection.execute(query, (log_id, after, limit)).fetchall(), bool(log[0])

        found = await self._do(read)
        if found is None:
            return None
        rows, ended = found
        return [event_from_json(_any(row[0])) for row in rows], ended and len(rows) < limit

    async def close(self) -> None:
        """Write what waits, and let go of the file."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._jobs.put(None)
            await asyncio.to_thread(self._worker.join)

    async def _row(self, query: str, *values: Any) -> Any:
        return await self._do(lambda connection: connection.execute(query, values).fetchone())

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Have work done by the thread that has the connection, and committed; whoever waits here is told then."""
        if self._closed:
            raise StoreError(self.path, "it was closed")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._jobs.put((work, loop, done))
        if self._worker is None:
            self._worker = threading.Thread(target=self._serve, name="retinue-sqlite", daemon=True)
            self._worker.start()
        return await done

    def _serve(self) -> None:
        connection: sqlite3.Connection | None = None
        while True:
            batch = [self._jobs.get()]
            while not self._jobs.empty():
                batch.append(self._jobs.get())
            jobs = [job for job in batch if job is not None]
            try:
                connection = connection or self._connect()
                outcomes = _together(connection, [work for work, _, _ in jobs])
            except Exception as exc:
                problem = self._problem(exc)
                outcomes = [(None, problem)] * len(jobs)
            for (_, loop, done), (result, error) in zip(jobs, outcomes, strict=True):
                _tell(loop, done, result, self._problem(error) if error is not None else None)
            if len(jobs) < len(batch):
                if connection is not None:
                    connection.close()
                return

    def _connect(self) -> sqlite3.Connection:
        folder = os.path.dirname(os.path.abspath(self.path))
        if not os.path.isdir(folder):
            raise StoreError(self.path, f"there is no folder {folder}: create it")
        connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._check_version(connection)  # before anything is changed, the mode of the file included
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._durability == 'full' else 'NORMAL'}")
            self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        """Bring the file to this version's schema, whole or not at all."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statements in MIGRATIONS[self._check_version(connection) :]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def _check_version(self, connection: sqlite3.Connection) -> int:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            problem = f"it was written by a newer version (schema {version}, known {SCHEMA_VERSION}): upgrade"
            raise StoreError(self.path, problem)
        return version

    def _problem(self, error: Exception) -> Exception:
        if isinstance(error, sqlite3.DatabaseError):
            return StoreError(self.path, f"{error}: is it a Retinue database, and is there room on the disk?")
        return error


def _together(connection: sqlite3.Connection, works: Sequence[Work]) -> list[tuple[Any, Exception | None]]:
    """Do several things in one transaction; one that fails is undone alone."""
    outcomes: list[tuple[Any, Exception | None]] = []
    connection.execute("BEGIN IMMEDIATE")
    try:
        for work in works:
            connection.execute("SAVEPOINT one")
            try:
                outcomes.append((work(connection), None))
            except Exception as exc:
                connection.execute("ROLLBACK TO one")
                outcomes.append((None, exc))
            connection.execute("RELEASE one")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return outcomes


def _tell(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    def settle() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return  # the event loop is closed: nobody waits any more


def _run(row: Any) -> RunRecord:
    return RunRecord(identity=_identity(row[0]), started_at=row[1], result=None if row[2] is None else _result(row[2]))
