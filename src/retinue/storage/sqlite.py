"""One SQLite file, for as many processes of this machine as like."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar

from ..core.errors import StoreError
from ..core.stores import Durability, Watch
from .lanes import Lane, Later, Link, Unmet
from .schema import MIGRATIONS, SCHEMA_VERSION, check_version, migrate, stored_version
from .sql import SqlStore

T = TypeVar("T")

_BUSY_SECONDS = 10.0
_LOOK_EVERY = 0.1
"""Seconds between two looks at what another process may have written."""
_TAKEN = ("locked", "busy")
_TRANSIENT = ("full", "disk I/O error", "unable to open", "readonly")
"""Parts of messages about transient trouble."""
_MOST_PROBLEMS = 100


class SqliteStore(SqlStore):
    """Keeps everything in one file in WAL mode. One connection writes, so that many runs cost little more than one."""

    def __init__(self, path: str, durability: Durability = "process") -> None:
        super().__init__(SqliteDatabase(path, durability))
        self.path = path

    def __repr__(self) -> str:
        return f"SqliteStore({self.path!r})"


class BootClock(NamedTuple):
    """A clock that runs while the machine is up, sleeping or not, and the id of the boot since which it runs."""

    boot: str
    seconds: Callable[[], float]


def _boot_seconds() -> float:
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # without it, leases of other processes cannot be compared
        return f"process-{token_hex(8)}"


class SqliteDatabase:
    """The file, a lane that writes, and one that reads."""

    def __init__(self, path: str, durability: Durability, clock: BootClock | None = None) -> None:
        self.place = path
        clock = clock or BootClock(_boot_id(), _boot_seconds)
        file = _File(path)
        writer = _Session(file, durability, "BEGIN IMMEDIATE", clock)
        reader = _Session(file, durability, "BEGIN", clock)
        self._writing = Lane(path, writer.lend, self._problem)
        self._reading = Lane(path, reader.lend, self._problem)
        self._sessions = (writer, reader)

    async def open(self) -> None:
        await self._writing.do(lambda link: None)

    def write(self, work: Callable[[Link], T], about: str = "", *, threads: Sequence[str] = ()) -> asyncio.Future[T]:
        return self._writing.do(work)

    def read(self, work: Callable[[Link], T]) -> asyncio.Future[T]:
        return self._reading.do(work)

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
                return _version(connection, self.place)
        except sqlite3.DatabaseError as exc:
            raise self._problem(exc) from exc

    def _problem(self, error: Exception) -> Exception:
        if isinstance(error, UnicodeEncodeError):
            return StoreError(self.place, f"it cannot store what is not text: {error}")
        if not isinstance(error, sqlite3.DatabaseError):
            return error
        said = str(error)
        if isinstance(error, sqlite3.OperationalError) and any(word in said for word in _TAKEN):
            return StoreError(self.place, f"{said}: another process has held it for long, try again", transient=True)
        if isinstance(error, sqlite3.OperationalError) and any(word in said for word in _TRANSIENT):
            return StoreError(self.place, f"{said}: is there room on the disk, and may it be written?", transient=True)
        if "malformed" in said:
            return StoreError(self.place, f"{said}: restore a backup", damaged=True)
        return StoreError(self.place, f"{said}: is it a Retinue database?")


class _Glances:
    """A file sends no notifications: look from time to time."""

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(min(_LOOK_EVERY, seconds))


class _File:
    """The file at a path, recognised by its number."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._known: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise if the file was deleted or replaced since the first check: what is written would be lost."""
        try:
            found = os.stat(self.path)
        except OSError:
            found = None
        number = None if found is None else (found.st_dev, found.st_ino)
        if self._known is None:
            self._known = number
        elif number != self._known:
            raise StoreError(self.path, "the file was deleted or replaced while it was open")


class _Session:
    """One connection, opened when it is first needed, and again after it failed."""

    def __init__(self, file: _File, durability: Durability, begin: str, clock: BootClock) -> None:
        self._file, self._durability, self._begin, self._clock = file, durability, begin, clock
        self._link: SqliteLink | None = None

    @contextmanager
    def lend(self) -> Generator[Link]:
        self._file.check()
        link = self._link = self._link or self._connect()
        try:
            yield link
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.connection.close()

    def _connect(self) -> SqliteLink:
        path = self._file.path
        _check_place(path)
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            link = SqliteLink(connection, self._begin, self._clock)
            # Before anything is changed, the mode of the file included:
            version = check_version(_version(connection, path), path)
            _use_wal(connection)
            connection.execute(f"PRAGMA synchronous = {'FULL' if self._durability == 'full' else 'NORMAL'}")
            if version < SCHEMA_VERSION:
                _migrate(link, path)
            self._file.check()
        except BaseException:
            connection.close()
            raise
        return link


def _migrate(link: SqliteLink, path: str) -> None:
    """Bring the file to this version's schema, whole or not at all."""
    link.run("BEGIN IMMEDIATE")
    try:
        migrate(link, check_version(_version(link.connection, path), path), MIGRATIONS)
        link.commit()
    except BaseException:
        link.rollback()
        raise


def _version(connection: sqlite3.Connection, place: str) -> int:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return stored_version(tables, lambda query: connection.execute(query).fetchall(), place)


def _check_place(path: str) -> None:
    """Raise if no file can be there. SQLite would only say that it cannot open it, as it says of transient trouble."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise StoreError(path, f"there is no folder {folder}: create it")
    if os.path.isdir(path):
        raise StoreError(path, "it is a folder: name a file, as in sqlite:///folder/app.db")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL mode. If several processes do this to a new file at once, SQLite refuses all but one: try again."""
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

    __slots__ = ("_begin", "boot", "connection", "eager", "lease_now", "locking", "lost", "now")

    def __init__(self, connection: sqlite3.Connection, begin: str, clock: BootClock) -> None:
        self.connection, self._begin, self.boot = connection, begin, clock.boot
        self.locking = ""  # a writer has the file to itself
        self.eager, self.lost = True, False
        self.now, self.lease_now = "wall_seconds()", "boot_seconds()"
        connection.create_function("wall_seconds", 0, time.time)
        connection.create_function("boot_seconds", 0, clock.seconds)

    def begin(self) -> None:
        self.connection.execute(self._begin)

    def commit(self) -> None:
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def run(self, sql: str, *values: Any) -> list[Any]:
        return self.connection.execute(sql, values).fetchall()

    def ask(self, sql: str, *values: Any) -> Later:
        rows = self.run(sql, *values)
        return Later(lambda: rows)

    def run_two(self, first: str, first_values: Sequence[Any], second: str, second_values: Sequence[Any]) -> None:
        self.connection.execute(first, first_values)
        self.connection.execute(second, second_values)

    def insert(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            self.connection.executemany(f"INSERT INTO {into} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def insert_if(self, sql: str, values: Sequence[Any], into: str, rows: Sequence[Sequence[Any]]) -> None:
        if self.connection.execute(sql, values).fetchone() is None:
            raise Unmet
        self.insert(into, rows)

    def lock_threads(self, thread_ids: Sequence[str]) -> None:
        return

    def notify(self, topic: str) -> None:
        return  # others look from time to time
