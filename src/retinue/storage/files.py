"""A filesystem in a database: the same files for every process that can reach it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from copy import copy
from io import BytesIO
from secrets import token_hex
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO, Self, TypeVar

from ..core.errors import (
    ConfigurationError,
    FileMissing,
    FilesystemDown,
    FilesystemError,
    PathDenied,
    PathError,
    StoreError,
)
from ..core.filesystem import FileEntry, KeptBack, Stamp
from ..core.stores import Store
from ..workspace.local import READ_LIMIT
from ..workspace.paths import join_path, split_path
from ..workspace.tree import walk_files
from . import file_rows as rows
from .file_rows import Row, Spot
from .urls import database_of

if TYPE_CHECKING:
    from .lanes import Link

T = TypeVar("T")

LARGEST = 256 * 2**20
"""Bytes of one file: it is written in one piece."""
LONGEST_WAIT = 30.0
"""Seconds for which an update gives way to others."""

_SPACE = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")


class StoreFilesystem:
    """Files in a database. Whoever opens the same `space` of it sees the same files, on any machine that reaches it.

    Give it a URL (`sqlite:///app.db`, `postgresql://…`), or a store that is open already and shares its connections.
    Making one does no I/O; `close` lets go of what it opened itself. Each file has a version: an `update` is written
    only on the version it was made of, and made again where that has changed. A file is read and written whole, up
    to 256 MiB. There are no links and no folder on any disk, so there is no shell either.
    """

    is_near = False

    def __init__(self, store: str | Store, space: str = "default", *, read_limit: int = READ_LIMIT) -> None:
        if not _SPACE.fullmatch(space):
            raise ConfigurationError(f"not the name of a space for files: {space!r}; use up to 200 plain characters")
        self.space, self.read_limit = space, read_limit
        self._database, self._is_own = database_of(store, "a StoreFilesystem")
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
        """Let go of the database, for all that is `below` it too; not of a store that it was given."""
        if self._is_own:
            self._database.close_now()

    def below(self, path: str) -> Self:
        made = copy(self)
        made._base = (*self._base, *split_path(path))
        return made

    def without(self, kept_back: KeptBack) -> Self:
        """The same files but for the folders that `kept_back` names, which can then not be entered."""
        made = copy(self)
        made._kept_back = kept_back
        return made

    def read(self, path: str) -> bytes:
        """The whole file; one over `read_limit` bytes is refused, `open` reads it in parts."""
        row, data = self._load(path, self.read_limit)
        if data is None:
            raise PathError(
                path,
                f"it has {row.size:,} bytes, over the limit of {self.read_limit:,} for reading it whole; "
                "read it in parts, with an offset and a limit",
            )
        return data

    def open(self, path: str) -> BinaryIO:
        """The file as it is now: what is written to it later does not show."""
        return BytesIO(self._load(path, LARGEST)[1] or b"")

    def write(self, path: str, data: bytes) -> None:
        spot = self._file_to_write(path, data)
        mark = token_hex(8)
        self._write(path, lambda link: rows.put(link, spot, data, mark))

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> Stamp | None:
        spot = self._file(path)
        deadline, pause = time.monotonic() + LONGEST_WAIT, 0.001
        while True:
            found = self._read(path, lambda link: rows.load(link, spot, LARGEST))
            if found is not None and found[0].is_folder:
                raise PathError(path, rows.IS_FOLDER)
            version, before = (None, None) if found is None else (found[0].version, found[1])
            after = change(before)
            if after is None:
                return version
            written = self._put_if(path, version, after)
            if written is not None:
                return written
            if time.monotonic() > deadline:
                raise PathError(path, f"others have changed it all the time for {LONGEST_WAIT:.0f} s: try again")
            time.sleep(random.uniform(0, pause))
            pause = min(pause * 2, 0.05)

    def make_folder(self, path: str) -> None:
        spot = self._folder(path)
        self._write(path, lambda link: rows.make_folders(link, spot, len(spot.whole)))

    def list(self, path: str = "") -> list[FileEntry]:
        found = self._children(path)
        if found is None:
            raise FileMissing(path, rows.MISSING)
        return rows.entries(self._folder(path), found)

    def walk(self, path: str = "") -> list[FileEntry]:
        return list(walk_files(self.list, path, True, lambda above, _: above))

    def stamp(self, path: str) -> Stamp | None:
        spot = self._file(path)
        found = self._read(path, lambda link: rows.find(link, spot))
        return None if found is None or found.is_folder else found.version

    def stamps(self, path: str = "", suffix: str = "") -> dict[str, Stamp]:
        found = self._children(path) or {}
        return {name: row.version for name, row in found.items() if not row.is_folder and name.endswith(suffix)}

    def folder_stamp(self, path: str = "") -> Stamp | None:
        found = self._children(path)
        return None if found is None else frozenset([(name, row.version) for name, row in found.items()])

    def exists(self, path: str) -> bool:
        names = split_path(path)
        spot = self._spot(names)
        if self._is_kept_back(names[:-1]):
            return False
        return spot.is_root or self._read(path, lambda link: rows.find(link, spot)) is not None

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with nothing in it."""
        spot = self._file(path)
        removed: list[bool] = []  # once is enough: it may be done again
        self._write(path, lambda link: removed.append(rows.remove(link, spot)))
        if not any(removed):
            raise FileMissing(path, rows.MISSING)

    @property
    def _root(self) -> tuple[int, str, tuple[str, ...]]:
        return id(self._database), self.space, self._base

    def _spot(self, names: tuple[str, ...]) -> Spot:
        return Spot(self.space, self._base, names)

    def _folder(self, path: str) -> Spot:
        """A folder that may be entered."""
        names = split_path(path)
        if self._is_kept_back(names):
            raise PathDenied(path, "it is kept back from agents")
        return self._spot(names)

    def _file(self, path: str) -> Spot:
        """Return the spot of a file, in a folder that may be entered."""
        names = split_path(path)
        if not names:
            raise PathError(path, "it is the root folder of this workspace, not a file")
        if self._is_kept_back(names[:-1]):
            raise PathDenied(path, "it is kept back from agents")
        return self._spot(names)

    def _file_to_write(self, path: str, data: bytes) -> Spot:
        spot = self._file(path)
        if path.endswith("/"):
            raise PathError(path, "it names a folder, not a file")
        if len(data) > LARGEST:
            raise PathError(path, f"{len(data):,} bytes are over the limit of {LARGEST:,} for a file in a store")
        return spot

    def _is_kept_back(self, names: tuple[str, ...]) -> bool:
        return self._kept_back is not None and self._kept_back((*self._base, *names))

    def _children(self, path: str) -> dict[str, Row] | None:
        spot = self._folder(path)
        return self._read(path, lambda link: rows.children(link, spot))

    def _load(self, path: str, most: int) -> tuple[Row, bytes | None]:
        spot = self._file(path)
        found = self._read(path, lambda link: rows.load(link, spot, most))
        if found is None:
            raise FileMissing(path, rows.MISSING)
        if found[0].is_folder:
            raise PathError(path, rows.IS_FOLDER)
        return found

    def _put_if(self, path: str, version: rows.Version | None, data: bytes) -> Stamp | None:
        spot = self._file_to_write(path, data)
        mark = token_hex(8)
        return self._write(path, lambda link: rows.put_if(link, spot, version, data, mark))

    def _read(self, path: str, work: Callable[[Link], T]) -> T:
        try:
            return self._database.read_now(work)
        except StoreError as error:
            raise _refusal(path, error) from error

    def _write(self, path: str, work: Callable[[Link], T]) -> T:
        try:
            return self._database.write_now(work, path)
        except StoreError as error:
            raise _refusal(path, error) from error


def _refusal(path: str, error: StoreError) -> FilesystemError:
    return FilesystemDown(path, f"the store of this workspace cannot be used: {error}")
