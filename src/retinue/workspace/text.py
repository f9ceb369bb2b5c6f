"""Files as lines of text: read a part of a large one, tell text from binary, replace text."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from io import SEEK_CUR, BytesIO
from typing import BinaryIO, NamedTuple

LINE_BYTES = 10_000
"""The part of a line that is kept."""
WINDOW_CHARS = 64_000
"""The length of one reading; an agent cuts longer results."""
READ_BYTES = 1_000_000_000
"""The part of a file, from its beginning, that can be read."""
_COUNTED_BYTES = 100_000_000
_CHUNK = 1 << 20
_PIECE = 1 << 18
MOST_EDITED = 32_000_000
"""The size of a file after an edit."""
MOST_LINES = 20
"""The number of occurrences whose lines are named."""


class Line(NamedTuple):
    """A line without its end, and the number of bytes that were cut from it."""

    data: bytes
    cut: int

    def decode(self) -> tuple[str, bool]:
        """Return the text, and whether bytes that are not UTF-8 became U+FFFD in it."""
        try:
            return codecs.utf_8_decode(self.data, "strict", not self.cut)[0], False
        except UnicodeDecodeError:
            return codecs.utf_8_decode(self.data, "replace", not self.cut)[0], True


class Window(NamedTuple):
    """Some lines of a file, and what is known of the whole."""

    lines: list[str]
    """Each with its number."""
    next: int
    """The number of lines before the first one that is not in it."""
    total: int
    counted: bool
    """True if `total` is all; otherwise there are more."""
    lossy: bool


def is_binary(stream: BinaryIO) -> bool:
    """Return whether a file is not text. The stream is back at its beginning afterwards."""
    head = stream.read(8192)
    stream.seek(0)
    return b"\0" in head


def read_lines(
    stream: BinaryIO, check: Callable[[], None] = lambda: None, most: int = READ_BYTES, width: int = LINE_BYTES
) -> Iterator[Line]:
    """Yield lines without a byte order mark, until `most` bytes were read. At most `width` bytes of a line are held.

    `check` is called for each megabyte, and may raise.
    """
    if stream.tell() == 0 and stream.read(3) != codecs.BOM_UTF8:
        stream.seek(0)
    left = checked = most - stream.tell()
    while left > 0 and (raw := stream.readline(min(width + 1, left))):
        left -= len(raw)
        cut = 0
        if len(raw) > width and not raw.endswith(b"\n"):
            skipped, ended = _skip_line(stream, left, check)
            left -= skipped
            raw, cut = raw[:width], 1 + skipped - ended
        if checked - left >= _CHUNK:
            check()
            checked = left
        yield Line(raw.removesuffix(b"\n").removesuffix(b"\r"), cut)


def _skip_line(stream: BinaryIO, most: int, check: Callable[[], None]) -> tuple[int, bool]:
    """Read to the end of a line; return the number of bytes, and whether there was an end."""
    skipped = 0
    while skipped < most and (rest := stream.readline(min(_CHUNK, most - skipped))):
        check()
        skipped += len(rest)
        if rest.endswith(b"\n"):
            return skipped, True
    return skipped, False


def read_window(stream: BinaryIO, offset: int, limit: int, check: Callable[[], None] = lambda: None) -> Window:
    """Read `limit` lines after the first `offset`, fewer where they are long."""
    position = _skip_lines(stream, offset, check)
    lines = read_lines(stream, check, READ_BYTES)
    shown: list[str] = []
    chars, lossy = 0, False
    for _, line in zip(range(limit), lines, strict=False):
        position += 1
        text, broken = line.decode()
        note = f" … [{line.cut:,} more bytes in this line]" if line.cut else ""
        shown.append(f"{position:>6}\t{text}{note}")
        chars, lossy = chars + len(shown[-1]) + 1, lossy or broken
        if chars >= WINDOW_CHARS:
            break
    if stream.tell() >= READ_BYTES:
        return Window(shown, position, position, False, lossy)
    rest, counted = _count_lines(stream, check)
    return Window(shown, position, position + rest, counted, lossy)


def _skip_lines(stream: BinaryIO, most: int, check: Callable[[], None]) -> int:
    """Go to the line after so many; return the number of lines that were passed, which may be fewer."""
    passed, last = 0, b"\n"
    while passed < most and (chunk := stream.read(max(0, min(_CHUNK, READ_BYTES - stream.tell())))):
        check()
        count = chunk.count(b"\n")
        if passed + count >= most:
            end = bisect_left(range(len(chunk)), most - passed, key=lambda place: chunk.count(b"\n", 0, place))
            stream.seek(end - len(chunk), SEEK_CUR)
            return most
        passed, last = passed + count, chunk
    return passed + (not last.endswith(b"\n"))


def _count_lines(stream: BinaryIO, check: Callable[[], None]) -> tuple[int, bool]:
    count, read, last = 0, 0, b"\n"
    while chunk := stream.read(_CHUNK):
        check()
        count, read, last = count + chunk.count(b"\n"), read + len(chunk), chunk
        if read >= _COUNTED_BYTES:
            return count, False
    return count + (not last.endswith(b"\n")), True


class Edit(NamedTuple):
    """The number of occurrences of the old text, the lines of the first ones, and the file with all replaced."""

    occurrences: int
    lines: list[int]
    data: bytes


def replace_text(data: bytes, old: bytes, new: bytes) -> Edit:
    """Replace every occurrence. A line end in `old` matches either kind; those of `new` become like the file's.

    ValueError if the result is too large. Everything goes in pieces, so that none holds the interpreter lock for long.
    """
    ending = b"\r\n" if b"\r\n" in data[: data.find(b"\n") + 1] else b"\n"
    flat, old = data, old.replace(b"\r\n", b"\n")
    endings: Iterator[re.Match[bytes]] | None = None
    if b"\n" in old and b"\r\n" in data:
        flat, endings = data.replace(b"\r\n", b"\n"), re.finditer(rb"\r?\n", data)
    new = new.replace(b"\r\n", b"\n").replace(b"\n", ending)
    made, lines, count, line = bytearray(), list[int](), 0, 1
    height = old.count(b"\n")
    for piece in _around(flat, old):
        if piece is None:
            made += new
            if len(made) > MOST_EDITED:
                raise ValueError(f"the file would have more than {MOST_EDITED:,} bytes")
            if count < MOST_LINES:
                lines.append(line)
            count, line = count + 1, line + height
            if endings is not None:
                for _ in zip(range(height), endings, strict=False):
                    continue
        else:
            made += piece if endings is None else _with_endings(piece, endings)
            if count < MOST_LINES:
                line += piece.count(b"\n")
    return Edit(count, lines, bytes(made))


def _around(data: bytes, old: bytes) -> Iterator[bytes | None]:
    """Yield what is before, between and after the occurrences of `old`, and None for each of these."""
    start = 0
    while start < len(data):
        end = min(start + _PIECE, len(data))
        window = data[start : end + len(old) - 1]  # whatever begins before `end` is in it
        *before, rest = window.split(old)
        for piece in before:
            yield piece
            yield None
        after = max(end, start + len(window) - len(rest))
        yield rest[: len(rest) - (start + len(window) - after)]
        start = after


def _with_endings(piece: bytes, endings: Iterator[re.Match[bytes]]) -> bytes:
    first, *others = piece.split(b"\n")
    return first + b"".join([next(endings)[0] + line for line in others])


def nearly_at(data: bytes, old: bytes) -> int | None:
    """Return the line that matches the first one of `old`, white space apart."""
    wanted = next((line.split() for line in BytesIO(old) if line.strip()), None)
    if wanted is None:
        return None
    return next((number for number, line in enumerate(BytesIO(data), 1) if line.split() == wanted), None)
