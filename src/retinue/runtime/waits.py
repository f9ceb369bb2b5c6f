"""Worker slots: a leg that only waits for other workers lends its slot, so that two queues cannot wait for each other.

Invariant: a leg is without a slot only while each of its runs waits for a placed run or call. When one of those ends, the
leg takes a slot again before it continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..core.engine import LegSlots
from ..core.results import ToolCallStatus
from ..core.runs import RunStatus
from ..core.together import wait_for_first
from ..loop.log import LiveLog
from ..loop.state import CallState, RunState

if TYPE_CHECKING:
    from .live import LiveRun

_PAUSE = 0.02
"""Seconds between two looks at a tree that changes all the time."""


class Waits:
    """The placed runs and calls that the legs of a worker wait for."""

    def __init__(self, at_work: Mapping[str, LiveRun], slots: LegSlots) -> None:
        self._at_work, self._slots = at_work, slots
        self._open: dict[str, set[str]] = {}
        """The placed runs and calls that each leg waits for."""
        self._watching: dict[str, asyncio.Task[None]] = {}

    @asynccontextmanager
    async def waiting(self, run_id: str, *, goes_on: bool = True) -> AsyncGenerator[None]:
        """Note, within the block, that a leg waits for a placed run or call. With `goes_on`, take a slot again after it."""
        leg = next((leg for leg in self._at_work.values() if _has(leg.log, run_id)), None)
        if leg is None:
            yield
            return
        log_id = leg.run_id
        waits = self._open.setdefault(log_id, set())
        waits.add(run_id)
        if len(waits) == 1:
            self._watching[log_id] = asyncio.create_task(self._lend_when_idle(leg, waits), name=f"slot of {log_id}")
        try:
            yield
        finally:
            waits.discard(run_id)
            if not waits:
                self._watching.pop(log_id).cancel()
                del self._open[log_id]
        token = leg.request.cancellation
        if goes_on and not token.is_set() and not leg.log.lost:
            await wait_for_first(self._slots.take_again(log_id), token.wait())

    async def _lend_when_idle(self, leg: LiveRun, waits: set[str]) -> None:
        while True:
            change = leg.log.changed()
            if leg.run_id in self._slots.working and _only_waits(leg.log, waits):
                self._slots.lend(leg.run_id)
            await change
            await asyncio.sleep(_PAUSE)


def _has(log: LiveLog, run_id: str) -> bool:
    return run_id in log.tree.runs or run_id in log.tree.placed_calls


def _only_waits(log: LiveLog, waits: set[str]) -> bool:
    """Return whether every run of a tree only waits, for these placed runs and calls."""
    for run in log.tree.runs.values():
        if run.status is not RunStatus.RUNNING:
            continue
        if run.run_id not in waits if run.request.queue is not None else not _is_idle(log, run, waits):
            return False
    return True


def _is_idle(log: LiveLog, run: RunState, waits: set[str]) -> bool:
    """Return whether a run only waits for calls that wait for placed work or for other runs of this log."""
    x = log.executions.get(run.run_id)
    queued = set[str]() if x is None else {call.call.id for call in run.open()} - x.holding
    calls = [call for call in run.open() if call.status is not ToolCallStatus.SUSPENDED]
    at_work = [call for call in calls if call.status is not ToolCallStatus.NEW or call.call.id not in queued]
    return bool(at_work) and all(_waits_elsewhere(log, call, waits) for call in at_work)


def _waits_elsewhere(log: LiveLog, call: CallState, waits: set[str]) -> bool:
    if call.status is not ToolCallStatus.RUNNING:
        return False
    children = [log.tree.runs.get(ref.run_id) for ref in call.children.values()]
    return call.placed in waits or any(child is not None and child.status is RunStatus.RUNNING for child in children)
