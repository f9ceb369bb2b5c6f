"""Upkeep of a store: what is left of old runs is dropped, and its schema is brought up to date."""

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
from .packs import KINDS
from .schema import SCHEMA_VERSION, check_version
from .sql import Database, SqlStore
from .urls import open_store, without_secrets

_log = logging.getLogger(__name__)

PRUNE_EVERY = 3600.0
DAY = 86_400.0

_ASKING = 60.0
"""Seconds in which somebody may be about to do what was asked of a run."""
_PAGE = 200
_MOST_ROWS = 500
"""Rows dropped in one transaction, so that nobody waits long for his own."""
_BEGUN, _THINNED = 1, 2
"""What a log says of itself: that some of its events are gone, that all of its deltas are."""


class Pruned(Struct, kw_only=True):
    """What was dropped, or would be."""

    runs: int = 0
    """Runs that are gone; where only deltas are dropped, runs that have none any more."""
    events: int = 0
    entries: int = 0
    """Of journals."""
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
    """Drop what is left of runs that ended longer ago, in many small transactions.

    With `deltas` only their delta events go; what stays keeps its number, so that such a log has gaps. With `threads`,
    conversations go too that have no run left, were not saved since, and belong to no sub-agent of one that stays.
    Nothing goes of a run that runs, waits or is queued, nor of one with background tasks in progress.
    """
    if not 0 <= older_than_seconds < float("inf"):
        raise ConfigurationError(f"older_than_seconds must be 0 or more, got {older_than_seconds}")
    if deltas and threads:
        raise ConfigurationError("deltas=True drops nothing but deltas: prune threads by itself")
    database = store.database
    before = await database.read(lambda link: link.clock()) - older_than_seconds
    gone, work = Pruned(), _count if dry_run else _thin if deltas else _remove
    async for page in _ended_runs(database, before, deltas=deltas):
        while page:
            step, began = partial(work, run_ids=page, before=before, deltas=deltas), time.monotonic()
            page, more = await (database.read(step) if dry_run else database.write(step))
            gone += more
            if progress is not None:
                progress(gone)
            if not dry_run:  # others, who may have to ask again and again for a file, get as much time as this took
                await asyncio.sleep(time.monotonic() - began)
    if not dry_run and not deltas:
        asks = "DELETE FROM asks WHERE asked_at < ? AND (taker IS NULL OR reply IS NOT NULL)"
        await database.write(lambda link: link.run(asks, min(before, link.clock() - _ASKING)))
    if threads:
        forgotten, messages = await forget_threads(database, before, dry_run=dry_run)
        gone += Pruned(threads=forgotten, messages=messages)
    return gone


async def keep_pruning(store: SqlStore, retention: Retention) -> None:
    """Prune now and every hour. Trouble is logged and tried again; it ends only by being cancelled."""
    while retention.days is not None or retention.deltas_days is not None:
        try:
            if retention.days is not None:
                await prune(store, retention.days * DAY)
            if retention.deltas_days is not None:
                await prune(store, retention.deltas_days * DAY, deltas=True)
        except StoreError as exc:
            _log.warning("what is left of old runs could not be dropped: %s", exc)
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
    """Runs that ended before a time and may have something to drop, oldest first."""
    thinned = f" AND NOT EXISTS (SELECT 1 FROM logs WHERE log_id = run_id AND pruned = {_THINNED})" if deltas else ""
    query = (
        "SELECT ended_at, run_id FROM runs WHERE ended_at IS NOT NULL AND ended_at < ? "
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


def _remove(link: Link, run_ids: Sequence[str], before: float, deltas: bool) -> tuple[list[str], Pruned]:
    """Drop runs as far as one transaction should; those that are left, and what is gone."""
    gone, room = Pruned(), _MOST_ROWS
    drop = (
        "DELETE FROM events WHERE log_id = ? AND seq IN "
        "(SELECT seq FROM events WHERE log_id = ? ORDER BY seq LIMIT ?) RETURNING held"
    )
    for place, run_id in enumerate(run_ids):
        if room <= 0:
            return list(run_ids[place:]), gone
        if not _is_free(link, run_id, before):
            continue
        held = [row[0] for row in link.run(drop, run_id, run_id, room)]
        dropped = len(held)
        gone.events += sum(held)
        if dropped == room:
            link.run("UPDATE logs SET pruned = ? WHERE log_id = ?", _BEGUN, run_id)
            return list(run_ids[place:]), gone
        gone.entries += len(link.run("DELETE FROM journal WHERE log_id = ? RETURNING place", run_id))
        link.run("DELETE FROM logs WHERE log_id = ?", run_id)
        gone.runs += len(link.run("DELETE FROM runs WHERE run_id = ? RETURNING run_id", run_id))
        room -= dropped + 1
    return [], gone


def _thin(link: Link, run_ids: Sequence[str], before: float, deltas: bool) -> tuple[list[str], Pruned]:
    """Drop the deltas of runs as far as one transaction should; the runs that are left, and what is gone."""
    gone, room = Pruned(), _MOST_ROWS
    drop = (
        "DELETE FROM events WHERE log_id = ? AND seq IN "
        f"(SELECT seq FROM events WHERE log_id = ? AND kind IN ({KINDS}) ORDER BY seq LIMIT ?) RETURNING held"
    )
    for place, run_id in enumerate(run_ids):
        if room <= 0:
            return list(run_ids[place:]), gone
        if not _is_free(link, run_id, before):
            continue
        held = [row[0] for row in link.run(drop, run_id, run_id, room)]
        dropped = len(held)
        gone.events += sum(held)
        is_done = dropped < room
        if dropped or is_done:
            link.run("UPDATE logs SET pruned = ? WHERE log_id = ?", _THINNED if is_done else _BEGUN, run_id)
        if not is_done:
            return list(run_ids[place:]), gone
        gone.runs += 1
        room -= dropped + 1
    return [], gone


def _count(link: Link, run_ids: Sequence[str], before: float, deltas: bool) -> tuple[list[str], Pruned]:
    """What would go of runs."""
    gone, only = Pruned(), f" AND kind IN ({KINDS})" if deltas else ""
    for run_id in run_ids:
        if _is_free(link, run_id, before, locking=False):
            gone.runs += 1
            gone.events += link.run(f"SELECT COALESCE(SUM(held), 0) FROM events WHERE log_id = ?{only}", run_id)[0][0]
            if not deltas:
                gone.entries += link.run("SELECT COUNT(*) FROM journal WHERE log_id = ?", run_id)[0][0]
    return [], gone


def _is_free(link: Link, run_id: str, before: float, *, locking: bool = True) -> bool:
    """Whether nobody works on the log of a run that has ended: background tasks go on in it."""
    looks = ("", link.locking) if locking and link.locking else ("",)  # what somebody has is not locked
    for lock in looks:
        found = link.run(f"SELECT owner, lease_until FROM logs WHERE log_id = ?{lock}", run_id)
        if found and found[0][0] is not None and found[0][1] >= before:
            return False
    return True
