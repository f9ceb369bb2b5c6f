"""The database a command works on."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from ..core.errors import ConfigurationError, StoreError

if TYPE_CHECKING:
    from ..core.events import Event
    from ..core.stores import RunRecord
    from ..storage.sql import SqlStore

VARIABLE = "RETINUE_DB"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every command on a database takes."""
    parser.add_argument("--db", metavar="URL", help=f"the database, as in sqlite:///app.db (default: ${VARIABLE})")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verbose", action="store_true", help="log what happens, and show tracebacks")


def database_url(given: str | None) -> str:
    """The database named on the command line or in the environment."""
    url = given if given is not None else os.environ.get(VARIABLE)
    if not url:
        raise ConfigurationError(f"which database? Give --db URL, as in sqlite:///app.db, or set ${VARIABLE}")
    return url


@asynccontextmanager
async def opened(url: str, *, as_it_is: bool = False) -> AsyncGenerator[SqlStore]:
    """A database that is there already; brought to this version's schema unless it is to stay as it is.

    Nothing else is written, so that who only looks waits for nobody. What goes wrong with it is misuse of whoever named it.
    """
    from ..storage.schema import newest_version
    from ..storage.stores import sql_store

    store = sql_store(url)
    try:
        with said_as_misuse():
            version = await store.database.version()
            if not version:
                raise ConfigurationError(f"there is no Retinue database at {store.place}: is it the right --db?")
            if version < newest_version():
                if as_it_is:
                    raise ConfigurationError(f"{store.place} has an older schema: bring it up with retinue db migrate")
                await store.open()
            yield store
    finally:
        await store.close()


@contextmanager
def said_as_misuse() -> Generator[None]:
    """Turns the error of a database that cannot be used into one of whoever named it."""
    try:
        yield
    except StoreError as exc:
        raise ConfigurationError(str(exc)) from exc


async def find_run(store: SqlStore, run_id: str) -> RunRecord:
    record = await store.load_run(run_id)
    if record is None:
        raise ConfigurationError(f"there is no run {run_id!r} in {store.place}; see: retinue runs list")
    return record


async def so_far(store: SqlStore, run_id: str, after: int = 0) -> AsyncIterator[Event]:
    """The events of a run that are stored by now."""
    while found := (await store.read_events(run_id, after) or ((), True))[0]:
        for event in found:
            yield event
        after = found[-1].seq
