"""Synchronous callers: a thread whose event loop runs their coroutines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from ..core.concurrency import GRACE, LAST_MOMENT, cancel_all
from ..core.errors import ConfigurationError
from ..core.events import AnyEvent, RunFinished
from .run import Run

T = TypeVar("T")


class LoopThread:
    """Runs coroutines in one thread while their callers block.

    Invariant: a run belongs to the event loop that started it, and only that loop's thread changes it. Callers hand
    over a coroutine and get its result; they never touch the objects of a run.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon: a program that ends without closing its runtime must not hang.
        self._thread = threading.Thread(target=self._loop.run_forever, name="retinue-sync", daemon=True)
        self._thread.start()
        self._leaving: set[concurrent.futures.Future[Any]] = set()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine. Ctrl-C cancels it, waits for its end and raises KeyboardInterrupt."""
        if threading.current_thread() is self._thread:
            work.close()
            raise ConfigurationError("this code runs in the event loop of run_sync: use `await runtime.run(…)` here")
        done: concurrent.futures.Future[T] = concurrent.futures.Future()
        task: list[asyncio.Task[T]] = []

        def begin() -> None:
            task.append(self._loop.create_task(work))
            task[0].add_done_callback(settle)

        def settle(ended: asyncio.Task[T]) -> None:
            if ended.cancelled():
                done.cancel()
            elif (exc := ended.exception()) is not None:
                done.set_exception(exc)
            else:
                done.set_result(ended.result())

        def stop() -> None:
            if task:
                task[0].cancel()
            else:
                done.cancel()

        try:  # before the work starts: Ctrl-C may come at any moment
            self._loop.call_soon_threadsafe(begin)
            return done.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(stop)
            with contextlib.suppress(Exception, concurrent.futures.CancelledError):
                done.result()
            raise

    def iterate(self, begin: Callable[[], Run[Any]]) -> Iterator[AnyEvent]:
        """Start a run and yield its events. Leaving the iteration early cancels the run: nothing else has a handle of it.

        After the last event the run is not cancelled any more, although its result may not be stored yet: a cancel
        would end a run that is only suspended.
        """

        async def start() -> tuple[Run[Any], AsyncIterator[AnyEvent]]:
            run = begin()
            return run, aiter(run)

        async def next_event(events: AsyncIterator[AnyEvent]) -> AnyEvent | None:
            return await anext(events, None)

        run, events = self.call(start())
        has_ended = False
        try:
            while (event := self.call(next_event(events))) is not None:
                has_ended = isinstance(event, RunFinished) and event.run_id == run.run_id
                yield event
            has_ended = True
        finally:
            if not (has_ended or run.ended):
                leaving = asyncio.run_coroutine_threadsafe(run.cancel("the caller left"), self._loop)
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    def wait_for_cancels(self) -> None:
        """Wait, for a limited time, until the runs that callers left early are cancelled. Blocking."""
        concurrent.futures.wait(list(self._leaving), GRACE)

    def close(self) -> None:
        """Cancel the remaining work and end the thread. Blocking."""
        self.call(_cancel_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    await cancel_all(rest, LAST_MOMENT)
    await asyncio.get_running_loop().shutdown_asyncgens()
