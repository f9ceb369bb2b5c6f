"""Reading logs from a database, whether their rows are as they were written or packed.

Each function runs in one transaction, so it finds the rows of a log in `events` or in `packs`. Between two pages a reader
has only the number of its last event, which both forms understand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.errors import LogUnreadable
from ..core.events import Event
from ..core.rows import LogRow
from ..core.stores import Losses, StoredLog
from . import cold
from .database import Link
from .deltas import Stream, Streams
from .homes import StoredHomes
from .packs import UNREADABLE, check_kinds, merged, unpack_events, unpack_plain, unpack_rows
from .references import Cache, expand
from .schema import DELTAS_KIND, NOT_PACKED


class PackedLog:
    """The packs of one log, within one transaction."""

    def __init__(self, link: Link, log_id: str, cache: Cache) -> None:
        self._link, self._log_id, self._cache = link, log_id, cache
        self.homes = StoredHomes(link, log_id, cache)
        self._streams: Streams | None = None
        self._here: dict[int, Stream] = {}

    def stream(self, number: int) -> Stream:
        """Return a stream of the log. It stays in the cache: its deltas are in many packs."""
        if (stream := self._here.get(number)) is not None:
            return stream
        key = "stream", self._log_id, number
        stream = self._cache.get(key)
        if stream is None:
            stream = cold.stream_of(self._read_streams(), number, self.homes)
            self._cache.put(key, stream, stream.size)
        self._here[number] = stream
        return stream

    def _read_streams(self) -> Streams:
        key = "streams", self._log_id
        if self._streams is None:
            self._streams = self._cache.get(key)
        if self._streams is None:
            body = self._link.value("SELECT body FROM said WHERE log_id = ? AND last = 0", self._log_id)
            if body is None:
                raise ValueError("the streams of its deltas are missing")
            self._streams = cold.read_streams(body)
            self._cache.put(key, self._streams, 2 * len(body) + 500 * len(self._streams.heads))
        return self._streams

    def _open(self, body: bytes) -> cold.Pack:
        pack = cold.read_pack(body)
        if pack.streams is not None:
            self._streams = pack.streams
        return pack

    def events(self, seq: int, held: int, body: bytes) -> list[Event]:
        return cold.all_of(self._open(body), seq, held, self.homes, self.stream)

    def deltas(self, seq: int, held: int, body: bytes) -> list[Event]:
        pack = self._open(body)
        return cold.deltas_of(pack, seq, held, cold.events_of(pack, self.homes), self.stream)

    def rows(
        self, seq: int, held: int, deltas: int, body: bytes, private: bytes | None, *, thinned: bool
    ) -> list[LogRow]:
        """Return the rows of a pack but for its deltas."""
        events = cold.events_of(cold.read_pack(body), self.homes)
        if thinned:
            return [LogRow(event.seq, 0, event) for event in events]
        check_kinds(events)
        first, numbers = seq - held, [event.seq for event in events]
        if len(events) + deltas != held or any(not first < number <= seq for number in numbers):
            raise ValueError(f"it holds {len(events)} events and {deltas} deltas, not {held} events up to {seq}")
        return merged(events, cold.private_of(private, self.homes), gaps=True)


def read_events(
    link: Link, log_id: str, after: int, limit: int, most_bytes: int, cache: Cache
) -> tuple[list[Event], bool] | None:
    """Read the next public events of a log, in whole packs; also return whether it has ended with them."""
    # Read `ended` first, so that rows written between the two queries are not missed.
    log = link.run("SELECT ended, packed FROM logs WHERE log_id = ?", log_id)
    if not log:
        return None
    ended, packed = log[0]
    table, length = ("packs", "size") if packed != NOT_PACKED else ("events", "length(body)")
    query = f"SELECT seq, {length} FROM {table} WHERE log_id = ? AND seq > ? AND held > 0 ORDER BY seq LIMIT ?"
    there: list[tuple[int, int]] = link.run(query, log_id, after, limit)
    last = size = 0
    for seq, length in there:  # a pack may hold many events: read no more packs than are needed
        size += length
        is_full = seq - after > limit if packed else last - after >= limit
        if last and (is_full or size > most_bytes):
            break
        last = seq
    is_all = len(there) < limit and last == (there[-1][0] if there else 0) and last - after <= limit
    bodies = f"SELECT seq, held, body FROM {table} WHERE log_id = ? AND seq > ? AND seq <= ? AND held > 0 ORDER BY seq"
    events: list[Event] = []
    log_of, homes = PackedLog(link, log_id, cache), StoredHomes(link, log_id, cache)
    size = 0
    for seq, held, body in link.run(bodies, log_id, after, last):
        if packed:
            events += log_of.events(seq, held, body)
            continue
        plain = expand(body)
        size += len(plain)
        if events and size > most_bytes:  # it was small only while it was compressed
            is_all = False
            break
        events += unpack_plain(plain, homes)
    first = next((place for place, event in enumerate(events) if event.seq > after), len(events))
    return events[first : first + limit], is_all and bool(ended)


def read_deltas(link: Link, log_id: str, after: int, upto: int, cache: Cache) -> list[Event]:
    """Read the deltas of a log in a range of numbers. The first and the last pack may reach beyond the range."""
    between = (log_id, after, upto)
    if _is_packed(link, log_id):
        query = "SELECT seq, held, body FROM packs WHERE log_id = ? AND seq > ? AND seq - held < ? AND deltas > 0 ORDER BY seq"
        log = PackedLog(link, log_id, cache)
        found = [event for row in link.run(query, *between) for event in log.deltas(*row)]
    else:
        packs = "SELECT body FROM events WHERE log_id = ? AND seq > ? AND seq - held < ? AND kind = ? ORDER BY seq"
        found = [event for (body,) in link.run(packs, *between, DELTAS_KIND) for event in unpack_events(body)]
    return [event for event in found if after < event.seq <= upto]


def last_event(link: Link, log_id: str) -> int:
    """Return the number of the last event of a log; 0 if it has none."""
    found = link.run(
        "SELECT (SELECT MAX(seq) FROM packs WHERE log_id = ?), (SELECT MAX(seq) FROM events WHERE log_id = ?)",
        *(log_id, log_id),
    )[0]
    return max(number or 0 for number in found)


def _is_packed(link: Link, log_id: str) -> bool:
    return bool(link.value("SELECT packed FROM logs WHERE log_id = ?", log_id))


def read_log(link: Link, log_id: str, place: str, cache: Cache) -> StoredLog | None:
    """Read a log with its private parts, without deltas; raise LogUnreadable if rows are missing or damaged."""
    columns = "ended, pruned, packed, lost, lost_steps, lost_epoch, is_alone"
    log = link.run(f"SELECT {columns} FROM logs WHERE log_id = ?", log_id)
    if not log:
        return None
    ended, thinned, packed, count, steps, epoch, is_alone = log[0]
    ended, thinned, losses = bool(ended), bool(thinned), Losses(count, steps, epoch, bool(is_alone))
    read = _read_packs if packed else _read_rows
    rows, end = read(link, log_id, place, cache, thinned)
    return StoredLog(rows=rows, seq=end[0], sub=end[1], ended=ended, thinned=thinned, losses=losses)


def _read_packs(
    link: Link, log_id: str, place: str, cache: Cache, thinned: bool
) -> tuple[list[LogRow], tuple[int, int]]:
    """Return the rows of a packed log but for deltas, and the place of its last row."""
    found = link.run(
        "SELECT seq, held, deltas, body, private FROM packs WHERE log_id = ? ORDER BY seq",
        log_id,
    )
    reader, rows, before = PackedLog(link, log_id, cache), list[LogRow](), 0
    for seq, held, deltas, body, private in found:
        if not thinned and seq - held != before:
            raise LogUnreadable(place, log_id, before + 1, _describe_gap(before, seq - held))
        before = seq
        try:
            rows += reader.rows(seq, held, deltas, body, private, thinned=thinned)
        except UNREADABLE as exc:
            raise LogUnreadable(place, log_id, max(seq - held + 1, 1), str(exc)) from exc
    last = rows[-1] if rows else None
    return rows, (before, 0) if last is None or last.seq < before else (last.seq, last.sub)


def _read_rows(
    link: Link, log_id: str, place: str, cache: Cache, thinned: bool
) -> tuple[list[LogRow], tuple[int, int]]:
    """Return the rows of a log that is not packed, but for deltas, and the place of its last row."""
    packs: Sequence[Any] = link.run(
        "SELECT seq, sub, held, body, private FROM events WHERE log_id = ? AND kind <> ? ORDER BY seq, sub",
        *(log_id, DELTAS_KIND),
    )
    deltas, last = link.run(
        "SELECT COALESCE(SUM(held), 0), COALESCE(MAX(seq), 0) FROM events WHERE log_id = ? AND kind = ?",
        *(log_id, DELTAS_KIND),
    )[0]
    end: tuple[int, int] = max((last, 0), tuple(packs[-1][:2]) if packs else (0, 0))
    if not thinned and deltas + sum([pack[2] for pack in packs]) != end[0]:
        # Rows are missing: read the place of each pack only now, to describe the gap.
        before = 0
        for seq, held in link.run("SELECT seq, held FROM events WHERE log_id = ? AND held > 0 ORDER BY seq", log_id):
            if seq - held != before:
                raise LogUnreadable(place, log_id, before + 1, _describe_gap(before, seq - held))
            before = seq
    rows: list[LogRow] = []
    homes = StoredHomes(link, log_id, cache)
    for seq, sub, held, body, private in packs:
        try:
            if thinned:
                rows += [LogRow(event.seq, 0, event) for event in (unpack_events(body, homes) if body else ())]
            else:
                unpacked = unpack_rows(seq, sub, held, body, private, homes)
                _check_joint(rows, unpacked[0])
                rows += unpacked
        except UNREADABLE as exc:
            raise LogUnreadable(place, log_id, max(seq - held + 1, 1), str(exc)) from exc
    return rows, end


def _check_joint(rows: list[LogRow], first: LogRow) -> None:
    """Raise ValueError if a private row is missing between these rows and the first of the next pack."""
    if first.sub > 1 and (not rows or (rows[-1].seq, rows[-1].sub) != (first.seq, first.sub - 1)):
        raise ValueError(f"the private row {first.seq}.{first.sub - 1} is missing")


def _describe_gap(before: int, until: int) -> str:
    """Describe the gap or overlap between event `before` and the events after `until`."""
    if until < before:
        return f"it is stored twice, from event {until + 1} on"
    return f"event {until} is missing" if until == before + 1 else f"events {before + 1} to {until} are missing"
