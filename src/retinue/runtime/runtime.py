"""Runtime: takes agents, gives runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Literal

from ..core.agents import Agent
from ..core.backend import Backend, ChildInput, RunRequest
from ..core.context import GRACE, CancellationToken
from ..core.decisions import Decision
from ..core.errors import ConfigurationError
from ..core.events import Event, Sink
from ..core.ids import unique
from ..core.messages import as_messages
from ..core.model import Model
from ..core.runs import Limits, RunIdentity, RunResult
from ..core.state import Seed, as_persisted
from ..core.stores import Durability, Retention, Store, WhenBusy
from ..loop.state import RunState
from ..models.prices import Price
from ..storage.stores import MemoryStore, open_store
from .owner import LEASE
from .registry import AgentRegistry
from .run import Run
from .runs import LocalRuns

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
        price: Price | None = None,
        recover: bool = True,
        lease: float = LEASE,
        retention: Retention | None = None,
        on_close: OnClose = "cancel",
        backends: Mapping[str, Backend] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_close` says what happens to runs and tasks at work when the runtime is closed: with "leave", and a store,
        they stop where they are and the next process continues them. `recover`: continue runs whose processes have
        ended. `lease`: seconds after which a process without a sign of life counts as dead. `retention`: how long ended
        runs are kept; for ever if not given. `backends`: what executes agents that name one of them.
        """
        self._registry = AgentRegistry(price, backends)
        for agent in agents:
            self._registry.take(agent)
        self._runs = LocalRuns(self._registry, store or MemoryStore(), sinks, lease, clock, self)
        self._recovers, self._retention, self._on_close = recover, retention, on_close
        self._pruning: asyncio.Task[None] | None = None
        if on_close not in ("cancel", "leave"):
            raise ConfigurationError(f"on_close is 'cancel' or 'leave', not {on_close!r}")
        if on_close == "leave" and self._runs.durable is None:
            raise ConfigurationError(
                "on_close='leave' needs a store that others can continue from: use Runtime.open(url)"
            )
        self._closed = False

    @classmethod
    def open(
        cls, url: str, agents: Iterable[Agent] = (), *, durability: Durability = "process", **options: Any
    ) -> Runtime:
        """A runtime that stores threads, runs and events, and continues the runs of processes that have ended.

        The URL is `sqlite:///app.db`, `postgresql://…`, or `memory:` for none of it.
        """
        return cls(agents, store=open_store(url, durability), **options)

    async def __aenter__(self) -> Runtime:
        runs = self._runs
        if runs.durable is not None and runs.owner is not None:
            await runs.durable.open()
            if self._recovers:
                await runs.recover()
                runs.owner.keep_recovering(runs.recover)
            if self._retention is not None:
                self._pruning = self._prune(self._retention)
        return self

    def _prune(self, retention: Retention) -> asyncio.Task[None]:
        """From time to time, drop what is left of runs that ended long ago."""
        from ..storage.prune import keep_pruning
        from ..storage.sql import SqlStore

        if not isinstance(self.store, SqlStore):
            raise ConfigurationError(f"retention is for databases, which {self.store!r} is not")
        return asyncio.create_task(keep_pruning(self.store, retention), name="retinue-pruning")

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def agents(self) -> Mapping[str, Agent]:
        return self._registry.agents

    @property
    def store(self) -> Store:
        """The store of threads, runs and events."""
        return self._runs.store

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
        made = unique()
        identity = RunIdentity(
            run_id=f"run_{made}", thread_id=thread_id or f"thread_{made}", agent=spec.name, user_id=user_id
        )
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
        return self._runs.start(request, tuple(sinks), when_busy, new_thread=thread_id is None)

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
        """Continue a suspended run, and return the handle of what follows. Keys are call ids or ticket ids.

        Without a store, a decision that does not fit raises here and changes nothing. With a store, the run may be
        another process's: then `result` of the handle raises.
        """
        here = self._runs.resume_here(run_id, decisions)
        if here is not None:
            return here
        return self._runs.resume_elsewhere(run_id, decisions)

    async def resume(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """Continue a suspended run, and wait for the end or for the next time it waits.

        The run may be another process's, or a background child: its id is in its events and in its task's record.
        """
        here = self._runs.resume_here(run_id, decisions)
        if here is not None:
            return await _result_or_cancel(here)
        return await self._runs.inbox.answer(run_id, decisions)

    async def load(self, run_id: str) -> Run | None:
        """Continue a run here whose process has ended; None where the run has ended.

        Raises RunElsewhere where another process works on it.
        """
        return await self._runs.load(run_id)

    async def state_at(self, run_id: str, seq: int) -> RunState:
        """Return the state of a run as it was after event number `seq` of its log."""
        return await self._runs.state_at(run_id, seq)

    async def fork(
        self,
        run_id: str,
        *,
        at: int,
        input: RunInput | None = None,
        decisions: Mapping[str, Decision] | None = None,
    ) -> Run:
        """Start a new run, on a new thread, that continues as another stood after event number `at`.

        It goes on as that run did, with other input or other decisions where given; calls that had ended are not made
        again. Possible between two steps, where the run waits, and after its end; elsewhere the error names the
        nearest places.
        """
        return await self._runs.fork(run_id, at, () if input is None else as_messages(input), decisions)

    async def recover(self) -> list[Run]:
        """Continue the runs whose processes have ended; those that this process has taken over."""
        return await self._runs.recover()

    async def result(self, run_id: str) -> RunResult:
        """Return how a run ended, or where it waits, whichever process works on it."""
        return await self._runs.result(run_id)

    def events(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The log of a run after event number `after`: what is there, then what comes, until every task has ended.

        With a store the run may be another process's, or one that ended long ago.
        """
        return self._runs.events(run_id, after)

    async def cancel(
        self, run_id: str, *, tasks: bool = False, grace: float = GRACE, reason: str = "cancelled"
    ) -> RunResult:
        """Stop a run and what it waits for, and wait for its end; background tasks only with `tasks`.

        The run may be another process's, which is then asked to.
        """
        return await self._runs.cancel(run_id, reason, grace, tasks)

    async def close(self, grace: float = GRACE) -> None:
        """Stop every run and take no more. What waits for a human stays as it is where it is stored.

        What runs ends as cancelled; with `on_close="leave"` it is left to the next process that opens the store.
        """
        self._closed = True
        if self._pruning is not None:
            self._pruning.cancel()
        try:
            await self._runs.close(grace, leave=self._on_close == "leave")
        finally:
            await self._registry.close()
            if self._runs.durable is not None:
                await self._runs.durable.close()


async def _result_or_cancel(run: Run) -> RunResult:
    """Wait for a run that belongs to this caller: cancelling the caller cancels the run."""
    try:
        return await run.result()
    except asyncio.CancelledError:
        await run.cancel("the caller was cancelled")
        raise
