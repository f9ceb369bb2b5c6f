"""A node: one runtime among those that share a store. It owns the runs it works on for as long as it shows that it lives."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from ..core.errors import RetinueError
from ..core.ids import unique
from ..core.stores import REQUESTS, DurableStore, OwnedLog
from .run import Run

_log = logging.getLogger(__name__)

_LOOK_EVERY = 0.5
"""Seconds between two looks at what others want cancelled."""

_here: dict[str, asyncio.AbstractEventLoop] = {}
"""The nodes of this process that have not been closed, with the loops they live in."""


class Node:
    """Renews the leases of its runs, stops those that somebody wants cancelled or has taken over, finds orphans."""

    def __init__(self, store: DurableStore, lease: float) -> None:
        self._store, self.lease = store, lease
        self.owner = f"{socket.gethostname()}/{os.getpid()}/{_started(os.getpid())}/{unique()}"
        self.runs: dict[str, Run] = {}
        self.hear: Callable[[], Awaitable[None]] | None = None
        """Looks at what else others ask of it."""
        self._stopping: set[str] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._alive: asyncio.Task[None] | None = None

    def take(self, run: Run) -> None:
        """Look after a run."""
        _here[self.owner] = asyncio.get_running_loop()
        self.runs[run.run_id] = run
        if self._alive is None or self._alive.done():
            self._alive = asyncio.create_task(self._stay_alive(), name="retinue-node")

    def let_go(self, run_id: str) -> None:
        self.runs.pop(run_id, None)
        self._stopping.discard(run_id)

    def look_for_orphans(self, take_up: Callable[[OwnedLog], Awaitable[Run | None]]) -> None:
        """From time to time, go on with runs whose owners are gone."""
        self.start(self._keep_looking(take_up))

    async def orphans(self) -> list[OwnedLog]:
        """The logs whose owners are gone."""
        owned = await self._store.owned_logs()
        return [log for log in owned if log.owner != self.owner and (log.expired or is_gone(log.owner))]

    async def fall_silent(self) -> None:
        """Show no more signs of life."""
        if self._alive is not None:
            self._alive.cancel()
            await asyncio.wait({self._alive})

    async def close(self) -> None:
        _here.pop(self.owner, None)
        jobs = [*self._jobs, *([self._alive] if self._alive is not None else [])]
        for job in jobs:
            job.cancel()
        if jobs:
            await asyncio.wait(jobs)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have something done until it ends or this node is closed."""
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _keep_looking(self, take_up: Callable[[OwnedLog], Awaitable[Run | None]]) -> None:
        while True:
            await asyncio.sleep(self.lease / 2)
            try:
                for log in await self.orphans():
                    await take_up(log)
            except RetinueError as exc:
                _log.error("looking for interrupted runs failed, and is tried again: %s", exc)

    async def _stay_alive(self) -> None:
        """For as long as there are runs: keep them, and hear what others want of them."""
        loop = asyncio.get_running_loop()
        renewed = loop.time()
        with self._store.watch(REQUESTS) as watch:
            while self.runs:
                with contextlib.suppress(RetinueError):
                    for log_id, reason in (await self._store.cancels(self.owner)).items():
                        self._stop(log_id, reason)
                    if self.hear is not None:
                        await self.hear()
                if loop.time() - renewed >= self.lease / 3:
                    renewed = await self._renew(renewed)
                await watch.wait(_LOOK_EVERY)
                await asyncio.sleep(0.05)

    async def _renew(self, before: float) -> float:
        try:
            mine = set(self.runs)
            kept = await self._store.renew(self.owner, self.lease)
        except RetinueError as exc:
            _log.error("the leases of %d runs could not be renewed: %s", len(self.runs), exc)
            return before
        for log_id in mine - kept:
            if log_id in self.runs and self.runs[log_id].is_stored:
                self._stop(log_id, "another process has taken it over")
        return asyncio.get_running_loop().time()

    def _stop(self, log_id: str, reason: str) -> None:
        run = self.runs.get(log_id)
        if run is not None and not (run.ended or run.is_cancelled or log_id in self._stopping):
            self._stopping.add(log_id)
            self.start(_cancel(run, reason))


async def _cancel(run: Run, reason: str) -> None:
    try:
        await run.cancel(reason)
    except RetinueError as exc:
        _log.warning("run %s could not be cancelled: %s", run.run_id, exc)


def is_gone(owner: str) -> bool:
    """Whether an owner is known to be gone: a process of this machine that has ended, or a runtime that was closed."""
    host, _, rest = owner.partition("/")
    pid, _, rest = rest.partition("/")
    started = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    if int(pid) == os.getpid() and started == _started(os.getpid()):
        loop = _here.get(owner)
        return loop is None or loop.is_closed()
    return _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process was started, as a number that no later one of the same id has; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
            return "" if fields[0] in b"ZX" else fields[19].decode()  # one that is dead and not yet buried is gone
    except (OSError, IndexError):
        pass
    try:  # not every system has /proc: there at least whether anybody has the id
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        return "0"
    return "0"
