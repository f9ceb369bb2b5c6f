"""A folder on disk, opened so that no link is followed, and locks on names in it.

`Folder` holds the folder open and lets the system look each name up in that very folder: nothing can be put
between the check and the use. `ResolvedFolder` is for systems that cannot do this (Windows): it resolves each path
and compares. That refuses every existing link, but not one that is made right after the check."""

from __future__ import annotations

import errno
import os
import random
import stat
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from ..core.errors import FileMissing, PathDenied, PathError
from .paths import TEMPORARY

_CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0)
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _CLOSED_ON_EXEC
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
# Without blocking, opening a pipe returns at once and can be refused.
_LEAF = _NO_FOLLOW | _CLOSED_ON_EXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LINK_TAGS = (0xA000000C, 0xA0000003)  # Windows: symbolic link, junction

MOST_SCANNED = 500_000
"""The number of entries of a folder that can be listed."""

CAN_ANCHOR = (
    {os.open, os.stat, os.mkdir, os.rename, os.unlink, os.rmdir} <= os.supports_dir_fd
    and os.scandir in os.supports_fd
    and hasattr(os, "O_DIRECTORY")
    and hasattr(os, "O_NOFOLLOW")
)


def is_link(status: os.stat_result) -> bool:
    return stat.S_ISLNK(status.st_mode) or getattr(status, "st_reparse_tag", 0) in _LINK_TAGS


class Folder:
    """A folder held by its descriptor. Operations fail with OSError, and never follow a link."""

    __slots__ = ("_fd", "_path")

    def __init__(self, fd: int | None, path: str = "") -> None:
        self._fd, self._path = fd, path

    @classmethod
    def at(cls, root: str) -> Self:
        """Open the root itself. Links on the way to it are followed: it was configured so."""
        return cls(os.open(root, _FOLDER))

    def enter(self, name: str) -> Self:
        return type(self)(os.open(name, _FOLDER | _NO_FOLLOW, dir_fd=self._fd))

    def stat(self, name: str) -> os.stat_result:
        return os.stat(self._at(name), dir_fd=self._fd, follow_symlinks=False)

    def own_stat(self) -> os.stat_result:
        return os.stat(self._own())

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        return os.open(self._at(name), flags | _LEAF, mode, dir_fd=self._fd)

    def mkdir(self, name: str) -> None:
        os.mkdir(self._at(name), dir_fd=self._fd)

    def replace(self, name: str, target: str) -> None:
        os.replace(self._at(name), self._at(target), src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self._fd)

    def rmdir(self, name: str) -> None:
        os.rmdir(self._at(name), dir_fd=self._fd)

    def scan(self, suffix: str = "") -> Iterator[tuple[str, os.stat_result]]:
        """Yield the names that end with the suffix, and their status. OverflowError if there are too many."""
        with os.scandir(self._own()) as entries:
            for count, entry in enumerate(entries):
                if count >= MOST_SCANNED:
                    raise OverflowError
                if entry.name.endswith(suffix):
                    with suppress(OSError):  # it was deleted after the folder was read
                        yield entry.name, entry.stat(follow_symlinks=False)

    def sync(self) -> None:
        if self._fd is not None:
            os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _at(self, name: str) -> str:
        """Return the path of a name for a system call."""
        return name

    def _own(self) -> int | str:
        return self._path if self._fd is None else self._fd


class ResolvedFolder(Folder):
    """A folder known by its resolved path, which is compared before each use."""

    __slots__ = ()

    @classmethod
    def at(cls, root: str) -> Self:
        _check_folder(os.stat(root))
        return cls(None, os.path.realpath(root))

    def enter(self, name: str) -> Self:
        _check_folder(self.stat(name))
        return type(self)(None, self._at(name))

    def _at(self, name: str) -> str:
        return self._checked(os.path.join(self._path, name))

    def _own(self) -> int | str:
        return self._checked(self._path)

    def _checked(self, path: str) -> str:
        if os.path.normcase(os.path.realpath(path)) != os.path.normcase(path):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        return path


def _check_folder(status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


LINK = "it is a symbolic link, and links are not followed"

_PROBLEMS: dict[int, tuple[type[PathError], str]] = {
    errno.ENOENT: (FileMissing, "there is no such file or folder"),
    errno.ENOTDIR: (PathError, "it is not a folder"),
    errno.EISDIR: (PathError, "it is a folder, not a file"),
    errno.ENOTEMPTY: (PathError, "the folder is not empty"),
    errno.ELOOP: (PathDenied, LINK),
    errno.EMLINK: (PathDenied, LINK),
    errno.EACCES: (PathDenied, "permission denied"),
    errno.EPERM: (PathDenied, "permission denied"),
    errno.EROFS: (PathDenied, "the disk is read-only"),
    errno.ENAMETOOLONG: (PathDenied, "the name is too long"),
}


def refusal_of(error: OSError, path: str) -> PathError:
    """Return an error of the operating system as a PathError with a plain message."""
    known = _PROBLEMS.get(error.errno or 0)
    if known is None:
        return PathError(path, (error.strerror or str(error)).lower())
    kind, problem = known
    return kind(path, problem)


LONGEST_WAIT = 10.0
"""Seconds to wait for the lock of another process."""


@contextmanager
def locked(folder: Folder, name: str, path: str) -> Generator[None]:
    """Hold the lock of a file. It is advisory, holds between processes, and ends with its holder."""
    fd = folder.open(f"{TEMPORARY}{name}.lock", os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + LONGEST_WAIT
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                problem = f"another process has held it for {LONGEST_WAIT:.0f} s: end that process, or try again"
                raise PathError(path, problem)
            time.sleep(random.uniform(0.0005, 0.003))
        yield
    finally:
        os.close(fd)  # lets go of it


if sys.platform == "win32":
    import msvcrt

    def _try_lock(fd: int) -> bool:
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
