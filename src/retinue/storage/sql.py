"""A store in SQL: threads, runs, logs and inboxes, with the same statements for every database."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from ..core.budgets import BudgetTable
from ..core.concurrency import join
from ..core.errors import OwnershipLost, StoreError
from ..core.events import Event
from ..core.gate import GateTable
from ..core.runs import RunIdentity, RunResult
from ..core.state import PersistedState
from ..core.stores import (
    IDLE,
    PAGE_BYTES,
    STATUSES,
    THREADS,
    WISHES,
    Conversation,
    LogBatch,
    OpenLog,
    Place,
    Placement,
    RunFacts,
    RunRecord,
    StoredLog,
    ThreadRecord,
    ThreadSummary,
    ThreadUpdate,
    Watch,
    WhenBusy,
    Wish,
    title_of,
)
from .budgets import SqlBudgetTable
from .database import IS_EXPIRED, Database, Later, Link
from .gates import SqlGateTable
from .homes import filled_row
from .packs import UNREADABLE
from .prune import delete_thread
from .reads import last_event, read_deltas, read_events, read_log
from .references import Cache
from .schema import COUNTS
from .threads import ThreadWrite, decode_packs, literally, thread_summary
from .writes import (
    COUNT_LOSS,
    OWNED,
    BatchWrite,
    RunBeginning,
    leave_threads,
    make_due,
    name_write,
    note_deaths,
    run_write,
    take_thread,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

decode_state = msgspec.json.Decoder(PersistedState).decode
decode_result = msgspec.json.Decoder(RunResult).decode


def _decode_filled(body: Any) -> RunResult:
    if isinstance(body, Exception):
        raise body
    return decode_result(body)


def _without_messages(record: RunRecord) -> RunRecord:
    if record.result is not None and record.result.messages:
        record.result = replace(record.result, messages=())
    return record


decode_identity = msgspec.json.Decoder(RunIdentity).decode


_MOST_ENDED = 10_000
_MOST_VALUES = 1_000
"""Values in one statement."""
_IS_ROOT = "log_id = run_id AND parent_run_id IS NULL"
_LOST = "COALESCE((SELECT lost FROM logs WHERE logs.log_id = runs.log_id), 0)"
_RUN = f"runs.identity, runs.started_at, runs.result, runs.status, {_LOST}, runs.run_id, runs.log_id"
_HOLDER = "SELECT holder FROM threads JOIN logs ON logs.log_id = holder WHERE thread_id = ? AND ended = 0"
"""A log that has ended holds no thread."""
_OPEN_RUNS = (
    "SELECT run_id, request FROM runs WHERE thread_id = ? AND ended_at IS NULL AND request IS NOT NULL "
    "ORDER BY COALESCE(place, 0), started_at, run_id"
)
"""A queued run has a place; the one that has the thread had none, or a lower one."""
_LEFT = (
    "SELECT logs.log_id, owner, epoch, lease_until, TRUE, engine, lost FROM logs JOIN runs ON run_id = logs.log_id "
    "WHERE owner IS NULL AND turn IS NOT NULL AND queue IS NULL AND ended = 0"
)
"""The logs without an engine that have work and no owner."""
_ALL, _NEWEST = 2**62, (float("inf"), "")
"""The limit and the place of a list that has none."""


async def _begin_after(
    before: asyncio.Future[str | None], begin: Callable[[], asyncio.Future[str | None]]
) -> str | None:
    await join([before])
    return await begin()


def _read_thread(link: Link, thread_id: str) -> tuple[Any, list[Any]] | None:
    found = link.run("SELECT user_id, state FROM threads WHERE thread_id = ?", thread_id)
    if not found or found[0][1] is None:
        return None
    return found[0], link.run("SELECT last, held, body FROM messages WHERE thread_id = ? ORDER BY last", thread_id)


def _only(unowned: bool, user_id: str | None, **given: str | None) -> tuple[str, list[str]]:
    """Return SQL that selects by the columns whose values are given, and these values."""
    user = {"(user_id = ? OR user_id IS NULL)" if unowned else "user_id = ?": user_id}
    wanted = user | {f"{name} = ?": value for name, value in given.items()}
    values = {condition: value for condition, value in wanted.items() if value is not None}
    return " AND ".join(["TRUE", *values]), [*values.values()]


class SqlStore:
    """A store in a database: threads, runs, owners of logs and inboxes. The methods do what DurableStore says."""

    has_queues = False
    """True if workers can share it: it has the queues of their legs."""

    def __init__(self, database: Database) -> None:
        self.database, self.place = database, database.place
        self._cache = Cache()
        self.ended: deque[str] = deque(maxlen=_MOST_ENDED)
        """The logs that this process has ended: a packer rewrites them soon."""
        self._unsure: set[tuple[str, str]] = set()
        """Claims whose outcome was lost: log and owner."""
        self._beginnings: dict[str, asyncio.Future[str | None]] = {}
        """The last run that is being begun on each thread: the next one comes after it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r})"

    async def open(self) -> None:
        """Create or migrate the schema; raise StoreError if the database cannot be used."""
        await self.database.open()

    async def close(self) -> None:
        """Finish the writes that wait, then close all connections."""
        await self.database.close()

    def gate_table(self) -> GateTable:
        """Return the rows that the gates of provider accounts share."""
        return SqlGateTable(self.database, notifies=self.has_queues)

    def budget_table(self) -> BudgetTable:
        """Return the accounts of budgets, which all processes of the database share."""
        return SqlBudgetTable(self.database)

    async def load_thread(self, thread_id: str) -> ThreadRecord | None:
        return self._decode_thread(thread_id, await self.database.read(lambda link: _read_thread(link, thread_id)))

    async def load_conversation(self, thread_id: str) -> Conversation:
        def read(link: Link) -> tuple[Any, list[Any]]:
            return _read_thread(link, thread_id), link.run(_OPEN_RUNS, thread_id)

        found, requests = await self.database.read(read)
        return Conversation(thread=self._decode_thread(thread_id, found), requests=requests)

    def _decode_thread(self, thread_id: str, found: Any) -> ThreadRecord | None:
        if found is None:
            return None
        (user_id, state), rows = found
        what = f"thread {thread_id!r}"
        return ThreadRecord(
            thread_id=thread_id,
            user_id=user_id,
            messages=tuple(self._decode(decode_packs, rows, what)),
            state=self._decode(decode_state, state, what),
        )

    async def save_thread(self, record: ThreadRecord) -> None:
        with self._reported(f"thread {record.thread_id!r} cannot be stored"):
            write = ThreadWrite(self.place, ThreadUpdate(record))
        await self.database.write(write, record.thread_id, threads=[record.thread_id])

    async def load_run(self, run_id: str) -> RunRecord | None:
        query = f"SELECT {_RUN} FROM runs WHERE run_id = ?"
        found = await self.database.read(lambda link: self._runs(link, link.run(query, run_id)))
        return self._decode_run(found[0]) if found else None

    def _runs(self, link: Link, rows: Sequence[Any], *, whole: bool = True) -> list[Any]:
        """Return rows of runs with the texts that their results refer to, or with why these cannot be read."""
        found: list[Any] = []
        for identity, started_at, result, *others, log_id in rows:
            try:
                filled: Any = filled_row(link, log_id, result, self._cache, whole=whole)
            except UNREADABLE as exc:
                filled = exc
            found.append((identity, started_at, filled, *others, log_id))
        return found

    async def save_run(self, record: RunRecord) -> None:
        identity = record.identity
        with self._reported(f"run {identity.run_id!r} cannot be stored"):
            write = run_write(record)

        def save(link: Link) -> None:
            write(link)
            if record.has_ended:
                leave_threads(link, identity.run_id, [identity.thread_id])

        await self.database.write(save, record.log_id or identity.run_id, threads=[identity.thread_id])

    async def list_runs(
        self,
        thread_id: str | None = None,
        *,
        user_id: str | None = None,
        status: str | None = None,
        limit: int | None = None,
        before: Place | None = None,
        unowned: bool = False,
        on_unreadable: Callable[[StoreError], None] | None = None,
    ) -> list[RunRecord]:
        """Return root runs, newest first, whose results have no messages. Pass each that cannot be read to
        `on_unreadable`, or log a warning."""
        only, values = _only(unowned, user_id, thread_id=thread_id, status=status)
        query = (
            f"SELECT {_RUN} FROM runs WHERE {_IS_ROOT} AND {only} AND (started_at, run_id) < (?, ?) "
            "ORDER BY started_at DESC, run_id DESC LIMIT ?"
        )
        runs: list[RunRecord] = []
        given = (*values, *(before or _NEWEST), _ALL if limit is None else limit)
        for row in await self.database.read(lambda link: self._runs(link, link.run(query, *given), whole=False)):
            try:
                runs.append(_without_messages(self._decode_run(row)))
            except StoreError as exc:
                (on_unreadable or _log.warning)(exc)
        return runs

    async def list_threads(
        self,
        user_id: str | None = None,
        *,
        thread_id: str | None = None,
        status: str | None = None,
        search: str | None = None,
        changed_after: float | None = None,
        limit: int | None = None,
        before: Place | None = None,
        unowned: bool = False,
    ) -> list[ThreadSummary]:
        newest = f"SELECT MAX(started_at) FROM runs WHERE runs.thread_id = threads.thread_id AND {_IS_ROOT}"
        only, given = _only(unowned, user_id, thread_id=thread_id)
        values: list[Any] = [*given]
        if status == IDLE:
            only += " AND rank IS NULL"
        elif status is not None:
            only, values = f"{only} AND rank = ?", [*values, STATUSES.index(status)]
        if search is not None:
            only, values = f"{only} AND search LIKE ? ESCAPE '!'", [*values, f"%{literally(search.casefold())}%"]
        if changed_after is not None:
            only, values = f"{only} AND changed_at > ?", [*values, changed_after]
        columns = ", ".join(["thread_id", "user_id", "changed_at", "title", "rank", *COUNTS])
        query = (
            f"SELECT used_at, {columns} FROM (SELECT COALESCE(({newest}), made_at) AS used_at, {columns} "
            f"FROM threads WHERE {only}) AS used WHERE used_at IS NOT NULL AND (used_at, thread_id) < (?, ?) "
            "ORDER BY used_at DESC, thread_id DESC LIMIT ?"
        )
        found = await self.database.rows(query, *values, *(before or _NEWEST), _ALL if limit is None else limit)
        return [thread_summary(*row) for row in found]

    async def name_thread(self, thread_id: str, title: str) -> bool:
        return await self.database.write(name_write(thread_id, title), thread_id, threads=[thread_id])

    async def create_thread(self, record: ThreadRecord, *, is_listed: bool = True) -> bool:
        with self._reported(f"thread {record.thread_id!r} cannot be stored"):
            write = ThreadWrite(self.place, ThreadUpdate(record))
        title, at = title_of(record.messages), "wall_seconds()" if is_listed else "NULL"

        def create(link: Link) -> bool:
            made = link.run(
                "INSERT INTO threads (thread_id, user_id, title, search, made_at, changed_at) "
                f"VALUES (?, ?, NULLIF(?, ''), NULLIF(?, ''), {at}, wall_seconds()) "
                "ON CONFLICT (thread_id) DO NOTHING RETURNING thread_id",
                *(record.thread_id, record.user_id, title, title.casefold()),
            )
            if is_listed:
                link.notify(f"{THREADS}{record.user_id or ''}")
            if made:
                write(link)
            return bool(made)

        return await self.database.write(create, record.thread_id, threads=[record.thread_id])

    async def delete_thread(self, thread_id: str) -> bool:
        return await delete_thread(self.database, thread_id)

    async def user_of_thread(self, thread_id: str) -> tuple[str | None] | None:
        found = await self.database.rows("SELECT user_id FROM threads WHERE thread_id = ?", thread_id)
        return (found[0][0],) if found else None

    async def ends_of(self, run_ids: Sequence[str]) -> dict[str, float]:
        """Return when runs ended, of those that have."""
        ends = dict[str, float]()
        for first in range(0, len(run_ids), _MOST_VALUES):
            some = run_ids[first : first + _MOST_VALUES]
            marks = ", ".join("?" * len(some))
            query = f"SELECT run_id, ended_at FROM runs WHERE run_id IN ({marks}) AND ended_at IS NOT NULL"
            ends.update(await self.database.rows(query, *some))
        return ends

    def begin_run(
        self,
        record: RunRecord,
        request: bytes,
        owner: str | None,
        lease: float,
        when_busy: WhenBusy = "reject",
        placement: Placement | None = None,
        saved_at: float | None = None,
    ) -> asyncio.Future[str | None]:
        identity = record.identity
        with self._reported(f"run {identity.run_id!r} cannot be stored"):
            beginning = RunBeginning(self.place, record, request, owner, lease, when_busy, placement, saved_at)
        thread_id = identity.thread_id

        def begin() -> asyncio.Future[str | None]:
            return self.database.write(beginning.write, identity.run_id, threads=[thread_id])

        before = self._beginnings.get(thread_id)
        begun = begin() if before is None else asyncio.create_task(_begin_after(before, begin))
        self._beginnings[thread_id] = begun
        begun.add_done_callback(partial(self._forget_beginning, thread_id))
        return begun

    def _forget_beginning(self, thread_id: str, begun: asyncio.Future[str | None]) -> None:
        if self._beginnings.get(thread_id) is begun:
            del self._beginnings[thread_id]

    async def saved_at(self, thread_id: str) -> float:
        return await self.database.value("SELECT saved_at FROM threads WHERE thread_id = ?", thread_id) or 0.0

    async def take_thread(self, run_id: str) -> str | None:
        thread_id = await self.database.value("SELECT thread_id FROM runs WHERE run_id = ?", run_id)
        if thread_id is None:
            raise StoreError(self.place, f"there is no run {run_id!r}")
        return await self.database.write(lambda link: take_thread(link, run_id, thread_id), run_id, threads=[thread_id])

    async def hold_thread(self, log_id: str, epoch: int, thread_id: str, user_id: str | None) -> str | None:
        def hold(link: Link) -> str | None:
            if not link.run(f"SELECT 1 FROM logs WHERE {OWNED}", log_id, epoch):
                raise OwnershipLost(self.place, log_id)
            holder = link.value(_HOLDER, thread_id)
            if holder not in (None, log_id):
                return holder
            # The root run of the log may refer to what its sub-agent says: its thread goes with that of the root run.
            root = "SELECT thread_id FROM runs WHERE run_id = ? AND thread_id <> ?"
            link.run(
                f"INSERT INTO threads (thread_id, user_id, holder, above) VALUES (?, ?, ?, ({root})) "
                "ON CONFLICT (thread_id) DO UPDATE SET holder = excluded.holder, above = excluded.above",
                *(thread_id, user_id, log_id, log_id, thread_id),
            )
            return None

        return await self.database.write(hold, log_id, threads=[thread_id])

    async def holder_of(self, thread_id: str) -> str | None:
        return await self.database.value(_HOLDER, thread_id)

    def write(self, batch: LogBatch) -> asyncio.Future[None]:
        with self._reported(f"run {batch.log_id!r} cannot be stored"):
            work = BatchWrite(self.place, batch)
        written = self.database.write(work.write, batch.log_id, threads=work.threads)
        if batch.ended:
            written.add_done_callback(partial(self._note_end, batch.log_id))
        return written

    def _note_end(self, log_id: str, written: asyncio.Future[None]) -> None:
        if not written.cancelled() and written.exception() is None:
            self.ended.append(log_id)

    async def read_events(
        self, log_id: str, after: int = 0, limit: int = 1000, most_bytes: int = PAGE_BYTES
    ) -> tuple[list[Event], bool] | None:
        with self._reported(f"what is stored of an event of run {log_id!r} after number {after} cannot be read"):
            return await self.database.read(
                lambda link: read_events(link, log_id, after, limit, most_bytes, self._cache)
            )

    async def read_deltas(self, log_id: str, after: int, upto: int) -> list[Event]:
        with self._reported(f"what is stored of a delta of run {log_id!r} after number {after} cannot be read"):
            return await self.database.read(lambda link: read_deltas(link, log_id, after, upto, self._cache))

    async def last_event(self, log_id: str) -> int:
        return await self.database.read(lambda link: last_event(link, log_id))

    async def read_log(self, log_id: str) -> StoredLog | None:
        return await self.database.read(lambda link: read_log(link, log_id, self.place, self._cache))

    async def read_request(self, run_id: str) -> bytes | None:
        def read(link: Link) -> bytes | None:
            for log_id, request in link.run("SELECT log_id, request FROM runs WHERE run_id = ?", run_id):
                return filled_row(link, log_id, request, self._cache)
            return None

        with self._reported(f"what is stored of the request of run {run_id!r} cannot be read"):
            return await self.database.read(read)

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        return self.database.watch(topic)

    async def claim(
        self, log_id: str, owner: str, lease: float, *, gone: str | None = None, seen: float | None = None
    ) -> int | None:
        """As DurableStore says. A claim that is retried because its outcome is unknown succeeds again."""
        key = log_id, owner
        tried = key in self._unsure

        def claim(link: Link) -> Later:
            nonlocal tried
            mine, tried = owner if tried else None, True
            free = (
                "log_id = ? AND ended = 0 AND (owner IS NULL OR owner = ? "
                "OR (boot = boot_id() AND lease_until < boot_seconds()) "
                "OR (owner = ? AND lease_until = COALESCE(?, lease_until)))"
            )
            given = log_id, mine, gone, seen
            note_deaths(link, f"SELECT owner FROM logs WHERE {free} AND owner <> ?", *given, owner)
            return link.ask(
                f"UPDATE logs SET {COUNT_LOSS}, owner = ?, epoch = epoch + 1, lease_until = boot_seconds() + ?, "
                f"boot = boot_id() WHERE {free} RETURNING epoch",
                *(owner, owner, owner, lease, *given),
            )

        try:
            claimed: Any = await self.database.write(claim, log_id)
        except StoreError as exc:
            if exc.transient:
                self._unsure.add(key)
            raise
        self._unsure.discard(key)
        return claimed[0][0] if claimed else None

    async def deaths(self, seconds: float) -> dict[str, float]:
        query = "SELECT owner, wall_seconds() - at FROM deaths WHERE at > wall_seconds() - ?"
        return dict(await self.database.rows(query, seconds))

    async def owner_of(self, log_id: str) -> str | None:
        return await self.database.value("SELECT owner FROM logs WHERE log_id = ?", log_id)

    async def facts_of(self, run_id: str) -> RunFacts | None:
        query = f"SELECT {_RUN}, owner, engine FROM runs LEFT JOIN logs ON logs.log_id = runs.log_id WHERE run_id = ?"

        def read(link: Link) -> list[tuple[Any, Any]]:
            rows = link.run(query, run_id)
            runs = self._runs(link, [row[:-2] for row in rows])
            return [(run, row[-2:]) for run, row in zip(runs, rows, strict=True)]

        for run, others in await self.database.read(read):
            return RunFacts(self._decode_run(run), *others)
        return None

    async def renew(self, owner: str, lease: float) -> set[str]:
        def renew(link: Link) -> Later:
            # Lock the logs in the order in which everyone locks them.
            mine = f"SELECT log_id FROM logs WHERE owner = ? ORDER BY log_id{link.locking}"
            return link.ask(
                "UPDATE logs SET lease_until = boot_seconds() + ?, boot = boot_id() "
                f"WHERE owner = ? AND log_id IN ({mine}) RETURNING log_id",
                *(lease, owner, owner),
            )

        renewed: Any = await self.database.write(renew)
        return {log_id for (log_id,) in renewed}

    async def open_logs(self, log_id: str | None = None) -> list[OpenLog]:
        only, given = ("", ()) if log_id is None else (" AND logs.log_id = ?", (log_id,) * 3)
        query = (
            f"SELECT log_id, owner, epoch, lease_until, {IS_EXPIRED}, engine, lost FROM logs WHERE owner IS NOT NULL{only} "
            "UNION ALL SELECT logs.log_id, owner, epoch, lease_until, TRUE, engine, lost FROM runs JOIN logs "
            f"ON logs.log_id = run_id WHERE status IN ('running', 'queued') AND owner IS NULL AND ended = 0{only} "
            f"UNION ALL {_LEFT} AND status NOT IN ('running', 'queued'){only}"  # they have open tasks
        )
        return await self._open_logs(query, *given)

    async def left_logs(self) -> list[OpenLog]:
        return await self._open_logs(_LEFT)

    async def _open_logs(self, query: str, *values: Any) -> list[OpenLog]:
        return [
            OpenLog(log_id, owner, epoch, lease_until, None if expired is None else bool(expired), engine, lost)
            for log_id, owner, epoch, lease_until, expired, engine, lost in await self.database.rows(query, *values)
        ]

    async def put_wish(self, wish: Wish) -> None:
        def put(link: Link) -> None:
            link.run(
                "INSERT INTO inbox (log_id, wish_id, run_id, kind, body, at) VALUES (?, ?, ?, ?, ?, wall_seconds()) "
                "ON CONFLICT (log_id, wish_id) DO NOTHING",
                *(wish.log_id, wish.wish_id, wish.run_id, wish.kind, wish.body),
            )
            make_due(link, "log_id = ?", wish.log_id)
            link.notify(WISHES)
            link.notify(wish.log_id)

        await self.database.write(put, wish.log_id)

    async def wishes(self, owner: str) -> list[Wish]:
        # CROSS JOIN makes SQLite begin with the inboxes, which are mostly empty, not with all logs of the owner.
        return await self._wishes("CROSS JOIN logs WHERE inbox.log_id = logs.log_id AND owner = ?", owner)

    async def wishes_for(self, log_id: str) -> list[Wish]:
        return await self._wishes("WHERE log_id = ?", log_id)

    async def reply_to(self, log_id: str, wish_id: str) -> bytes | None:
        return await self.database.value("SELECT reply FROM inbox WHERE log_id = ? AND wish_id = ?", log_id, wish_id)

    async def _wishes(self, where: str, value: str) -> list[Wish]:
        columns = "inbox.log_id, wish_id, run_id, kind, body"
        query = f"SELECT {columns} FROM inbox {where} AND reply IS NULL ORDER BY at, wish_id"
        found = await self.database.rows(query, value)
        return [
            Wish(log_id=log, wish_id=wish, run_id=run, kind=kind, body=body) for log, wish, run, kind, body in found
        ]

    def _decode_run(self, row: Any) -> RunRecord:
        identity, started_at, result, status, lost, run_id, log_id = row
        what = f"run {run_id!r}"
        return RunRecord(
            identity=self._decode(decode_identity, identity, what),
            started_at=started_at,
            result=None if result is None else self._decode(_decode_filled, result, what),
            queued=status == "queued",
            log_id=log_id,
            lost=lost,
        )

    def _decode(self, decode: Callable[[Any], T], body: Any, what: str) -> T:
        with self._reported(f"what is stored of {what} cannot be read"):
            return decode(body)

    @contextmanager
    def _reported(self, problem: str) -> Generator[None]:
        """Turn errors of encoders and decoders into StoreErrors."""
        try:
            yield
        except UNREADABLE as exc:
            raise StoreError(self.place, f"{problem}: {exc}") from exc
