"""The packer: rewrites the logs that have ended, so that each text is stored once.

Invariants: a log that has ended never changes, so it is read and rewritten without a lock. One transaction then sets its
mark and puts the packs in the place of its rows; of two packers only one finds the mark unset, and the other drops its
work. So a packer that dies loses nothing: before that transaction nothing has changed, and after it only rows that
nobody reads are left, which the next sweep deletes.

The packer takes a small share of the time of its process, so that runs at work do not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from ..core.errors import StoreError
from . import cold
from .database import Link
from .packs import UNREADABLE
from .references import Excerpt, expand, is_excerpt, pack_messages, unpack_messages
from .schema import CLEAN, NOT_PACKED, PACKED
from .sql import SqlStore
from .writes import keep_messages

_log = logging.getLogger(__name__)

LOOK, SWEEP = 0.5, 60.0
"""Seconds between two looks at the logs that this process has ended, and between two at all logs."""
SHARE = 0.05
"""The share of the time that the packer works."""
AT_CLOSE = 1.0
"""Seconds for which a process that closes goes on packing the logs that it has ended."""
_PAGE = 100
_ROWS_AT_ONCE = 100
_MOST_PACKS = 1_000
"""Packs of a thread in which the texts of a log are looked for."""
_SMALL, _MANY_SMALL = 16_384, 8
"""Packs of messages are small up to so many bytes; so many neighbours are merged."""
_STARTED = re.compile(rb'"kind":"run_started".*?"thread_id":("(?:[^"\\]|\\.)*")')
_TO_PACK = f"SELECT log_id FROM logs WHERE ended = 1 AND packed < {CLEAN} AND pruned = 0"
_decode_excerpt = msgspec.msgpack.Decoder(Excerpt).decode


class _Log(Struct):
    """A log as it was written, with the columns of its runs and the messages of its threads."""

    rows: list[Any]
    runs: list[Any]
    threads: Mapping[str, tuple[int, Sequence[bytes]]]


class Packer:
    """Packs the logs that this process ends, soon after, and those that others have left."""

    def __init__(self, store: SqlStore) -> None:
        self._store = store
        self._kept: set[str] = set()
        """Logs that stay as they are: large ones, and damaged ones, for people to look at."""

    async def run(self) -> None:
        """Pack logs until it is cancelled."""
        swept = 0.0
        while True:
            try:
                await self._pack_ended(SHARE)
                if not swept or time.monotonic() - swept > SWEEP:
                    await self.sweep(SHARE)
                    swept = time.monotonic()
            except StoreError as exc:
                _log.warning("logs that have ended could not be packed: %s", exc)
            await asyncio.sleep(LOOK)

    async def finish(self) -> None:
        """Pack what this process has ended, if that takes no longer than a moment."""
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(AT_CLOSE):
                await self._pack_ended(1.0)

    async def sweep(self, share: float = 1.0) -> None:
        """Pack all logs that have ended."""
        last = ""
        query = f"{_TO_PACK} AND log_id > ? ORDER BY log_id LIMIT {_PAGE}"
        while found := await self._store.database.rows(query, last):
            for (log_id,) in found:
                await self._pack_in_time(log_id, share)
            last = found[-1][0]

    async def _pack_ended(self, share: float) -> None:
        ended = self._store.ended
        while ended:
            await self._pack_in_time(ended[0], share)
            ended.popleft()

    async def _pack_in_time(self, log_id: str, share: float) -> None:
        """Pack a log, then rest for as long as others should have."""
        began = time.monotonic()
        if log_id not in self._kept:
            await self.pack(log_id)
        if share < 1.0:
            await asyncio.sleep((time.monotonic() - began) * (1 / share - 1))

    async def pack(self, log_id: str) -> None:
        """Rewrite a log that has ended, unless that is done."""
        database = self._store.database
        log = await database.read(partial(_read, log_id=log_id))
        if log is not None:
            try:
                rewritten = await asyncio.to_thread(_rewrite, log)
            except cold.TooLarge:
                self._kept.add(log_id)
                return
            except UNREADABLE as exc:
                _log.error("the log of run %s cannot be packed, and stays as it is: %s", log_id, exc)
                self._kept.add(log_id)
                return
            await database.write(partial(_swap, log_id=log_id, log=log, new=rewritten), log_id)
        while not await database.write(partial(_clean, log_id=log_id), log_id):
            pass
        for thread_id in log.threads if log is not None else ():
            await self._merge(thread_id)
        while await database.write(_give_back):
            pass

    async def _merge(self, thread_id: str) -> None:
        """Merge small packs of a thread, if there are many together."""
        database = self._store.database
        small = await database.value(
            "SELECT COUNT(*) FROM (SELECT length(body) AS size FROM messages WHERE thread_id = ? "
            f"ORDER BY last DESC LIMIT {_MANY_SMALL}) AS newest WHERE size <= {_SMALL}",
            thread_id,
        )
        if small == _MANY_SMALL:
            await database.write(partial(_merge, thread_id=thread_id), thread_id, threads=[thread_id])


def _read(link: Link, log_id: str) -> _Log | None:
    """Read a log that is to be packed; return None if there is none."""
    log = link.run("SELECT ended, packed, pruned FROM logs WHERE log_id = ?", log_id)
    if not log or not log[0][0] or log[0][1] != NOT_PACKED or log[0][2]:
        return None
    rows = link.run(
        "SELECT seq, sub, kind, held, body, private FROM events WHERE log_id = ? ORDER BY seq, sub",
        log_id,
    )
    runs = link.run("SELECT run_id, request, result FROM runs WHERE log_id = ? ORDER BY run_id", log_id)
    threads: dict[str, tuple[int, Sequence[bytes]]] = {}
    for thread_id, first in _threads_of(rows).items():
        packs = link.run(
            f"SELECT last, held, body FROM messages WHERE thread_id = ? AND last >= ? ORDER BY last LIMIT {_MOST_PACKS}",
            *(thread_id, first),
        )
        if packs:
            messages = [message for _, held, body in packs for message in unpack_messages(body, held)]
            threads[thread_id] = packs[0][0] - packs[0][1] + 1, messages
    return _Log(rows, runs, threads)


def _threads_of(rows: Sequence[Any]) -> dict[str, int]:
    """Return the threads of a log, each with the place after the conversation that its runs continue."""
    threads: dict[str, int] = {}
    for *_, body, _private in rows:
        plain = b"" if body is None else expand(body)
        if plain[:1] == b"[":
            for found in _STARTED.finditer(plain):
                threads.setdefault(msgspec.json.decode(found[1]), 1)
    for *_, body, _private in rows:
        plain = b"" if body is None else expand(body)
        if not is_excerpt(plain):
            continue
        excerpt = _decode_excerpt(plain)
        for found in _STARTED.finditer(excerpt.text.kept):
            threads.setdefault(msgspec.json.decode(found[1]), 1)
        gaps = excerpt.text.gaps
        for place in range(0, len(gaps), 5):
            thread_id, upto = excerpt.threads[gaps[place + 1] - 1], gaps[place + 3]
            known = threads.get(thread_id, 1)
            threads[thread_id] = upto + 1 if known == 1 else min(known, upto + 1)
    return threads


def _rewrite(log: _Log) -> cold.Rewritten:
    columns: list[bytes | None] = []
    for _, request, result in log.runs:
        columns += [request if _has_digest(request) else None, result]
    return cold.rewrite(log.rows, log.threads, columns)


def _has_digest(request: bytes | None) -> bool:
    """Return whether a request is needed after the end of its run: only to recognise the same request."""
    if request is None:
        return False
    try:
        return bool(_decode_digest(request).digest)
    except msgspec.MsgspecError:
        return True  # it is none of ours


class _Digest(Struct):
    digest: str = ""


_decode_digest = msgspec.json.Decoder(_Digest).decode


def _swap(link: Link, log_id: str, log: _Log, new: cold.Rewritten) -> None:
    """Put the packs in the place of the rows, unless another packer has."""
    mine = "log_id = ? AND ended = 1 AND packed = ? AND pruned = 0"
    if not link.run(f"UPDATE logs SET packed = ? WHERE {mine} RETURNING 1", PACKED, log_id, NOT_PACKED):
        return
    link.insert("said (log_id, last, held, body)", [(log_id, *row) for row in new.said])
    link.insert("packs (log_id, seq, held, deltas, size, body, private)", [(log_id, *row) for row in new.packs])
    for place, (run_id, _, _) in enumerate(log.runs):
        request, result = new.columns[2 * place : 2 * place + 2]
        link.run(
            f"UPDATE runs SET {link.moved('runs')}request = ?, result = ? WHERE run_id = ?", request, result, run_id
        )
    for thread_id, (first, messages) in log.threads.items():
        keep_messages(link, thread_id, first + len(messages) - 1)
    # Nobody reads an answered wish again, only its id.
    link.run("UPDATE inbox SET body = ? WHERE log_id = ? AND reply IS NOT NULL", b"null", log_id)


def _clean(link: Link, log_id: str) -> bool:
    """Delete some rows of a packed log; return True if none is left."""
    if link.value("SELECT packed FROM logs WHERE log_id = ?", log_id) != PACKED:
        return True
    some = "SELECT seq, sub FROM events WHERE log_id = ? ORDER BY seq, sub LIMIT ?"
    gone = link.run(
        f"DELETE FROM events WHERE log_id = ? AND (seq, sub) IN ({some}) RETURNING seq", log_id, log_id, _ROWS_AT_ONCE
    )
    is_clean = len(gone) < _ROWS_AT_ONCE
    if is_clean:
        link.run("UPDATE logs SET packed = ? WHERE log_id = ? AND packed = ?", CLEAN, log_id, PACKED)
    return is_clean


def _give_back(link: Link) -> bool:
    return link.give_back()


def _merge(link: Link, thread_id: str) -> None:
    """Merge the small packs at the end of a thread."""
    link.lock_threads([thread_id])
    small: list[Any] = []
    query = "SELECT last, held, length(body) FROM messages WHERE thread_id = ? ORDER BY last DESC"
    for last, held, size in link.run(query, thread_id):
        if size > _SMALL:
            break
        small.append((last, held))
    if len(small) < _MANY_SMALL:
        return
    first = small[-1][0] - small[-1][1] + 1
    packs = link.run(
        "SELECT held, body FROM messages WHERE thread_id = ? AND last >= ? ORDER BY last", thread_id, first
    )
    messages = [message for held, body in packs for message in unpack_messages(body, held)]
    link.run("DELETE FROM messages WHERE thread_id = ? AND last >= ?", thread_id, first)
    link.insert(
        "messages (thread_id, last, held, body)", [(thread_id, *pack) for pack in pack_messages(first, messages)]
    )
