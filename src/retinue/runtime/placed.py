"""Placed children: agents with a queue, which workers of that queue execute in logs of their own.

Invariant: the place of a child is decided once, at its start, and is stored in the parent's log. The id of the stored run
is derived from the child's id, so storing it is idempotent. The owner of the parent's log copies the child's events into
that log; wishes (decisions, cancels, grants) go through the inboxes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from ..backends.foreign import ForeignBackend
from ..backends.local import LocalBackend
from ..backends.outcome import bare_result
from ..backends.remote import Callers
from ..core.agents import Agent
from ..core.backend import BackendProfile, RunRequest
from ..core.concurrency import FIRST_PAUSE, Backoff, CancellationToken, until_stopped
from ..core.errors import ExecutionBackendError, RetinueError, RunElsewhere, StoreError
from ..core.events import ErrorRaised, Event
from ..core.hooks import registered
from ..core.rows import Private
from ..core.runs import DEFAULT_LIMITS, REMOTE_KEY, Above, RunResult, RunStatus
from ..log.ask import Cancel, Decide, Wanted, WidenGrant, make_wish
from ..log.owned import Widen
from ..log.read import read_until
from ..log.state import LogState
from ..loop.execution import Execution
from ..loop.phases import HookTable
from .placed_calls import PlacedCalls

if TYPE_CHECKING:
    from .dispatch import Dispatcher
    from .live import LiveRun
    from .registry import AgentRegistry
    from .runs import LocalRuns

T = TypeVar("T")

_log = logging.getLogger(__name__)


def placed_id(run_id: str) -> str:
    """Return the run id, and log id, under which a placed child is stored."""
    return f"{run_id}.placed"


class Placement:
    """The backend of agents with a queue: it runs them here, or gives them to workers of their queue."""

    def __init__(self, runs: LocalRuns, dispatcher: Dispatcher) -> None:
        self._local, self._registry = runs.backend, runs.registry
        self.backend = PlacedBackend(runs, dispatcher)
        self.foreign = ForeignBackend(self.backend, runs.backend, own=True)
        self.calls = PlacedCalls(self.backend, runs.backend, runs.registry)

    def profile(self) -> BackendProfile:
        return self._local.profile()

    async def abort(self, run_id: str) -> None:
        await self.foreign.abort(run_id)

    def run(self, request: RunRequest) -> Coroutine[Any, Any, RunResult]:
        parent = self._local.execution_of(request.identity.parent_run_id or "")
        if parent is None:
            return self._local.run(request)
        ref = self._local.find(parent, request)
        if not self.is_placed(request.agent, parent.log.tree, None if ref is None else ref.run_id):
            return self._local.run(request)
        return self._run_placed(request, parent)

    def is_placed(self, agent: Agent, tree: LogState, run_id: str | None) -> bool:
        """Return whether a child has, or would have, a log of its own.

        A new child does, unless this worker serves its queue: then it runs here, so that no worker waits for itself.
        """
        if run_id is not None and (state := tree.runs.get(run_id)) is not None:
            return state.request.queue is not None
        return run_id in tree.grants or agent.queue not in self._registry.served

    async def _run_placed(self, request: RunRequest, parent: Execution) -> RunResult:
        agent, state = request.agent, parent.log.tree.runs.get(request.identity.run_id)
        request.queue = agent.queue if state is None else state.request.queue
        if state is None:
            lineage = list(_lineage(self._local, parent))
            request.model = _model(request, lineage)
            writer = parent.log.writer
            assert writer is not None, "a runtime with an engine has a store"
            request.above = Above(
                log_id=writer.log_id,
                run_id=request.identity.run_id,
                limits=DEFAULT_LIMITS,
                hooks_of=_hooks_of(agent, lineage, self._registry),
            )
        return await self.foreign.run(request)


def _lineage(local: LocalBackend, x: Execution | None) -> Iterator[Execution]:
    """Yield a run and those above it in its log."""
    while x is not None:
        yield x
        x = local.execution_of(x.identity.parent_run_id or "")


def _model(request: RunRequest, lineage: list[Execution]) -> Any:
    """Return the name of the model for a placed run: the parent's model if its agent has none."""
    if request.model is not None or request.agent.model is not None:
        return request.model
    for x in lineage:
        given = x.request.model if x.request.model is not None else x.agent.model
        if isinstance(given, str):
            return given
        if given is not None:
            break
    raise ExecutionBackendError(
        request.agent.name, "it has no model, and that of its parent has no name: give it one, as it works elsewhere"
    )


def _hooks_of(agent: Agent, lineage: list[Execution], registry: AgentRegistry) -> tuple[str, ...]:
    """Return the names of the agents whose inherited hooks apply to a placed run."""
    names: list[str] = []
    found = {id(plugin) for plugin in agent.plugins}
    for x in reversed(lineage):
        if x.state.request.above is not None:
            names.extend(x.state.request.above.hooks_of)
            found.update(
                id(plugin) for name in x.state.request.above.hooks_of for plugin in registry.agent(name).plugins
            )
        for one in x.agents:
            missing = {hook.source for hook in HookTable(map(registered, one.plugins)).inherited} - found
            if not missing:
                continue
            if registry.agents.get(one.name) is not one:
                problem = f"hooks of agent {one.name!r} hold for it, and its worker cannot find that agent by name"
                advice = f"give {one.name!r} to the runtime, or set inherited=False on plugins meant for it alone"
                raise ExecutionBackendError(agent.name, f"{problem}: {advice}")
            names.append(one.name)
            found |= missing
    return tuple(dict.fromkeys(names))


class PlacedBackend:
    """Stores runs for workers of a queue, and follows their logs."""

    def __init__(self, runs: LocalRuns, dispatcher: Dispatcher) -> None:
        self._runs, self._dispatcher = runs, dispatcher
        self._store = dispatcher.store
        self._callers = Callers()

    def profile(self) -> BackendProfile:
        return BackendProfile(
            cancellation="remote_abort",
            continuation="remote",
            decisions="durable",
            persistence="stored",
            waits="input_and_auth",
            transcript="full",
            output="text_and_artifacts",
        )

    async def abort(self, run_id: str) -> None:
        self._callers.abort(run_id)

    async def run(self, request: RunRequest) -> RunResult:
        identity = request.identity
        if not request.is_dispatched:
            await self._submit(request)
        with self._callers.waiting(identity.run_id, request.cancellation):
            if request.accepted is not None:
                request.accepted()
            result = await self._attend(request)
        return replace(result, run_id=identity.run_id, thread_id=identity.thread_id)

    async def _submit(self, request: RunRequest) -> None:
        """Store the run, unless it is stored. If this raises, nothing was started."""
        run_id, agent = placed_id(request.identity.run_id), request.identity.agent
        if not request.messages and request.call is None:
            raise ExecutionBackendError(agent, "there is no message for it")
        try:
            # An earlier owner of the parent may have stored it and died before the parent's log said so.
            if await retry(lambda: self._store.load_run(run_id), request.cancellation) is None:
                await retry(lambda: self._dispatcher.place(request, run_id), request.cancellation)
        except RetinueError as exc:
            raise ExecutionBackendError(agent, str(exc)) from exc

    async def _attend(self, request: RunRequest) -> RunResult:
        """Follow a run until it ends or is suspended; stop it if the request is cancelled."""
        token = request.cancellation
        try:
            work = _Follower(self._runs, self._dispatcher, request).follow()
            async with until_stopped(work, token.wait()) as following:
                if not following.done():
                    await self.stop(request.identity.run_id, token.reason or "cancelled")
                return await following
        except RetinueError as exc:
            return bare_result(request, RunStatus.FAILED, "error", str(exc))

    async def follow_rest(self, request: RunRequest) -> None:
        """Copy the events of a run's background tasks after its end, until the tasks have ended."""
        token, run_id = request.cancellation, placed_id(request.identity.run_id)
        work = _Follower(self._runs, self._dispatcher, request).follow_rest()
        try:
            async with until_stopped(work, token.wait()) as following:
                if not following.done():
                    await self._runs.ask(run_id, Cancel(reason=token.reason or "cancelled", tasks=True))
                await following
        except RetinueError as exc:
            raise ExecutionBackendError(request.identity.agent, str(exc)) from exc

    async def stop(self, run_id: str, reason: str) -> None:
        """Cancel a placed child through its inbox; also works if no worker has it."""
        try:
            await self._runs.ask(placed_id(run_id), Cancel(reason=reason))
        except RunElsewhere as exc:  # the wish is stored
            _log.warning("%s", exc)

    async def stop_abandoned(self, tree: LogState) -> None:
        """Cancel the placed children that have ended in the parent's log and may still run in their own."""
        for run_id in abandoned(tree):
            record = await self._store.load_run(placed_id(run_id))
            if record is not None and not record.has_ended:
                wish = make_wish(placed_id(run_id), Cancel(reason="the run that started it went on"))
                await self._store.put_wish(replace(wish, wish_id="abandoned"))
                await self._dispatcher.engine.cancel(placed_id(run_id))


def abandoned(tree: LogState) -> list[str]:
    """Return the placed children and calls that this log has closed, or never started, and that may still run."""
    ended = [
        run.run_id
        for run in tree.runs.values()
        if run.request.queue is not None and run.is_over and run.status is not RunStatus.COMPLETED
    ]
    starting = [(run_id, one.run_id) for run_id, one in tree.grants.items() if run_id not in tree.runs]
    given_up = [run_id for run_id, parent_id in starting if not _is_of_task(tree, parent_id, run_id)]
    return [*ended, *given_up, *sorted(tree.placed_calls)]


def _is_of_task(tree: LogState, parent_id: str, run_id: str) -> bool:
    """Return whether a child that is being started belongs to an open background task: its parent need not wait for it."""
    parent = tree.runs.get(parent_id)
    ref = None if parent is None else parent.children.get(run_id)
    calls = [f"tools:{task.call_id}" for task in tree.tasks.values() if task.is_open and task.run_id == parent_id]
    return ref is not None and any(ref.ns[-1] == name or ref.ns[-1].startswith(f"{name}~") for name in calls)


class _Follower:
    """Follows one placed run: passes decisions on, and copies its events in order until it ends or is suspended."""

    def __init__(self, runs: LocalRuns, dispatcher: Dispatcher, request: RunRequest) -> None:
        self._runs, self._request, self._store = runs, request, dispatcher.store
        self._run_id, self._seen = placed_id(request.identity.run_id), request.seen

    async def follow(self) -> RunResult:
        request, refused = self._request, ""
        if request.decisions and not request.cancellation.is_set():
            refused = await retry(self._decide)
            if refused:
                self._emit(ErrorRaised(message=refused, code="decision_refused"))
        result = await retry(self._mirror)
        return replace(result, error=refused) if refused and result.status.is_waiting else result

    async def _decide(self) -> str:
        """Pass the decisions on; return why they are refused. A run that has ended gives its result."""
        reply, _ = await self._runs.ask(self._run_id, Decide(self._run_id, self._request.decisions), of_parent=True)
        record = await self._store.load_run(self._run_id) if reply.refused else None
        return "" if record is not None and record.has_ended else reply.refused

    async def _mirror(self) -> RunResult:
        """Copy the events of the run until it has ended or is suspended; return its result."""
        while True:
            await self._copy(until_result=True)
            record = await self._store.load_run(self._run_id)
            if record is None:
                return bare_result(self._request, RunStatus.FAILED, "error", "its run is not stored any more")
            if record.result is not None:
                found = await self._store.read_events(self._run_id, self._seen, 1)
                return _noted(record.result, is_open=found is not None and not found[1])
            await asyncio.sleep(FIRST_PAUSE)  # it was answered at this moment

    async def follow_rest(self) -> None:
        """Copy events until the log has ended."""
        await retry(self._copy)

    async def _copy(self, *, until_result: bool = False) -> None:
        log = self._runs.stored_log(self._run_id)
        reader = log.read(self._seen)

        async def is_settled() -> bool:
            return await log.is_settled(reader.seq)

        reading = read_until(reader, idle=is_settled if until_result else None, notices=True)
        async with aclosing(reading) as events:
            async for event in events:
                if not event.seq and isinstance(event, ErrorRaised):  # why nothing comes
                    self._emit(ErrorRaised(message=event.message, code=event.code))
                elif self._request.emit_remote is not None:
                    self._request.emit_remote(event)
                self._seen = event.seq or self._seen

    def _emit(self, event: Event) -> None:
        if self._request.emit is not None:
            self._request.emit(event)


async def retry(ask: Callable[[], Awaitable[T]], token: CancellationToken | None = None) -> T:
    """Repeat while the database cannot be reached, until the token is set."""
    backoff = Backoff()
    while True:
        try:
            return await ask()
        except StoreError as exc:
            if not exc.transient or (token is not None and token.is_set()):
                raise
        await backoff.wait()


def _noted(result: RunResult, *, is_open: bool) -> RunResult:
    """Return the result with a mark if background tasks keep its log open."""
    if not is_open or not result.status.is_terminal:
        return result
    state = result.state
    return replace(result, state=replace(state, extensions={**state.extensions, REMOTE_KEY: {"open": True}}))


def make_widen(run: LiveRun, above: Above) -> Widen:
    """Return a function that asks the owner of the parent's log for a larger grant for a placed run, once at a time."""
    lock = asyncio.Lock()

    async def widen(wanted: Callable[[], Wanted]) -> bool:
        async with lock:
            before = None if run.state is None else run.state.request.above
            if before is None:
                return False
            command = WidenGrant(above.run_id, wanted())
            granted = (await retry(lambda: run.home.ask(above.log_id, command)))[0].granted
            if granted is None or granted == before.limits:
                return False
            run.log.append_private(Private(kind="commit", run_id=run.run_id, granted=granted))
            return True

    return widen
