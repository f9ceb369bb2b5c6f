"""Runs that an engine schedules: stored here, worked on by workers, followed through the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import CancellationToken, Jobs, join
from ..core.content import id_problem
from ..core.engine import DEFAULT_QUEUE, Engine, NewRun, Schedule
from ..core.errors import ConfigurationError, RetinueError, ThreadBusy
from ..core.messages import Message, as_messages
from ..core.rows import StoredRequest
from ..core.runs import RunIdentity, RunResult, unique
from ..core.stores import Placement, RunRecord, WhenBusy, title_of
from ..core.tools import check_queue
from ..loop.execution import storable
from ..storage.depths import unserved
from ..storage.legs import Workers
from ..storage.schedules import Schedules, next_time
from ..storage.sql import SqlStore
from .run import Opened, Run
from .stored_start import encode_start

if TYPE_CHECKING:
    from .runs import LocalRuns

_log = logging.getLogger(__name__)

MOST_PRIORITY, MOST_DELAY = 1_000_000, 10 * 366 * 86_400
UNSERVED_AFTER = 30.0
"""Seconds after which a handle reports that no worker can take its run."""


class Dispatcher:
    """Gives runs to an engine, and follows them in the store while workers execute them."""

    def __init__(self, runs: LocalRuns, engine: Engine, store: SqlStore) -> None:
        self._runs, self.engine, self.store = runs, engine, store
        self._workers, self.schedules = Workers(store), Schedules(store)
        self._jobs = Jobs()
        self._beginning: dict[str, asyncio.Task[None]] = {}
        self.unserved_after = UNSERVED_AFTER

    async def open(self) -> None:
        await self.engine.open(self.store)

    async def close(self) -> None:
        await self._jobs.close()
        await self.engine.close()

    def start(
        self,
        request: RunRequest,
        when_busy: WhenBusy,
        *,
        queue: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
    ) -> Run[Any]:
        """Store a run and schedule its first leg. A mistake in the request raises here."""
        identity = request.identity
        given: tuple[Any, Any] = (priority, delay)
        if not isinstance(given[0], int) or abs(priority) > MOST_PRIORITY:
            raise ConfigurationError(f"priority is a whole number up to {MOST_PRIORITY:,}, not {priority!r}")
        if not isinstance(given[1], int | float) or not 0 <= delay <= MOST_DELAY:
            raise ConfigurationError(f"delay is a number of seconds from 0 to {MOST_DELAY:,}, not {delay!r}")
        placement = Placement(
            engine=self.engine.name, queue=check_queue(queue or DEFAULT_QUEUE), priority=priority, delay=delay
        )
        record, begun = self._store(request, placement, when_busy)
        begin = self._schedule_stored(identity, begun, placement, when_busy)
        beginning = self._beginning[identity.run_id] = self._jobs.start(begin)
        beginning.add_done_callback(lambda _: self._beginning.pop(identity.run_id, None))
        return self.handle(record, beginning)

    async def wait_until_begun(self, run_id: str) -> None:
        """Return once a run that is being started here is stored and scheduled, or was refused."""
        if (beginning := self._beginning.get(run_id)) is not None:
            await join([beginning])

    async def begin(self, new: NewRun) -> None:
        """Store a run that its engine knows already, unless it is stored."""
        if await self.store.load_run(new.run_id) is not None:
            return
        if (problem := id_problem(new.run_id)) is not None:
            raise ConfigurationError(f"the id of a run cannot be stored: {problem}")
        agent = self._runs.registry.find(new.agent)
        thread_id = new.thread_id or f"thread_{new.run_id}"
        identity = RunIdentity(run_id=new.run_id, thread_id=thread_id, agent=agent.name, user_id=new.user_id)
        request = RunRequest(
            agent=agent,
            identity=identity,
            messages=as_messages(new.input),
            cancellation=CancellationToken(),
            context=new.context,
        )
        placement = Placement(engine=self.engine.name, queue=check_queue(new.queue))
        await self._store(request, placement, "enqueue")[1]

    def _store(
        self, request: RunRequest, placement: Placement, when_busy: WhenBusy, saved_at: float | None = None
    ) -> tuple[RunRecord, asyncio.Future[str | None]]:
        """Store a run for workers; return its record, and what `begin_run` of the store returns."""
        identity, start = request.identity, encode_start(request, _checked(request))
        record = RunRecord(
            identity=identity, started_at=self._runs.clock(), log_id=identity.run_id, title=title_of(request.messages)
        )
        return record, self.store.begin_run(record, start, None, 0.0, when_busy, placement, saved_at)

    async def begin_placed(
        self, request: RunRequest, placement: Placement, when_busy: WhenBusy, saved_at: float | None = None
    ) -> None:
        """Store and schedule a run without a handle. Raise ThreadBusy as `when_busy` and `saved_at` say."""
        _, begun = self._store(request, placement, when_busy, saved_at)
        await self._schedule_stored(request.identity, begun, placement, when_busy)

    async def _schedule_stored(
        self, identity: RunIdentity, begun: asyncio.Future[str | None], placement: Placement, when_busy: WhenBusy
    ) -> None:
        holder = await begun
        if holder is not None and when_busy == "reject":
            raise ThreadBusy(identity.thread_id, holder)
        if holder is not None and when_busy == "interrupt":
            await self.engine.answer(holder)
        await self.schedule(identity.run_id, placement)

    async def placement_of(self, log_id: str) -> Placement:
        """Return the engine and the queue of a stored run."""
        return Placement(engine=self.engine.name, queue=await self._workers.queue_of(log_id) or DEFAULT_QUEUE)

    async def place(self, request: RunRequest, run_id: str) -> None:
        """Store a child as a run of its own, for the workers of its queue. May be called again for the same run."""
        above = None if request.above is None else request.above.log_id
        placement = Placement(engine=self.engine.name, queue=check_queue(request.queue), above=above)
        placed = replace(request, identity=replace(request.identity, run_id=run_id), timeout=None)
        # Its thread is free, unless the end of the run before it is still being stored.
        await self.begin_placed(placed, placement, "enqueue")

    async def schedule(self, run_id: str, placement: Placement) -> None:
        """Have the engine schedule a stored run. If it cannot be reached, a worker finds the run later."""
        try:
            await self.engine.start(run_id, placement)
        except RetinueError as exc:
            _log.warning("run %s is stored, and begins when its engine can be reached again: %s", run_id, exc)

    async def add_schedule(
        self,
        agent: Agent,
        messages: tuple[Message, ...],
        *,
        at: datetime | None,
        cron: str | None,
        queue: str | None,
        thread_id: str | None,
        user_id: str | None,
    ) -> str:
        """Store a schedule; return its id."""
        if (at is None) == (cron is None):
            raise ConfigurationError(
                "schedule(…) needs exactly one of at=datetime and cron='minute hour day month weekday'"
            )
        if cron is None and not isinstance(at, datetime):
            raise ConfigurationError(f"at is a datetime, not {at!r}")
        try:
            next_at = next_time(cron, time.time()) if cron is not None else cast("datetime", at).timestamp()
        except (OverflowError, OSError, ValueError) as exc:
            if isinstance(exc, ConfigurationError):
                raise
            raise ConfigurationError(f"at={at!r} is not a time that can be waited for: {exc}") from exc
        made = f"schedule_{unique()}"
        identity = RunIdentity(run_id=made, thread_id=thread_id or made, agent=agent.name, user_id=user_id)
        request = RunRequest(agent=agent, identity=identity, messages=messages, cancellation=CancellationToken())
        schedule = Schedule(
            id=made,
            agent=agent.name,
            next_at=next_at,
            cron=cron,
            queue=check_queue(queue or agent.queue or DEFAULT_QUEUE),
            thread_id=thread_id,
            user_id=user_id,
        )
        await self.schedules.add(schedule, self.engine.name, encode_start(request, _checked(request)))
        return made

    def handle(self, record: RunRecord, beginning: asyncio.Task[None] | None = None) -> Run[Any]:
        """Return a handle of a run, which was started before or (`beginning`) is being started."""
        identity = record.identity
        opened: asyncio.Future[Opened | None] = asyncio.get_running_loop().create_future()

        async def work() -> RunResult[Any]:
            if beginning is not None:
                await beginning
            opened.set_result((self._runs.stored_log(identity.run_id), 0))
            warning = self._jobs.start(self._warn_if_unserved(identity.run_id))
            try:
                return await self._runs.result(identity.run_id)
            finally:
                warning.cancel()

        end = self._jobs.start(work())
        return Run[Any](identity.run_id, identity.thread_id, identity.agent, self._runs, end, opened)

    async def _warn_if_unserved(self, run_id: str) -> None:
        await asyncio.sleep(self.unserved_after)
        if (problem := await self.unserved(run_id)) is not None:
            _log.warning("run %s waits: %s", run_id, problem)

    async def unserved(self, run_id: str) -> str | None:
        """Return why no worker works on a run that is due; None if one does, or can."""
        waiting = await self._workers.waiting_in(run_id)
        if waiting is None:
            return None
        workers = [worker for worker in await self._workers.seen(self.engine.name) if worker.is_alive]
        return unserved(*waiting, workers)


def _checked(request: RunRequest) -> StoredRequest:
    """Return the stored form of a request; raise ConfigurationError if a worker could not start from it."""
    stored = storable(request)
    if stored.problem is not None:
        raise ConfigurationError(f"a worker cannot begin this run: {stored.problem}")
    return stored


def check_queues(queues: Sequence[str]) -> tuple[str, ...]:
    if isinstance(queues, str) or not queues:
        raise ConfigurationError(f"queues is a list of names, such as ['default'], not {queues!r}")
    return tuple(dict.fromkeys([check_queue(queue) for queue in queues]))


def make_dispatcher(runs: LocalRuns, engine: str | Engine) -> Dispatcher:
    """Return the dispatcher of a runtime; raise ConfigurationError if workers cannot share its store."""
    from ..engines import open_engine

    made = engine if not isinstance(engine, str) and hasattr(engine, "work") else open_engine(cast("str", engine))
    if not isinstance(runs.store, SqlStore) or not runs.store.has_queues:
        raise ConfigurationError(
            f"engine {made.name!r} needs a PostgreSQL database, which every worker can reach: give it as postgresql://…"
        )
    return Dispatcher(runs, made, runs.store)
