"""Writes of a store: the start of a run, a batch of a log, threads and runs.

Each is encoded first, and then written in one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
from msgspec import Struct

from ..core.content import to_json_anyway
from ..core.errors import OwnershipLost, StoreError
from ..core.runs import RunStatus
from ..core.stores import (
    LEGS,
    STATUSES,
    THREADS,
    WISHES,
    LogBatch,
    LogSummary,
    Placement,
    RunRecord,
    SummaryUpdate,
    WhenBusy,
)
from .database import ConditionFailed, Later, Link
from .packs import PACK, UNREADABLE, PackedRow, pack_rows
from .schema import COUNTS
from .threads import ThreadWrite, keep_messages, referring

encode = msgspec.json.Encoder().encode

POSTGRES = "postgres"
"""The engine whose legs this database schedules itself."""
_INTERRUPTED = encode("a newer run was started")
_LOG = "log_id, owner, epoch, lease_until, boot, engine, queue, flow, level, above"
_RUN = "run_id, log_id, parent_run_id, thread_id, user_id, agent, started_at, identity"
_QUEUED = "FROM runs WHERE thread_id = ? AND status = 'queued'"
_NEXT_PLACE = f"SELECT COALESCE(MAX(place), 0) + 1 {_QUEUED}"
"""The place of a new run in the queue of its thread. The database gives it: the clocks of clients may differ."""
_TAKE_THREAD = (
    "INSERT INTO threads (thread_id, user_id, holder) VALUES (?, ?, ?) ON CONFLICT (thread_id) DO UPDATE SET "
    f"holder = COALESCE(threads.holder, CASE WHEN NOT EXISTS (SELECT 1 {_QUEUED}) THEN excluded.holder END) RETURNING "
    f"CASE WHEN holder = ? THEN NULL ELSE COALESCE((SELECT run_id {_QUEUED} ORDER BY place DESC LIMIT 1), holder) END"
)
"""Give a thread to a new run unless another run has it or waits for it; return the run before the new one."""
MOST_ROWS_AT_ONCE = 1_000
"""Rows of a log that are encoded on the event loop; more are encoded in the thread that writes them."""
OWNED = "log_id = ? AND epoch = ? AND owner IS NOT NULL AND ended = 0"
COUNT_LOSS = (
    "lost = lost + CASE WHEN owner <> ? THEN 1 ELSE 0 END, "
    "lost_epoch = CASE WHEN owner <> ? THEN epoch ELSE lost_epoch END"
)
"""SQL that counts the death of an owner of a log, unless that is the process which claims it or nobody."""
_NEW = " AND NOT EXISTS (SELECT 1 FROM events WHERE log_id = ? AND (seq, sub) >= (?, ?))"


_CHANGES = ", ".join([f"{name} = threads.{name} + ? - runs.{name}" for name in COUNTS])
_RANK = (
    "COALESCE((SELECT MIN(rank) FROM runs WHERE runs.thread_id = threads.thread_id AND rank < 3), (SELECT rank FROM runs "
    "WHERE runs.thread_id = threads.thread_id AND rank IS NOT NULL ORDER BY started_at DESC, run_id DESC LIMIT 1), rank)"
)
"""SQL for how a thread stands: as the most urgent of its logs that have not ended, else as its newest run."""
_STANDS = f"changed_at = wall_seconds(), rank = {_RANK}"


def summary_write(run_id: str, update: SummaryUpdate) -> Callable[[Link], None]:
    """Write how the log of a root run stands, in the run and in its thread."""
    summary = update.summary
    counts = (summary.questions, summary.children, *msgspec.structs.astuple(summary.usage))
    mine = ", ".join([f"{name} = ?" for name in COUNTS])

    def write(link: Link) -> None:
        link.run(
            f"UPDATE threads SET {_CHANGES} FROM runs WHERE runs.run_id = ? AND threads.thread_id = runs.thread_id",
            *(*counts, run_id),
        )
        link.run(f"UPDATE runs SET {mine}, rank = ? WHERE run_id = ?", *counts, STATUSES.index(summary.status), run_id)
        link.run(f"UPDATE threads SET {_STANDS} WHERE thread_id = ?", update.thread_id)
        link.notify(f"{THREADS}{update.user_id or ''}")

    return write


def name_write(thread_id: str, title: str) -> Callable[[Link], bool]:
    """Set the title of a thread; return False if there is none."""

    def write(link: Link) -> bool:
        named = link.run(
            "UPDATE threads SET title = ?, search = ?, changed_at = wall_seconds() WHERE thread_id = ? RETURNING user_id",
            *(title, title.casefold(), thread_id),
        )
        for (user_id,) in named:
            link.notify(f"{THREADS}{user_id or ''}")
        return bool(named)

    return write


def run_write(record: RunRecord, thread: ThreadWrite | None = None) -> Callable[[Link], object]:
    """Write a run; one that had ended before is not changed. Its result refers to the messages that `thread` writes."""
    upsert = (
        f"INSERT INTO runs ({_RUN}, status, result, ended_at) "
        f"VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {'wall_seconds()' if record.has_ended else 'NULL'}) "
        "ON CONFLICT (run_id) DO UPDATE SET status = excluded.status, result = excluded.result, "
        "ended_at = excluded.ended_at WHERE runs.ended_at IS NULL"
    )
    values, result = _run_values(record), record.result
    if result is None:
        return lambda link: link.run(upsert, *values, record.status, None)
    if thread is None or not record.has_ended or result.messages != thread.record.messages[thread.keep :]:
        encoded = to_json_anyway(result)
        return lambda link: link.run(upsert, *values, record.status, encoded)
    first, thread_id, thread.refers = thread.keep, thread.record.thread_id, True
    return lambda link: link.run(upsert, *values, record.status, referring(result, thread_id, first, thread.messages))


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
"""The level of a leg that its worker handed over: it comes before legs that have not started."""
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
        f"due_at = COALESCE(due_at, wall_seconds()) WHERE engine = '{POSTGRES}' AND ended = 0 AND {where}",
        *values,
    )
    link.notify(LEGS)


class RunBeginning(Struct):
    """A new run: its record, its log and its thread. A thread carries one run at a time; others are queued."""

    place: str
    record: RunRecord
    request: bytes
    owner: str | None
    lease: float
    when_busy: WhenBusy
    placement: Placement | None = None
    saved_at: float | None = None
    values: tuple[Any, ...] = ()
    """The columns of the run."""

    def __post_init__(self) -> None:
        self.values = (*_run_values(self.record), self.request)

    def write(self, link: Link) -> Any:
        """Store the run and own its log; return the run before it, if its thread is taken."""
        run_id, thread_id, user_id = self.values[0], self.record.identity.thread_id, self.record.identity.user_id
        if self.saved_at is not None:
            saved_at = link.value("SELECT saved_at FROM threads WHERE thread_id = ?", thread_id)
            if saved_at is not None and saved_at != self.saved_at:
                return ""
        if link.eager and link.run("SELECT 1 FROM logs WHERE log_id = ?", run_id):
            self._check_begun(link)
            return take_thread(link, run_id, thread_id)
        before = link.ask(_TAKE_THREAD, thread_id, user_id, run_id, thread_id, run_id, thread_id)
        mine, given = "FROM threads WHERE thread_id = ?", [thread_id]
        if self.when_busy == "reject":
            mine, given = f"{mine} AND holder = ?", [thread_id, run_id]
        placed: tuple[Any, ...] = (None,) * 5
        if (placement := self.placement) is not None:
            flow = user_id or thread_id
            placed = placement.engine, placement.queue, flow, -placement.priority, placement.above
        link.run(
            f"INSERT INTO logs ({_LOG}) SELECT ?, ?, ?, boot_seconds() + ?, boot_id(), ?, ?, ?, ?, ? {mine}",
            *(run_id, self.owner, 0 if self.owner is None else 1, self.lease, *placed, *given),
        )
        link.run(
            f"INSERT INTO runs ({_RUN}, request, status, rank, place) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, "
            "CASE WHEN holder = ? THEN 'running' ELSE 'queued' END, CASE WHEN holder = ? THEN 1 ELSE 2 END, "
            f"CASE WHEN holder = ? THEN NULL ELSE ({_NEXT_PLACE}) END {mine}",
            *(*self.values, run_id, run_id, run_id, thread_id, *given),
        )
        title = self.record.title
        link.run(
            f"UPDATE threads SET title = COALESCE(title, NULLIF(?, '')), search = COALESCE(search, NULLIF(?, '')), {_STANDS} "
            "WHERE thread_id = ? AND EXISTS (SELECT 1 FROM runs WHERE run_id = ?)",
            *(title, title.casefold(), thread_id, run_id),
        )
        link.notify(f"{THREADS}{user_id or ''}")
        if self.when_busy == "interrupt":
            self._cancel_others(link)
        if self.placement is not None:
            self._make_due(link, self.placement)
        return Later(lambda: before.read()[0][0])

    def _make_due(self, link: Link, placement: Placement) -> None:
        """Let a worker take the run when its time comes, unless it waits for its thread."""
        run_id = self.record.identity.run_id
        if placement.delay > 0:
            link.run("UPDATE logs SET due_at = wall_seconds() + ? WHERE log_id = ?", placement.delay, run_id)
        else:
            mine = "log_id = ? AND EXISTS (SELECT 1 FROM runs WHERE run_id = ? AND status = 'running')"
            make_due(link, mine, run_id, run_id)

    def _cancel_others(self, link: Link) -> None:
        """Ask the run that has the thread, and all that are queued, to stop: this one is the last of them."""
        run_id, thread_id = self.record.identity.run_id, self.record.identity.thread_id
        link.run(
            "INSERT INTO inbox (log_id, wish_id, run_id, kind, body, at) "
            "SELECT log_id, ?, run_id, 'cancel', ?, wall_seconds() FROM runs WHERE run_id <> ? AND "
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
        run_id = self.record.identity.run_id
        log = link.run("SELECT owner, epoch FROM logs WHERE log_id = ?", run_id)
        run = link.run("SELECT identity, request FROM runs WHERE run_id = ?", run_id)
        # A run that an engine schedules may have been claimed since.
        if (self.placement is None and log != [(self.owner, 1)]) or run != [self.values[-2:]]:
            raise StoreError(self.place, f"there is a run {run_id!r} already")


def note_deaths(link: Link, owners: str, *values: Any) -> None:
    """Note the owners that a query gives as dead, each once."""
    link.run(
        f"INSERT INTO deaths (owner, at) SELECT DISTINCT owner, wall_seconds() FROM ({owners}) AS gone WHERE TRUE "
        "ON CONFLICT (owner) DO NOTHING",
        *values,
    )
    link.run("DELETE FROM deaths WHERE at < wall_seconds() - 3600")


def leave_threads(link: Link, log_id: str, thread_ids: Sequence[str]) -> None:
    """Release threads that a log holds."""
    marks = ", ".join("?" * len(thread_ids))
    link.run(f"UPDATE threads SET holder = NULL WHERE holder = ? AND thread_id IN ({marks})", log_id, *thread_ids)


def take_thread(link: Link, run_id: str, thread_id: str) -> str | None:
    """Give a queued run its thread if it is its turn; else return the run before it."""
    place = link.value("SELECT place FROM runs WHERE run_id = ? AND status = 'queued'", run_id)
    if place is None:
        return None
    before = link.value(
        f"SELECT COALESCE((SELECT run_id {_QUEUED} AND place < ? ORDER BY place DESC LIMIT 1), holder) "
        "FROM threads WHERE thread_id = ?",
        *(thread_id, place, thread_id),
    )
    if before is None:
        link.run("UPDATE threads SET holder = ? WHERE thread_id = ?", run_id, thread_id)
        began = link.run("UPDATE runs SET status = 'running', rank = 1 WHERE run_id = ? RETURNING user_id", run_id)
        link.run(f"UPDATE threads SET {_STANDS} WHERE thread_id = ?", thread_id)
        for (user_id,) in began:
            link.notify(f"{THREADS}{user_id or ''}")
    return before


def first_queued(where: str) -> str:
    """Return SQL for the queued runs that are next: the first of each free thread, for PostgreSQL."""
    return (
        "SELECT DISTINCT ON (runs.thread_id) run_id FROM runs JOIN threads ON threads.thread_id = runs.thread_id "
        f"WHERE status = 'queued' AND holder IS NULL AND {where} ORDER BY runs.thread_id, place"
    )


@lru_cache
def _append_many(count: int) -> str:
    """SQL that appends a pack to each of some logs, as `BatchWrite` does to one; it divides by zero if it cannot.

    The newer rows of a log are counted in a query of their own, so that the index finds them whatever the planner thinks.
    """
    types = "text, bigint, bigint, text, bigint, bytea, bytea, bigint, bigint, bigint".split(", ")
    first, other = ", ".join([f"?::{name}" for name in types]), ", ".join("?" * len(types))
    rows = ", ".join([f"({first})", *[f"({other})"] * (count - 1)])
    newer = "SELECT 1 FROM events WHERE events.log_id = given.log_id AND (seq, sub) >= (given.from_seq, given.from_sub)"
    return (
        f"WITH given ({PACK}, epoch, from_seq, from_sub) AS (VALUES {rows}), "
        "met AS (SELECT logs.log_id FROM logs JOIN given ON logs.log_id = given.log_id AND logs.epoch = given.epoch "
        f"WHERE owner IS NOT NULL AND ended = 0 AND (SELECT COUNT(*) FROM ({newer} LIMIT 1) AS newer) = 0 "
        "ORDER BY logs.log_id FOR UPDATE OF logs), "
        f"done AS (INSERT INTO events ({PACK}) SELECT {PACK} FROM given WHERE log_id IN (TABLE met) RETURNING 1) "
        f"SELECT 1 / (COUNT(*) = {count})::int FROM done"
    )


def _last_summary(batch: LogBatch) -> SummaryUpdate | None:
    """Return how a log stands whose root run ends in a batch, though its rows do not say so: the run has broken down."""
    for run in batch.runs:
        if run.identity.run_id == batch.log_id and run.has_ended and batch.released and run.result is not None:
            status = "completed" if run.result.status in (RunStatus.COMPLETED, RunStatus.CANCELLED) else "failed"
            summary = LogSummary(status=status, usage=run.result.usage)
            return SummaryUpdate(run.identity.thread_id, run.identity.user_id, summary)
    return None


class BatchWrite:
    """A batch of a log: fenced by the epoch of its owner, and recognised when it is retried."""

    def __init__(self, place: str, batch: LogBatch) -> None:
        self._place, self._batch = place, batch
        is_small = len(batch.rows) <= MOST_ROWS_AT_ONCE
        self._packs = pack_rows(batch.log_id, batch.rows) if is_small else None
        """None until a thread has packed the rows: many would hold up the event loop."""
        saved = {update.record.thread_id for update in batch.threads}
        # A root that ends leaves its thread.
        left = {run.identity.thread_id for run in batch.runs if run.has_ended and run.identity.run_id == batch.log_id}
        left.update(batch.left)
        self.threads, self._left = [*saved, *left], left
        """The threads that it changes, and those that it releases."""
        threads = [
            ThreadWrite(place, update, batch.log_id if update.record.thread_id in left else None)
            for update in batch.threads
        ]
        self._writes: list[Callable[[Link], object]] = [*threads]
        if rest := sorted(left - saved):
            self._writes.append(partial(leave_threads, log_id=batch.log_id, thread_ids=rest))
        by_id = {thread.record.thread_id: thread for thread in threads}
        self._writes += [run_write(run, by_id.get(run.identity.thread_id)) for run in batch.runs]
        if (summary := batch.summary or _last_summary(batch)) is not None:
            self.threads.append(summary.thread_id)
            self._writes.append(summary_write(batch.log_id, summary))

    def write(self, link: Link) -> None:
        batch, log_id = self._batch, self._batch.log_id
        if self._packs is None:
            try:
                self._packs = pack_rows(log_id, batch.rows)
            except UNREADABLE as exc:
                raise StoreError(self._place, f"run {log_id!r} cannot be stored: {exc}") from exc
        try:
            self._append(link, self._packs)
        except ConditionFailed:
            self._check_written(link, self._packs)
            return
        for write in self._writes:
            write(link)
        for row in batch.rows:
            if row.history is not None:
                keep_messages(link, *row.history)
        if (losses := batch.losses) is not None:
            found = losses.count, losses.steps, int(losses.is_alone)
            link.run("UPDATE logs SET lost = ?, lost_steps = ?, is_alone = ? WHERE log_id = ?", *found, log_id)
        answer = "UPDATE inbox SET reply = ? WHERE log_id = ? AND wish_id = ? AND reply IS NULL"
        for reply in batch.replies:
            link.run(answer, reply.body, log_id, reply.wish_id)
        if batch.released and not batch.ended:
            if batch.rests:  # a separate statement: it sees every wish put in before the release
                wanted = "SELECT 1 FROM inbox WHERE inbox.log_id = logs.log_id AND reply IS NULL"
                make_due(link, f"log_id = ? AND EXISTS ({wanted})", log_id)
            else:
                link.notify(LEGS)
        for topic in (log_id, *self._left):
            link.notify(topic)

    def _append(self, link: Link, packs: list[PackedRow]) -> None:
        """Insert the rows and release the log, if it is owned at this epoch and has none of these rows yet."""
        batch, where = self._batch, OWNED
        values: list[Any] = [batch.log_id, batch.epoch]
        if packs:
            first = batch.rows[0]
            if len(packs) == 1 and not batch.released and not batch.ended:
                if link.gather(_append_many, (*packs[0], batch.epoch, first.seq, first.sub)):
                    return
            where, values = OWNED + _NEW, [*values, batch.log_id, first.seq, first.sub]
        if batch.ended or (batch.released and batch.rests):
            rests = ", turn = NULL, due_at = NULL"
            owned = f"UPDATE logs SET owner = NULL, ended = {int(batch.ended)}{rests} WHERE {where} RETURNING 1"
        elif batch.released:  # the next worker takes it before new legs
            # A turn says that there is work: without an engine, any process continues it.
            turn = f"CASE WHEN engine IS NULL OR engine = '{POSTGRES}' THEN COALESCE(turn, 0) ELSE turn END"
            owned = f"UPDATE logs SET owner = NULL, level = {TAKEN_OVER}, turn = {turn} WHERE {where} RETURNING 1"
        else:
            owned = f"SELECT 1 FROM logs WHERE {where}{link.locking}"
        link.require(owned, *values)
        link.insert(f"events ({PACK})", packs)

    def _check_written(self, link: Link, packs: list[PackedRow]) -> None:
        """Raise unless an earlier attempt wrote this batch and its outcome was lost."""
        batch = self._batch
        found = link.run("SELECT epoch, owner, ended FROM logs WHERE log_id = ?", batch.log_id)
        epoch, owner, ended = found[0] if found else (None, None, 1)
        is_ours = epoch == batch.epoch
        if packs:
            if self._stored_packs(link) == packs:
                return
            if is_ours and owner is not None and not ended:
                raise StoreError(self._place, f"the log of run {batch.log_id!r} has other rows than those written here")
        elif is_ours and owner is None and (batch.released or batch.ended) and bool(ended) == batch.ended:
            return
        raise OwnershipLost(self._place, batch.log_id)

    def _stored_packs(self, link: Link) -> list[PackedRow]:
        first, last = self._batch.rows[0], self._batch.rows[-1]
        return link.run(
            f"SELECT {PACK} FROM events WHERE log_id = ? AND (seq, sub) >= (?, ?) AND (seq, sub) <= (?, ?) "
            "ORDER BY seq, sub",
            *(self._batch.log_id, first.seq, first.sub, last.seq, last.sub),
        )
