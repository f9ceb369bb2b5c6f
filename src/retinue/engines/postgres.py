"""The engine in PostgreSQL: workers claim legs from the database that has their logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from ..core.concurrency import Backoff, Jobs, helpers, keep_doing, wait_for_first
from ..core.engine import DoLeg, Leg, WorkerInfo
from ..core.errors import OwnershipLost, RetinueError
from ..core.probation import RECENT
from ..core.processes import has_process_ended
from ..core.stores import LEGS, DurableStore, Placement
from ..storage.legs import Legs, Workers
from ..storage.schedules import Schedules
from ..storage.sql import SqlStore
from ..storage.writes import POSTGRES

_log = logging.getLogger(__name__)

SWEEP_EVERY = 1.0
"""Seconds between two looks for legs whose workers are gone, delays that are over and schedules that are due."""
_RARELY = 30
"""Every so many sweeps, one also looks for strays and unscheduled runs."""
_LATER = 30.0
"""Seconds until a leg that could not be worked on is tried again."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0


class PostgresEngine:
    """Legs are rows: a start or an answer makes one due, in the transaction that stores it."""

    name = POSTGRES

    def __init__(self) -> None:
        self._store: SqlStore | None = None

    async def open(self, store: DurableStore) -> None:
        self._store = cast("SqlStore", store)

    async def close(self) -> None:
        pass

    async def start(self, run_id: str, placement: Placement) -> None:
        """Nothing to do: the run is due since it was stored."""

    async def answer(self, log_id: str) -> None:
        """Nothing to do: the log is due since the decision was stored."""

    async def cancel(self, log_id: str) -> None:
        """Nothing to do: a log that has ended is not due."""

    async def work(self, worker: WorkerInfo, do_leg: DoLeg, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        assert self._store is not None
        await _Claims(self._store, worker, do_leg).work(stop, ready)


class _Claims:
    """The claims of one worker. One task claims; each leg is worked on in a task of its own."""

    def __init__(self, store: SqlStore, worker: WorkerInfo, do_leg: DoLeg) -> None:
        self._store, self._worker, self._do_leg = store, worker, do_leg
        self._legs, self._workers, self._schedules = Legs(store), Workers(store), Schedules(store)
        self._at_work: set[str] = set()
        """The logs of the legs that this worker has claimed."""
        self._jobs = Jobs("a leg failed")
        self._strays: set[str] = set()
        self._sweeps = 0
        self._left: list[str] = []
        """Threads that runs have left since the last claim."""
        self._wake = asyncio.Event()
        self._slots, self._turn = worker.slots, 0
        self._slots.on_free = self._wake.set

    async def work(self, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        await self._sweep()
        sweeping = keep_doing(self._sweep, SWEEP_EVERY, "looking for lost legs")
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        async with helpers(self._listen(), sweeping):
            ready()
            while not stop.is_set():
                self._wake.clear()
                try:
                    claimed = await self._claim()
                    backoff.reset()
                except RetinueError as exc:
                    _log.error("this worker cannot claim anything, and tries again: %s", exc)
                    await wait_for_first(stop.wait(), seconds=backoff.next())
                    continue
                if not claimed:
                    await wait_for_first(self._wake.wait(), stop.wait())

    async def _claim(self) -> int:
        """Claim as many legs as there are free slots, from each queue in turn; return how many there were."""
        self._turn += 1
        count, queues, probation = 0, self._worker.queues, self._worker.probation
        in_turn = [queues[(self._turn + place) % len(queues)] for place in range(len(queues))]
        for queue in in_turn:
            if not (free := min(self._slots.reserve(), probation.places())):
                self._slots.take()
                return 0  # woken when one is free
            count += await self._claim_from(queue, free)
        for queue in in_turn if not count else ():
            if self._slots.reserve() and probation.has_place_for_suspect():
                count += await self._claim_from(queue, 1, suspects=True)
            else:
                self._slots.take()
        return count

    async def _claim_from(self, queue: str, most: int, *, suspects: bool = False) -> int:
        """Claim legs of a queue, for which slots are reserved, and begin to work on them."""
        worker, probation = self._worker, self._worker.probation
        left, self._left = self._left, []
        legs = list[Leg]()
        try:
            legs = await self._legs.claim(
                *(queue, worker.agents, worker.owner, worker.lease, most, left),
                suspects=suspects,
                suspect_from=probation.suspect_from,
            )
        finally:
            self._slots.take(*[leg.log_id for leg in legs])
        for leg in legs:
            if suspects or probation.is_strict:
                probation.reserve(leg.log_id)
            self._at_work.add(leg.log_id)
            self._jobs.start(self._do(leg), name=f"leg {leg.log_id}")
        return len(legs)

    async def _do(self, leg: Leg) -> None:
        try:
            if await self._do_leg(leg) == "ended":
                self._left.append(await self._thread_of(leg))
        except OwnershipLost:
            pass
        except Exception as exc:
            _log.error("run %s cannot be worked on, and is tried again in %.0f s: %s", leg.log_id, _LATER, exc)
            try:
                await self._legs.postpone(leg.log_id, _LATER)
            except RetinueError as problem:
                _log.error("run %s: %s", leg.log_id, problem)
        finally:
            self._worker.probation.leave(leg.log_id)
            self._at_work.discard(leg.log_id)
            self._slots.release(leg.log_id)
            self._wake.set()

    async def _thread_of(self, leg: Leg) -> str:
        record = await self._store.load_run(leg.log_id) if leg.first is None else leg.first.record
        return "" if record is None else record.identity.thread_id

    async def _listen(self) -> None:
        with self._store.watch(LEGS) as watch:
            while True:
                await watch.wait(SWEEP_EVERY)
                self._wake.set()

    async def _sweep(self) -> None:
        """Find what crashed workers left: every worker sweeps, and each lost leg is released by one of them."""
        others = [seen.owner for seen in await self._workers.seen(POSTGRES) if seen.owner != self._worker.owner]
        gone = [owner for owner in others if has_process_ended(owner.rpartition("/")[0])]
        strays: set[str] = set()
        self._sweeps += 1
        if self._sweeps % _RARELY == 1:
            unknown = await self._legs.owned_by(self._worker.owner) - self._at_work
            strays, self._strays = unknown & self._strays, unknown  # twice in a row: not a claim in progress
            await self._legs.find_unscheduled()
        if await self._legs.release_lost(gone, sorted(strays)):
            _log.warning("legs of workers that are gone can be taken over")
        self._worker.probation.note_deaths(await self._store.deaths(RECENT))
        for owner in gone:
            await self._workers.leave(owner)
        await self._legs.end_delays()
        await self._legs.free_queued()
        await self._schedules.fire(POSTGRES)
