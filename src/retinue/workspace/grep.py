"""Searching files for lines that match a regular expression of a model.

RE2 runs it: its time grows with the text, not exponentially as that of a backtracking engine can, and it releases the
interpreter lock while it searches. It holds the lock while it compiles, so the size of a pattern is bounded first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, BinaryIO

from ..core.errors import ExecutionFailed, FilesystemDown, FilesystemError, InvalidArguments
from ..core.filesystem import FileEntry
from .history import Files
from .text import WINDOW_CHARS, is_binary, read_lines

MOST_MATCHES = 500
MOST_BYTES = 100_000_000
"""The number of bytes that one search reads at most."""
SECONDS = 20.0
"""The time that one search may take."""
SHOWN_CHARS = 300
"""The length of an excerpt of a line."""
LONGEST_PATTERN = 1000
_BLOCK_BYTES = 1 << 16
_PROGRAM_BYTES = 3 << 15
"""The memory for a compiled pattern. With so much, compiling takes at most 30 ms of the interpreter lock."""
_SEARCH_BYTES = 8 << 20


class LinePattern:
    """A compiled pattern that finds lines."""

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise InvalidArguments("pattern must not be empty")
        if len(pattern) > LONGEST_PATTERN:
            size = f"it has {len(pattern):,} characters, the limit is {LONGEST_PATTERN:,}"
            raise InvalidArguments(f"invalid regular expression: {size}")
        self._regex = _compile(pattern)
        self._by_line = "\\A" in pattern or "\\z" in pattern  # they mean the ends of a line here
        self._end = time.monotonic() + SECONDS

    def find(self, block: bytes, first: int, most: int) -> list[tuple[int, str]]:
        """Return the numbers and texts of matching lines; `first` is the number of the block's first line."""
        if time.monotonic() > self._end:
            raise ExecutionFailed(
                f"the search was stopped after {SECONDS:g} s: make the pattern simpler, or search in a smaller folder"
            )
        try:
            block.decode()
        except UnicodeDecodeError:  # "." matches no broken character
            block = block.decode(errors="replace").encode()
        found: list[tuple[int, str]] = []
        counted = 0  # the bytes whose lines are in `first`
        for start in self._starts(block):
            first += block.count(b"\n", counted, start)
            counted = start
            begin = block.rfind(b"\n", 0, start) + 1
            found.append((first, _excerpt(block[begin : _line_end(block, start)], start - begin)))
            if len(found) >= most:
                break
        return found

    def _starts(self, block: bytes) -> Iterator[int]:
        """Yield the position of the first match in each line."""
        begin = 0
        while begin <= len(block):
            if self._by_line:
                start, match = begin, self._regex.search(block[begin : _line_end(block, begin)])
            else:
                start, match = 0, self._regex.search(block, begin)
                if match is None:
                    return
            if match is not None:
                yield start + match.start()
                begin = start + match.start()
            begin = _line_end(block, begin) + 1


def _line_end(block: bytes, position: int) -> int:
    end = block.find(b"\n", position)
    return len(block) if end < 0 else end


def _compile(pattern: str) -> Any:
    re2: Any = import_module("re2")  # untyped, and loaded by the first search only
    options = re2.Options()
    options.log_errors, options.never_nl = False, True
    try:
        data = b"(?m)" + pattern.encode()
        options.max_mem = _PROGRAM_BYTES
        re2.compile(data, options)
        options.max_mem = _SEARCH_BYTES
        return re2.compile(data, options)
    except UnicodeEncodeError as exc:
        raise InvalidArguments(f"pattern has a character that is not text, at position {exc.start}") from exc
    except re2.error as exc:
        reason = exc.args[0].decode(errors="replace").replace("(?m)", "", 1)[:100]
        raise InvalidArguments(
            f"invalid regular expression: {reason}. The syntax is RE2's: there is no look-around such as (?=…), "
            "no back-reference such as \\1, and a repeat goes up to 1000"
        ) from exc


def _excerpt(line: bytes, position: int) -> str:
    """Return the line, or the part of a long one around the match."""
    text = line.decode()
    if len(text) <= SHOWN_CHARS:
        return text
    position = len(line[:position].decode())
    start = max(0, min(position - SHOWN_CHARS // 3, len(text) - SHOWN_CHARS))
    end = start + SHOWN_CHARS
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))


@dataclass(slots=True)
class Findings:
    """The matches of a search, and what it did not look at."""

    lines: list[str] = field(default_factory=list[str])
    chars: int = 0
    bytes: int = 0
    unreadable: int = 0
    full: bool = False
    stopped_at: str | None = None
    """The file in which the limit on bytes was reached."""

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.chars += len(line) + 1
        self.full = len(self.lines) >= MOST_MATCHES or self.chars >= WINDOW_CHARS

    def notes(self) -> Iterator[str]:
        if self.full:
            yield f"[stopped at {len(self.lines)} matches, there may be more: narrow the pattern or the path]"
        if self.stopped_at is not None:
            yield f"[stopped in {self.stopped_at} after {MOST_BYTES:,} bytes, not all was searched: narrow the path]"
        if self.unreadable:
            yield f"[files that could not be read: {self.unreadable}]"


def grep(filesystem: Files, files: Iterable[FileEntry], pattern: LinePattern, check: Callable[[], None]) -> Findings:
    """Search file by file until there is enough. `check` is called between blocks and may raise."""
    findings = Findings()
    for file in files:
        check()
        try:
            with filesystem.open(file.path) as stream:
                if not is_binary(stream):
                    _grep_file(file.path, stream, pattern, findings, check)
        except FilesystemDown:
            raise
        except (FilesystemError, OSError):
            findings.unreadable += 1
        if findings.full or findings.stopped_at is not None:
            break
    return findings


def _grep_file(
    path: str, stream: BinaryIO, pattern: LinePattern, findings: Findings, check: Callable[[], None]
) -> None:
    for first, data, size in _blocks(stream, check):
        for number, text in pattern.find(data, first, MOST_MATCHES - len(findings.lines)):
            findings.add(f"{path}:{number}: {text}")
            if findings.full:
                return
        findings.bytes += size
        if findings.bytes >= MOST_BYTES:
            findings.stopped_at = path
            return


def _blocks(stream: BinaryIO, check: Callable[[], None]) -> Iterator[tuple[int, bytes, int]]:
    """Yield blocks of lines: the number of the first, the text, and the bytes read with those cut from long lines."""
    lines: list[bytes] = []
    first, size = 1, 0
    for line in read_lines(stream, check, MOST_BYTES):
        lines.append(line.data)
        size += len(line.data) + line.cut + 1
        if size >= _BLOCK_BYTES:
            check()
            yield first, b"\n".join(lines), size
            first, size = first + len(lines), 0
            lines.clear()
    if lines:
        yield first, b"\n".join(lines), size
