"""Threads, runs, events and journals in SQL: the same statements for every database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import msgspec

from ..core.errors import OwnershipLost, StoreError
from ..core.events import Event
from ..core.messages import Message
from ..core.runs import RunIdentity, RunResult
from ..core.state import PersistedState
from ..core.stores import (
    REQUESTS,
    Asked,
    AskStatus,
    JournalEntry,
    LogBatch,
    OwnedLog,
    RunRecord,
    ThreadRecord,
    Watch,
)
from .lanes import Link
from .packs import EventRow, events_in, rows_of
from .saving import saving_run, saving_thread

T = TypeVar("T")
_Row = tuple[Any, ...]

_message = msgspec.json.Decoder(Message).decode
_state = msgspec.json.Decoder(PersistedState).decode
_result = msgspec.json.Decoder(RunResult).decode
_identity = msgspec.json.Decoder(RunIdentity).decode
_decided = msgspec.json.Decoder(tuple[tuple[str, str], ...]).decode

DECODERS: dict[str, Callable[[bytes], object]] = {
    "message": _message,
    "state": _state,
    "result": _result,
    "identity": _identity,
    "decisions": _decided,
    "event": events_in,
}
"""How what is stored is read, by what it is."""
UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError)
"""What decoders raise."""

_FEW, _LITTLE = 100, 512_000
"""Rows, and bytes in them, that are written sooner than another thread is asked: a stream of tokens is, too."""
_OLD, _FORGOTTEN = 60.0, 3600.0
"""Seconds after which nobody begins any more to do what was asked, and after which nothing is kept of it."""
_MOST_VALUES = 1_000
"""In one statement; no database takes as many as one likes."""
_RUN = "identity, started_at, result, status, decided, run_id"
_RUNS_NOW = "UPDATE runs SET status = 'running' WHERE run_id = ? AND status = 'queued'"
_INSERT_ENTRY = "INSERT INTO journal (log_id, place, run_id, key, kind, body) VALUES (?, ?, ?, ?, ?, ?)"


class Database(Protocol):
    """Contract: work is done in one transaction; what is written about one thing is written in the order asked."""

    place: str

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def write(
        self, work: Callable[[Link], T], about: str = "", *, alone: bool = False, little: bool = False
    ) -> T:
        """Do work about one log or about everything; `alone` where it locks anything else, a thread above all; `little`
        where it is so small that asking another thread would take longer."""
        ...

    async def read(self, work: Callable[[Link], T]) -> T: ...

    def write_now(self, work: Callable[[Link], T], about: str = "") -> T:
        """As `write`, for a thread without an event loop. Blocking, as the next two."""
        ...

    def read_now(self, work: Callable[[Link], T]) -> T: ...

    def close_now(self) -> None: ...

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        """Watch for notes on a topic."""
        ...

    async def version(self) -> int:
        """The version of the schema as it is stored, 0 where there is none; nothing is made or changed."""
        ...

    async def problems(self) -> list[str]:
        """What the database itself finds wrong with its files; nothing where it does not look at them."""
        ...


class SqlStore:
    """A store over a database."""

    def __init__(self, database: Database) -> None:
        self.database, self.place = database, database.place

    async def open(self) -> None:
        """Make or migrate what it needs; raises StoreError where it cannot be used."""
        await self.database.open()

    async def close(self) -> None:
        """Write what waits, and let go."""
        await self.database.close()

    async def load_thread(self, thread_id: str) -> ThreadRecord | None:
        def read(link: Link) -> tuple[Any, list[Any]] | None:
            found = link.run("SELECT user_id, state FROM threads WHERE thread_id = ?", thread_id)
            if not found or found[0][1] is None:
                return None
            return found[0], link.run("SELECT body FROM messages WHERE thread_id = ? ORDER BY place", thread_id)

        found = await self.database.read(read)
        if found is None:
            return None
        (user_id, state), rows = found
        what = f"thread {thread_id!r}"
        return ThreadRecord(
            thread_id=thread_id,
            user_id=user_id,
            messages=tuple([self._read(_message, row[0], what) for row in rows]),
            state=self._read(_state, state, what),
        )

    async def save_thread(self, record: ThreadRecord) -> None:
        await self.database.write(saving_thread(record, 0)[0], record.thread_id, alone=True)

    async def load_run(self, run_id: str) -> RunRecord | None:
        found = await self.database.read(lambda link: link.run(f"SELECT {_RUN} FROM runs WHERE run_id = ?", run_id))
        return self._run(found[0]) if found else None

    async def save_run(self, record: RunRecord) -> None:
        await self.database.write(saving_run(record)[0], record.identity.run_id, alone=True)

    async def list_runs(
        self,
        thread_id: str | None = None,
        *,
        user_id: str | None = None,
        status: str | None = None,
        limit: int | None = None,
    ) -> list[RunRecord]:
        asked = {"thread_id": thread_id, "user_id": user_id, "status": status}
        wanted = {name: value for name, value in asked.items() if value is not None}
        where = f"WHERE {' AND '.join(f'{name} = ?' for name in wanted)}" if wanted else ""
        query = f"SELECT {_RUN} FROM runs {where} ORDER BY started_at DESC, run_id DESC LIMIT ?"
        most = 2**62 if limit is None else limit
        found = await self.database.read(lambda link: link.run(query, *wanted.values(), most))
        return [self._run(row) for row in found]

    async def ends_of(self, run_ids: Sequence[str]) -> dict[str, float]:
        """When runs ended, of those that have."""

        def read(link: Link) -> dict[str, float]:
            ends = dict[str, float]()
            for first in range(0, len(run_ids), _MOST_VALUES):
                some = run_ids[first : first + _MOST_VALUES]
                marks = ", ".join("?" * len(some))
                query = f"SELECT run_id, ended_at FROM runs WHERE run_id IN ({marks}) AND ended_at IS NOT NULL"
                ends.update(link.run(query, *some))
            return ends

        return await self.database.read(read)

    async def begin_run(self, record: RunRecord, request: JournalEntry, owner: str, lease: float) -> str | None:
        (save, _), identity = saving_run(record), record.identity
        entry = (identity.run_id, 0, request.run_id, request.key, request.kind, request.body)

        def begin(link: Link) -> str | None:
            _make_thread(link, identity.thread_id, identity.user_id)
            holder = _hold(link, record)
            if holder is not None and not record.queued:
                return holder
            made = link.run(
                "INSERT INTO logs (log_id, ended, owner, epoch, lease_until) VALUES (?, 0, ?, 1, ?) "
                "ON CONFLICT (log_id) DO NOTHING RETURNING log_id",
                identity.run_id,
                owner,
                link.clock() + lease,
            )
            if made:
                link.run(_INSERT_ENTRY, *entry)
            elif not _has_begun(link, owner, entry):
                raise StoreError(self.place, f"there is a run {identity.run_id!r} already")
            save(link)
            if holder is None and record.queued:
                link.run(_RUNS_NOW, identity.run_id)
            return holder

        return await self.database.write(begin, identity.run_id, alone=True, little=len(request.body) < _LITTLE)

    async def take_thread(self, record: RunRecord) -> str | None:
        def take(link: Link) -> str | None:
            _make_thread(link, record.identity.thread_id, record.identity.user_id)
            holder = _hold(link, record)
            if holder is None:
                link.run(_RUNS_NOW, record.identity.run_id)
            return holder

        return await self.database.write(take, record.identity.run_id, alone=True)

    async def write(self, batch: LogBatch) -> None:
        log_id, place = batch.log_id, batch.first_entry
        events = rows_of(log_id, batch.events)
        entries = [(log_id, place + n, e.run_id, e.key, e.kind, e.body) for n, e in enumerate(batch.entries)]
        save_thread, of_thread = (None, 0) if batch.thread is None else saving_thread(batch.thread, batch.thread_from)
        save_run, of_run = (None, 0) if batch.run is None else saving_run(batch.run)

        def write(link: Link) -> None:
            found = link.run(
                "SELECT epoch, ended, EXISTS (SELECT 1 FROM events WHERE log_id = ? AND seq = ?) "
                "OR EXISTS (SELECT 1 FROM journal WHERE log_id = ? AND place = ?) "
                f"FROM logs WHERE log_id = ?{link.locking}",
                *(log_id, events[0][1] if events else -1, log_id, place if entries else -1, log_id),
            )
            if not found or found[0][0] != batch.epoch:
                raise OwnershipLost(self.place, log_id)
            if found[0][2]:  # a try of which nobody heard may have gone well
                if not _are_there(link, batch, events, entries):
                    raise StoreError(self.place, f"something else is stored of run {log_id!r} than was written here")
            else:
                link.run_many("INSERT INTO events (log_id, seq, kind, body, held) VALUES (?, ?, ?, ?, ?)", events)
                link.run_many(_INSERT_ENTRY, entries)
            if save_thread is not None:
                save_thread(link)
            if save_run is not None:
                save_run(link)
            if batch.ended != bool(found[0][1]) or batch.released:
                change = ", owner = NULL, cancel = NULL" if batch.released else ""
                link.run(f"UPDATE logs SET ended = ?{change} WHERE log_id = ?", int(batch.ended), log_id)
            if batch.done:
                link.run("DELETE FROM journal WHERE log_id = ?", log_id)
            link.note(log_id)

        alone = save_thread is not None or save_run is not None
        await self.database.write(
            write, log_id, alone=alone, little=_is_little(batch, events, entries, of_thread + of_run)
        )

    async def read_events(self, log_id: str, after: int = 0, limit: int = 1000) -> tuple[list[Event], bool] | None:
        def read(link: Link) -> tuple[list[Any], bool] | None:
            # First whether it has ended: what is written between the two looks is then still read.
            log = link.run("SELECT ended FROM logs WHERE log_id = ?", log_id)
            if not log:
                return None
            numbers = "SELECT seq FROM events WHERE log_id = ? AND seq > ? ORDER BY seq LIMIT ?"
            there = [row[0] for row in link.run(numbers, log_id, after, limit)]
            # A row may hold many events: no more rows are read than hold those that are asked for.
            enough = next((seq for seq in there if seq - after >= limit), None)
            last = enough or (there[-1] if there else after)
            bodies = "SELECT body FROM events WHERE log_id = ? AND seq > ? AND seq <= ? ORDER BY seq"
            is_all = enough is None and len(there) < limit
            return link.run(bodies, log_id, after, last), is_all and bool(log[0][0])

        found = await self.database.read(read)
        if found is None:
            return None
        rows, ended = found
        what = f"an event of run {log_id!r} after number {after}"
        events: list[Event] = []
        for row in rows:
            events += self._read(events_in, row[0], what)
        first = next((place for place, event in enumerate(events) if event.seq > after), len(events))
        return events[first : first + limit], ended

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        return self.database.watch(topic)

    async def read_journal(self, log_id: str) -> list[JournalEntry]:
        query = "SELECT run_id, key, kind, body FROM journal WHERE log_id = ? ORDER BY place"
        found = await self.database.read(lambda link: link.run(query, log_id))
        return [JournalEntry(run_id, key, kind, bytes(body)) for run_id, key, kind, body in found]

    async def claim(self, log_id: str, owner: str, lease: float, *, after: str | None = None) -> int | None:
        def claim(link: Link) -> int | None:
            now = link.clock()
            found = link.run(
                "UPDATE logs SET owner = ?, epoch = epoch + 1, lease_until = ? WHERE log_id = ? "
                "AND (owner IS NULL OR lease_until < ? OR owner = ? OR owner = ?) RETURNING epoch",
                owner,
                now + lease,
                log_id,
                now,
                owner,
                after or owner,
            )
            return found[0][0] if found else None

        return await self.database.write(claim, log_id)

    async def owner_of(self, log_id: str) -> str | None:
        found = await self.database.read(lambda link: link.run("SELECT owner FROM logs WHERE log_id = ?", log_id))
        return found[0][0] if found else None

    async def epoch_of(self, log_id: str) -> int | None:
        found = await self.database.read(lambda link: link.run("SELECT epoch FROM logs WHERE log_id = ?", log_id))
        return found[0][0] if found else None

    async def renew(self, owner: str, lease: float) -> set[str]:
        def renew(link: Link) -> list[Any]:
            if link.locking:  # in the order in which others lock them
                link.run(f"SELECT log_id FROM logs WHERE owner = ? ORDER BY log_id{link.locking}", owner)
            until = link.clock() + lease
            return link.run("UPDATE logs SET lease_until = ? WHERE owner = ? RETURNING log_id", until, owner)

        return {row[0] for row in await self.database.write(renew)}

    async def owned_logs(self) -> list[OwnedLog]:
        def read(link: Link) -> list[Any]:
            return link.run(
                "SELECT log_id, owner, CASE WHEN lease_until < ? THEN 1 ELSE 0 END FROM logs WHERE owner IS NOT NULL",
                link.clock(),
            )

        return [OwnedLog(log_id, owner, bool(expired)) for log_id, owner, expired in await self.database.read(read)]

    async def cancels(self, owner: str) -> dict[str, str]:
        query = "SELECT log_id, cancel FROM logs WHERE owner = ? AND cancel IS NOT NULL"
        return dict(await self.database.read(lambda link: link.run(query, owner)))

    async def ask_cancel(self, log_id: str, reason: str) -> None:
        def ask(link: Link) -> None:
            link.run("UPDATE logs SET cancel = ? WHERE log_id = ? AND owner IS NOT NULL", reason, log_id)
            link.note(REQUESTS)

        await self.database.write(ask, log_id)

    async def ask(self, asked: Asked) -> None:
        def ask(link: Link) -> None:
            now = link.clock()
            link.run("DELETE FROM asks WHERE asked_at < ? AND (taker IS NULL OR reply IS NOT NULL)", now - _FORGOTTEN)
            link.run(
                "INSERT INTO asks (ask_id, run_id, asked_at, body) VALUES (?, ?, ?, ?) ON CONFLICT (ask_id) DO NOTHING",
                asked.ask_id,
                asked.run_id,
                now,
                asked.body,
            )
            link.note(REQUESTS)

        await self.database.write(ask, alone=True)

    async def asked(self) -> list[Asked]:
        query = "SELECT ask_id, run_id, body FROM asks WHERE taker IS NULL AND asked_at > ? ORDER BY asked_at, ask_id"
        found = await self.database.read(lambda link: link.run(query, link.clock() - _OLD))
        return [Asked(ask_id, run_id, bytes(body)) for ask_id, run_id, body in found]

    async def take_ask(self, ask_id: str, owner: str) -> bool:
        query = "UPDATE asks SET taker = ? WHERE ask_id = ? AND (taker IS NULL OR taker = ?) RETURNING ask_id"
        return bool(await self.database.write(lambda link: link.run(query, owner, ask_id, owner), alone=True))

    async def reply(self, ask_id: str, body: bytes) -> None:
        def reply(link: Link) -> None:
            link.run("UPDATE asks SET reply = ? WHERE ask_id = ?", body, ask_id)
            link.note(ask_id)

        await self.database.write(reply, alone=True)

    async def ask_status(self, ask_id: str) -> AskStatus | None:
        query = "SELECT taker, reply FROM asks WHERE ask_id = ?"
        found = await self.database.read(lambda link: link.run(query, ask_id))
        return AskStatus(found[0][0], None if found[0][1] is None else bytes(found[0][1])) if found else None

    async def withdraw(self, ask_id: str) -> bool:
        def withdraw(link: Link) -> bool:
            link.run("DELETE FROM asks WHERE ask_id = ? AND taker IS NULL", ask_id)
            return not link.run("SELECT 1 FROM asks WHERE ask_id = ?", ask_id)

        return await self.database.write(withdraw, alone=True)

    async def forget_ask(self, ask_id: str) -> None:
        await self.database.write(lambda link: link.run("DELETE FROM asks WHERE ask_id = ?", ask_id), alone=True)

    def _run(self, row: Any) -> RunRecord:
        identity, started_at, result, status, decided, run_id = row
        what = f"run {run_id!r}"
        return RunRecord(
            identity=self._read(_identity, identity, what),
            started_at=started_at,
            result=None if result is None else self._read(_result, result, what),
            queued=status == "queued",
            decided=() if decided is None else self._read(_decided, decided, what),
        )

    def _read(self, decode: Callable[[bytes], T], body: bytes, what: str) -> T:
        try:
            return decode(body)
        except UNREADABLE as exc:
            raise StoreError(self.place, f"what is stored of {what} cannot be read: {exc}") from exc


def _is_little(batch: LogBatch, events: list[EventRow], entries: list[_Row], size: int) -> bool:
    """Whether a batch is written in no time: no crowd of rows, nothing long in them, not much to throw away."""
    said = 0 if batch.thread is None else len(batch.thread.messages) - batch.thread_from
    rows = len(events) + len(entries) + said + (batch.first_entry if batch.done else 0)
    size += sum([len(row[3]) for row in events]) + sum([len(row[5]) for row in entries])
    return rows <= _FEW and size < _LITTLE


def _make_thread(link: Link, thread_id: str, user_id: str | None) -> None:
    insert = "INSERT INTO threads (thread_id, user_id) VALUES (?, ?) ON CONFLICT (thread_id) DO NOTHING"
    link.run(insert, thread_id, user_id)


def _hold(link: Link, record: RunRecord) -> str | None:
    """Take the thread of a run, where it is free and nobody waits longer; else who is before it."""
    identity = record.identity
    thread_id, run_id = identity.thread_id, identity.run_id
    holder = link.run(f"SELECT holder FROM threads WHERE thread_id = ?{link.locking}", thread_id)[0][0]
    earlier = link.run(
        "SELECT run_id FROM runs WHERE thread_id = ? AND status = 'queued' AND run_id <> ? AND started_at < ? "
        "ORDER BY started_at LIMIT 1",
        thread_id,
        run_id,
        record.started_at,
    )
    if earlier:
        return earlier[0][0]
    if holder is None:
        link.run("UPDATE threads SET holder = ? WHERE thread_id = ?", run_id, thread_id)
    return None if holder == run_id else holder


def _has_begun(link: Link, owner: str, entry: _Row) -> bool:
    """Whether this very run was begun before, by a try of which nobody heard that it went well."""
    log = link.run("SELECT owner, epoch FROM logs WHERE log_id = ?", entry[0])
    found = link.run(
        "SELECT log_id, place, run_id, key, kind, body FROM journal WHERE log_id = ? AND place = 0", entry[0]
    )
    return log == [(owner, 1)] and found == [entry]


def _are_there(link: Link, batch: LogBatch, events: list[_Row], entries: list[_Row]) -> bool:
    """Whether exactly this is stored of a log already; of one that has ended for good, without its journal."""
    found = link.run(
        "SELECT log_id, seq, kind, body, held FROM events WHERE log_id = ? AND seq >= ? AND seq <= ? ORDER BY seq",
        *(batch.log_id, events[0][1] if events else 0, events[-1][1] if events else -1),
    )
    recorded = link.run(
        "SELECT log_id, place, run_id, key, kind, body FROM journal WHERE log_id = ? AND place >= ? AND place < ? "
        "ORDER BY place",
        *(batch.log_id, batch.first_entry, batch.first_entry + len(entries)),
    )
    return found == events and (recorded == entries or (batch.done and not recorded))
