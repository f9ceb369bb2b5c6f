"""One SQLite file, for as many processes of this machine as like."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, TypeVar

from ..core.errors import StoreError
from ..core.stores import Durability, Watch
from .lanes import Lane, Link
from .schema import MIGRATIONS, SCHEMA_VERSION, check_version, migrate
from .sql import SqlStore

T = TypeVar("T")

_BUSY_SECONDS = 10.0
_CHECKPOINT = 1000
"""Pages of the log of writes after which it is moved into the file."""
_LOOK_EVERY = 0.1
"""Seconds between two looks at what another process may have written."""
_TAKEN = ("locked", "busy")
_PASSES = ("full", "disk I/O error", "unable to open", "readonly")
"""What SQLite says of trouble that need not last."""
_MOST_PROBLEMS = 100


class SqliteStore(SqlStore):
    """Keeps everything in one file in WAL mode. One connection writes, so that many runs cost little more than one."""

    def __init__(self, path: str, durability: Durability = "process") -> None:
        super().__init__(SqliteDatabase(path, durability))
        self.path = path

    def __repr__(self) -> str:
        return f"SqliteStore({self.path!r})"


class SqliteDatabase:
    """The file, a lane for what is written, and one for what is read."""

    def __init__(self, path: str, durability: Durability) -> None:
        self.place = path
        writer, reader = _Session(path, durability, "BEGIN IMMEDIATE"), _Session(path, durability, "BEGIN")
        # Who asks that each commit reaches the disk waits for the disk, which is nothing for an event loop.
        quick = None if durability == "full" else writer.lend_quick
        self._writing = Lane(path, writer.lend, self._problem, quick=quick)
        self._reading = Lane(path, reader.lend, self._problem)
        self._sessions = (writer, reader)

    async def open(self) -> None:
        await self._writing.do(lambda link: None)

    async def write(
        self, work: Callable[[Link], T], about: str = "", *, alone: bool = False, little: bool = False
    ) -> T:
        return await self._writing.do(work, little=little)

    async def read(self, work: Callable[[Link], T]) -> T:
        return await self._reading.do(work)

    def write_now(self, work: Callable[[Link], T], about: str = "") -> T:
        return self._writing.do_now(work)

    def read_now(self, work: Callable[[Link], T]) -> T:
        return self._reading.do_now(work)

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        return nullcontext(_Glances())

    async def version(self) -> int:
        return await asyncio.to_thread(self._stored_version)

    async def problems(self) -> list[str]:
        found = await self.read(lambda link: link.run(f"PRAGMA integrity_check({_MOST_PROBLEMS})"))
        return [row[0] for row in found if row[0] != "ok"]

    async def close(self) -> None:
        await self._writing.close()
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        self._writing.close_now()
        self._reading.close_now()
        for session in self._sessions:
            session.close()

    def _stored_version(self) -> int:
        _check_place(self.place)
        if not os.path.exists(self.place):
            return 0
        try:
            with closing(sqlite3.connect(self.place, timeout=_BUSY_SECONDS)) as connection:
                connection.execute("SELECT 1 FROM sqlite_master LIMIT 1")  # the number alone says nothing of the rest
                return connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as exc:
            raise self._problem(exc) from exc

    def _problem(self, error: Exception) -> Exception:
        if not isinstance(error, sqlite3.DatabaseError):
            return error
        said = str(error)
        if isinstance(error, sqlite3.OperationalError) and any(word in said for word in _TAKEN):
            return StoreError(self.place, f"{said}: another process has held it for long, try again", passes=True)
        if isinstance(error, sqlite3.OperationalError) and any(word in said for word in _PASSES):
            return StoreError(self.place, f"{said}: is there room on the disk, and may it be written?", passes=True)
        if "malformed" in said:
            return StoreError(self.place, f"{said}: restore a backup", damaged=True)
        return StoreError(self.place, f"{said}: is it a Retinue database?")


class _Glances:
    """A file tells nobody that it has changed: look from time to time."""

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(min(_LOOK_EVERY, seconds))


class _Session:
    """One connection, made when it is first needed, and anew after it failed."""

    def __init__(self, path: str, durability: Durability, begin: str) -> None:
        self._path, self._durability, self._begin = path, durability, begin
        self._link: SqliteLink | None = None
        self._is_patient = True

    @contextmanager
    def lend(self) -> Generator[Link]:
        link = self._link = self._link or self._connect()
        self._be_patient(link, True)
        try:
            yield link
        except BaseException:
            self.close()
            raise

    @contextmanager
    def lend_quick(self) -> Generator[Link]:
        """As `lend`, with a connection that is there, and that waits for nobody and does no chores."""
        link = self._link
        if link is None:
            raise StoreError(self._path, "there is no connection yet")
        self._be_patient(link, False)
        yield link

    def _be_patient(self, link: SqliteLink, patient: bool) -> None:
        if patient != self._is_patient:
            link.run(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000) if patient else 0}")
            link.run(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT if patient else 0}")
            self._is_patient = patient

    def close(self) -> None:
        link, self._link, self._is_patient = self._link, None, True
        if link is not None:
            link.connection.close()

    def _connect(self) -> SqliteLink:
        _check_place(self._path)
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            link = SqliteLink(connection, self._begin)
            check_version(link.version(), self._path)  # before anything is changed, the mode of the file included
            _use_wal(connection)
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._durability == 'full' else 'NORMAL'}")
            if link.version() < SCHEMA_VERSION:
                self._migrate(link)
        except BaseException:
            connection.close()
            raise
        return link

    def _migrate(self, link: SqliteLink) -> None:
        """Bring the file to this version's schema, whole or not at all."""
        link.run("BEGIN IMMEDIATE")
        try:
            migrate(link, check_version(link.version(), self._path), MIGRATIONS)
            link.run(f"PRAGMA user_version = {SCHEMA_VERSION}")
            link.commit()
        except BaseException:
            link.rollback()
            raise


def _check_place(path: str) -> None:
    """Whether a file can be there; SQLite says only that it cannot open it, as it does of trouble that passes."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise StoreError(path, f"there is no folder {folder}: create it")
    if os.path.isdir(path):
        raise StoreError(path, "it is a folder: name a file, as in sqlite:///folder/app.db")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Of several who do this to a new file at once, SQLite refuses all but one without waiting: try for as long."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.005)


class SqliteLink:
    """A connection to a file."""

    __slots__ = ("_begin", "connection", "locking", "lost")

    def __init__(self, connection: sqlite3.Connection, begin: str) -> None:
        self.connection, self._begin = connection, begin
        self.locking = ""  # whoever writes has the file for himself
        self.lost = False

    def begin(self) -> None:
        self.connection.execute(self._begin)

    def commit(self) -> None:
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def run(self, sql: str, *values: Any) -> list[Any]:
        return self.connection.execute(sql, values).fetchall()

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self.connection.executemany(sql, rows)

    def note(self, topic: str) -> None:
        return  # others look from time to time

    def clock(self) -> float:
        return time.time()

    def version(self) -> int:
        return self.connection.execute("PRAGMA user_version").fetchone()[0]
