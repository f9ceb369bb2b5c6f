"""Going through the files below a folder, in the order of their paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from ..core.errors import FilesystemDown, FilesystemError
from ..core.filesystem import FileEntry

S = TypeVar("S")


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


def _backwards(entries: list[FileEntry]) -> list[FileEntry]:
    # What is in folder `a` comes where "a/" sorts: after "a-b", before "ab".
    return sorted(entries, key=lambda entry: entry.path + "/" * entry.is_dir, reverse=True)
