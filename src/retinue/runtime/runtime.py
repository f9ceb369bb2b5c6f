"""Runtime: takes agents, gives runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Literal, cast

from ..backends.background import LocalBackground
from ..backends.local import LocalBackend
from ..core.agents import Agent
from ..core.backend import ChildInput, RunRequest
from ..core.context import GRACE, CancellationToken
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, DecisionRefused, RunElsewhere, ThreadBusy, UnknownRun
from ..core.events import Event, Sink
from ..core.journal import Journal
from ..core.messages import as_messages
from ..core.model import Model
from ..core.runs import Limits, RunIdentity, RunResult
from ..core.state import Seed, as_persisted
from ..core.stores import Durability, DurableStore, Retention, Store, WhenBusy
from ..loop.log import EventLog
from ..models.prices import Price
from ..storage.journal import MemoryJournal
from ..storage.logs import stored_events
from ..storage.memory import MemoryStore
from ..storage.urls import open_store
from .keeping import LEASE, StoreKeeping
from .registry import AgentRegistry
from .run import Run
from .stored import StoredRuns

KEPT_RUNS = 1_000
"""Finished runs whose events a runtime still has in memory."""

RunInput = ChildInput
OnClose = Literal["cancel", "leave"]


class Runtime:
    """Holds agents and runs them. Without a store, everything stays in this process."""

    def __init__(
        self,
        agents: Iterable[Agent] = (),
        *,
        store: Store | None = None,
        sinks: Iterable[Sink] = (),
        make_journal: Callable[[], Journal] = MemoryJournal,
        price: Price | None = None,
        recover: bool = True,
        lease: float = LEASE,
        retention: Retention | None = None,
        on_close: OnClose = "cancel",
    ) -> None:
        """`on_close`: what becomes of runs and tasks that are at work when it is closed. With "leave", and a store that
        keeps them, they stop where they are and the next process goes on with them. `recover`: go on with runs whose processes have ended. `lease`: seconds after which a process that shows no
        sign of life counts as one that has. `retention`: for how long ended runs are kept; for ever if not given."""
        self._registry = AgentRegistry(price)
        for agent in agents:
            self._registry.take(agent)
        self._store: Store = store if store is not None else MemoryStore()
        self._sinks = tuple(sinks)
        self._make_journal = make_journal
        self._backend = self._registry.backend = LocalBackend(self._registry, make_journal, self._store, self._sinks)
        self._background = self._registry.background = LocalBackground(self._backend)
        self._runs: dict[str, Run] = {}
        self._lines: dict[str, list[Run]] = {}
        """The runs of each thread: the first has it, the others wait for their turn."""
        # By one name: asking whether it has all that the protocol names takes longer than the rest of this.
        durable = cast("DurableStore", store) if hasattr(store, "begin_run") else None
        self._stored = None if durable is None else StoredRuns(durable, lease, self._backend, self._registry, self)
        self._recovers, self._retention, self._on_close = recover, retention, on_close
        if on_close not in ("cancel", "leave"):
            raise ConfigurationError(f"on_close is 'cancel' or 'leave', not {on_close!r}")
        if on_close == "leave" and durable is None:
            raise ConfigurationError("on_close='leave' needs a store that others can go on from: use Runtime.open(url)")
        self._closed = False

    @classmethod
    def open(
        cls, url: str, agents: Iterable[Agent] = (), *, durability: Durability = "process", **options: Any
    ) -> Runtime:
        """A runtime that keeps threads, runs and events, and goes on with the runs of processes that have ended:
        `sqlite:///app.db`, `postgresql://…`, or `memory:` for none of it."""
        return cls(agents, store=open_store(url, durability), **options)

    async def __aenter__(self) -> Runtime:
        if self._stored is not None:
            await self._stored.store.open()
            if self._recovers:
                await self.recover()
                self._stored.keep_recovering()
            if self._retention is not None:
                self._stored.keep_pruning(self._retention)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def agents(self) -> Mapping[str, Agent]:
        return self._registry.agents

    @property
    def store(self) -> Store:
        """Where things are kept."""
        return self._store

    def stream(
        self,
        agent: str | Agent,
        input: RunInput,
        *,
        thread_id: str | None = None,
        user_id: str | None = None,
        context: Mapping[str, Any] | None = None,
        state: Seed | None = None,
        limits: Limits | None = None,
        model: str | Model | None = None,
        sinks: Iterable[Sink] = (),
        when_busy: WhenBusy = "reject",
    ) -> Run:
        """Start a run and return its handle at once. Whatever is wrong with the request raises here.

        `when_busy` says what happens where another run has the thread: this one is refused, waits, or ends the other.
        """
        if self._closed:
            raise ConfigurationError("this runtime is closed")
        if when_busy not in ("reject", "enqueue", "interrupt"):
            raise ConfigurationError(f"when_busy is 'reject', 'enqueue' or 'interrupt', not {when_busy!r}")
        spec = self._registry.find(agent)
        journal = self._make_journal()
        run_id = journal.new_id("run")
        identity = RunIdentity(
            run_id=run_id, thread_id=thread_id or journal.new_id("thread"), agent=spec.name, user_id=user_id
        )
        spec.check_thread(identity.thread_id)
        line = self._lines.get(identity.thread_id)
        if line and when_busy == "reject":
            raise ThreadBusy(identity.thread_id, line[0].run_id)
        request = RunRequest(
            agent=spec,
            identity=identity,
            messages=as_messages(input),
            seed=as_persisted(state),
            limits=limits or spec.limits,
            cancellation=CancellationToken(),
            context=context or {},
            model=model,
        )
        log = EventLog((*self._sinks, *sinks))
        before = None if not line else asyncio.create_task(self._turn(list(line), when_busy))
        if self._stored is None:
            local = self._backend.open(request, journal, log)
            run = Run(local, self._backend, StoreKeeping(self._store), self.run_ended, before=before)
        else:
            run = self._stored.start(request, log, when_busy, before, line[-1] if line else None)
        self.take(run)
        return run

    async def _turn(self, earlier: list[Run], when_busy: WhenBusy) -> None:
        """Wait for the runs of a thread that came before."""
        if when_busy == "interrupt":
            await asyncio.gather(*[run.cancel("a newer run was started") for run in earlier], return_exceptions=True)
        for run in earlier:
            await asyncio.shield(run.left)

    def take(self, run: Run) -> None:
        """Know a run, and that it has its thread or waits for it."""
        self._runs[run.run_id] = run
        if run.is_over:
            return
        line = self._lines.setdefault(run.thread_id, [])
        if not any(known.run_id == run.run_id for known in line):
            line.append(run)

    async def run(
        self,
        agent: str | Agent,
        input: RunInput,
        *,
        thread_id: str | None = None,
        user_id: str | None = None,
        context: Mapping[str, Any] | None = None,
        state: Seed | None = None,
        limits: Limits | None = None,
        model: str | Model | None = None,
        sinks: Iterable[Sink] = (),
        when_busy: WhenBusy = "reject",
    ) -> RunResult:
        """As `stream`, and wait for the end. Cancelling the caller cancels the run."""
        run = self.stream(
            agent,
            input,
            thread_id=thread_id,
            user_id=user_id,
            context=context,
            state=state,
            limits=limits,
            model=model,
            sinks=sinks,
            when_busy=when_busy,
        )
        return await _result_or_cancel(run)

    def stream_resume(self, run_id: str, decisions: Mapping[str, Decision]) -> Run:
        """Go on with a suspended run, and return the handle of what follows. Keys are call ids or ticket ids.

        A decision that does not fit is refused here and changes nothing; one that was taken in before is ignored.
        A run that another process left waiting is brought here by `load` first.
        """
        found = self._find(run_id)
        run = found.resumed(decisions)
        self._runs[run_id] = run
        self._lines[run.thread_id] = [run if kept is found else kept for kept in self._lines.get(run.thread_id, [run])]
        if self._stored is not None and run is not found:
            self._stored.node.take(run)
        return run

    async def resume(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """As `stream_resume`, and wait for the end or for the next time it waits. The run may be another process's.

        It may also be a background child: the id is in its events and, as the run id, in its task's record.
        Where another process works on it, because of its tasks for one, that process does it and this one waits.
        """
        if run_id not in self._runs and (answered := await self._background.answer(run_id, decisions)) is not None:
            return answered
        try:
            run = await self.load(run_id)
        except (RunElsewhere, UnknownRun):
            if self._stored is None:
                raise
            answered = await self._stored.asking.ask(run_id, decisions)
            if answered is not None:
                return answered
            run = await self.load(run_id)  # nobody is there to ask any more
        if run is not None:
            try:
                next_leg = self.stream_resume(run_id, decisions)
            finally:
                if self._runs[run_id] is run:
                    run.let_go()
            return await _result_or_cancel(next_leg)
        assert self._stored is not None
        record = await self._stored.record(run_id)
        assert record.result is not None
        if all((target, decision.id) in record.decided for target, decision in decisions.items()):
            return record.result
        raise DecisionRefused(f"run {run_id!r} is {record.result.status}, it waits for nothing")

    def awaits(self, run_id: str) -> bool | None:
        """Whether a run waits for a human in this process; None where it is not in this process."""
        if self._background.has(run_id):
            return True
        run = self._runs.get(run_id)
        is_ours = run is not None and self._stored is not None and run_id in self._stored.node.runs
        return run.waits if run is not None and is_ours else None

    async def load(self, run_id: str) -> Run | None:
        """Bring a run that waits, or whose process has ended, into this process; None where it has ended.

        It stays here until it is answered or cancelled, or this runtime is closed. Raises RunElsewhere where another
        process is at work on it.
        """
        known = self._runs.get(run_id)
        run = await self._bring(run_id)
        if run is not None and run is known:
            await run.come_up_to_date()
        elif run is not None:
            await run.settled()
            if run.failure is not None:
                raise run.failure
        return run

    async def _bring(self, run_id: str) -> Run | None:
        """As `load`, without waiting until it has come to where it was."""
        known = self._runs.get(run_id)
        if self._stored is None or not (known is None or known.is_lost or await self._stored.is_old(known)):
            return self._find(run_id)
        return await self._stored.load(run_id)

    async def recover(self) -> list[Run]:
        """Go on with the runs that processes left which have ended; those that this one has taken up."""
        return [] if self._stored is None else await self._stored.recover()

    async def result(self, run_id: str) -> RunResult:
        """How a run ended, or where it waits, whichever process works on it."""
        if run_id in self._runs or self._stored is None:
            return await self._find(run_id).result()
        return await self._stored.result(run_id)

    def events(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The log of a run after event number `after`: what is there, then what comes, until every task has ended.

        With a store that keeps events the run may be another process's, or one that ended long ago.
        """
        if run_id not in self._runs and self._stored is not None:
            return stored_events(self._stored.store, run_id, after)
        return self._find(run_id).follow(after)

    async def cancel(
        self, run_id: str, *, tasks: bool = False, grace: float = GRACE, reason: str = "cancelled"
    ) -> RunResult:
        """Stop a run and what it waits for, and wait for its end; background tasks only with `tasks`.

        The run may be another process's, which is then asked to.
        """
        if run_id not in self._runs and self._stored is not None and await self._stored.is_elsewhere(run_id):
            return await self._stored.cancel(run_id, reason, grace)
        run = await self._bring(run_id)
        if run is None:
            return await self.result(run_id)
        result = await run.cancel(reason, grace=grace)
        if tasks:
            await run.cancel_tasks()
        return result

    async def close(self, grace: float = GRACE) -> None:
        """Stop every run and take no more. What waits for a human stays as it is where it is stored.

        What runs ends as cancelled; with `on_close="leave"` it is left to the next process that opens the store.
        """
        self._closed = True
        reason, stored = "the runtime was closed", self._stored is not None
        if self._stored is not None and self._on_close == "leave":
            self._background.leave()
            await self._stored.leave()
        at_work = [run for line in self._lines.values() for run in line if not (stored and run.waits)]
        await asyncio.gather(*[run.cancel(reason, grace) for run in at_work])
        await self._background.close(grace)
        await self._backend.close(grace)
        await self._registry.close()
        if self._stored is not None:
            await self._stored.close(list(self._runs.values()), grace)

    def _find(self, run_id: str) -> Run:
        if run_id not in self._runs:
            raise UnknownRun(run_id)
        return self._runs[run_id]

    def run_ended(self, run: Run, waits: bool) -> None:
        """A run, or a leg of it, has ended."""
        if self._stored is not None:
            self._stored.ended(run)
        if not waits:
            line = [kept for kept in self._lines.get(run.thread_id, ()) if kept.run_id != run.run_id]
            if line:
                self._lines[run.thread_id] = line
            else:
                self._lines.pop(run.thread_id, None)
            if not run.left.done():
                run.left.set_result(None)
        while len(self._runs) > KEPT_RUNS + len(self._lines):
            oldest = next((key for key, kept in self._runs.items() if kept.ended and not kept.waits), None)
            if oldest is None:
                return
            del self._runs[oldest]


async def _result_or_cancel(run: Run) -> RunResult:
    """The end of a run that belongs to whoever waits here: giving up waiting is giving up the run."""
    try:
        return await run.result()
    except asyncio.CancelledError:
        await run.cancel("the caller was cancelled")
        raise
