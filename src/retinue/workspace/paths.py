"""Paths below a root: their rules, the order of a walk below a folder, and glob patterns. Nothing here reads the disk.

The rules are the same on every system, so that a workspace can move between them: `/` separates names, a backslash,
a drive letter or a control character is refused, and a listing leaves out names that are refused.
In a pattern, `*`, `?` and `[…]` match within a name, `**` any number of folders, `{a,b}` either.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from heapq import merge
from typing import TypeAlias, TypeVar

from ..core.errors import FilesystemDown, FilesystemError, InvalidArguments, PathDenied
from ..core.filesystem import FileEntry

LONGEST_PATH = 4096
LONGEST_NAME = 255
TEMPORARY = ".retinue-tmp-"
"""The prefix of the name of a file that is being written."""

_WINDOWS = os.name == "nt"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE = re.compile(r"[A-Za-z]:")
_DEVICE = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d|conin\$|conout\$)(\..*)?")


def split_path(path: str) -> tuple[str, ...]:
    """Return the names of a path, with `.` and `..` resolved; none for the root itself.

    No link is ever followed, so `a/../b` is `b` whatever `a` is.
    """
    if len(path) > LONGEST_PATH:
        raise PathDenied(path, f"the path is longer than {LONGEST_PATH} characters")
    if path.startswith("/"):
        raise PathDenied(path, "it is absolute; give a path relative to the workspace, such as 'notes/plan.md'")
    names: list[str] = []
    for name in path.split("/"):
        if name == "..":
            if not names:
                raise PathDenied(path, "it leads out of the workspace")
            names.pop()
        elif name not in ("", "."):
            if problem := name_problem(name):
                raise PathDenied(path, problem)
            names.append(name)
    return tuple(names)


def join_path(names: tuple[str, ...]) -> str:
    return "/".join(names)


def normal_path(path: str) -> str:
    """Return the normal form of a path."""
    return join_path(split_path(path))


def name_problem(name: str, *, windows: bool = _WINDOWS) -> str | None:
    """Return the reason why a name cannot be used, or None."""
    if "\\" in name:
        return "it has a backslash; put '/' between folders"
    if _CONTROL.search(name):
        return "it has a control character"
    if _DRIVE.match(name):
        return "it has a drive letter; give a path relative to the workspace, such as 'notes/plan.md'"
    if name.startswith(TEMPORARY):
        return f"names that begin with {TEMPORARY} are kept for files being written"
    try:
        size = len(name.encode())
        os.fsencode(name)
    except UnicodeEncodeError:
        return "it has a character that no file name can have"
    if size > LONGEST_NAME:
        return f"a name in it is longer than {LONGEST_NAME} bytes"
    return _windows_problem(name) if windows else None


def _windows_problem(name: str) -> str | None:
    if ":" in name:
        return "it has a colon"
    if name.endswith((".", " ")):
        return "a name in it ends in a dot or a space"
    return "it names a device" if _DEVICE.fullmatch(name) else None


S = TypeVar("S")

_SORTED_AT_ONCE = 5_000
"""Sorting holds the interpreter lock. This many entries take about 3 ms."""


def walk_files(
    listing: Callable[[str], list[FileEntry]], path: str, state: S, step: Callable[[S, FileEntry], S | None]
) -> Iterator[FileEntry]:
    """Return the files below a folder, lazily.

    `step` gives each file and folder a state, made from that of the folder it is in; None leaves it out. A folder
    that vanishes or cannot be read on the way is passed over; the first one is read at once and must be there.
    """
    return _walk(listing, [(_backwards(listing(path)), state)], step)


def _walk(
    listing: Callable[[str], list[FileEntry]],
    levels: list[tuple[list[FileEntry], S]],
    step: Callable[[S, FileEntry], S | None],
) -> Iterator[FileEntry]:
    while levels:
        entries, above = levels[-1]
        if not entries:
            levels.pop()
            continue
        entry = entries.pop()
        own = step(above, entry)
        if own is None:
            continue
        if not entry.is_dir:
            yield entry
            continue
        try:
            # Nothing else refers to the list: its entries are freed one by one.
            levels.append((_backwards(listing(entry.path)), own))
        except FilesystemDown:
            raise
        except FilesystemError:
            continue


def sort_entries(entries: list[FileEntry], key: Callable[[FileEntry], str], reverse: bool = False) -> list[FileEntry]:
    """Sort, in parts where there are many."""
    starts = range(0, len(entries), _SORTED_AT_ONCE)
    parts = [sorted(entries[start : start + _SORTED_AT_ONCE], key=key, reverse=reverse) for start in starts]
    return parts[0] if len(parts) == 1 else list(merge(*parts, key=key, reverse=reverse))


def first_entries(entries: list[FileEntry], most: int) -> list[FileEntry]:
    """Return the first entries and empty the list: freeing all of it at once would hold the interpreter lock."""
    first = entries[:most]
    while entries:
        del entries[-_SORTED_AT_ONCE:]
    return first


def _backwards(entries: list[FileEntry]) -> list[FileEntry]:
    # The content of folder `a` comes where "a/" sorts: after "a-b", before "ab".
    return sort_entries(entries, lambda entry: entry.path + "/" * entry.is_dir, True)


_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_ALTERNATIVES = 64

Places: TypeAlias = frozenset[tuple[int, int]]
"""The segments that come next: (alternative, segment)."""


class GlobPattern:
    """A pattern that is matched folder by folder, so that no folder is opened where nothing can match."""

    def __init__(self, pattern: str) -> None:
        self._alternatives = [_segments(split_path(text)) for text in _spelled_out(pattern)]
        if not all(self._alternatives):
            raise InvalidArguments(f"the pattern {shown(pattern)} names no file; give one such as '**/*.py'")
        self.start = self._with_skips({(index, 0) for index in range(len(self._alternatives))})

    def step(self, places: Places, entry: FileEntry) -> Places | None:
        """Return the places after one more name; None if the entry cannot match or hold a match."""
        name = entry.path.rpartition("/")[2]
        after: set[tuple[int, int]] = set()
        for alternative, index in places:
            segments = self._alternatives[alternative]
            if index == len(segments):
                continue
            if (matches := segments[index]) is None:
                after.add((alternative, index))
            elif matches(name):
                after.add((alternative, index + 1))
        reached = self._with_skips(after)
        is_match = any(index == len(self._alternatives[alternative]) for alternative, index in reached)
        return reached if reached and (entry.is_dir or is_match) else None

    def _with_skips(self, places: set[tuple[int, int]]) -> Places:
        """Add the places after each `**`, which also stands for no folder."""
        reached = set(places)
        for alternative, start in places:
            segments, index = self._alternatives[alternative], start
            while index < len(segments) and segments[index] is None:
                index += 1
                reached.add((alternative, index))
        return frozenset(reached)


def _segments(names: tuple[str, ...]) -> list[Callable[[str], object] | None]:
    """Return a matcher for each name; None for `**`, which at the end stands for every file below."""
    if names and names[-1] == "**":
        names = (*names, "*")
    plain = [name for name, before in zip(names, ("", *names), strict=False) if name != "**" or before != "**"]
    # `fnmatch` writes atomic groups, so no name takes more than a pass for each star.
    return [None if name == "**" else re.compile(fnmatch.translate(name)).match for name in plain]


def _spelled_out(pattern: str) -> list[str]:
    """Return every alternative of a pattern with braces. Braces without a comma are ordinary characters."""
    if len(pattern) > LONGEST_PATH:
        raise InvalidArguments(f"the pattern has {len(pattern):,} characters; the limit is {LONGEST_PATH:,}")
    done: list[str] = []
    waiting = [pattern]
    while waiting:
        text = waiting.pop()
        braces = next((found for found in _BRACES.finditer(text) if "," in found[1]), None)
        if braces is None:
            done.append(text)
        else:
            waiting += [text[: braces.start()] + part + text[braces.end() :] for part in braces[1].split(",")]
        if len(done) + len(waiting) > _MOST_ALTERNATIVES:
            raise InvalidArguments(f"the pattern {shown(pattern)} has more than {_MOST_ALTERNATIVES} alternatives")
    return done


def shown(pattern: str) -> str:
    """Return a pattern for an error message: the beginning of a long one."""
    return repr(pattern if len(pattern) <= 100 else f"{pattern[:100]}…")
