"""Files as rows: what is read and changed of them in a transaction.

A folder is a row too, and above every row are the rows of its folders. Whoever adds to a folder or removes it holds its
row, so that nothing is ever left in a folder that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import PathError
from ..core.filesystem import FileEntry
from ..workspace.paths import join_path

if TYPE_CHECKING:
    from .lanes import Link

IS_FILE = "it is a file, not a folder"
IS_FOLDER = "it is a folder, not a file"
MISSING = "there is no such file or folder"

_COLUMNS = "is_folder, version, mark, size"
_AT = "space = ? AND folder = ? AND name = ?"


class Version(NamedTuple):
    """The version of a file. Numbers start again when a file is created again; marks are never reused."""

    number: int
    mark: str


class Row(NamedTuple):
    """A file or folder without its bytes."""

    is_folder: bool
    version: Version
    size: int


class Spot(NamedTuple):
    """A path in a space: the base folder, which the caller cannot leave, and the names below."""

    space: str
    base: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def whole(self) -> tuple[str, ...]:
        return (*self.base, *self.names)

    @property
    def is_root(self) -> bool:
        """True for the root folder, which has no row and always exists."""
        return not self.base and not self.names

    def shown(self, depth: int | None = None) -> str:
        """Return the path, or its beginning, as the caller knows it."""
        return join_path(self.names if depth is None else self.names[: max(depth - len(self.base), 0)])

    def key(self, depth: int | None = None) -> tuple[str, str, str]:
        names = self.whole[:depth]
        return self.space, join_path(names[:-1]), names[-1]


def find(link: Link, spot: Spot, depth: int | None = None, *, hold: bool = False) -> Row | None:
    """Find the row of a spot, or of its first `depth` names; with `hold`, lock it until the commit."""
    query = f"SELECT {_COLUMNS} FROM files WHERE {_AT} {link.locking if hold else ''}"
    return next(map(_row, link.run(query, *spot.key(depth))), None)


def load(link: Link, spot: Spot, most: int) -> tuple[Row, bytes | None] | None:
    """A file, and its bytes where there are not more."""
    query = f"SELECT {_COLUMNS}, CASE WHEN size <= ? THEN body END FROM files WHERE {_AT}"
    for found in link.run(query, most, *spot.key()):
        return _row(found), None if found[4] is None else bytes(found[4])
    return None


def children(link: Link, spot: Spot) -> dict[str, Row] | None:
    """Return the rows in a folder, by name; None if there is no such folder."""
    query = f"SELECT {_COLUMNS}, name FROM files WHERE space = ? AND folder = ?"
    found = {row[4]: _row(row) for row in link.run(query, spot.space, join_path(spot.whole))}
    if found or spot.is_root:
        return found
    own = find(link, spot)
    if own is not None and not own.is_folder:
        raise PathError(spot.shown(), IS_FILE)
    return None if own is None else {}


def entries(spot: Spot, found: dict[str, Row]) -> list[FileEntry]:
    """Return the entries of a listing."""
    return [FileEntry(join_path((*spot.names, name)), row.is_folder, row.size) for name, row in sorted(found.items())]


def put(link: Link, spot: Spot, data: bytes, mark: str) -> Version:
    """Replace a file, or make it with the folders above it."""
    while True:
        found = find(link, spot, hold=True)
        written = _create(link, spot, data, mark) if found is None else _replace(link, spot, found, data, mark)
        if written is not None:
            return written


def put_if(link: Link, spot: Spot, expected: Version | None, data: bytes, mark: str) -> Version | None:
    """As `put`, where the file is still as expected (None: not there); None where it is not."""
    found = find(link, spot, hold=True)
    version = None if found is None else found.version
    if version is not None and version.mark == mark:
        return version  # it was written, and the connection lost before that could be told
    if version != expected:
        return None
    return _create(link, spot, data, mark) if found is None else _replace(link, spot, found, data, mark)


def make_folders(link: Link, spot: Spot, depth: int) -> None:
    """Make the folders so many names into a spot, and hold the last."""
    there, found = depth, None
    while there and found is None:
        found = find(link, spot, there, hold=True)
        there -= found is None
    _refuse_file(found, spot, there)
    for making in range(there + 1, depth + 1):
        _make_folder(link, spot, making)


def remove(link: Link, spot: Spot) -> bool:
    """Remove a file, or a folder with nothing in it; whether there was one."""
    found = find(link, spot, hold=True)
    if found is None:
        return False
    inside = "SELECT name FROM files WHERE space = ? AND folder = ? LIMIT 1"
    if found.is_folder and link.run(inside, spot.space, join_path(spot.whole)):
        raise PathError(spot.shown(), "the folder is not empty")
    link.run(f"DELETE FROM files WHERE {_AT}", *spot.key())
    return True


def _row(found: Sequence[Any]) -> Row:
    is_folder, version, mark, size = found[:4]
    return Row(bool(is_folder), Version(version, mark), size)


def _refuse_file(found: Row | None, spot: Spot, depth: int) -> None:
    if found is not None and not found.is_folder:
        raise PathError(spot.shown(depth), IS_FILE)


def _create(link: Link, spot: Spot, data: bytes, mark: str) -> Version | None:
    """Make a file that was not there; None where somebody has made one since."""
    make_folders(link, spot, len(spot.whole) - 1)
    made = link.run(
        "INSERT INTO files (space, folder, name, is_folder, version, mark, size, changed_at, body) "
        f"VALUES (?, ?, ?, 0, 1, ?, ?, {link.now}, ?) ON CONFLICT (space, folder, name) DO NOTHING RETURNING name",
        *spot.key(),
        mark,
        len(data),
        data,
    )
    return Version(1, mark) if made else None


def _replace(link: Link, spot: Spot, found: Row, data: bytes, mark: str) -> Version:
    if found.is_folder:
        raise PathError(spot.shown(), IS_FOLDER)
    version = Version(found.version.number + 1, mark)
    update = f"UPDATE files SET version = ?, mark = ?, size = ?, changed_at = {link.now}, body = ? WHERE {_AT}"
    link.run(update, *version, len(data), data, *spot.key())
    return version


def _make_folder(link: Link, spot: Spot, depth: int) -> None:
    insert = (
        "INSERT INTO files (space, folder, name, is_folder, version, mark, size, changed_at) "
        f"VALUES (?, ?, ?, 1, 1, ?, 0, {link.now}) ON CONFLICT (space, folder, name) DO NOTHING RETURNING name"
    )
    while not link.run(insert, *spot.key(depth), token_hex(8)):
        found = find(link, spot, depth, hold=True)
        _refuse_file(found, spot, depth)
        if found is not None:
            return
