"""Files as lines of text: read a part of a large one, tell text from binary, replace text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

LINE_BYTES = 10_000
"""The part of a line that is kept."""
WINDOW_CHARS = 64_000
"""The length of one reading; an agent cuts longer results."""
READ_BYTES = 1_000_000_000
"""The part of a file, from its beginning, that can be read."""
_COUNTED_BYTES = 100_000_000
_CHUNK = 1 << 20


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
    if stream.read(3) != codecs.BOM_UTF8:
        stream.seek(0)
    left = checked = most
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
    lines = read_lines(stream, check)
    position = 0
    for _ in zip(range(offset), lines, strict=False):
        position += 1
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


def _count_lines(stream: BinaryIO, check: Callable[[], None]) -> tuple[int, bool]:
    count, read, last = 0, 0, b"\n"
    while chunk := stream.read(_CHUNK):
        check()
        count, read, last = count + chunk.count(b"\n"), read + len(chunk), chunk
        if read >= _COUNTED_BYTES:
            return count, False
    return count + (not last.endswith(b"\n")), True


class Edit(NamedTuple):
    """The lines of the old text, and the file with it replaced."""

    lines: list[int]
    data: bytes


def replace_text(data: bytes, old: bytes, new: bytes) -> Edit:
    """Replace every occurrence. A line end in `old` matches either kind; those of `new` become like the file's."""
    ending = b"\r\n" if b"\r\n" in data[: data.find(b"\n") + 1] else b"\n"
    replacement = ending.join(_lines(new))
    pattern = re.compile(rb"\r?\n".join(re.escape(line) for line in _lines(old)))
    starts = [match.start() for match in pattern.finditer(data)]
    return Edit(_line_numbers(data, starts), pattern.sub(lambda _: replacement, data))


def nearly_at(data: bytes, old: bytes) -> int | None:
    """Return the line that matches the first one of `old`, white space apart."""
    wanted = next((line.split() for line in _lines(old) if line.strip()), None)
    if wanted is None:
        return None
    return next((number for number, line in enumerate(data.split(b"\n"), 1) if line.split() == wanted), None)


def _lines(text: bytes) -> list[bytes]:
    return text.replace(b"\r\n", b"\n").split(b"\n")


def _line_numbers(data: bytes, positions: list[int]) -> list[int]:
    numbers: list[int] = []
    line, before = 1, 0
    for position in positions:
        line += data.count(b"\n", before, position)
        before = position
        numbers.append(line)
    return numbers
