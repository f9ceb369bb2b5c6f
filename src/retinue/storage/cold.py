"""The rows of a log that has ended, rewritten: without the texts that have a home, and with its deltas in columns.

`rewrite` and `unpack` are pure functions. What a log says is the same before and after, event by event, except the times
of deltas: of those that follow each other, some keep their time, and the others lie on a line between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from msgspec import Struct

from ..core.events import Event
from ..core.rows import Private
from .deltas import (
    Columns,
    Deltas,
    Planes,
    Stream,
    Streams,
    build_deltas,
    decode_row,
    from_planes,
    interpolated,
    is_arguments,
    is_text,
    sampled,
    times_of,
    to_planes,
)
from .packs import decode_private, events_from_json
from .references import (
    PACK_BYTES,
    Excerpt,
    Finder,
    Gapped,
    Homes,
    compress,
    decode_excerpt,
    encode_excerpt,
    expand,
    filled,
    is_excerpt,
)
from .schema import DELTAS_KIND

MOST_EVENTS, MOST_BYTES = 1_000, 256_000
"""The events, and the bytes that they take as JSON, that fill a pack."""
FEW = 250
"""So few events at the end of a log join the pack before."""
_DELTA_BYTES = 40
"""Bytes that a delta counts, besides its piece."""

_decode_parts = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_private = msgspec.json.Decoder(list[tuple[int, int, msgspec.Raw]]).decode
_pack = msgspec.msgpack.Encoder().encode


class Pack(Struct, frozen=True, array_like=True, tag="p", gc=False):
    """Events of a packed log: `events` as JSON, and deltas between them, which have the numbers that are free."""

    threads: list[str]
    events: Gapped
    numbers: Planes
    """The streams of the deltas, in order, each as its distance from the one before."""
    least: int
    starts: Planes
    """The place in the text of each of these streams at which its first piece here begins, from `least` on."""
    columns: Columns
    streams: Streams | None = None
    """The streams of the log, if this is its only pack."""


_decode_pack = msgspec.msgpack.Decoder(Pack).decode
_decode_streams = msgspec.msgpack.Decoder(Streams).decode
_decode_excerpt = msgspec.msgpack.Decoder(Excerpt).decode

HotRow = tuple[int, int, str, int, bytes | None, bytes | None]
"""Of a row of `events`: seq, sub, kind, number of events, events, private parts."""
PackRow = tuple[int, int, int, int, bytes, bytes | None]
"""Of a row of `packs`: seq, number of events, number of deltas, size, body, private parts."""
SaidRow = tuple[int, int, bytes]
"""Of a row of `said`: last place, length, body."""


class Rewritten(Struct):
    """A log as it is stored from now on, and the columns that were rewritten with it."""

    packs: list[PackRow]
    said: list[SaidRow]
    columns: list[bytes | None]


class _Item:
    """An event that is no delta, with its gaps, or a private part."""

    __slots__ = ("body", "gaps", "private", "seq")

    def __init__(self, seq: int, body: bytes, gaps: Sequence[int] = (), private: bytes | None = None) -> None:
        self.seq, self.body, self.gaps, self.private = seq, body, gaps, private


class _Delta(Struct, gc=False, array_like=True):
    """A delta of the log: its number, stream, length and time."""

    seq: int
    stream: int
    length: int
    at: float


MOST_STREAMED = 8_000_000
"""Bytes of streamed text of a log that is packed. The packer and the readers of packs hold a stream whole."""


class TooLarge(Exception):
    """A log has so much streamed text that it stays as it was written."""


class _Texts:
    """The streams of a log, joined over all its rows."""

    def __init__(self) -> None:
        self._size = 0
        self.heads: dict[bytes, int] = {}
        self._pieces: list[list[bytes]] = []

    def add(self, row: Deltas) -> Iterator[_Delta]:
        """Add a row of deltas; yield them."""
        own: list[int] = []
        for head, text in zip(row.heads, row.texts, strict=True):
            number = self.heads.setdefault(head, len(self._pieces))
            if number == len(self._pieces):
                self._pieces.append([])
            self._pieces[number].append(text)
            self._size += len(text)
            own.append(number)
        if self._size > MOST_STREAMED:
            raise TooLarge
        columns = row.columns
        deltas = zip(from_planes(columns.order), from_planes(columns.lengths), times_of(columns.at), strict=True)
        for seq, (number, length, at) in enumerate(deltas, row.first):
            yield _Delta(seq, own[number], length, at)

    def joined(self) -> list[tuple[bytes, bytes]]:
        """Return each stream: what its deltas share, and its text."""
        return [(head, b"".join(self._pieces[number])) for head, number in self.heads.items()]


def rewrite(
    rows: Iterable[HotRow], threads: Mapping[str, tuple[int, Sequence[bytes]]], columns: Sequence[bytes | None] = ()
) -> Rewritten:
    """Rewrite the rows of a log, in order, and columns of JSON that say the same texts.

    `threads` has messages that the log may refer to: by thread the place of the first, and all as JSON. Raise TooLarge before
    much of the log is held.
    """
    finder, texts = Finder(threads), _Texts()
    items: list[_Item | _Delta] = []
    for row in rows:
        items += _items_of(row, texts, finder)
    for item in items:
        if isinstance(item, _Item):
            finder.note(item.body if item.private is None else item.private)
    streams = texts.joined()
    for head, text in streams:
        if is_text(head):
            finder.note_text(text)
        else:
            finder.note(text)
    given = [None if column is None else _parts(expand(column), finder) for column in columns]
    for column in given:
        if column is not None:
            finder.note(column[0])
    finder.settle()
    table = [
        finder.replace_text(text) if is_text(head) else finder.replace(text) if is_arguments(head) else Gapped(text)
        for head, text in streams
    ]
    packed = Streams([*finder.threads], [head for head, _ in streams], table)
    chunks = list(_chunks(items))
    _join_last(chunks)
    used: dict[int, int] = {}
    is_only = len(chunks) == 1
    packs = [_packed(chunk, size, finder, used, packed if is_only else None) for chunk, size in chunks]
    said: list[SaidRow] = [] if is_only or not streams else [(0, len(streams), compress(_pack(packed)))]
    done = [None if one is None else encode_excerpt(finder.replace(*one), finder.threads) for one in given]
    return Rewritten(packs, [*said, *_said_rows(finder.items)], done)


def _parts(plain: bytes, finder: Finder) -> tuple[bytes, list[int]]:
    """Return JSON and the gaps that it has already, with the homes as the finder numbers them."""
    if not is_excerpt(plain):
        return plain, []
    excerpt = _decode_excerpt(plain)
    gaps = [*excerpt.text.gaps]
    for place in range(1, len(gaps), 5):
        gaps[place] = finder.number(excerpt.threads[gaps[place] - 1])
    return excerpt.text.kept, gaps


def _items_of(row: HotRow, texts: _Texts, finder: Finder) -> list[_Item | _Delta]:
    """Return what a row of `events` holds, in order: each event, each private part after its event."""
    seq, _, kind, held, body, private = row
    found: list[tuple[int, int, _Item | _Delta]] = []
    plain = b"[]" if body is None else expand(body)
    if kind == DELTAS_KIND and plain[:1] != b"[":  # else they could not be stored in columns
        return list(texts.add(decode_row(plain)))
    kept, gaps = _parts(plain, finder)
    parts = [bytes(part) for part in _decode_parts(kept)]
    starts = [1]
    for part in parts:
        starts.append(starts[-1] + len(part) + 1)
    own: dict[int, list[int]] = {}
    at = 0
    for place in range(0, len(gaps), 5):
        at += gaps[place]
        number = bisect_right(starts, at) - 1
        mine = own.setdefault(number, [])
        before = at - starts[number] - sum(mine[::5])
        mine += [before, *gaps[place + 1 : place + 5]]
    for number, part in enumerate(parts):
        found.append((seq - held + 1 + number, 0, _Item(seq - held + 1 + number, part, own.get(number, ()))))
    for at_seq, at_sub, part in () if private is None else _decode_private(expand(private)):
        encoded = b"[%d,%d,%b]" % (at_seq, at_sub, bytes(part))
        found.append((at_seq, at_sub, _Item(at_seq, b"", (), encoded)))
    found.sort(key=lambda one: one[:2])
    return [item for _, _, item in found]


def _chunks(items: Sequence[_Item | _Delta]) -> Iterator[tuple[list[_Item | _Delta], int]]:
    """Yield the items of each pack, and their size. Private parts stay with their event."""
    some: list[_Item | _Delta] = []
    events = size = 0
    for item in items:
        is_event = isinstance(item, _Delta) or item.private is None
        if is_event and some and (events >= MOST_EVENTS or size >= MOST_BYTES):
            yield some, size
            some, events, size = [], 0, 0
        some.append(item)
        events += is_event
        size += item.length + _DELTA_BYTES if isinstance(item, _Delta) else len(item.body)
        if isinstance(item, _Item):
            size += sum(_text_sizes(item.gaps))
    if some:
        yield some, size


def _join_last(chunks: list[tuple[list[_Item | _Delta], int]]) -> None:
    """Let the last pack join the one before if it is small."""
    if len(chunks) > 1 and len(chunks[-1][0]) <= FEW and chunks[-2][1] + chunks[-1][1] < MOST_BYTES:
        some, size = chunks.pop()
        chunks[-1] = [*chunks[-1][0], *some], chunks[-1][1] + size


def _text_sizes(gaps: Sequence[int]) -> Iterator[int]:
    for place in range(0, len(gaps), 5):
        yield gaps[place + 4] or 1_000


def _packed(
    items: Sequence[_Item | _Delta], size: int, finder: Finder, used: dict[int, int], streams: Streams | None
) -> PackRow:
    """Encode the items of a pack. `used` is how much of each stream the packs before have."""
    deltas = [item for item in items if isinstance(item, _Delta)]
    events = [item for item in items if isinstance(item, _Item) and item.private is None]
    parts = [item.private for item in items if isinstance(item, _Item) and item.private is not None]
    body, gaps = _joined([finder.replace(item.body, item.gaps) for item in events])
    met = sorted({delta.stream for delta in deltas})
    numbers = {number: place for place, number in enumerate(met)}
    starts = [used.get(number, 0) for number in met]
    least = min(starts, default=0)
    for delta in deltas:
        used[delta.stream] = used.get(delta.stream, 0) + delta.length
    seqs = [delta.seq for delta in deltas]
    columns = Columns(
        to_planes([numbers[delta.stream] for delta in deltas]),
        to_planes([delta.length for delta in deltas]),
        sampled(seqs, [delta.at for delta in deltas]),
    )
    steps = to_planes([number - before for before, number in pairwise([0, *met])])
    offsets = to_planes([start - least for start in starts])
    pack = Pack([*finder.threads], Gapped(body, gaps), steps, least, offsets, columns, streams)
    private = None
    if parts:
        private = encode_excerpt(finder.replace(b"[%b]" % b",".join(parts)), finder.threads)
    last = max(item.seq for item in items)
    return last, len(events) + len(deltas), len(deltas), size, compress(_pack(pack)), private


def _joined(parts: Sequence[Gapped]) -> tuple[bytes, list[int]]:
    """Join events with their gaps to one list."""
    kept: list[bytes] = []
    gaps: list[int] = []
    before = 1
    for place, part in enumerate(parts):
        if place:
            kept.append(b",")
            before += 1
        kept.append(part.kept)
        own = 0
        for at in range(0, len(part.gaps), 5):
            gaps += [before + part.gaps[at], *part.gaps[at + 1 : at + 5]]
            own, before = own + part.gaps[at], 0
        before += len(part.kept) - own
    return b"[%b]" % b"".join(kept), gaps


def _said_rows(items: Sequence[bytes]) -> Iterator[SaidRow]:
    some: list[bytes] = []
    size = last = 0
    for item in items:
        if some and size + len(item) > PACK_BYTES:
            yield last, size, compress(b"".join(some))
            some, size = [], 0
        some.append(item)
        size, last = size + len(item), last + len(item)
    if some:
        yield last, size, compress(b"".join(some))


# --- reading

StreamOf = Callable[[int], Stream]
"""Returns a stream of the log by its number."""


def read_streams(body: bytes) -> Streams:
    return _decode_streams(expand(body))


def stream_of(streams: Streams, number: int, homes: Homes) -> Stream:
    return Stream(streams.heads[number], filled(streams.texts[number], streams.threads, homes))


def read_pack(body: bytes) -> Pack:
    return _decode_pack(expand(body))


def events_of(pack: Pack, homes: Homes) -> list[Event]:
    """Return the events of a pack that are no deltas."""
    return events_from_json(filled(pack.events, pack.threads, homes))


def deltas_of(pack: Pack, seq: int, held: int, events: Sequence[Event], stream: StreamOf) -> list[Event]:
    """Return the deltas of a pack, which has the numbers up to `seq`, so many; `events` are the others."""
    if not any(pack.columns.order):
        return []
    others = {event.seq for event in events}
    seqs = [number for number in range(seq - held + 1, seq + 1) if number not in others]
    streams = [stream(number) for number in accumulate(from_planes(pack.numbers))]
    starts = [pack.least + offset for offset in from_planes(pack.starts)]
    return build_deltas(streams, starts, pack.columns, seqs, interpolated(seqs, pack.columns.at))


def all_of(pack: Pack, seq: int, held: int, homes: Homes, stream: StreamOf) -> list[Event]:
    """Return all events of a pack, in order."""
    events = events_of(pack, homes)
    deltas = deltas_of(pack, seq, held, events, stream)
    if len(events) + len(deltas) != held:
        raise ValueError(f"it holds {len(events) + len(deltas)} events, not {held}")
    if not deltas or not events:
        return events or deltas
    place: list[Any] = [None] * held
    for event in events:
        place[event.seq - seq + held - 1] = event
    left = iter(deltas)
    return [next(left) if event is None else event for event in place]


def private_of(body: bytes | None, homes: Homes) -> list[tuple[int, int, Private]]:
    """Return the private parts of a pack."""
    return [] if body is None else decode_private(decode_excerpt(body, homes))


def without_deltas(pack: Pack) -> bytes:
    """Encode a pack without its deltas."""
    bare = Pack(pack.threads, pack.events, [b""], 0, [b""], Columns([b""], [b""], []))
    return compress(_pack(bare))
