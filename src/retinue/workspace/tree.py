"""Going through the files below a folder, in the order of their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import merge
from typing import TypeVar

from ..core.errors import FilesystemDown, FilesystemError
from ..core.filesystem import FileEntry

S = TypeVar("S")

_SORTED_AT_ONCE = 20_000
"""Sorting holds the interpreter lock. This many entries take about 10 ms."""


def walk_files(
    listing: Callable[[str], list[FileEntry]], path: str, state: S, step: Callable[[S, FileEntry], S | None]
) -> Iterator[FileEntry]:
    """The files below a folder, found as they are asked for.

    `step` gives each file and folder a state, made from that of the folder it is in; None leaves it out. A folder
    that vanishes or cannot be read on the way is passed over; the first one is read at once and must be there.
    """
    return _walk(listing, [(entry, state) for entry in _backwards(listing(path))], step)


def _walk(
    listing: Callable[[str], list[FileEntry]],
    stack: list[tuple[FileEntry, S]],
    step: Callable[[S, FileEntry], S | None],
) -> Iterator[FileEntry]:
    while stack:
        entry, above = stack.pop()
        own = step(above, entry)
        if own is None:
            continue
        if not entry.is_dir:
            yield entry
            continue
        try:
            below = listing(entry.path)
        except FilesystemDown:
            raise
        except FilesystemError:
            continue
        stack += [(inner, own) for inner in _backwards(below)]


def sort_entries(entries: list[FileEntry], key: Callable[[FileEntry], str], reverse: bool = False) -> list[FileEntry]:
    """Sort, in parts where there are many."""
    starts = range(0, len(entries), _SORTED_AT_ONCE)
    parts = [sorted(entries[start : start + _SORTED_AT_ONCE], key=key, reverse=reverse) for start in starts]
    return parts[0] if len(parts) == 1 else list(merge(*parts, key=key, reverse=reverse))


def _backwards(entries: list[FileEntry]) -> list[FileEntry]:
    # The content of folder `a` comes where "a/" sorts: after "a-b", before "ab".
    return sort_entries(entries, lambda entry: entry.path + "/" * entry.is_dir, True)
