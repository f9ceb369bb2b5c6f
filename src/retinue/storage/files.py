"""A filesystem in a database: every process that can reach it sees the same files.

A folder is a row too, and the folders above every row have rows. Adding to a folder or removing it locks its row, so
nothing is ever left in a folder that is gone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from copy import copy
from io import BytesIO
from secrets import token_hex
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, Self, TypeVar

from ..core.concurrency import Backoff
from ..core.errors import ConfigurationError, FileMissing, FilesystemDown, PathDenied, PathError, StoreError
from ..core.filesystem import FileEntry, KeptBack, Stamp, name_of_part
from ..core.runs import RunIdentity
from ..core.stores import Store
from ..workspace.local import READ_LIMIT
from ..workspace.paths import join_path, split_path, walk_files
from .stores import sql_store

if TYPE_CHECKING:
    from .database import Link

T = TypeVar("T")
StoreIsolation = Literal["shared", "user"]

LARGEST = 256 * 2**20
"""The most bytes of one file: it is written in one piece."""
LONGEST_WAIT = 30.0
"""Seconds for which an update is retried while others change the file."""

_SPACE = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")
_IS_FILE = "it is a file, not a folder"
_IS_FOLDER = "it is a folder, not a file"
_KEPT_BACK = "it is kept back from agents"
_MISSING = "there is no such file or folder"
_COLUMNS = "is_folder, mark, size"
_AT = "space = ? AND folder = ? AND name = ?"


class StoreFilesystem:
    """Files in a database, in a `space` that is shared by everyone who opens it, on any machine.

    Pass a URL (`sqlite:///app.db`, `postgresql://…`), or an open store to share its connections. Creating one does no
    I/O; `close` closes only what it opened. Each file has a version: an `update` is written only if the version has
    not changed, and retried otherwise. A file is read and written whole, up to 256 MiB. There are no links and no
    folder on any disk, so there is no shell either.

    With `isolation="user"` each user, and the sub-agents of its runs, works in a space of its own. The space itself
    holds what instructs the agents (AGENTS.md, declarations) and the records of tasks; only a run without a user
    works in it. With "shared" all runs do.
    """

    is_local = False

    def __init__(
        self,
        store: str | Store,
        space: str = "default",
        *,
        isolation: StoreIsolation = "user",
        read_limit: int = READ_LIMIT,
    ) -> None:
        if not _SPACE.fullmatch(space):
            raise ConfigurationError(f"not the name of a space for files: {space!r}; use up to 200 plain characters")
        if isolation not in ("shared", "user"):
            raise ConfigurationError(f"isolation is 'shared' or 'user', not {isolation!r}")
        self.space, self.read_limit = space, read_limit
        self.isolation: StoreIsolation = isolation
        self._database = sql_store(store, "a StoreFilesystem").database
        self._is_own = isinstance(store, str)
        self._base: tuple[str, ...] = ()
        self._kept_back: KeptBack | None = None
        self.changing = Lock()

    def __repr__(self) -> str:
        below = f".below({join_path(self._base)!r})" if self._base else ""
        return f"StoreFilesystem({self._database.place!r}, {self.space!r}){below}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoreFilesystem) and self._root == other._root

    def __hash__(self) -> int:
        return hash(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database, also for everything `below`; a store that was passed in stays open."""
        if self._is_own:
            self._database.close_blocking()

    @property
    def is_divided(self) -> bool:
        return self.isolation == "user"

    def for_run(self, run: RunIdentity) -> Self:
        """Return the files of a run: those of its user. They are not divided further."""
        made = copy(self)
        made.isolation = "shared"
        if self.is_divided and run.user_id:
            # No space can be opened under such a name.
            made.space = f"{self.space}\x1f{name_of_part(run.user_id)}"
        return made

    def below(self, path: str) -> Self:
        made = copy(self)
        made._base = (*self._base, *split_path(path))
        return made

    def without(self, kept_back: KeptBack) -> Self:
        """Return the same files without the folders that `kept_back` names."""
        made = copy(self)
        made._kept_back = kept_back
        return made

    def read(self, path: str) -> bytes:
        """Return a whole file of at most `read_limit` bytes; `open` reads larger ones in parts."""
        row, data = self._load(path, self.read_limit)
        if data is None:
            raise PathError(
                path,
                f"it has {row.size:,} bytes, over the limit of {self.read_limit:,} for reading it whole; "
                "read it in parts, with an offset and a limit",
            )
        return data

    def open(self, path: str) -> BinaryIO:
        """Open the file as it is now; later writes do not show."""
        return BytesIO(self._load(path, LARGEST)[1] or b"")

    def write(self, path: str, data: bytes) -> None:
        self._put(path, data, _ANY)

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> Stamp | None:
        spot = self._spot(path)
        deadline, backoff = time.monotonic() + LONGEST_WAIT, Backoff(0.001, 0.05)
        while True:
            found = self._read(path, lambda link: _load(link, spot, LARGEST))
            if found is not None and found[0].is_folder:
                raise PathError(path, _IS_FOLDER)
            version, before = (None, None) if found is None else (found[0].version, found[1])
            after = change(before)
            if after is None:
                return version
            if (written := self._put(path, after, version)) is not None:
                return written
            if time.monotonic() > deadline:
                raise PathError(path, f"others have changed it all the time for {LONGEST_WAIT:.0f} s: try again")
            time.sleep(backoff.next())

    def make_folder(self, path: str) -> None:
        spot = self._spot(path, is_folder=True)
        self._write(path, lambda link: _make_folders(link, spot, len(spot.names)))

    def list(self, path: str = "") -> list[FileEntry]:
        found, names = self._children(path), split_path(path)
        if found is None:
            raise FileMissing(path, _MISSING)
        return [FileEntry(join_path((*names, name)), row.is_folder, row.size) for name, row in sorted(found.items())]

    def walk(self, path: str = "") -> list[FileEntry]:
        return list(walk_files(self.list, path, True, lambda above, _: above))

    def stamp(self, path: str) -> Stamp | None:
        spot = self._spot(path)
        found = self._read(path, lambda link: _find(link, spot))
        return None if found is None or found.is_folder else found.version

    def stamps(self, path: str = "", suffix: str = "") -> dict[str, Stamp]:
        found = self._children(path) or {}
        return {name: row.version for name, row in found.items() if not row.is_folder and name.endswith(suffix)}

    def folder_stamp(self, path: str = "") -> Stamp | None:
        found = self._children(path)
        return None if found is None else frozenset([(name, row.version) for name, row in found.items()])

    def exists(self, path: str) -> bool:
        names = split_path(path)
        if self._is_kept_back(names[:-1]):
            return False
        spot = _Spot(self.space, (*self._base, *names), len(self._base))
        return not spot.names or self._read(path, lambda link: _find(link, spot)) is not None

    def delete(self, path: str) -> None:
        """Delete a file or an empty folder."""
        spot = self._spot(path)
        removed: list[bool] = []  # one success is enough: the job may run twice
        self._write(path, lambda link: removed.append(_remove(link, spot)))
        if not any(removed):
            raise FileMissing(path, _MISSING)

    @property
    def _root(self) -> tuple[int, str, str, tuple[str, ...]]:
        return id(self._database), self.space, self.isolation, self._base

    def _spot(self, path: str, *, is_folder: bool = False) -> _Spot:
        """Return the spot of a file or folder; raise PathDenied if it is kept back."""
        names = split_path(path)
        if not names and not is_folder:
            raise PathError(path, "it is the root folder of this workspace, not a file")
        if self._is_kept_back(names if is_folder else names[:-1]):
            raise PathDenied(path, _KEPT_BACK)
        return _Spot(self.space, (*self._base, *names), len(self._base))

    def _is_kept_back(self, names: tuple[str, ...]) -> bool:
        return self._kept_back is not None and self._kept_back((*self._base, *names))

    def _children(self, path: str) -> dict[str, _Row] | None:
        spot = self._spot(path, is_folder=True)
        return self._read(path, lambda link: _children(link, spot))

    def _load(self, path: str, most: int) -> tuple[_Row, bytes | None]:
        spot = self._spot(path)
        found = self._read(path, lambda link: _load(link, spot, most))
        if found is None:
            raise FileMissing(path, _MISSING)
        if found[0].is_folder:
            raise PathError(path, _IS_FOLDER)
        return found

    def _put(self, path: str, data: bytes, expected: str | None) -> str | None:
        spot, mark = self._spot(path), token_hex(8)
        if path.endswith("/"):
            raise PathError(path, "it names a folder, not a file")
        if len(data) > LARGEST:
            raise PathError(path, f"{len(data):,} bytes are over the limit of {LARGEST:,} for a file in a store")
        return self._write(path, lambda link: _put(link, spot, data, mark, expected))

    def _read(self, path: str, work: Callable[[Link], T]) -> T:
        return self._reported(path, lambda: self._database.read_blocking(work))

    def _write(self, path: str, work: Callable[[Link], T]) -> T:
        return self._reported(path, lambda: self._database.write_blocking(work, path))

    def _reported(self, path: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except StoreError as error:
            raise FilesystemDown(path, f"the store of this workspace cannot be used: {error}") from error


_ANY = ""
"""Stands for any version, also that of a file that is not there."""


class _Row(NamedTuple):
    """A file or folder without its bytes."""

    is_folder: bool
    version: str
    """Random: a version is never used again."""
    size: int


class _Spot(NamedTuple):
    """A path in a space. The first names, those of the base folder, are hidden from the caller."""

    space: str
    names: tuple[str, ...]
    hidden: int

    def shown(self, depth: int | None = None) -> str:
        """Return the path, or its first `depth` names, as the caller knows it."""
        return join_path(self.names[self.hidden : depth])

    def key(self, depth: int | None = None) -> tuple[str, str, str]:
        names = self.names[:depth]
        return self.space, join_path(names[:-1]), names[-1]


def _find(link: Link, spot: _Spot, depth: int | None = None, *, lock: bool = False) -> _Row | None:
    """Return the row of a spot, or of its first `depth` names; with `lock`, lock it until the commit."""
    query = f"SELECT {_COLUMNS} FROM files WHERE {_AT}{link.locking if lock else ''}"
    return next(map(_row, link.run(query, *spot.key(depth))), None)


def _load(link: Link, spot: _Spot, most: int) -> tuple[_Row, bytes | None] | None:
    """Return a file with its bytes, or without them if there are more than `most`."""
    query = f"SELECT {_COLUMNS}, CASE WHEN size <= ? THEN body END FROM files WHERE {_AT}"
    for found in link.run(query, most, *spot.key()):
        return _row(found), None if found[3] is None else bytes(found[3])
    return None


def _children(link: Link, spot: _Spot) -> dict[str, _Row] | None:
    """Return the rows in a folder by name; None if there is no such folder."""
    query = f"SELECT {_COLUMNS}, name FROM files WHERE space = ? AND folder = ?"
    found = {row[3]: _row(row) for row in link.run(query, spot.space, join_path(spot.names))}
    if found or not spot.names:
        return found
    own = _find(link, spot)
    _refuse_file(own, spot)
    return None if own is None else {}


def _put(link: Link, spot: _Spot, data: bytes, mark: str, expected: str | None) -> str | None:
    """Replace a file, or create it with the folders above it; return None, and do nothing, if it has not the expected
    version (None: it is not there). Return its new version, the mark."""
    while True:
        found = _find(link, spot, lock=True)
        version = None if found is None else found.version
        if version == mark:
            return mark  # an earlier try wrote it, and its outcome was lost
        if expected not in (_ANY, version):
            return None
        if _write(link, spot, found, data, mark):
            return mark


def _write(link: Link, spot: _Spot, found: _Row | None, data: bytes, mark: str) -> bool:
    """Replace the file that was found, or create it; return False if another process has created it since."""
    if found is None:
        _make_folders(link, spot, len(spot.names) - 1)
        made = link.run(
            "INSERT INTO files (space, folder, name, is_folder, mark, size, changed_at, body) "
            "VALUES (?, ?, ?, 0, ?, ?, wall_seconds(), ?) ON CONFLICT (space, folder, name) DO NOTHING RETURNING name",
            *(*spot.key(), mark, len(data), data),
        )
        return bool(made)
    if found.is_folder:
        raise PathError(spot.shown(), _IS_FOLDER)
    change = "mark = ?, size = ?, changed_at = wall_seconds(), body = ?"
    link.run(f"UPDATE files SET {change} WHERE {_AT}", mark, len(data), data, *spot.key())
    return True


def _make_folders(link: Link, spot: _Spot, depth: int) -> None:
    """Create the folders down to `depth` names of a spot, and lock the last."""
    there, found = depth, None
    while there and found is None:
        found = _find(link, spot, there, lock=True)
        there -= found is None
    _refuse_file(found, spot, there)
    insert = (
        "INSERT INTO files (space, folder, name, is_folder, mark, size, changed_at) "
        "VALUES (?, ?, ?, 1, ?, 0, wall_seconds()) ON CONFLICT (space, folder, name) DO NOTHING RETURNING name"
    )
    for making in range(there + 1, depth + 1):
        found = None
        while found is None and not link.run(insert, *spot.key(making), token_hex(8)):
            found = _find(link, spot, making, lock=True)
        _refuse_file(found, spot, making)


def _remove(link: Link, spot: _Spot) -> bool:
    """Remove a file or an empty folder; return whether there was one."""
    found = _find(link, spot, lock=True)
    if found is None:
        return False
    inside = "SELECT name FROM files WHERE space = ? AND folder = ? LIMIT 1"
    if found.is_folder and link.run(inside, spot.space, join_path(spot.names)):
        raise PathError(spot.shown(), "the folder is not empty")
    link.run(f"DELETE FROM files WHERE {_AT}", *spot.key())
    return True


def _row(found: Sequence[Any]) -> _Row:
    is_folder, mark, size = found[:3]
    return _Row(bool(is_folder), mark, size)


def _refuse_file(found: _Row | None, spot: _Spot, depth: int | None = None) -> None:
    if found is not None and not found.is_folder:
        raise PathError(spot.shown(depth), _IS_FILE)


async def folders_with_tasks(store: Store) -> list[tuple[StoreFilesystem, str]]:
    """Return the filesystems in a database that hold task records, each with the agent whose they are."""
    query = "SELECT space, folder FROM files WHERE name = 'tasks' AND is_folder = 1 ORDER BY space, folder"
    found: list[tuple[StoreFilesystem, str]] = []
    for space, folder in await sql_store(store).database.rows(query):
        *base, above, agent = ("", *folder.split("/"))
        if above == "agents" and _SPACE.fullmatch(space):
            found.append((StoreFilesystem(store, space).below("/".join(filter(None, base))), agent))
    return found
