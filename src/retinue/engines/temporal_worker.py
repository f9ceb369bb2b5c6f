"""A worker on Temporal: legs are activities, and what Temporal may not know about is found in the store.

Invariant: a leg is at work in a task of its own. Only a cancel that somebody asked for reaches the run, through its inbox;
an activity that Temporal gives up for another reason leaves its leg alone, and the next attempt joins it or waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec.structs import replace
from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory
from temporalio.worker import FixedSizeSlotSupplier, Interceptor, Worker, WorkerTuner, WorkflowInterceptorClassInput

from ..core.engine import DoLeg, Leg, LegEnd, LegStatus, NewRun, WorkerInfo
from ..core.errors import ConfigurationError, DecisionRefused, RetinueError, RunElsewhere, StoreError, UnknownRun
from ..core.stores import RunRecord, Wish
from ..loop.tickets import encode_decisions
from ..storage.legs import Workers
from ..storage.placed import PlacedLogs
from ..storage.schedules import Schedules
from ..wire.resources import DecisionBody
from .temporal_slots import SharedSlots
from .temporal_steps import outcome
from .temporal_workflow import BEGIN, DECIDE, LEASE, LEG, REPLY, WORKFLOW, RetinueRun

if TYPE_CHECKING:
    from .temporal import TemporalEngine

_log = logging.getLogger(__name__)

SWEEP_EVERY = 1.0
"""Seconds between two looks for schedules that are due and threads that are free."""
RECONCILE_EVERY = 5.0
"""Seconds between two comparisons of the store with Temporal, by all workers together."""
_UNREAD = 2.0
"""Seconds after which a wish in an inbox counts as overlooked."""
_AGAIN = 30.0
"""Seconds after which a workflow that was started or woken may be so again."""
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
        self._workers, self._schedules = Workers(store), Schedules(store)
        self._at_work: dict[str, asyncio.Task[LegEnd]] = {}
        self._stopping = False
        self._slots = SharedSlots(info.slots) if len(info.queues) > 1 else None
        self._woken: dict[str, float] = {}
        """When workflows were started or woken from here."""
        self._missing: set[str] = set()
        self._stale: set[str] = set()
        """The logs without a workflow, and the workflows without a log, at the last comparison."""

    async def work(
        self, stop: asyncio.Event, ready: Callable[[], None], keep: Callable[[asyncio.Task[None]], None]
    ) -> None:
        """Work until `stop` is set; `keep` gets what still reports the legs at work then."""
        closing = asyncio.Event()
        queues = [asyncio.create_task(self._serve(queue, closing)) for queue in self._info.queues]
        stopping = asyncio.create_task(stop.wait())
        helpers: list[asyncio.Task[Any]] = [asyncio.create_task(self._keep_sweeping()), stopping]
        try:
            ready()
            done, _ = await asyncio.wait({stopping, *queues}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()  # a queue ends early only if it cannot be worked on
        finally:
            self._stopping = True
            closing.set()
            for helper in helpers:
                helper.cancel()
            for queue in queues:
                keep(queue)
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _serve(self, queue: str, closing: asyncio.Event) -> None:
        """Take legs of a queue until `closing` is set. A worker that breaks down is replaced."""
        pause = _FIRST_PAUSE
        while not closing.is_set():
            worker = self._make_worker(queue)
            working, stopping = asyncio.create_task(worker.run()), asyncio.create_task(closing.wait())
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if closing.is_set():
                await worker.shutdown()
                await asyncio.gather(working, return_exceptions=True)
                return
            _log.error("queue %s cannot be worked on, and is tried again: %s", queue, working.exception())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(closing.wait(), pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _make_worker(self, queue: str) -> Worker:
        fixed = FixedSizeSlotSupplier(100)
        slots = self._slots or FixedSizeSlotSupplier(self._info.slots)
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
                workflow_supplier=fixed, activity_supplier=slots, local_activity_supplier=fixed, nexus_supplier=fixed
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
            body = encode_decisions(made)
        except (DecisionRefused, msgspec.ValidationError) as exc:
            raise _refused(exc) from exc
        wish = Wish(log_id=log_id, wish_id=f"decide_{update}", run_id=log_id, kind="decide", body=body)
        await self._store.put_wish(wish)

    @activity.defn(name=REPLY)
    async def reply(self, order: dict[str, Any]) -> str | None:
        """Return why decisions were refused, nothing if they were accepted, or None if that is not known yet."""
        log_id = str(order["run_id"])
        has_ended = await self._logs.find(log_id) is None
        body = await self._store.reply_to(log_id, f"decide_{order['id']}")
        if body is not None:
            return msgspec.json.decode(body).get("refused", "")
        return f"run {log_id!r} has ended, it waits for nothing" if has_ended else None

    @activity.defn(name=LEG)
    async def leg(self, order: dict[str, Any]) -> dict[str, Any]:
        """Work on a leg to its end, and return where the run stands."""
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
            return {"end": "ended", **_outcome(None, carry=False)}
        agent = record.identity.agent
        if self._stopping:
            raise RunElsewhere(log_id, "nobody: this worker is stopping")
        if order.get("cancel"):
            await self._cancel(log_id)
        elif agent not in self._info.agents:
            raise _retried(ConfigurationError(f"this worker has no agent {agent!r}"))
        elif await self._is_queued(record):
            return await self._report(log_id, "waits", order)
        work = self._at_work.get(log_id)
        if work is None:
            if len(self._at_work) >= self._info.slots:
                raise RunElsewhere(log_id, "nobody: this worker has no free slot")
            work = self._at_work[log_id] = asyncio.create_task(self._do_leg(Leg(log_id=log_id)), name=f"leg {log_id}")
            work.add_done_callback(lambda _: self._at_work.pop(log_id, None))
        await self._watch(log_id, work)
        return await self._report(log_id, work.result(), order)

    async def _is_queued(self, record: RunRecord) -> bool:
        """Return whether a run has nothing to do until its thread is free: it must not take a slot until then."""
        run_id = record.identity.run_id
        if not record.queued or await self._store.wishes_for(run_id):
            return False
        return run_id not in dict(await self._logs.freed(record.identity.thread_id))

    async def _watch(self, log_id: str, work: asyncio.Task[LegEnd]) -> None:
        """Return when a leg has ended. Until then tell Temporal that it is at work."""
        every, wanted = min(_BEAT, self._info.lease / 4), False
        while not work.done():
            status = self._info.look(log_id)
            if status is not None and not status.is_ours:
                raise RunElsewhere(log_id, f"{self._info.owner}, whose lease has run out")
            activity.heartbeat(_shown(status))
            try:
                if wanted:
                    await self._cancel(log_id)
                    wanted = False
                await asyncio.wait({work}, timeout=every)
            except asyncio.CancelledError:
                details, this = activity.cancellation_details(), asyncio.current_task()
                if details is None or this is None:
                    raise
                this.uncancel()
                wanted = wanted or details.cancel_requested
                if not wanted:  # the leg goes on: it needs no Temporal
                    _log.info("run %s: Temporal has given its activity up (%s)", log_id, details)
            except StoreError as exc:
                _log.warning("run %s cannot be cancelled yet: %s", log_id, exc)
                await asyncio.wait({work}, timeout=every)

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
                await self._start(await self._logs.freed(record.identity.thread_id))
            except RetinueError as exc:
                _log.warning("what waits for thread %s is started later: %s", record.identity.thread_id, exc)
        return {"end": end, **_outcome(record, carry=bool(order.get("carry")))}

    # --- what Temporal does not know

    async def _keep_sweeping(self) -> None:
        due, failed = 0.0, ""
        while True:
            try:
                await self._sweep()
                if (began := time.monotonic()) >= due:
                    due = began + RECONCILE_EVERY
                    others = await self._reconcile()
                    due = began + max(RECONCILE_EVERY * others, 20 * (time.monotonic() - began))
                failed = ""
            except RetinueError as exc:
                if failed != str(exc):
                    _log.error("looking for lost runs failed, and is tried again: %s", exc)
                failed = str(exc)
            await asyncio.sleep(SWEEP_EVERY)

    async def _sweep(self) -> None:
        """Start the runs that are due and those whose thread is free."""
        now = time.monotonic()
        self._woken = {name: at for name, at in self._woken.items() if at + _AGAIN > now}
        await self._start(await self._schedules.fire(self._engine.name))
        await self._start(await self._logs.freed())

    async def _start(self, found: list[tuple[str, Any]]) -> None:
        for run_id, placement in found:
            record = await self._store.load_run(run_id) if self._is_new(run_id) else None
            if record is not None:
                await self._engine.start_workflow(record, placement, "wake")

    def _is_new(self, run_id: str) -> bool:
        """Return whether nothing was done about a run from here for a while, and note it."""
        is_new = run_id not in self._woken
        self._woken.setdefault(run_id, time.monotonic())
        return is_new

    async def _reconcile(self) -> int:
        """Compare the store with Temporal; return how many workers there are to do it."""
        for log_id, _ in await self._logs.unread(_UNREAD):
            if self._is_new(log_id):
                await self._engine.wake(log_id)
        running = await self._running()
        at_work = dict(await self._logs.at_work())
        missing, stale = set(at_work) - running, await self._logs.ended(sorted(running - set(at_work)))
        # Twice in a row: what begins or ends at this moment is left alone.
        for log_id in filter(self._is_new, missing & self._missing):
            _log.warning("run %s has no workflow, and gets one", log_id)
            await self._engine.wake(log_id)
        for log_id in filter(self._is_new, stale & self._stale):
            handle = self._engine.client.get_workflow_handle(log_id)
            await self._engine.call(lambda handle=handle: handle.signal("wake"))
        self._missing, self._stale = missing, stale
        return max(1, sum(worker.is_alive for worker in await self._workers.seen(self._engine.name)))

    async def _running(self) -> set[str]:
        """Return the ids of the workflows that have not ended."""
        queues = f"TaskQueue STARTS_WITH '{self._engine.task_queue('')}'"
        query = f"WorkflowType = '{WORKFLOW}' AND ExecutionStatus = 'Running' AND {queues}"

        async def read() -> set[str]:
            return {found.id async for found in self._engine.client.list_workflows(query, page_size=1_000)}

        return await self._engine.call(read)


def _retried(exc: Exception, seconds: float | None = None) -> ApplicationError:
    """An error after which Temporal tries again, as its policy says or after some seconds."""
    delay = None if seconds is None else timedelta(seconds=seconds)
    return ApplicationError(str(exc), type=type(exc).__name__, next_retry_delay=delay, category=_EXPECTED)


def _refused(exc: Exception) -> ApplicationError:
    """An error that another try would not change."""
    return ApplicationError(str(exc), type=type(exc).__name__, non_retryable=True, category=_EXPECTED)


def _shown(status: LegStatus | None) -> dict[str, Any]:
    return {} if status is None else {"agent": status.agent, "step": status.step, "questions": list(status.questions)}


def _outcome(record: RunRecord | None, *, carry: bool) -> dict[str, Any]:
    """Return what a workflow shows of a run; with `carry`, also what came of it."""
    result = None if record is None else record.result
    known: dict[str, Any] = {
        "agent": "" if record is None else record.identity.agent,
        "status": "unknown" if record is None else str(record.status),
        "step": 0 if result is None else result.steps,
        "questions": [] if result is None else sorted(result.suspended),
    }
    return {**known, **outcome(result)} if carry and result is not None else known
