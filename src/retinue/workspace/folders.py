"""A folder on disk, as a place to look names up in without following links.

`AnchoredFolder` holds the folder open and lets the system look each name up in that very folder: nothing can be put
between the check and the use. `ResolvedFolder` is for systems that cannot do this (Windows): it resolves each path
and compares, which refuses every link that is there but not one that is made in the instant after the look.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import Protocol, Self

_CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _CLOSED_ON_EXEC
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
# Without blocking, opening a pipe returns at once and can be refused.
_LEAF = _NO_FOLLOW | _CLOSED_ON_EXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LINK_TAGS = (0xA000000C, 0xA0000003)  # Windows: symbolic link, junction

CAN_ANCHOR = (
    {os.open, os.stat, os.mkdir, os.rename, os.unlink, os.rmdir} <= os.supports_dir_fd
    and os.scandir in os.supports_fd
    and hasattr(os, "O_DIRECTORY")
    and hasattr(os, "O_NOFOLLOW")
)


class Folder(Protocol):
    """What is done with names in one folder. Fails with OSError; never follows a link."""

    @classmethod
    def at(cls, root: str) -> Self:
        """The root itself, which may be reached through links: whoever configured it meant it so."""
        ...

    def enter(self, name: str) -> Self: ...

    def stat(self, name: str) -> os.stat_result: ...

    def own_stat(self) -> os.stat_result: ...

    def open(self, name: str, flags: int, mode: int = 0o666) -> int: ...

    def mkdir(self, name: str) -> None: ...

    def replace(self, name: str, target: str) -> None: ...

    def unlink(self, name: str) -> None: ...

    def rmdir(self, name: str) -> None: ...

    def scan(self, suffix: str = "") -> list[tuple[str, os.stat_result]]:
        """What is in it, where the name ends so."""
        ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


def is_link(status: os.stat_result) -> bool:
    return stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) in _LINK_TAGS


class AnchoredFolder:
    """A folder held by its descriptor."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def at(cls, root: str) -> Self:
        return cls(os.open(root, _FOLDER))

    def enter(self, name: str) -> Self:
        return type(self)(os.open(name, _FOLDER | _NO_FOLLOW, dir_fd=self._fd))

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def own_stat(self) -> os.stat_result:
        return os.fstat(self._fd)

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        return os.open(name, flags | _LEAF, mode, dir_fd=self._fd)

    def mkdir(self, name: str) -> None:
        os.mkdir(name, dir_fd=self._fd)

    def replace(self, name: str, target: str) -> None:
        os.replace(name, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def rmdir(self, name: str) -> None:
        os.rmdir(name, dir_fd=self._fd)

    def scan(self, suffix: str = "") -> list[tuple[str, os.stat_result]]:
        with os.scandir(self._fd) as entries:
            return _statuses(entries, suffix)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class ResolvedFolder:
    """A folder known by its resolved path."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def at(cls, root: str) -> Self:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return cls(os.path.realpath(root))

    def enter(self, name: str) -> Self:
        if not stat.S_ISDIR(self.stat(name).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return type(self)(self._below(name))

    def stat(self, name: str) -> os.stat_result:
        return os.lstat(self._below(name))

    def own_stat(self) -> os.stat_result:
        return os.stat(self._checked(self._path))

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        return os.open(self._below(name), flags | _LEAF, mode)

    def mkdir(self, name: str) -> None:
        os.mkdir(self._below(name))

    def replace(self, name: str, target: str) -> None:
        os.replace(self._below(name), self._below(target))

    def unlink(self, name: str) -> None:
        os.unlink(self._below(name))

    def rmdir(self, name: str) -> None:
        os.rmdir(self._below(name))

    def scan(self, suffix: str = "") -> list[tuple[str, os.stat_result]]:
        with os.scandir(self._checked(self._path)) as entries:
            return _statuses(entries, suffix)

    def sync(self) -> None:
        """Windows cannot do it for a folder."""

    def close(self) -> None:
        """Nothing is held."""

    def _below(self, name: str) -> str:
        return self._checked(os.path.join(self._path, name))

    def _checked(self, path: str) -> str:
        if os.path.normcase(os.path.realpath(path)) != os.path.normcase(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return path


def _statuses(entries: Iterator[os.DirEntry[str]], suffix: str) -> list[tuple[str, os.stat_result]]:
    found: list[tuple[str, os.stat_result]] = []
    for entry in entries:
        name = entry.name
        if not name.endswith(suffix):
            continue
        try:
            found.append((name, entry.stat(follow_symlinks=False)))
        except OSError:
            continue  # gone since the folder was read
    return found
