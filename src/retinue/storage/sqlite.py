"""A store in one SQLite file, for any number of processes on one machine."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from secrets import token_hex
from typing import Any, NamedTuple

from ..core.concurrency import Backoff
from ..core.errors import StoreError
from ..core.processes import boot_id, boot_seconds
from ..core.stores import Durability, Watch
from .database import Database, Lane, Link
from .schema import newest_version, read_version, upgrade
from .sql import SqlStore

_BUSY_SECONDS = 10.0
_FIRST_POLL, _LONGEST_POLL = 0.01, 0.1
_LOCKED = ("locked", "busy")
_TRANSIENT = ("full", "disk I/O error", "unable to open", "readonly")
"""Parts of messages about problems that may pass."""
_MOST_PROBLEMS = 100
_PAGES = 1_000
"""Pages of the file that are given back in one transaction."""
_MOST_JOURNAL = 4_194_304
"""Bytes of the write-ahead log that stay on the disk once they are not needed."""


class SqliteStore(SqlStore):
    """Stores everything in one file in WAL mode. All runs share one writing connection, so many cost little more than
    one."""

    def __init__(self, path: str, durability: Durability = "process") -> None:
        super().__init__(SqliteDatabase(path, durability))
        self.path = path


class BootClock(NamedTuple):
    """A clock that runs while the machine is up, asleep or not, and the id of the boot that started it."""

    boot: str
    seconds: Callable[[], float]


class SqliteDatabase(Database):
    """The file, with one lane that writes and one that reads."""

    def __init__(self, path: str, durability: Durability, clock: BootClock | None = None) -> None:
        super().__init__(path)
        self._synchronous = "FULL" if durability == "full" else "NORMAL"
        # Without an id of the boot, leases of other processes cannot be compared.
        self._clock = clock or BootClock(boot_id() or f"process-{token_hex(8)}", boot_seconds)
        self._known_file: tuple[int, int] | None = None
        self._exclusive = Lane(path, lambda: self._connect("BEGIN IMMEDIATE"), self._problem, is_only_writer=True)
        self._writers = self._blocking_writers = [self._exclusive]
        self._readers = [Lane(path, lambda: self._connect("BEGIN"), self._problem)]

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        return nullcontext(_Poll())

    async def find_damage(self) -> list[str]:
        found = await self.rows(f"PRAGMA integrity_check({_MOST_PROBLEMS})")
        return [row[0] for row in found if row[0] != "ok"]

    def _connect(self, begin: str) -> Link:
        self._check_file()
        link = self._open()
        try:
            # Check the version before anything is changed, the mode of the file included.
            version = read_version(link, self.place)
            if not version:  # what packers free goes back to the system; that is possible only before the first table
                link.run("PRAGMA auto_vacuum = INCREMENTAL")
            _use_wal(link)
            link.run(f"PRAGMA journal_size_limit = {_MOST_JOURNAL}")
            link.run(f"PRAGMA synchronous = {self._synchronous}")
            if version < newest_version():
                upgrade(link, self.place)
            self._check_file()
        except BaseException:
            link.close()
            raise
        link.begin_statement = begin
        return link

    def _open(self) -> SqliteLink:
        self._check_place()
        connection = sqlite3.connect(self.place, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        return SqliteLink(connection, self._clock, self._check_file)

    def _check_file(self) -> None:
        """Raise if the file was deleted or replaced since the first check: writes to it would be lost."""
        try:
            found = os.stat(self.place)
        except OSError:
            found = None
        number = None if found is None else (found.st_dev, found.st_ino)
        if self._known_file is None:
            self._known_file = number
        elif number != self._known_file:
            raise StoreError(self.place, "the file was deleted or replaced while it was open")

    def _check_place(self) -> None:
        """Raise if no file can be there. SQLite only says that it cannot open it, as it says of problems that may pass."""
        folder = os.path.dirname(os.path.abspath(self.place))
        if not os.path.isdir(folder):
            raise StoreError(self.place, f"there is no folder {folder}: create it")
        if os.path.isdir(self.place):
            raise StoreError(self.place, "it is a folder: name a file, as in sqlite:///folder/app.db")

    def _read_version(self) -> int:
        self._check_place()
        return super()._read_version() if os.path.exists(self.place) else 0

    def _problem(self, error: Exception) -> Exception:
        if isinstance(error, UnicodeEncodeError):
            return StoreError(self.place, f"it cannot store what is not text: {error}")
        if not isinstance(error, sqlite3.DatabaseError):
            return error
        said = str(error)
        if isinstance(error, sqlite3.OperationalError) and any(word in said for word in _LOCKED):
            return StoreError(self.place, f"{said}: another process has held it for long, try again", transient=True)
        if isinstance(error, sqlite3.OperationalError) and any(word in said for word in _TRANSIENT):
            return StoreError(self.place, f"{said}: is there room on the disk, and may it be written?", transient=True)
        if "malformed" in said:
            return StoreError(self.place, f"{said}: restore a backup", damaged=True)
        return StoreError(self.place, f"{said}: is it a Retinue database?")


class _Poll:
    """A watch that polls, because a file sends no notifications: often at first, then less."""

    def __init__(self) -> None:
        self._backoff = Backoff(_FIRST_POLL, _LONGEST_POLL, factor=1.5)

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(min(self._backoff.next(), seconds))


def _use_wal(link: Link) -> None:
    """Switch to WAL mode. SQLite refuses all but one of the processes that do this to a new file at once: retry."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            link.run("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.005)


class SqliteLink(Link):
    """A connection to a file. A writer has the file to itself, so it needs no row locks."""

    list_tables = "SELECT name FROM sqlite_master WHERE type = 'table'"

    def __init__(self, connection: sqlite3.Connection, clock: BootClock, check_file: Callable[[], None]) -> None:
        self._connection, self._check_file = connection, check_file
        self.begin_statement = "BEGIN IMMEDIATE"
        connection.create_function("wall_seconds", 0, time.time)
        connection.create_function("boot_seconds", 0, clock.seconds)
        connection.create_function("boot_id", 0, lambda: clock.boot)

    def is_alive(self) -> bool:
        self._check_file()
        return True

    def begin(self, *, eager: bool = True) -> None:
        self._connection.execute(self.begin_statement)

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()

    def run(self, sql: str, *values: Any) -> list[Any]:
        return self._connection.execute(sql, values).fetchall()

    def insert(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            self._connection.executemany(f"INSERT INTO {into} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def moved(self, table: str) -> str:
        return f"rowid = (SELECT MAX(rowid) + 1 FROM {table}), "

    def give_back(self) -> bool:
        free = self._connection.execute("PRAGMA freelist_count").fetchone()[0]
        for _ in range(min(free, _PAGES)):  # sqlite3 runs one step of it, which is one page
            self._connection.execute("PRAGMA incremental_vacuum(1)")
        return free > _PAGES
