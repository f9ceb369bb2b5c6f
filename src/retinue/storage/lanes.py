"""Lanes: threads that do work on a database, each with a connection. What waits together is committed together."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol, TypeAlias, TypeVar

from ..core.errors import StoreError

T = TypeVar("T")

MOST = 256
"""Pieces of work in one transaction."""


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
_Job = tuple[str, Work, asyncio.AbstractEventLoop | None, _Done]
"""What to do and whom to tell; without an event loop, a thread waits for it."""
_Outcome = tuple[Any, Exception | None]


class Lane:
    """Does work about one thing in the order in which it came, in a thread of its own that begins with the first piece.

    In one transaction it is in the order of what it is about, so that two lanes hardly ever wait for each other. Where
    they do, the database fails one of the transactions, and each piece of it is done alone.
    Work that holds more than what it is about is done on a lane that does not join any: `most` is 1.
    """

    def __init__(
        self, place: str, session: Session, problem: Callable[[Exception], Exception], most: int = MOST
    ) -> None:
        self._place, self._session, self._problem, self._most = place, session, problem, most
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._taking = threading.Lock()

    async def do(self, work: Callable[[Link], T], about: str = "") -> T:
        """Have work done and committed; whoever waits here is told then."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._take((about, work, loop, done))
        return await done

    def do_now(self, work: Callable[[Link], T], about: str = "") -> T:
        """As `do`, for a thread without an event loop. Blocking."""
        done: Future[T] = Future()
        self._take((about, work, None, done))
        return done.result()

    async def close(self) -> None:
        """Do what waits, and end."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """As `close`. Blocking."""
        with self._taking:
            if not self._closed and self._worker is not None:
                self._jobs.put(None)
            self._closed = True
        if self._worker is not None:
            self._worker.join()

    def _take(self, job: _Job) -> None:
        with self._taking:  # nothing is put behind the end, where nobody would find it
            if self._closed:
                raise StoreError(self._place, "it was closed")
            self._jobs.put(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="retinue-store", daemon=True)
                self._worker.start()

    def _serve(self) -> None:
        while True:
            batch = [self._jobs.get()]
            while len(batch) < self._most and not self._jobs.empty():
                batch.append(self._jobs.get())
            jobs = sorted([job for job in batch if job is not None], key=_about)
            if jobs:
                _tell(jobs, self._together([work for _, work, _, _ in jobs]))
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


def _about(job: _Job) -> str:
    return job[0]


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
    for (_, _, loop, done), outcome in zip(jobs, outcomes, strict=True):
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
