"""Removing runs and threads from a database, in transactions of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..core.errors import ThreadBusy
from .database import Database, Link
from .packs import BEING_PRUNED, DELTAS_KIND, THINNED

MOST_ROWS = 500
"""Rows changed in one transaction, so that nobody waits long for it."""
_SOME_ROWS = "log_id = ? AND (seq, sub) IN (SELECT seq, sub FROM events WHERE log_id = ? {} ORDER BY seq, sub LIMIT ?)"


async def delete_thread(database: Database, thread_id: str) -> bool:
    """Delete a thread with its runs and their logs; ThreadBusy if a log of it has not ended."""

    def find(link: Link) -> tuple[bool, list[tuple[str, int]]]:
        known = bool(link.run("SELECT 1 FROM threads WHERE thread_id = ?", thread_id))
        # With the logs of children that were placed for them.
        query = (
            "SELECT log_id, ended FROM (WITH RECURSIVE found (log_id, ended) AS ("
            "SELECT logs.log_id, ended FROM runs JOIN logs ON logs.log_id = run_id WHERE thread_id = ? "
            "UNION SELECT logs.log_id, logs.ended FROM logs JOIN found ON logs.above = found.log_id) "
            "SELECT log_id, ended FROM found) AS found ORDER BY log_id"
        )
        return known, link.run(query, thread_id)

    known, runs = await database.read(find)
    for run_id, ended in runs:
        if not ended:
            raise ThreadBusy(thread_id, run_id)
    left: Sequence[str] = [run_id for run_id, _ in runs]
    while left:
        left, _, _ = await database.write(partial(remove_runs, run_ids=left, deltas=False))
    await database.write(partial(remove_threads, thread_ids=[thread_id], before=float("inf")), threads=[thread_id])
    return known


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
        changed, events = len(held), events + sum(held)
        if deltas and changed < room:
            changed += len(link.run(clear, run_id, run_id, room - changed))
        is_done = changed < room
        if deltas or not is_done:
            link.run("UPDATE logs SET pruned = ? WHERE log_id = ?", THINNED if is_done else BEING_PRUNED, run_id)
        if not is_done:
            return run_ids[place:], runs, events
        runs += 1 if deltas else _remove_run(link, run_id)
        room -= changed + 1
    return [], runs, events


def _remove_run(link: Link, run_id: str) -> int:
    """Remove a run whose events are gone, with its background children; return 0 if somebody else did."""
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
            messages += len(link.run("DELETE FROM messages WHERE thread_id = ? RETURNING place", thread_id))
    return threads, messages
