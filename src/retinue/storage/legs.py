"""Legs in a database: those that PostgreSQL schedules, the workers of all engines, and the sweeps that find lost legs.

A leg waits while its log has a `turn` and no owner. Claiming it sets the owner. The end of the leg clears the turn
(`writes.py`), or keeps it if another worker must continue.

Invariant: one of the sweeps here finds whatever a crash leaves behind: an expired lease, an owner known to be gone, a
delay that is over, a thread that is free, a run that was not scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ..core.engine import FirstLeg, Leg, WorkerInfo
from ..core.probation import LONGEST_PAUSE, SUSPECT
from ..core.stores import LEGS, Placement, RunRecord
from .database import Later, Link
from .sql import SqlStore, decode_identity
from .writes import NEXT_TURN, POSTGRES, TAKEN_OVER, first_queued, note_deaths

Found = list[tuple[str, Placement]]
"""Runs, each with its place."""
OURS = f"engine = '{POSTGRES}' AND ended = 0"
_PAUSE = f"CASE WHEN lost = 0 THEN 0 ELSE LEAST({LONGEST_PAUSE}, POWER(2, lost - 1)) END"
"""SQL for `pause_after` of `core/probation.py`."""
_encode = msgspec.json.encode
_decode_names = msgspec.json.Decoder(tuple[str, ...]).decode


class SeenWorker(Struct, frozen=True):
    """A worker as the database knows it."""

    owner: str
    engine: str
    queues: tuple[str, ...]
    agents: tuple[str, ...]
    slots: int
    busy: int
    is_alive: bool


class Workers:
    """The workers of all engines that share a database."""

    def __init__(self, store: SqlStore) -> None:
        self._database = store.database

    async def beat(self, worker: WorkerInfo, engine: str, busy: int) -> None:
        """Report that a worker is alive, for as long as its lease."""
        values = (
            _encode(list(worker.queues)).decode(),
            _encode(sorted(worker.agents)).decode(),
            worker.slots.total,
            busy,
        )

        def write(link: Link) -> None:
            link.run(
                "INSERT INTO workers (owner, engine, queues, agents, slots, busy, seen_until) "
                "VALUES (?, ?, ?, ?, ?, ?, wall_seconds() + ?) ON CONFLICT (owner) DO UPDATE SET "
                "busy = excluded.busy, seen_until = excluded.seen_until",
                *(worker.owner, engine, *values, worker.lease),
            )
            # Rows of workers that died without signing off are kept for a while, so that others see it.
            link.run("DELETE FROM workers WHERE seen_until < wall_seconds() - 3600")

        await self._database.write(write, "workers")

    async def leave(self, owner: str) -> None:
        await self._database.change("DELETE FROM workers WHERE owner = ?", owner, key="workers")

    async def seen(self, engine: str | None = None) -> list[SeenWorker]:
        columns = "owner, engine, queues, agents, slots, busy, seen_until >= wall_seconds()"
        found = await self._database.rows(f"SELECT {columns} FROM workers ORDER BY owner")
        return [
            SeenWorker(owner, name, _decode_names(queues), _decode_names(agents), slots, busy, bool(alive))
            for owner, name, queues, agents, slots, busy, alive in found
            if engine is None or name == engine
        ]

    async def queue_of(self, log_id: str) -> str | None:
        return await self._database.value("SELECT queue FROM logs WHERE log_id = ?", log_id)

    async def waiting_in(self, log_id: str) -> tuple[str, str] | None:
        """Return the queue and the agent of a log that waits for a worker; None if it does not wait for one."""
        found = await self._database.rows(
            "SELECT queue, agent FROM logs JOIN runs ON run_id = logs.log_id WHERE logs.log_id = ? "
            "AND engine IS NOT NULL AND owner IS NULL AND ended = 0 "
            "AND (turn IS NOT NULL OR (status = 'running' AND (due_at IS NULL OR due_at <= wall_seconds())))",
            log_id,
        )
        return found[0] if found else None


class Legs:
    """The legs of a PostgreSQL database, for workers."""

    def __init__(self, store: SqlStore) -> None:
        self._database = store.database

    async def claim(
        self,
        queue: str,
        agents: Sequence[str],
        owner: str,
        lease: float,
        most: int,
        left: Sequence[str] = (),
        *,
        suspects: bool = False,
        suspect_from: int = SUSPECT,
    ) -> list[Leg]:
        """Claim up to `most` legs of a queue whose agents are known here: first those that a worker handed over, then by
        turn. With `suspects`, claim only legs that were lost at least `suspect_from` times, else only others.

        `left` are threads that runs have released here: the next run of each may be claimed too. If the answer is lost,
        a sweep finds the claimed logs as strays and releases them.
        """

        def claim(link: Link) -> Later:
            if left:
                _free_queued(link, left)
            # MATERIALIZED: else the selection may be evaluated for each row, and more than `most` legs be claimed.
            return link.ask(
                "WITH chosen AS MATERIALIZED (SELECT log_id FROM logs WHERE queue = ? AND owner IS NULL "
                f"AND turn IS NOT NULL AND {OURS} AND lost {'>=' if suspects else '<'} ? "
                "AND EXISTS (SELECT 1 FROM runs WHERE run_id = logs.log_id AND agent = ANY(?)) "
                "ORDER BY level, turn, due_at LIMIT ? FOR UPDATE SKIP LOCKED) "
                "UPDATE logs SET owner = ?, epoch = epoch + 1, lease_until = boot_seconds() + ?, boot = boot_id() "
                "FROM chosen, runs WHERE logs.log_id = chosen.log_id AND run_id = chosen.log_id "
                "RETURNING logs.log_id, epoch, identity, started_at, status, request, "
                "EXISTS (SELECT 1 FROM inbox WHERE inbox.log_id = logs.log_id), "
                "EXISTS (SELECT 1 FROM threads WHERE threads.thread_id = runs.thread_id AND state IS NOT NULL)",
                *(queue, suspect_from, list(agents), most, owner, lease),
            )

        claimed: Any = await self._database.write(claim)
        legs: list[Leg] = []
        for log_id, epoch, identity, started_at, status, request, has_wishes, has_thread in claimed:
            first = None
            if epoch == 1:
                queued, who = status == "queued", decode_identity(identity)
                record = RunRecord(identity=who, started_at=started_at, queued=queued, log_id=log_id)
                first = FirstLeg(record=record, request=request, has_wishes=has_wishes, is_new_thread=not has_thread)
            legs.append(Leg(log_id=log_id, epoch=epoch, first=first))
        return legs

    async def release_lost(self, gone: Sequence[str], strays: Sequence[str]) -> int:
        """Release the logs whose leases have run out, those of owners known to be gone, and some by id.

        A log whose owner has died comes after the legs that wait, and after a pause if that was not the first time.
        """

        def release(link: Link) -> int:
            is_lost = "owner IS NOT NULL AND (lease_until < boot_seconds() OR owner = ANY(?))"
            lost = f"SELECT log_id FROM logs WHERE {OURS} AND {is_lost} FOR UPDATE SKIP LOCKED"
            note_deaths(link, f"SELECT owner FROM logs WHERE {OURS} AND {is_lost}", list(gone))
            found = link.run(
                "UPDATE logs SET owner = NULL, lost = lost + 1, lost_epoch = epoch, "
                f"level = CASE WHEN level = {TAKEN_OVER} THEN 0 ELSE level END, "
                f"turn = CASE WHEN lost = 0 THEN {NEXT_TURN} END, due_at = wall_seconds() + {_PAUSE} "
                f"WHERE log_id IN ({lost}) RETURNING log_id",
                list(gone),
            )
            mine = (
                f"SELECT log_id FROM logs WHERE {OURS} AND owner IS NOT NULL AND log_id = ANY(?) FOR UPDATE SKIP LOCKED"
            )
            found += link.run(
                f"UPDATE logs SET owner = NULL, level = {TAKEN_OVER}, turn = COALESCE(turn, 0), "
                f"due_at = COALESCE(due_at, wall_seconds()) WHERE log_id IN ({mine}) RETURNING log_id",
                list(strays),
            )
            if found:
                link.notify(LEGS)
            return len(found)

        return await self._database.write(release)

    async def owned_by(self, owner: str) -> set[str]:
        return {log_id for (log_id,) in await self._database.rows("SELECT log_id FROM logs WHERE owner = ?", owner)}

    async def end_delays(self) -> None:
        """Let workers take the legs whose delay is over, unless they wait for their thread."""
        waits = "EXISTS (SELECT 1 FROM runs WHERE run_id = logs.log_id AND status = 'queued')"
        over = f"due_at <= wall_seconds() AND NOT {waits}"

        def end(link: Link) -> None:
            if link.run(f"SELECT 1 FROM logs WHERE {over} AND turn IS NULL AND {OURS} LIMIT 1"):
                _make_all_due(link, over)

        await self._database.write(end)

    async def free_queued(self) -> None:
        """Let workers take the first queued run of each free thread."""
        await self._database.write(_free_queued)

    async def find_unscheduled(self) -> None:
        """Let workers take the logs that have work or an unread wish and were not scheduled."""
        wanted = "SELECT run_id FROM runs WHERE status = 'running' UNION SELECT log_id FROM inbox WHERE reply IS NULL"
        where = f"due_at IS NULL AND log_id IN ({wanted})"
        await self._database.write(lambda link: _make_all_due(link, where))

    async def postpone(self, log_id: str, seconds: float) -> None:
        """Make a released leg that could not be worked on due again after so many seconds."""
        later = "UPDATE logs SET turn = NULL, due_at = wall_seconds() + ?"
        await self._database.change(
            f"{later} WHERE log_id = ? AND owner IS NULL AND {OURS}", seconds, log_id, key=log_id
        )


def _free_queued(link: Link, threads: Sequence[str] | None = None) -> None:
    free = first_queued("TRUE" if threads is None else "runs.thread_id = ANY(?)")
    if found := link.run(free, *(() if threads is None else (list(threads),))):
        over = "(due_at IS NULL OR due_at <= wall_seconds()) AND log_id = ANY(?)"
        _make_all_due(link, over, [run_id for (run_id,) in found])


def _make_all_due(link: Link, where: str, *values: Any) -> None:
    """Let workers take many logs without an owner, each with a turn as if they had come one by one."""
    chosen = (
        f"SELECT log_id, {NEXT_TURN} AS first, "
        "ROW_NUMBER() OVER (PARTITION BY queue, flow ORDER BY due_at, log_id) - 1 AS place "
        f"FROM logs WHERE turn IS NULL AND owner IS NULL AND {OURS} AND {where}"
    )
    link.run(
        "UPDATE logs SET turn = chosen.first + chosen.place, due_at = COALESCE(due_at, wall_seconds()) "
        f"FROM ({chosen}) AS chosen WHERE logs.log_id = chosen.log_id AND logs.turn IS NULL AND logs.owner IS NULL",
        *values,
    )
    link.notify(LEGS)


class PlacedLogs:
    """The logs of an engine outside the database, to find those that the engine may have missed."""

    def __init__(self, store: SqlStore, engine: str) -> None:
        self._database, self._engine = store.database, engine

    async def find(self, log_id: str) -> Placement | None:
        """Return the placement of a log that has not ended."""
        found = await self._find("log_id = ?", log_id)
        return found[0][1] if found else None

    async def freed(self, thread_id: str | None = None) -> Found:
        """Return the queued runs that are next on a free thread, of one thread or of all."""
        mine, values = ("TRUE", ()) if thread_id is None else ("runs.thread_id = ?", (thread_id,))
        return await self._find(f"owner IS NULL AND log_id IN ({first_queued(mine)})", *values)

    async def unread(self, seconds: float) -> Found:
        """Return the logs without an owner whose inbox has had a wish for so many seconds."""

        old = "SELECT log_id FROM inbox WHERE reply IS NULL AND at < wall_seconds() - ?"
        return await self._find(f"owner IS NULL AND log_id IN ({old})", seconds)

    async def at_work(self) -> Found:
        """Return the logs that should be worked on now, with or without an owner."""
        due = "due_at IS NULL OR due_at <= wall_seconds() OR epoch > 0"
        running = f"log_id IN (SELECT run_id FROM runs WHERE status = 'running') AND ({due})"
        # Two queries, each with its own index, so that ended logs are not read.
        return await self._find("owner IS NOT NULL") + await self._find(running)

    async def owners(self) -> list[str]:
        """Return the owners of logs."""
        query = "SELECT DISTINCT owner FROM logs WHERE owner IS NOT NULL AND engine = ?"
        return [owner for (owner,) in await self._database.rows(query, self._engine)]

    async def lost(self, gone: Sequence[str]) -> list[tuple[str, str]]:
        """Return, with their owners, the logs whose lease has expired or whose owner is known to be gone."""
        query = (
            "SELECT log_id, owner FROM logs WHERE owner IS NOT NULL AND engine = ? AND ended = 0 "
            "AND (lease_until < boot_seconds() OR owner = ANY(?))"
        )
        return await self._database.rows(query, self._engine, list(gone))

    async def ended(self, log_ids: Sequence[str]) -> set[str]:
        """Return those of some logs that have ended."""
        query = "SELECT log_id FROM logs WHERE log_id = ANY(?) AND ended = 1"
        return {log_id for (log_id,) in await self._database.rows(query, list(log_ids))}

    async def _find(self, where: str, *values: Any) -> Found:
        query = f"SELECT log_id, queue, level FROM logs WHERE engine = ? AND ended = 0 AND {where}"
        return [
            (log_id, Placement(engine=self._engine, queue=queue, priority=0 if level == TAKEN_OVER else -level))
            for log_id, queue, level in await self._database.rows(query, self._engine, *values)
        ]
