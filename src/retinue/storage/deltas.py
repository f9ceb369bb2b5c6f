"""Deltas in columns: what the deltas of a stream share is stored once, and their pieces as one text with lengths.

A stream is everything that a delta says but its number, time and piece: the deltas of one message, or of the arguments or
output of one call. While a run works, each row has its own streams and texts, so a reader needs no other row. Once the
log is packed, all its rows share one table of streams (`Streams`).

A text is stored as JSON has it between the quotes, so that it can be at home in a message. Arguments are JSON in
themselves: they are stored as they are, because a message has its arguments in the same form.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..core.content import to_json_anyway, to_json_bytes
from ..core.events import DELTAS, ActivityDelta, Event, ToolCallArgsDelta, event_from_bytes
from .references import FAST, LEAST_AT_WORK, Gapped, compress

SAMPLE = 32
"""Of so many deltas one after the other, a packed log has the time of one."""
_OWN = ("seq", "at", "delta")
_shared: dict[type[Event], Callable[[Any], Any]] = {
    kind: attrgetter(*[name for name in kind.__struct_fields__ if name not in _OWN]) for kind in DELTAS
}
_ARGUMENTS, _ACTIVITY = b'{"kind":"tool_call_args_delta"', b'{"kind":"activity_delta"'
_pack, _to_json = msgspec.msgpack.Encoder().encode, msgspec.json.Encoder().encode
_decode_any = msgspec.json.decode


Planes = list[bytes]
"""Numbers as columns of bytes, the lowest first: the higher ones are mostly alike, so they take no room."""


def to_planes(numbers: Sequence[int]) -> Planes:
    """Encode numbers from 0 to 2**32 - 1."""
    packed = struct.pack(f"<{len(numbers)}I", *numbers)
    planes = [packed[place::4] for place in range(4)]
    while planes and not any(planes[-1]):
        planes.pop()
    return planes or [bytes(len(numbers))]


def from_planes(planes: Planes) -> Sequence[int]:
    if len(planes) == 1:
        return planes[0]
    packed = bytearray(4 * len(planes[0]))
    for place, plane in enumerate(planes):
        packed[place::4] = plane
    return struct.unpack(f"<{len(planes[0])}I", packed)


class Columns(Struct, frozen=True, array_like=True, gc=False):
    """Deltas, in order: the stream of each, as a number, the length of its piece in characters, and times as `_times`."""

    order: Planes
    lengths: Planes
    at: list[int]


class Deltas(Struct, frozen=True, array_like=True, tag="d", gc=False):
    """Consecutive deltas with their streams and texts; `first` is the number of the first."""

    first: int
    heads: list[bytes]
    texts: list[bytes]
    columns: Columns


class Streams(Struct, frozen=True, array_like=True, tag="s", gc=False):
    """The streams of a log: what the deltas of each share, and its text."""

    threads: list[str]
    heads: list[bytes]
    texts: list[Gapped]


@lru_cache(maxsize=1_024)
def _read_head(head: bytes) -> Event:
    """Return a delta of a stream. The rows of a log that is not packed have the same heads again and again."""
    return event_from_bytes(head)


class Stream:
    """A stream that is read: a delta to copy, and the text of all pieces."""

    __slots__ = ("delta", "is_json", "text")

    def __init__(self, head: bytes, text: bytes) -> None:
        self.delta: Any = _read_head(head)
        self.is_json = isinstance(self.delta, ActivityDelta)
        is_text = not isinstance(self.delta, ToolCallArgsDelta | ActivityDelta)
        self.text: str = _decode_any(b'"%b"' % text) if is_text else text.decode()

    @property
    def size(self) -> int:
        return 2 * len(self.text) + 1_000


def shared_part(delta: Any) -> Any:
    """Return what the deltas of a stream have in common."""
    return delta.__class__, _shared[delta.__class__](delta)


def head_of(delta: Any) -> bytes:
    """Return a delta without number, time and piece, as JSON."""
    return to_json_bytes(replace(delta, seq=0, at=0.0, delta=[] if isinstance(delta, ActivityDelta) else ""))


def is_arguments(head: bytes) -> bool:
    """Return whether a stream is of arguments, whose text is JSON in itself."""
    return head.startswith(_ARGUMENTS)


def is_text(head: bytes) -> bool:
    """Return whether a stream is of text, which is stored as JSON has it between the quotes."""
    return not head.startswith((_ARGUMENTS, _ACTIVITY))


def stored_pieces(kind: type[Event], pieces: Sequence[Any]) -> tuple[bytes, list[int]]:
    """Return the pieces of a stream as one text, and their lengths in characters."""
    if kind is ActivityDelta:
        pieces = [to_json_anyway(piece).decode() for piece in pieces]
    text = "".join(pieces)
    try:
        stored = _to_json(text)
    except ValueError:  # half of a pair of surrogates: each piece is cleaned by itself
        return stored_pieces(kind, [_decode_any(to_json_anyway(piece)) for piece in pieces])
    is_text = kind is not ActivityDelta and kind is not ToolCallArgsDelta
    return stored[1:-1] if is_text else text.encode(), [len(piece) for piece in pieces]


def pack_deltas(deltas: Sequence[Any]) -> bytes:
    """Encode consecutive deltas as one row."""
    numbers: dict[Any, int] = {}
    order: list[int] = []
    pieces: list[list[Any]] = []
    for delta in deltas:
        number = numbers.setdefault(shared_part(delta), len(pieces))
        if number == len(pieces):
            pieces.append([])
        pieces[number].append(delta.delta)
        order.append(number)
    heads: list[bytes] = []
    texts: list[bytes] = []
    lengths: list[Iterator[int]] = []
    for (kind, _), number in numbers.items():
        text, each = stored_pieces(kind, pieces[number])
        heads.append(head_of(deltas[order.index(number)]))
        texts.append(text)
        lengths.append(iter(each))
    sizes = [next(lengths[number]) for number in order]
    columns = Columns(to_planes(order), to_planes(sizes), _times([one.at for one in deltas]))
    return compress(_pack(Deltas(deltas[0].seq, heads, texts, columns)), FAST, LEAST_AT_WORK)


def _times(times: Sequence[float]) -> list[int]:
    """Return times as numbers without loss: the first one's 64 bits, then the differences, which are small."""
    bits = struct.unpack(f"<{len(times)}q", struct.pack(f"<{len(times)}d", *times))
    return [*bits[:1], *[later - earlier for earlier, later in zip(bits, bits[1:], strict=False)]]


def times_of(numbers: Sequence[int]) -> Sequence[float]:
    bits: list[int] = []
    value = 0
    for number in numbers:
        value += number
        bits.append(value)
    return struct.unpack(f"<{len(bits)}d", struct.pack(f"<{len(bits)}q", *bits))


def unpack_deltas(row: Deltas) -> list[Event]:
    """Return the deltas of a row."""
    columns = row.columns
    times = times_of(columns.at)
    streams = [Stream(head, text) for head, text in zip(row.heads, row.texts, strict=True)]
    return build_deltas(streams, [0] * len(streams), columns, range(row.first, row.first + len(times)), times)


def build_deltas(
    streams: Sequence[Stream],
    starts: Sequence[int],
    columns: Columns,
    seqs: Sequence[int],
    times: Sequence[float],
) -> list[Event]:
    """Return deltas with their numbers and times. `starts` is where the first piece of each stream begins."""
    made: list[Event] = []
    ends = [*starts]
    copied = [stream.delta for stream in streams]
    texts = [stream.text for stream in streams]
    order, lengths = from_planes(columns.order), from_planes(columns.lengths)
    for number, length, seq, at in zip(order, lengths, seqs, times, strict=True):
        start = ends[number]
        ends[number] = end = start + length
        made.append(replace(copied[number], seq=seq, at=at, delta=texts[number][start:end]))
    if any(end > len(text) for end, text in zip(ends, texts, strict=True)):
        raise ValueError("its deltas are longer than their texts")
    if any(stream.is_json for stream in streams):
        made = [_with_json(one) if isinstance(one, ActivityDelta) else one for one in made]
    return made


def _with_json(one: Any) -> Event:
    return replace(one, delta=_decode_any(one.delta))


# --- times of a packed log


def sampled(seqs: Sequence[int], times: Sequence[float]) -> list[int]:
    """Return the times of some deltas: of the first and last of those that follow each other, and of some between."""
    return _times([times[place] for place in _places(seqs)])


def _places(seqs: Sequence[int]) -> list[int]:
    places: list[int] = []
    first = 0
    for place in range(1, len(seqs) + 1):
        if place == len(seqs) or seqs[place] != seqs[place - 1] + 1:
            places += range(first, place - 1, SAMPLE)
            places.append(place - 1)
            first = place
    return places


def interpolated(seqs: Sequence[int], samples: Sequence[int]) -> list[float]:
    """Return a time for each delta; those between two samples lie on a line."""
    times: list[float] = []
    before: tuple[int, float] | None = None
    for place, at in zip(_places(seqs), times_of(samples), strict=True):
        if before is not None and place > before[0] + 1:
            step = (at - before[1]) / (place - before[0])
            times += [before[1] + step * number for number in range(1, place - before[0])]
        times.append(at)
        before = place, at
    return times


def decode_row(plain: bytes) -> Deltas:
    """Return the deltas of a row that is not compressed any more."""
    return _decode_deltas(plain)


_decode_deltas = msgspec.msgpack.Decoder(Deltas).decode
