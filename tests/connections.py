"""PostgreSQL connections that tests of one process use one after the other.

A new connection costs the server a process that knows no table yet: more than all that most tests ask of it. A store that
is closed returns its connections without anything of its session, and the next store uses them. Tests of connections
themselves have new ones: `with new_connections():`, or the fixture of that name.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from retinue.storage.postgres import PostgresAddress

from . import inside

MOST = 16
"""Connections that are kept."""

_connect = PostgresAddress.connect
_kept: dict[str, list[psycopg.Connection[Any]]] = {}
_is_lending = False


class LentConnection:
    """A connection that is kept when it is closed, unless it broke or is in a transaction."""

    def __init__(self, connection: psycopg.Connection[Any], place: str) -> None:
        self._connection, self._place = connection, place
        self._is_closed = self._is_pipelined = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def __enter__(self) -> LentConnection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._is_closed or self._connection.closed

    @contextmanager
    def pipeline(self) -> Generator[psycopg.Pipeline]:
        self._is_pipelined = True
        try:
            with self._connection.pipeline() as pipeline:
                yield pipeline
        finally:
            self._is_pipelined = False
            if self._is_closed:
                self._keep()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if not self._is_pipelined:
                self._keep()

    def _keep(self) -> None:
        kept, state = _kept.setdefault(self._place, []), self._connection.pgconn
        is_idle = state.transaction_status == TransactionStatus.IDLE and state.pipeline_status == PipelineStatus.OFF
        try:
            if is_idle and len(kept) < MOST:
                self._connection.execute(b"DISCARD ALL")
                self._connection._prepared = type(
                    self._connection._prepared
                )()  # the server knows its statements no more
                kept.append(self._connection)
                return
        except psycopg.Error:  # it broke
            pass
        self._connection.close()


@contextmanager
def lent_connections() -> Generator[None]:
    """Lend connections to stores; close those that are kept at the end."""
    global _is_lending
    PostgresAddress.connect, _is_lending = _lend, True  # type: ignore[method-assign]
    try:
        yield
    finally:
        PostgresAddress.connect, _is_lending = _connect, False  # type: ignore[method-assign]
        for connection in [connection for kept in _kept.values() for connection in kept]:
            connection.close()
        _kept.clear()


@contextmanager
def new_connections() -> Generator[None]:
    """Let every connection be new, and end when it is closed."""
    global _is_lending
    before, _is_lending = _is_lending, False
    try:
        yield
    finally:
        _is_lending = before


def _lend(address: PostgresAddress) -> Any:
    if not _is_lending:
        return _connect(address)
    place = repr(sorted(inside.connection_parameters(address).items()))
    while kept := _kept.get(place):
        connection = kept.pop()
        try:
            address.set_session(connection)
            return LentConnection(connection, place)
        except psycopg.Error:  # the server was stopped meanwhile
            connection.close()
    return LentConnection(_connect(address), place)
