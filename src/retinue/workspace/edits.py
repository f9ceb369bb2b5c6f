"""Replacing text in a file as bytes, so that what is not replaced stays as it was, whatever its encoding."""

from __future__ import annotations

import re
from typing import NamedTuple


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
    """The line that would match the first one of `old` if white space did not count."""
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
