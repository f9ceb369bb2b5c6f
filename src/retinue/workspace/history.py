"""What was cut from a conversation, beside the files of the workspace.

These files are no part of the workspace: they exist for one conversation only, nothing can be written to them, and searches
of the whole workspace leave them out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from typing import Any, BinaryIO

from ..core.errors import FilesystemError, PathDenied
from ..core.filesystem import FileEntry, Filesystem, Stamp
from ..core.window import HISTORY, History
from .paths import normal_path
from .text import LINE_BYTES


class WithHistory:
    """The part of a filesystem that the file tools use, with the files of a history before it."""

    def __init__(self, filesystem: Filesystem, history: History) -> None:
        self._filesystem, self._history = filesystem, history
        self.is_local = filesystem.is_local

    @property
    def changing(self) -> AbstractContextManager[Any]:
        return self._filesystem.changing

    def _text(self, path: str) -> bytes | None:
        """Return a file of the history; None if the path is one of the workspace."""
        if not path.lstrip("./").startswith(f"{HISTORY}/"):
            return None
        text = self._history.read(normal_path(path))
        if text is None:
            return None
        lines = [part for line in text.split("\n") for part in _wrapped(line)]
        return "\n".join(lines).encode(errors="replace").replace(b"\0", b"")

    def open(self, path: str) -> BinaryIO:
        data = self._text(path)
        return self._filesystem.open(path) if data is None else BytesIO(data)

    def read(self, path: str) -> bytes:
        data = self._text(path)
        return self._filesystem.read(path) if data is None else data

    def write(self, path: str, data: bytes) -> None:
        self._refuse(path)
        self._filesystem.write(path, data)

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> Stamp | None:
        self._refuse(path)
        return self._filesystem.update(path, change)

    def list(self, path: str = "") -> list[FileEntry]:
        folder = normal_path(path)
        if folder != HISTORY and not folder.startswith(f"{HISTORY}/"):
            return self._filesystem.list(path)
        made: dict[str, FileEntry] = {}
        for name in self._history.paths():
            above = name.rpartition("/")[0]
            if above == folder:
                made[name] = FileEntry(name, False, len(self._text(name) or b""))
            elif folder == HISTORY:
                made[above] = FileEntry(above, True)
        if not made:
            return self._filesystem.list(path)
        try:
            return [*made.values(), *[one for one in self._filesystem.list(path) if one.path not in made]]
        except FilesystemError:  # the workspace has no such folder
            return list(made.values())

    def _refuse(self, path: str) -> None:
        if self._text(path) is not None:
            raise PathDenied(path, "it is a part of this conversation that was cut, and cannot be changed")


Files = Filesystem | WithHistory
"""What the file tools work on."""


def _wrapped(line: str) -> list[str]:
    """Return a line as pieces that read_file shows whole."""
    width = LINE_BYTES // 4
    if len(line) <= width:
        return [line]
    return [line[start : start + width] for start in range(0, len(line), width)]
