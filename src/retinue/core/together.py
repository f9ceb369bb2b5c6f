"""Concurrent work: run all, run until stopped, wait for the first, do something again and again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)

_TURN = 200
"""Pieces of work that are started before other work has its turn."""


class _Together(Generic[T]):
    """Results in their places, and one future for the end of all or the first failure.

    `asyncio.gather` would schedule a callback for each piece of work; this costs one for all of them.
    """

    __slots__ = ("end", "error", "left", "results")

    def __init__(self, count: int) -> None:
        self.results: list[Any] = [None] * count
        self.left, self.error = count, None
        self.end = asyncio.get_running_loop().create_future()

    async def run(self, place: int, work: Coroutine[Any, Any, T]) -> None:
        try:
            self.results[place] = await work
            self.left -= 1
        except BaseException as exc:
            self.error = self.error or exc
            raise
        finally:
            if not self.end.done() and (self.error is not None or not self.left):
                self.end.set_result(None)


async def run_together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return every result in the given order. If one raises, or this is cancelled, cancel the others and wait for them."""
    given = list(works)
    together: _Together[T] = _Together(len(given))
    tasks: list[asyncio.Task[None]] = []
    try:
        for place, work in enumerate(given):
            if place and place % _TURN == 0:
                await asyncio.sleep(0)
            tasks.append(asyncio.create_task(together.run(place, work)))
        if tasks:
            await together.end
        if together.error is not None:
            raise together.error
        return together.results
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in given:
            work.close()  # one whose task was stopped before it began
        raise


@asynccontextmanager
async def until_stopped(
    work: Coroutine[Any, Any, T], stop: Coroutine[Any, Any, object], seconds: float | None = None
) -> AsyncGenerator[asyncio.Task[T]]:
    """Start work and wait for its end, for `stop`, or for so many seconds. Then yield the work to the caller, and cancel it
    after the block."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop)
    try:
        await asyncio.wait({task, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        yield task
    finally:
        stopped.cancel()
        task.cancel()


async def wait_for_first(*works: Coroutine[Any, Any, object]) -> None:
    """Wait until the first work is done, and cancel the rest."""
    jobs = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for job in jobs:
            job.cancel()


def is_closing(exc: BaseException) -> bool:
    """True if a coroutine is closed from outside, such as at the end of the event loop; False if its own code raised."""
    if not isinstance(exc, GeneratorExit):
        return False
    try:
        return asyncio.current_task() is None
    except RuntimeError:  # no event loop
        return True


async def keep_doing(work: Callable[[], Awaitable[object]], seconds: float, what: str) -> None:
    """Do something again and again, with a pause before each time. Its errors are logged: the next time may succeed."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception as exc:
            _log.error("%s failed, and is tried again: %s", what, exc)
