"""A folder of this machine as an agent's filesystem."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from secrets import token_hex
from threading import Lock
from typing import BinaryIO, Self, TypeVar

from ..core.errors import ConfigurationError, FileMissing, PathDenied, PathError
from ..core.filesystem import Command, FileEntry, KeptBack, Stamp
from .folders import CAN_ANCHOR, LINK, MOST_SCANNED, Folder, ResolvedFolder, is_link, locked, refusal_of
from .paths import TEMPORARY, join_path, name_problem, sort_entries, split_path, walk_files

T = TypeVar("T")

SUPERVISOR = os.path.join(os.path.dirname(__file__), "supervisor.py")
READ_LIMIT = 10_000_000
LARGEST = 256 * 2**20
"""The most bytes of a file that is changed."""
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "TERM")
"""The environment a command sees: keys and tokens of this process are not its business."""


class LocalFilesystem:
    """The files below `root`. Making one looks at no file; a missing root is made by the first write.

    Nothing outside is read, listed or changed, whatever a path says and whatever changes on disk meanwhile. The one
    rule for it: no symbolic link below the root is followed, not even one that stays inside. Links, special files
    (pipes, devices, sockets) and names that `split_path` refuses are left out of listings and refused when named.
    A hard link is a file like any other to read; a write replaces the name and leaves the other file alone.

    Where the system cannot open files relative to a folder (Windows), paths are resolved and compared before use.
    A link that another process makes in between is followed: do not share such a workspace.
    """

    is_local = True
    _folder_type: type[Folder] = Folder if CAN_ANCHOR else ResolvedFolder

    def __init__(self, root: str | os.PathLike[str], *, read_limit: int = READ_LIMIT, fsync: bool = False) -> None:
        given = os.fspath(root)
        if not given or "\0" in given:
            raise ConfigurationError(f"not a folder to work in: {given!r}")
        self.root = os.path.abspath(given)
        self.read_limit, self.fsync = read_limit, fsync
        self.changing = Lock()
        self._anchor, self._base = self.root, ()

    _kept_back: KeptBack | None = None
    _anchor: str
    """The configured folder. It may be reached through links."""
    _base: tuple[str, ...]
    """The folders from there to the root. They are entered without following links."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    def below(self, path: str) -> Self:
        names, made = split_path(path), copy(self)
        made._base, made.root = (*self._base, *names), os.path.join(self.root, *names)
        return made

    def at(self, root: str) -> Self:
        """Return another folder of this machine, under the same rules."""
        made = copy(self)
        made.root = made._anchor = os.path.abspath(root)
        made._base = ()
        return made

    def without(self, kept_back: KeptBack) -> Self:
        """Return the same files without the folders that `kept_back` names."""
        made = copy(self)
        made._kept_back = kept_back
        return made

    def check_commands(self) -> None:
        """Do nothing: the shell of the system needs no check."""

    def command(self, line: str) -> Command:
        """Return a shell on this machine, in the root folder. It is not confined to that folder.

        On Linux a supervisor runs it and ends the processes it leaves; elsewhere these are found by their group.
        """
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        # A program that embeds Python is no interpreter.
        has_python = sys.platform == "linux" and "python" in os.path.basename(sys.executable or "")
        supervisor = (sys.executable, "-I", "-S", SUPERVISOR) if has_python else ()
        return Command((*supervisor, "/bin/sh", "-c", line), self.root, environment)

    def make_folder(self, path: str) -> None:
        with self._folder(split_path(path), create=True):
            return

    def read(self, path: str) -> bytes:
        """Return the whole file. One over `read_limit` bytes is refused; `open` reads it in parts."""
        with self.open(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            # Read past the limit by one: a file may grow, or be of a kind that does not tell its size.
            data = stream.read(self.read_limit + 1) if size <= self.read_limit else b""
        if max(size, len(data)) > self.read_limit:
            excess = f"it has {max(size, len(data)):,} bytes, over the limit of {self.read_limit:,}"
            raise PathError(path, f"{excess} for reading it whole; read it in parts, with an offset and a limit")
        return data

    def open(self, path: str) -> BinaryIO:
        parents, name = _leaf(path)
        with self._folder(parents) as folder:
            return _stream(folder, name, path)

    def write(self, path: str, data: bytes) -> None:
        """Replace the file or make it. Its mode is kept; one without write permission is refused."""
        parents, name = _leaf(path)
        if path.endswith("/"):
            raise PathError(path, "it names a folder, not a file")
        with self._folder(parents, create=True) as folder:
            self._replace(folder, name, path, data)

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> Stamp | None:
        parents, name = _leaf(path)
        with self._folder(parents, create=True) as folder:
            with _refusing(path), locked(folder, name, path):
                # The stamp belongs to the data read or written, not to a later write without the lock.
                try:
                    with _stream(folder, name, path) as stream:
                        stamp, before = _stamp(os.fstat(stream.fileno())), stream.read(LARGEST + 1)
                except FileMissing:
                    stamp = before = None
                if before is not None and len(before) > LARGEST:
                    raise PathError(path, f"it has more than {LARGEST:,} bytes, which is the limit for a change")
                after = change(before)
                return stamp if after is None else self._replace(folder, name, path, after)

    def list(self, path: str = "") -> list[FileEntry]:
        names = split_path(path)
        with self._folder(names) as folder:
            found = _scan(folder, path, "")
            entries = [entry for name, status in found if (entry := _entry((*names, name), status)) is not None]
        return sort_entries(entries, lambda entry: entry.path)

    def walk(self, path: str = "") -> list[FileEntry]:
        return list(walk_files(self.list, path, True, lambda above, _: above))

    def stamp(self, path: str) -> Stamp | None:
        parents, name = _leaf(path)
        try:
            with self._folder(parents) as folder:
                status = folder.stat(name)
        except (FileMissing, FileNotFoundError):
            return None
        except OSError as error:
            raise refusal_of(error, path) from error
        if stat.S_ISDIR(status.st_mode):
            return None
        _refuse_unless_file(status, path)
        return _stamp(status)

    def stamps(self, path: str = "", suffix: str = "") -> dict[str, Stamp]:
        try:
            with self._folder(split_path(path)) as folder:
                found = _scan(folder, path, suffix)
                return {name: _stamp(status) for name, status in found if not stat.S_ISDIR(status.st_mode)}
        except FileMissing:
            return {}

    def folder_stamp(self, path: str = "") -> Stamp | None:
        try:
            with self._folder(split_path(path)) as folder:
                status = _call(folder.own_stat, path)
        except FileMissing:
            return None
        return status.st_mtime_ns, status.st_ino

    def exists(self, path: str) -> bool:
        """Return whether there is a usable file or folder."""
        names = split_path(path)
        try:
            with self._folder(names[:-1]) as folder:
                return not names or _entry(names, folder.stat(names[-1])) is not None
        except FileMissing:
            return False
        except PathError as error:
            if error.path == self.root:
                raise
            return False
        except OSError:
            return False

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with nothing in it."""
        parents, name = _leaf(path)
        with self._folder(parents) as folder:
            status = _call(lambda: folder.stat(name), path)
            if is_link(status):
                raise PathDenied(path, LINK)
            remove = folder.rmdir if stat.S_ISDIR(status.st_mode) else folder.unlink
            _call(lambda: remove(name), path)

    @contextmanager
    def _folder(self, names: tuple[str, ...], *, create: bool = False) -> Generator[Folder, None, None]:
        if self._kept_back is not None and self._kept_back((*self._base, *names)):
            raise PathDenied(join_path(names), "it is kept back from agents")
        folder = self._open_root(create=create)
        try:
            for depth, name in enumerate((*self._base, *names), 1 - len(self._base)):
                shown = self.root if depth < 1 else join_path(names[:depth])
                inner = _enter(folder, name, shown, create=create)
                folder.close()
                folder = inner
            yield folder
        finally:
            folder.close()

    def _open_root(self, *, create: bool) -> Folder:
        try:
            if create:
                os.makedirs(self._anchor, exist_ok=True)
            return self._folder_type.at(self._anchor)
        except FileNotFoundError as error:
            problem = "the root folder of this workspace does not exist; create it, or write a file to have it made"
            raise FileMissing(self.root, problem) from error
        except (NotADirectoryError, FileExistsError) as error:
            problem = "the root of this workspace is a file, or below one; give it a folder"
            raise PathError(self.root, problem) from error
        except OSError as error:
            raise refusal_of(error, self.root) from error

    def _replace(self, folder: Folder, name: str, path: str, data: bytes) -> Stamp:
        mode = _mode_of_existing(folder, name, path)
        temporary = TEMPORARY + token_hex(8)
        try:
            stamp = self._write_new(folder, temporary, data, mode)
            folder.replace(temporary, name)
            if self.fsync:
                folder.sync()
            return stamp
        except BaseException as error:
            with suppress(OSError):
                folder.unlink(temporary)
            if isinstance(error, OSError):
                raise refusal_of(error, path) from error
            raise

    def _write_new(self, folder: Folder, name: str, data: bytes, mode: int | None) -> Stamp:
        fd = folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(fd, "wb") as stream:
            stream.write(data)
            stream.flush()
            if mode is not None and sys.platform != "win32":
                os.fchmod(fd, mode)
            if self.fsync:
                os.fsync(fd)
            return _stamp(os.fstat(fd))


def _leaf(path: str) -> tuple[tuple[str, ...], str]:
    """Return the parent folders and the name; refuse the root, which has none."""
    names = split_path(path)
    if not names:
        raise PathError(path, "it is the root folder of this workspace, not a file")
    return names[:-1], names[-1]


def _enter(folder: Folder, name: str, path: str, *, create: bool) -> Folder:
    try:
        status = folder.stat(name)
    except FileNotFoundError as error:
        if not create:
            raise refusal_of(error, path) from error
        with _refusing(path), suppress(FileExistsError):
            folder.mkdir(name)
    except OSError as error:
        raise refusal_of(error, path) from error
    else:
        # For the message only: `enter` follows no link in any case.
        if is_link(status):
            raise PathDenied(path, LINK)
        if not stat.S_ISDIR(status.st_mode):
            raise PathError(path, "it is a file, not a folder")
    return _call(lambda: folder.enter(name), path)


def _open_file(folder: Folder, name: str, path: str, flags: int) -> tuple[int, os.stat_result]:
    """Open an ordinary file. It is checked before, because opening a device has effects, and after, to be sure."""
    _refuse_unless_file(_call(lambda: folder.stat(name), path), path)
    fd = _call(lambda: folder.open(name, flags), path)
    try:
        status = os.fstat(fd)
        _refuse_unless_file(status, path)
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def _stream(folder: Folder, name: str, path: str) -> BinaryIO:
    return os.fdopen(_open_file(folder, name, path, os.O_RDONLY)[0], "rb")


def _refuse_unless_file(status: os.stat_result, path: str) -> None:
    if is_link(status):
        raise PathDenied(path, LINK)
    if stat.S_ISDIR(status.st_mode):
        raise PathError(path, "it is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise PathDenied(path, "it is a pipe, a device or a socket, not a file")


def _mode_of_existing(folder: Folder, name: str, path: str) -> int | None:
    try:
        fd, status = _open_file(folder, name, path, os.O_WRONLY)
    except FileMissing:
        return None
    os.close(fd)
    return stat.S_IMODE(status.st_mode) & 0o777


def _entry(names: tuple[str, ...], status: os.stat_result) -> FileEntry | None:
    """Return the entry of a listing; None for what cannot be used."""
    if is_link(status) or name_problem(names[-1]):
        return None
    if stat.S_ISDIR(status.st_mode):
        return FileEntry(join_path(names), True)
    return FileEntry(join_path(names), False, status.st_size) if stat.S_ISREG(status.st_mode) else None


def _scan(folder: Folder, path: str, suffix: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        yield from folder.scan(suffix)
    except OSError as error:
        raise refusal_of(error, path) from error
    except OverflowError:
        raise PathError(path, f"it has more than {MOST_SCANNED:,} entries, which is the limit for a listing") from None


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_ino, status.st_size


@contextmanager
def _refusing(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise refusal_of(error, path) from error


def _call(function: Callable[[], T], path: str) -> T:
    """As `_refusing`, for the calls of every path, which a context manager would slow down."""
    try:
        return function()
    except OSError as error:
        raise refusal_of(error, path) from error
