"""Turns: a thread carries one run at a time, and others wait in the order in which they were started."""

from __future__ import annotations

from typing import Any

from ..core.errors import StoreError
from ..core.stores import WISHES, RunRecord, WhenBusy
from .lanes import Later, Link
from .saving import encode, run_values

REASON = encode("a newer run was started")

_BEFORE = (
    "SELECT run_id FROM runs WHERE thread_id = ? AND status = 'queued' AND (started_at, run_id) < (?, ?) "
    "ORDER BY started_at DESC, run_id DESC LIMIT 1"
)
_LOG = "log_id, owner, epoch, lease_until, boot"
_RUN = "run_id, log_id, parent_run_id, thread_id, user_id, agent, started_at, identity, request, status"


class Beginning:
    """A run that begins."""

    def __init__(self, place: str, record: RunRecord, request: bytes, owner: str, lease: float, when_busy: WhenBusy):
        self._place, self._record, self._owner, self._lease = place, record, owner, lease
        self._run_id, self._thread_id = record.identity.run_id, record.identity.thread_id
        self._when_busy = when_busy
        self._values = (*run_values(record), request)

    def begin(self, link: Link) -> Any:
        """Store the run and own its log; return the run before it, if it cannot have its thread yet."""
        return self._begin_by_steps(link) if link.eager else self._begin_at_once(link)

    def _begin_by_steps(self, link: Link) -> str | None:
        run_id, thread_id, user_id = self._run_id, self._thread_id, self._record.identity.user_id
        insert = "INSERT INTO threads (thread_id, user_id) VALUES (?, ?) ON CONFLICT (thread_id) DO NOTHING"
        link.run(insert, thread_id, user_id)
        before = _run_before(link, thread_id, run_id, self._record.started_at)
        if before is not None and self._when_busy == "reject":
            return before
        made = link.run(
            f"INSERT INTO logs ({_LOG}) VALUES (?, ?, 1, {link.lease_now} + ?, ?) "
            "ON CONFLICT (log_id) DO NOTHING RETURNING log_id",
            *(run_id, self._owner, self._lease, link.boot),
        )
        if not made:
            self._check_begun(link)
            return take_thread(link, run_id, thread_id)
        link.insert(f"runs ({_RUN})", [(*self._values, "running" if before is None else "queued")])
        if before is None:
            link.run("UPDATE threads SET holder = ? WHERE thread_id = ?", run_id, thread_id)
        if self._when_busy == "interrupt":
            self._cancel_others(link)
        return before

    def _begin_at_once(self, link: Link) -> Later:
        """Begin in one statement. It fails where there is such a log already."""
        run_id, thread_id, user_id = self._run_id, self._thread_id, self._record.identity.user_id
        refused = "before.run_id IS NOT NULL" if self._when_busy == "reject" else "FALSE"
        before = link.ask(
            f"WITH before AS (SELECT COALESCE(({_BEFORE}), "
            "(SELECT NULLIF(holder, ?) FROM threads WHERE thread_id = ?)) AS run_id), "
            f"log AS (INSERT INTO logs ({_LOG}) SELECT ?, ?, 1, {link.lease_now} + ?, ? FROM before "
            f"WHERE NOT ({refused}) ON CONFLICT (log_id) DO NOTHING RETURNING log_id), "
            f"run AS (INSERT INTO runs ({_RUN}) SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, "
            "CASE WHEN before.run_id IS NULL THEN 'running' ELSE 'queued' END FROM before, log), "
            "thread AS (INSERT INTO threads (thread_id, user_id, holder) SELECT ?, ?, ? FROM before, log "
            "WHERE before.run_id IS NULL ON CONFLICT (thread_id) DO UPDATE SET holder = excluded.holder) "
            f"SELECT run_id, 1 / CASE WHEN {refused} OR EXISTS (SELECT 1 FROM log) THEN 1 ELSE 0 END FROM before",
            *(thread_id, self._record.started_at, run_id, run_id, thread_id),
            *(run_id, self._owner, self._lease, link.boot),
            *self._values,
            *(thread_id, user_id, run_id),
        )
        if self._when_busy == "interrupt":
            self._cancel_others(link)
        return Later(lambda: before.read()[0][0])

    def _cancel_others(self, link: Link) -> None:
        """Ask the run that has the thread, and all that wait for it, to stop; not those that were started later."""
        link.run(
            "INSERT INTO inbox (log_id, wish_id, run_id, kind, body, at) "
            f"SELECT log_id, ?, run_id, 'cancel', ?, {link.now} FROM runs WHERE (started_at, run_id) < (?, ?) AND "
            "(run_id = (SELECT holder FROM threads WHERE thread_id = ?) OR (thread_id = ? AND status = 'queued')) "
            "ON CONFLICT (log_id, wish_id) DO NOTHING",
            *(f"interrupt-{self._run_id}", REASON, self._record.started_at, self._run_id),
            *(self._thread_id, self._thread_id),
        )
        link.notify(WISHES)

    def _check_begun(self, link: Link) -> None:
        """Raise unless this very run was begun before, by a try whose outcome was lost."""
        log = link.run("SELECT owner, epoch FROM logs WHERE log_id = ?", self._run_id)
        run = link.run("SELECT identity, request FROM runs WHERE run_id = ?", self._run_id)
        if log != [(self._owner, 1)] or run != [self._values[-2:]]:
            raise StoreError(self._place, f"there is a run {self._run_id!r} already")


def take_thread(link: Link, run_id: str, thread_id: str) -> str | None:
    """Give a queued run its thread, if it is its turn; else return the run before it."""
    found = link.run("SELECT started_at FROM runs WHERE run_id = ? AND status = 'queued'", run_id)
    if not found:
        return None
    before = _run_before(link, thread_id, run_id, found[0][0])
    if before is None:
        link.run("UPDATE threads SET holder = ? WHERE thread_id = ?", run_id, thread_id)
        link.run("UPDATE runs SET status = 'running' WHERE run_id = ?", run_id)
    return before


def _run_before(link: Link, thread_id: str, run_id: str, started_at: float) -> str | None:
    """Return the run that waits before this one, or has the thread."""
    found = link.run(
        f"SELECT COALESCE(({_BEFORE}), holder) FROM threads WHERE thread_id = ?",
        *(thread_id, started_at, run_id, thread_id),
    )
    return found[0][0] if found and found[0][0] != run_id else None
