"""A worker: a process that works on the legs which an engine gives it.

Invariant: a leg occupies a slot from its claim until its log is released, ended or lost, unless it lends it while it only
waits for work elsewhere (`waits.py`). Only the claim and the epoch
decide who may write, so it does no harm if an engine gives out a leg twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..core.concurrency import Jobs, helpers, join, keep_doing
from ..core.engine import DEFAULT_QUEUE, Leg, LegEnd, LegSlots, LegStatus, WorkerInfo
from ..core.errors import ConfigurationError, OwnershipLost, RetinueError, RunElsewhere
from ..loop.tickets import Questions
from ..storage.legs import Workers
from .dispatch import check_queues
from .live import LiveRun
from .waits import Waits

if TYPE_CHECKING:
    from .runtime import Runtime

_log = logging.getLogger(__name__)

DRAIN = 10.0
"""Seconds in which model calls and tool calls may finish when a worker is stopped."""


class Worker:
    """Works on the runs that an engine schedules. `async with` the runtime first.

    worker = Worker(runtime, queues=["default", "gpu"], slots=16)
    await worker.run(stop)  # until the event `stop` is set
    """

    def __init__(
        self, runtime: Runtime, *, queues: Sequence[str] = (DEFAULT_QUEUE,), slots: int = 16, grace: float = DRAIN
    ) -> None:
        runs = runtime._runs  # pyright: ignore[reportPrivateUsage]  # a part of the same runtime
        if runs.dispatcher is None or runs.owner is None or runs.elsewhere is None:
            raise ConfigurationError(
                "a worker needs an engine: Runtime.open('postgresql://…', agents, engine='postgres')"
            )
        given: tuple[Any, Any] = (slots, grace)
        if not isinstance(given[0], int) or slots < 1:
            raise ConfigurationError(f"slots is the number of runs to work on at once, 1 or more, not {slots!r}")
        if not isinstance(given[1], int | float) or not 0 <= grace < float("inf"):
            raise ConfigurationError(f"grace is a number of seconds, 0 or more, not {grace!r}")
        self._runs, self._owner, self._elsewhere = runs, runs.owner, runs.elsewhere
        self.engine, self._grace = runs.dispatcher.engine, grace
        self.info = WorkerInfo(
            owner=self._owner.id,
            lease=self._owner.lease,
            queues=check_queues(queues),
            agents=tuple(runs.registry.agents),
            slots=LegSlots(slots),
            look=self._look,
            begin=runs.dispatcher.begin,
            probation=runs.probation,
        )
        runs.registry.served = frozenset(self.info.queues)
        self._workers = Workers(runs.dispatcher.store)
        self.at_work: dict[str, LiveRun] = {}
        """The runs of the legs at work, by log."""
        runs.lend_slot = Waits(self.at_work, self.info.slots).waiting
        self._legs: set[asyncio.Future[LegEnd]] = set()

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Work until `stop` is set. Then begin nothing more, let what runs finish, and leave the runs to other workers."""
        self._owner.register()
        await self._beat()
        every = min(self.info.lease / 3, 5.0)
        try:
            async with helpers(keep_doing(self._beat, every, "the report that this worker is alive")):
                await self.engine.work(self.info, self._do_leg, stop, ready)
        finally:
            await self._drain()
            with contextlib.suppress(RetinueError):
                await self._workers.leave(self.info.owner)

    async def _beat(self) -> None:
        await self._workers.beat(self.info, self.engine.name, len(self.info.slots.working))

    async def _do_leg(self, leg: Leg) -> LegEnd:
        """Work on a leg to its end."""
        done: asyncio.Future[LegEnd] = asyncio.get_running_loop().create_future()
        self._legs.add(done)
        try:
            epoch = leg.epoch
            if epoch is None and (epoch := await self._owner.claim(leg.log_id)) is None:
                owner = await self._owner.store.owner_of(leg.log_id)
                if owner is None:  # it has ended
                    return "ended"
                raise RunElsewhere(leg.log_id, owner)
            run = await self._elsewhere.take_over(leg.log_id, epoch, leg.first)
            self.at_work[leg.log_id] = run
            run.on_done = lambda: None if done.done() else done.set_result(_end_of(run))
            if run.is_done and not done.done():
                done.set_result(_end_of(run))
            if self._owner.is_leaving:
                await run.leave(self._grace)
            return await done
        except OwnershipLost:
            return "left"
        finally:
            self.at_work.pop(leg.log_id, None)
            self._legs.discard(done)
            if not done.done():
                done.set_result("left")

    def _look(self, log_id: str) -> LegStatus | None:
        run = self.at_work.get(log_id)
        state = None if run is None else run.state
        if run is None or state is None:
            return None
        agent = (run.record.identity.agent, *state.handoffs)[-1]
        questions = list(Questions(run.log.tree, state).shown())
        return LegStatus(agent=agent, step=state.step, questions=questions, is_ours=self._owner.is_fresh())

    async def _drain(self) -> None:
        """Leave each run to other workers as soon as nothing of it runs here, or when the grace period is over."""
        self._owner.is_leaving = True
        leaving = Jobs("a run could not be left to other workers")
        for run in list(self.at_work.values()):
            leaving.start(run.leave(self._grace))
        if leaving or self._legs:  # some legs may just be starting
            await join([*leaving, *self._legs])
            with contextlib.suppress(RetinueError):
                await self._owner.store.renew(self._owner.id, 0.0)  # logs that could not be released


def _end_of(run: LiveRun) -> LegEnd:
    if run.log.lost or run.state is None:
        return "left"
    return "ended" if run.state.is_over else "waits"
