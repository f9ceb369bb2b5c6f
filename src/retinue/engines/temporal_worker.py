"""A worker on Temporal: legs are activities, and what Temporal may not know about is found in the store.

Invariant: a leg works in its own asyncio task. Only a cancel that a client requested reaches the run, through its inbox. If
Temporal gives up an activity for another reason, its leg continues, and the next attempt joins it or waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.worker import (
    CustomSlotSupplier,
    FixedSizeSlotSupplier,
    Interceptor,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
    Worker,
    WorkerTuner,
    WorkflowInterceptorClassInput,
)

from ..core.concurrency import Backoff, helpers, join, until_stopped, wait_for_first
from ..core.decisions import stamped
from ..core.engine import DoLeg, Leg, LegEnd, LegSlots, NewRun, WorkerInfo
from ..core.errors import ConfigurationError, DecisionRefused, RetinueError, RunElsewhere, StoreError, UnknownRun
from ..core.stores import RunRecord, Wish
from ..loop.tickets import encode_decisions
from ..storage.legs import PlacedLogs
from ..wire.resources import DecisionBody
from .temporal_steps import outcome
from .temporal_sweeper import Sweeper, standing
from .temporal_workflow import BEGIN, DECIDE, LEASE, LEG, REPLY, RetinueRun

if TYPE_CHECKING:
    from .temporal import TemporalEngine

_log = logging.getLogger(__name__)

_BEAT, _THROTTLE = 1.0, 0.5
_SOON, _LATER = 1.0, 30.0
"""Seconds until a leg that could not be worked on is tried again."""
_BUILD = "retinue-1"
"""The version of the workflow. Without one, the SDK hashes every module."""
_EXPECTED = ApplicationErrorCategory.BENIGN
"""Errors that need no traceback in a log."""
_UNKNOWN = 60
"""Attempts after which a run that is not in the database counts as deleted: other workers may have another database."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 10.0


class _Permit(SlotPermit):
    def __init__(self, queue: str) -> None:
        self.queue, self.is_used = queue, False


class SharedSlots(CustomSlotSupplier):
    """Lets each queue reserve the slots that none uses. Everything but `reserve_slot` is called from other threads.

    Temporal reserves a slot before it asks a queue for work. So each queue may reserve all free slots, and an idle queue
    blocks no busy one. If two queues get work for one slot, or a leg takes a lent slot again, the new leg is given back
    (`LegWorker.leg`).
    """

    def __init__(self, slots: LegSlots) -> None:
        self._slots, self._used = slots, 0
        """Activities count as used also while their legs have lent their slots."""
        self._reserved = Counter[str]()
        self._lock, self._loop = threading.Lock(), asyncio.get_running_loop()
        self._released = asyncio.Event()
        self._is_open = False
        slots.on_free = self._released.set

    def open(self) -> None:
        """Let queues reserve slots from now on."""
        self._is_open = True
        self._released.set()

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        while True:
            self._released.clear()
            if (permit := self.try_reserve_slot(ctx)) is not None:
                return permit
            await self._released.wait()

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        with self._lock:
            used = self._used - len(self._slots.lent)
            if not self._is_open or used + self._reserved[ctx.task_queue] >= self._slots.total:
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


class _Lease(Interceptor):
    """Tells workflows the lease of the worker they are in."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def workflow_interceptor_class(self, input: WorkflowInterceptorClassInput) -> None:
        functions = cast("dict[str, Any]", input.unsafe_extern_functions)  # pyright: ignore[reportUnknownMemberType]
        functions[LEASE] = lambda: self._seconds


class LegWorker:
    """Works on the legs of the queues of one worker."""

    def __init__(self, engine: TemporalEngine, info: WorkerInfo, do_leg: DoLeg) -> None:
        self._engine, self._info, self._do_leg = engine, info, do_leg
        store = engine.store
        self._store, self._logs = store, PlacedLogs(store, engine.name)
        self._sweeper = Sweeper(engine, info)
        self._at_work: dict[str, asyncio.Task[LegEnd]] = {}
        self._stopping = False
        self._supplier = SharedSlots(info.slots)

    async def work(
        self, stop: asyncio.Event, ready: Callable[[], None], keep: Callable[[asyncio.Task[None]], None]
    ) -> None:
        """Work until `stop` is set; `keep` then gets the worker that still reports the unfinished legs."""
        closing = asyncio.Event()
        queues = [asyncio.create_task(self._serve(queue, closing)) for queue in self._info.queues]
        try:
            await self._sweeper.hand_on_first()
            self._supplier.open()
            async with helpers(self._sweeper.keep_sweeping()):
                ready()
                # A queue ends early only if it cannot be worked on.
                await wait_for_first(stop.wait(), *map(asyncio.shield, queues))
        finally:
            self._stopping = True
            closing.set()
            for queue in queues:
                keep(queue)

    async def _serve(self, queue: str, closing: asyncio.Event) -> None:
        """Take legs of a queue until `closing` is set. A worker that breaks down is replaced."""
        backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        while not closing.is_set():
            worker = self._make_worker(queue)
            async with until_stopped(worker.run(), closing.wait()) as working:
                if closing.is_set():
                    await worker.shutdown()
                    await join([working])
                    return
            _log.error("queue %s cannot be worked on, and is tried again: %s", queue, working.exception())
            await wait_for_first(closing.wait(), seconds=backoff.next())

    def _make_worker(self, queue: str) -> Worker:
        fixed = FixedSizeSlotSupplier(100)
        return Worker(
            self._engine.client,
            task_queue=self._engine.task_queue(queue),
            activities=[self.leg, self.begin, self.decide, self.reply],
            workflows=[RetinueRun],
            interceptors=[_Lease(self._info.lease)],
            identity=self._info.owner,
            build_id=_BUILD,
            max_cached_workflows=0,
            tuner=WorkerTuner.create_composite(
                workflow_supplier=fixed,
                activity_supplier=self._supplier,
                local_activity_supplier=fixed,
                nexus_supplier=fixed,
            ),
            max_heartbeat_throttle_interval=timedelta(seconds=_THROTTLE),
        )

    # --- activities

    @activity.defn(name=BEGIN)
    async def begin(self, order: dict[str, Any]) -> None:
        """Store a run that another workflow has asked for."""
        assert self._info.begin is not None
        queue = activity.info().task_queue.removeprefix(self._engine.task_queue(""))
        try:
            await self._info.begin(msgspec.convert({**order, "queue": queue}, NewRun))
        except (ConfigurationError, LookupError, msgspec.ValidationError) as exc:
            raise _refused(exc) from exc
        except StoreError as exc:
            raise _retried(exc, None if exc.transient else _LATER) from exc

    @activity.defn(name=DECIDE)
    async def decide(self, order: dict[str, Any]) -> None:
        """Put decisions into the inbox of a run."""
        log_id, update = str(order["run_id"]), str(order["id"])
        try:
            given = msgspec.convert(order["decisions"], dict[str, DecisionBody])
            made = {name: replace(one, id=one.id or f"{update}/{name}").as_decision() for name, one in given.items()}
            body = encode_decisions(stamped(made, "temporal"))
        except (DecisionRefused, msgspec.ValidationError) as exc:
            raise _refused(exc) from exc
        wish = Wish(log_id=log_id, wish_id=f"decide_{update}", run_id=log_id, kind="decide", body=body)
        await self._store.put_wish(wish)

    @activity.defn(name=REPLY)
    async def reply(self, order: dict[str, Any]) -> str | None:
        """Return why decisions were refused, "" if they were accepted, or None if there is no reply yet."""
        log_id = str(order["run_id"])
        has_ended = await self._logs.find(log_id) is None
        body = await self._store.reply_to(log_id, f"decide_{order['id']}")
        if body is not None:
            return msgspec.json.decode(body).get("refused", "")
        return f"run {log_id!r} has ended, it waits for nothing" if has_ended else None

    @activity.defn(name=LEG)
    async def leg(self, order: dict[str, Any]) -> dict[str, Any]:
        """Work on a leg to its end, and return the status of the run."""
        log_id = str(order["run_id"])
        try:
            return await self._leg(log_id, order)
        except ApplicationError:
            raise
        except RunElsewhere as exc:
            raise _retried(exc) from exc
        except StoreError as exc:
            _log.warning("run %s cannot be worked on: %s", log_id, exc)
            raise _retried(exc, _SOON if exc.transient else _LATER) from exc
        except Exception as exc:
            _log.error("run %s cannot be worked on, and is tried again in %.0f s: %s", log_id, _LATER, exc)
            raise _retried(exc, _LATER) from exc

    async def _leg(self, log_id: str, order: dict[str, Any]) -> dict[str, Any]:
        record = await self._store.load_run(log_id)
        if record is None:
            if activity.info().attempt <= _UNKNOWN:
                raise _retried(UnknownRun(log_id), _SOON)
            _log.warning("run %s is not in this database: its workflow is closed", log_id)
            return {"end": "ended", **standing(None)}
        agent = record.identity.agent
        if self._stopping:
            return {"end": "left", **standing(record)}
        if order.get("cancel"):
            await self._cancel(log_id)
        elif agent not in self._info.agents:
            raise _retried(ConfigurationError(f"this worker has no agent {agent!r}"))
        elif await self._is_queued(record):
            return await self._report(log_id, "waits", order)
        work = self._at_work.get(log_id)
        if work is None:
            if not self._info.slots.free:
                raise RunElsewhere(log_id, "nobody: this worker has no free slot")
            self._info.slots.take(log_id)
            work = self._at_work[log_id] = asyncio.create_task(self._do_leg(Leg(log_id=log_id)), name=f"leg {log_id}")
            work.add_done_callback(lambda _: self._forget(log_id))
        await self._watch(log_id, work)
        return await self._report(log_id, work.result(), order)

    def _forget(self, log_id: str) -> None:
        self._at_work.pop(log_id, None)
        self._info.slots.release(log_id)

    async def _is_queued(self, record: RunRecord) -> bool:
        """Return whether a run is queued for its thread: it must not take a slot until the thread is free."""
        run_id = record.identity.run_id
        if not record.queued or await self._store.wishes_for(run_id):
            return False
        return run_id not in dict(await self._logs.freed(record.identity.thread_id))

    async def _watch(self, log_id: str, work: asyncio.Task[LegEnd]) -> None:
        """Wait for the end of a leg. Send Temporal heartbeats meanwhile, unless the leg is short."""
        every, wanted = min(_BEAT, self._info.lease / 4), False
        while True:
            try:
                if wanted:
                    await self._cancel(log_id)
                    wanted = False
                await join([work], every)
            except asyncio.CancelledError:
                details, this = activity.cancellation_details(), asyncio.current_task()
                if details is None or this is None:
                    raise
                this.uncancel()
                wanted = wanted or details.cancel_requested
                if not wanted:  # the leg continues: it does not need Temporal
                    _log.info("run %s: Temporal has given its activity up (%s)", log_id, details)
            except StoreError as exc:
                _log.warning("run %s cannot be cancelled yet: %s", log_id, exc)
                await join([work], every)
            if work.done():
                return
            status = self._info.look(log_id)
            if status is not None and not status.is_ours:
                raise RunElsewhere(log_id, f"{self._info.owner}, whose lease has run out")
            activity.heartbeat(
                {"agent": status.agent, "step": status.step, "questions": list(status.questions)} if status else {}
            )

    async def _cancel(self, log_id: str) -> None:
        """Put a cancel into the inbox of a run, unless there is one or the run has ended."""
        if await self._logs.find(log_id) is None:
            return
        if any(wish.kind == "cancel" for wish in await self._store.wishes_for(log_id)):
            return
        body = msgspec.json.encode({"reason": "cancelled in Temporal", "tasks": True})
        wish_id = f"temporal-{activity.info().workflow_run_id}"
        await self._store.put_wish(Wish(log_id=log_id, wish_id=wish_id, run_id=log_id, kind="cancel", body=body))

    async def _report(self, log_id: str, end: LegEnd, order: dict[str, Any]) -> dict[str, Any]:
        record = await self._store.load_run(log_id)
        if end == "ended" and record is not None:
            try:
                await self._sweeper.start(await self._logs.freed(record.identity.thread_id))
            except RetinueError as exc:
                _log.warning("what waits for thread %s is started later: %s", record.identity.thread_id, exc)
        result = None if record is None or not order.get("carry") else record.result
        return {"end": end, **standing(record), **({} if result is None else outcome(result))}


def _retried(exc: Exception, seconds: float | None = None) -> ApplicationError:
    """An error after which Temporal tries again, as its policy says or after some seconds."""
    delay = None if seconds is None else timedelta(seconds=seconds)
    return ApplicationError(str(exc), type=type(exc).__name__, next_retry_delay=delay, category=_EXPECTED)


def _refused(exc: Exception) -> ApplicationError:
    """An error that another try would not change."""
    return ApplicationError(str(exc), type=type(exc).__name__, non_retryable=True, category=_EXPECTED)
