"""Port: engines, which decide when and where the legs of runs are worked on.

The log in the store is the source of truth. An engine holds only ids: it schedules legs, wakes workers and retries legs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from .probation import Probation
from .stores import DurableStore, Placement, RunRecord

DEFAULT_QUEUE = "default"
QUEUE_UNSERVED = "queue_unserved"
"""The code of the error event that a handle yields if no worker serves the queue or has the agent of its run."""


class FirstLeg(Struct, frozen=True, kw_only=True):
    """A run before its first event, as the claim of its log found it."""

    record: RunRecord
    request: bytes
    has_wishes: bool
    is_new_thread: bool
    """Nothing is stored of its thread yet."""


class Leg(Struct, frozen=True, kw_only=True):
    """A leg to work on. Without an epoch, its log is still to be claimed."""

    log_id: str
    epoch: int | None = None
    first: FirstLeg | None = None
    """The stored request, for a run that was not started yet."""


LegEnd = Literal["ended", "waits", "left"]
"""The run has ended with everything under it, it waits for an answer, or another worker continues it."""

DoLeg = Callable[[Leg], Coroutine[Any, Any, LegEnd]]


class LegStatus(Struct, frozen=True, kw_only=True):
    """The status of a leg, for people who look at it through its engine."""

    agent: str
    step: int
    questions: Sequence[str] = ()
    """The calls that wait for an answer."""
    is_ours: bool = True
    """False if the lease has run out: another worker may have the log."""


class NewRun(Struct, frozen=True, kw_only=True):
    """A run that comes through an engine instead of a client."""

    run_id: str
    agent: str
    input: str
    queue: str = DEFAULT_QUEUE
    thread_id: str | None = None
    user_id: str | None = None
    context: Mapping[str, Any] = {}


class LegSlots:
    """The slots of a worker: a leg has one while it works.

    Invariant: at most `total` legs work at once. A leg that only waits for other workers lends its slot. Before it
    continues it waits for a free slot, with priority over legs that are not claimed yet.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.working: set[str] = set()
        """The legs that have a slot, by log."""
        self.lent: set[str] = set()
        """The legs that have lent theirs."""
        self.on_free: Callable[[], None] = lambda: None
        self._reserved = 0
        """Slots for legs that are being claimed."""
        self._returning: dict[str, asyncio.Future[None]] = {}

    @property
    def free(self) -> int:
        """The number of legs that may be claimed."""
        return max(0, self.total - len(self.working) - self._reserved - len(self._returning))

    def reserve(self) -> int:
        """Keep all free slots for legs that are being claimed; return how many there are."""
        self._reserved = free = self.free
        return free

    def take(self, *log_ids: str) -> None:
        """Give slots to claimed legs; free the other reserved slots."""
        self._reserved = 0
        self.working.update(log_ids)
        self._pass_on()

    def lend(self, log_id: str) -> None:
        """Lend the slot of a leg to another one until this leg calls `take_again`."""
        if log_id in self.working:
            self.working.discard(log_id)
            self.lent.add(log_id)
            self._free_one()

    def reclaim(self, log_id: str) -> None:
        """Note that a leg which has lent its slot is to continue: it comes before legs that are not claimed yet."""
        if log_id in self.lent:
            self.lent.discard(log_id)
            self._returning[log_id] = asyncio.get_running_loop().create_future()
            self._pass_on()

    async def take_again(self, log_id: str) -> None:
        """Wait for a slot for a leg that has lent its own."""
        self.reclaim(log_id)
        if (turn := self._returning.get(log_id)) is not None:
            await asyncio.shield(turn)

    def release(self, log_id: str) -> None:
        """End a leg."""
        self.working.discard(log_id)
        self.lent.discard(log_id)
        if (turn := self._returning.pop(log_id, None)) is not None:
            turn.cancel()
        self._free_one()

    def _free_one(self) -> None:
        self._pass_on()
        if self.free:
            self.on_free()

    def _pass_on(self) -> None:
        while self._returning and len(self.working) + self._reserved < self.total:
            log_id = next(iter(self._returning))
            self.working.add(log_id)
            self._returning.pop(log_id).set_result(None)


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """A worker as its engine knows it."""

    owner: str
    """The owner of the logs it claims."""
    lease: float
    queues: Sequence[str]
    agents: Sequence[str]
    slots: LegSlots
    """The legs that it works on at once. An engine takes a slot for each leg it gives, and releases it at its end."""
    look: Callable[[str], LegStatus | None] = lambda log_id: None
    """Returns where a leg that it works on stands, by log."""
    begin: Callable[[NewRun], Awaitable[None]] | None = None
    """Stores a run, if it is not stored yet."""
    probation: Probation = field(default_factory=Probation)
    """Says how many legs may begin while workers die."""


class Engine(Protocol):
    """Contract: a leg that was started or answered is given to a worker that serves its queue and has its agent. If that
    worker is gone, the leg is given to another, until it has ended. The epoch of the log decides who may write."""

    name: str
    """Stored with each log: only workers of this engine claim it."""

    async def open(self, store: DurableStore) -> None:
        """Connect; raise an error with the address if that is not possible."""
        ...

    async def close(self) -> None: ...

    async def start(self, run_id: str, placement: Placement) -> None:
        """Schedule the first leg of a run that was just stored. May be called again for the same run."""
        ...

    async def answer(self, log_id: str) -> None:
        """Make a worker read the inbox of a log: it has a decision."""
        ...

    async def cancel(self, log_id: str) -> None:
        """Schedule nothing more for a log that has ended, or whose inbox has a cancel."""
        ...

    async def work(self, worker: WorkerInfo, do_leg: DoLeg, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        """Give legs to `do_leg`, as many as `slots` are free, until `stop` is set; then return without waiting for them.

        `ready` is called once legs can be given.
        """
        ...


class Schedule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run that starts at a time, or again and again."""

    id: str
    agent: str
    next_at: float
    """Seconds since 1970 at which it starts next."""
    cron: str | None = None
    """When it starts, in UTC, as minute, hour, day, month and weekday; None if it starts once."""
    queue: str = DEFAULT_QUEUE
    thread_id: str | None = None
    """The thread of each run; None for a new one each time."""
    user_id: str | None = None
    last_run: str | None = None
    """The run that it started last."""
    skipped: int = 0
    """The number of times that were skipped since then, because that run had not ended."""
