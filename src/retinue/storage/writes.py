"""Writes of threads and runs, each encoded first and then written in one transaction; removal, in bounded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from ..core.content import to_json_anyway
from ..core.errors import OwnershipLost, StoreError, ThreadBusy
from ..core.stores import LEGS, WISHES, Placement, RunRecord, ThreadUpdate, WhenBusy
from .database import Database, Later, Link
from .schema import BEING_PRUNED, DELTAS_KIND, THINNED

encode = msgspec.json.Encoder().encode

POSTGRES = "postgres"
"""The engine whose legs this database schedules itself."""
_INTERRUPTED = encode("a newer run was started")
_LOG = "log_id, owner, epoch, lease_until, boot"
_RUN = "run_id, log_id, parent_run_id, thread_id, user_id, agent, started_at, identity"
_QUEUED = "FROM runs WHERE thread_id = ? AND status = 'queued'"
_LAST_QUEUED = f"SELECT run_id {_QUEUED} ORDER BY place DESC LIMIT 1"
_NEXT_PLACE = f"SELECT COALESCE(MAX(place), 0) + 1 {_QUEUED}"
"""The place of a new run in the queue of its thread. The database gives it: the clocks of clients may differ."""
OWNED = "log_id = ? AND epoch = ? AND owner IS NOT NULL AND ended = 0"
_PLACED = "engine, queue, flow, level, above"


def thread_write(update: ThreadUpdate, ended: str | None = None) -> Callable[[Link], None]:
    """Write a thread, without the messages that are stored already. If its run `ended`, release it."""
    record, keep = update.record, update.keep
    thread_id, count = record.thread_id, len(record.messages)
    rows = [(thread_id, place, to_json_anyway(record.messages[place])) for place in range(keep, count)]
    state = to_json_anyway(record.state)

    def write(link: Link) -> None:
        link.run_two(
            "DELETE FROM messages WHERE thread_id = ? AND place >= ?",
            (thread_id, keep),
            f"INSERT INTO threads (thread_id, user_id, state, saved_at) VALUES (?, ?, ?, {link.now}) "
            "ON CONFLICT (thread_id) DO UPDATE SET user_id = excluded.user_id, state = excluded.state, "
            "saved_at = excluded.saved_at, holder = NULLIF(threads.holder, ?)",
            (thread_id, record.user_id, state, ended or ""),
        )
        link.insert("messages (thread_id, place, body)", rows)

    return write


def run_write(record: RunRecord, *, release: bool = True) -> Callable[[Link], None]:
    """Write a run. One that ends releases its thread; one that had ended before is not changed."""
    result = None
    if record.result is not None:
        result = to_json_anyway(record.result)
    ends = record.has_ended
    values = (*_run_values(record), record.status, result)
    identity = record.identity

    def write(link: Link) -> None:
        upsert = (
            f"INSERT INTO runs ({_RUN}, status, result, ended_at) "
            f"VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {link.now if ends else 'NULL'}) "
            "ON CONFLICT (run_id) DO UPDATE SET status = excluded.status, result = excluded.result, "
            "ended_at = excluded.ended_at WHERE runs.ended_at IS NULL"
        )
        if ends and release:
            free = "UPDATE threads SET holder = NULL WHERE thread_id = ? AND holder = ?"
            link.run_two(free, (identity.thread_id, identity.run_id), upsert, values)
        else:
            link.run(upsert, *values)

    return write


def _run_values(record: RunRecord) -> tuple[Any, ...]:
    """Return the columns of a run that never change, as in `_RUN`."""
    identity = record.identity
    return (
        identity.run_id,
        record.log_id or identity.run_id,
        identity.parent_run_id,
        identity.thread_id,
        identity.user_id,
        identity.agent,
        record.started_at,
        encode(identity),
    )


TAKEN_OVER = -(2**40)
"""The level of a leg that lost its worker: it comes before legs that have not started."""
NEXT_TURN = (
    "(SELECT MAX(turn) FROM (SELECT (SELECT MAX(turn) + 1 FROM logs AS mine WHERE mine.queue = logs.queue "
    "AND mine.flow = logs.flow AND mine.owner IS NULL AND mine.turn IS NOT NULL) AS turn UNION ALL "
    "SELECT (SELECT MIN(turn) FROM logs AS other WHERE other.queue = logs.queue "
    "AND other.owner IS NULL AND other.turn IS NOT NULL) UNION ALL SELECT 0) AS turns)"
)
"""SQL for the turn of a new leg: after the waiting legs of its flow, and not before the turn that is served now. So a flow
with many legs waits for its own legs, and legs of other flows come in between."""


def make_due(link: Link, where: str, *values: Any) -> None:
    """Let a worker of PostgreSQL take logs without an owner; `where` selects them.

    A log that has a turn keeps it. "Has no turn" must not be a condition: a concurrent release clears the turn, and the
    statement waits for that release only if it selects the row.
    """
    link.run(
        f"UPDATE logs SET turn = COALESCE(turn, {NEXT_TURN}), "
        f"due_at = COALESCE(due_at, {link.now}) WHERE engine = '{POSTGRES}' AND ended = 0 AND {where}",
        *values,
    )
    link.notify(LEGS)


class RunBeginning:
    """A new run: its record, its log and its thread. A thread carries one run at a time; others are queued."""

    def __init__(
        self,
        place: str,
        record: RunRecord,
        request: bytes,
        owner: str | None,
        lease: float,
        when_busy: WhenBusy,
        placement: Placement | None = None,
        saved_at: float | None = None,
    ) -> None:
        self._place, self._owner, self._lease, self._when_busy = place, owner, lease, when_busy
        self._saved_at = saved_at
        self._identity = record.identity
        self._values = (*_run_values(record), request)
        self._placement, self._epoch = placement, 0 if owner is None else 1

    def write(self, link: Link) -> Any:
        """Store the run and own its log; return the run before it, if its thread is taken."""
        run_id, thread_id = self._identity.run_id, self._identity.thread_id
        if self._saved_at is not None:
            found = link.run("SELECT saved_at FROM threads WHERE thread_id = ?", thread_id)
            if found and found[0][0] != self._saved_at:
                return ""
        if not link.eager:
            before: Any = self._write_at_once(link)
        else:
            insert = "INSERT INTO threads (thread_id, user_id) VALUES (?, ?) ON CONFLICT (thread_id) DO NOTHING"
            link.run(insert, thread_id, self._identity.user_id)
            if link.run("SELECT 1 FROM logs WHERE log_id = ?", run_id):
                self._check_begun(link)
                return take_thread(link, run_id, thread_id)
            before = _value(
                link,
                f"SELECT COALESCE(({_LAST_QUEUED}), holder) FROM threads WHERE thread_id = ?",
                *(thread_id, thread_id),
            )
            if before is not None and self._when_busy == "reject":
                return before
            columns, values, given = self._log(link)
            link.run(f"INSERT INTO logs ({columns}) VALUES ({values})", *given)
            place = None if before is None else _value(link, _NEXT_PLACE, thread_id)
            status = "running" if before is None else "queued"
            link.insert(f"runs ({_RUN}, request, status, place)", [(*self._values, status, place)])
            if before is None:
                link.run("UPDATE threads SET holder = ? WHERE thread_id = ?", run_id, thread_id)
        if self._when_busy == "interrupt":
            self._cancel_others(link)
        if self._placement is not None:
            self._make_due(link, self._placement)
        return before

    def _log(self, link: Link) -> tuple[str, str, tuple[Any, ...]]:
        """Return the columns of the log, SQL for their values, and what is given for it."""
        columns, values = _LOG, f"?, ?, {self._epoch}, {link.lease_now} + ?, ?"
        given: tuple[Any, ...] = (self._identity.run_id, self._owner, self._lease, link.boot)
        if (placement := self._placement) is not None:
            columns, values = f"{_LOG}, {_PLACED}", f"{values}, ?, ?, ?, ?, ?"
            flow = self._identity.user_id or self._identity.thread_id
            given = (*given, placement.engine, placement.queue, flow, -placement.priority, placement.above)
        return columns, values, given

    def _make_due(self, link: Link, placement: Placement) -> None:
        """Let a worker take the run when its time comes, unless it waits for its thread."""
        run_id = self._identity.run_id
        mine = "log_id = ? AND EXISTS (SELECT 1 FROM runs WHERE run_id = ? AND status = 'running')"
        if placement.delay > 0:
            link.run(f"UPDATE logs SET due_at = {link.now} + ? WHERE log_id = ?", placement.delay, run_id)
        else:
            make_due(link, mine, run_id, run_id)

    def _write_at_once(self, link: Link) -> Later:
        """Write everything in one statement, which fails if the log exists."""
        run_id, thread_id = self._identity.run_id, self._identity.thread_id
        refused = "before.run_id IS NOT NULL" if self._when_busy == "reject" else "FALSE"
        columns, values, given = self._log(link)
        before = link.ask(
            "WITH before AS (SELECT CASE WHEN NOT EXISTS (SELECT 1 FROM logs WHERE log_id = ?) THEN "
            f"COALESCE(({_LAST_QUEUED}), (SELECT holder FROM threads WHERE thread_id = ?)) END AS run_id, "
            f"({_NEXT_PLACE}) AS place), "
            f"log AS (INSERT INTO logs ({columns}) SELECT {values} FROM before "
            f"WHERE NOT ({refused}) ON CONFLICT (log_id) DO NOTHING RETURNING log_id), "
            f"run AS (INSERT INTO runs ({_RUN}, request, status, place) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, "
            "CASE WHEN before.run_id IS NULL THEN 'running' ELSE 'queued' END, "
            "CASE WHEN before.run_id IS NOT NULL THEN place END FROM before, log), "
            "thread AS (INSERT INTO threads (thread_id, user_id, holder) SELECT ?, ?, ? FROM before, log "
            "WHERE before.run_id IS NULL ON CONFLICT (thread_id) DO UPDATE SET holder = excluded.holder) "
            f"SELECT run_id, 1 / CASE WHEN {refused} OR EXISTS (SELECT 1 FROM log) THEN 1 ELSE 0 END FROM before",
            *(run_id, thread_id, thread_id, thread_id),
            *given,
            *self._values,
            *(thread_id, self._identity.user_id, run_id),
        )
        return Later(lambda: before.read()[0][0])

    def _cancel_others(self, link: Link) -> None:
        """Ask the run that has the thread, and all that are queued, to stop: this one is the last of them."""
        run_id, thread_id = self._identity.run_id, self._identity.thread_id
        link.run(
            "INSERT INTO inbox (log_id, wish_id, run_id, kind, body, at) "
            f"SELECT log_id, ?, run_id, 'cancel', ?, {link.now} FROM runs WHERE run_id <> ? AND "
            "(run_id = (SELECT holder FROM threads WHERE thread_id = ?) OR (thread_id = ? AND status = 'queued')) "
            "ON CONFLICT (log_id, wish_id) DO NOTHING",
            *(f"interrupt-{run_id}", _INTERRUPTED, run_id, thread_id, thread_id),
        )
        make_due(
            link,
            "EXISTS (SELECT 1 FROM inbox WHERE inbox.log_id = logs.log_id AND wish_id = ? AND reply IS NULL)",
            f"interrupt-{run_id}",
        )
        link.notify(WISHES)

    def _check_begun(self, link: Link) -> None:
        """Raise unless an earlier attempt stored this run and its outcome was lost."""
        run_id = self._identity.run_id
        log = link.run("SELECT owner, epoch FROM logs WHERE log_id = ?", run_id)
        run = link.run("SELECT identity, request FROM runs WHERE run_id = ?", run_id)
        # A run that an engine schedules may have been claimed since.
        if (self._placement is None and log != [(self._owner, 1)]) or run != [self._values[-2:]]:
            raise StoreError(self._place, f"there is a run {run_id!r} already")


def leave_threads(link: Link, log_id: str, thread_ids: Sequence[str]) -> None:
    marks = ", ".join("?" * len(thread_ids))
    link.run(f"UPDATE threads SET holder = NULL WHERE holder = ? AND thread_id IN ({marks})", log_id, *thread_ids)


HOLDER = "SELECT holder FROM threads JOIN logs ON logs.log_id = holder WHERE thread_id = ? AND ended = 0"
"""A log that has ended holds no thread."""


def hold_thread(link: Link, place: str, log_id: str, epoch: int, thread_id: str, user_id: str | None) -> str | None:
    """Hold a thread for a child in a log; if another log has it, return that log."""
    if not link.run(f"SELECT 1 FROM logs WHERE {OWNED}", log_id, epoch):
        raise OwnershipLost(place, log_id)
    holder = _value(link, HOLDER, thread_id)
    if holder in (None, log_id):
        link.run(
            "INSERT INTO threads (thread_id, user_id, holder) VALUES (?, ?, ?) "
            "ON CONFLICT (thread_id) DO UPDATE SET holder = excluded.holder",
            *(thread_id, user_id, log_id),
        )
        return None
    return holder


def take_thread(link: Link, run_id: str, thread_id: str) -> str | None:
    """Give a queued run its thread if it is its turn; else return the run before it."""
    place = _value(link, "SELECT place FROM runs WHERE run_id = ? AND status = 'queued'", run_id)
    if place is None:
        return None
    before = _value(
        link,
        f"SELECT COALESCE((SELECT run_id {_QUEUED} AND place < ? ORDER BY place DESC LIMIT 1), holder) "
        "FROM threads WHERE thread_id = ?",
        *(thread_id, place, thread_id),
    )
    if before is None:
        link.run("UPDATE threads SET holder = ? WHERE thread_id = ?", run_id, thread_id)
        link.run("UPDATE runs SET status = 'running' WHERE run_id = ?", run_id)
    return before


def first_queued(where: str) -> str:
    """Return SQL for the queued runs that are next: the first of each free thread, for PostgreSQL."""
    return (
        "SELECT DISTINCT ON (runs.thread_id) run_id FROM runs JOIN threads ON threads.thread_id = runs.thread_id "
        f"WHERE status = 'queued' AND holder IS NULL AND {where} ORDER BY runs.thread_id, place"
    )


def _value(link: Link, query: str, *values: Any) -> Any:
    found = link.run(query, *values)
    return found[0][0] if found else None


MOST_ROWS = 500
"""Rows changed in one transaction, so that others do not wait long for it."""
_SOME_ROWS = "log_id = ? AND (seq, sub) IN (SELECT seq, sub FROM events WHERE log_id = ? {} ORDER BY seq, sub LIMIT ?)"


async def delete_thread(database: Database, thread_id: str) -> bool:
    """Delete a thread with its runs and their logs; raise ThreadBusy if a log of it has not ended."""

    def find(link: Link) -> tuple[bool, list[tuple[str, int]]]:
        known = bool(link.run("SELECT 1 FROM threads WHERE thread_id = ?", thread_id))
        # Also the logs of their placed children.
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
            messages += len(link.run("DELETE FROM messages WHERE thread_id = ? RETURNING place", thread_id))
    return threads, messages
