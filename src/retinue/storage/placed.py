"""Logs that an engine outside the database schedules: queries for the logs that the engine may have missed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.stores import Placement
from .sql import SqlStore
from .writes import TAKEN_OVER, first_queued

Found = list[tuple[str, Placement]]


class PlacedLogs:
    """The logs of one engine."""

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
