"""Numbers and times as they are typed. What is none is refused in one line."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from math import isfinite

_MOST = 2**63 - 1
"""What a database can count to."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def count_from_0(text: str) -> int:
    return _whole(text, 0)


def count_from_1(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not least <= int(text) <= _MOST:
        raise ArgumentTypeError(f"{text!r} is not a whole number {'above 0' if least else 'of 0 or more'}")
    return int(text)


def seconds(text: str) -> float:
    """Seconds, 0 or more."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return found


def span(text: str) -> float:
    """A time as people write it, in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip().lower())
    found = float(match[1]) * _UNITS[match[2]] if match else float("inf")
    if not isfinite(found):
        raise ArgumentTypeError(f"{text!r} is not a time: write 30d, 12h, 90m or 45s")
    return found
