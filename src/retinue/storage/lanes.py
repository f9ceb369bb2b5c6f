"""Lanes: threads that do work on a database, each with a connection. What waits together is committed together.

Little work need not go to a thread and back, which takes longer than the work: see `Lane.quick`.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeAlias, TypeVar

from ..core.errors import StoreError

T = TypeVar("T")

MOST = 256
"""Pieces of work in one transaction."""
MOST_QUICK, QUICK_IN_A_ROW = 32, 256
"""Pieces of work in a transaction that is done without the thread; and such transactions in a row: the thread has
chores of its own, which are done with the next."""
SLOW, PAUSE = 0.01, 1.0
"""Seconds after which such a transaction was none for an event loop, and for how long there is none then."""


class Link(Protocol):
    """A connection. Placeholders are `?` whatever the database; statements say `RETURNING` for what they changed."""

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def run(self, sql: str, *values: Any) -> list[Any]:
        """Do a statement; its rows, where it has any."""
        ...

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Do a statement once for each row."""
        ...

    def note(self, topic: str) -> None:
        """Tell whoever watches a topic, when this is committed, that something has changed."""
        ...

    def clock(self) -> float:
        """Seconds since the epoch, by one clock for all who use the database."""
        ...

    locking: str
    """What a SELECT says at its end so that nobody changes its rows before this is committed."""
    lost: bool
    """Whether the connection is gone, so that another is worth a try."""


Work = Callable[[Link], Any]
"""Something done in one transaction. It changes nothing else, and done again, even after it was committed, it changes
nothing more: where a connection breaks, nobody knows how far it came."""
Session = Callable[[], AbstractContextManager[Link]]
"""Lends a connection, which is given back, or thrown away where it failed."""

_Done: TypeAlias = "asyncio.Future[Any] | Future[Any]"
_Job = tuple[str, Work, bool, asyncio.AbstractEventLoop | None, _Done]
"""What to do, whether alone, and whom to tell; without an event loop, a thread waits for it."""
_Outcome = tuple[Any, Exception | None]


class Lane:
    """Does work about one thing in the order in which it came, in a thread of its own that begins with the first piece.

    In one transaction it is in the order of what it is about. Work that also touches something else has one for itself:
    so two lanes, which keep what they have touched until they commit, never wait for each other. A lane whose work is
    all of that kind joins none: `most` is 1.

    With `quick`, which lends the same connection and has it wait for nothing, little work that finds the lane free is
    done by the event loop itself, all of one turn together. Where that fails, the thread does it again and tells why.
    """

    def __init__(
        self,
        place: str,
        session: Session,
        problem: Callable[[Exception], Exception],
        most: int = MOST,
        quick: Session | None = None,
    ) -> None:
        self._place, self._session, self._problem, self._most = place, session, problem, most
        self._quick = quick
        self._gathered: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
        self._using = threading.Lock()
        self._process = os.getpid()
        """Who has the connection: one that was forked off must not touch it."""
        self._unfinished, self._quick_left, self._quick_from = 0, QUICK_IN_A_ROW, 0.0
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._taking = threading.Lock()

    async def do(self, work: Callable[[Link], T], about: str = "", alone: bool = False, little: bool = False) -> T:
        """Have work done and committed; whoever waits here is told then."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        job = about, work, alone, loop, done
        if little and self._quick is not None:
            self._gather(loop, job)
        else:
            self._do_gathered(loop)
            self._take(job)
        return await done

    def do_now(self, work: Callable[[Link], T], about: str = "") -> T:
        """As `do`, for a thread without an event loop. Blocking."""
        done: Future[T] = Future()
        self._take((about, work, False, None, done))
        return done.result()

    async def close(self) -> None:
        """Do what waits, and end."""
        self._do_gathered(asyncio.get_running_loop())
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """As `close`. Blocking."""
        with self._taking:
            if not self._closed and self._worker is not None:
                self._jobs.put(None)
            self._closed = True
        if self._worker is not None:
            self._worker.join()
        with self._using:  # another event loop may be in the middle of something
            return

    def _take(self, job: _Job) -> None:
        with self._taking:  # nothing is put behind the end, where nobody would find it
            if self._closed:
                raise StoreError(self._place, "it was closed")
            self._unfinished += 1
            self._jobs.put(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="retinue-store", daemon=True)
                self._worker.start()

    def _gather(self, loop: asyncio.AbstractEventLoop, job: _Job) -> None:
        gathered = self._gathered.get(loop)
        if gathered is None:
            self._gathered[loop] = [job]
            loop.call_soon(self._do_gathered, loop)
        else:
            gathered.append(job)

    def _do_gathered(self, loop: asyncio.AbstractEventLoop) -> None:
        jobs = self._gathered.pop(loop, [])
        left = jobs
        try:
            left = [] if not jobs or self._did_quickly(jobs) else jobs
        finally:  # also where somebody pressed Ctrl-C
            self._take_all(left)

    def _take_all(self, jobs: list[_Job]) -> None:
        for job in jobs:
            try:
                self._take(job)
            except StoreError as exc:
                _settle([(job[-1], (None, exc))])

    def _did_quickly(self, jobs: list[_Job]) -> bool:
        """Do all of it at once in this thread, where nobody is before it and nothing need be waited for."""
        began = time.monotonic()
        if self._quick is None or len(jobs) > MOST_QUICK or began < self._quick_from or os.getpid() != self._process:
            return False
        with self._taking:
            if self._closed or self._unfinished or not self._quick_left:
                return False
            self._quick_left -= 1
            self._using.acquire()  # at once: who has nothing to do uses nothing
        try:
            with self._quick() as link:
                outcomes = _in_one(link, [work for _, work, _, _, _ in jobs])
        except Exception:  # the thread does it again, with all patience, and sees whose fault it was
            return False
        finally:
            self._using.release()
            now = time.monotonic()
            if now - began > SLOW:
                self._quick_from = now + PAUSE
        _settle([(job[-1], outcome) for job, outcome in zip(jobs, outcomes, strict=True)])
        return True

    def _serve(self) -> None:
        while True:
            batch = [self._jobs.get()]
            while len(batch) < self._most and not self._jobs.empty():
                batch.append(self._jobs.get())
            jobs = [job for job in batch if job is not None]
            for some in _parted(jobs):
                with self._using:
                    outcomes = self._together([work for _, work, _, _, _ in some])
                with self._taking:
                    self._unfinished -= len(some)
                    self._quick_left = QUICK_IN_A_ROW
                _tell(some, outcomes)
            if len(jobs) < len(batch):
                return

    def _together(self, works: list[Work]) -> list[_Outcome]:
        """Do several things in one transaction; where one fails, each in its own."""
        outcomes: list[_Outcome] = []
        try:
            if len(works) > 1:
                with self._session() as link, suppress(Exception):  # one by one it shows whose fault it was
                    return _in_one(link, works)
            for work in works:
                outcomes.append(self._alone(work))
        except Exception as exc:  # no connection is to be had: what is left need not be tried
            outcomes += [(None, self._problem(exc))] * (len(works) - len(outcomes))
        return outcomes

    def _alone(self, work: Work) -> _Outcome:
        """Do one thing, and once again where the connection turned out to be gone."""
        outcome, lost = self._try(work)
        return self._try(work)[0] if lost else outcome

    def _try(self, work: Work) -> tuple[_Outcome, bool]:
        with self._session() as link:
            try:
                return _in_one(link, [work])[0], False
            except Exception as exc:
                return (None, self._problem(exc)), link.lost


def _parted(jobs: Sequence[_Job]) -> list[list[_Job]]:
    """Work in the order of what it is about, parted by transaction."""
    parts: list[list[_Job]] = []
    may_join = False
    for job in sorted(jobs, key=lambda job: job[0]):
        alone = job[2]
        if may_join and not alone:
            parts[-1].append(job)
        else:
            parts.append([job])
        may_join = not alone
    return parts


def _in_one(link: Link, works: Sequence[Work]) -> list[_Outcome]:
    try:
        link.begin()
        outcomes: list[_Outcome] = [(work(link), None) for work in works]
        link.commit()
    except BaseException:
        link.rollback()
        raise
    return outcomes


def _tell(jobs: Sequence[_Job], outcomes: Sequence[_Outcome]) -> None:
    """Tell those who wait, with one word to each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[_Done, _Outcome]]] = {}
    for (_, _, _, loop, done), outcome in zip(jobs, outcomes, strict=True):
        by_loop.setdefault(loop, []).append((done, outcome))
    for loop, told in by_loop.items():
        if loop is None:
            _settle(told)
            continue
        try:
            loop.call_soon_threadsafe(_settle, told)
        except RuntimeError:
            continue  # the event loop is closed: nobody waits any more


def _settle(told: list[tuple[_Done, _Outcome]]) -> None:
    for done, (result, error) in told:
        if done.done():
            continue
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)
