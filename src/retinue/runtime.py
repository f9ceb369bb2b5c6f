"""Runtime: takes agents, gives runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, cast

from .backends.background import LocalBackground
from .backends.local import LocalBackend, LocalRun
from .backends.task_client import HttpTaskClient
from .backends.tasks_http import TaskHttpBackend
from .core.agents import Agent
from .core.backend import ExecutionPlan, RunRequest
from .core.children import Child, ParentContext
from .core.context import GRACE, CancellationToken, ToolContext
from .core.decisions import Decision
from .core.errors import ConfigurationError, ThreadBusy, UnknownAgent, UnknownRun
from .core.events import Event, Sink
from .core.journal import Journal
from .core.lifecycle import RunStatus
from .core.messages import Message, as_messages
from .core.model import Model
from .core.runs import Limits, RunIdentity, RunResult, Usage
from .core.state import PersistedState, Seed, as_persisted
from .core.stores import Durability, DurableStore, EventStore, RunRecord, Store
from .loop.handles import ChildHandle, children_of
from .models.prices import Price, ask_price
from .models.registry import OpenModels
from .storage.journal import MemoryJournal
from .storage.logs import LogWriter, stored_events
from .storage.memory import MemoryStore
from .storage.urls import open_store
from .subagents.child import run_child_agent, run_children
from .subagents.remote import RemoteSubagentStub
from .wire.parts import Mode, PartsProjection, StreamPart

_log = logging.getLogger(__name__)


KEPT_RUNS = 1_000
"""Finished runs whose events a runtime still has in memory."""

RunInput = str | Message | Iterable[Message]


class AgentRegistry:
    """The agents of a runtime, with those they name as objects, their models, and how they are run as children."""

    def __init__(self, price: Price | None) -> None:
        self.agents: dict[str, Agent] = {}
        self._price, self.prices = price, price is not None
        self._unpriced: set[str] = set()
        self.backend: LocalBackend | None = None
        self.background: LocalBackground | None = None
        self._remotes: dict[Any, TaskHttpBackend] = {}
        self._models = OpenModels()

    def take(self, agent: Any) -> None:
        """Add an agent; two of one name are an error."""
        if not isinstance(agent, Agent):
            raise ConfigurationError(f"not an agent: {agent!r}")
        if self.agents.get(agent.name) is agent:
            return
        if agent.name in self.agents:
            raise ConfigurationError(f"two agents are named {agent.name!r}: rename one")
        agent.check()
        self.agents[agent.name] = agent
        self._take_linked(agent)

    def _take_linked(self, agent: Agent) -> None:
        for target in agent.linked():
            if self.agents.get(target.name) is not target:
                self.take(target)

    def find(self, agent: str | Agent) -> Agent:
        """The agent of that name; one given as an object need not be known."""
        if isinstance(agent, Agent):
            return agent
        return self.agent(agent)

    def resolve(self, agent: str | Agent) -> ExecutionPlan:
        assert self.backend is not None
        found = self.find(agent)
        if isinstance(found, RemoteSubagentStub):
            return ExecutionPlan(found, self._remote(found), is_local=False)
        return ExecutionPlan(found, self.backend)

    def _remote(self, stub: RemoteSubagentStub) -> TaskHttpBackend:
        """The backend of an agent on a server; one for each, so that connections are used again."""
        assert self.backend is not None
        key = (stub.name, stub.url, tuple((stub.headers or {}).items()))
        made = self._remotes.get(key)
        if made is None:
            client = HttpTaskClient(stub.url, stub.headers, stub.name)
            made = self._remotes[key] = TaskHttpBackend(client, stub.name, self.backend)
        return made

    async def close(self) -> None:
        """Close the connections to servers."""
        await asyncio.gather(self._models.close(), *[backend.client.close() for backend in self._remotes.values()])

    def price(self, model: str, usage: Usage) -> float | None:
        """What a call costs. That a price function does not know a model, or fails for it, is told once."""
        if self._price is None:
            return None
        cost, problem = ask_price(self._price, model, usage)
        if cost is None and model not in self._unpriced:
            self._unpriced.add(model)
            told = "the price of model %r is not known%s: its calls count as 0. Give Runtime(price=…) its price"
            _log.warning(told, model, problem)
        return cost

    def refuse_child(self, ctx: ToolContext) -> tuple[str, int] | None:
        assert self.backend is not None
        return self.backend.refuse_child(ctx.run.run_id)

    def run_child(
        self, ctx: ToolContext, agent: str | Agent, input: RunInput, **options: Any
    ) -> Coroutine[Any, Any, RunResult]:
        return run_child_agent(self, agent, input, parent=ParentContext.of(ctx), **options)

    def run_children(
        self, ctx: ToolContext, children: Sequence[Child], **options: Any
    ) -> Coroutine[Any, Any, list[RunResult]]:
        return run_children(ctx, children, **options)

    def agent(self, name: str) -> Agent:
        if name not in self.agents:
            raise UnknownAgent(name, tuple(self.agents))
        return self.agents[name]

    def model_of(self, agent: Agent, override: str | Model | None = None) -> Model:
        return self._models.resolve(agent.model if override is None else override, f"agent {agent.name!r}")


class Run:
    """A run in progress. Iterate it for events; leaving the iteration does not stop it."""

    def __init__(
        self,
        local: LocalRun,
        backend: LocalBackend,
        store: Store,
        on_end: Callable[[Run, bool], None],
        decisions: Mapping[str, Decision] | None = None,
        writer: LogWriter | None = None,
    ) -> None:
        self._local, self._backend, self._store, self.writer = local, backend, store, writer
        self._on_end, self._decisions = on_end, decisions
        self._first = len(local.log.events)
        identity = local.request.identity
        self.run_id, self.thread_id, self.agent = identity.run_id, identity.thread_id, identity.agent
        self._record = RunRecord(identity=identity, started_at=local.journal.now())
        self._next_leg: Run | None = None
        self._settling = False
        if writer is not None:
            writer.start()
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[RunResult] = loop.create_future()
        self._task = loop.create_task(self._conduct(), name=self.run_id)

    def __repr__(self) -> str:
        return f"<Run {self.run_id} of {self.agent!r}>"

    @property
    def journal(self) -> Journal:
        """What this run learned from outside."""
        return self._local.journal

    @property
    def ended(self) -> bool:
        return self._end.done()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._local.log.follow(self._first, self.run_id)

    async def parts(self, modes: Mode | Iterable[Mode] = ("updates",)) -> AsyncIterator[StreamPart]:
        """The events as LangGraph-shaped parts."""
        project = PartsProjection(modes)
        async for event in self:
            for part in project(event):
                yield part

    @property
    def children(self) -> AsyncIterator[ChildHandle]:
        """The children of this run, as they start."""
        return children_of(self._local.log, self.run_id)

    def follow(self, after: int = 0) -> AsyncIterator[Event]:
        """The log after event number `after`: what is there, then what comes."""
        return self._local.log.follow(after)

    async def result(self) -> RunResult:
        """Wait for the end. Giving up waiting does not stop the run."""
        return await asyncio.shield(self._end)

    def resumed(self, decisions: Mapping[str, Decision]) -> Run:
        """The next leg of a suspended run; itself where the decisions were taken in before."""
        fresh = self._local.match(decisions)
        if not fresh:
            return self
        self._local.log.reopen()
        self._next_leg = Run(self._local, self._backend, self._store, self._on_end, fresh, self.writer)
        return self._next_leg

    @property
    def waits(self) -> bool:
        """Whether it is suspended, and nobody has answered."""
        if self._next_leg is not None or not self._end.done() or self._end.cancelled() or self._end.exception():
            return False
        return self._end.result().status is RunStatus.SUSPENDED

    async def cancel(self, reason: str = "cancelled", grace: float = GRACE) -> RunResult:
        """Stop the model and the tools, and wait for the end; what does not stop in time is left behind."""
        if self._next_leg is not None:
            return await self._next_leg.cancel(reason, grace)
        if self.waits:
            return await self._give_up(reason)
        if not self._end.done():
            self._local.request.cancellation.set(reason)
            # Before the loop has begun it sees for itself that it need not; once it has ended there is nothing to stop.
            if self._local.scope is not None and not self._settling:
                self._task.cancel(reason)
            await asyncio.wait({self._task}, timeout=grace)
            if not self._end.done() and not self._settling:
                await self._leave_behind(reason)
        return await self.result()

    @property
    def tasks(self) -> int:
        """How many background tasks that were started under it have not ended."""
        return len(self._local.log.holders)

    async def cancel_tasks(self) -> None:
        """Stop the background tasks that were started under this run."""
        await asyncio.gather(*[cancel("cancelled") for cancel in list(self._local.log.holders.values())])

    async def _give_up(self, reason: str) -> RunResult:
        """End a run that waits for an answer which will not come."""
        self._local.request.cancellation.set(reason)
        self._local.log.reopen()
        result = self._local.abandon()
        assert result is not None
        self._end = asyncio.get_running_loop().create_future()
        await self._settle(result)
        return result

    async def _leave_behind(self, reason: str) -> None:
        """End a run that does not stop, or never came to its beginning."""
        result = self._local.abandon()
        if result is not None:
            await self._settle(result)
            return
        self._task.cancel(reason)
        self._end.set_result(
            RunResult(
                status=RunStatus.CANCELLED,
                run_id=self.run_id,
                thread_id=self.thread_id,
                state=PersistedState(),
                error=reason,
                termination="cancelled",
            )
        )
        self._close()

    async def _conduct(self) -> None:
        """The life of a run: its thread is loaded, it runs, its thread is saved."""
        try:
            if self._decisions is None:
                thread = await self._store.load_thread(self.thread_id)
                await self._store.save_run(self._record)
                self._backend.begin(self._local, thread)
                result = await self._local.execute()
            else:
                result = await self._local.resume(self._decisions)
            try:
                await self._settle(result)
            except asyncio.CancelledError:  # too late to cancel: what there is must be kept
                await self._settle(result)
        except asyncio.CancelledError:
            if not self._end.done():
                self._end.cancel()  # the event loop is going down, or the run was given up on and has its end
            self._close()
        except Exception as exc:
            if not self._end.done():
                self._end.set_exception(exc)
                self._end.exception()  # nobody need be waiting
            self._close()

    async def _settle(self, result: RunResult) -> None:
        """Store what came of it and tell whoever waits."""
        self._settling = True
        if result.status is not RunStatus.SUSPENDED:
            await self._store.save_thread(self._local.thread_after())
        self._record.result = result
        if self.writer is not None:
            await self.writer.flush()
        await self._store.save_run(self._record)
        if not self._end.done():
            self._end.set_result(result)
        self._close()

    def _close(self) -> None:
        self._local.log.close()
        waits = self.waits
        if not waits:
            self._backend.forget(self.run_id)
        self._on_end(self, waits)


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
    ) -> None:
        self._registry = AgentRegistry(price)
        for agent in agents:
            self._registry.take(agent)
        self._store: Store = store if store is not None else MemoryStore()
        # By one name: asking whether it has all that the protocol names takes longer than the rest of this.
        self._durable = cast("DurableStore", store) if hasattr(store, "append_events") else None
        self._events: EventStore | None = self._durable
        self._sinks = tuple(sinks)
        self._make_journal = make_journal
        self._backend = self._registry.backend = LocalBackend(self._registry, make_journal, self._store, self._sinks)
        self._background = self._registry.background = LocalBackground(self._backend)
        self._runs: dict[str, Run] = {}
        self._busy: dict[str, Run] = {}
        self._closed = False

    @classmethod
    def open(
        cls, url: str, agents: Iterable[Agent] = (), *, durability: Durability = "process", **options: Any
    ) -> Runtime:
        """A runtime that keeps threads, runs and events: `sqlite:///app.db`, or `memory:` for none of it."""
        return cls(agents, store=open_store(url, durability), **options)

    async def __aenter__(self) -> Runtime:
        if self._durable is not None:
            await self._durable.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def agents(self) -> Mapping[str, Agent]:
        return self._registry.agents

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
    ) -> Run:
        """Start a run and return its handle at once. Whatever is wrong with the request raises here."""
        if self._closed:
            raise ConfigurationError("this runtime is closed")
        spec = self._registry.find(agent)
        journal = self._make_journal()
        run_id = journal.new_id("run")
        identity = RunIdentity(
            run_id=run_id, thread_id=thread_id or journal.new_id("thread"), agent=spec.name, user_id=user_id
        )
        spec.check_thread(identity.thread_id)
        if holder := self._busy.get(identity.thread_id):
            raise ThreadBusy(identity.thread_id, holder.run_id)
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
        local = self._backend.open(request, journal, (*self._sinks, *sinks))
        writer = None if self._events is None else LogWriter(run_id, local.log, self._events)
        run = self._runs[run_id] = self._busy[identity.thread_id] = Run(
            local, self._backend, self._store, self._run_ended, writer=writer
        )
        return run

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
        )
        return await _result_or_cancel(run)

    def stream_resume(self, run_id: str, decisions: Mapping[str, Decision]) -> Run:
        """Go on with a suspended run, and return the handle of what follows. Keys are call ids or ticket ids.

        A decision that does not fit is refused here and changes nothing; one that was taken in before is ignored.
        """
        found = self._find(run_id)
        run = self._runs[run_id] = self._busy[found.thread_id] = found.resumed(decisions)
        return run

    async def resume(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """As `stream_resume`, and wait for the end or for the next time it waits.

        The run may also be a background child: the id is in its events and, as the run id, in its task's record.
        """
        if run_id not in self._runs and (answered := await self._background.answer(run_id, decisions)) is not None:
            return answered
        return await _result_or_cancel(self.stream_resume(run_id, decisions))

    def events(self, run_id: str, after: int = 0) -> AsyncIterator[Event]:
        """The log of a run after event number `after`: what is there, then what comes, until every task has ended.

        With a store that keeps events the run may be another process's, or one that ended long ago.
        """
        if run_id not in self._runs and self._events is not None:
            return stored_events(self._events, run_id, after)
        return self._find(run_id).follow(after)

    async def cancel(self, run_id: str, *, tasks: bool = False, grace: float = GRACE) -> RunResult:
        """Stop a run and what it waits for, and wait for its end; background tasks only with `tasks`."""
        run = self._find(run_id)
        result = await run.cancel(grace=grace)
        if tasks:
            await run.cancel_tasks()
        return result

    async def close(self, grace: float = GRACE) -> None:
        """Stop every run and take no more."""
        self._closed = True
        await asyncio.gather(*[run.cancel("the runtime was closed", grace) for run in self._busy.values()])
        await self._background.close(grace)
        await self._backend.close(grace)
        await self._registry.close()
        if writers := [asyncio.create_task(run.writer.finish()) for run in self._runs.values() if run.writer]:
            await asyncio.wait(writers, timeout=grace)
        if self._durable is not None:
            await self._durable.close()

    def _find(self, run_id: str) -> Run:
        if run_id not in self._runs:
            raise UnknownRun(run_id)
        return self._runs[run_id]

    def _run_ended(self, run: Run, waits: bool) -> None:
        if not waits and self._busy.get(run.thread_id) is run:
            del self._busy[run.thread_id]
        while len(self._runs) > KEPT_RUNS + len(self._busy):
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
