"""Databases: each connection has a thread, a lane. Jobs that wait together are committed together."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, suppress
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from ..core.errors import StoreError
from ..core.stores import Watch
from .schema import read_version

T = TypeVar("T")

MOST = 256
"""Jobs in one transaction."""


class ConditionFailed(Exception):
    """A condition of a job does not hold. Nothing of its transaction was written."""


class Later(NamedTuple):
    """A result that is known after the commit."""

    read: Callable[[], Any]


IS_EXPIRED = "CASE WHEN boot = boot_id() THEN lease_until < boot_seconds() END"
"""SQL for whether the lease of a log has run out; NULL if another clock measures it."""


class Link:
    """A connection. Statements are the same for every database.

    Placeholders are `?`. A statement says RETURNING if its rows are wanted. It may call three functions:
    `wall_seconds()` are the seconds since 1970, by one clock for everyone who uses the database. `boot_seconds()` is the
    clock by which leases are measured, and `boot_id()` its id: only leases with the same id can be compared.
    """

    locking = ""
    """Ends a SELECT that locks its rows until the commit."""
    list_tables = ""
    """SQL for the names of all tables."""
    is_pipelined = False
    """True if statements need not wait for each other's answers. Then jobs run first without, then with `eager`."""
    eager = True
    """If false, a failed condition shows only at the commit."""
    is_lost = False
    """True after the connection broke: another connection may work."""

    def is_alive(self) -> bool:
        """Return whether it can be used, as far as is known without asking the server."""
        return True

    def begin(self, *, eager: bool = True) -> None:
        """Begin a transaction; with `eager`, conditions fail at once."""
        raise NotImplementedError

    def commit(self) -> None:
        raise NotImplementedError

    def rollback(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def run(self, sql: str, *values: Any) -> list[Any]:
        """Run a statement; return its rows, if it has any."""
        raise NotImplementedError

    def value(self, sql: str, *values: Any) -> Any:
        """Return the only column of the first row, or None."""
        found = self.run(sql, *values)
        return found[0][0] if found else None

    def ask(self, sql: str, *values: Any) -> Later:
        """Run a statement whose rows are not needed before the commit."""
        rows = self.run(sql, *values)
        return Later(lambda: rows)

    def run_two(self, first: str, first_values: Sequence[Any], second: str, second_values: Sequence[Any]) -> None:
        """Run two statements that do not change the same rows, in any order."""
        self.run(first, *first_values)
        self.run(second, *second_values)

    def insert(self, into: str, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows into a table, named with its columns: `messages (thread_id, last, held, body)`."""
        raise NotImplementedError

    def require(self, sql: str, *values: Any) -> None:
        """Run a statement that must return a row; otherwise raise ConditionFailed, or fail the commit."""
        if not self.run(sql, *values):
            raise ConditionFailed

    def gather(self, make_sql: Callable[[int], str], row: Sequence[Any]) -> bool:
        """Run a statement for this row and for others of the transaction together, before the next other statement.

        `make_sql` makes it for a number of rows, which differ in their first value. It fails if it cannot be done for one of
        them. Return False, and do nothing, where statements are not run together.
        """
        return False

    def tune_tables(self) -> None:
        """Set how the database keeps the tables that were just created."""

    def prepare_schema(self) -> None:
        """Lock the schema against other processes; create it if there is none."""

    def lock_threads(self, thread_ids: Sequence[str]) -> None:
        """Make others who change these threads wait until the commit."""

    def moved(self, table: str) -> str:
        """Return what an UPDATE that makes a row smaller says first, where the room that it leaves would be lost."""
        return ""

    def give_back(self) -> bool:
        """Give some of the room of deleted rows back to the system, where the database does not do that itself; return
        True if there is more."""
        return False

    def notify(self, topic: str) -> None:
        """Wake the watches of a topic after the commit."""


Work = Callable[[Link], Any]
"""A function that runs in one transaction and returns its result, or Later. It has no other effects. Running it again
changes nothing, even after a commit: it is retried when a connection breaks."""

_Done = asyncio.Future[Any] | Future[Any]
_Outcome = tuple[Any, Exception | None]


class _Job(NamedTuple):
    key: str
    work: Work
    threads: Sequence[str]
    """The threads that it changes."""
    loop: asyncio.AbstractEventLoop | None
    """None if a thread waits for the result."""
    done: _Done


class Lane:
    """Runs jobs in a thread of its own, which starts with the first. Jobs with the same key run in order.

    A transaction locks the threads of its jobs, then their logs, each sorted. So two lanes cannot deadlock. The only
    writer of a database runs all jobs in the order of the calls instead.

    The event loop never runs a job itself, however small: a stalled disk would stop everything else.
    """

    def __init__(
        self,
        place: str,
        connect: Callable[[], Link],
        problem: Callable[[Exception], Exception],
        *,
        most: int = MOST,
        is_only_writer: bool = False,
    ) -> None:
        self._place, self._connect, self._problem, self._most = place, connect, problem, most
        self._keeps_order = is_only_writer
        self._link: Link | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._adding = threading.Lock()

    def submit(self, work: Callable[[Link], T], key: str = "", threads: Sequence[str] = ()) -> asyncio.Future[T]:
        """Start a job; the future is done when it is committed."""
        loop = asyncio.get_running_loop()
        return self._add(_Job(key, work, threads, loop, loop.create_future()))

    def submit_from_thread(self, work: Callable[[Link], T], key: str = "") -> Future[T]:
        """As `submit`, from a thread without an event loop."""
        return self._add(_Job(key, work, (), None, Future()))

    def close(self) -> None:
        """Finish the jobs that wait, then disconnect. Blocking."""
        with self._adding:
            if not self._closed and self._worker is not None:
                self._jobs.put(None)
            self._closed = True
        if self._worker is not None:
            self._worker.join()

    def _add(self, job: _Job) -> Any:
        with self._adding:
            if self._closed:
                job.done.set_exception(StoreError(self._place, "it was closed"))
                return job.done
            self._jobs.put(job)
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="retinue-store", daemon=True)
                self._worker.start()
        return job.done

    def _serve(self) -> None:
        is_open = True
        while is_open:
            batch = [self._jobs.get()]
            while len(batch) < self._most and not self._jobs.empty():
                batch.append(self._jobs.get())
            jobs = [job for job in batch if job is not None]
            if not self._keeps_order:
                jobs.sort(key=attrgetter("key"))
            is_open = len(jobs) == len(batch)
            if jobs:
                _report(jobs, self._run_together(jobs))
        self._disconnect()

    def _connected(self) -> Link:
        """Return the connection; open one if there is none or it broke."""
        if self._link is None or not self._link.is_alive():
            self._disconnect()
            self._link = self._connect()
        return self._link

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _run_together(self, jobs: list[_Job]) -> list[_Outcome]:
        """Run jobs in one transaction; if one fails, run each in its own."""
        outcomes: list[_Outcome] = []
        try:
            link = self._connected()
            if len(jobs) > 1 or link.is_pipelined:
                with suppress(Exception):  # running each alone shows which one fails
                    return _run_in_one(link, jobs, eager=False)
            for job in jobs:
                outcomes.append(self._run_alone(job))
        except Exception as exc:  # there is no connection, so the rest cannot run either
            outcomes += [(None, self._problem(exc))] * (len(jobs) - len(outcomes))
        return outcomes

    def _run_alone(self, job: _Job) -> _Outcome:
        """Run one job; run it once more if the connection broke."""
        for may_retry in (True, False):
            link = self._connected()
            try:
                return _run_in_one(link, [job], eager=True)[0]
            except Exception as exc:
                if not (may_retry and link.is_lost):
                    return None, self._problem(exc)
        raise AssertionError


def _run_in_one(link: Link, jobs: Sequence[_Job], *, eager: bool) -> list[_Outcome]:
    try:
        link.begin(eager=eager)
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
        else:
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: list[tuple[_Done, _Outcome]]) -> None:
    for done, (result, error) in settled:
        if done.done():
            continue
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)


class Database:
    """The lanes of a database. Each job is one transaction; writes with the same key run in the order of the calls."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._writers: list[Lane] = []
        self._readers: list[Lane] = []
        self._blocking_writers: list[Lane] = []
        """For jobs that threads without an event loop wait for."""
        self._exclusive: Lane
        """For jobs without a key, which may lock any row."""
        self._turn = itertools.count()

    async def open(self) -> None:
        """Connect, and create or migrate the schema."""
        await self._exclusive.submit(lambda link: None)

    def write(self, work: Callable[[Link], T], key: str = "", *, threads: Sequence[str] = ()) -> asyncio.Future[T]:
        """Start a write. With a key, which is mostly a log, it may lock only that log and these `threads`."""
        lane = _choose(self._writers, key) if key else self._exclusive
        return lane.submit(work, key, threads)

    def read(self, work: Callable[[Link], T]) -> asyncio.Future[T]:
        return self._readers[next(self._turn) % len(self._readers)].submit(work)

    async def rows(self, query: str, *values: Any) -> list[Any]:
        """Read the rows of a query."""
        return await self.read(lambda link: link.run(query, *values))

    async def value(self, query: str, *values: Any) -> Any:
        """Read the only column of the first row, or None."""
        return await self.read(lambda link: link.value(query, *values))

    async def change(self, statement: str, *values: Any, key: str = "") -> list[Any]:
        """Write by one statement, and return its rows; the key is that of `write`."""
        done: Any = await self.write(lambda link: link.ask(statement, *values), key)
        return done

    async def pages(self, query: str, start: Sequence[Any], *values: Any) -> AsyncIterator[list[Any]]:
        """Yield rows in pages, so that other reads get their turn.

        The first columns are the key; the last placeholders of the query take the key of the page before, or `start`.
        """
        last = start
        while rows := await self.rows(query, *values, *last):
            yield rows
            last = rows[-1][: len(start)]

    def write_blocking(self, work: Callable[[Link], T], key: str = "") -> T:
        """As `write`, for a thread without an event loop."""
        return _choose(self._blocking_writers, key).submit_from_thread(work, key).result()

    def read_blocking(self, work: Callable[[Link], T]) -> T:
        return self._readers[next(self._turn) % len(self._readers)].submit_from_thread(work).result()

    async def version(self) -> int:
        """Read the version of the schema, 0 if there is none. Changes nothing."""
        return await asyncio.to_thread(self._read_version)

    async def find_damage(self) -> list[str]:
        """Let the database check its own files; return the problems."""
        return []

    def watch(self, topic: str) -> AbstractContextManager[Watch]:
        raise NotImplementedError

    async def close(self) -> None:
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """Finish the jobs that wait, then close all connections."""
        for lane in (self._exclusive, *self._writers, *self._blocking_writers, *self._readers):
            lane.close()

    def _read_version(self) -> int:
        try:
            with closing(self._open()) as link:
                return read_version(link, self.place)
        except StoreError:
            raise
        except Exception as exc:
            raise self._problem(exc) from exc

    def _open(self) -> Link:
        """Connect; change nothing."""
        raise NotImplementedError

    def _problem(self, error: Exception) -> Exception:
        """Turn an error of the driver into a StoreError that says what to do; return other errors as they are."""
        raise NotImplementedError


def _choose(lanes: Sequence[Lane], key: str) -> Lane:
    return lanes[zlib.crc32(key.encode(errors="replace")) % len(lanes)] if len(lanes) > 1 else lanes[0]
