"""A store in a PostgreSQL database, for any number of processes on any number of machines."""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import Any
from urllib.parse import quote, unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..core.concurrency import Backoff
from ..core.errors import ConfigurationError, StoreError
from ..core.stores import Durability, Watch
from .database import MOST, Database, Lane, Later, Link
from .schema import newest_version, read_version, upgrade
from .sql import SqlStore

WRITERS, READERS, BLOCKING_WRITERS = 2, 2, 2
_TYPES = {"BLOB": "BYTEA", "REAL": "DOUBLE PRECISION", "INTEGER": "BIGINT", "TEXT": 'TEXT COLLATE "C"'}
_TYPE = re.compile(rf"\b({'|'.join(_TYPES)})\b")
_SECONDS = "extract(epoch FROM clock_timestamp())::float8"
_FUNCTIONS = {"wall_seconds()": _SECONDS, "boot_seconds()": _SECONDS, "boot_id()": "'server'"}
"""Everyone measures by the server's clock."""
_MIGRATION_LOCK = 0x7265_7469_6E75_6500
_BEGIN_READING = b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_NOTIFY_EVERY = 0.01
"""Seconds in which topics are gathered, while there are many."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds before it listens again after the connection broke."""
_TOGETHER = 32
"""Rows that one statement handles at most."""
_FEW = 8
"""Rows that one statement inserts: the server soon has a statement prepared for each number of rows."""

_SCHEMA = "retinue"
_SCHEMA_NAME = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_DEFAULTS = conninfo_to_dict(
    "connect_timeout=10 keepalives_idle=30 keepalives_interval=10 keepalives_count=3 tcp_user_timeout=30000 "
    "fallback_application_name=retinue"
)
"""Parameters of a connection, unless the URL sets others."""
_PERMANENT = re.compile(
    r"authentication failed|does not exist|pg_hba\.conf|no password supplied|not permitted|permission denied|"
    r"not support SSL|certificate|: invalid "
)
"""Parts of messages about failed connections that a retry does not help."""
_TRANSIENT_STATES = ("08", "25006", "53", "57", "58")
"""SQL states of connections, resources, and a server that stops or changes."""
_CONFLICT_STATES = ("23505", "40", "55P03")
"""SQL states of conflicts with others who change the same rows."""


class PostgresStore(SqlStore):
    """Stores everything in one schema of a database: `retinue`, unless the URL names another with `?schema=`.

    `durability` changes nothing: the server's `synchronous_commit` decides what a commit survives. By default it survives
    a crash of any process, of the server and of its machine. We never turn it off: a server that crashed could forget a
    claim, and two processes would own one run.

    Each connection needs a session of its own on the server: a pooler between them must not share sessions.
    """

    has_queues = True

    def __init__(self, url: str, durability: Durability = "process") -> None:
        super().__init__(PostgresDatabase(PostgresAddress(url)))


class PostgresAddress:
    """A parsed URL. `place` is the part that may be shown: it has no password."""

    def __init__(self, url: str) -> None:
        bare, _, query = url.partition("?")
        options = query.split("&") if query else []
        schemas = [unquote(option.partition("=")[2]) for option in options if option.startswith("schema=")]
        others = "&".join(option for option in options if not option.startswith("schema="))
        self.schema = schemas[-1] if schemas else _SCHEMA
        try:
            given = conninfo_to_dict(f"{bare}?{others}" if others else bare)
        except (psycopg.Error, ValueError):
            given = {"host": "@"}
        if "@" in str(given.get("host", "")):  # the driver's message about such a URL quotes parts of the password
            raise ConfigurationError(
                "the PostgreSQL URL cannot be read; use 'postgresql://user:password@host:5432/database', with every "
                "special character of the password percent-encoded, and '?schema=name' for a schema of your choice"
            )
        if not _SCHEMA_NAME.fullmatch(self.schema):
            raise ConfigurationError(f"not the name of a schema: {self.schema!r}; use small letters, digits and _")
        self._parameters: dict[str, Any] = {**_DEFAULTS, **given}
        self._secrets = [str(given[name]) for name in ("password", "sslpassword") if given.get(name)]
        self.place = _place(given) + ("" if self.schema == _SCHEMA else f"?schema={self.schema}")

    def __repr__(self) -> str:
        return f"PostgresAddress({self.place!r})"

    def connect(self) -> psycopg.Connection[Any]:
        connection = psycopg.connect("", autocommit=True, **self._parameters)
        try:
            self.set_session(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def set_session(self, connection: psycopg.Connection[Any]) -> None:
        """Make the settings of a session, in one round trip."""
        # A process that is frozen in a transaction must not block others for long.
        timeout = "SET idle_in_transaction_session_timeout = '60s'"
        connection.execute(f'{timeout}; SET search_path = "{self.schema}"'.encode())

    def problem(self, error: Exception) -> Exception:
        """Turn an error of the driver into a StoreError of one line that says what to do; return other errors as they are."""
        if isinstance(error, UnicodeEncodeError):
            return StoreError(self.place, f"it cannot store what is not text: {error}")
        if not isinstance(error, psycopg.Error):
            return error
        said, state = self._shown(error), error.sqlstate or ""
        is_of_connection = not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        if state.startswith(_CONFLICT_STATES):
            return StoreError(self.place, f"{said}: somebody else was faster, try again", transient=True)
        if state.startswith(_TRANSIENT_STATES) or (is_of_connection and not _PERMANENT.search(said)):
            return StoreError(self.place, f"{said}: is the server up, and can it take more?", transient=True)
        if is_of_connection:
            return StoreError(self.place, f"{said}: check user, password and database of its URL")
        return StoreError(self.place, f"{said}: is it a Retinue database?")

    def _shown(self, error: Exception) -> str:
        lines = [" ".join(line.split()) for line in str(error).splitlines()]
        said = " ".join([line for line in lines if not line.startswith("Is the server")])[:300] or type(error).__name__
        for secret in self._secrets:
            said = said.replace(secret, "***")
        return said


def _place(given: dict[str, Any]) -> str:
    def part(name: str, before: str = "", after: str = "") -> str:
        value = given.get(name)
        return f"{before}{quote(str(value), safe=',:[]')}{after}" if value else ""

    return f"postgresql://{part('user', after='@')}{part('host')}{part('port', before=':')}/{part('dbname')}"


class PostgresDatabase(Database):
    """Lanes that write and lanes that read, each with a connection; one more notifies, and one listens."""

    def __init__(self, address: PostgresAddress) -> None:
        super().__init__(address.place)
        self._address, self._problem = address, address.problem
        self._listener = Listener(address.connect, address.schema)
        self._exclusive = self._lane(most=1)
        self._writers = [self._lane() for _ in range(WRITERS)]
        # These jobs lock several rows, so each is a transaction of its own.
        self._blocking_writers = [self._lane(most=1) for _ in range(BLOCKING_WRITERS)]
        self._readers = [self._lane(_BEGIN_READING) for _ in range(READERS)]
        self._notifier = self._lane()
        self._is_current = False
        self._topics: set[str] = set()
        self._notify_from = 0.0
        self._lock = threading.Lock()

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        return self._listener.watch(topic)

    def close_blocking(self) -> None:
        super().close_blocking()
        self._notifier.close()
        self._listener.close()

    def _lane(self, begin: bytes = b"", most: int = MOST) -> Lane:
        return Lane(self.place, lambda: self._connect(begin), self._problem, most=most)

    def _connect(self, begin: bytes) -> Link:
        link = self._open()
        try:
            if not self._is_current:  # else another connection has seen it
                link.begin()
                version = read_version(link, self.place)
                link.rollback()
                if version < newest_version():
                    upgrade(link, self.place)
                self._is_current = True
        except BaseException:
            link.close()
            raise
        link.begin_statement = begin
        return link

    def _open(self) -> PostgresLink:
        return PostgresLink(self._address.connect(), self._address.schema, self._notify)

    def _notify(self, topics: set[str]) -> None:
        """Wake watches in a transaction of its own: on a server, transactions that notify commit one after the other.
        Topics that gather meanwhile go together."""
        with self._lock:
            self._topics |= topics
        self._notifier.submit_from_thread(self._send_topics)

    def _send_topics(self, link: Link) -> None:
        time.sleep(max(0.0, self._notify_from - time.monotonic()))
        with self._lock:
            topics, self._topics = sorted(self._topics), set()
        if not topics:
            return
        self._notify_from = time.monotonic() + _NOTIFY_EVERY
        try:
            link.run(  # a notification needs no wait for the disk
                "SELECT set_config('synchronous_commit', 'off', true), COUNT(pg_notify(?, topic)) "
                "FROM unnest(?::text[]) AS topic",
                *(self._address.schema, topics),
            )
        except psycopg.Error:
            with self._lock:
                self._topics.update(topics)  # the job is retried; if that fails too, they go with the next
            raise


class PostgresLink(Link):
    """A connection in pipeline mode: a statement is sent without waiting for the answers of those before it.

    Without a BEGIN, all statements up to a commit are one implicit transaction. It takes one round trip if no answer is
    needed before its end. The error of a statement is raised with the next answer, at the latest by `commit`.
    """

    locking = " FOR UPDATE"
    is_pipelined = True

    def __init__(self, connection: psycopg.Connection[Any], schema: str, notify: Callable[[set[str]], None]) -> None:
        self.connection, self._schema, self._notify = connection, schema, notify
        # `to_regclass` may not see a table that another process made while this one waited for it.
        self.list_tables = f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'"
        self.begin_statement = b"BEGIN"
        self._entered = connection.pipeline()
        self._pipeline = self._entered.__enter__()
        self._topics: set[str] = set()
        self._is_open = False
        self._failures = 0
        self._gathered: dict[str, Sequence[Any]] = {}
        """Rows for `_make_sql`, by their first value."""
        self._make_sql: Callable[[int], str] | None = None

    def is_alive(self) -> bool:
        if self.is_lost or self.connection.closed:
            return False
        with suppress(psycopg.Error):
            for _ in range(2):  # the last message of the server, and the end of the connection
                self.connection.pgconn.consume_input()
            return not self.connection.closed
        return False

    def begin(self, *, eager: bool = True) -> None:
        self.eager = eager
        self._topics = set()
        self._gathered = {}
        if self.begin_statement:
            self._execute(self.begin_statement)

    def commit(self) -> None:
        self._run_gathered()
        if self.begin_statement:
            self._execute(b"COMMIT")
        if self._is_open:
            self._is_open = False
            self._pipeline.sync()
        if self._topics:
            self._notify(self._topics)

    def rollback(self) -> None:
        """Undo the transaction; close a connection that cannot."""
        try:
            if self._is_open:
                self._execute(b"ROLLBACK")
                self._is_open = False
                with suppress(psycopg.errors.PipelineAborted):  # after an error the server ignores all until here
                    self._pipeline.sync()
            # The driver counts on statements that it prepared after the error, which the server ignored: have both forget
            # all. The driver looks only at the first outcome of each text.
            self._failures += 1
            self.connection.execute(b"DEALLOCATE ALL -- %d" % self._failures)
            self._pipeline.sync()
        except psycopg.Error:
            self.is_lost = self.connection.closed
            self.connection.close()

    def close(self) -> None:
        self.connection.close()
        with suppress(psycopg.Error):
            self._entered.__exit__(None, None, None)

    def run(self, sql: str, *values: Any) -> list[Any]:
        statement, has_rows = _translated(sql)
        answer = self._execute(statement, values)
        self._send()
        return answer.fetchall() if has_rows else []

    def ask(self, sql: str, *values: Any) -> Later:
        answer = self._execute(_translated(sql)[0], values)
        return Later(lambda: answer.fetchall() if answer.description else [])

    def run_two(self, first: str, first_values: Sequence[Any], second: str, second_values: Sequence[Any]) -> None:
        self.run(f"WITH first AS ({first}) {second}", *first_values, *second_values)

    def insert(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        for first in range(0, len(rows), _FEW):
            some = rows[first : first + _FEW]
            one = f"({', '.join('?' * len(some[0]))})"
            self.run(f"INSERT INTO {into} VALUES {', '.join([one] * len(some))}", *chain(*some))

    def require(self, sql: str, *values: Any) -> None:
        if self.eager:
            super().require(sql, *values)
        else:
            self.run(f"WITH met AS ({sql}) SELECT 1 / COUNT(*) FROM met", *values)

    def gather(self, make_sql: Callable[[int], str], row: Sequence[Any]) -> bool:
        if self.eager:
            return False
        if make_sql is not self._make_sql or row[0] in self._gathered:
            self._run_gathered()
        self._make_sql = make_sql
        self._gathered[row[0]] = row
        return True

    def _run_gathered(self) -> None:
        """Run the statement that rows were gathered for, in as many parts as powers of two make up their number: the
        server soon has all of them prepared."""
        rows, self._gathered = list(self._gathered.values()), {}
        while rows and self._make_sql is not None:
            count = min(1 << (len(rows).bit_length() - 1), _TOGETHER)
            self.run(self._make_sql(count), *[value for row in rows[:count] for value in row])
            del rows[:count]

    def tune_tables(self) -> None:
        for column in ("messages.body", "said.body", "packs.body", "packs.private"):  # they are compressed already
            table, _, name = column.partition(".")
            self.run(f"ALTER TABLE {table} ALTER COLUMN {name} SET STORAGE EXTERNAL")
        often = "autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02"
        self.run(f"ALTER TABLE events SET ({often})")  # packers empty it again and again

    def prepare_schema(self) -> None:
        self.run("SELECT pg_advisory_xact_lock(?)", _MIGRATION_LOCK)
        if not self.run("SELECT 1 FROM pg_namespace WHERE nspname = ?", self._schema):
            self.run(f'CREATE SCHEMA "{self._schema}"')

    def lock_threads(self, thread_ids: Sequence[str]) -> None:
        keys = sorted({_lock_key(thread_id) for thread_id in thread_ids})
        self._execute(b"SELECT pg_advisory_xact_lock(key) FROM unnest(%s::bigint[]) AS key", (keys,))

    def notify(self, topic: str) -> None:
        self._topics.add(topic)

    def _execute(self, statement: bytes, values: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        if self._gathered:
            self._run_gathered()
        self._is_open = True
        return self.connection.execute(statement, values, binary=True)

    def _send(self) -> None:
        """Send all statements: the driver reads only while it waits for an answer, and the server may wait for the rest."""
        pgconn = self.connection.pgconn
        while pgconn.flush():
            with selectors.DefaultSelector() as ready:
                ready.register(pgconn.socket, selectors.EVENT_READ | selectors.EVENT_WRITE)
                if any(what & selectors.EVENT_READ for _, what in ready.select()):
                    pgconn.consume_input()  # the server may have to answer before it reads more


def _lock_key(thread_id: str) -> int:
    return int.from_bytes(blake2b(thread_id.encode(errors="replace"), digest_size=8).digest(), signed=True)


@lru_cache(maxsize=256)
def _translated(sql: str) -> tuple[bytes, bool]:
    """Translate a statement for the driver; also return whether its rows are wanted."""
    if sql.startswith(("CREATE TABLE", "ALTER TABLE")):
        sql = _TYPE.sub(lambda found: _TYPES[found[0]], sql)
    for name, function in _FUNCTIONS.items():
        sql = sql.replace(name, function)
    has_rows = not sql.startswith("WITH") and (sql.startswith("SELECT") or "RETURNING" in sql)
    return sql.replace("%", "%%").replace("?", "%s").encode(), has_rows


class NotifiedWatch:
    """Wakes when its topic was notified, or may have been."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Report a change from another thread."""
        with suppress(RuntimeError):  # its event loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._changed.set)


class Listener:
    """Listens in a thread that starts with the first watch.

    It reconnects when the connection breaks. Notifications sent meanwhile are lost, so it wakes every watch whenever
    it starts to listen.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], channel: str) -> None:
        self._connect, self._channel = connect, channel
        self._watches: dict[str, set[NotifiedWatch]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._closed = threading.Event()

    @contextmanager
    def watch(self, topic: str) -> Generator[NotifiedWatch]:
        watch = NotifiedWatch()
        with self._lock:
            self._watches.setdefault(topic, set()).add(watch)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._listen, name="retinue-listen", daemon=True)
                self._thread.start()
        try:
            yield watch
        finally:
            with self._lock:
                watches = self._watches[topic]
                watches.discard(watch)
                if not watches:
                    del self._watches[topic]

    def close(self) -> None:
        """Stop the thread and wait for its end."""
        with self._lock:
            self._closed.set()
            if self._connection is not None:
                # The thread, which waits for the other end, wakes up.
                with suppress(psycopg.Error, OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()

    def _listen(self) -> None:
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not self._closed.is_set():
            with suppress(psycopg.Error, OSError), self._connect() as connection:
                connection.execute(f'LISTEN "{self._channel}"'.encode())
                backoff.reset()
                with self._lock:
                    self._connection = connection
                self._wake(None)
                self._receive(connection)
            with self._lock:
                self._connection = None
            self._closed.wait(backoff.next())

    def _receive(self, connection: psycopg.Connection[Any]) -> None:
        """Wake watches until the connection breaks or this is closed."""
        with selectors.DefaultSelector() as ready:
            ready.register(connection, selectors.EVENT_READ)
            while not self._closed.is_set():
                for note in connection.notifies(timeout=0):
                    self._wake(note.payload)
                ready.select()

    def _wake(self, topic: str | None) -> None:
        """Wake the watches of a topic, or all."""
        with self._lock:
            chosen = self._watches.values() if topic is None else [self._watches.get(topic, set())]
            for watch in [watch for watches in chosen for watch in watches]:
                watch.wake()
