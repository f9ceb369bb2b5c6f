"""Ownership of logs: claim, renew, lose, release. A log has one owner; every write of an owner carries its epoch.

free → claim → owned(epoch) → renew* → released (no owner, the run waits) | ended | lost (another process claimed it)

Invariants: an ended log is never claimed. A log is read and folded only after the claim. This process keeps only its own
logs in memory; it drops a log that it loses, and writes nothing more to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from ..core.concurrency import keep_doing, wait_for_first
from ..core.processes import boot_seconds as _now
from ..core.processes import has_process_ended, process_identity
from ..core.runs import unique
from ..core.stores import LEGS, WISHES, DurableStore, OpenLog, RunFacts, Wish

_log = logging.getLogger(__name__)

LEASE = 30.0
"""Seconds for which an owner counts as alive after its last renewal."""
_LOOK_EVERY = 0.5
"""Seconds between two looks at inboxes, if the store does not announce changes."""
_MARGIN = 0.1
"""The last part of a lease: an owner that has not renewed by then drops its logs."""

_here: dict[str, asyncio.AbstractEventLoop] = {}
"""The open owners of this process, with their event loops."""


class Lease(Protocol):
    """The right to write a log."""

    fresh_until: float
    """The boot-clock time until which it is certain to hold."""
    is_leaving: bool
    """True while it is being given up."""


class Owned(Protocol):
    """A log that this process owns."""

    @property
    def writer(self) -> Lease | None: ...

    def receive(self, wish: Wish) -> object:
        """Carry out a wish once, or refuse it, soon. A wish comes again until its reply is stored."""
        ...

    def lose(self) -> object:
        """Stop all work on the log: another process owns it, or may own it now."""
        ...


class Owner:
    """This process as an owner of logs: renews their leases, reads their inboxes, and finds orphaned logs."""

    def __init__(self, store: DurableStore, lease: float) -> None:
        self.store, self.lease = store, lease
        self.id = f"{process_identity()}/{unique()}"
        self.logs: dict[str, Owned] = {}
        self._suspects: dict[str, tuple[OpenLog, float]] = {}
        """Logs whose leases cannot be compared with our clock, and since when they have not changed."""
        self._strays: dict[str, float] = {}
        """Logs that the store says we own and that no run here works on, and since when: their run broke down."""
        self._renewed = _now()
        self._poked = asyncio.Event()
        self._job: asyncio.Task[None] | None = None
        self._recovering: list[asyncio.Task[None]] = []
        self.is_leaving = False
        """True if this process stops: it claims nothing more, and leaves its logs to others."""
        self._closed = False

    def register(self) -> None:
        """Let other runtimes of this process see that this one is alive, before it owns a log."""
        _here[self.id] = asyncio.get_running_loop()

    @property
    def fresh_until(self) -> float:
        """The boot-clock time until which the leases of this owner are certain to hold."""
        return self._renewed + self.lease

    def is_fresh(self) -> bool:
        """Return whether the leases of this owner were renewed less than a lease ago."""
        return _now() < self.fresh_until

    def add(self, log_id: str, run: Owned) -> None:
        """Start renewing the lease and reading the inbox of a log that was started or claimed here."""
        self.register()
        if not self.logs:
            self._renewed = _now()
        self.logs[log_id] = run
        self._move_on(run)
        self._keep_alive()

    def _move_on(self, run: Owned) -> None:
        """Tell the writer of a log how long its lease holds."""
        if run.writer is not None:
            run.writer.fresh_until = self.fresh_until

    def remove(self, log_id: str) -> None:
        self.logs.pop(log_id, None)

    async def claim(self, log_id: str, log: OpenLog | None = None, facts: RunFacts | None = None) -> int | None:
        """Become the owner of a log that is free, or whose owner is gone; return the new epoch, or None if refused.

        `log` or `facts` is what the store has just said of it.
        """
        if self.is_leaving:
            return None
        self.register()
        known = log or facts
        owner = await self.store.owner_of(log_id) if known is None else known.owner
        is_stray = log is not None and owner == self.id and log_id not in self.logs
        gone = owner if owner is not None and (is_stray or is_gone(owner)) else None
        seen = None
        if gone is None and log is not None and log.expired is None:
            # Its lease is of another clock, but it was not renewed for the length of a lease.
            gone, seen = owner, log.lease_until
        return await self.store.claim(log_id, self.id, self.lease, gone=gone, seen=seen)

    async def orphans(self) -> list[OpenLog]:
        """Return the logs that should be worked on and have no living owner."""
        found: list[OpenLog] = []
        suspects: dict[str, tuple[OpenLog, float]] = {}
        strays: dict[str, float] = {}
        for log in await self.store.open_logs():
            if log.engine is not None:  # its workers look after it
                continue
            if log.owner == self.id:
                if log.log_id not in self.logs:
                    since = strays[log.log_id] = self._strays.get(log.log_id, _now())
                    if _now() - since > self.lease / 3:  # so it is not just being started or released
                        found.append(log)
                continue
            if is_orphan(log):
                found.append(log)
            elif log.expired is None:
                before, since = self._suspects.get(log.log_id, (log, _now()))
                if before != log:
                    since = _now()
                suspects[log.log_id] = log, since
                if _now() - since > self.lease:
                    found.append(log)
        self._suspects, self._strays = suspects, strays
        return found

    def keep_recovering(
        self,
        recover: Callable[[], Awaitable[object]],
        recover_left: Callable[[], Awaitable[object]],
        pause: Callable[[], float],
    ) -> None:
        """Continue runs whose owners are gone, from time to time, and runs whose owners have left them, at once.

        `pause` returns the seconds after which `recover` is due at the latest.
        """

        async def look() -> None:
            await asyncio.sleep(min(pause(), self.lease / 2))
            await recover()

        if self._recovering:
            return
        looking = keep_doing(look, 0.0, "looking for interrupted runs")
        watching = self._when_left(recover_left)
        self._recovering = [asyncio.create_task(work, name="retinue-recovery") for work in (looking, watching)]

    async def _when_left(self, recover_left: Callable[[], Awaitable[object]]) -> None:
        with self.store.watch(LEGS) as watch:

            async def next_time() -> None:
                await watch.wait(self.lease / 2)
                await recover_left()

            await keep_doing(next_time, 0.0, "looking for runs that were left")

    async def stop_recovering(self) -> None:
        """Claim nothing more."""
        self.is_leaving = True
        jobs, self._recovering = self._recovering, []
        for job in jobs:
            job.cancel()
        if jobs:
            await asyncio.wait(jobs)

    def check_inboxes(self) -> None:
        """Make the heartbeat read the inboxes at once."""
        self._poked.set()

    async def stop_heartbeat(self) -> None:
        """Stop renewing leases."""
        self._closed = True
        if self._job is not None:
            self._job.cancel()
            await asyncio.wait({self._job})

    async def close(self) -> None:
        await self.stop_recovering()
        await self.stop_heartbeat()
        _here.pop(self.id, None)

    def _keep_alive(self) -> None:
        if not self._closed and (self._job is None or self._job.done()):
            self._job = asyncio.create_task(self._beat_forever(), name="retinue-owner")

    async def _beat_forever(self) -> None:
        """Renew leases and read inboxes while this process owns logs. Errors do not end this, only a cancel does."""
        with self.store.watch(WISHES) as watch:
            while self.logs:
                self._poked.clear()  # before reading: a poke during the read may be about a later wish
                try:
                    await self._beat()
                except Exception as exc:
                    _log.error("the heartbeat of %s failed, and is tried again: %s", self.id, exc)
                    self._drop_if_expired()
                await wait_for_first(watch.wait(min(_LOOK_EVERY, self.lease / 6)), self._poked.wait())

    async def _beat(self) -> None:
        if _now() - self._renewed >= self.lease / 3:
            await self._renew()
        for wish in await self.store.wishes(self.id):
            run = self.logs.get(wish.log_id)
            if run is not None:
                run.receive(wish)

    async def _renew(self) -> None:
        began, mine = _now(), dict(self.logs)
        kept = await self.store.renew(self.id, self.lease)
        self._renewed = began
        for log_id, run in mine.items():
            if log_id in kept:
                self._move_on(run)
            elif self.logs.get(log_id) is run and not (run.writer and run.writer.is_leaving):
                _log.warning("run %s is continued by another process: it is dropped here", log_id)
                self.remove(log_id)
                run.lose()

    def _drop_if_expired(self) -> None:
        """Drop all runs if the lease was not renewed and is about to end: others may then claim the logs."""
        if _now() - self._renewed < self.lease * (1 - _MARGIN):
            return
        for log_id, run in list(self.logs.items()):
            _log.error("run %s is dropped: its lease could not be renewed", log_id)
            self.remove(log_id)
            run.lose()


def is_orphan(log: OpenLog) -> bool:
    """Return whether no living process owns a log that should have an owner."""
    return log.owner is None or bool(log.expired) or is_gone(log.owner)


def is_gone(owner: str) -> bool:
    """Return whether an owner is known to be gone: its process, of this boot and pid namespace, has ended or closed it."""
    identity = owner.rpartition("/")[0]
    if identity == process_identity():
        loop = _here.get(owner)
        return loop is None or loop.is_closed()
    return has_process_ended(identity)
