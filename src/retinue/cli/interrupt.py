"""Watching a run: the view for the terminal, Ctrl-C, and the exit code."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from ..core.concurrency import helpers, until_stopped
from ..core.decisions import Decision
from ..core.events import Event, TaskUpdated
from ..core.results import SuspendTicket
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

    def press(self) -> None:
        """Do what a first signal does."""
        self.happened = True
        self._event.set()

    def forget(self) -> None:
        """Wait for another first signal."""
        self.happened = False
        self._event.clear()

    async def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or an interrupt comes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wait()


def make_view(args: argparse.Namespace) -> View:
    """Return the view for what stdout is."""
    stream = sys.stdout
    if args.json:
        return JsonView(stream)
    if is_drawn(args):
        from .screen import Screen

        return Screen(stream, stop=interrupt_self, ascii_only=getattr(args, "ascii", False))
    return PlainView(stream)


def is_drawn(args: argparse.Namespace) -> bool:
    """Return whether a command draws: on a terminal, with keys to steer it."""
    wants_lines = args.json or getattr(args, "plain", False)
    return not wants_lines and sys.stdin.isatty() and is_interactive(sys.stdout)


def interrupt_self() -> None:
    """Do what Ctrl-C does where the terminal does not send a signal for it."""
    signal.raise_signal(signal.SIGINT)


async def watch(
    run: Run,
    view: View,
    interrupt: Interrupt,
    pace: Callable[[Event], float] | None = None,
    consent: Consent | None = None,
    *,
    has_ended: bool = False,
    waits_for_tasks: bool = True,
    record: Callable[[Event], None] | None = None,
) -> RunResult:
    """Show a run and its background tasks until they end. An interrupt cancels them.

    `has_ended`: an earlier process has ended the run, and left tasks. `pace` returns the seconds to wait before an
    event is shown; the run itself does not wait.
    """
    interrupt.clean_up, terminal = view.close, view.terminal
    if consent is not None:
        consent.view = view
    async with helpers(_tick(view), _cancel_when(interrupt, run, view)):
        last, tasks = 0, set[str]()
        async for event in run:
            last = event.seq
            if record is not None:
                record(event)
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
        if not waits_for_tasks:
            return result
        if tasks and not interrupt.happened:
            view.note(f"waiting for {count(len(tasks), 'background task')}; press Ctrl-C to stop what still runs")
        async for event in run.follow(last):
            if record is not None:
                record(event)
            await _show_task(event, view, interrupt, terminal)
        return result


async def _show_task(event: Event, view: View, interrupt: Interrupt, terminal: asyncio.Lock) -> None:
    """Show an event of a background task whose run has ended."""
    async with terminal:
        view.show_task(event)
    if type(event) is TaskUpdated and event.status in (TaskStatus.FAILED, TaskStatus.CANCELLED):
        interrupt.lost_tasks += 1


async def _cancel_when(interrupt: Interrupt, run: Run, view: View) -> None:
    await interrupt.wait()
    if not run.ended:
        view.warn("cancelling the run; press Ctrl-C again to leave at once")
    await run.cancel("interrupted", tasks=True)


async def converse(
    run: Run,
    answer: Callable[[str, dict[str, Decision]], Run],
    view: View,
    interrupt: Interrupt,
    consent: Consent | None = None,
    *,
    waits_for_tasks: bool = True,
    record: Callable[[Event], None] | None = None,
) -> RunResult:
    """Show a run to its end: what it waits for is asked, and `answer` continues it with the decisions."""
    result = await watch(run, view, interrupt, consent=consent, waits_for_tasks=waits_for_tasks, record=record)
    while result.status.is_waiting and not interrupt.happened:
        async with until_stopped(view.answers(result), interrupt.wait()) as asking:
            given = asking.result() if asking.done() else {}
        if not given:
            break
        decisions = {target: one.decision(_ticket(result, target)) for target, one in given.items()}
        run = answer(result.run_id, decisions)
        result = await watch(run, view, interrupt, consent=consent, waits_for_tasks=waits_for_tasks, record=record)
    return result


def _ticket(result: RunResult, target: str) -> SuspendTicket:
    """Return the ticket of a path or call id."""
    tickets = result.suspended
    return tickets.get(target) or next(one for one in tickets.values() if "/".join(one.path) == target)


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
