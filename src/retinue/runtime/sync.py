"""Synchronous use: a thread with an event loop of its own, for programs without `await` and for notebooks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..core.errors import ConfigurationError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in one thread while their callers block.

    Invariant: a run belongs to the event loop that started it, and only that loop's thread changes it. Callers hand
    over a coroutine and get its result; they touch nothing that is at work in the thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that ends without closing its runtime must not hang.
        self._thread = threading.Thread(target=self._loop.run_forever, name="retinue-sync", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. Ctrl-C cancels it, waits for its end and raises KeyboardInterrupt."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError("this code runs in the event loop of run_sync: use `await runtime.run(…)` here")
        task: list[asyncio.Task[T] | None] = []

        async def begin() -> T:
            task.append(asyncio.current_task())
            return await work

        done = asyncio.run_coroutine_threadsafe(begin(), self._loop)
        try:
            return done.result()
        except KeyboardInterrupt:
            if task and task[0] is not None:
                self._loop.call_soon_threadsafe(task[0].cancel)
            else:
                done.cancel()
            with contextlib.suppress(concurrent.futures.CancelledError):
                done.result()
            raise

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine without waiting for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the thread. Blocking."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
