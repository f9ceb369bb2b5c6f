"""Reading logs: the public events for those who watch, and all rows for the owner who continues a run."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from ..core.errors import LogUnreadable
from ..core.rows import LogRow
from ..core.stores import StoredLog
from .lanes import Link
from .packs import DELTAS_KIND, unpack_events, unpack_rows

UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, TypeError)
"""Errors that decoders raise."""
BEING_PRUNED, THINNED = 1, 2
"""Marks of a log: some of its rows are gone; all deltas and private parts are, and nothing else."""


def read_bodies(link: Link, log_id: str, after: int, limit: int) -> tuple[list[Any], bool] | None:
    """Read packs that hold the next public events, and whether the log has ended with them."""
    # First whether it has ended: what is written between the two queries is then still read.
    log = link.run("SELECT ended FROM logs WHERE log_id = ?", log_id)
    if not log:
        return None
    numbers = "SELECT seq FROM events WHERE log_id = ? AND seq > ? AND held > 0 ORDER BY seq LIMIT ?"
    there = [row[0] for row in link.run(numbers, log_id, after, limit)]
    # A pack may hold many events: no more packs are read than hold those that are asked for.
    enough = next((seq for seq in there if seq - after >= limit), None)
    last = enough or (there[-1] if there else after)
    bodies = "SELECT body FROM events WHERE log_id = ? AND seq > ? AND seq <= ? AND held > 0 ORDER BY seq"
    is_all = enough is None and len(there) < limit
    return link.run(bodies, log_id, after, last), is_all and bool(log[0][0])


class LogReading:
    """The packs of a log as they are stored, without those of deltas."""

    def __init__(self, link: Link, log_id: str, ended: int, pruned: int) -> None:
        self._log_id, self._ended, self._thinned = log_id, bool(ended), bool(pruned)
        self._packs = link.run(
            "SELECT seq, sub, held, body, private FROM events WHERE log_id = ? AND kind <> ? ORDER BY seq, sub",
            *(log_id, DELTAS_KIND),
        )
        deltas, last = link.run(
            "SELECT COALESCE(SUM(held), 0), COALESCE(MAX(seq), 0) FROM events WHERE log_id = ? AND kind = ?",
            *(log_id, DELTAS_KIND),
        )[0]
        self._end: tuple[int, int] = max((last, 0), tuple(self._packs[-1][:2]) if self._packs else (0, 0))
        self._places: list[Any] = []
        if not self._thinned and deltas + sum([pack[2] for pack in self._packs]) != self._end[0]:
            # Some are missing: only now is it worth reading where each pack is.
            query = "SELECT seq, held FROM events WHERE log_id = ? AND held > 0 ORDER BY seq"
            self._places = link.run(query, log_id)

    def decode(self, place: str) -> StoredLog:
        """Decode the rows; LogUnreadable where some are missing or damaged."""
        before = 0
        for last, held in self._places:
            if last - held != before:
                self._refuse(place, before + 1, missing(before, last - held))
            before = last
        rows: list[LogRow] = []
        end = (0, 0)
        for seq, sub, held, body, private in self._packs:
            try:
                rows += self._unpacked(seq, sub, held, body, private, end)
            except UNREADABLE as exc:
                self._refuse(place, max(seq - held + 1, 1), str(exc), exc)
            end = (seq, sub)
        return StoredLog(rows=rows, seq=self._end[0], sub=self._end[1], ended=self._ended, thinned=self._thinned)

    def _unpacked(
        self, seq: int, sub: int, held: int, body: bytes | None, private: bytes | None, end: tuple[int, int]
    ) -> list[LogRow]:
        if self._thinned:
            return [LogRow(event.seq, 0, event) for event in (unpack_events(body) if body else ())]
        rows = unpack_rows(seq, sub, held, body, private)
        first = rows[0]
        if first.sub > 1 and end != (first.seq, first.sub - 1):
            raise ValueError(f"the private row {first.seq}.{first.sub - 1} is missing")
        return rows

    def _refuse(self, place: str, seq: int, problem: str, cause: Exception | None = None) -> NoReturn:
        raise LogUnreadable(place, self._log_id, seq, problem) from cause


def read_log(link: Link, log_id: str) -> LogReading | None:
    """Read a log with its private parts. What was read is decoded outside the transaction."""
    log = link.run("SELECT ended, pruned FROM logs WHERE log_id = ?", log_id)
    return LogReading(link, log_id, *log[0]) if log else None


def missing(before: int, until: int) -> str:
    """Describe what is wrong between event `before` and the events after `until`."""
    if until < before:
        return f"it is stored twice, from event {until + 1} on"
    return f"event {until} is missing" if until == before + 1 else f"events {before + 1} to {until} are missing"
