"""Watching a run: the view for the terminal, Ctrl-C, and the exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from ..core.concurrency import helpers
from ..core.events import Event, TaskUpdated
from ..core.runs import RunResult, RunStatus
from ..runtime import Run
from ..tasks.task import TaskStatus
from .consent import Consent
from .outline import how_it_ended
from .parsers import COMPLETED, FAILED, INTERRUPTED
from .text import complain, count
from .view import JsonView, PlainView, View, is_interactive

_TICK = 0.08


class Interrupt:
    """The first SIGINT or SIGTERM can be awaited; the second ends the process at once.

    Enter it before the event loop starts and leave it after the loop has ended, so that a task which ignores its
    cancellation cannot hold up the second signal.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._before: dict[signal.Signals, Any] = {}
        self.code = INTERRUPTED
        """The exit code, as a shell reports the signal."""
        self.happened = False
        self.lost_tasks = 0
        """The number of background tasks that did not complete."""
        self.clean_up: Callable[[], object] = lambda: None
        """Called before the process ends at once."""

    def __enter__(self) -> Self:
        with suppress(ValueError):  # only the main thread may handle signals
            for wanted in (signal.SIGINT, signal.SIGTERM):
                self._before[wanted] = signal.signal(wanted, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for wanted, before in self._before.items():
            signal.signal(wanted, before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.happened:
            with suppress(Exception):
                self.clean_up()
            os._exit(128 + signum)
        self.happened, self.code = True, 128 + signum
        if self._loop is None:
            self._event.set()
        else:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self.happened:  # else it was forgotten before this ran
            self._event.set()

    async def wait(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._event.wait()

    def forget(self) -> None:
        """Wait for another first signal."""
        self.happened = False
        self._event.clear()

    async def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or an interrupt comes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()


def make_view(*, as_json: bool = False) -> View:
    """Return the view for what stdout is."""
    stream = sys.stdout
    if as_json:
        return JsonView(stream)
    if is_interactive(stream):
        try:
            from .live import LiveView
        except ModuleNotFoundError:  # rich is not installed
            return PlainView(stream)
        return LiveView(stream)
    return PlainView(stream)


async def watch(
    run: Run,
    view: View,
    interrupt: Interrupt,
    pace: Callable[[Event], float] | None = None,
    consent: Consent | None = None,
    *,
    has_ended: bool = False,
) -> RunResult:
    """Show a run and its background tasks until they end. An interrupt cancels them.

    `has_ended`: an earlier process has ended the run, and left tasks. `pace` returns the seconds to wait before an
    event is shown; the run itself does not wait. Nothing is shown while `consent` has a question on the terminal.
    """
    interrupt.clean_up = view.close
    terminal = asyncio.Lock() if consent is None else consent.terminal
    if consent is not None:
        consent.view = view
    async with helpers(_tick(view), _cancel_when(interrupt, run)):
        last, tasks = 0, set[str]()
        async for event in run:
            last = event.seq
            if has_ended:
                await _show_task(event, view, interrupt, terminal)
                continue
            if type(event) is TaskUpdated:
                (tasks.discard if TaskStatus(event.status).is_terminal else tasks.add)(event.task_id)
            if pace is not None and (seconds := pace(event)):
                await interrupt.sleep(seconds)
            async with terminal:
                view.show(event)
        result = await run.result()
        if tasks and not interrupt.happened:
            view.note(f"waiting for {count(len(tasks), 'background task')}; press Ctrl-C to stop what still runs")
        async for event in run.follow(last):
            await _show_task(event, view, interrupt, terminal)
        return result


async def _show_task(event: Event, view: View, interrupt: Interrupt, terminal: asyncio.Lock) -> None:
    """Show an event of a background task whose run has ended."""
    async with terminal:
        view.show_task(event)
    if type(event) is TaskUpdated and event.status in (TaskStatus.FAILED, TaskStatus.CANCELLED):
        interrupt.lost_tasks += 1


async def _cancel_when(interrupt: Interrupt, run: Run) -> None:
    await interrupt.wait()
    if not run.ended:
        complain("cancelling the run; press Ctrl-C again to leave at once")
    await run.cancel("interrupted", tasks=True)


async def _tick(view: View) -> None:
    while True:
        await asyncio.sleep(_TICK)
        view.tick()


def exit_code(
    result: RunResult,
    interrupt: Interrupt,
    where: str = "",
    *,
    is_stored: bool = True,
    consent: Consent | None = None,
) -> int:
    """Return the exit code of a run that was shown, and say what is wrong; `where` is the --db of what to type next."""
    if consent is not None and consent.report() and result.status is RunStatus.COMPLETED:
        return FAILED
    if result.status is RunStatus.COMPLETED and not interrupt.lost_tasks:
        return COMPLETED
    if result.status is RunStatus.CANCELLED and interrupt.happened:
        return interrupt.code
    if result.status is RunStatus.COMPLETED:
        complain(f"{count(interrupt.lost_tasks, 'background task')} did not complete; see: retinue tasks list{where}")
        return interrupt.code if interrupt.happened else FAILED
    if result.status is RunStatus.SUSPENDED and is_stored:
        waits = count(len(result.suspended), "answer")
        complain(f"the run waits for {waits}; see: retinue runs show {result.run_id}{where}")
    else:
        complain(f"the run did not complete: {how_it_ended(result)}")
    return FAILED
