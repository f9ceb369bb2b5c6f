"""Pruning: drops old runs, tasks and conversations, in many small transactions."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import Any, cast

from msgspec import Struct

from ..core.errors import ConfigurationError, StoreError
from ..core.stores import Retention
from ..subagents.spawned import SPAWNED
from .database import Database, Link
from .packs import UNREADABLE
from .schema import DELTAS_KIND, THINNED
from .sql import SqlStore, decode_state
from .writes import MOST_ROWS, remove_runs, remove_threads

_log = logging.getLogger(__name__)

PRUNE_EVERY = 3600.0
DAY = 86_400.0

_PAGE = 200


class Pruned(Struct, kw_only=True):
    """Counts of what was dropped, or would be."""

    runs: int = 0
    """Runs that were dropped, or whose deltas were."""
    events: int = 0
    tasks: int = 0
    threads: int = 0
    messages: int = 0


async def prune(
    store: SqlStore, older_than_seconds: float, *, deltas: bool = False, threads: bool = False, dry_run: bool = False
) -> Pruned:
    """Drop runs that ended before so many seconds, with their logs and tasks.

    With `deltas`, drop only delta events and private parts; the other events keep their numbers, so such a log has gaps
    and cannot be folded. With `threads`, also drop conversations that have no run left, were not saved since, and
    belong to no sub-agent of one that stays. A run whose log has not ended is left alone.
    """
    if not 0 <= older_than_seconds < float("inf"):
        raise ConfigurationError(f"older_than_seconds must be 0 or more, got {older_than_seconds}")
    if deltas and threads:
        raise ConfigurationError("deltas=True drops nothing but deltas: prune threads by itself")
    database = store.database
    before = await database.read(lambda link: link.run(f"SELECT {link.now}")[0][0]) - older_than_seconds
    if dry_run:
        gone = await database.read(partial(_count_runs, before=before, deltas=deltas))
    else:
        gone = await _prune_runs(database, before, deltas=deltas)
    if not deltas:
        gone.tasks = await _prune_tasks(database, before, dry_run=dry_run)
    if threads:
        gone.threads, gone.messages = await _prune_threads(database, before, dry_run=dry_run)
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


def _count_runs(link: Link, before: float, deltas: bool) -> Pruned:
    of_deltas, not_thinned = (f"AND kind = '{DELTAS_KIND}'", f"AND pruned <> {THINNED}") if deltas else ("", "")
    runs, events = link.run(
        "SELECT COUNT(DISTINCT run_id), COALESCE(SUM(held), 0) FROM runs LEFT JOIN logs ON logs.log_id = run_id "
        f"LEFT JOIN events ON events.log_id = run_id {of_deltas} "
        f"WHERE ended_at < ? AND runs.log_id = run_id AND COALESCE(ended, 1) = 1 {not_thinned}",
        before,
    )[0]
    return Pruned(runs=runs, events=int(events))


async def _prune_runs(database: Database, before: float, *, deltas: bool) -> Pruned:
    # A placed child stays until its parent has ended, which reads its log.
    awaited = (
        "SELECT 1 FROM logs AS mine JOIN logs AS parents ON parents.log_id = mine.above "
        "WHERE mine.log_id = run_id AND parents.ended = 0"
    )
    thinned = f" AND NOT EXISTS (SELECT 1 FROM logs WHERE log_id = run_id AND pruned = {THINNED})" if deltas else ""
    query = (
        f"SELECT ended_at, run_id FROM runs WHERE ended_at IS NOT NULL AND ended_at < ? AND log_id = run_id{thinned} "
        f"AND NOT EXISTS ({awaited}) AND (ended_at, run_id) > (?, ?) ORDER BY ended_at, run_id LIMIT {_PAGE}"
    )
    gone = Pruned()
    async for page in database.pages(query, (0.0, ""), before):
        left = sorted(run_id for _, run_id in page)  # everyone locks logs in this order
        while left:
            began = time.monotonic()
            left, runs, events = await database.write(partial(remove_runs, run_ids=left, deltas=deltas))
            gone.runs, gone.events = gone.runs + runs, gone.events + events
            await asyncio.sleep(time.monotonic() - began)  # others, who may wait for the file, get as much time
    return gone


async def _prune_tasks(database: Database, before: float, *, dry_run: bool) -> int:
    """Drop tasks that ended before a time and whose log is gone, or would be; return their number."""
    stays = "SELECT 1 FROM logs JOIN runs ON run_id = logs.log_id WHERE logs.log_id = tasks.log_id"
    where = (
        f"is_open = 0 AND saved_at < ? AND NOT EXISTS ({stays} AND (ended = 0 OR ended_at IS NULL OR ended_at >= ?))"
    )
    if dry_run:
        count = f"SELECT COUNT(*) FROM tasks WHERE {where}"
        return await database.value(count, before, before)
    key = "agent, session_id, task_id"
    drop = (
        f"DELETE FROM tasks WHERE ({key}) IN (SELECT {key} FROM tasks WHERE {where} LIMIT {MOST_ROWS}) RETURNING {key}"
    )

    def drop_some(link: Link) -> int:
        dropped = link.run(drop, before, before)
        for task in dropped:
            link.run("DELETE FROM task_results WHERE agent = ? AND session_id = ? AND task_id = ?", *task)
        return len(dropped)

    total = 0
    while dropped := await database.write(drop_some):
        total += dropped
    return total


async def _prune_threads(database: Database, before: float, *, dry_run: bool) -> tuple[int, int]:
    """Drop threads that have no runs and were not saved since; return the numbers of threads and messages.

    The thread of a sub-agent has no runs of its own: it stays as long as the thread that spawned it.
    """
    old = await _old_threads(database, before, dry_run=dry_run)
    threads = messages = 0
    for start in range(0, len(old), _PAGE):
        page = old[start : start + _PAGE]
        if dry_run:
            count = f"SELECT COUNT(*) FROM messages WHERE thread_id IN ({', '.join('?' * len(page))})"
            found = await database.read(lambda link, count=count, page=page: link.run(count, *page))
            dropped = len(page), found[0][0]
        else:
            dropped = await database.write(partial(remove_threads, thread_ids=page, before=before))
        threads, messages = threads + dropped[0], messages + dropped[1]
    return threads, messages


async def _old_threads(database: Database, before: float, *, dry_run: bool) -> list[str]:
    """Return the threads that may go; in a dry run, also those whose runs would go first."""
    stays, values = (" AND (ended_at IS NULL OR ended_at >= ?)", [before]) if dry_run else ("", [])
    query = (
        "SELECT thread_id, state, CASE WHEN holder IS NULL AND saved_at < ? AND NOT EXISTS "
        f"(SELECT 1 FROM runs WHERE runs.thread_id = threads.thread_id{stays}) THEN 1 ELSE 0 END "
        f"FROM threads WHERE thread_id > ? ORDER BY thread_id LIMIT {_PAGE}"
    )
    spawned: dict[str, list[str]] = {}
    old, kept = set[str](), list[str]()
    async for page in database.pages(query, ("",), before, *values):
        for thread_id, state, is_old in page:
            if children := _spawned_threads(state):
                spawned[thread_id] = children
            if is_old:
                old.add(thread_id)
            else:
                kept.append(thread_id)
    while kept:
        children = [child for child in spawned.get(kept.pop(), ()) if child in old]
        old.difference_update(children)
        kept.extend(children)
    return sorted(old)


def _spawned_threads(state: bytes | None) -> list[str]:
    """Return the threads of the sub-agents that the state of a thread names."""
    try:
        extensions = cast("Any", decode_state(state or b"{}")).extensions
        return [spawned["session_id"] for spawned in extensions.get(SPAWNED.name, {}).values()]
    except (*UNREADABLE, AttributeError):
        return []
