"""Structured concurrency: work that stops when it is told, work that ends with its block, and pauses between attempts.

Every task that is started here has an owner that waits for its end. `supervise` runs one piece of work:

    runs → ended by itself                                        → its result or its exception, as it is
    runs → told to stop: token, deadline, or the caller is cancelled → the grace → cancelled → LAST_MOMENT → left behind

- Cancellation is never swallowed: if the caller is cancelled, the work is stopped first, and CancelledError goes on.
- Work that has ended gives its result, even if the token was set or the deadline came at the same moment; work that
  ends within the grace gives its result, too.
- A grace that runs out is not an error of the work: `WorkEnd.is_left` says so, and `result` raises LeftBehind.
- No task is forgotten: work that is left behind is cancelled, kept until it ends, and its exception is retrieved.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from math import inf
from threading import Lock
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from .content import clean_text
from .errors import ToolCancelled

T = TypeVar("T")

Cause = Literal["token", "deadline", "cancelled"]
"""Why work was told to stop: its token was set, its time is over, or its caller was cancelled."""

GRACE = 5.0
"""Seconds to wait for work to stop after it was told to."""
LAST_MOMENT = 1.0
"""Seconds to wait for the end of work that was cancelled after its grace."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""The first and the longest pause of a `Backoff`, in seconds."""

_log = logging.getLogger(__name__)

_TURN = 200
"""Pieces of work that are started before other work has its turn."""
_TOKENS = Lock()
"""One lock for all tokens: it is held briefly, and a tree of runs has many tokens."""
_left: set[asyncio.Future[Any]] = set()
"""Work that was left behind and has not ended: an event loop holds its tasks only weakly."""


class CancellationToken(Struct, eq=False):
    """Tells blocking work to stop. Async code does not need it: cancelling raises CancelledError there."""

    reason: str | None = None
    _callbacks: dict[Callable[[], object], None] = {}  # ordered, and quick to remove from

    def is_set(self) -> bool:
        return self.reason is not None

    def raise_if_set(self) -> None:
        if self.reason is not None:
            raise ToolCancelled(self.reason)

    def set(self, reason: str = "cancelled") -> None:
        """Request the stop; the first reason stays."""
        with _TOKENS:
            if self.reason is not None:
                return
            self.reason = clean_text(reason)
            callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call back once when set, at once if it already is. Callbacks may come from any thread."""
        with _TOKENS:
            if self.reason is None:
                self._callbacks[callback] = None
                return
        callback()

    def forget(self, callback: Callable[[], object]) -> None:
        """Remove a callback."""
        with _TOKENS:
            self._callbacks.pop(callback, None)

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Generator[None]:
        """Call back when set, within the block."""
        self.on_set(callback)
        try:
            yield
        finally:
            self.forget(callback)

    def pass_on_to(self, other: CancellationToken) -> Callable[[], object]:
        """Set another token when this one is set; return the callback to `forget` afterwards."""

        def pass_on() -> None:
            other.set(self.reason or "cancelled")

        self.on_set(pass_on)
        return pass_on

    @contextmanager
    def told(self) -> Generator[asyncio.Future[None]]:
        """Yield a future that is done when the token is set."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not told.done():
                told.set_result(None)

        def wake_from_anywhere() -> None:
            loop.call_soon_threadsafe(wake)

        with self.calling(wake_from_anywhere):
            yield told

    async def wait(self) -> None:
        """Wait until the token is set."""
        with self.told() as told:
            await told


class WorkEnd(Generic[T]):
    """The end of supervised work."""

    __slots__ = ("_work", "cause", "is_left")

    def __init__(self, work: asyncio.Future[T], cause: Cause | None) -> None:
        self._work = work
        self.cause: Cause | None = cause
        """Why the work was told to stop; None if it ended by itself."""
        self.is_left = not work.done()
        """True if it did not stop within its grace and was left behind."""

    @property
    def is_cancelled(self) -> bool:
        """True if the work ended by CancelledError."""
        return not self.is_left and self._work.cancelled()

    @property
    def has_no_outcome(self) -> bool:
        """True if the work was left behind or cancelled: it neither returned nor raised anything of its own."""
        return self.is_left or self._work.cancelled()

    @property
    def error(self) -> Exception | None:
        """The exception that the work raised; None if it returned or has no outcome."""
        problem = None if self.has_no_outcome else self._work.exception()
        if problem is not None and not isinstance(problem, Exception):
            raise problem
        return problem

    def result(self) -> T:
        """Return what the work returned, or raise what it raised. Not for work that was left behind: check `is_left`."""
        return self._work.result()


def _cancel(work: asyncio.Task[Any], cause: Cause) -> None:
    """Cancel work, unless it is being cancelled: a second CancelledError would interrupt what it does to stop."""
    if not work.cancelling():
        work.cancel()


async def supervise(
    work: Coroutine[Any, Any, T] | asyncio.Task[T],
    *,
    token: CancellationToken | None = None,
    deadline: float | None = None,
    grace: float | None = GRACE,
    stop: Callable[[asyncio.Task[T], Cause], object] = _cancel,
    name: str | None = None,
) -> WorkEnd[T]:
    """Run work until it ends or is told to stop: by the token, `deadline` seconds from now, or because the caller is
    cancelled. The module's docstring is the contract.

    `stop` tells the work; by default it cancels the task. A `stop` that only asks gives the work the grace before it is
    cancelled. Without a grace (None) the work may take any time.
    """
    task = work if isinstance(work, asyncio.Task) else asyncio.create_task(work, name=name)
    cause: Cause | None = None
    try:
        await _wait(task, token, deadline)
        if not task.done():
            cause = "token" if token is not None and token.is_set() else "deadline"
            await _stop(task, cause, grace, stop)
    except asyncio.CancelledError:
        if not task.done():
            await _stop(task, "cancelled", grace, stop)
        _retrieve(task)
        raise
    finally:
        if not task.done():
            _leave_behind(task)
    return WorkEnd(task, cause)


async def _wait(work: asyncio.Task[Any], token: CancellationToken | None, seconds: float | None) -> None:
    """Wait until work ends, its token is set, or the time is over."""
    if token is None:
        await asyncio.wait({work}, timeout=seconds)
        return
    with token.told() as told:
        await asyncio.wait({work, told}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


async def _stop(
    work: asyncio.Task[T], cause: Cause, grace: float | None, stop: Callable[[asyncio.Task[T], Cause], object]
) -> None:
    """Tell work to stop, and wait for its end."""
    stop(work, cause)
    if grace is None or grace > 0:
        await asyncio.wait({work}, timeout=grace)
    if not work.done() and not work.cancelling():
        work.cancel()
        await asyncio.wait({work}, timeout=LAST_MOMENT)


def _leave_behind(work: asyncio.Task[Any]) -> None:
    if not work.cancelling():
        work.cancel()
    _left.add(work)
    work.add_done_callback(_left.discard)
    work.add_done_callback(_retrieve)


def _retrieve(work: asyncio.Future[Any]) -> None:
    """Note that nothing reads the exception of ended work."""
    if work.done() and not work.cancelled():
        work.exception()


class CancelScope:
    """A block of the present task that can be cancelled alone: the task goes on after the block.

    If the task is cancelled too, CancelledError goes on."""

    __slots__ = ("_is_cancelled", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task, self._is_cancelled = task, False

    def cancel(self) -> None:
        """Cancel the block, once."""
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._is_cancelled:
            self.task.uncancel()
        if self.task.cancelling() and kind is None:
            raise asyncio.CancelledError
        return self._is_cancelled and kind is asyncio.CancelledError and not self.task.cancelling()


@asynccontextmanager
async def running(work: Coroutine[Any, Any, T]) -> AsyncGenerator[asyncio.Task[T]]:
    """Start work for the block. At the end of the block, cancel it and wait for its end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        await cancel_all([task], LAST_MOMENT)


@asynccontextmanager
async def until_stopped(
    work: Coroutine[Any, Any, T], stop: Coroutine[Any, Any, object], seconds: float | None = None
) -> AsyncGenerator[asyncio.Task[T]]:
    """Start work and wait for its end, for `stop`, or for so many seconds. Then yield the work, which the block may wait
    for or stop in its own way; it is cancelled at the end of the block."""
    async with running(stop) as stopped, running(work) as task:
        await asyncio.wait({task, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        yield task


async def wait_for_first(
    *works: Coroutine[Any, Any, object] | asyncio.Future[Any], seconds: float | None = None
) -> None:
    """Wait until the first work is done or the time is over, and cancel the rest: shield a future that others wait for.
    Raise what the first raised."""
    jobs = [work if isinstance(work, asyncio.Future) else asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(jobs, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for job in done:
            job.result()
    finally:
        await cancel_all(jobs, LAST_MOMENT)


async def join(works: Iterable[asyncio.Future[Any]], seconds: float | None = None) -> bool:
    """Wait until all works have ended, however they end; return False if some have not when the time is over."""
    waiting = set(works)
    return not waiting or not (await asyncio.wait(waiting, timeout=seconds))[1]


async def cancel_all(works: Iterable[asyncio.Future[Any]], seconds: float | None = None) -> bool:
    """Cancel works and wait for their end, as `join`. Nothing reads their exceptions."""
    cancelled = list[asyncio.Future[Any]]()
    for work in works:
        if work.cancel():
            cancelled.append(work)
            work.add_done_callback(_retrieve)
        else:
            _retrieve(work)
    # A coroutine that is closed from outside, such as at the end of the event loop, cannot wait any more.
    return isinstance(sys.exception(), GeneratorExit) or await join(cancelled, seconds)


@asynccontextmanager
async def helpers(*works: Coroutine[Any, Any, object]) -> AsyncGenerator[None]:
    """Do work beside the block. When the block ends, cancel the work and wait for its end."""
    jobs = Jobs("a helper of this process failed")
    for work in works:
        jobs.start(work)
    try:
        yield
    finally:
        await cancel_all(jobs, GRACE)


class Jobs:
    """Tasks that end by themselves, or when their owner calls `close`. A failure is reported, by default to the log."""

    __slots__ = ("_problem", "_report", "_tasks")

    def __init__(self, problem: str = "", report: Callable[[BaseException], object] | None = None) -> None:
        self._problem, self._report = problem, report
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(list(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (problem := task.exception()) is None:
            return
        if self._report is not None:
            self._report(problem)
        elif self._problem:
            _log.error("%s: %s", self._problem, problem, exc_info=problem)

    async def close(self) -> None:
        """Cancel the tasks of this event loop, and wait for their end."""
        loop = asyncio.get_running_loop()
        await cancel_all([task for task in self if task.get_loop() is loop])


class Backoff:
    """Pauses between attempts. Each is about twice as long as the one before, with half of it up to chance, until what is
    asked has been away for `patience` seconds."""

    def __init__(
        self, first: float | None = None, longest: float | None = None, *, patience: float = inf, factor: float = 2.0
    ) -> None:
        self._first = FIRST_PAUSE if first is None else first
        self._longest = LONGEST_PAUSE if longest is None else longest
        self._patience, self._factor = patience, factor
        self.reset()

    @property
    def is_longest(self) -> bool:
        return self.pause >= self._longest

    def reset(self) -> None:
        """Begin again with the first pause: an attempt has got something."""
        self.pause = self._first
        """The next pause, before chance."""
        self.extend()

    def extend(self) -> None:
        """Begin the patience again: an attempt has reached what it asks."""
        self._until = time.monotonic() + self._patience

    def next(self) -> float:
        """Return the seconds until the next attempt; the pause after that is longer."""
        pause = self.pause * random.uniform(0.5, 1.5)
        self.pause = min(self.pause * self._factor, self._longest)
        return pause

    async def wait(self, problem: Exception | None = None, at_least: float = 0.0) -> None:
        """Wait before the next attempt; raise the problem if patience has run out."""
        pause = max(self.next(), at_least)
        if problem is not None and time.monotonic() + pause > self._until:
            raise problem
        await asyncio.sleep(pause)


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
        await cancel_all(tasks)
        for work in given:
            work.close()  # one whose task was stopped before it began
        raise


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
