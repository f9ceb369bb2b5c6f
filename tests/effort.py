"""The size of random and large tests: a small seeded share in the suite, the whole with `scripts/long-test`."""

from __future__ import annotations

import os

IS_LONG = bool(os.environ.get("RETINUE_LONG"))


def share(whole: int, small: int | None = None) -> int:
    """Return how much to try: the whole in a long test, else `small`, if not given a tenth of it."""
    return whole if IS_LONG else max(whole // 10, 1) if small is None else small
