"""The database of a command: open it, find runs in it, read their events, and see which have a living owner."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager

from ..core.errors import ConfigurationError, StoreError
from ..core.events import Event
from ..core.stores import RunRecord
from ..runtime.owner import is_gone
from ..storage.schema import newest_version
from ..storage.sql import SqlStore
from ..storage.stores import sql_store

VARIABLE = "RETINUE_DB"


def database_url(args: argparse.Namespace) -> str:
    """Return the database of --db or $RETINUE_DB; raises ConfigurationError if there is none."""
    if not (url := optional_url(args)):
        raise ConfigurationError(f"no database is given: use --db URL, as in sqlite:///app.db, or set ${VARIABLE}")
    return url


def optional_url(args: argparse.Namespace) -> str | None:
    """Return the database of --db or $RETINUE_DB, None if there is none."""
    return args.db if args.db is not None else os.environ.get(VARIABLE) or None


@asynccontextmanager
async def open_database(url: str, *, migrate: bool = True) -> AsyncGenerator[SqlStore]:
    """Open a database that exists, without a write lock; an older schema is migrated first, or refused.

    Errors of the database are raised as ConfigurationError: another --db may be meant.
    """
    store = sql_store(url)
    try:
        with as_misuse():
            version = await store.database.version()
            if not version:
                raise missing(store)
            if version < newest_version():
                if not migrate:
                    raise ConfigurationError(f"{store.place} has an older schema: run retinue db migrate first")
                await store.open()
            yield store
    finally:
        await store.close()


def missing(store: SqlStore) -> ConfigurationError:
    return ConfigurationError(f"there is no Retinue database at {store.place}: is it the right --db?")


@contextmanager
def as_misuse() -> Generator[None]:
    """Raise errors of a database that cannot be used as ConfigurationError."""
    try:
        yield
    except StoreError as exc:
        raise ConfigurationError(str(exc)) from exc


async def find_run(store: SqlStore, run_id: str) -> RunRecord:
    record = await store.load_run(run_id)
    if record is None:
        raise ConfigurationError(f"there is no run {run_id!r} in {store.place}; see: retinue runs list")
    return record


async def stored_events(store: SqlStore, run_id: str, after: int = 0) -> AsyncIterator[Event]:
    """Yield the events of a run that are stored by now."""
    while found := (await store.read_events(run_id, after) or ((), True))[0]:
        for event in found:
            yield event
        after = found[-1].seq


async def follow_events(store: SqlStore, run_id: str, after: int) -> AsyncIterator[Event]:
    """Yield the events of a run after a number, until it has ended, or waits without an owner."""
    with store.watch(run_id) as changes:
        while True:
            record = await find_run(store, run_id)
            is_idle = record.result is not None and run_id not in await owned_logs(store)
            async for event in stored_events(store, run_id, after):
                after = event.seq
                yield event
            if is_idle:
                return
            await changes.wait(1.0)


async def owned_logs(store: SqlStore) -> set[str]:
    """Return the ids of the logs whose owners live."""
    logs = await store.open_logs()
    return {log.log_id for log in logs if log.owner is not None and not log.expired and not is_gone(log.owner)}
