"""Runtime: holds agents and runs them."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from ..core.agents import Agent, check_model
from ..core.backend import Backend, ChildInput, RunRequest
from ..core.budgets import Budget, Budgets, BudgetTable, check_budgets
from ..core.concurrency import GRACE, CancellationToken, cancel_all
from ..core.decisions import LOCAL_USER, Decision, stamped
from ..core.engine import Engine, Schedule
from ..core.errors import ConfigurationError, DecisionRefused, as_tuple
from ..core.events import AnyEvent, Sink, as_namespace, as_sinks
from ..core.gate import GateTable, Rates, check_rates
from ..core.messages import Message, as_messages
from ..core.model import Model
from ..core.probation import MAX_TAKEOVERS
from ..core.runs import Limits, Out, RunIdentity, RunResult, check_ids, check_limits, limits_of_run, unique
from ..core.state import PersistedState, Seed, as_persisted
from ..core.stores import Durability, Place, Retention, Store, ThreadSummary, Watch, WhenBusy, title_of
from ..log.ownership import LEASE
from ..log.state import RunState
from ..models.gates import AccountGates
from ..models.prices import Price
from ..storage.budgets import LocalBudgetTable
from ..storage.stores import MemoryStore, open_store
from ..wire.parts import Mode, StreamPart, parts_of
from .fork import fork_run, state_at
from .reading import StoredEvents
from .registry import AgentRegistry
from .run import Run, as_sent, check_loop, check_place, fork_place, result_or_cancel
from .runs import LocalRuns
from .sync import LoopThread

if TYPE_CHECKING:
    from ..storage.packer import Packer
    from .dispatch import Dispatcher

RunInput = ChildInput
OnClose = Literal["cancel", "leave"]


class RunOptions(TypedDict, total=False):
    """The options of `Runtime.run`, `stream`, `run_sync` and `stream_sync`."""

    thread_id: str | None
    """The conversation to continue; a new one if not given."""
    user_id: str | None
    context: Mapping[str, Any] | None
    """Values for tools (`ctx.context`); the model does not see them."""
    state: Seed | None
    """Values of state keys to begin with."""
    limits: Limits | None
    model: str | Model | None
    """Used by the agent in place of its own, and by sub-agents that have none."""
    sinks: Iterable[Sink]
    """Called with every event of the run."""
    run_id: str | None
    """An id chosen by the caller, as an idempotency key: if this process has that run, its handle is returned."""
    digest: str | None
    """With `run_id`: a digest of the request. `runtime.log(run_id).digest()` returns it, so that the reuse of an id for
    another request can be detected."""
    when_busy: WhenBusy
    """If another run has the thread, this one is refused ("reject"), waits ("enqueue"), or ends it ("interrupt")."""
    queue: str | None
    """With an engine: the queue whose workers do the work; that of the agent, else "default"."""
    priority: int
    """With an engine: runs of a higher priority come first."""
    delay: float
    """With an engine: seconds until the run may start."""


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
        on_close: OnClose | None = None,
        backends: Mapping[str, Backend] | None = None,
        engine: str | Engine | None = None,
        rates: Rates | None = None,
        max_takeovers: int = MAX_TAKEOVERS,
        budgets: Iterable[Budget] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make a runtime.

        `recover`: continue runs whose processes have ended. `lease`: seconds without a sign of life after which a
        process counts as dead. `retention`: how long ended runs are kept; for ever if not given. `on_close`: with
        "leave", the default where a store outlives this process, runs at work stop when the runtime is closed, and the
        next process continues them; with "cancel" they end. `backends`: execute the agents that name one of them. `engine`: "postgres" or
        "temporal://host:port/namespace": runs are done by workers (`retinue worker`), and this process needs neither
        agents nor models to start them. `rates`: limits of accounts at providers, such as
        `{"openai:*": Rate(requests_per_minute=500)}`; what is not given is learned. `max_takeovers`: a run whose processes die
        more often than this, each time before it has made progress, ends as FAILED with the termination "worker_lost". `budgets`: what model
        calls may cost in a window, over all processes of the store.
        """
        if isinstance(agents, str):
            raise ConfigurationError(
                f"agents is a list of agents, not {agents!r}; for a store write Runtime.open({agents!r}, agents)"
            )
        if isinstance(store, str):
            raise ConfigurationError(f"store is a Store object, not {store!r}: write Runtime.open({store!r})")
        sinks = as_sinks(sinks, "Runtime")
        store = store or MemoryStore()
        self.gates = _gates(rates, store)
        """The gates of the accounts at providers."""
        budgets_given = check_budgets(budgets)
        make_table: Callable[[], BudgetTable] = getattr(store, "budget_table", LocalBudgetTable)
        self.budgets = Budgets(budgets_given, make_table(), clock)
        """The budgets of this runtime and of its store: list, set and reset them here."""
        self._registry = AgentRegistry(price, backends, self.gates, self.budgets)
        for agent in as_tuple(agents, "Runtime", "agents"):
            self._registry.add(agent)
            self._registry.given.add(agent.name)
        given: Any = max_takeovers
        if not isinstance(given, int) or isinstance(given, bool) or given < 0:
            raise ConfigurationError(f"max_takeovers is a number of deaths, 0 or more, not {given!r}")
        self._runs = LocalRuns(self._registry, store, sinks, lease, clock, max_takeovers)
        self._recovers, self._retention = recover, retention
        self._on_close = on_close or ("cancel" if self._runs.owner is None else "leave")
        self._pruning: asyncio.Task[None] | None = None
        self._packing: tuple[Packer, asyncio.Task[None]] | None = None
        if self._on_close not in ("cancel", "leave"):
            raise ConfigurationError(f"on_close is 'cancel' or 'leave', not {on_close!r}")
        if on_close == "leave" and self._runs.owner is None:
            raise ConfigurationError(
                "on_close='leave' needs a store that others can continue from: use Runtime.open(url)"
            )
        if engine is not None:
            from .dispatch import make_dispatcher

            self._runs.use_engine(make_dispatcher(self._runs, engine))
        self._closed = False
        self._thread: LoopThread | None = None
        self._make_twin = lambda: Runtime(
            self.agents.values(), store=self.store, sinks=sinks, price=price, recover=recover, lease=lease,
            on_close=on_close, backends=backends, engine=engine, rates=rates, budgets=budgets_given, max_takeovers=max_takeovers, clock=clock,
        )  # fmt: skip
        self._twin: Runtime | None = None
        """The runtime of synchronous callers, in a thread of its own. It shares agents, store and ended runs."""

    @classmethod
    def open(
        cls,
        url: str,
        agents: Iterable[Agent] = (),
        *,
        durability: Durability = "process",
        sinks: Iterable[Sink] = (),
        price: Price | None = None,
        recover: bool = True,
        lease: float = LEASE,
        retention: Retention | None = None,
        on_close: OnClose | None = None,
        backends: Mapping[str, Backend] | None = None,
        engine: str | Engine | None = None,
        rates: Rates | None = None,
        max_takeovers: int = MAX_TAKEOVERS,
        budgets: Iterable[Budget] = (),
        clock: Callable[[], float] = time.time,
    ) -> Runtime:
        """Make a runtime that stores threads, runs and events, and continues the runs of processes that have ended.

        The URL is `sqlite:///app.db`, `postgresql://…`, or `memory:` to store nothing. With `durability="full"` a
        commit also survives a power failure.
        """
        given: Any = url
        if not isinstance(given, str):
            raise ConfigurationError(
                f"the URL of the store comes first: Runtime.open('sqlite:///app.db', agents), not {url!r:.60}"
            )
        return cls(
            agents,
            store=open_store(url, durability),
            sinks=sinks,
            price=price,
            recover=recover,
            lease=lease,
            retention=retention,
            on_close=on_close,
            backends=backends,
            engine=engine,
            rates=rates,
            max_takeovers=max_takeovers,
            budgets=budgets,
            clock=clock,
        )

    async def __aenter__(self) -> Runtime:
        await self._enter()
        if self._runs.owner is not None and self._runs.dispatcher is None and self._recovers:
            await self._runs.recover()
            self._recover()
        return self

    async def _enter_first(self) -> None:
        """Enter a runtime that is to serve before it continues any run: `_recover` does that."""
        await self._enter()
        if self._runs.elsewhere is not None and self._runs.dispatcher is None:
            await self._runs.elsewhere.note_deaths()

    async def _enter(self) -> None:
        """Open what the runtime needs."""
        runs = self._runs
        if runs.owner is not None:
            await runs.owner.store.open()
            if runs.dispatcher is not None:
                await runs.dispatcher.open()
            if self._retention is not None:
                self._pruning = self._prune(self._retention)
            self._packing = self._pack()

    def _recover(self) -> None:
        """Continue runs whose processes have ended or end from now on, unless an engine does that."""
        if self._recovers and self._runs.dispatcher is None:
            self._runs.keep_recovering()

    async def __aexit__(self, *exc: object) -> None:
        await self._close(GRACE, leave=exc[0] is None)

    def __enter__(self) -> Runtime:
        """Use the runtime without `await`, through `run_sync`, `stream_sync` and `resume_sync`."""
        thread, twin = self._sync()
        thread.call(twin.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        thread, twin = self._sync()
        self._thread = None
        try:
            thread.call(twin._close_runs(GRACE, leave=exc[0] is None))
            thread.call(self.close())
        finally:
            thread.close()

    def _prune(self, retention: Retention) -> asyncio.Task[None]:
        """From time to time, delete runs that ended longer ago than the retention."""
        from ..storage.prune import keep_pruning
        from ..storage.sql import SqlStore

        if not isinstance(self.store, SqlStore):
            raise ConfigurationError(f"retention is for databases, which {self.store!r} is not")
        return asyncio.create_task(keep_pruning(self.store, retention), name="retinue-pruning")

    def _pack(self) -> tuple[Packer, asyncio.Task[None]] | None:
        """Pack the logs that have ended, where the store does that."""
        from ..storage.sql import SqlStore

        if not isinstance(self.store, SqlStore):
            return None
        from ..storage.packer import Packer

        packer = Packer(self.store)
        return packer, asyncio.create_task(packer.run(), name="retinue-packing")

    @property
    def agents(self) -> Mapping[str, Agent]:
        """The agents of this runtime by name, with those that they name as objects."""
        return self._registry.agents

    def _is_served(self, name: str) -> bool:
        """Return whether an agent was given to this runtime, and is not only named by another agent."""
        return name in self._registry.given

    @property
    def store(self) -> Store:
        """The store of threads, runs and events."""
        return self._runs.store

    # --- starting runs

    def stream(self, agent: str | Agent[Out], input: RunInput, **options: Unpack[RunOptions]) -> Run[Out]:
        """Start a run and return its handle at once. A mistake in the request raises here."""
        return self._start(agent, input, **options)

    async def run(self, agent: str | Agent[Out], input: RunInput, **options: Unpack[RunOptions]) -> RunResult[Out]:
        """Start a run and wait for its end. Cancelling the caller cancels the run."""
        return await result_or_cancel(self._start(agent, input, **options))

    def run_sync(self, agent: str | Agent[Out], input: RunInput, **options: Unpack[RunOptions]) -> RunResult[Out]:
        """Run an agent to its end without `await`: in scripts, and in notebooks, whose event loop is busy.

        The run works in a thread with its own event loop. Ctrl-C cancels it and waits for its end.
        """
        thread, twin = self._sync()
        return thread.call(twin.run(agent, input, **options))

    def stream_sync(self, agent: str | Agent, input: RunInput, **options: Unpack[RunOptions]) -> Iterator[AnyEvent]:
        """Start a run and yield its events without `await`, the last being its `run_finished`.

        Leaving the iteration early cancels the run: nothing else has a handle of it.
        """
        thread, twin = self._sync()
        return thread.iterate(lambda: twin.stream(agent, input, **options))

    def resume_sync(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """Answer a suspended run and wait for its end, or for the next time it waits, without `await`."""
        thread, twin = self._sync()
        return thread.call(twin.resume(run_id, decisions))

    def _sync(self) -> tuple[LoopThread, Runtime]:
        """The thread of synchronous callers and its runtime; made with the first call."""
        if self._closed:
            raise ConfigurationError("this runtime is closed")
        if self._thread is None or self._twin is None:
            self._thread, self._twin = LoopThread(), self._make_twin()
            self._twin._registry.overrides = self._registry.overrides
            self._twin._runs.share_memory(self._runs)
        return self._thread, self._twin

    def override(self, *, model: str | Model) -> contextlib.AbstractContextManager[None]:
        """Replace every model of every run that is started or answered in a `with` block, for tests.

        It applies to sub-agents, handoffs and background tasks of these runs too, and is not stored.
        """
        return self._registry.override(model)

    def _start(
        self,
        agent: str | Agent[Out],
        input: RunInput,
        *,
        thread_id: str | None = None,
        user_id: str | None = None,
        context: Mapping[str, Any] | None = None,
        state: Seed | None = None,
        limits: Limits | None = None,
        model: str | Model | None = None,
        sinks: Iterable[Sink] = (),
        run_id: str | None = None,
        digest: str | None = None,
        when_busy: WhenBusy = "reject",
        queue: str | None = None,
        priority: int = 0,
        delay: float = 0.0,
        **unknown: object,
    ) -> Run[Out]:
        if self._closed:
            raise ConfigurationError("this runtime is closed")
        for option in unknown:
            known = difflib.get_close_matches(option, RunOptions.__annotations__, 1) or RunOptions.__annotations__
            raise ConfigurationError(f"a run has no option {option!r}: write {', '.join(known)}")
        if model is not None:
            check_model(model, "run")
        if limits is not None:
            check_limits(limits)
        if not isinstance(cast("Any", context or {}), Mapping):
            raise ConfigurationError(f"context is a dict of values for tools, not {context!r}")
        check_loop()
        check_ids(thread_id, user_id)
        if when_busy not in ("reject", "enqueue", "interrupt"):
            raise ConfigurationError(f"when_busy is 'reject', 'enqueue' or 'interrupt', not {when_busy!r}")
        dispatcher = self._runs.dispatcher
        spec = self._registry.find(agent) if dispatcher is None else self._registry.named(agent)
        made = unique()
        if dispatcher is not None and run_id is not None:
            thread_id = thread_id or f"thread_{run_id}"  # the same when the caller asks again
        identity = RunIdentity(
            run_id=run_id or f"run_{made}", thread_id=thread_id or f"thread_{made}", agent=spec.name, user_id=user_id
        )
        request = RunRequest(
            agent=spec,
            identity=identity,
            messages=as_input(input),
            seed=PersistedState() if state is None else as_persisted(state),
            # With an engine the worker, which has the agent, narrows its limits.
            limits=limits if dispatcher is not None else limits_of_run(spec.limits, limits, over_network=False),
            cancellation=CancellationToken(),
            context=context or {},
            model=model,
            digest=digest or "",
        )
        heard = as_sinks(sinks, "run") if sinks != () else ()
        if dispatcher is not None:
            if heard:
                raise ConfigurationError("sinks are called where a run works: give them to the Runtime of the workers")
            return dispatcher.start(request, when_busy, queue=queue or spec.queue, priority=priority, delay=delay)
        if queue is not None or priority or delay:
            raise ConfigurationError("queue, priority and delay are for runs on an engine: Runtime.open(…, engine=…)")
        return self._runs.start(request, heard, when_busy, new_thread=thread_id is None)

    # --- schedules

    async def schedule(
        self,
        agent: str | Agent,
        input: RunInput,
        *,
        at: datetime | None = None,
        cron: str | None = None,
        queue: str | None = None,
        thread_id: str | None = None,
        user_id: str | None = None,
    ) -> str:
        """Have workers start a run at a time, or whenever a cron expression says (in UTC); return the schedule's id.

        A time that has passed means now. Without a thread, each run begins a new one.
        """
        check_ids(thread_id, user_id)
        spec = self._registry.named(agent)
        options: dict[str, Any] = {"queue": queue, "thread_id": thread_id, "user_id": user_id}
        return await self._dispatcher("schedule").add_schedule(spec, as_input(input), at=at, cron=cron, **options)

    async def schedules(self) -> list[Schedule]:
        """Return all schedules, the one that starts next first."""
        return await self._dispatcher("schedules").schedules.list()

    async def unschedule(self, schedule_id: str) -> bool:
        """Remove a schedule; return whether there was one. Runs that it has started continue."""
        return await self._dispatcher("unschedule").schedules.remove(schedule_id)

    def _dispatcher(self, what: str) -> Dispatcher:
        if self._runs.dispatcher is None:
            raise ConfigurationError(f"{what}(…) needs an engine: Runtime.open('postgresql://…', engine='postgres')")
        return self._runs.dispatcher

    # --- answering, continuing, reading

    def stream_resume(self, run_id: str, decisions: Mapping[str, Decision], *, by: str = LOCAL_USER) -> Run:
        """Answer a suspended run and return a handle of its next leg. Keys are call ids or ticket ids.

        A decision that does not match changes nothing. It raises here if the run waits in this process, else from
        `result` of the handle. Such a handle has its thread and agent once the answer was accepted. `by` is the user who
        decided, for receipts.
        """
        return self._runs.resume(run_id, stamped(decisions, by))

    async def resume(self, run_id: str, decisions: Mapping[str, Decision], *, by: str = LOCAL_USER) -> RunResult:
        """Answer a suspended run and wait for its end, or for the next time it waits.

        The run may be another process's, or a background child: its id is in its events and in its task's record. If the
        server of a sub-agent refuses a decision, DecisionRefused is raised and the run waits again.
        """
        result = await self._runs.answer(run_id, stamped(decisions, by))
        if result.status.is_waiting and result.error is not None:
            raise DecisionRefused(result.error)
        return result

    async def load(self, run_id: str) -> Run | None:
        """Continue a run here whose process has ended; None if the run has ended.

        If only background tasks of the run are left, they are continued. Raises RunElsewhere if another process works
        on the run.
        """
        return await self._runs.load(run_id)

    async def recover(self) -> list[Run]:
        """Continue the runs whose processes have ended. Return those that this process has taken over."""
        return await self._runs.recover()

    async def state_at(self, run_id: str, seq: int) -> RunState:
        """Return the state of a run as it was after event number `seq` of its log."""
        return await state_at(self._runs, run_id, seq)

    async def fork(
        self,
        run_id: str,
        *,
        at: int | None = None,
        message_id: str | None = None,
        input: RunInput | None = None,
        decisions: Mapping[str, Decision] | None = None,
        by: str = LOCAL_USER,
    ) -> Run:
        """Start a new run, on a new thread, that continues another as it was after event number `at`, or at a message.

        Give it another input or other decisions to take another course. Calls that had ended are not made again. A
        run can be forked between two steps, where it waits, and after its end; elsewhere NoForkPlace names the nearest
        places. At an answer of the model the fork continues after it. At a message of the user, `input` replaces that
        message; without it, it is said again.
        """
        place = fork_place(at, message_id)
        said = () if input is None else as_input(input)
        given = None if decisions is None else stamped(decisions, by)
        return self._runs.handle(await fork_run(self._runs, run_id, place, said, given))

    async def threads(
        self,
        user_id: str | None = None,
        *,
        thread_id: str | None = None,
        status: str | None = None,
        search: str | None = None,
        changed_after: float | None = None,
        limit: int | None = None,
        before: Place | None = None,
        unowned: bool = False,
    ) -> list[ThreadSummary]:
        """Return the threads of root runs, the one used last first, as `list_threads` of the store selects them."""
        return await self._runs.threads(
            user_id,
            thread_id=thread_id,
            status=status,
            search=search,
            changed_after=changed_after,
            limit=limit,
            before=before,
            unowned=unowned,
        )

    async def name_thread(self, thread_id: str, title: str) -> bool:
        """Set the title of a thread; return False if there is none."""
        return await self.store.name_thread(thread_id, title_of((Message.user(title),)))

    def watch_threads(self, user_id: str) -> contextlib.AbstractContextManager[Watch]:
        """Watch a user's threads: a wait ends when one of those that `threads` returns may have changed."""
        return self._runs.watch_threads(user_id)

    async def messages(self, thread_id: str) -> tuple[Message, ...]:
        """Return the conversation of a thread: what ended runs left, then the input of each run that has not ended."""
        return await self._runs.messages(thread_id)

    async def result(self, run_id: str) -> RunResult:
        """Wait until a run of any process has ended or waits for a human, and return its result."""
        return await self._runs.result(run_id)

    def events(self, run_id: str, after: int = 0) -> AsyncIterator[AnyEvent]:
        """Iterate over the log of a run after event number `after`: stored events, then new ones once they are stored.

        It ends when the run and every task under it have ended. A run that waits for a human is waited for. With a
        store the run may be another process's, or one that ended long ago.
        """
        return cast("AsyncIterator[AnyEvent]", self._runs.events(run_id, check_place(after)))

    def parts(
        self, run_id: str, modes: Mode | Iterable[Mode] = ("updates",), after: int = 0
    ) -> AsyncIterator[StreamPart]:
        """Iterate over the LangGraph-shaped parts of a run and all below it that come after event number `after`.

        Like `events`, it ends when the run and every task under it have ended.
        """
        return parts_of(self.events(run_id), modes, check_place(after))

    def log(self, run_id: str) -> StoredEvents:
        """Return the log of a root run, to read what is stored of it."""
        return StoredEvents(self._runs, run_id)

    async def cancel(
        self,
        run_id: str,
        *,
        ns: Sequence[str] = (),
        tasks: bool = False,
        grace: float = GRACE,
        reason: str = "cancelled",
    ) -> RunResult:
        """Stop a run and its children, and wait for its end; stop background tasks only with `tasks`.

        `ns` is the namespace of a run below it, as events have it: only that run is stopped, whatever it does, and its
        parent reads a cancelled result and continues. If another process works on the run, that process stops it.
        """
        return await self._runs.cancel(run_id, reason, grace, tasks, as_namespace(ns))

    async def send(self, run_id: str, input: RunInput, *, ns: Sequence[str] = ()) -> None:
        """Give a run messages while it works or waits: the root, or the run at a namespace below it, in any process.

        Once this returns, they are stored. The model reads them with its next request, after the results of the calls; if it
        has just given its last answer, one more step follows. Raises RunEnded if no request follows.
        """
        await self._runs.send(run_id, as_sent(input), as_namespace(ns))

    async def cancel_task(self, run_id: str, task_id: str) -> str:
        """Stop one background task under a root run, wait a few seconds for its end, and return its status.

        The status is `cancelled`, or the one with which the task had ended before; `running` if it has not stopped yet.
        """
        return (await self._runs.cancel_task(run_id, task_id)).lower()

    async def close(self, grace: float = GRACE) -> None:
        """Stop every run and start no more. Runs that wait for a human stay as they are if they are stored.

        With a store, no run at work begins a model call or a tool call any more. What runs may finish for `grace`
        seconds, then the next process that opens the store continues the runs; `run.result()` raises RuntimeClosed.
        Without a store, or with `on_close="cancel"`, runs at work end as cancelled. So do they if an exception or Ctrl-C
        leaves `async with`.
        """
        await self._close(grace, leave=True)

    async def _close(self, grace: float, *, leave: bool) -> None:
        """Close the runtime; with `leave`, leave its runs to the next process if `on_close` says so."""
        self._closed = True
        if self._thread is not None and self._twin is not None:
            thread, twin, self._thread = self._thread, self._twin, None
            await asyncio.to_thread(thread.call, twin._close_runs(grace, leave=leave))
            await asyncio.to_thread(thread.close)
        try:
            await self._close_runs(grace, leave=leave)
        finally:
            if self._runs.owner is not None:
                await self._runs.owner.store.close()

    async def _leave_runs(self, grace: float) -> None:
        """Begin nothing more, and leave the runs to the next process if `on_close` says so. `close` does the rest."""
        if self._on_close == "leave":
            await self._runs.leave(grace)

    async def _close_runs(self, grace: float, *, leave: bool) -> None:
        """Close everything but the store."""
        self._closed = True
        if self._pruning is not None:
            self._pruning.cancel()
        if self._packing is not None:
            await cancel_all([self._packing[1]])
        try:
            if self._runs.dispatcher is not None:
                await self._runs.dispatcher.close()
            await self._runs.close(grace, leave=leave and self._on_close == "leave")
            if self._packing is not None:
                await self._packing[0].finish()
        finally:
            await self._registry.close()


def _gates(rates: Rates | None, store: Store) -> AccountGates:
    """Return the gates of a runtime; a store that has rows for them shares them with other processes."""
    make: Callable[[], GateTable] | None = getattr(store, "gate_table", None)
    return AccountGates(None if rates is None else check_rates(rates), None if make is None else make())


def as_input(given: RunInput) -> tuple[Message, ...]:
    """Return the input of a run as messages; an empty one is a mistake."""
    if isinstance(given, str) and not given.strip():
        raise ConfigurationError('the input is empty: give text, such as "Hello"')
    return as_messages(given)
