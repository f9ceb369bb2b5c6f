"""Removal: drops a conversation, or old runs, tasks and conversations, in many small transactions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ..core.errors import ConfigurationError, StoreError, ThreadBusy
from ..core.stores import Retention
from ..subagents.spawned import SPAWNED
from .cold import read_pack, without_deltas
from .database import Database, Link
from .packs import UNREADABLE
from .schema import BEING_PRUNED, DELTAS_KIND, THINNED

if TYPE_CHECKING:
    from .sql import SqlStore

_log = logging.getLogger(__name__)

PRUNE_EVERY = 3600.0
DAY = 86_400.0

MOST_ROWS = 500
"""Rows changed in one transaction, so that others do not wait long for it."""
_PAGE = 200
_SOME_ROWS = "log_id = ? AND (seq, sub) IN (SELECT seq, sub FROM events WHERE log_id = ? {} ORDER BY seq, sub LIMIT ?)"


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
    before = await database.value("SELECT wall_seconds()") - older_than_seconds
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
    held = "deltas" if deltas else "held"
    runs, events = link.run(
        "SELECT COUNT(*), COALESCE(SUM("
        f"(SELECT COALESCE(SUM(held), 0) FROM events WHERE events.log_id = run_id AND packed = 0 {of_deltas}) + "
        f"(SELECT COALESCE(SUM({held}), 0) FROM packs WHERE packs.log_id = run_id)), 0) "
        f"FROM runs LEFT JOIN logs ON logs.log_id = run_id WHERE ended_at < ? AND runs.log_id = run_id AND COALESCE(ended, 1) = 1 {not_thinned}",
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
            await database.write(lambda link: link.give_back())
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
            count = f"SELECT COALESCE(SUM(held), 0) FROM messages WHERE thread_id IN ({', '.join('?' * len(page))})"
            dropped = len(page), int(await database.value(count, *page))
        else:
            dropped = await database.write(partial(remove_threads, thread_ids=page, before=before))
        threads, messages = threads + dropped[0], messages + dropped[1]
    return threads, messages


async def _old_threads(database: Database, before: float, *, dry_run: bool) -> list[str]:
    """Return the threads that may go; in a dry run, also those whose runs would go first."""
    stays, values = (" AND (ended_at IS NULL OR ended_at >= ?)", [before]) if dry_run else ("", [])
    query = (
        "SELECT thread_id, state, CASE WHEN holder IS NULL AND saved_at < ? AND NOT EXISTS "
        f"(SELECT 1 FROM runs WHERE runs.thread_id IN (threads.thread_id, threads.above){stays}) THEN 1 ELSE 0 END "
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
        extensions: Any = msgspec.json.decode(state or b"{}").get("extensions", {})
        return [spawned["session_id"] for spawned in extensions.get(SPAWNED.name, {}).values()]
    except (*UNREADABLE, AttributeError):
        return []


async def delete_thread(database: Database, thread_id: str) -> bool:
    """Delete a thread with its runs, their logs and the threads of their sub-agents; raise ThreadBusy if a log of it has
    not ended. The thread of a sub-agent cannot be deleted alone: the log of its root run refers to its messages."""

    def find(link: Link) -> tuple[list[Any], list[str], list[tuple[str, int]]]:
        known = link.run(
            "SELECT above.thread_id FROM threads LEFT JOIN threads AS above ON above.thread_id = threads.above "
            "WHERE threads.thread_id = ?",
            thread_id,
        )
        below = [row[0] for row in link.run("SELECT thread_id FROM threads WHERE above = ?", thread_id)]
        # Also the logs of their placed children.
        query = (
            "SELECT log_id, ended FROM (WITH RECURSIVE found (log_id, ended) AS ("
            "SELECT logs.log_id, ended FROM runs JOIN logs ON logs.log_id = run_id WHERE thread_id = ? "
            "UNION SELECT logs.log_id, logs.ended FROM logs JOIN found ON logs.above = found.log_id) "
            "SELECT log_id, ended FROM found) AS found ORDER BY log_id"
        )
        return known, below, link.run(query, thread_id)

    known, below, runs = await database.read(find)
    if known and known[0][0] is not None:
        raise ConfigurationError(f"thread {thread_id!r} is of a sub-agent: delete thread {known[0][0]!r}, which has it")
    for run_id, ended in runs:
        if not ended:
            raise ThreadBusy(thread_id, run_id)
    left: Sequence[str] = [run_id for run_id, _ in runs]
    while left:
        left, _, _ = await database.write(partial(remove_runs, run_ids=left, deltas=False))
    gone = [thread_id, *below]
    await database.write(partial(remove_threads, thread_ids=gone, before=float("inf")), threads=sorted(gone))
    return bool(known)


def remove_runs(link: Link, run_ids: Sequence[str], deltas: bool) -> tuple[Sequence[str], int, int]:
    """Prune runs until one transaction has changed enough; return the runs that are left, and counts of runs and
    events."""
    only = f"AND (kind = '{DELTAS_KIND}' OR body IS NULL)" if deltas else ""
    drop = f"DELETE FROM events WHERE {_SOME_ROWS.format(only)} RETURNING held"
    clear = f"UPDATE events SET private = NULL WHERE {_SOME_ROWS.format('AND private IS NOT NULL')} RETURNING seq"
    runs, events, room = 0, 0, MOST_ROWS
    for place, run_id in enumerate(run_ids):
        if room <= 0:
            return run_ids[place:], runs, events
        log = link.run(f"SELECT ended FROM logs WHERE log_id = ?{link.locking}", run_id)
        if log and not log[0][0]:
            continue
        held = [row[0] for row in link.run(drop, run_id, run_id, room)]
        changed = len(held)
        if deltas and changed < room:
            changed += len(link.run(clear, run_id, run_id, room - changed))
        if changed < room:
            more = (_thin_packs if deltas else _drop_packs)(link, run_id, room - changed)
            held, changed = held + more, changed + len(more)
        events += sum(held)
        is_done = changed < room
        if deltas or not is_done:
            link.run("UPDATE logs SET pruned = ? WHERE log_id = ?", THINNED if is_done else BEING_PRUNED, run_id)
        if not is_done:
            return run_ids[place:], runs, events
        runs += 1 if deltas else _remove_run(link, run_id)
        room -= changed + 1
    return [], runs, events


def _drop_packs(link: Link, log_id: str, room: int) -> list[int]:
    """Drop packs of a log; return the number of events in each."""
    some = "log_id = ? AND seq IN (SELECT seq FROM packs WHERE log_id = ? ORDER BY seq LIMIT ?)"
    held = [row[0] for row in link.run(f"DELETE FROM packs WHERE {some} RETURNING held", log_id, log_id, room)]
    if len(held) < room:
        link.run("DELETE FROM said WHERE log_id = ?", log_id)
    return held


def _thin_packs(link: Link, log_id: str, room: int) -> list[int]:
    """Drop the deltas and private parts of packs of a log; return the number of deltas in each."""
    packs = link.run(
        "SELECT seq, held, deltas, body FROM packs WHERE log_id = ? AND (deltas > 0 OR private IS NOT NULL) "
        "ORDER BY seq LIMIT ?",
        *(log_id, room),
    )
    for seq, held, deltas, body in packs:
        if held == deltas:
            link.run("DELETE FROM packs WHERE log_id = ? AND seq = ?", log_id, seq)
        else:
            link.run(
                "UPDATE packs SET held = ?, deltas = 0, body = ?, private = NULL WHERE log_id = ? AND seq = ?",
                *(held - deltas, without_deltas(read_pack(body)), log_id, seq),
            )
    if len(packs) < room:  # no pack has deltas any more
        link.run("DELETE FROM said WHERE log_id = ? AND last = 0", log_id)
    return [deltas for _, _, deltas, _ in packs]


def _remove_run(link: Link, run_id: str) -> int:
    """Remove a run whose events are removed, with its background children; return 0 if another process did."""
    link.run("DELETE FROM inbox WHERE log_id = ?", run_id)
    link.run("DELETE FROM push_targets WHERE run_id = ?", run_id)
    link.run("DELETE FROM logs WHERE log_id = ?", run_id)
    link.run("DELETE FROM runs WHERE log_id = ? AND log_id <> run_id", run_id)
    return len(link.run("DELETE FROM runs WHERE run_id = ? RETURNING run_id", run_id))


def remove_threads(link: Link, thread_ids: Sequence[str], before: float) -> tuple[int, int]:
    threads = messages = 0
    link.lock_threads(thread_ids)
    for thread_id in thread_ids:
        dropped = link.run(
            "DELETE FROM threads WHERE thread_id = ? AND holder IS NULL AND saved_at < ? AND NOT EXISTS "
            "(SELECT 1 FROM runs WHERE runs.thread_id = threads.thread_id) RETURNING thread_id",
            *(thread_id, before),
        )
        if dropped:
            threads += 1
            messages += sum(
                row[0] for row in link.run("DELETE FROM messages WHERE thread_id = ? RETURNING held", thread_id)
            )
    return threads, messages
