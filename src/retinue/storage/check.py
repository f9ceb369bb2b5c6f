"""Checks of a store: reports records that are unreadable, inconsistent, or left behind by a crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.errors import LogUnreadable, StoreError
from ..core.events import RunFinished, RunStarted
from ..core.stores import StoredLog
from ..tasks.task import TaskRecord
from .database import IS_EXPIRED, Database, Link
from .homes import filled_row
from .packs import UNREADABLE, unpack_events
from .references import Cache
from .schema import BEING_PRUNED, NOT_PACKED, newest_version
from .sql import SqlStore, decode_identity, decode_result, decode_state
from .threads import decode_packs

MOST_FINDINGS = 100
"""Findings of one kind that are listed; the rest are counted."""
_PAGE = 2_000
_FEW = 50

_decode_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_task = msgspec.json.Decoder(TaskRecord).decode


class Finding(Struct, frozen=True, kw_only=True):
    """A problem. A warning marks what a crashed process left behind; the next process repairs it."""

    code: str
    what: str
    """A run, thread or file."""
    problem: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}: {self.problem}"


Progress = Callable[[str, int, int], None]
"""Receives the table that is being checked, the number of rows done, and their total."""
IsGone = Callable[[str], bool]
"""Returns whether the process of an owner is known to be gone, though its lease has not expired."""
Fold = Callable[[str, StoredLog], str | None]
"""Folds a log and returns what is wrong with it."""


async def check(
    store: SqlStore,
    progress: Progress = lambda table, done, total: None,
    is_gone: IsGone = lambda owner: False,
    fold: Fold = lambda log_id, log: None,
) -> list[Finding]:
    """Check everything, changing nothing. It reads all that is stored: a large database takes minutes."""
    database = store.database
    try:
        version = await database.version()
    except StoreError as exc:
        if not exc.damaged:
            raise
        return [Finding(code="unreadable", what=exc.place, problem=exc.problem)]
    if version < newest_version():
        problem = f"its schema is {version}, this version has {newest_version()}: run retinue db migrate"
        return [Finding(code="schema", what=store.place, problem=problem)]
    findings = _Findings()
    checks: list[Callable[[], Awaitable[None]]] = [
        partial(_check_files, database, findings),
        partial(_check_logs, store, findings, progress, fold),
        partial(_check_packed, store, findings, progress),
        partial(_check_bodies, database, findings, progress),
        partial(_check_runs, database, findings, progress),
        partial(_check_threads, database, findings, progress),
        partial(_check_relations, database, findings),
        partial(_check_owners, database, findings, is_gone),
    ]
    for run_check in checks:
        try:
            await run_check()
        except StoreError as exc:
            if exc.transient:
                raise
            findings.add("unreadable", exc.place, exc.problem)
    return findings.all()


class _Findings:
    """Findings, at most MOST_FINDINGS of each code."""

    def __init__(self) -> None:
        self._found: dict[str, list[Finding]] = {}
        self._more: Counter[str] = Counter()

    def add(self, code: str, what: str, problem: str, severity: Literal["error", "warning"] = "error") -> None:
        finding = Finding(code=code, what=what, problem=problem, severity=severity)
        alike = self._found.setdefault(code, [])
        if len(alike) >= MOST_FINDINGS:
            self._more[code] += 1
        elif finding not in alike:
            alike.append(finding)

    def all(self) -> list[Finding]:
        for code, more in self._more.items():
            alike = self._found[code]
            alike.append(replace(alike[-1], what=f"{more:,} more", problem="of the same kind"))
        return [finding for alike in self._found.values() for finding in alike]


async def _check_files(database: Database, findings: _Findings) -> None:
    for problem in await database.find_damage():
        findings.add("integrity", database.place, f"{problem}: restore a backup")


_EPOCH = "SELECT epoch FROM logs WHERE log_id = ?"


async def _check_logs(store: SqlStore, findings: _Findings, progress: Progress, fold: Fold) -> None:
    """Check that every log can be read and folded, and ends as the record of its run says."""
    total, done = await store.database.value("SELECT COUNT(*) FROM logs"), 0
    query = (
        "SELECT logs.log_id, epoch, owner, pruned, status, ended_at IS NOT NULL FROM logs LEFT JOIN runs "
        f"ON run_id = logs.log_id WHERE logs.log_id > ? ORDER BY logs.log_id LIMIT {_PAGE}"
    )
    async for page in store.database.pages(query, ("",)):
        for log_id, epoch, owner, pruned, status, has_ended in page:
            what = f"run {log_id!r}"
            try:
                stored = await store.read_log(log_id)
            except LogUnreadable as exc:
                findings.add("log", f"event {exc.seq} of {what}", exc.reason)
                continue
            if stored is None or pruned == BEING_PRUNED:
                continue
            waits = owner is None and status not in (None, "running", "queued")
            if (has_ended or waits) and _lacks_end(stored, log_id, status, bool(has_ended)):
                if (
                    not waits or await store.database.value(_EPOCH, log_id) == epoch
                ):  # no process has continued the run since
                    problem = f"the log is truncated: the run is {status}, but its log does not end so"
                    findings.add("truncated", what, problem)
            elif not pruned and (problem := fold(log_id, stored)):
                findings.add("fold", what, problem)
        done += len(page)
        progress("logs", done, total)


def _lacks_end(log: StoredLog, root: str, status: str | None, has_ended: bool) -> bool:
    """Return whether the end or suspension of a run is missing from its log. A run that never began needs no events."""
    events = [row.event for row in log.rows if isinstance(row.event, RunStarted | RunFinished)]
    own = [event for event in events if event.run_id == root]
    if not own:
        return status == "completed" or not has_ended
    return isinstance(own[-1], RunStarted) or own[-1].status.is_terminal is not has_ended


async def _check_packed(store: SqlStore, findings: _Findings, progress: Progress) -> None:
    """Check that the deltas of packed logs can be read, so that every event is there."""
    where = f"packed <> {NOT_PACKED} AND pruned = 0"
    total, done = await store.database.value(f"SELECT COUNT(*) FROM logs WHERE {where}"), 0
    query = f"SELECT log_id FROM logs WHERE {where} AND log_id > ? ORDER BY log_id LIMIT {_PAGE}"
    async for page in store.database.pages(query, ("",)):
        for (log_id,) in page:
            try:
                await _check_events(store, log_id, findings)
            except StoreError as exc:
                if exc.transient:
                    raise
                findings.add("log", f"run {log_id!r}", exc.problem)
        done += len(page)
        progress("packs", done, total)


async def _check_events(store: SqlStore, log_id: str, findings: _Findings) -> None:
    last, ended = 0, False
    while not ended and (found := await store.read_events(log_id, last)) is not None:
        events, ended = found
        for event in events:
            if event.seq != last + 1:
                findings.add("log", f"event {last + 1} of run {log_id!r}", "it is missing")
            last = event.seq
        if not events:
            return


async def _check_runs(database: Database, findings: _Findings, progress: Progress) -> None:
    """Check requests and results, with the texts they refer to."""
    total, done = await database.value("SELECT COUNT(*) FROM runs"), 0
    cache = Cache()
    query = f"SELECT run_id, log_id, request, result FROM runs WHERE run_id > ? ORDER BY run_id LIMIT {_FEW}"

    def read(link: Link, after: str) -> list[tuple[str, list[bytes | Exception | None]]]:
        return [
            (run_id, [_filled(link, log_id, column, cache) for column in columns])
            for run_id, log_id, *columns in link.run(query, after)
        ]

    last = ""
    while page := await database.read(partial(read, after=last)):
        for run_id, (request, result) in page:
            for code, body, decode, what in (
                ("json", request, _decode_json, "what was asked of it"),
                ("result", result, decode_result, "its result"),
            ):
                try:
                    if isinstance(body, Exception):
                        raise body
                    if body:
                        decode(body)
                except UNREADABLE as exc:
                    findings.add(code, f"run {run_id!r}: {what}", f"cannot be read: {exc}")
        last = page[-1][0]
        done += len(page)
        progress("runs", done, total)


def _filled(link: Link, log_id: str, body: bytes | None, cache: Cache) -> bytes | Exception | None:
    try:
        return filled_row(link, log_id, body, cache)
    except UNREADABLE as exc:
        return exc


async def _check_threads(database: Database, findings: _Findings, progress: Progress) -> None:
    """Check that the messages of each thread can be read, none missing."""
    total, done = await database.value("SELECT COUNT(*) FROM threads"), 0
    query = f"SELECT thread_id FROM threads WHERE thread_id > ? ORDER BY thread_id LIMIT {_PAGE}"
    messages = "SELECT last, held, body FROM messages WHERE thread_id = ? ORDER BY last"
    async for page in database.pages(query, ("",)):
        for (thread_id,) in page:
            try:
                decode_packs(await database.rows(messages, thread_id))
            except UNREADABLE as exc:
                findings.add("message", f"thread {thread_id!r}: its messages", f"cannot be read: {exc}")
        done += len(page)
        progress("messages", done, total)


class _AnyText:
    """Homes for checks of rows without the texts that they refer to."""

    def part(self, thread_id: str, place: int, start: int, length: int) -> bytes:
        return b"x"

    def whole(self, thread_id: str, first: int, last: int) -> bytes:
        return b'{"role":"user"}'

    def said(self, start: int, length: int) -> bytes:
        return b"x"


_BODIES: tuple[tuple[str, str, str, str, Callable[[bytes], object], str], ...] = (
    ("events", "events", "log_id, seq, sub", "body", partial(unpack_events, homes=_AnyText()), "run {!r}: event {}"),
    ("identity", "runs", "run_id", "identity", decode_identity, "run {!r}: who it is"),
    ("state", "threads", "thread_id", "state", decode_state, "thread {!r}: its state"),
    ("json", "inbox", "log_id, wish_id", "body", _decode_json, "run {!r}: wish {!r}"),
    ("json", "inbox", "log_id, wish_id", "reply", _decode_json, "run {!r}: the reply to wish {!r}"),
    ("task", "tasks", "agent, session_id, task_id", "body", _decode_task, "agent {!r}, session {!r}: task {!r}"),
)
"""Columns of JSON: the code of a finding, table, key, column, decoder, and a name for people."""
_NUMBERS = ("seq", "sub")


async def _check_bodies(database: Database, findings: _Findings, progress: Progress) -> None:
    """Check that all other JSON can be read."""
    for code, table, key, column, decode, name in _BODIES:
        total, done = await database.value(f"SELECT COUNT(*) FROM {table}"), 0
        start = [-1 if part in _NUMBERS else "" for part in key.split(", ")]
        query = (
            f"SELECT {key}, {column} FROM {table} WHERE ({key}) > ({', '.join('?' * len(start))}) "
            f"ORDER BY {key} LIMIT {_PAGE}"
        )
        async for page in database.pages(query, start):
            for *at, body in page:
                try:
                    if body:
                        decode(body)
                except UNREADABLE as exc:
                    findings.add(code, name.format(*at), f"cannot be read: {exc}")
            done += len(page)
            progress(table, done, total)


_NO_LOG = """SELECT DISTINCT log_id FROM events
    WHERE NOT EXISTS (SELECT 1 FROM logs WHERE logs.log_id = events.log_id) ORDER BY log_id"""
_NO_RUN = """SELECT log_id FROM logs
    WHERE NOT EXISTS (SELECT 1 FROM runs WHERE run_id = logs.log_id) ORDER BY log_id"""
_ENDED = """SELECT run_id, status FROM runs JOIN logs ON logs.log_id = run_id
    WHERE ended = 1 AND ended_at IS NULL ORDER BY run_id"""
# The log of a run holds the threads of children, too, until it ends, which may be after the run.
_HELD = """SELECT threads.thread_id, holder, COALESCE('has ended (' || status || ')', 'is not there') FROM threads
    LEFT JOIN runs ON run_id = holder LEFT JOIN logs ON logs.log_id = holder WHERE holder IS NOT NULL
    AND (status IS NULL OR ended = 1 OR (ended_at IS NOT NULL AND runs.thread_id = threads.thread_id))
    ORDER BY threads.thread_id"""
_OWNERLESS = """SELECT run_id, status FROM runs JOIN logs ON logs.log_id = run_id
    WHERE status IN ('running', 'queued') AND owner IS NULL AND ended = 0 AND engine IS NULL ORDER BY run_id"""
_UNPACKED = f"""SELECT logs.log_id FROM logs JOIN runs ON run_id = logs.log_id WHERE ended = 1 AND packed = {NOT_PACKED}
    AND pruned = 0 AND ended_at < wall_seconds() - 3600 ORDER BY logs.log_id"""
_TWICE = f"""SELECT DISTINCT packs.log_id FROM packs LEFT JOIN logs ON logs.log_id = packs.log_id
    WHERE COALESCE(packed, {NOT_PACKED}) = {NOT_PACKED} ORDER BY packs.log_id"""
_TAKEOVER = "the next runtime that opens this database takes it over"
_RELATIONS = (
    ("no_log", "run {!r}", "has events, but no log", _NO_LOG),
    ("packed", "run {!r}", "has packs, though its log is not packed", _TWICE),
    ("unpacked", "run {!r}", "it has ended, but its log is not packed yet: the next runtime does that", _UNPACKED),
    ("no_run", "log {!r}", "there is no such run", _NO_RUN),
    ("ended", "run {!r}", "its log has ended, but the run is {1}: nobody can continue it", _ENDED),
    ("held", "thread {!r}", "it is held by run {1!r}, which {2}: no run can begin on it", _HELD),
    ("ownerless", "run {!r}", f"it is {{1}}, but no process has it: {_TAKEOVER}", _OWNERLESS),
)
"""Rows that do not fit together: code, name for people, problem with columns of the query, query."""


async def _check_relations(database: Database, findings: _Findings) -> None:
    """Check that logs belong to runs, threads are held by runs that have not ended, and working runs have owners."""
    for code, name, problem, query in _RELATIONS:
        for row in await database.rows(query):
            severity = "warning" if code in ("ownerless", "unpacked") else "error"
            findings.add(code, name.format(*row), problem.format(*row), severity)


async def _check_owners(database: Database, findings: _Findings, is_gone: IsGone) -> None:
    query = f"SELECT log_id, owner, {IS_EXPIRED} FROM logs WHERE owner IS NOT NULL ORDER BY log_id"
    for log_id, owner, expired in await database.rows(query):
        if is_gone(owner):
            problem = f"the process {owner}, which owns it, is gone: {_TAKEOVER}"
            findings.add("gone", f"run {log_id!r}", problem, "warning")
        elif expired:
            problem = f"the lease of its owner {owner} is over: {_TAKEOVER}"
            findings.add("expired", f"run {log_id!r}", problem, "warning")
