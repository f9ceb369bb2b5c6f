"""A lock on a name in a folder that holds between processes, and lets go when its holder dies."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from ..core.errors import PathError
from .folders import Folder
from .paths import TEMPORARY

LONGEST_WAIT = 10.0
"""Seconds to wait for another process; one that holds a lock longer has been stopped."""


@contextmanager
def locked(folder: Folder, name: str, path: str, wait: float = LONGEST_WAIT) -> Generator[None]:
    """Hold the lock of a file. Only whoever asks for it too is kept away."""
    fd = folder.open(f"{TEMPORARY}{name}.lock", os.O_RDWR | os.O_CREAT)
    try:
        deadline = time.monotonic() + wait
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise PathError(path, f"another process has held it for {wait:.0f} s: end that process, or try again")
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
