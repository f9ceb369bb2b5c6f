"""The names of queues."""

from __future__ import annotations

from typing import Any

from .errors import ConfigurationError


def check_queue(queue: Any, owner: str = "") -> str:
    """Return the name of a queue; raise ConfigurationError if it cannot be one."""
    if not isinstance(queue, str) or not queue or len(queue) > 100 or not all(c.isalnum() or c in "-_." for c in queue):
        where = f"{owner}: " if owner else ""
        raise ConfigurationError(f"{where}a queue is named with letters, digits, '-', '_' and '.', not {queue!r}")
    return queue
