"""The root runs of one runtime: started, answered, cancelled and read, here or through the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from ..backends.background import LocalBackground
from ..backends.local import LocalBackend
from ..backends.outcome import typed
from ..core.backend import RunRequest
from ..core.concurrency import CancellationToken, Jobs, join, running
from ..core.content import id_problem
from ..core.context import TIMED_OUT
from ..core.decisions import Decision
from ..core.errors import (
    ConfigurationError,
    DecisionRefused,
    ExecutionBackendError,
    OwnershipLost,
    RetinueError,
    RunElsewhere,
    RunEnded,
    ThreadBusy,
    UnknownRun,
)
from ..core.events import Event, Namespace, Sink
from ..core.messages import Message
from ..core.probation import MAX_TAKEOVERS, Probation
from ..core.runs import RunIdentity, RunResult, RunStatus
from ..core.stores import (
    THREADS,
    DurableStore,
    LogSummary,
    RunRecord,
    Store,
    ThreadSummary,
    Watch,
    WhenBusy,
    title_of,
)
from ..log.ask import NOT_FOUND, NOT_REACHABLE, Cancel, CancelTask, Command, Decide, Reply, Say
from ..log.owned import Gathering, LendSlot, LiveLog, LogWriter
from ..log.ownership import Owner
from ..log.read import RunLog, StoreLog, leg_of, read_until
from ..log.state import LogState, with_ids
from ..loop.tickets import checked_decisions
from ..tasks.task import TaskStatus
from .elsewhere import Elsewhere
from .inbox import Replied
from .live import LiveRun
from .reading import StoredEvents
from .registry import AgentRegistry
from .run import Opened, Run, result_at, result_or_cancel
from .stored_start import decode_start

if TYPE_CHECKING:
    from .dispatch import Dispatcher

_log = logging.getLogger(__name__)

KEPT_LOGS = 100
"""Ended runs whose events a runtime without a store still has in memory."""

Accepted = Callable[[RunIdentity, RunLog, int], None]
"""Called when a run was answered, with its identity, its log and the number of the last event before its new leg."""


def _ignore(*_: object) -> None:
    """Note nothing."""


class _Look:
    """Watches what only this process changes: by looking, as often as anybody needs to know it."""

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.1))


class LocalRuns:
    """The root runs that this process works on, and how to reach the others.

    Invariant: a run is in `_live` while this process owns its log; a run without a store stays there for a while after
    its end. Everything else is read from the store, every time. One event loop uses all of this; `share_memory` lets
    another loop see runs that are not at work.
    """

    def __init__(
        self,
        registry: AgentRegistry,
        store: Store,
        sinks: Iterable[Sink],
        lease: float,
        clock: Callable[[], float],
        max_takeovers: int = MAX_TAKEOVERS,
    ) -> None:
        self.registry, self.store, self.clock = registry, store, clock
        # Check one method only: a full protocol check takes longer than the rest of this.
        durable = cast("DurableStore", store) if hasattr(store, "begin_run") else None
        self.owner = None if durable is None else Owner(durable, lease)
        self.elsewhere = None if self.owner is None else Elsewhere(self, self.owner)
        self.probation = Probation(max_takeovers)
        self.dispatcher: Dispatcher | None = None
        """Gives runs to an engine, if there is one."""
        self.backend = registry.backend = LocalBackend(registry, store, sinks, clock)
        self.backend.run_alone = self.run_alone
        self.background = registry.background = LocalBackground(self.backend)
        self.gathering = Gathering()
        self._live: dict[str, LiveRun] = {}
        self._over: dict[str, None] = {}
        """Without a store: the runs in `_live` that are complete, the oldest first."""
        self._is_shared = False
        self.lend_slot: LendSlot | None = None
        """Of a worker: lends the slots of legs that only wait for work elsewhere."""
        self.is_closing = False
        """True if no new run may start here."""

    def use_engine(self, dispatcher: Dispatcher) -> None:
        """Have workers execute root runs, and children whose agents have a queue."""
        from .placed import Placement

        self.dispatcher = dispatcher
        self.registry.placement = Placement(self, dispatcher)

    def share_memory(self, other: LocalRuns) -> None:
        """Without a store, share the runs of this process with another event loop."""
        if self.owner is None:
            self._live, self._over = other._live, other._over
            self._is_shared = other._is_shared = True

    def get(self, run_id: str) -> LiveRun | None:
        """Return a run that this process has."""
        run = self._live.get(run_id)
        if self._is_shared and run is not None and not run.end.done() and not run.is_of_this_loop():
            raise RunElsewhere(
                run_id, "another thread of this process: it was started with run_sync, or from async code"
            )
        return run

    # --- starting

    def start(
        self,
        request: RunRequest,
        sinks: Sequence[Sink],
        when_busy: WhenBusy,
        *,
        new_thread: bool,
        saved_at: float | None = None,
    ) -> Run:
        """Start a run, or return the run that already has this id. A mistake in the request raises here."""
        identity = request.identity
        if (known := self.get(identity.run_id)) is not None:
            return self.handle(known)
        line = () if new_thread else self._line(identity.thread_id)
        if line and (when_busy == "reject" or not all(run.is_of_this_loop() for run in line)):
            raise ThreadBusy(identity.thread_id, line[0].run_id)
        writer = None if self.owner is None else LogWriter(identity.run_id, self.owner.store, gathering=self.gathering)
        log = self.make_log(writer, sinks=sinks)
        x = self.backend.open(request, log)
        record = RunRecord(
            identity=identity, started_at=self.clock(), log_id=identity.run_id, title=title_of(request.messages)
        )
        run = self.add(LiveRun(self, request, log, record, writer, x), stored=False)
        run.is_new_thread, run.thread_saved_at = new_thread, saved_at
        if self.owner is None:
            run.before, record.queued = list(line), bool(line)
            if when_busy == "interrupt":
                for earlier in run.before:
                    earlier.spawn(earlier.cancel("a newer run was started"))
        run.start(when_busy)
        return self.handle(run)

    async def run_alone(self, request: RunRequest) -> RunResult:
        """Execute a root run for a tool of another run.

        With an engine its log stays in memory: no worker would continue it.
        """
        if self.dispatcher is not None:
            return await self.backend.start_alone(request)
        given, request.cancellation = request.cancellation, CancellationToken()
        try:
            run = self._live[self.start(request, (), "reject", new_thread=not request.keeps_thread).run_id]
        except RetinueError as exc:
            raise ExecutionBackendError(request.agent.name, str(exc)) from exc
        if request.sink is not None:
            run.log.listen(run.run_id, request.sink)
        return await _result_for(run, given, request.timeout)

    def make_log(self, writer: LogWriter | None, tree: LogState | None = None, sinks: Sequence[Sink] = ()) -> LiveLog:
        store = None
        if self.owner is not None and writer is not None:
            store = StoreLog(self.owner.store, writer.log_id, self.clock, self.dispatcher)
        log = LiveLog((*self.backend.sinks, *sinks), tree, writer, self.clock, store)
        log.lend_slot = self.lend_slot
        return log

    def _line(self, thread_id: str) -> Sequence[LiveRun]:
        """Return the runs of this process that have a thread or wait for it; without a store, the first has it."""
        known = list(self._live.values())  # at once: another thread may add runs
        return [run for run in known if run.record.identity.thread_id == thread_id and not run.left.is_set()]

    async def threads(self, user_id: str | None = None, **wanted: Any) -> list[ThreadSummary]:
        """Return the threads that match, as `list_threads` of the store does."""
        if self.owner is None:
            for run in list(self._live.values()):
                _summarise(run)
        return await self.store.list_threads(user_id, **wanted)

    def watch_threads(self, user_id: str) -> AbstractContextManager[Watch]:
        """Watch the summaries of a user's threads."""
        return nullcontext(_Look()) if self.owner is None else self.owner.store.watch(f"{THREADS}{user_id}")

    async def messages(self, thread_id: str) -> tuple[Message, ...]:
        """Return the conversation that the ended runs of a thread left, then the input of each run that has not ended."""
        if self.owner is None:
            thread = await self.store.load_thread(thread_id)
            inputs = [(run.run_id, run.request.messages) for run in self._line(thread_id)]
        else:
            found = await self.owner.store.load_conversation(thread_id)
            thread = found.thread
            inputs = [(run_id, decode_start(request).messages) for run_id, request in found.requests]
        said = () if thread is None else thread.messages
        return (*said, *[message for run_id, given in inputs for message in with_ids(given, run_id)])

    def add(self, run: LiveRun, *, stored: bool = True) -> LiveRun:
        """Register a run and, if it is stored, read its inbox from now on."""
        self._live[run.run_id] = run
        if self.owner is not None and run.writer is not None:
            run.log.is_leaving = self.owner.is_leaving  # also if the process stops since the log was claimed
            run.writer.on_lost, run.writer.fresh_until = run.lose, self.owner.fresh_until
            if stored:
                self.owner.add(run.run_id, run)
        return run

    def handle(self, run: LiveRun) -> Run:
        identity = run.record.identity
        return Run(identity.run_id, identity.thread_id, identity.agent, self, run.end, (run.log, run.first))

    def has_others_at_work(self, run_id: str) -> bool:
        """Return whether a run other than this one is at work here."""
        return any(run.is_at_work for run in self._live.values() if run.run_id != run_id)

    async def end_solitude(self) -> None:
        """Note that no run is alone in this process any more."""
        for run in list(self._live.values()):
            await run.end_solitude()

    def leg_ended(self, run: LiveRun) -> None:
        """Forget a run that is done here; without a store, keep the last few that ended."""
        if self.probation.is_active:
            self.probation.leave(run.run_id)
        if not run.is_done:
            return
        run.drop_parts()
        if run.on_done is not None:
            run.on_done()
        if self.owner is not None:
            self.owner.remove(run.run_id)
            if self._live.get(run.run_id) is run:
                del self._live[run.run_id]
            return
        _summarise(run)
        self._over[run.run_id] = None
        while len(self._over) > KEPT_LOGS:
            oldest = next(iter(self._over))
            self._over.pop(oldest, None)
            self._live.pop(oldest, None)

    # --- continuing and answering

    async def recover(self) -> list[Run]:
        return [] if self.elsewhere is None else [self.handle(run) for run in await self.elsewhere.recover()]

    def keep_recovering(self) -> None:
        """Continue runs whose processes end or leave them while this one works."""
        if self.owner is not None and self.elsewhere is not None:
            self.owner.keep_recovering(self.elsewhere.recover, self.elsewhere.recover_left, self.elsewhere.pause)

    async def load(self, run_id: str) -> Run | None:
        run = self.get(run_id)
        while run is not None and run.is_storing:  # it may be released
            await run.stored()
            run = self.get(run_id)
        if run is None and self.dispatcher is not None:
            record = await self.record(run_id)
            return None if record.has_ended else self.dispatcher.handle(record)
        if run is None:
            run = await self._others(run_id).load(run_id)
        return None if run is None else self.handle(run)

    def _others(self, run_id: str) -> Elsewhere:
        """Return the runs that other processes own; raise UnknownRun if there is no store."""
        if self.elsewhere is None or id_problem(run_id) is not None:
            raise UnknownRun(run_id)
        return self.elsewhere

    def run_with(self, run_id: str) -> LiveRun | None:
        """Return the root run of this process whose log has a run: that run itself, or one above it."""
        if (run := self.get(run_id)) is not None:
            return run
        return next((run for run in self._live.values() if run_id in run.log.tree.runs), None)

    async def ask(self, run_id: str, command: Command, *, of_parent: bool = False) -> tuple[Reply, LiveRun | None]:
        """Have the owner of the log of a run carry out a command. Return its reply and, if that is this process, the root
        run of the log. Only the owner of the log of its parent (`of_parent`) decides for a placed run."""
        while (run := self.run_with(run_id)) is not None:
            if (reply := await run.inbox.put(command)) is not None:
                return reply, run
            if self.run_with(run_id) is run:  # it is lost, and there is no store
                break
        return await self._others(run_id).ask(run_id, command, of_parent=of_parent)

    def resume(self, run_id: str, decisions: Mapping[str, Decision]) -> Run:
        """Answer a suspended run and return a handle of its next leg. If this process owns the run and no leg is at work, the
        answer counts on return, or DecisionRefused raises."""
        command = Decide(run_id, decisions)
        run, replied = self._put(command)
        if (known := self._answered(command, run, replied)) is not None:
            return known
        opened: asyncio.Future[Opened | None] = asyncio.get_running_loop().create_future()

        def ended(done: asyncio.Task[RunResult]) -> None:
            if not opened.done():  # the answer was refused: nothing follows
                opened.set_result(None)
            if not done.cancelled():
                done.exception()  # mark it as retrieved

        def accepted(identity: RunIdentity, log: RunLog, first: int) -> None:
            handle.thread_id, handle.agent = identity.thread_id, identity.agent
            opened.set_result((log, first))

        end = asyncio.create_task(self._answer(command, run, replied, accepted), name=f"answer of {run_id}")
        end.add_done_callback(ended)
        handle = Run(run_id, "", "", self, end, opened)
        return handle

    async def answer(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """Answer a suspended run and return its next result. Cancelling the caller cancels a run that continues here at
        once; else only the wait ends, and the answer may count."""
        command = Decide(run_id, decisions)
        run, replied = self._put(command)
        known = self._answered(command, run, replied)
        return await (self._answer(command, run, replied) if known is None else result_or_cancel(known))

    def _put(self, command: Decide) -> tuple[LiveRun | None, Replied | None]:
        """Put an answer into the inbox of its log, if this process owns that; return the root run and the reply."""
        run = self.run_with(command.run_id)
        if run is None and self.elsewhere is None:
            raise UnknownRun(command.run_id)
        return run, None if run is None else run.inbox.put(command)

    def _answered(self, command: Decide, run: LiveRun | None, replied: Replied | None) -> Run | None:
        """Return a handle of the next leg of a root run, if its answer counts already; raise if the answer was refused."""
        reply = replied.result() if replied is not None and replied.done() else None
        if run is None or reply is None:
            return None
        if reply.refused:
            raise DecisionRefused(reply.refused)
        return self.handle(run) if run.run_id == command.run_id else None

    async def _answer(
        self, command: Decide, run: LiveRun | None, replied: Replied | None, accepted: Accepted = _ignore
    ) -> RunResult:
        """Return the next result of a run after an answer, which may wait in the inbox of `run`."""
        run_id = command.run_id
        reply = None if replied is None else await replied
        if reply is None or run is None:
            command = Decide(run_id, checked_decisions(command.decisions))
            reply, run = await self.ask(run_id, command)
        if reply.refused:
            raise DecisionRefused(reply.refused)
        if run is None:
            record = await self.record(run_id)
            accepted(record.identity, self.stored_log(record.log_id), reply.place)
            return await self._others(run_id).wait_for_end(run_id, record.log_id)
        accepted(run.log.tree.runs[run_id].identity, run.log, reply.place)
        if run.run_id == run_id:
            return await self.handle(run).result()
        return await self._child_result(run.log, run_id)

    async def _child_result(self, log: LiveLog, run_id: str) -> RunResult:
        """Return the result of the present leg of a run below a root of this process."""
        if log.tree.runs[run_id].status is RunStatus.RUNNING:
            async for _ in read_until(log.read(log.tree.seq, live=True), leg_of(run_id)):
                pass
        return log.results[run_id] if run_id in log.results else await self.result(run_id)

    async def wait_until_stored(self, run_id: str, end: asyncio.Future[RunResult]) -> None:
        """Return once the start of a run is stored; raise if it was refused."""
        live = self.run_with(run_id)
        if live is None:
            if end.done() and not isinstance(end.exception(), OwnershipLost):
                end.result()
        elif live.writer is None:
            await self.store.save_run(live.record)
        elif live.is_adopted or live.first > 0:
            await asyncio.sleep(0)  # the new leg begins with what it stores
            await live.writer.flush()
        else:
            await asyncio.wait({live.begun, end}, return_when=asyncio.FIRST_COMPLETED)
            (live.begun if live.begun.done() else end).result()

    async def cancel(self, run_id: str, reason: str, grace: float, tasks: bool, ns: Namespace = ()) -> RunResult:
        """Stop a run of any process, or the run at a namespace below it, and wait for its end."""
        if ns:
            reply, _ = await self.ask(run_id, Cancel(reason=reason, grace=grace, tasks=tasks, ns=ns))
            if reply.code == NOT_FOUND:
                raise UnknownRun("|".join((run_id, *ns)))
            if reply.code == NOT_REACHABLE:
                raise ConfigurationError(reply.refused)
            log = self.log(await self._log_id(run_id))
            return await result_at(read_until(log.read(live=True)), ns, grace, log.results)
        if self.get(run_id) is None and (log_id := await self._log_id(run_id)) != run_id:
            raise ConfigurationError(f"run {run_id!r} is in the background of {log_id!r}: cancel its task")
        _, run = await self.ask(run_id, Cancel(reason=reason, grace=grace, tasks=tasks))
        return await (self.result(run_id) if run is None else self.handle(run).result())

    async def _log_id(self, run_id: str) -> str:
        if (run := self.run_with(run_id)) is not None and run.run_id == run_id:
            return run_id
        return (await self.record(run_id)).log_id or run_id

    async def send(self, run_id: str, messages: tuple[Message, ...], ns: Namespace = ()) -> None:
        """Give a run of any process, or the run at a namespace below it, messages for its next request."""
        reply, _ = await self.ask(run_id, Say(messages, ns))
        where = "|".join((run_id, *ns))
        if reply.code == NOT_FOUND:
            raise UnknownRun(where)
        if reply.code == NOT_REACHABLE:
            raise ConfigurationError(reply.refused)
        if reply.refused:
            raise RunEnded(where, reply.refused)

    async def cancel_task(self, run_id: str, task_id: str) -> TaskStatus:
        """Stop a background task of any process, and return its status."""
        log, refused = StoredEvents(self, run_id), ""
        if not (await log.task_status(task_id)).is_terminal:
            try:
                reply, _ = await self.ask(run_id, CancelTask(task_id))
                refused = reply.refused
            except RunElsewhere as exc:  # the log may have ended meanwhile, with the task
                refused = str(exc)
        status = await log.task_status(task_id)
        if refused and not status.is_terminal:
            raise RunElsewhere(run_id, refused)
        return status

    # --- reading

    async def result(self, run_id: str) -> RunResult:
        """Wait until a run of any process has ended or is suspended, and return its result."""
        run = self.get(run_id)
        if run is not None:
            return await self.handle(run).result()
        return await self._others(run_id).result(run_id)

    def log(self, log_id: str) -> LiveLog | StoreLog:
        """Return the log of a root run: the one in memory if this process owns it, else the one in the store."""
        run = self.get(log_id)
        return self.stored_log(log_id) if run is None else run.log

    def stored_log(self, log_id: str) -> StoreLog:
        return StoreLog(self._others(log_id).owner.store, log_id, self.clock, self.dispatcher)

    def events(self, log_id: str, after: int) -> AsyncGenerator[Event]:
        """Yield the stored events of a log after a number until it ends, and why none come."""
        return read_until(self.log(log_id).read(after), notices=True)

    def typed(self, record: RunRecord) -> RunResult:
        """Return a stored result, with its output as the type that its agent gives."""
        assert record.result is not None
        return typed(record.result, self.registry.agents.get(record.identity.agent))

    async def record(self, run_id: str) -> RunRecord:
        if self.dispatcher is not None:
            await self.dispatcher.wait_until_begun(run_id)
        record = None if id_problem(run_id) else await self.store.load_run(run_id)
        if record is None:
            raise UnknownRun(run_id)
        return record

    # --- closing

    async def leave(self, grace: float, *, only_adopted: bool = False) -> None:
        """Begin nothing more; let what runs finish for `grace` seconds, and leave the runs to other processes."""
        self.is_closing = True
        if self.owner is None:
            return
        for run in self._to_leave(only_adopted):
            run.log.is_leaving = True
        await self.owner.stop_recovering()
        left = set[LiveRun]()
        # Each turn leaves the runs that were taken over since the turn before.
        while new := self._to_leave(only_adopted) - left:
            left |= new
            for problem in await asyncio.gather(*[run.leave(grace) for run in new], return_exceptions=True):
                if isinstance(problem, RetinueError):
                    _log.error("a run could not be handed over: %s", problem)

    def _to_leave(self, only_adopted: bool) -> set[LiveRun]:
        return {run for run in self._of_this_loop() if run.is_adopted or not only_adopted}

    async def close(self, grace: float, *, leave: bool) -> None:
        """Stop the runs at work, or leave them to other processes. Stored runs that wait stay as they are."""
        live, self.is_closing = self._of_this_loop(), True
        async with running(self.leave(grace, only_adopted=not leave)) as leaving:
            if not leave:
                own = [run for run in live if not (run.is_adopted or run.is_done)]
                at_work = [run for run in own if self.owner is None or not run.waits]
                ends = [run.cancel("the runtime was closed", grace) for run in at_work]
                for end in await asyncio.gather(*ends, return_exceptions=True):
                    if isinstance(end, RetinueError):
                        _log.error("a run could not be ended as the runtime was closed: %s", end)
            await leaving
        await self.background.close(grace)
        await self.backend.close(grace)
        jobs = Jobs("a run could not be stored as the runtime was closed")
        for run in live:
            jobs.start(run.put_down())
        await join(jobs, grace)
        if self.owner is not None:
            await self.owner.close()
            with contextlib.suppress(RetinueError):
                await self.owner.store.renew(self.owner.id, 0.0)  # logs that are still its own can be claimed at once

    def _of_this_loop(self) -> list[LiveRun]:
        return [run for run in self._live.values() if run.is_of_this_loop()]


async def _result_for(run: LiveRun, given: CancellationToken, timeout: float | None) -> RunResult:
    """Return the result of a run to the tool that started it. The run ends with the call, or after `timeout` seconds."""
    loop, end = asyncio.get_running_loop(), run.end

    def stop() -> None:
        loop.call_soon_threadsafe(lambda: run.spawn(run.cancel(given.reason or "cancelled")))

    with given.calling(stop):
        try:
            return end.result() if await join([end], timeout) else await run.cancel(TIMED_OUT)
        except ThreadBusy as exc:
            raise ExecutionBackendError(run.request.agent.name, str(exc)) from exc
        except asyncio.CancelledError:
            if not end.done():
                with contextlib.suppress(RetinueError):
                    await run.cancel(given.reason or "cancelled")
            raise


def _summarise(run: LiveRun) -> None:
    """Note in the record of a run how its log stands, where no writer stores that."""
    record, tree = run.record, run.log.tree
    record.summary = tree.summary() if tree.runs else LogSummary(status="queued" if record.queued else "running")
