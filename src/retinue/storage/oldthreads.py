"""Pruning of conversations that have no runs any more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from ..subagents.spawned import SPAWNED
from .lanes import Link
from .sql import DECODERS, UNREADABLE, Database

_PAGE = 500


async def forget_threads(database: Database, before: float, *, dry_run: bool) -> tuple[int, int]:
    """Drop the threads without runs that were not saved since; return how many, and how many messages.

    A thread of a sub-agent has no runs of its own: it goes no earlier than the conversation that spawned it.
    """
    threads = messages = 0
    old = await _forgettable(database, before, with_runs=dry_run)
    for start in range(0, len(old), _PAGE):
        work = partial(_count if dry_run else _drop, thread_ids=old[start : start + _PAGE], before=before)
        dropped, said = await (database.read(work) if dry_run else database.write(work))
        threads, messages = threads + dropped, messages + said
    return threads, messages


async def _forgettable(database: Database, before: float, *, with_runs: bool) -> list[str]:
    """Return the threads that may go; with `with_runs`, also those whose runs would go before them."""
    spawned: dict[str, list[str]] = {}
    old: set[str] = set()
    last, kept = "", list[str]()
    while True:
        rows = await database.read(partial(_look, last=last, before=before, with_runs=with_runs))
        for thread_id, is_old, children in rows:
            if children:
                spawned[thread_id] = children
            if is_old:
                old.add(thread_id)
            else:
                kept.append(thread_id)
        if len(rows) < _PAGE:
            break
        last = rows[-1][0]
    while kept:
        children = [child for child in spawned.get(kept.pop(), ()) if child in old]
        old.difference_update(children)
        kept.extend(children)
    return sorted(old)


def _look(link: Link, last: str, before: float, with_runs: bool) -> list[tuple[str, bool, list[str]]]:
    """Read a page of threads: the id, whether it is old, and the threads of its sub-agents."""
    stays, values = (" AND (ended_at IS NULL OR ended_at >= ?)", [before]) if with_runs else ("", [])
    rows = link.run(
        "SELECT thread_id, state, CASE WHEN holder IS NULL AND saved_at < ? AND NOT EXISTS "
        f"(SELECT 1 FROM runs WHERE runs.thread_id = threads.thread_id{stays}) THEN 1 ELSE 0 END "
        f"FROM threads WHERE thread_id > ? ORDER BY thread_id LIMIT {_PAGE}",
        before,
        *values,
        last,
    )
    return [(thread_id, bool(is_old), _children(state)) for thread_id, state, is_old in rows]


def _children(state: bytes | None) -> list[str]:
    """Return the threads of the sub-agents that the state of a thread names."""
    try:
        extensions = cast("Any", DECODERS["state"](state or b"{}")).extensions
        return [spawned["session_id"] for spawned in extensions.get(SPAWNED.name, {}).values()]
    except (*UNREADABLE, AttributeError):
        return []


def _drop(link: Link, thread_ids: Sequence[str], before: float) -> tuple[int, int]:
    threads = messages = 0
    link.lock_threads(thread_ids)
    for thread_id in thread_ids:
        dropped = link.run(
            "DELETE FROM threads WHERE thread_id = ? AND holder IS NULL AND saved_at < ? AND NOT EXISTS "
            "(SELECT 1 FROM runs WHERE runs.thread_id = threads.thread_id) RETURNING thread_id",
            thread_id,
            before,
        )
        if dropped:
            threads += 1
            messages += len(link.run("DELETE FROM messages WHERE thread_id = ? RETURNING place", thread_id))
    return threads, messages


def _count(link: Link, thread_ids: Sequence[str], before: float) -> tuple[int, int]:
    marks = ", ".join("?" * len(thread_ids))
    return len(thread_ids), link.run(f"SELECT COUNT(*) FROM messages WHERE thread_id IN ({marks})", *thread_ids)[0][0]
