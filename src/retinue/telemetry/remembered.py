"""A memory that forgets its oldest entry when it is full."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

KEPT = 10_000


class Remembered(Generic[T]):
    """Keeps what may never be asked for, for runs of any number of threads."""

    __slots__ = ("_entries", "_limit", "_lock")

    def __init__(self, limit: int = KEPT) -> None:
        self._entries: OrderedDict[str, T] = OrderedDict()
        self._limit, self._lock = limit, threading.Lock()

    def keep(self, name: str, value: T) -> None:
        with self._lock:
            self._entries[name] = value
            if len(self._entries) > self._limit:
                self._entries.popitem(last=False)

    def find(self, name: str) -> T | None:
        """What is kept under that name."""
        return self._entries.get(name)

    def take(self, name: str) -> T | None:
        """What is kept under that name, which is then forgotten."""
        if not self._entries:
            return None
        with self._lock:
            return self._entries.pop(name, None)
