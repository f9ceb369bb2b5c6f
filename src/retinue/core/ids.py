"""Ids: eighty random bits from the operating system."""

from __future__ import annotations

import os
import sys

_BYTES = 10
_ready: list[str] = []
"""Made in bulk, because one call of the system costs as much as a short tool call."""

if sys.platform != "win32":
    os.register_at_fork(after_in_child=_ready.clear)  # or two processes would use the same ids


def unique() -> str:
    """Return twenty hexadecimal digits that are unique and cannot be guessed."""
    while True:
        try:
            return _ready.pop()
        except IndexError:  # also where another thread took the last one
            digits = os.urandom(_BYTES * 128).hex()
            _ready.extend([digits[place : place + 2 * _BYTES] for place in range(0, len(digits), 2 * _BYTES)])
