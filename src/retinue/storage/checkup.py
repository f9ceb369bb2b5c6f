"""Looking a store over: what in it cannot be read, does not fit together, or was left behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..core.errors import StoreError
from ..tasks.task import TaskRecord
from .lanes import Link
from .schema import SCHEMA_VERSION, check_version
from .sql import DECODERS, UNREADABLE, Database, SqlStore

MOST_FINDINGS = 100
"""Findings of one kind that are told one by one."""
_PAGE = 2_000
_DECODERS = {
    **DECODERS,
    "json": msgspec.json.Decoder(msgspec.Raw).decode,
    "task": msgspec.json.Decoder(TaskRecord).decode,
}


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be. A warning is what is left when a process dies, and mends itself."""

    code: str
    what: str
    """Which run, thread or file."""
    problem: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}: {self.problem}"


Progress = Callable[[str, int, int], None]
"""Is told what is being looked at, how many of it have been seen, and how many there are."""


IsGone = Callable[[str], bool]
"""Whether an owner of runs is known to be gone, though its lease is not over."""


async def check(
    store: SqlStore, progress: Progress | None = None, is_gone: IsGone = lambda owner: False
) -> list[Finding]:
    """Look everything over, changing nothing. Everything stored is read: a large database takes minutes."""
    database, tell = store.database, progress or _tell_nobody
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
    looks: list[Callable[[Database, _Findings, Progress], Awaitable[None]]] = [
        _files,
        _events,
        _bodies,
        partial(_relations, is_gone=is_gone),
    ]
    for look in looks:
        try:
            await look(database, findings, tell)
        except StoreError as exc:
            if exc.passes:
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

    def add(self, finding: Finding) -> None:
        alike = self._found.setdefault(finding.code, [])
        if finding in alike:
            return
        if len(alike) < MOST_FINDINGS:
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


def _tell_nobody(what: str, done: int, total: int) -> None:
    return


async def _files(database: Database, findings: _Findings, tell: Progress) -> None:
    for problem in await database.problems():
        findings.add(Finding(code="integrity", what=database.place, problem=f"{problem}: restore a backup"))


class _Place(Struct):
    """Where in the logs the look at events is."""

    log_id: str = ""
    seq: int = 0
    may_have_gaps: bool = False


async def _events(database: Database, findings: _Findings, tell: Progress) -> None:
    """Every event can be read, is where it says, and follows the one before, except where a log was pruned."""
    total = await database.read(lambda link: link.run("SELECT COUNT(*) FROM events")[0][0])
    done, place = 0, _Place()
    while True:
        found, place, seen = await database.read(partial(_look_at_events, place=place))
        for finding in found:
            findings.add(finding)
        done += seen
        if not seen:
            return
        tell("events", done, total)


def _look_at_events(link: Link, place: _Place) -> tuple[list[Finding], _Place, int]:
    rows = link.run(
        f"SELECT log_id, seq, body, held FROM events WHERE (log_id, seq) > (?, ?) ORDER BY log_id, seq LIMIT {_PAGE}",
        place.log_id,
        place.seq,
    )
    findings, place = list[Finding](), msgspec.structs.replace(place)
    for log_id, seq, body, held in rows:
        if log_id != place.log_id:
            log = link.run("SELECT pruned FROM logs WHERE log_id = ?", log_id)
            if not log:
                findings.append(Finding(code="no_log", what=f"run {log_id!r}", problem="has events, but no log"))
            place = _Place(log_id, 0, not log or bool(log[0][0]))
        first = seq - held + 1
        if first != place.seq + 1 and not place.may_have_gaps:
            missing = (
                f"event {first - 1} is" if first == place.seq + 2 else f"events {place.seq + 1} to {first - 1} are"
            )
            findings.append(Finding(code="gap", what=f"run {log_id!r}", problem=f"{missing} missing"))
        place.seq = seq
        if problem := _event_problem(body, first, seq):
            findings.append(Finding(code="event", what=f"event {seq} of run {log_id!r}", problem=problem))
    return findings, place, len(rows)


def _event_problem(body: bytes, first: int, last: int) -> str | None:
    try:
        events: Any = DECODERS["event"](body)
    except UNREADABLE as exc:
        return f"cannot be read: {exc}"
    for seq, event in zip(range(first, last + 1), events, strict=False):
        if event.seq != seq:
            return f"says that it is event {event.seq}"
    return None if len(events) == last - first + 1 else f"holds {len(events)} events, not {last - first + 1}"


_BODIES = (
    ("runs", "run_id", "identity", "identity", "run {!r}: who it is"),
    ("runs", "run_id", "result", "result", "run {!r}: its result"),
    ("runs", "run_id", "decided", "decisions", "run {!r}: the decisions on it"),
    ("threads", "thread_id", "state", "state", "thread {!r}: its state"),
    ("messages", "thread_id, place", "body", "message", "thread {!r}: message {}"),
    ("journal", "log_id, place", "body", "json", "run {!r}: entry {} of its journal"),
    ("tasks", "agent, session_id, task_id", "body", "task", "agent {!r}, session {!r}: task {!r}"),
)
"""Tables, their keys, what is decoded, as what, and what it is called."""


async def _bodies(database: Database, findings: _Findings, tell: Progress) -> None:
    """Whatever is stored as JSON can be read as what it is."""
    for table, keys, column, kind, name in _BODIES:
        query = f"SELECT COUNT(*) FROM {table}"
        total = await database.read(lambda link, query=query: link.run(query)[0][0])
        done, last = 0, tuple(-1 if key == "place" else "" for key in keys.split(", "))
        while True:
            look = partial(_look_at_bodies, table=table, keys=keys, column=column, kind=kind, name=name, last=last)
            found, last, seen = await database.read(look)
            for finding in found:
                findings.add(finding)
            done += seen
            if not seen:
                break
            tell(table, done, total)


def _look_at_bodies(
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


async def _relations(database: Database, findings: _Findings, tell: Progress, is_gone: IsGone) -> None:
    """Logs belong to runs, threads are held by runs that go on, and what goes on has somebody who does it."""
    for finding in await database.read(lambda link: list(_look_at_relations(link, is_gone))):
        findings.add(finding)


_ENDED = "('completed', 'failed', 'cancelled', 'timeout')"
_AGAIN = "the next runtime that opens this database takes it over"


def _look_at_relations(link: Link, is_gone: IsGone) -> Iterator[Finding]:
    for (log_id,) in link.run(
        "SELECT log_id FROM logs WHERE NOT EXISTS (SELECT 1 FROM runs WHERE run_id = log_id) ORDER BY log_id"
    ):
        yield Finding(code="no_run", what=f"log {log_id!r}", problem="there is no such run")
    for thread_id, holder, status in link.run(
        "SELECT threads.thread_id, holder, status FROM threads LEFT JOIN runs ON run_id = holder "
        f"WHERE holder IS NOT NULL AND (status IS NULL OR status IN {_ENDED}) ORDER BY threads.thread_id"
    ):
        how = "is not there" if status is None else f"has ended ({status})"
        problem = f"it is held by run {holder!r}, which {how}: no run can begin on it"
        yield Finding(code="held", what=f"thread {thread_id!r}", problem=problem)
    for run_id, status in link.run(
        "SELECT run_id, status FROM runs JOIN logs ON log_id = run_id "
        "WHERE status IN ('running', 'queued') AND owner IS NULL ORDER BY run_id"
    ):
        problem = f"it is {status}, but no process has it: {_AGAIN}"
        yield Finding(code="ownerless", what=f"run {run_id!r}", problem=problem, severity="warning")
    now = link.clock()
    for log_id, owner, until in link.run(
        "SELECT log_id, owner, lease_until FROM logs WHERE owner IS NOT NULL ORDER BY log_id"
    ):
        if is_gone(owner):
            problem = f"the process {owner}, who has it, is gone: {_AGAIN}"
            yield Finding(code="gone", what=f"run {log_id!r}", problem=problem, severity="warning")
        elif until < now:
            problem = f"nothing has been heard of {owner}, who has it: {_AGAIN}"
            yield Finding(code="expired", what=f"run {log_id!r}", problem=problem, severity="warning")
