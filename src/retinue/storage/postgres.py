"""A PostgreSQL database, for as many processes on as many machines as like."""

from __future__ import annotations

import asyncio
import itertools
import re
import selectors
import threading
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any, TypeVar

import psycopg

from ..core.stores import Durability, Watch
from .address import PostgresAddress
from .lanes import MOST, Lane, Later, Link, Unmet
from .listen import Listener
from .schema import MIGRATIONS, SCHEMA_VERSION, check_version, migrate, stored_version
from .sql import SqlStore

T = TypeVar("T")

WRITERS, READERS, WRITERS_NOW = 2, 2, 2
_TYPES = {"BLOB": "BYTEA", "REAL": "DOUBLE PRECISION", "INTEGER": "BIGINT", "TEXT": 'TEXT COLLATE "C"'}
_TYPE = re.compile(rf"\b({'|'.join(_TYPES)})\b")
_MIGRATING = 0x7265_7469_6E75_6500
"""The advisory lock under which the schema is changed."""
_READING = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_NOTIFY_EVERY = 0.01
"""Seconds in which topics are gathered, while they come often."""
_FEW = 8
"""Rows that are inserted by one statement."""


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
    """A few lanes that write, a few that read, each with a connection; one that notifies, and one that listens."""

    def __init__(self, address: PostgresAddress) -> None:
        self.place, self._address = address.place, address
        self._listener = Listener(lambda: _connect(address), address.schema)
        self._sessions: list[_Session] = []
        # Work about everything has a lane to itself: it may lock many logs, so no other work may be with it.
        self._about_all = self._lane(most=1)
        self._writing = [self._lane() for _ in range(WRITERS)]
        # Threads that wait ask for work that locks several rows: each job is a transaction of its own.
        self._writing_now = [self._lane(most=1) for _ in range(WRITERS_NOW)]
        self._reading = [self._lane(_READING) for _ in range(READERS)]
        self._notifying = self._lane()
        self._turn = itertools.count()
        self._topics: set[str] = set()
        self._notify_from = 0.0
        self._lock = threading.Lock()

    def _lane(self, begin: bytes = b"", most: int = MOST) -> Lane:
        session = _Session(self._address, begin, self._notify)
        self._sessions.append(session)
        return Lane(self.place, session.lend, self._address.problem, most)

    async def open(self) -> None:
        await self._about_all.do(lambda link: None)

    def write(self, work: Callable[[Link], T], about: str = "", *, threads: Sequence[str] = ()) -> asyncio.Future[T]:
        lane = self._writing[zlib.crc32(about.encode(errors="replace")) % WRITERS] if about else self._about_all
        return lane.do(work, about, threads)

    def read(self, work: Callable[[Link], T]) -> asyncio.Future[T]:
        return self._reading[next(self._turn) % READERS].do(work)

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
                return _version(connection, self._address)
        except psycopg.Error as exc:
            raise self._address.problem(exc) from exc

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        return self._listener.watch(topic)

    async def close(self) -> None:
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        for lane in (self._about_all, *self._writing, *self._writing_now, *self._reading):
            lane.close_now()
        self._notifying.close_now()
        self._listener.close()
        for session in self._sessions:
            session.close()

    def _notify(self, topics: set[str]) -> None:
        """Wake those who watch topics, in a transaction of its own: on a server, transactions that notify commit one
        after the other. Topics that gather meanwhile go together."""
        with self._lock:
            self._topics |= topics
        self._notifying.add(self._send_topics)

    def _send_topics(self, link: Link) -> None:
        time.sleep(max(0.0, self._notify_from - time.monotonic()))
        with self._lock:
            topics, self._topics = sorted(self._topics), set()
        if not topics:
            return
        self._notify_from = time.monotonic() + _NOTIFY_EVERY
        try:
            link.run(  # without waiting for the disk
                "SELECT set_config('synchronous_commit', 'off', true), COUNT(pg_notify(?, topic)) "
                "FROM unnest(?::text[]) AS topic",
                *(self._address.schema, topics),
            )
        except psycopg.Error:
            with self._lock:
                self._topics.update(topics)  # this job is tried again; if that fails too, they go with the next
            raise


class _Session:
    """One connection, opened when it is first needed, and again after it was lost."""

    def __init__(self, address: PostgresAddress, begin: bytes, notify: Callable[[set[str]], None]) -> None:
        self._address, self._begin, self._notify = address, begin, notify
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
            if check_version(_version(connection, address), address.place) < SCHEMA_VERSION:
                _migrate(connection, address)
            return PostgresLink(connection, self._begin, self._notify)
        except BaseException:
            connection.close()
            raise


class PostgresLink:
    """A connection, on which statements are sent without waiting for the answer of those that have none.

    Without `begin`, all statements up to a commit are one implicit transaction, which takes one round trip if no answer
    is needed before its end. Errors of a statement are raised with the next answer, at the latest by `commit`.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], begin: bytes, notify: Callable[[set[str]], None] | None = None
    ) -> None:
        self.connection, self._begin, self._notify = connection, begin, notify
        self._entered = connection.pipeline()
        self._pipeline = self._entered.__enter__()
        self._topics: set[str] = set()
        self._is_open = False
        self.locking = " FOR UPDATE"
        self.now = self.lease_now = "extract(epoch FROM clock_timestamp())::float8"
        self.boot = "server"  # the server's clock is the same for everybody
        self.eager = self.lost = False

    def is_alive(self) -> bool:
        """Return whether it can be used, as far as is known without asking the server."""
        if self.lost or self.connection.closed:
            return False
        with suppress(psycopg.Error):
            for _ in range(2):  # the last message of the server, and the end of the connection
                self.connection.pgconn.consume_input()
            return not self.connection.closed
        return False

    def begin(self) -> None:
        self._topics = set()
        if self._begin:
            self._execute(self._begin)

    def commit(self) -> None:
        if self._begin:
            self._execute(b"COMMIT")
        if self._is_open:
            self._is_open = False
            self._pipeline.sync()
        if self._topics and self._notify is not None:
            self._notify(self._topics)

    def rollback(self) -> None:
        """Take back what was not committed. A connection that cannot do that is closed."""
        try:
            if self._is_open:
                self._execute(b"ROLLBACK")
                self._is_open = False
                with suppress(psycopg.errors.PipelineAborted):  # after an error the server does nothing until here
                    self._pipeline.sync()
        except psycopg.Error:
            self.lost = self.connection.closed
            self.connection.close()

    def run(self, sql: str, *values: Any) -> list[Any]:
        statement, has_rows = _translated(sql)
        answer = self._execute(statement, values)
        self._send()
        return answer.fetchall() if has_rows else []

    def ask(self, sql: str, *values: Any) -> Later:
        return Later(self._execute(_translated(sql)[0], values).fetchall)

    def run_two(self, first: str, first_values: Sequence[Any], second: str, second_values: Sequence[Any]) -> None:
        self.run(f"WITH first AS ({first}) {second}", *first_values, *second_values)

    def insert(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        if not rows:
            return
        one = f"({', '.join('?' * len(rows[0]))})"
        if len(rows) <= _FEW:  # a statement for each number of rows: the server knows all of them soon
            values = [value for row in rows for value in row]
            self.run(f"INSERT INTO {into} VALUES {', '.join([one] * len(rows))}", *values)
        else:
            self._is_open = True
            self.connection.cursor().executemany(_translated(f"INSERT INTO {into} VALUES {one}")[0], rows)
            self._send()

    def insert_if(self, sql: str, values: Sequence[Any], into: str, rows: Sequence[Sequence[Any]]) -> None:
        if self.eager:
            if not self.run(sql, *values):
                raise Unmet
            self.insert(into, rows)
            return
        columns, first = ", ".join("?" * len(rows[0])) if rows else "", rows[0] if rows else ()
        met = f"done AS (INSERT INTO {into} SELECT {columns} FROM met RETURNING 1)" if rows else "done AS (TABLE met)"
        self.run(f"WITH met AS ({sql}), {met} SELECT 1 / COUNT(*) FROM done", *values, *first)
        self.insert(into, rows[1:])

    def lock_threads(self, thread_ids: Sequence[str]) -> None:
        keys = sorted({_lock_key(thread_id) for thread_id in thread_ids})
        self._execute(b"SELECT pg_advisory_xact_lock(key) FROM unnest(%s::bigint[]) AS key", (keys,))

    def notify(self, topic: str) -> None:
        self._topics.add(topic)

    def leave(self) -> None:
        """Give the connection back as it was."""
        with suppress(psycopg.Error):
            self._entered.__exit__(None, None, None)

    def _execute(self, statement: bytes, values: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        self._is_open = True
        return self.connection.execute(statement, values, binary=True)

    def _send(self) -> None:
        """Send all statements: the driver only reads while it waits for an answer, and the server may wait for the rest."""
        pgconn = self.connection.pgconn
        while pgconn.flush():
            with selectors.DefaultSelector() as ready:
                ready.register(pgconn.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
                if any(what & selectors.EVENT_READ for _, what in ready.select()):
                    pgconn.consume_input()  # it may have to say something before it listens again


def _lock_key(thread_id: str) -> int:
    return int.from_bytes(blake2b(thread_id.encode(errors="replace"), digest_size=8).digest(), signed=True)


class _SchemaLink(PostgresLink):
    """One on which statements have the types of SQLite."""

    def run(self, sql: str, *values: Any) -> list[Any]:
        return super().run(_TYPE.sub(lambda found: _TYPES[found[0]], sql), *values)


@lru_cache(maxsize=256)
def _translated(sql: str) -> tuple[bytes, bool]:
    """Translate a statement for the driver; also return whether its answer has rows that are wanted."""
    has_rows = not sql.startswith("WITH") and (sql.startswith("SELECT") or "RETURNING" in sql)
    return sql.replace("%", "%%").replace("?", "%s").encode(), has_rows


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


def _version(connection: psycopg.Connection[Any], address: PostgresAddress) -> int:
    # Not `to_regclass`, which may not see what another process made while this one waited for it.
    query = b"SELECT tablename FROM pg_tables WHERE schemaname = %s"
    tables = {row[0] for row in connection.execute(query, (address.schema,)).fetchall()}
    return stored_version(tables, lambda query: connection.execute(query.encode()).fetchall(), address.place)


def _migrate(connection: psycopg.Connection[Any], address: PostgresAddress) -> None:
    """Bring the database to this version's schema, whole or not at all, one process at a time."""
    link = _SchemaLink(connection, b"BEGIN")
    try:
        link.begin()
        link.run("SELECT pg_advisory_xact_lock(?)", _MIGRATING)
        version = check_version(_version(connection, address), address.place)
        if not link.run("SELECT 1 FROM pg_namespace WHERE nspname = ?", address.schema):
            link.run(f'CREATE SCHEMA "{address.schema}"')
        migrate(link, version, MIGRATIONS)
        link.commit()
    except BaseException:
        link.rollback()
        raise
    finally:
        link.leave()
