"""Upkeep of a store: drops what is left of old runs, and brings its schema up to date."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from msgspec import Struct

from ..core.errors import ConfigurationError, StoreError
from ..core.stores import Durability, Retention
from .checkup import Finding as Finding
from .checkup import check as check
from .lanes import Link
from .oldthreads import forget_threads
from .packs import DELTAS_KIND
from .reading import BEING_PRUNED, THINNED
from .schema import SCHEMA_VERSION, check_version
from .sql import Database, SqlStore
from .urls import open_store, without_secrets

_log = logging.getLogger(__name__)

PRUNE_EVERY = 3600.0
DAY = 86_400.0

_PAGE = 200
_MOST_ROWS = 500
"""Rows changed in one transaction, so that nobody waits long for it."""


class Pruned(Struct, kw_only=True):
    """Counts of what was dropped, or would be."""

    runs: int = 0
    """Runs that are gone; where only deltas are dropped, runs that have none any more."""
    events: int = 0
    tasks: int = 0
    threads: int = 0
    messages: int = 0

    def __add__(self, other: Pruned) -> Pruned:
        return Pruned(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


Progress = Callable[[Pruned], None]


async def prune(
    store: SqlStore,
    older_than_seconds: float,
    *,
    deltas: bool = False,
    threads: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Pruned:
    """Drop what is left of runs that ended longer ago, and of their tasks, in many small transactions.

    With `deltas` only delta events and private parts go; what stays keeps its number, so such a log has gaps and cannot
    be folded. With `threads`, conversations go too that have no run left, were not saved since, and belong to no
    sub-agent of one that stays. A run whose log has not ended is left alone.
    """
    if not 0 <= older_than_seconds < float("inf"):
        raise ConfigurationError(f"older_than_seconds must be 0 or more, got {older_than_seconds}")
    if deltas and threads:
        raise ConfigurationError("deltas=True drops nothing but deltas: prune threads by itself")
    database = store.database
    before = await database.read(lambda link: link.run(f"SELECT {link.now}")[0][0]) - older_than_seconds
    gone, work = Pruned(), _count if dry_run else _thin if deltas else _remove
    async for page in _ended_runs(database, before, deltas=deltas):
        while page:
            step, began = partial(work, run_ids=page, deltas=deltas), time.monotonic()
            page, more = await (database.read(step) if dry_run else database.write(step))
            gone += more
            if progress is not None:
                progress(gone)
            if not dry_run:  # others, who may wait for the file, get as much time as this took
                await asyncio.sleep(time.monotonic() - began)
    if not deltas:
        gone += await _prune_tasks(database, before, dry_run=dry_run)
    if threads:
        forgotten, messages = await forget_threads(database, before, dry_run=dry_run)
        gone += Pruned(threads=forgotten, messages=messages)
    return gone


async def keep_pruning(store: SqlStore, retention: Retention) -> None:
    """Prune now and every hour, until it is cancelled. Errors of the store are logged."""
    while retention.days is not None or retention.deltas_days is not None:
        try:
            if retention.days is not None:
                await prune(store, retention.days * DAY)
            if retention.deltas_days is not None:
                await prune(store, retention.deltas_days * DAY, deltas=True)
        except StoreError as exc:
            _log.warning("old runs could not be pruned: %s", exc)
        await asyncio.sleep(PRUNE_EVERY)


class Migrated(Struct, frozen=True, kw_only=True):
    """From which version of the schema to which; 0 is none at all."""

    place: str
    before: int
    after: int


async def migrate(url: str, *, dry_run: bool = False, durability: Durability = "process") -> Migrated:
    """Bring a database to this version's schema, or make one; what opening it does too."""
    store = sql_store(url, durability)
    try:
        before = check_version(await store.database.version(), store.place)
        if not dry_run:
            await store.open()
    finally:
        await store.close()
    return Migrated(place=store.place, before=before, after=SCHEMA_VERSION)


def sql_store(url: str, durability: Durability = "process") -> SqlStore:
    """The store a URL names, where that is a database; not opened yet."""
    store = open_store(url, durability)
    if not isinstance(store, SqlStore):
        raise ConfigurationError(f"{without_secrets(url)!r} is no database: name one, as in sqlite:///app.db")
    return store


async def _ended_runs(database: Database, before: float, *, deltas: bool) -> AsyncIterator[list[str]]:
    """Yield root runs that ended before a time and may have something to drop, oldest first."""
    thinned = f" AND NOT EXISTS (SELECT 1 FROM logs WHERE log_id = run_id AND pruned = {THINNED})" if deltas else ""
    query = (
        "SELECT ended_at, run_id FROM runs WHERE ended_at IS NOT NULL AND ended_at < ? AND log_id = run_id "
        f"AND (ended_at, run_id) > (?, ?){thinned} ORDER BY ended_at, run_id LIMIT {_PAGE}"
    )
    last = (0.0, "")
    while True:
        found = await database.read(lambda link, last=last: link.run(query, before, *last))
        if found:
            yield sorted(run_id for _, run_id in found)  # logs are locked in one order by all
        if len(found) < _PAGE:
            return
        last = (found[-1][0], found[-1][1])


def _remove(link: Link, run_ids: Sequence[str], deltas: bool) -> tuple[list[str], Pruned]:
    """Drop runs as far as one transaction should; return the runs that are left, and what is gone."""
    gone, room = Pruned(), _MOST_ROWS
    for place, run_id in enumerate(run_ids):
        if room <= 0:
            return list(run_ids[place:]), gone
        if not _has_ended(link, run_id):
            continue
        dropped, events = _drop_rows(link, run_id, room)
        gone.events += events
        if dropped == room:
            link.run("UPDATE logs SET pruned = ? WHERE log_id = ?", BEING_PRUNED, run_id)
            return list(run_ids[place:]), gone
        link.run("DELETE FROM inbox WHERE log_id = ?", run_id)
        link.run("DELETE FROM logs WHERE log_id = ?", run_id)
        link.run("DELETE FROM runs WHERE log_id = ? AND log_id <> run_id", run_id)
        gone.runs += len(link.run("DELETE FROM runs WHERE run_id = ? RETURNING run_id", run_id))
        room -= dropped + 1
    return [], gone


def _thin(link: Link, run_ids: Sequence[str], deltas: bool) -> tuple[list[str], Pruned]:
    """Drop deltas and private parts as far as one transaction should; return what is left, and what is gone."""
    gone, room = Pruned(), _MOST_ROWS
    clear = f"UPDATE events SET private = NULL WHERE {_SOME_ROWS.format('AND private IS NOT NULL')} RETURNING seq"
    for place, run_id in enumerate(run_ids):
        if room <= 0:
            return list(run_ids[place:]), gone
        if not _has_ended(link, run_id):
            continue
        changed, events = _drop_rows(link, run_id, room, f"AND (kind = '{DELTAS_KIND}' OR body IS NULL)")
        gone.events += events
        if changed < room:
            changed += len(link.run(clear, run_id, run_id, room - changed))
        is_done = changed < room
        link.run("UPDATE logs SET pruned = ? WHERE log_id = ?", THINNED if is_done else BEING_PRUNED, run_id)
        if not is_done:
            return list(run_ids[place:]), gone
        gone.runs += 1
        room -= changed + 1
    return [], gone


_SOME_ROWS = "log_id = ? AND (seq, sub) IN (SELECT seq, sub FROM events WHERE log_id = ? {} ORDER BY seq, sub LIMIT ?)"


def _drop_rows(link: Link, log_id: str, most: int, only: str = "") -> tuple[int, int]:
    """Drop rows of a log; return how many, and how many events they held."""
    drop = f"DELETE FROM events WHERE {_SOME_ROWS.format(only)} RETURNING held"
    held = [row[0] for row in link.run(drop, log_id, log_id, most)]
    return len(held), sum(held)


def _count(link: Link, run_ids: Sequence[str], deltas: bool) -> tuple[list[str], Pruned]:
    """Count what would go of runs."""
    gone, only = Pruned(), f" AND kind = '{DELTAS_KIND}'" if deltas else ""
    for run_id in run_ids:
        if _has_ended(link, run_id, locking=False):
            gone.runs += 1
            held = link.run(f"SELECT COALESCE(SUM(held), 0) FROM events WHERE log_id = ?{only}", run_id)[0][0]
            gone.events += int(held)
    return [], gone


def _has_ended(link: Link, log_id: str, *, locking: bool = True) -> bool:
    """Return whether the run and its background tasks have ended, so that nothing more comes to the log."""
    found = link.run(f"SELECT ended FROM logs WHERE log_id = ?{link.locking if locking else ''}", log_id)
    return not found or bool(found[0][0])


async def _prune_tasks(database: Database, before: float, *, dry_run: bool) -> Pruned:
    """Drop tasks that ended before a time and whose log is gone, or would be."""
    stays = "SELECT 1 FROM logs JOIN runs ON run_id = logs.log_id WHERE logs.log_id = tasks.log_id"
    where = (
        f"is_open = 0 AND saved_at < ? AND NOT EXISTS ({stays} AND (ended = 0 OR ended_at IS NULL OR ended_at >= ?))"
    )
    if dry_run:
        count = f"SELECT COUNT(*) FROM tasks WHERE {where}"
        return Pruned(tasks=(await database.read(lambda link: link.run(count, before, before)))[0][0])
    key = "agent, session_id, task_id"
    drop = (
        f"DELETE FROM tasks WHERE ({key}) IN (SELECT {key} FROM tasks WHERE {where} LIMIT {_MOST_ROWS}) RETURNING {key}"
    )

    def work(link: Link) -> int:
        dropped = link.run(drop, before, before)
        for task in dropped:
            link.run("DELETE FROM task_results WHERE agent = ? AND session_id = ? AND task_id = ?", *task)
        return len(dropped)

    gone = Pruned()
    while dropped := await database.write(work):
        gone.tasks += dropped
    return gone
