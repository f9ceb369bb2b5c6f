"""A PostgreSQL database, for as many processes on as many machines as like."""

from __future__ import annotations

import asyncio
import itertools
import re
import selectors
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar

import psycopg

from ..core.stores import Durability, Watch
from .address import PostgresAddress
from .lanes import Lane, Link
from .listen import Listener
from .schema import MIGRATIONS, SCHEMA_VERSION, check_version, migrate
from .sql import SqlStore

T = TypeVar("T")

WRITERS, READERS, WRITERS_NOW = 4, 2, 2
_TYPES = {"BLOB": "BYTEA", "REAL": "DOUBLE PRECISION", "INTEGER": "BIGINT", "TEXT": 'TEXT COLLATE "C"'}
_TYPE = re.compile(rf"\b({'|'.join(_TYPES)})\b")
_MIGRATING = 0x7265_7469_6E75_6500
"""The advisory lock under which the schema is changed."""
_READING, _WRITING = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", b"BEGIN"


class PostgresStore(SqlStore):
    """Keeps everything in one schema of a database, `retinue` where the URL names no other with `?schema=`.

    `durability` changes nothing: a commit survives what the server's `synchronous_commit` says, which unless somebody
    turned it off is the end of any process, of the server and of its machine. Were it turned off for us, a server that
    crashed could forget who owns a run after two processes were told.

    Each connection needs a session of its own on the server: a pooler between them must not share sessions.
    """

    def __init__(self, url: str, durability: Durability = "process") -> None:
        super().__init__(PostgresDatabase(PostgresAddress(url)))

    def __repr__(self) -> str:
        return f"PostgresStore({self.place!r})"


class PostgresDatabase:
    """A few lanes for what is written, a few for what is read, each with a connection; and one that listens."""

    def __init__(self, address: PostgresAddress) -> None:
        self.place, self._address = address.place, address
        self._listener = Listener(lambda: _connect(address), address.schema)
        writers = [_Session(address, _WRITING) for _ in range(WRITERS + 1)]
        readers = [_Session(address, _READING) for _ in range(READERS)]
        self._sessions = writers + readers
        lanes = [Lane(self.place, session.lend, address.problem) for session in self._sessions]
        # Threads that wait ask for work that holds several things: each piece is a transaction of its own.
        single = [_Session(address, _WRITING) for _ in range(WRITERS_NOW)]
        self._writing_now = [Lane(self.place, session.lend, address.problem, most=1) for session in single]
        self._sessions += single
        # What is about everything has a lane to itself: together with other work it could wait for who waits for it.
        self._about_all, self._writing, self._reading = lanes[0], lanes[1 : WRITERS + 1], lanes[WRITERS + 1 :]
        self._turn = itertools.count()

    async def open(self) -> None:
        await self._about_all.do(lambda link: None)

    async def write(
        self, work: Callable[[Link], T], about: str = "", *, alone: bool = False, little: bool = False
    ) -> T:
        lane = self._writing[zlib.crc32(about.encode(errors="replace")) % WRITERS] if about else self._about_all
        return await lane.do(work, about, alone)

    async def read(self, work: Callable[[Link], T]) -> T:
        return await self._reading[next(self._turn) % READERS].do(work)

    def write_now(self, work: Callable[[Link], T], about: str = "") -> T:
        return self._writing_now[zlib.crc32(about.encode(errors="replace")) % WRITERS_NOW].do_now(work, about)

    def read_now(self, work: Callable[[Link], T]) -> T:
        return self._reading[next(self._turn) % READERS].do_now(work)

    async def version(self) -> int:
        return await asyncio.to_thread(self._stored_version)

    async def problems(self) -> list[str]:
        return []  # the server looks after its files

    def _stored_version(self) -> int:
        try:
            with _connect(self._address) as connection:
                return _version(connection, self._address.schema)
        except psycopg.Error as exc:
            raise self._address.problem(exc) from exc

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        return self._listener.watch(topic)

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        for lane in (self._about_all, *self._writing, *self._writing_now, *self._reading):
            lane.close_now()
        self._listener.close()
        for session in self._sessions:
            session.close()


class _Session:
    """One connection, made when it is first needed, and anew after it was lost."""

    def __init__(self, address: PostgresAddress, begin: bytes) -> None:
        self._address, self._begin = address, begin
        self._link: PostgresLink | None = None

    @contextmanager
    def lend(self) -> Generator[Link]:
        link = self._link
        if link is None or not link.is_alive():
            self.close()
            link = self._link = self._open()
        try:
            yield link
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.connection.close()
            link.leave()

    def _open(self) -> PostgresLink:
        address = self._address
        connection = _connect(address)
        try:
            if check_version(_version(connection, address.schema), address.place) < SCHEMA_VERSION:
                _migrate(connection, address)
            return PostgresLink(connection, self._begin, address.schema)
        except BaseException:
            connection.close()
            raise


class PostgresLink:
    """A connection, on which statements are sent without waiting for the answer of those that have none.

    What is wrong with one is then told with the next answer, at the latest by `commit`.
    """

    __slots__ = ("_begin", "_channel", "_entered", "_pipeline", "_topics", "connection", "locking", "lost")

    def __init__(self, connection: psycopg.Connection[Any], begin: bytes = _WRITING, channel: str = "") -> None:
        self.connection, self._begin, self._channel = connection, begin, channel
        self._entered = connection.pipeline()
        self._pipeline = self._entered.__enter__()
        self._topics: set[str] = set()
        self.locking = " FOR UPDATE"
        self.lost = False

    def is_alive(self) -> bool:
        """Whether it can be used, as far as is known without asking the server."""
        if self.lost or self.connection.closed:
            return False
        with suppress(psycopg.Error):
            for _ in range(2):  # what the server said at the end, and that it has gone
                self.connection.pgconn.consume_input()
            return not self.connection.closed
        return False

    def begin(self) -> None:
        self._topics.clear()
        self.connection.execute(self._begin)

    def commit(self) -> None:
        self.connection.execute(b"COMMIT")
        self._pipeline.sync()
        if self._topics:  # afterwards: whoever notes something within a transaction commits alone on the whole server
            try:
                self._tell()
                self._pipeline.sync()
            except psycopg.Error:
                self.lost = True  # what was asked is done, whatever becomes of the connection

    def rollback(self) -> None:
        """Take back what was not committed. A connection that statements failed on is given up: it is cheap and sure."""
        try:
            self.connection.execute(b"ROLLBACK")
            self._pipeline.sync()
        except psycopg.Error:
            self.lost = self.connection.closed
            self.connection.close()

    def run(self, sql: str, *values: Any) -> list[Any]:
        statement, has_rows = _translated(sql)
        answer = self.connection.execute(statement, values, binary=True)
        self._send()
        return answer.fetchall() if has_rows else []

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            self.connection.cursor().executemany(_translated(sql)[0], rows)
            self._send()

    def note(self, topic: str) -> None:
        self._topics.add(topic)

    def clock(self) -> float:
        return self.run("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0]

    def leave(self) -> None:
        """Give the connection back as it was."""
        with suppress(psycopg.Error):
            self._entered.__exit__(None, None, None)

    def _send(self) -> None:
        """Send all that was said: who waits for an answer later only reads, and the server may wait for the rest."""
        pgconn = self.connection.pgconn
        while pgconn.flush():
            with selectors.DefaultSelector() as ready:
                ready.register(pgconn.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
                if any(what & selectors.EVENT_READ for _, what in ready.select()):
                    pgconn.consume_input()  # it may have to say something before it listens again

    def _tell(self) -> None:
        statement = b"SELECT pg_notify(%s, topic) FROM unnest(%s::text[]) AS topic"
        self.connection.execute(statement, (self._channel, sorted(self._topics)))


class _SchemaLink(PostgresLink):
    """One on which statements have the types of SQLite."""

    __slots__ = ()

    def run(self, sql: str, *values: Any) -> list[Any]:
        return super().run(_TYPE.sub(lambda found: _TYPES[found[0]], sql), *values)


@lru_cache(maxsize=256)
def _translated(sql: str) -> tuple[bytes, bool]:
    """A statement as PostgreSQL has it, and whether its answer has rows."""
    return sql.replace("%", "%%").replace("?", "%s").encode(), sql.startswith("SELECT") or "RETURNING" in sql


def _connect(address: PostgresAddress) -> psycopg.Connection[Any]:
    connection = psycopg.connect("", autocommit=True, **address.parameters)
    try:
        # Who is stopped in the middle of something must not keep others from it.
        connection.execute(b"SET idle_in_transaction_session_timeout = '60s'")
        connection.execute(f'SET search_path = "{address.schema}"'.encode())
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: psycopg.Connection[Any], schema: str) -> int:
    # Not `to_regclass`, which may not see what another process made while this one waited for it.
    is_made = b"SELECT 1 FROM pg_tables WHERE schemaname = %s AND tablename = 'schema_version'"
    if not connection.execute(is_made, (schema,)).fetchall():
        return 0
    return connection.execute(b"SELECT coalesce(max(version), 0) FROM schema_version").fetchall()[0][0]


def _migrate(connection: psycopg.Connection[Any], address: PostgresAddress) -> None:
    """Bring the database to this version's schema, whole or not at all, one process at a time."""
    link = _SchemaLink(connection)
    try:
        link.begin()
        link.run("SELECT pg_advisory_xact_lock(?)", _MIGRATING)
        version = check_version(_version(connection, address.schema), address.place)
        if not link.run("SELECT 1 FROM pg_namespace WHERE nspname = ?", address.schema):
            link.run(f'CREATE SCHEMA "{address.schema}"')
        if version == 0:
            link.run("CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL)")
        migrate(link, version, MIGRATIONS)
        link.run("DELETE FROM schema_version")
        link.run("INSERT INTO schema_version (version) VALUES (?)", SCHEMA_VERSION)
        link.commit()
    except BaseException:
        link.rollback()
        raise
    finally:
        link.leave()
