"""Schedules in a database: runs that start at given times, once for each time, on the first worker that sees it.

A schedule has one run at a time: if its last run has not ended, or waits for a human, the time is skipped.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.engine import Schedule
from ..core.errors import ConfigurationError
from ..core.messages import Message
from ..core.runs import RunIdentity, unique
from ..core.stores import Placement, RunRecord, title_of
from .database import Link
from .sql import SqlStore
from .writes import RunBeginning

_log = logging.getLogger(__name__)


class _Stored(Struct, frozen=True, kw_only=True):
    schedule: Schedule
    start: dict[str, Any]
    """The stored start of its runs. Each run gets an identity of its own."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Stored).decode


def next_time(cron: str, after: float) -> float:
    """Return the first time after another that a cron expression names, in UTC."""
    try:
        from cronsim import CronSim, CronSimError
    except ModuleNotFoundError:
        raise ConfigurationError('cron= needs a library: pip install "retinue[postgres]"') from None
    if not isinstance(cast("Any", cron), str) or len(cron.split()) != 5:
        raise ConfigurationError(f"cron {cron!r}: write minute hour day month weekday, as in '0 3 * * *'")
    try:
        return next(CronSim(cron, datetime.fromtimestamp(after, UTC))).timestamp()
    except (CronSimError, StopIteration, AttributeError) as exc:
        said = str(exc) or "it names no time to come"
        raise ConfigurationError(
            f"cron {cron!r}: {said}; write minute hour day month weekday, as in '0 3 * * *'"
        ) from exc


class Schedules:
    """The schedules of a database."""

    def __init__(self, store: SqlStore) -> None:
        self._store, self._database = store, store.database

    async def add(self, schedule: Schedule, engine: str, start: bytes) -> None:
        body = _encode(_Stored(schedule=schedule, start=msgspec.json.decode(start)))
        insert = (
            "INSERT INTO schedules (schedule_id, engine, next_at, body) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (schedule_id) DO NOTHING"
        )
        await self._database.change(insert, schedule.id, engine, schedule.next_at, body, key=schedule.id)

    async def remove(self, schedule_id: str) -> bool:
        """Remove a schedule; return whether there was one."""
        query = "DELETE FROM schedules WHERE schedule_id = ? RETURNING schedule_id"
        return bool(await self._database.change(query, schedule_id, key=schedule_id))

    async def list(self) -> list[Schedule]:
        """Return all schedules, the next one first."""
        query = "SELECT next_at, last_run, skipped, body FROM schedules ORDER BY next_at, schedule_id"
        found = await self._database.rows(query)
        return [
            replace(_decode(body).schedule, next_at=next_at, last_run=last_run, skipped=skipped)
            for next_at, last_run, skipped, body in found
        ]

    async def fire(self, engine: str) -> list[tuple[str, Placement]]:
        """Store the runs whose time has come; return those that were stored here."""
        due = "SELECT wall_seconds(), next_at, body FROM schedules WHERE next_at <= wall_seconds() AND engine = ?"
        started: list[tuple[str, Placement]] = []
        for now, next_at, body in await self._database.rows(due, engine):
            stored = _decode(body)
            placement = Placement(engine=engine, queue=stored.schedule.queue)
            if (run_id := await self._start(stored, now, next_at, placement)) is not None:
                started.append((run_id, placement))
        return started

    async def _start(self, stored: _Stored, now: float, next_at: float, placement: Placement) -> str | None:
        """Store one run and the next time of its schedule, in one transaction; None if another worker did, or if the
        last run has not ended."""
        schedule, made = stored.schedule, unique()
        run_id, thread_id = f"run_{made}", schedule.thread_id or f"thread_{made}"
        identity = RunIdentity(run_id, thread_id, schedule.agent, user_id=schedule.user_id)
        start = {**stored.start, "identity": identity}
        title = title_of(msgspec.convert(start.get("messages", []), list[Message]))
        record = RunRecord(identity=identity, started_at=now, log_id=run_id, title=title)
        beginning = RunBeginning(self._store.place, record, _encode(start), None, 0.0, "enqueue", placement)
        mine, values = "WHERE schedule_id = ? AND next_at = ?", (schedule.id, next_at)

        def write(link: Link) -> bool:
            if schedule.cron is None:
                won = link.run(f"DELETE FROM schedules {mine} RETURNING schedule_id", *values)
            else:
                later = next_time(schedule.cron, now)  # times at which no worker ran are skipped
                is_open = "EXISTS (SELECT 1 FROM runs WHERE run_id = last_run AND ended_at IS NULL)"
                change = "UPDATE schedules SET next_at = ?"
                link.run(f"{change}, skipped = skipped + 1 {mine} AND {is_open}", later, *values)
                change += ", last_run = ?, skipped = 0"
                won = link.run(f"{change} {mine} RETURNING schedule_id", later, run_id, *values)
            if won:
                beginning.write(link)
            return bool(won)

        won = await self._database.write(write, run_id, threads=[thread_id])
        return run_id if won else None
