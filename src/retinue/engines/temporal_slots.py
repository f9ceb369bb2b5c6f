"""Slots that the task queues of a Temporal worker share, and that legs lend while they wait for other workers.

Temporal reserves a slot before it asks a queue for work. So each queue may reserve what is free, and an idle queue keeps
nothing from a busy one. Two queues can then get work for the same slot, or a leg that had lent it goes on: the new leg goes
back (`LegWorker.leg`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from temporalio.worker import (
    CustomSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
)

from ..core.engine import LegSlots


class _Permit(SlotPermit):
    def __init__(self, queue: str) -> None:
        self.queue, self.is_used = queue, False


class SharedSlots(CustomSlotSupplier):
    """Lets each queue reserve the slots that none uses. Everything but `reserve_slot` is called from other threads."""

    def __init__(self, slots: LegSlots) -> None:
        self._slots, self._used = slots, 0
        """Activities count as used also while their legs have lent their slots."""
        self._reserved = Counter[str]()
        self._lock, self._loop = threading.Lock(), asyncio.get_running_loop()
        self._released = asyncio.Event()
        slots.on_free = self._released.set

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        while True:
            self._released.clear()
            if (permit := self.try_reserve_slot(ctx)) is not None:
                return permit
            await self._released.wait()

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        with self._lock:
            used = self._used - len(self._slots.lent)
            if used + self._reserved[ctx.task_queue] >= self._slots.total:
                return None
            self._reserved[ctx.task_queue] += 1
            return _Permit(ctx.task_queue)

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        permit = ctx.permit
        assert isinstance(permit, _Permit)
        with self._lock:
            permit.is_used = True
            self._reserved[permit.queue] -= 1
            self._used += 1

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        permit = ctx.permit
        assert isinstance(permit, _Permit)
        with self._lock:
            if permit.is_used:
                self._used -= 1
            else:
                self._reserved[permit.queue] -= 1
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._released.set)
