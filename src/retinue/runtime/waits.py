"""Worker slots: a leg that only waits for work elsewhere lends its slot: to other workers, so that two queues cannot wait
for each other, and to servers, which may take as long as they like. A leg whose runs wait at the gate of a provider's
account lends its slot too.

Invariant: a leg is without a slot only while each of its runs waits for a run or call elsewhere, or at a gate. When one of those ends,
the leg takes a slot again before it continues. The slot belongs to the log, so a log that was just claimed may lend it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..core.concurrency import wait_for_first
from ..core.engine import LegSlots
from ..core.results import ToolCallStatus
from ..core.runs import RunStatus
from ..log.owned import LiveLog
from ..log.state import CallState, RunState

if TYPE_CHECKING:
    from .live import LiveRun

MOST_LENT = 4
"""Slots that may be lent while legs wait at gates, for each slot of the worker."""
_PAUSE = 0.02
"""Seconds between two looks at a tree that changes all the time."""


class Waits:
    """The runs and calls elsewhere that the legs of a worker wait for."""

    def __init__(self, at_work: Mapping[str, LiveRun], slots: LegSlots) -> None:
        self._at_work, self._slots = at_work, slots
        self._open: dict[str, set[str]] = {}
        """The runs and calls elsewhere that each leg waits for."""
        self._at_gates: set[str] = set()
        """Those of them that are runs at the gate of a provider."""
        self._watching: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def waiting(
        self, log: LiveLog, run_id: str, goes_on: Callable[[], bool], *, at_gate: bool = False
    ) -> AsyncGenerator[None]:
        """Note, within the block, that the leg of a log waits for a run or call elsewhere, or a run of it at a gate. If it
        then goes on because of that, it takes a slot again first."""
        if log.writer is None:
            yield
            return
        log_id = log.writer.log_id
        waits = self._open.setdefault(log_id, set())
        waits.add(run_id)
        if at_gate:
            self._at_gates.add(run_id)
        if len(waits) == 1:
            self._watching[log_id] = asyncio.create_task(
                self._lend_when_idle(log_id, log, waits), name=f"slot of {log_id}"
            )
        try:
            yield
        except asyncio.CancelledError:  # a call that is stopped must not wait, and its run may go on
            self._end(log_id, run_id)
            if goes_on():
                self._slots.reclaim(log_id)
            raise
        except BaseException:
            await self._go_on(log_id, log, run_id, goes_on)
            raise
        await self._go_on(log_id, log, run_id, goes_on)

    def _end(self, log_id: str, run_id: str) -> None:
        waits = self._open[log_id]
        waits.discard(run_id)
        self._at_gates.discard(run_id)
        if not waits:
            self._watching.pop(log_id).cancel()
            del self._open[log_id]

    async def _go_on(self, log_id: str, log: LiveLog, run_id: str, goes_on: Callable[[], bool]) -> None:
        self._end(log_id, run_id)
        leg = self._at_work.get(log_id)
        token = None if leg is None else leg.request.cancellation
        if token is not None and goes_on() and not token.is_set() and not log.lost:
            await wait_for_first(self._slots.take_again(log_id), token.wait())

    def _may_lend(self, waits: set[str]) -> bool:
        """Return False if a leg waits only at gates and many slots are lent: one worker must not claim a whole queue."""
        return bool(waits - self._at_gates) or len(self._slots.lent) < MOST_LENT * self._slots.total

    async def _lend_when_idle(self, log_id: str, log: LiveLog, waits: set[str]) -> None:
        while True:
            change, is_idle = log.changed(), _only_waits(log, waits)
            if is_idle and log_id in self._slots.working and self._may_lend(waits):
                self._slots.lend(log_id)
            elif not is_idle:  # a run was answered, or started by what ended elsewhere
                self._slots.reclaim(log_id)
            await change
            await asyncio.sleep(_PAUSE)


def _only_waits(log: LiveLog, waits: set[str]) -> bool:
    """Return whether every run of a tree only waits, for these runs and calls elsewhere."""
    for run in log.tree.runs.values():
        if run.status is not RunStatus.RUNNING or run.run_id in waits:
            continue
        if run.request.queue is not None or not _is_idle(log, run, waits):
            return False
    return True


def _is_idle(log: LiveLog, run: RunState, waits: set[str]) -> bool:
    """Return whether a run only waits for calls that wait for work elsewhere or for other runs of this log."""
    x = log.executions.get(run.run_id)
    if x is None:  # it is about to be continued here
        return False
    queued = {call.call.id for call in run.open()} - x.holding
    calls = [call for call in run.open() if call.status is not ToolCallStatus.SUSPENDED]
    at_work = [call for call in calls if call.status is not ToolCallStatus.NEW or call.call.id not in queued]
    return bool(at_work) and all(_waits_elsewhere(log, call, waits) for call in at_work)


def _waits_elsewhere(log: LiveLog, call: CallState, waits: set[str]) -> bool:
    if call.status is not ToolCallStatus.RUNNING:
        return False
    if call.placed in waits or any(ref.run_id in waits for ref in call.children.values()):
        return True
    children = [log.tree.runs.get(ref.run_id) for ref in call.children.values()]
    return any(child is not None and child.status is RunStatus.RUNNING for child in children)
