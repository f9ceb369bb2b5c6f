"""Stored bytes that refer to texts instead of repeating them.

Each text has one home, a row that owns it. A message of a conversation is at home in the packs of its thread (`messages`);
any other text that a log says more than once is at home in the items of the log (`said`). All other rows have a gap and
a reference in the place of the text, as JSON has it: the bytes between two quotes, or whole messages of a thread.

Invariants: the bytes at a place never change while a row refers to it. A reference is written in the transaction of its
text or later, and removed with the text or before.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

LEVEL, FAST = 3, 1
"""Levels of zstd: for what is kept, and for what is soon rewritten."""
LEAST = 20
"""Bytes of the shortest text that is replaced by a reference."""
PACK_BYTES = 65_536
"""Bytes of texts in a pack; a larger text is a pack of its own."""
_COMPRESSED = b"\x01\x28\xb5\x2f\xfd"
"""The first bytes of what is compressed: a 1, and what a frame of zstd begins with."""
_EXCERPT = b"\x93\xa1x"
"""The first bytes of an encoded `Excerpt`."""
_MOST_EXPANDED = 1 << 30
LEAST_COMPRESSED, LEAST_AT_WORK = 128, 4_096
"""The fewest bytes that are compressed: by a packer, and where a run waits for the write. zstd lets other threads run
meanwhile, and to get its turn again costs more than a few bytes do."""
_MOST_SCANNED = 200_000_000
"""Bytes that are searched for texts that are parts of other texts."""
_ANCHOR = 24
_IDS = (
    "run_id|parent_run_id|child_run_id|thread_id|parent_thread_id|message_id|call_id|tool_call_id|parent_tool_call_id|id|"
    "agent|child_agent|tool_name|name|task_id|model|log_id|dropped_message_id"
)
_LITERAL = re.compile(
    rf'"(?:{_IDS})":"[\w.:~-]{{0,64}}"|"(?:child_)?ns":\[[^\]]*\]|"((?:[^"\\]++|\\.)*+)"'.encode(), re.DOTALL
)
"""A JSON string, in group 1, unless it is an id: ids are short, and everywhere."""

_local = threading.local()


class Gapped(Struct, frozen=True, array_like=True, gc=False):
    """Bytes with gaps. Each gap has five numbers: the bytes before it, counted from the gap before, the home, the place in
    the home, and the start and length of the text there. The home 0 is the log, where the place counts bytes; home n is
    the n-th thread of the record. A length of 0 stands for the whole messages from the place to `start`."""

    kept: bytes
    gaps: list[int] = []


class Excerpt(Struct, frozen=True, array_like=True, tag="x", gc=False):
    """JSON with gaps, and the threads it refers to."""

    threads: list[str]
    text: Gapped


class Homes(Protocol):
    """Reads texts at home."""

    def part(self, thread_id: str, place: int, start: int, length: int) -> bytes: ...

    def whole(self, thread_id: str, first: int, last: int) -> bytes:
        """Return messages as JSON, with commas between them."""
        ...

    def said(self, start: int, length: int) -> bytes: ...


def compress(data: bytes, level: int = LEVEL, least: int = LEAST_COMPRESSED) -> bytes:
    """Compress bytes if that makes them smaller by a tenth. They must not begin with 1, as no JSON and no record does."""
    if len(data) < least:
        return data
    made: dict[int, Callable[[bytes], bytes]] | None = getattr(_local, "compressors", None)
    if made is None:
        made = _local.compressors = {}
    if level not in made:
        import zstandard

        made[level] = zstandard.ZstdCompressor(level=level, write_checksum=True).compress
    small = made[level](data)
    return b"\x01" + small if len(small) * 10 < len(data) * 9 else data


def expand(body: bytes) -> bytes:
    """Return the bytes that were compressed; raise ValueError if they are damaged."""
    if body[:5] != _COMPRESSED:
        return body
    import zstandard

    decompressor: Any = getattr(_local, "decompressor", None)
    if decompressor is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor()
    frame = body[1:]
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= _MOST_EXPANDED:
            raise ValueError(f"its pack claims to hold {size:,} bytes")
        return decompressor.decompress(frame)
    except zstandard.ZstdError as exc:
        raise ValueError(f"its pack is damaged: {exc}") from None


def filled(gapped: Gapped, threads: Sequence[str], homes: Homes | None) -> bytes:
    """Return bytes with all texts in their gaps."""
    kept, gaps = gapped.kept, gapped.gaps
    if not gaps:
        return kept
    if homes is None:
        raise ValueError("it refers to texts that are stored elsewhere")
    parts: list[bytes] = []
    at = 0
    numbers = iter(gaps)
    for before, home, place, start, length in zip(numbers, numbers, numbers, numbers, numbers, strict=True):
        parts.append(kept[at : at + before])
        at += before
        if home == 0:
            parts.append(homes.said(start, length))
        elif length:
            parts.append(homes.part(threads[home - 1], place, start, length))
        else:
            parts.append(homes.whole(threads[home - 1], place, start))
    parts.append(kept[at:])
    return b"".join(parts)


_decode_excerpt = msgspec.msgpack.Decoder(Excerpt).decode
_pack = msgspec.msgpack.Encoder().encode


def encode_excerpt(gapped: Gapped, threads: Sequence[str], least: int = LEAST_COMPRESSED) -> bytes:
    """Encode JSON with gaps; JSON without gaps stays JSON."""
    return compress(_pack(Excerpt([*threads], gapped)) if gapped.gaps else gapped.kept, least=least)


def is_excerpt(plain: bytes) -> bool:
    return plain[:3] == _EXCERPT


def decode_excerpt(body: bytes, homes: Homes | None) -> bytes:
    """Return the JSON that `encode_excerpt` was given, or that was stored as it is."""
    plain = expand(body)
    if not is_excerpt(plain):
        return plain
    excerpt = _decode_excerpt(plain)
    return filled(excerpt.text, excerpt.threads, homes)


# --- packs of messages

_decode_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode


def pack_messages(
    first: int, messages: Iterable[bytes], least: int = LEAST_COMPRESSED
) -> Iterator[tuple[int, int, bytes]]:
    """Yield packs of messages from a place on: the place of the last message, their number and the body."""
    some: list[bytes] = []
    size, last = 0, first - 1
    for message in messages:
        if some and size + len(message) > PACK_BYTES:
            yield last, len(some), compress(b"[%b]" % b",".join(some), least=least)
            some, size = [], 0
        some.append(message)
        size, last = size + len(message), last + 1
    if some:
        yield last, len(some), compress(b"[%b]" % b",".join(some), least=least)


def unpack_messages(body: bytes, held: int) -> list[bytes]:
    """Return the messages of a pack as JSON; raise ValueError if some are missing."""
    messages = [bytes(part) for part in _decode_parts(expand(body))]
    if len(messages) != held:
        raise ValueError(f"a pack holds {len(messages)} messages, not {held}")
    return messages


class Cache:
    """Bytes and objects that were read, by key, up to so many bytes; the least used go first. Threads share it."""

    def __init__(self, most: int = 16_000_000) -> None:
        self._most, self._size = most, 0
        self._found: OrderedDict[Any, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any:
        with self._lock:
            found = self._found.get(key)
            if found is None:
                return None
            self._found.move_to_end(key)
            return found[0]

    def put(self, key: Any, value: Any, size: int) -> None:
        with self._lock:
            if key in self._found or size > self._most // 4:
                return
            self._found[key] = value, size
            self._size += size
            while self._size > self._most:
                self._size -= self._found.popitem(last=False)[1][1]


# --- where a text is at home


class Finder:
    """Finds texts at their homes, while rows of a log are rewritten.

    `threads` has the messages of each thread as JSON, with the place of the first. `note` counts the texts of the log;
    `settle` gives those that come more than once, and are in no thread, a home in the log. After that `replace` makes gaps.
    """

    def __init__(self, threads: Mapping[str, tuple[int, Sequence[bytes]]]) -> None:
        self.threads: list[str] = [*threads]
        self.items: list[bytes] = []
        """The texts that are at home in the log, one after the other."""
        self._found: dict[bytes, tuple[int, int, int, int]] = {}
        self._counts: Counter[bytes] = Counter()
        self._starts: list[int] = []
        self._places: list[tuple[int, int]] = []
        self._scanned = 0
        everything: list[bytes] = []
        size = 0
        for home, (first, messages) in enumerate(threads.values(), 1):
            for place, message in enumerate(messages, first):
                for literal in _LITERAL.finditer(message):
                    start, end = literal.span(1)
                    if end - start >= LEAST:
                        self._found.setdefault(literal[1], (home, place, start, end - start))
                self._starts.append(size)
                self._places.append((home, place))
                everything.append(message)
                size += len(message) + 1
        self._everything = b"\n".join(everything)

    def number(self, thread_id: str) -> int:
        """Return the number of a thread as a home."""
        if thread_id not in self.threads:
            self.threads.append(thread_id)
        return self.threads.index(thread_id) + 1

    def note(self, data: bytes) -> None:
        """Count the texts of some JSON."""
        for literal in _LITERAL.finditer(data):
            start, end = literal.span(1)
            if end - start >= LEAST and (text := literal[1]) not in self._found:
                self._counts[text] += 1

    def note_text(self, text: bytes) -> None:
        """Count one text."""
        if len(text) >= LEAST and text not in self._found:
            self._counts[text] += 1

    def settle(self) -> None:
        size = 0
        for text, count in self._counts.items():
            if (place := self._inside(text)) is not None:
                self._found[text] = place
            elif count > 1:
                self._found[text] = 0, 0, size, len(text)
                self.items.append(text)
                size += len(text)
        self._counts.clear()

    def _inside(self, text: bytes) -> tuple[int, int, int, int] | None:
        """Find a text that is a part of a message."""
        if self._scanned > _MOST_SCANNED:
            return None
        at = self._everything.find(text)
        self._scanned += len(self._everything) if at < 0 else at
        if at < 0:
            return None
        number = bisect_right(self._starts, at) - 1
        return *self._places[number], at - self._starts[number], len(text)

    def replace(self, data: bytes, gaps: Sequence[int] = ()) -> Gapped:
        """Put a gap in the place of each text that has a home; `gaps` are gaps that the bytes have already."""
        if gaps:
            return self._replace_between(data, gaps)
        made: list[int] = []
        kept: list[bytes] = []
        self._add(data, kept, made, 0)
        return Gapped(b"".join(kept), made)

    def _replace_between(self, data: bytes, gaps: Sequence[int]) -> Gapped:
        made: list[int] = []
        kept: list[bytes] = []
        at = before = 0
        for place in range(0, len(gaps), 5):
            end = at + gaps[place]
            before = self._add(data[at:end], kept, made, before)
            made += [before, *gaps[place + 1 : place + 5]]
            at, before = end, 0
        self._add(data[at:], kept, made, before)
        return Gapped(b"".join(kept), made)

    def _add(self, data: bytes, kept: list[bytes], made: list[int], before: int) -> int:
        """Append what is kept of some JSON, and its gaps; return the bytes after the last gap."""
        at = 0
        for literal in _LITERAL.finditer(data):
            start, end = literal.span(1)
            if end - start < LEAST:
                continue
            where = self._found.get(literal[1]) or self._begun(literal[1])
            if where is None:
                continue
            kept.append(data[at:start])
            made += [before + start - at, *where]
            before, at = 0, start + where[3]
        kept.append(data[at:])
        return before + len(data) - at

    def replace_text(self, text: bytes) -> Gapped:
        """Make one gap of a text that has a home, or of its beginning, and more of what follows."""
        kept: list[bytes] = []
        made: list[int] = []
        at = before = 0
        while at < len(text):
            rest = text[at:] if at else text
            where = (self._found.get(rest) if len(rest) >= LEAST else None) or self._begun(rest)
            if where is None:
                kept.append(rest)
                break
            made += [before, *where]
            at += where[3]
        return Gapped(b"".join(kept), made)

    def _begun(self, text: bytes) -> tuple[int, int, int, int] | None:
        """Find the longest beginning of a text that a message has, by its first bytes."""
        if len(text) < 2 * _ANCHOR or (found := self._inside(text[:_ANCHOR])) is None:
            return None
        home, place, start, _ = found
        at = self._starts[bisect_left(self._places, (home, place))] + start
        low, high = _ANCHOR, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if self._everything.startswith(text[:middle], at):
                low = middle
            else:
                high = middle - 1
        while not _is_boundary(text, low):
            low -= 1
        return (home, place, start, low) if low >= _ANCHOR else None


def _is_boundary(text: bytes, at: int) -> bool:
    """Return whether no escape of JSON and no character is cut at a place."""
    if at == len(text):
        return True
    if text[at] & 0xC0 == 0x80:
        return False
    escape = text.rfind(b"\\", max(at - 6, 0), at)
    return escape < 0
