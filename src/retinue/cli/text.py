"""Text for a terminal, cleaned of everything that a terminal would obey; and JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

# Control characters, those that turn the writing direction around, invisible ones, halves of surrogate pairs.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
    "\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def clean(text: str) -> str:
    """Return text that a terminal only shows; control characters become their pictures."""
    if text.isprintable():
        return text
    return _UNSAFE.sub(_picture, text.replace("\r", "").replace("\t", "    "))


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def escape_json(text: str) -> str:
    """Return JSON in which a terminal obeys nothing: what `clean` replaces is escaped, so the value is the same."""
    return _UNSAFE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1] if match[0] != "\x7f" else "\\u007f"


def one_line(text: str, width: int = 100) -> str:
    """Return clean text on one line, cut at a width."""
    line = " ".join(clean(text[: 20 * width]).split())
    return line if len(line) <= width and len(text) <= 20 * width else f"{line[: width - 3]}..."


def arguments(args: Mapping[str, Any]) -> str:
    """Return the arguments of a call, shortened."""
    shown = [
        f'{name}="{one_line(value, 48)}"' if isinstance(value, str) else f"{name}={value!r}"
        for name, value in args.items()
    ]
    return one_line(", ".join(shown), 72)


def headline(text: str, width: int = 100) -> str:
    """Return the first line of a result with letters in it, and how many more there are."""
    lines = text.strip().splitlines()
    if not lines:
        return "(nothing)"
    more = f" (+{len(lines) - 1:,} lines)" if len(lines) > 2 else " (+1 line)" if len(lines) == 2 else ""
    first = next((line for line in lines if any(map(str.isalpha, line))), lines[0])
    return one_line(first, width) + more


def reply_of(text: str) -> str:
    """Return the reply of a sub-agent without the lines on who it was; other text as it is."""
    if not text.startswith("agent_key: "):
        return text
    _, replied, reply = text.partition("\nreply:\n")
    return reply if replied else text[text.find("\nstatus: ") + 1 :]


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned lines that are safe to print."""
    cells = [[one_line(cell, 200) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def moment(at: float | datetime) -> str:
    """Return a time by the local clock, for people."""
    when = at if isinstance(at, datetime) else datetime.fromtimestamp(at)
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def print_fields(fields: Mapping[str, str | None]) -> None:
    """Print the fields that are not empty, one a line."""
    for name, value in fields.items():
        if value:
            print(f"{name}: {one_line(value, 1_000)}")


def print_json(value: Any) -> None:
    """Print JSON with snake_case keys, as every command does."""
    print(escape_json(json.dumps(value, indent=2, default=str)))


def program() -> str:
    """Return what to type to start this program again: `retinue`, if the PATH has it."""
    import os
    import shutil

    if shutil.which("retinue"):
        return "retinue"
    if os.path.basename(sys.argv[0]) == "retinue":
        return min(sys.argv[0], os.path.relpath(sys.argv[0]), key=len)
    return f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m retinue"


def is_unicode(stream: TextIO) -> bool:
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")


def complain(text: str) -> None:
    """Print one line on stderr."""
    print(f"retinue: {one_line(text, 2_000)}", file=sys.stderr, flush=True)
