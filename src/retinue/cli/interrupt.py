"""Ctrl-C, and watching a run until it ends or is interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from ..core.events import Event, TaskUpdated
from ..core.runs import RunResult
from ..runtime import Run
from ..tasks.task import TaskStatus
from .parsers import INTERRUPTED
from .text import complain, count
from .view import View

_TICK = 0.08
_ENDED = (TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELLED)


class Interrupt:
    """The first Ctrl-C, or request to terminate, is something to wait for; the second ends the process at once.

    It is entered before the event loop begins and left after it has ended: what does not let itself be cancelled
    would hold up the end of the loop.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._before: dict[signal.Signals, Any] = {}
        self.code = INTERRUPTED
        """With what the process ends: as a shell reports a program that the signal ended."""
        self.happened = False
        self.lost_tasks = 0
        """Background tasks that were waited for and did not complete."""
        self.last_words: Callable[[], object] = lambda: None
        """Called before the process is ended at once."""

    def __enter__(self) -> Self:
        with suppress(ValueError):  # not in the main thread: then Ctrl-C is somebody else's
            for wanted in (signal.SIGINT, signal.SIGTERM):
                self._before[wanted] = signal.signal(wanted, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for wanted, before in self._before.items():
            signal.signal(wanted, before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.happened:
            with suppress(Exception):
                self.last_words()
            os._exit(128 + signum)
        self.happened, self.code = True, 128 + signum
        if self._loop is None:
            self._event.set()
        else:
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._event.wait()

    async def sleep(self, seconds: float) -> None:
        """As asyncio.sleep, but not after an interrupt."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()


async def watch(run: Run, view: View, interrupt: Interrupt, pace: Callable[[Event], float] | None = None) -> RunResult:
    """Show a run to its end. An interrupt cancels it; what it did until then is shown all the same.

    `pace` gives the seconds to wait before an event is shown; the run itself does not wait.
    """
    interrupt.last_words = view.close
    helpers = [asyncio.create_task(_tick(view)), asyncio.create_task(_cancel_when(interrupt, run))]
    try:
        last, tasks = 0, set[str]()
        async for event in run:
            last = event.seq
            if type(event) is TaskUpdated:
                (tasks.discard if event.status in _ENDED else tasks.add)(event.task_id)
            if pace is not None and (seconds := pace(event)):
                await interrupt.sleep(seconds)
            view.show(event)
        result = await run.result()
        if tasks and not interrupt.happened:
            view.note(f"waiting for {count(len(tasks), 'background task')}; press Ctrl-C to stop what still runs")
        async for event in run.follow(last):
            view.show_task(event)
            if type(event) is TaskUpdated and event.status in (TaskStatus.FAILED, TaskStatus.CANCELLED):
                interrupt.lost_tasks += 1
        return result
    finally:
        for helper in helpers:
            helper.cancel()


async def _cancel_when(interrupt: Interrupt, run: Run) -> None:
    await interrupt.wait()
    if not run.ended:
        complain("cancelling the run; press Ctrl-C again to leave at once")
    await run.cancel("interrupted", tasks=True)


async def _tick(view: View) -> None:
    while True:
        await asyncio.sleep(_TICK)
        view.tick()
