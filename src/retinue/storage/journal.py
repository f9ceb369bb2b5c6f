"""The journal that remembers a run in this process, and can tell it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec import Struct

from ..core.errors import JournalMismatch
from ..core.ids import unique
from ..core.journal import Kind

T = TypeVar("T")


class Entry(Struct, frozen=True, gc=False):
    """One thing a run learned: what it asked, and what it was told."""

    key: str
    about: Any
    value: Any
    kind: str = ""


class _Passing:
    """What a journal need not do that ends with its process."""

    __slots__ = ()

    keeps = False

    def bind(self, run: Any) -> None:
        return

    def child(self, run_id: str) -> MemoryJournal:
        return MemoryJournal()

    async def caught_up(self) -> None:
        return

    def recall(self, key: str) -> bytes | None:
        return None

    def note(self, key: str, body: bytes, *, with_next: bool = False) -> None:
        return


class MemoryJournal(_Passing):
    """Does the work and keeps an entry of each, in the order in which they finished."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def now(self) -> float:
        reading = time.time()
        self.entries.append(Entry("now", None, reading))
        return reading

    def new_id(self, prefix: str) -> str:
        made = f"{prefix}_{unique()}"
        self.entries.append(Entry("id", prefix, made))
        return made

    async def record(
        self,
        kind: Kind,
        key: str,
        about: Any,
        work: Callable[..., Awaitable[T]],
        *args: Any,
        instead: Callable[[], T] | None = None,
    ) -> T:
        value = await work(*args)
        self.entries.append(Entry(key, about, value, kind))
        return value

    def replay(self) -> ReplayJournal:
        """A journal that tells this run again, without doing any of its work."""
        return ReplayJournal(self.entries)


class ReplayJournal(_Passing):
    """Gives a run what it was given before, in the order in which things finished then.

    A run that asks for anything else, or asks it differently, gets JournalMismatch.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self._work = {entry.key: entry for entry in entries if entry.key not in ("now", "id")}
        # A child is part of the call that started it, which is told again without being made.
        self._order = [key for key, entry in self._work.items() if entry.kind != "child"]
        self._readings = [entry for entry in entries if entry.key == "now"]
        self._ids = [entry for entry in entries if entry.key == "id"]
        self._told = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def now(self) -> float:
        return _next(self._readings, "now", None).value

    def new_id(self, prefix: str) -> str:
        return _next(self._ids, "id", prefix).value

    async def record(
        self,
        kind: Kind,
        key: str,
        about: Any,
        work: Callable[..., Awaitable[T]],
        *args: Any,
        instead: Callable[[], T] | None = None,
    ) -> T:
        entry = self._work.get(key)
        if entry is None:
            raise JournalMismatch(key, "nothing", repr(about))
        if entry.about != about:
            raise JournalMismatch(key, repr(entry.about), repr(about))
        if self._order[self._told] != key:
            turn = self._waiting[key] = asyncio.get_running_loop().create_future()
            await turn
        self._told += 1
        if self._told < len(self._order) and (next_one := self._waiting.get(self._order[self._told])):
            next_one.set_result(None)
        return entry.value

    def assert_told(self) -> None:
        """Fails if the run ended without asking for everything that was recorded."""
        left = [*self._order[self._told :], *(entry.key for entry in (*self._readings, *self._ids))]
        if left:
            raise JournalMismatch(left[0], f"{len(left)} more entries", "the end of the run")


def _next(entries: list[Entry], key: str, about: Any) -> Entry:
    if not entries:
        raise JournalMismatch(key, "nothing", repr(about))
    if entries[0].about != about:
        raise JournalMismatch(key, repr(entries[0].about), repr(about))
    return entries.pop(0)
