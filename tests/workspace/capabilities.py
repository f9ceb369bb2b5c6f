"""The superuser without the capability to ignore file permissions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VERSION_3 = 0x20080522
_IGNORES_PERMISSIONS = 0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Until the end of the block, this thread may open only what its user may."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    before = sets[0]
    sets[0] = before & ~_IGNORES_PERMISSIONS
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        sets[0] = before
        libc.capset(header, sets)
