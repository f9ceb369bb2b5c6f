"""Texts at home, as rows that refer to them read them: messages of threads, and texts of a log."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from .database import Link
from .references import Cache, decode_excerpt, expand, unpack_messages

_AHEAD = 16
"""Packs that are looked up together."""


class StoredHomes:
    """The homes that the rows of one log refer to, within one transaction. Its packs stay in the cache of the store.

    A pack of a thread is known by its place, its length and its last bytes, a checksum: a thread of the same id may have
    been deleted and made again.
    """

    def __init__(self, link: Link, log_id: str, cache: Cache) -> None:
        self._link, self._log_id, self._cache = link, log_id, cache
        self._threads: dict[str, list[tuple[int, int, Any]]] = {}
        """The packs of each thread that are known: last place, number of messages, key."""
        self._said: list[tuple[int, int]] = []

    def part(self, thread_id: str, place: int, start: int, length: int) -> bytes:
        text = self._message(thread_id, place)[start : start + length]
        if len(text) != length:
            raise ValueError(f"message {place} of thread {thread_id!r}, which it refers to, is shorter")
        return text

    def whole(self, thread_id: str, first: int, last: int) -> bytes:
        return b",".join([self._message(thread_id, place) for place in range(first, last + 1)])

    def _message(self, thread_id: str, place: int) -> bytes:
        last, held, key = self._pack_of(thread_id, place)
        messages = self._cache.get(key)
        if messages is None:
            found = self._link.run("SELECT body FROM messages WHERE thread_id = ? AND last = ?", thread_id, last)
            messages = unpack_messages(found[0][0], held)
            self._cache.put(key, messages, sum(map(len, messages)) + 100 * held)
        return messages[place - last + held - 1]

    def _pack_of(self, thread_id: str, place: int) -> tuple[int, int, Any]:
        packs = self._threads.setdefault(thread_id, [])
        at = bisect_left(packs, (place,))
        if at < len(packs) and packs[at][0] - packs[at][1] < place:
            return packs[at]
        found = self._link.run(
            "SELECT last, held, length(body), substr(body, length(body) - 3) FROM messages "
            f"WHERE thread_id = ? AND last >= ? ORDER BY last LIMIT {_AHEAD}",
            *(thread_id, place),
        )
        if not found or found[0][0] - found[0][1] >= place:
            raise ValueError(f"message {place} of thread {thread_id!r}, which it refers to, is missing")
        known = {pack[0]: pack for pack in packs}
        for last, held, length, tail in found:
            known[last] = last, held, ("messages", thread_id, last, held, length, bytes(tail))
        self._threads[thread_id] = sorted(known.values())
        return known[found[0][0]]

    def said(self, start: int, length: int) -> bytes:
        at = bisect_left(self._said, (start + length,))
        if at == len(self._said) or self._said[at][0] - self._said[at][1] > start:
            self._find_said(start + length)
            at = bisect_left(self._said, (start + length,))
        if at == len(self._said) or self._said[at][0] - self._said[at][1] > start:
            raise ValueError(f"the text at {start} of the log, which it refers to, is missing")
        last, held = self._said[at]
        key = "said", self._log_id, last
        text = self._cache.get(key)
        if text is None:
            query = "SELECT body FROM said WHERE log_id = ? AND last = ?"
            text = expand(self._link.run(query, self._log_id, last)[0][0])
            self._cache.put(key, text, len(text))
        if len(text) != held:
            raise ValueError(f"the texts of the log up to {last} are {len(text)} bytes, not {held}")
        return text[start - last + held : start - last + held + length]

    def _find_said(self, end: int) -> None:
        query = f"SELECT last, held FROM said WHERE log_id = ? AND last >= ? ORDER BY last LIMIT {_AHEAD}"
        found = self._link.run(query, self._log_id, max(end, 1))
        self._said = sorted({*self._said, *[(last, held) for last, held in found]})


class NoMessages:
    """Homes for lists of runs: whole messages are left out."""

    def __init__(self, homes: StoredHomes) -> None:
        self._homes = homes

    def part(self, thread_id: str, place: int, start: int, length: int) -> bytes:
        return self._homes.part(thread_id, place, start, length)

    def whole(self, thread_id: str, first: int, last: int) -> bytes:
        return b""

    def said(self, start: int, length: int) -> bytes:
        return self._homes.said(start, length)


def filled_row(link: Link, log_id: str, body: bytes | None, cache: Cache, *, whole: bool = True) -> bytes | None:
    """Return a column of a run with the texts it refers to."""
    if body is None:
        return None
    homes = StoredHomes(link, log_id, cache)
    return decode_excerpt(bytes(body), homes if whole else NoMessages(homes))
