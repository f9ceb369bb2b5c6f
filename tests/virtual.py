"""An event loop whose time is virtual: it stands still while anything can run, and jumps to what is awaited next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Does not wait for the time until the next timer, but passes it."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0.0 if timeout is not None else None)
        if not ready and timeout is not None:
            self.passed += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._passing = _Selector()
        super().__init__(self._passing)

    def time(self) -> float:
        return self._passing.passed


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
