"""Where tests make their files: in memory if the machine has enough, as most of them live for a moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ENOUGH = 2 * 2**30
"""Bytes; the databases of six processes have about 300 megabytes."""


def _fast() -> Path | None:
    place = Path("/dev/shm")
    return place if os.access(place, os.W_OK) and shutil.disk_usage(place).free >= ENOUGH else None


FAST = _fast()
"""A folder in memory; None if there is none."""
