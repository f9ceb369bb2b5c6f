"""Checks of a store: finds what cannot be read, does not fit together, or was left behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..core.errors import LogUnreadable, StoreError
from ..core.events import RunFinished, RunStarted
from ..core.stores import StoredLog
from ..tasks.task import TaskRecord
from .lanes import Link
from .packs import unpack_events
from .reading import BEING_PRUNED, UNREADABLE
from .schema import SCHEMA_VERSION, check_version
from .sql import DECODERS, Database, SqlStore

MOST_FINDINGS = 100
"""Findings of one kind that are listed; the rest are counted."""
_PAGE = 2_000
_DECODERS = {
    **DECODERS,
    "json": msgspec.json.Decoder(msgspec.Raw).decode,
    "task": msgspec.json.Decoder(TaskRecord).decode,
    "events": unpack_events,
}


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be. A warning marks what a dead process left, and is repaired by the next."""

    code: str
    what: str
    """A run, thread or file."""
    problem: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}: {self.problem}"


Progress = Callable[[str, int, int], None]
"""Receives what is being checked, how many of it are done, and how many there are."""
IsGone = Callable[[str], bool]
"""Tells whether an owner of runs is known to be gone, though its lease is not over."""
Fold = Callable[[str, StoredLog], str | None]
"""Folds a log and returns what is wrong with it, in words."""


async def check(
    store: SqlStore,
    progress: Progress | None = None,
    is_gone: IsGone = lambda owner: False,
    fold: Fold = lambda log_id, log: None,
) -> list[Finding]:
    """Check everything, changing nothing. Everything stored is read: a large database takes minutes."""
    database, report = store.database, progress or _report_to_nobody
    try:
        version = check_version(await database.version(), store.place)
    except StoreError as exc:
        if not exc.damaged:
            raise
        return [_unreadable(exc)]
    if version < SCHEMA_VERSION:
        problem = f"its schema is {version}, this version has {SCHEMA_VERSION}: run retinue db migrate"
        return [Finding(code="schema", what=store.place, problem=problem)]
    findings = _Findings()
    checks: list[Callable[[Database, _Findings, Progress], Awaitable[None]]] = [
        _check_files,
        partial(_check_logs, store=store, fold=fold),
        _check_bodies,
        partial(_check_relations, is_gone=is_gone),
    ]
    for one in checks:
        try:
            await one(database, findings, report)
        except StoreError as exc:
            if exc.transient:
                raise
            findings.add(_unreadable(exc))
    return findings.all()


def _unreadable(problem: StoreError) -> Finding:
    return Finding(code="unreadable", what=problem.place, problem=problem.problem)


class _Findings:
    """Findings, of each kind only so many."""

    def __init__(self) -> None:
        self._found: dict[str, list[Finding]] = {}
        self._more: dict[str, int] = {}

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            alike = self._found.setdefault(finding.code, [])
            if len(alike) < MOST_FINDINGS:
                if finding not in alike:
                    alike.append(finding)
            else:
                self._more[finding.code] = self._more.get(finding.code, 0) + 1

    def all(self) -> list[Finding]:
        found = list[Finding]()
        for code, alike in self._found.items():
            found += alike
            if more := self._more.get(code):
                severity = alike[-1].severity
                found.append(Finding(code=code, what=f"{more:,} more", problem="of the same kind", severity=severity))
        return found


def _report_to_nobody(what: str, done: int, total: int) -> None:
    return


async def _check_files(database: Database, findings: _Findings, report: Progress) -> None:
    for problem in await database.problems():
        findings.add(Finding(code="integrity", what=database.place, problem=f"{problem}: restore a backup"))


async def _check_logs(database: Database, findings: _Findings, report: Progress, store: SqlStore, fold: Fold) -> None:
    """Every log can be read and folded, and says how its run ended. Nothing is folded that was pruned."""
    total = await database.read(lambda link: link.run("SELECT COUNT(*) FROM logs")[0][0])
    query = (
        "SELECT logs.log_id, pruned, status, ended_at IS NOT NULL FROM logs LEFT JOIN runs ON run_id = logs.log_id "
        f"WHERE logs.log_id > ? ORDER BY logs.log_id LIMIT {_PAGE}"
    )
    done, last = 0, ""
    while logs := await database.read(lambda link, last=last: link.run(query, last)):
        for log_id, pruned, status, has_ended in logs:
            what = f"run {log_id!r}"
            try:
                stored = await store.read_log(log_id)
            except LogUnreadable as exc:
                findings.add(Finding(code="log", what=f"event {exc.seq} of {what}", problem=exc.reason))
                continue
            if stored is None or pruned == BEING_PRUNED:
                continue
            if has_ended and _lacks_end(stored, log_id, status):
                problem = f"the log is truncated: the run is {status}, but its log does not end so"
                findings.add(Finding(code="truncated", what=what, problem=problem))
            elif not pruned and (problem := fold(log_id, stored)):
                findings.add(Finding(code="fold", what=what, problem=problem))
        done, last = done + len(logs), logs[-1][0]
        report("logs", done, total)


def _lacks_end(log: StoredLog, root: str, status: str) -> bool:
    """Return whether the end of a run is missing from its log. A run that never began may have no events at all."""
    own = [row.event for row in log.rows if row.event is not None and row.event.run_id == root]
    if not any(isinstance(event, RunStarted) for event in own):
        return status == "completed"
    return not any(isinstance(event, RunFinished) and event.status.is_terminal for event in own)


_BODIES = (
    ("events", "log_id, seq, sub", "body", "events", "run {!r}: event {}"),
    ("runs", "run_id", "identity", "identity", "run {!r}: who it is"),
    ("runs", "run_id", "result", "result", "run {!r}: its result"),
    ("runs", "run_id", "request", "json", "run {!r}: what was asked of it"),
    ("threads", "thread_id", "state", "state", "thread {!r}: its state"),
    ("messages", "thread_id, place", "body", "message", "thread {!r}: message {}"),
    ("inbox", "log_id, wish_id", "body", "json", "run {!r}: wish {!r}"),
    ("inbox", "log_id, wish_id", "reply", "json", "run {!r}: the reply to wish {!r}"),
    ("tasks", "agent, session_id, task_id", "body", "task", "agent {!r}, session {!r}: task {!r}"),
)
"""Tables, their keys, the column that is decoded, as what, and how it is named."""
_NUMBERS = ("seq", "sub", "place")


async def _check_bodies(database: Database, findings: _Findings, report: Progress) -> None:
    """All other JSON can be read."""
    for table, keys, column, kind, name in _BODIES:
        query = f"SELECT COUNT(*) FROM {table}"
        total = await database.read(lambda link, query=query: link.run(query)[0][0])
        done, last = 0, tuple(-1 if key in _NUMBERS else "" for key in keys.split(", "))
        while True:
            look = partial(
                _check_page_of_bodies, table=table, keys=keys, column=column, kind=kind, name=name, last=last
            )
            found, last, seen = await database.read(look)
            findings.add(*found)
            done += seen
            if not seen:
                break
            report(table, done, total)


def _check_page_of_bodies(
    link: Link, table: str, keys: str, column: str, kind: str, name: str, last: tuple[Any, ...]
) -> tuple[list[Finding], tuple[Any, ...], int]:
    rows = link.run(
        f"SELECT {keys}, {column} FROM {table} WHERE ({keys}) > ({', '.join('?' * len(last))}) "
        f"ORDER BY {keys} LIMIT {_PAGE}",
        *last,
    )
    decode, findings = _DECODERS[kind], list[Finding]()
    for *key, body in rows:
        try:
            if body:
                decode(body)
        except UNREADABLE as exc:
            findings.append(Finding(code=kind, what=name.format(*key), problem=f"cannot be read: {exc}"))
    return findings, tuple(rows[-1][:-1]) if rows else last, len(rows)


async def _check_relations(database: Database, findings: _Findings, report: Progress, is_gone: IsGone) -> None:
    """Logs belong to runs, threads are held by runs that have not ended, and a run that works has an owner."""
    findings.add(*await database.read(lambda link: list(_relations(link, is_gone))))


_AGAIN = "the next runtime that opens this database takes it over"


def _relations(link: Link, is_gone: IsGone) -> Iterator[Finding]:
    for (log_id,) in link.run(
        "SELECT DISTINCT log_id FROM events WHERE NOT EXISTS (SELECT 1 FROM logs WHERE logs.log_id = events.log_id) "
        "ORDER BY log_id"
    ):
        yield Finding(code="no_log", what=f"run {log_id!r}", problem="has events, but no log")
    for (log_id,) in link.run(
        "SELECT log_id FROM logs WHERE NOT EXISTS (SELECT 1 FROM runs WHERE run_id = logs.log_id) ORDER BY log_id"
    ):
        yield Finding(code="no_run", what=f"log {log_id!r}", problem="there is no such run")
    for run_id, status in link.run(
        "SELECT run_id, status FROM runs JOIN logs ON logs.log_id = run_id WHERE ended = 1 AND ended_at IS NULL "
        "ORDER BY run_id"
    ):
        problem = f"its log has ended, but the run is {status}: nobody can continue it"
        yield Finding(code="ended", what=f"run {run_id!r}", problem=problem)
    for thread_id, holder, status in link.run(
        "SELECT threads.thread_id, holder, status FROM threads LEFT JOIN runs ON run_id = holder "
        "WHERE holder IS NOT NULL AND (status IS NULL OR ended_at IS NOT NULL) ORDER BY threads.thread_id"
    ):
        how = "is not there" if status is None else f"has ended ({status})"
        problem = f"it is held by run {holder!r}, which {how}: no run can begin on it"
        yield Finding(code="held", what=f"thread {thread_id!r}", problem=problem)
    yield from _owners(link, is_gone)


def _owners(link: Link, is_gone: IsGone) -> Iterator[Finding]:
    for run_id, status in link.run(
        "SELECT run_id, status FROM runs JOIN logs ON logs.log_id = run_id "
        "WHERE status IN ('running', 'queued') AND owner IS NULL AND ended = 0 ORDER BY run_id"
    ):
        problem = f"it is {status}, but no process has it: {_AGAIN}"
        yield Finding(code="ownerless", what=f"run {run_id!r}", problem=problem, severity="warning")
    for log_id, owner, expired in link.run(
        f"SELECT log_id, owner, CASE WHEN boot = ? AND lease_until < {link.lease_now} THEN 1 ELSE 0 END FROM logs "
        "WHERE owner IS NOT NULL ORDER BY log_id",
        link.boot,
    ):
        if is_gone(owner):
            problem = f"the process {owner}, which owns it, is gone: {_AGAIN}"
            yield Finding(code="gone", what=f"run {log_id!r}", problem=problem, severity="warning")
        elif expired:
            problem = f"the lease of its owner {owner} is over: {_AGAIN}"
            yield Finding(code="expired", what=f"run {log_id!r}", problem=problem, severity="warning")
