"""Searching files for lines that match."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from ..core.errors import FilesystemDown, FilesystemError
from ..core.filesystem import FileEntry, Filesystem
from .searcher import Search
from .text import WINDOW_CHARS, is_binary, read_lines

MOST_MATCHES = 500
MOST_BYTES = 100_000_000
"""How much is searched at most."""
_BLOCK_BYTES = 1 << 18


@dataclass(slots=True)
class Findings:
    """What a search found, and what it did not look at."""

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


class Block(NamedTuple):
    """Some lines of a file and the number of the first."""

    first: int
    data: bytes
    size: int
    """With what was left out of long lines."""


def grep(filesystem: Filesystem, files: Iterable[FileEntry], search: Search, check: Callable[[], None]) -> Findings:
    """Search file by file until there is enough; `check` is called between them and may raise."""
    findings = Findings()
    for file in files:
        check()
        try:
            with filesystem.open(file.path) as stream:
                if not is_binary(stream):
                    _grep_file(file.path, stream, search, findings)
        except FilesystemDown:
            raise
        except (FilesystemError, OSError):
            findings.unreadable += 1
        if findings.full or findings.stopped_at is not None:
            break
    return findings


def _grep_file(path: str, stream: BinaryIO, search: Search, findings: Findings) -> None:
    for block in _blocks(stream):
        for number, text in search(block.data, block.first, MOST_MATCHES - len(findings.lines)):
            findings.add(f"{path}:{number}: {text}")
            if findings.full:
                return
        findings.bytes += block.size
        if findings.bytes >= MOST_BYTES:
            findings.stopped_at = path
            return


def _blocks(stream: BinaryIO) -> Iterator[Block]:
    lines: list[bytes] = []
    first, size = 1, 0
    for line in read_lines(stream):
        lines.append(line.data)
        size += len(line.data) + line.cut + 1
        if size >= _BLOCK_BYTES:
            yield Block(first, b"\n".join(lines), size)
            first, size = first + len(lines), 0
            lines.clear()
    if lines:
        yield Block(first, b"\n".join(lines), size)
