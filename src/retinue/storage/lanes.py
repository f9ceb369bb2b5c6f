"""Lanes: threads that do work on a database, each with a connection. Work that waits together is committed together."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from ..core.errors import StoreError

T = TypeVar("T")

MOST = 256
"""Jobs in one transaction."""


class Unmet(Exception):
    """Something that a job expected of the database is not so. Nothing of its transaction was written."""


class Later(NamedTuple):
    """The result of work that is known after the commit."""

    read: Callable[[], Any]


class Link(Protocol):
    """A connection. Placeholders are `?` for every database; a statement says RETURNING where its rows are wanted."""

    locking: str
    """Ends a SELECT that locks its rows until the commit."""
    now: str
    """SQL for the time, in seconds since 1970, by one clock for all who use the database."""
    lease_now: str
    """SQL for the time by which leases are measured, in seconds."""
    boot: str
    """The id of that clock: leases can be compared if it is the same."""
    eager: bool
    """If false, an unmet condition shows only at the commit; then each job is done again by itself, eagerly."""
    lost: bool
    """True after the connection broke: another may work."""

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def run(self, sql: str, *values: Any) -> list[Any]:
        """Run a statement; return its rows, if it has any."""
        ...

    def ask(self, sql: str, *values: Any) -> Later:
        """Run a statement whose rows are not needed before the commit."""
        ...

    def run_two(self, first: str, first_values: Sequence[Any], second: str, second_values: Sequence[Any]) -> None:
        """Run two statements that do not change the same rows, in any order."""
        ...

    def insert(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows into a table, named with its columns: `messages (thread_id, place, body)`."""
        ...

    def insert_if(self, sql: str, values: Sequence[Any], into: str, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows if a statement returns a row. Otherwise raise Unmet, at once or at the commit: see `eager`."""
        ...

    def lock_threads(self, thread_ids: Sequence[str]) -> None:
        """Wait for others who change these threads, and make them wait until the commit."""
        ...

    def notify(self, topic: str) -> None:
        """Wake those who watch a topic, after the commit."""
        ...


Work = Callable[[Link], Any]
"""Something done in one transaction. It returns its result, or Later. It has no other effects. Doing it again changes
nothing more, even after it was committed: after a connection broke, it is tried again."""
Session = Callable[[], AbstractContextManager[Link]]
"""Lends a connection, and takes it back or closes it."""

_Done = asyncio.Future[Any] | Future[Any]
_Outcome = tuple[Any, Exception | None]


class _Job(NamedTuple):
    """Work, the log it is about, the threads it changes, and the future that gets its result."""

    about: str
    work: Work
    threads: Sequence[str]
    loop: asyncio.AbstractEventLoop | None
    """None where a thread waits for the result."""
    done: _Done


class Lane:
    """Does jobs about one log in the order in which they came, in a thread that starts with the first.

    A transaction locks first the threads of its jobs and then their logs, each in one order. So two lanes never wait
    for each other.

    The event loop never does a job itself, however small: a disk that stalls would stop everything else.
    """

    def __init__(
        self,
        place: str,
        session: Session,
        problem: Callable[[Exception], Exception],
        most: int = MOST,
    ) -> None:
        self._place, self._session, self._problem, self._most = place, session, problem, most
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._adding = threading.Lock()

    def do(self, work: Callable[[Link], T], about: str = "", threads: Sequence[str] = ()) -> asyncio.Future[T]:
        """Begin a job; the future is done when it is committed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._try_to_add(_Job(about, work, threads, loop, done))
        return done

    def do_now(self, work: Callable[[Link], T], about: str = "") -> T:
        """As `do`, for a thread without an event loop. Blocking."""
        done: Future[T] = Future()
        self._add(_Job(about, work, (), None, done))
        return done.result()

    def add(self, work: Work) -> None:
        """Begin a job without waiting for its result. From any thread."""
        self._try_to_add(_Job("", work, (), None, Future()))

    async def close(self) -> None:
        """Do what waits, and end."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """As `close`. Blocking."""
        with self._adding:
            if not self._closed and self._worker is not None:
                self._jobs.put(None)
            self._closed = True
        if self._worker is not None:
            self._worker.join()

    def _add(self, job: _Job) -> None:
        with self._adding:  # nothing is added after the end
            if self._closed:
                raise StoreError(self._place, "it was closed")
            self._jobs.put(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="retinue-store", daemon=True)
                self._worker.start()

    def _try_to_add(self, job: _Job) -> None:
        try:
            self._add(job)
        except StoreError as exc:
            _settle([(job.done, (None, exc))])

    def _serve(self) -> None:
        while True:
            batch = [self._jobs.get()]
            while len(batch) < self._most and not self._jobs.empty():
                batch.append(self._jobs.get())
            jobs = sorted([job for job in batch if job is not None], key=lambda job: job.about)
            if jobs:
                _report(jobs, self._together(jobs))
            if len(jobs) < len(batch):
                return

    def _together(self, jobs: list[_Job]) -> list[_Outcome]:
        """Do several jobs in one transaction; where one fails, each in its own."""
        outcomes: list[_Outcome] = []
        try:
            with self._session() as link:
                if len(jobs) > 1 or not link.eager:
                    with suppress(Exception):  # one by one shows whose fault it was
                        return _in_one(link, jobs)
            for job in jobs:
                outcomes.append(self._alone(job))
        except Exception as exc:  # there is no connection: the rest need not be tried
            outcomes += [(None, self._problem(exc))] * (len(jobs) - len(outcomes))
        return outcomes

    def _alone(self, job: _Job) -> _Outcome:
        """Do one job, and once again if the connection was lost."""
        outcome, lost = self._try(job)
        return self._try(job)[0] if lost else outcome

    def _try(self, job: _Job) -> tuple[_Outcome, bool]:
        with self._session() as link:
            was_eager, link.eager = link.eager, True
            try:
                return _in_one(link, [job])[0], False
            except Exception as exc:
                return (None, self._problem(exc)), link.lost
            finally:
                link.eager = was_eager


def _in_one(link: Link, jobs: Sequence[_Job]) -> list[_Outcome]:
    try:
        link.begin()
        threads = {thread_id for job in jobs for thread_id in job.threads}
        if threads:
            link.lock_threads(sorted(threads))
        results = [job.work(link) for job in jobs]
        link.commit()
    except BaseException:
        link.rollback()
        raise
    return [(result.read() if result.__class__ is Later else result, None) for result in results]


def _report(jobs: Sequence[_Job], outcomes: Sequence[_Outcome]) -> None:
    """Settle futures, with one call to each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[_Done, _Outcome]]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        by_loop.setdefault(job.loop, []).append((job.done, outcome))
    for loop, settled in by_loop.items():
        if loop is None:
            _settle(settled)
            continue
        try:
            loop.call_soon_threadsafe(_settle, settled)
        except RuntimeError:
            continue  # the event loop is closed: nobody waits any more


def _settle(settled: list[tuple[_Done, _Outcome]]) -> None:
    for done, (result, error) in settled:
        if done.done():
            continue
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)
