"""The root runs of one runtime: started, continued, answered and cancelled, here or through the store.

There is one way to continue a run, whatever the reason (a crash, an answer, a cancel, `load`): claim its log, fold it,
and let the loop go on (`take_over`). Without a store the log is in memory and needs no claim.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import cast

from msgspec.structs import replace

from ..backends.background import LocalBackground
from ..backends.local import LocalBackend
from ..core.backend import RunRequest
from ..core.decisions import Decision
from ..core.errors import (
    ConfigurationError,
    RetinueError,
    RunElsewhere,
    ThreadBusy,
    UnknownRun,
)
from ..core.events import Event, Sink
from ..core.messages import Message
from ..core.rows import LogRow, Private
from ..core.runs import RunResult
from ..core.stores import DurableStore, OpenLog, RunRecord, Store, StoredLog, ThreadRecord, WhenBusy, Wish
from ..loop.fold import fold_all
from ..loop.log import Earlier, LiveLog
from ..loop.state import LogState, RunState
from ..loop.tickets import match_decisions
from ..storage.logs import LogWriter, stored_events
from .fork import Copy, check_place, fold_until, threads_of
from .inbox import LOOK_EVERY, Inbox
from .live import LiveRun
from .owner import Owner, is_gone
from .registry import AgentRegistry
from .requests import decode_start, encode_start, restored
from .run import Home, Run

_log = logging.getLogger(__name__)

KEPT_LOGS = 100
"""Ended runs whose events a runtime without a store still has in memory."""


class LocalRuns:
    """The root runs that this process works on, and how to reach the others."""

    def __init__(
        self,
        registry: AgentRegistry,
        store: Store,
        sinks: Iterable[Sink],
        lease: float,
        clock: Callable[[], float],
        home: Home,
    ) -> None:
        self._registry, self.store, self._clock, self._home = registry, store, clock, home
        # By one name: asking whether it has all that the protocol names takes longer than the rest of this.
        self.durable = cast("DurableStore", store) if hasattr(store, "begin_run") else None
        self.owner = None if self.durable is None else Owner(self.durable, lease)
        self.backend = registry.backend = LocalBackend(registry, store, sinks, clock)
        self.background = registry.background = LocalBackground(self.backend)
        self.inbox = Inbox(self, self.durable)
        self._live: dict[str, LiveRun] = {}
        """Runs that this process owns and, without a store, ended ones that are still remembered."""
        self._lines: dict[str, list[LiveRun]] = {}
        """The runs of each thread, where no store decides who has it: the first has it, the others wait."""
        self._left_alone: set[str] = set()
        """Runs that cannot be continued here, as was logged."""

    @property
    def live(self) -> list[LiveRun]:
        return list(self._live.values())

    def get(self, run_id: str) -> LiveRun | None:
        return self._live.get(run_id)

    # --- starting

    def start(self, request: RunRequest, sinks: Sequence[Sink], when_busy: WhenBusy, *, new_thread: bool) -> Run:
        """Start a run. Whatever is wrong with the request raises here."""
        identity = request.identity
        line = () if new_thread else self._line(identity.thread_id)
        if line and when_busy == "reject":
            raise ThreadBusy(identity.thread_id, line[0].run_id)
        writer = None if self.durable is None else LogWriter(identity.run_id, self.durable)
        log = LiveLog((*self.backend.sinks, *sinks), writer=writer, clock=self._clock)
        log.earlier = None if self.durable is None else self._reader(self.durable, identity.run_id)
        x = self.backend.open(request, log)
        record = RunRecord(identity=identity, started_at=self._clock(), log_id=identity.run_id)
        run = self._add(LiveRun(self, request, log, record, writer, x), stored=False)
        run.is_new_thread = new_thread
        if self.durable is None:
            run.before = list(line)
            self._lines.setdefault(identity.thread_id, []).append(run)
            if when_busy == "interrupt":
                for earlier in run.before:
                    earlier.spawn(_interrupt(earlier))
        run.start(when_busy)
        return self.handle(run)

    def _line(self, thread_id: str) -> Sequence[LiveRun]:
        """The runs that have a thread or wait for it, as far as this process knows."""
        if self.durable is None:
            return self._lines.get(thread_id, ())
        return [
            run for run in self._live.values() if run.record.identity.thread_id == thread_id and not run.left.done()
        ]

    def _reader(self, store: DurableStore, log_id: str) -> Earlier:
        """Reads the stored events of a log."""
        return lambda after, until: stored_events(store, log_id, after, until)

    def _add(self, run: LiveRun, *, stored: bool = True) -> LiveRun:
        """Know a run, and hear what others want of it."""
        self._live[run.run_id] = run
        if run.writer is not None:
            run.writer.on_lost = run.lose
            run.writer.is_fresh = None if self.owner is None else self.owner.is_fresh
        if self.owner is not None and stored:
            self.owner.add(run.run_id, run)
        return run

    def handle(self, run: LiveRun) -> Run:
        identity = run.record.identity
        return Run(identity.run_id, identity.thread_id, identity.agent, run.log, run.end, self._home, run.first)

    def leg_ended(self, run: LiveRun) -> None:
        """Forget a run that is over or left; without a store, some ended ones are remembered."""
        if run.left.done():
            self._leave_line(run)
        if not run.is_done:
            return
        run.let_go_of_parts()
        if self.owner is not None:
            self.owner.remove(run.run_id)
            if self._live.get(run.run_id) is run:
                del self._live[run.run_id]
            return
        while len(self._live) > KEPT_LOGS + len(self._lines):
            oldest = next((key for key, kept in self._live.items() if kept.is_done), None)
            if oldest is None:
                return
            del self._live[oldest]

    def _leave_line(self, run: LiveRun) -> None:
        thread_id = run.record.identity.thread_id
        line = [one for one in self._lines.get(thread_id, ()) if one is not run]
        if line:
            self._lines[thread_id] = line
        else:
            self._lines.pop(thread_id, None)

    # --- continuing

    async def take_over(self, log_id: str, epoch: int) -> LiveRun:
        """Continue a run whose log was just claimed: fold it, hear what others want of it, and let it go on."""
        assert self.durable is not None
        writer = LogWriter(log_id, self.durable, epoch)
        try:
            return await self._take_over(await self.record(log_id), writer)
        except BaseException:
            if log_id not in self._live:  # it cannot be continued here: others may try
                with contextlib.suppress(RetinueError):
                    await LogWriter(log_id, self.durable, epoch).settle(released=True)
            raise

    async def _take_over(self, record: RunRecord, writer: LogWriter) -> LiveRun:
        assert self.durable is not None
        log_id = writer.log_id
        stored = await self.durable.read_log(log_id) or StoredLog()
        tree = fold_all(stored.rows, self.durable.place, log_id)
        tree.seq, tree.sub = stored.seq, stored.sub
        state = tree.runs.get(log_id)
        if state is None:
            return await self._begin_again(record, writer)
        log = self._log(tree, writer)
        log.append_private(Private(kind="resumed", at=self._clock()))
        agent = self._registry.agent(state.first_agent or record.identity.agent)
        try:
            request = restored(agent, state.identity, state.request)
            problem = None
        except RetinueError as exc:
            request, problem = restored(agent, state.identity, replace(state.request, problem=None)), str(exc)
        run = LiveRun(self, request, log, record, writer)
        run.is_adopted = True
        await self._continue(run, state, problem)
        return run

    def _log(self, tree: LogState, writer: LogWriter) -> LiveLog:
        log = LiveLog(self.backend.sinks, tree, writer, self._clock)
        assert self.durable is not None
        log.earlier = self._reader(self.durable, writer.log_id)
        return log

    async def _begin_again(self, record: RunRecord, writer: LogWriter) -> LiveRun:
        """Begin a run that has only its request in the store."""
        assert self.durable is not None
        identity = record.identity
        body = await self.durable.read_request(identity.run_id)
        if body is None:
            raise ConfigurationError(f"run {identity.run_id!r}: what was asked of it is not stored")
        start = decode_start(body)
        request = restored(
            self._registry.agent(identity.agent),
            identity,
            replace(start.request, problem=None),
            start.messages,
            start.seed,
        )
        log = LiveLog(self.backend.sinks, writer=writer, clock=self._clock)
        run = LiveRun(self, request, log, record, writer, self.backend.open(request, log))
        run.is_adopted = True
        run.start(None, start.request.problem)
        self._add(run)
        self._hear(run, await self.durable.wishes_for(identity.run_id))
        return run

    async def _continue(self, run: LiveRun, state: RunState, problem: str | None) -> None:
        """Let a run go on from where its state says it stands, with what was put into its inbox."""
        assert self.durable is not None
        wishes = await self.durable.wishes_for(run.run_id)
        # Nobody hears of it before it is known where it stands, or a wish could start it a second time.
        if (state.is_over or state.waits) and problem is None:
            await run.take_up()
        self._add(run)
        if problem is not None and not state.is_over:
            run.break_off(f"it cannot be continued: {problem}")
        elif not run.end.done() and not any(wish.kind == "cancel" for wish in wishes):
            run.proceed()
        self._hear(run, wishes)
        await run.release_if_idle()

    def _hear(self, run: LiveRun, wishes: Sequence[Wish]) -> None:
        assert self.owner is not None
        for wish in wishes:
            if self.owner.hears(wish):
                run.wish(wish)

    async def recover(self) -> list[Run]:
        """Continue the runs whose owners are gone; those that this process has taken over."""
        if self.owner is None:
            return []
        found = [await self._recover(log) for log in await self.owner.orphans()]
        return [self.handle(run) for run in found if run is not None]

    async def _recover(self, log: OpenLog) -> LiveRun | None:
        assert self.durable is not None
        assert self.owner is not None
        try:
            record = await self.durable.load_run(log.log_id)
            if record is None or not self.knows(record) or log.log_id in self._live:
                return None
            epoch = await self.owner.claim(log.log_id, log)
            if epoch is None:
                return None
            _log.info("continuing run %s, which %s left", log.log_id, log.owner)
            return await self.take_over(log.log_id, epoch)
        except (RetinueError, ValueError) as exc:  # others must not suffer for it
            if log.log_id not in self._left_alone:
                self._left_alone.add(log.log_id)
                _log.error("run %s, which %s left, cannot be continued: %s", log.log_id, log.owner, exc)
            return None

    def log_with(self, run_id: str) -> LiveLog | None:
        """The log that a run is in, where this process has it."""
        return next((run.log for run in self._live.values() if run_id in run.log.tree.runs), None)

    def require_agent(self, name: str) -> None:
        """Raise where no agent of that name is known here."""
        self._registry.agent(name)

    def knows(self, record: RunRecord) -> bool:
        """Return whether this process has the agent of a run; if not, log it once."""
        agent, run_id = record.identity.agent, record.identity.run_id
        if agent in self._registry.agents:
            return True
        if run_id not in self._left_alone:
            self._left_alone.add(run_id)
            _log.warning("run %s was interrupted; it is left, as no agent is named %r here", run_id, agent)
        return False

    async def load(self, run_id: str) -> Run | None:
        """Continue a run whose process has ended here, if it can be; None where it has ended."""
        live = await self.here(run_id)
        if self.durable is None or live is not None:
            return self.handle(self._find(run_id))
        record = await self.record(run_id)
        if record.result is not None and record.result.status.is_terminal:
            return None
        claimed = await self.claim(run_id, record)
        if claimed is None:
            raise RunElsewhere(run_id, await self.durable.owner_of(run_id) or "another process")
        return self.handle(claimed)

    async def claim(self, log_id: str, record: RunRecord) -> LiveRun | None:
        """Take a log over if it is free and its agent is known; None where another process has it."""
        assert self.durable is not None
        assert self.owner is not None
        owner = await self.durable.owner_of(log_id)
        if owner is not None and not is_gone(owner) and record.identity.agent not in self._registry.agents:
            return None
        self._registry.agent(record.identity.agent)  # a process that does not know it leaves it to others
        epoch = await self.owner.claim(log_id)
        return None if epoch is None else await self.take_over(log_id, epoch)

    # --- time travel

    async def rows_of(self, run_id: str) -> list[LogRow]:
        """The rows of a log as they are stored, or in memory."""
        live = self._live.get(run_id)
        if self.durable is None:
            return self._find(run_id).log.rows()
        if live is not None and live.writer is not None:
            await live.writer.flush()
        stored = await self.durable.read_log(run_id)
        if stored is None:
            raise UnknownRun(run_id)
        if stored.thinned:
            raise ConfigurationError(f"the log of run {run_id!r} was thinned by retention: it can only be read")
        return list(stored.rows)

    async def state_at(self, run_id: str, seq: int) -> RunState:
        """The state of a run after an event of its log."""
        place = "" if self.durable is None else self.durable.place
        rows = await self.rows_of(run_id)
        state = fold_until(rows, seq, place, run_id).runs.get(run_id)
        if state is None or seq > rows[-1].seq:
            raise ConfigurationError(f"the log of run {run_id!r} has events 1 to {rows[-1].seq}, and no event {seq}")
        return state

    async def fork(
        self, run_id: str, at: int, messages: tuple[Message, ...], decisions: Mapping[str, Decision] | None
    ) -> Run:
        """Start a new run on a new thread that continues as another stood after an event."""
        rows = await self.rows_of(run_id)
        place = "" if self.durable is None else self.durable.place
        check_place(rows, run_id, at, place)
        copy = Copy(rows, run_id, at)
        tree = fold_all(copy.rows, place, run_id)
        state = tree.runs[copy.run_id]
        if messages and (state.waits or decisions is not None):
            raise ConfigurationError(f"run {run_id!r} waits at event {at}: give the fork decisions, not an input")
        if state.is_over and not messages:
            raise ConfigurationError(f"run {run_id!r} had ended at event {at}: give the fork an input to continue with")
        if decisions is not None:
            match_decisions(tree, state, decisions)  # raises before anything is stored
        agent = self._registry.agent(state.first_agent)
        run = await self._store_copy(copy, tree, state, restored(agent, state.identity, state.request))
        if decisions is not None:
            run.accept(decisions)
        elif messages or not state.waits:
            run.go_on_with(messages)
        else:
            await run.take_up()
            await run.release_if_idle()
        return self.handle(run)

    async def _store_copy(self, copy: Copy, tree: LogState, state: RunState, request: RunRequest) -> LiveRun:
        identity, now = state.identity, self._clock()
        record = RunRecord(identity=identity, started_at=now, log_id=identity.run_id)
        for thread_id, run in threads_of(tree).items():
            history = tuple(run.messages[: run.own_from])
            await self.store.save_thread(ThreadRecord(thread_id=thread_id, user_id=identity.user_id, messages=history))
        if self.durable is None or self.owner is None:
            log = LiveLog(self.backend.sinks, tree, clock=self._clock)
            log.first, log.events = 0, [row.event for row in copy.rows if row.event is not None]
            log.privates = [row for row in copy.rows if row.private is not None]
            writer = None
        else:
            body = encode_start(request, state.request)
            await self.durable.begin_run(record, body, self.owner.id, self.owner.lease)
            writer = LogWriter(identity.run_id, self.durable)
            writer.rows.extend(copy.rows)
            log = self._log(tree, writer)
        log.append_private(Private(kind="resumed", at=now))
        run = self._add(LiveRun(self, request, log, record, writer))
        if self.durable is None:
            self._lines.setdefault(identity.thread_id, []).append(run)
        return run

    # --- answering and cancelling

    def resume_elsewhere(self, run_id: str, decisions: Mapping[str, Decision]) -> Run:
        """The handle of what follows when a run that is not here is answered."""
        if self.durable is None:
            raise UnknownRun(run_id)
        end = asyncio.create_task(self.inbox.answer(run_id, decisions))
        end.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # nobody need be waiting
        return Run(run_id, "", "", LiveLog(), end, self._home, 0, lambda: self.inbox.last_leg(run_id, end))

    def resume_here(self, run_id: str, decisions: Mapping[str, Decision]) -> Run | None:
        """Continue a run that this process has, with decisions; None where it is not here."""
        run = self._live.get(run_id)
        if run is None or (run.is_storing and self.durable is not None):
            return None
        run.accept(decisions)
        return self.handle(run)

    async def here(self, run_id: str) -> LiveRun | None:
        """A run that this process has and is not about to give up."""
        while (run := self._live.get(run_id)) is not None and run.is_storing:
            await run.stored()
        return run

    async def cancel(self, run_id: str, reason: str, grace: float, tasks: bool) -> RunResult:
        """Stop a run, wherever it is, and wait for its end."""
        run = await self.here(run_id)
        if run is None:
            return await self.inbox.cancel(run_id, reason, grace, tasks)
        result = await run.cancel(reason, grace)
        if tasks:
            await run.cancel_tasks()
        return result

    # --- reading

    async def result(self, run_id: str) -> RunResult:
        """Return how a run ended or where it waits, whichever process works on it."""
        run = self._live.get(run_id)
        if run is not None:
            return await self.handle(run).result()
        if self.durable is None:
            raise UnknownRun(run_id)
        log_id = (await self.record(run_id)).log_id or run_id
        with self.durable.watch(log_id) as watch:
            while True:
                record = await self.record(run_id)
                if record.result is not None:
                    return self.typed(record)
                await watch.wait(LOOK_EVERY)

    def events(self, run_id: str, after: int) -> AsyncIterator[Event]:
        """The log of a run after an event: what is there, then what comes, until every task has ended."""
        run = self._live.get(run_id)
        if run is not None:
            return run.log.follow(after)
        if self.durable is None:
            raise UnknownRun(run_id)
        return stored_events(self.durable, run_id, after)

    def typed(self, record: RunRecord) -> RunResult:
        """A stored result, with its output as the type that its agent gives."""
        result, agent = record.result, self._registry.agents.get(record.identity.agent)
        assert result is not None
        form = None if agent is None else agent.output_format
        if form is None or result.output is None:
            return result
        return replace(result, output=form.decode(result.output))

    async def record(self, run_id: str) -> RunRecord:
        record = await self.store.load_run(run_id)
        if record is None:
            raise UnknownRun(run_id)
        return record

    def _find(self, run_id: str) -> LiveRun:
        if run_id not in self._live:
            raise UnknownRun(run_id)
        return self._live[run_id]

    # --- closing

    async def close(self, grace: float, *, leave: bool) -> None:
        """Stop what runs, or leave it to others. What waits stays as it is where it is stored."""
        reason = "the runtime was closed"
        left = [run for run in self.live if leave or run.is_adopted]
        self.background.leave({run.run_id for run in left})
        if leave and self.owner is not None:
            await self.owner.stop_heartbeat()
        await asyncio.gather(*[run.hand_over() for run in left], return_exceptions=True)
        if not leave:
            at_work = [run for run in self.live if not run.is_done and not (self.durable is not None and run.waits)]
            ends = await asyncio.gather(*[run.cancel(reason, grace) for run in at_work], return_exceptions=True)
            for end in ends:
                if isinstance(end, RetinueError):
                    _log.error("a run could not be ended as the runtime was closed: %s", end)
        await self.background.close(grace)
        await self.backend.close(grace)
        jobs = [asyncio.create_task(run.put_down()) for run in self.live]
        if jobs:
            await asyncio.wait(jobs, timeout=grace)
        if self.owner is not None:
            await self.owner.close()
        if left and self.durable is not None and self.owner is not None:
            with contextlib.suppress(RetinueError):
                await self.durable.renew(self.owner.id, 0.0)  # what still is ours can be claimed at once


async def _interrupt(run: LiveRun) -> None:
    await run.cancel("a newer run was started")
