"""Port: the files an agent works on. Paths are relative to its root, with `/`."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import Any, BinaryIO, Protocol, runtime_checkable

from msgspec import Struct

from .runs import RunIdentity

Stamp = Hashable
"""Tells one state of a file from another."""

KeptBack = Callable[[tuple[str, ...]], bool]
"""Returns True for a folder, by the names that lead to it, that must not be entered."""


_PLAIN = re.compile(r"[a-z0-9_][a-z0-9_.@=+-]{0,99}")


def name_of_part(key: str) -> str:
    """Return a file name for a user or a conversation: the key itself if it can be one, otherwise its hash.

    Keys with capital letters are hashed too: some systems do not tell them from small ones.
    """
    return key if _PLAIN.fullmatch(key) else f"~{sha256(key.encode(errors='surrogatepass')).hexdigest()}"


class FileEntry(Struct, frozen=True, gc=False):
    """One file or folder below the root."""

    path: str
    is_dir: bool
    size: int = 0


class Filesystem(Protocol):
    """Contract: no path leaves the root, also not through links; a refusal is a FilesystemError
    whose message names the path. Blocking: callers run it in a thread."""

    @property
    def is_local(self) -> bool:
        """True if reading a few files takes microseconds, so that it may be done on the event loop."""
        ...

    @property
    def changing(self) -> AbstractContextManager[Any]:
        """Held while a file is read and written back; one for a filesystem and all that is below it."""
        ...

    def below(self, path: str) -> Filesystem:
        """Return a folder as a filesystem of its own. It need not exist."""
        ...

    def read(self, path: str) -> bytes: ...

    def open(self, path: str) -> BinaryIO:
        """A seekable stream over a file's bytes, for files too large to read at once; the caller closes it."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Replace the file or make it, with the folders above it; a reader never sees half of it."""
        ...

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> Stamp | None:
        """Write the result of `change(old bytes or None)` and return the new stamp; None as the result changes nothing.

        No other `update`, of any process, comes in between. `change` may be called more than once."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder, with those above it. Idempotent."""
        ...

    def list(self, path: str = "") -> list[FileEntry]:
        """Return the entries of a folder, sorted by name."""
        ...

    def walk(self, path: str = "") -> list[FileEntry]:
        """Every file below a folder, sorted by path; links that lead out are left out."""
        ...

    def stamp(self, path: str) -> Stamp | None:
        """Return a value that changes when the file changes; None if there is no file, an error if it is unreadable."""
        ...

    def stamps(self, path: str = "", suffix: str = "") -> dict[str, Stamp]:
        """Return the stamp of each file directly in a folder, by name; empty if there is no such folder.

        An unreadable file has a stamp too: reading it raises the reason."""
        ...

    def folder_stamp(self, path: str = "") -> Stamp | None:
        """Return a value that changes when a file in the folder is added, removed or replaced; None if there is no
        folder. Writing into a file does not change it."""
        ...

    def exists(self, path: str) -> bool: ...

    def delete(self, path: str) -> None: ...


@runtime_checkable
class GuardedFilesystem(Filesystem, Protocol):
    """A filesystem that can hide folders."""

    def without(self, kept_back: KeptBack) -> Filesystem:
        """Return the same files without the folders that `kept_back` names."""
        ...


class Command(Struct, frozen=True):
    """A command to start: a program with its arguments, the folder to start it in, and all of its environment."""

    argv: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    waits: bool = False
    """True if its input is a socket: it writes a line when it is ready, and begins when it reads one. Without an answer
    it ends by itself; killed before it is ready, it may leave something behind."""
    cleanup: tuple[str, ...] = ()
    """A program to run when it has ended, which removes what it may have left."""
    disk: tuple[str, int] | None = None
    """A folder, and the bytes it may have; a command that makes it larger is stopped."""
    is_held: bool = False
    """True if its input is a pipe that stays open as long as its owner lives, and it ends at the end of its input."""


@runtime_checkable
class RunsCommands(Protocol):
    """A filesystem on whose files commands can be run. Others have no shell."""

    def check_commands(self) -> None:
        """Raise ConfigurationError if commands cannot be run; it says what is missing. Blocking."""
        ...

    def command(self, line: str) -> Command:
        """Return the command that runs a command line in the root of these files. Blocking."""
        ...


@runtime_checkable
class DividedFilesystem(Protocol):
    """A filesystem that may give each run a part of it, by its user or session."""

    @property
    def is_divided(self) -> bool:
        """True if it does; otherwise every run works in all of it."""
        ...

    def for_run(self, run: RunIdentity) -> Filesystem:
        """The part for a run; ConfigurationError where it has none."""
        ...


def is_divided(filesystem: Filesystem) -> bool:
    """Return whether each run works in a part of it."""
    return isinstance(filesystem, DividedFilesystem) and filesystem.is_divided


def files_of(filesystem: Filesystem, run: RunIdentity) -> Filesystem:
    """The files a run works on."""
    return filesystem.for_run(run) if isinstance(filesystem, DividedFilesystem) else filesystem
