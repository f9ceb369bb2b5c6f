"""Text in the columns of a terminal: how wide it is, cut and wrapped; short figures."""

from __future__ import annotations

import unicodedata


def cells(text: str) -> int:
    """Return the number of columns that text takes."""
    if text.isascii():
        return len(text)
    return sum(_cells_of(letter) for letter in text)


def _cells_of(letter: str) -> int:
    if unicodedata.combining(letter) or letter in "\u200b\u200d\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def cut(text: str, room: int, mark: str = "…") -> str:
    """Return text that takes at most `room` columns."""
    if cells(text) <= room:
        return text
    kept, used = "", cells(mark)
    for letter in text:
        used += _cells_of(letter)
        if used > room:
            break
        kept += letter
    return f"{kept.rstrip()}{mark}" if room >= cells(mark) else ""


def wrapped(text: str, room: int, indent: str = "", later: str | None = None) -> list[str]:
    """Return text as lines of at most `room` columns, broken at spaces where there are any."""
    later, lines = indent if later is None else later, list[str]()
    for paragraph in text.split("\n"):
        lead, line = indent if not lines else later, ""
        first, *others = paragraph.lstrip(" ").split(" ")
        for word in (" " * (len(paragraph) - len(paragraph.lstrip(" "))) + first, *others):
            piece = f" {word}" if line else word
            if cells(line) + cells(piece) <= room - cells(lead):
                line += piece
                continue
            if line:
                lines.append(lead + line)
                lead, line = later, ""
            while cells(word) > room - cells(lead):
                at = max(len(cut(word, room - cells(lead), "")), 1)
                lines.append(lead + word[:at])
                lead, word = later, word[at:]
            line = word
        lines.append(lead + line)
    return lines


def clock(seconds: float) -> str:
    """Return a duration as 0:21, 12:40 or 1:02:03."""
    whole = max(int(seconds), 0)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"


def short_count(number: int) -> str:
    """Return a number as 812, 18k or 1.2M."""
    if number < 1000:
        return str(number)
    if number < 999_500:
        return f"{number / 1000:.0f}k"
    return f"{number / 1_000_000:.1f}M"
