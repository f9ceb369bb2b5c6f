"""A folder of Markdown declarations: read once, and again where a file has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from ..core.errors import FileMissing, FilesystemError, PathError
from ..core.filesystem import Filesystem, Stamp
from .declarations import Problem, SubagentDeclaration
from .markdown import Loaded

MANY, PATIENCE = 200, 1.0
"""More files than `MANY` are looked at one by one only every `PATIENCE` seconds, because it takes milliseconds. A file
that is added, removed or replaced is noticed at once."""
SMALL = 16
"""The number of files that are looked at on the event loop."""
DEEPEST = 4
"""The levels of folders that are looked at."""

Reader = Callable[[str, bytes, str], Loaded]


class _Kept(Struct, frozen=True, gc=False):
    stamp: Stamp
    loaded: Loaded


class DeclarationFolder:
    """The `.md` files of a folder and, if `nested`, of the folders below it. Blocking."""

    def __init__(self, filesystem: Filesystem, folder: str, read: Reader, *, nested: bool = False) -> None:
        self._filesystem, self._folder, self._reader, self._nested = filesystem, folder, read, nested
        self._stamps: dict[str, Stamp] | None = None
        self._folder_stamp: Stamp | None = None
        self._looked_at = 0.0
        self._files: dict[str, _Kept] = {}
        self.problems: tuple[Problem, ...] = ()

    @property
    def is_small(self) -> bool:
        """True if looking at it again takes microseconds."""
        return self._stamps is not None and len(self._stamps) <= SMALL

    @property
    def _was_seen_lately(self) -> bool:
        many = self._stamps is not None and len(self._stamps) > MANY
        return many and time.monotonic() - self._looked_at < PATIENCE

    @property
    def declarations(self) -> list[SubagentDeclaration]:
        """Those that could be read, in the order of their files' names."""
        found = [kept.loaded.declaration for _, kept in sorted(self._files.items())]
        return [declaration for declaration in found if declaration is not None]

    def refresh(self) -> bool:
        """Read what has changed since the last time; whether anything had."""
        try:
            folder_stamp = self._filesystem.folder_stamp(self._folder)
            if folder_stamp == self._folder_stamp and self._was_seen_lately:
                return False
            stamps = self._look("", DEEPEST if self._nested else 0)
        except FilesystemError as exc:
            changed = self._stamps is not None or not self.problems
            self._files, self._stamps, self.problems = {}, None, (Problem(self._folder, _why(exc)),)
            return changed
        self._folder_stamp, self._looked_at = folder_stamp, time.monotonic()
        if stamps == self._stamps:
            return False
        self._files = {
            name: kept
            if (kept := self._files.get(name)) is not None and kept.stamp == stamp
            else _Kept(stamp, self._read(name))
            for name, stamp in stamps.items()
        }
        self._stamps = stamps
        self.problems = tuple([problem for _, kept in sorted(self._files.items()) for problem in kept.loaded.problems])
        return True

    def _look(self, below: str, depth: int) -> dict[str, Stamp]:
        """The stamps of the files, by their paths in this folder."""
        folder = f"{self._folder}/{below}".rstrip("/")
        stamps = {below + name: stamp for name, stamp in self._filesystem.stamps(folder, ".md").items()}
        if depth > 0:
            with suppress(FileMissing):
                for entry in self._filesystem.list(folder):
                    if entry.is_dir:
                        stamps |= self._look(f"{below}{entry.path.rpartition('/')[2]}/", depth - 1)
        return stamps

    def _read(self, name: str) -> Loaded:
        path = f"{self._folder}/{name}"
        where = path.encode(errors="backslashreplace").decode()  # what is told of it must be text, whatever its name is
        try:
            data = self._filesystem.read(path)
        except FilesystemError as exc:
            return Loaded(None, (Problem(where, _why(exc)),))
        return self._reader(name.rpartition("/")[2].removesuffix(".md"), data, where)


def _why(error: FilesystemError) -> str:
    """Return the problem without the path, which is shown beside it."""
    return error.problem if isinstance(error, PathError) else str(error)
