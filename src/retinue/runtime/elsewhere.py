"""Runs that this process does not own: claim and continue them, or reach their owners through the store.

There is one way to continue a run, whatever the reason (a crash, an answer, a cancel, `load`): claim its log, fold it,
and enter the loop. Invariant: a log is read and folded only after the claim, and every write carries its epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import GRACE, join, run_together, running
from ..core.decisions import Decision
from ..core.engine import Engine, FirstLeg
from ..core.errors import (
    ConfigurationError,
    DecisionRefused,
    RetinueError,
    RunElsewhere,
    RuntimeClosed,
    StoreError,
    UnknownAgent,
)
from ..core.events import RunStarted, ToolCallResumed
from ..core.rows import Private, StoredRequest
from ..core.runs import RunIdentity, RunResult
from ..core.stores import OpenLog, RunRecord, StoredLog, Wish
from ..log.ask import Refusal, decode_reply, encode_cancel, make_wish, read_cancel
from ..log.fold import fold_all
from ..log.owned import LogWriter
from ..log.ownership import Owner, is_gone
from ..log.state import LogState, RunState
from ..loop.tickets import encode_decisions
from .inbox import NoModel, StoredStart, decode_start, restored
from .live import LiveRun
from .reading import StoredEvents
from .run import Opened

if TYPE_CHECKING:
    from .runs import Accepted, LocalRuns

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds in which a living owner replies to a wish."""
LATER = 2.0
"""Seconds in which an owner has cancelled a run, once its grace is over."""
LOOK_EVERY = 1.0
TOGETHER = 50
"""Runs that are taken over at once."""


class Elsewhere:
    """The runs of a store that this process does not own."""

    def __init__(self, runs: LocalRuns, owner: Owner) -> None:
        self._runs, self.owner, self._store = runs, owner, owner.store
        self._left_alone: set[str] = set()
        """Runs that cannot be continued here; each was logged once."""

    # --- claiming

    async def recover(self) -> list[LiveRun]:
        """Continue the runs whose owners are gone; return those that this process has taken over."""
        return await self._recover_all(await self.owner.orphans())

    async def recover_left(self) -> None:
        """Continue the runs that their owners have left. One that cannot be continued here is not tried again at once."""
        await self._recover_all([log for log in await self._store.left_logs() if log.log_id not in self._left_alone])

    async def _recover_all(self, logs: Sequence[OpenLog]) -> list[LiveRun]:
        found: list[LiveRun | None] = []
        for first in range(0, len(logs), TOGETHER):
            found += await run_together([self._recover(log) for log in logs[first : first + TOGETHER]])
        return [run for run in found if run is not None]

    async def _recover(self, log: OpenLog) -> LiveRun | None:
        try:
            record = await self._store.load_run(log.log_id)
            if record is None or not self._has_agent(record) or self._runs.get(log.log_id) is not None:
                return None
            epoch = await self.owner.claim(log.log_id, log)
            if epoch is None:
                return None
            _log.info("continuing run %s, which %s left", log.log_id, log.owner)
            return await self.take_over(log.log_id, epoch)
        except (RetinueError, ValueError) as exc:  # one bad run must not stop the recovery of others
            if log.log_id not in self._left_alone:
                self._left_alone.add(log.log_id)
                _log.error("run %s, which %s left, cannot be continued: %s", log.log_id, log.owner, exc)
            return None

    def _has_agent(self, record: RunRecord) -> bool:
        """Return whether this process has the agent of a run; if not, log it once."""
        agent, run_id = record.identity.agent, record.identity.run_id
        if agent in self._runs.registry.agents:
            return True
        if run_id not in self._left_alone:
            self._left_alone.add(run_id)
            _log.warning("run %s was interrupted; it is left, as no agent is named %r here", run_id, agent)
        return False

    def _require_agent(self, record: RunRecord) -> None:
        """Raise UnknownAgent if this process does not have the agent of a run."""
        agents, identity = self._runs.registry.agents, record.identity
        if identity.agent not in agents:
            raise UnknownAgent(identity.agent, tuple(agents), identity.run_id)

    async def load(self, run_id: str) -> LiveRun | None:
        """Continue a run whose process has ended, or its background tasks; None if there is nothing to continue."""
        record = await self._runs.record(run_id)
        if record.has_ended:  # its log keeps its owner while tasks are left
            has_tasks = await self._store.owner_of(run_id) is not None
            return await self.claim(run_id, record) if has_tasks else None
        claimed = await self.claim(run_id, record)
        if claimed is None:
            raise RunElsewhere(run_id, await self._store.owner_of(run_id) or "another process")
        return claimed

    async def claim(self, log_id: str, record: RunRecord, *, to_cancel: bool = False) -> LiveRun | None:
        """Claim a log and continue its run; None if another process owns it or an engine schedules it.

        Raises UnknownAgent if this process does not have the agent. A cancel does not need it.
        """
        if not to_cancel and await self._store.engine_of(log_id) is not None:
            return None
        owner = await self._store.owner_of(log_id)
        if record.identity.agent not in self._runs.registry.agents and not to_cancel:
            if owner is not None and not is_gone(owner):
                return None
            self._require_agent(record)
        epoch = await self.owner.claim(log_id)
        return None if epoch is None else await self.take_over(log_id, epoch)

    async def take_over(self, log_id: str, epoch: int, first: FirstLeg | None = None) -> LiveRun:
        """Continue a run whose log was just claimed: fold the log, read its inbox, and start a leg.

        A run that has not begun has no rows, so its log is not read.
        """
        writer = LogWriter(log_id, self._store, epoch, self._runs.gathering)
        try:
            if first is not None:
                wishes = await self._store.wishes_for(log_id) if first.has_wishes else ()
                return await self._begin(first.record, writer, wishes, first)
            record, wishes, stored = await asyncio.gather(
                self._runs.record(log_id), self._store.wishes_for(log_id), self._store.read_log(log_id)
            )
            stored = stored or StoredLog()
            tree = fold_all(stored.rows, self._store.place, log_id)
            tree.seq, tree.sub = stored.seq, stored.sub
            writer.stored_seq = stored.seq
            state = tree.runs.get(log_id)
            if state is None:
                return await self._begin(record, writer, wishes)
            return await self._continue(record, writer, wishes, tree, state)
        except BaseException:
            if self._runs.get(log_id) is None:  # it cannot be continued here: others may try
                with contextlib.suppress(RetinueError):
                    rests = self._runs.dispatcher is not None  # the engine tries again later
                    await LogWriter(log_id, self._store, epoch).settle(released=True, rests=rests)
            raise

    def _agent(self, name: str, wishes: Sequence[Wish], tree: LogState | None = None) -> Agent:
        """Return the agent of a run. To cancel a run without open tasks, a stand-in is enough."""
        agents = self._runs.registry.agents
        is_cancelled = any(wish.kind == "cancel" for wish in wishes)
        if name not in agents and is_cancelled and (tree is None or not tree.has_open_tasks()):
            return Agent(name, NoModel())
        return self._runs.registry.agent(name)

    def _restored(
        self, agent: Agent, identity: RunIdentity, stored: StoredRequest, start: StoredStart | None = None
    ) -> RunRequest:
        """Return the request of a run. A placed call is executed by an agent with only that call's tool."""
        placement = self._runs.registry.placement
        if stored.call is not None and placement is not None:
            agent = placement.calls.agent_for(agent, stored.call.call.name)
        return restored(agent, identity, replace(stored, problem=None), start)

    async def _begin(
        self, record: RunRecord, writer: LogWriter, wishes: Sequence[Wish], first: FirstLeg | None = None
    ) -> LiveRun:
        """Start a run that has only its request in the store."""
        identity = record.identity
        body = await self._store.read_request(identity.run_id) if first is None else first.request
        if body is None:
            raise ConfigurationError(f"run {identity.run_id!r}: its request is not stored")
        log, backend, agent = self._runs.make_log(writer), self._runs.backend, self._agent(identity.agent, wishes)
        start = StoredStart(identity=identity, request=StoredRequest())
        try:
            start = decode_start(body)
            problem = start.request.problem
            request = self._restored(agent, identity, start.request, start)
            x = backend.open(request, log)
        except (ConfigurationError, ValueError) as exc:  # no process could start it: it ends as FAILED with the reason
            problem = str(exc)
            request = restored(Agent(identity.agent, NoModel()), identity, StoredRequest(), start)
            x = backend.open(request, log)
        if cancel := next((wish for wish in wishes if wish.kind == "cancel"), None):
            request.cancellation.set(read_cancel(cancel).reason)  # before it begins anything
            problem = None
        run = self._adopt(LiveRun(self._runs, request, log, record, writer, x))
        run.is_new_thread = first is not None and first.is_new_thread
        run.start(None, problem)
        self._runs.add(run)
        await self._deliver(run, wishes)
        return run

    async def _continue(
        self, record: RunRecord, writer: LogWriter, wishes: Sequence[Wish], tree: LogState, state: RunState
    ) -> LiveRun:
        """Continue a run from its folded state, and deliver the wishes in its inbox."""
        agent = self._agent(state.first_agent or record.identity.agent, wishes, tree)
        log = self._runs.make_log(writer, tree)
        log.append_private(Private(kind="resumed", at=log.clock()))
        await self._runs.registry.follow_rests(log)
        problem = state.request.problem
        request = self._restored(agent, state.identity, state.request)
        run = self._adopt(LiveRun(self._runs, request, log, record, writer))
        # Deliver no wish before the state is known: a decision could start a second leg.
        if (state.is_over or state.waits) and problem is None:
            await run.resume_tasks()
        self._runs.add(run)
        if problem is not None and not state.is_over:
            run.break_off(f"it cannot be continued: {problem}")
        elif not run.end.done() and not any(wish.kind == "cancel" for wish in wishes):
            run.proceed()
        await self._deliver(run, wishes)
        await run.release_if_idle()
        return run

    def _adopt(self, run: LiveRun) -> LiveRun:
        run.is_adopted = True
        if (above := run.request.above) is not None:
            from .placed import make_widen

            run.log.widen = make_widen(run, above, self)
        return run

    async def _deliver(self, run: LiveRun, wishes: Sequence[Wish]) -> None:
        """Carry out the wishes in the inbox. Each has begun on return: a result that is asked for next comes after it."""
        for wish in wishes:
            if self.owner.is_new(wish):
                run.receive(wish)
        await asyncio.sleep(0)

    # --- reaching their owners

    async def answer(self, run_id: str, decisions: Mapping[str, Decision], accepted: Accepted | None) -> RunResult:
        """Answer a suspended run, and return its next result."""
        record, refused = await self._runs.record(run_id), ""
        is_new = not record.has_ended
        if is_new:
            if record.log_id == run_id and record.identity.parent_run_id is not None:
                raise DecisionRefused(f"run {run_id!r} was placed for another run: answer that one, or its root")
            refused = await self._decide(record, decisions)
            record = await self._runs.record(run_id)
        if not is_new or (refused and record.has_ended):
            await self._check_answered(record, decisions)
        elif refused:
            raise DecisionRefused(refused)
        if accepted is not None:
            accepted(record, await self._last_leg(record))
        return await self._wait_for_end(record)

    async def decide(self, run_id: str, decisions: Mapping[str, Decision]) -> str:
        """Pass decisions on to a placed run and return why they are refused, without waiting for its next result."""
        refused = await self._decide(await self._runs.record(run_id), decisions)
        return "" if refused and (await self._runs.record(run_id)).has_ended else refused

    async def _decide(self, record: RunRecord, decisions: Mapping[str, Decision]) -> str:
        wish = make_wish(record.log_id, record.identity.run_id, "decide", encode_decisions(decisions))
        return (await self._ask(record, wish, PATIENCE)).refused

    async def ask(self, wish: Wish) -> Refusal:
        """Put a wish into the inbox of a log that another process owns, and wait for the reply."""
        return await self._ask(await self._runs.record(wish.log_id), wish, float("inf"))

    async def cancel(self, run_id: str, reason: str, grace: float, tasks: bool) -> RunResult:
        """Ask the owner of a run to stop it; if the run has no owner, claim and stop it here."""
        record = await self._runs.record(run_id)
        if record.log_id != run_id:
            raise ConfigurationError(f"run {run_id!r} is in the background of {record.log_id!r}: cancel its task")
        if not record.has_ended or tasks:
            wish = make_wish(run_id, run_id, "cancel", encode_cancel(reason, grace, tasks))
            await self._ask(record, wish, grace + LATER)
        return await self._runs.result(run_id)

    async def cancel_task(self, run_id: str, task_id: str) -> str:
        """Ask the owner of a log to stop a background task; return the reason if that is refused."""
        record = await self._runs.record(run_id)
        wish = make_wish(record.log_id, task_id, "cancel_task")
        return (await self._ask(record, wish, GRACE + LATER)).refused

    async def _ask(self, record: RunRecord, wish: Wish, patience: float) -> Refusal:
        """Put a wish into an inbox and return the owner's reply. If the log has no owner, claim it."""
        store, runs, now = self._store, self._runs, asyncio.get_running_loop().time
        root = record if wish.log_id == record.identity.run_id else await runs.record(wish.log_id)
        owner, engine = await store.owner_of(wish.log_id), await self._engine_of(wish.log_id)
        if wish.kind == "decide" and engine is None and (owner is None or is_gone(owner)):
            self._require_agent(root)  # no owner would read it: raise before anything is stored
        await store.put_wish(wish)
        if engine is not None and wish.kind != "grant":  # the parent that grants is running
            await (engine.cancel if wish.kind == "cancel" else engine.answer)(wish.log_id)
        # A worker reads it when it gets the leg, so there is no time limit.
        end = now() + patience if engine is None or wish.kind == "cancel" else float("inf")
        with store.watch(wish.log_id) as watch:
            while True:
                root = await runs.record(wish.log_id)
                body = await store.reply_to(wish.log_id, wish.wish_id)
                if body is not None:
                    return decode_reply(body)
                if root.has_ended and wish.run_id == wish.log_id:
                    return Refusal(f"run {wish.run_id!r} is {root.status}, it waits for nothing")
                if runs.get(wish.log_id) is not None:
                    self.owner.check_inboxes()
                    end = max(end, now() + LOOK_EVERY)  # this process carries it out, so keep waiting
                elif await self._claim_to_reply(wish, root):
                    continue
                elif now() >= end:
                    owner = await store.owner_of(wish.log_id) or "another process"
                    raise RunElsewhere(wish.run_id, f"{owner}, which was asked and has not replied yet")
                await watch.wait(min(max(end - now(), 0.0), LOOK_EVERY))

    async def _claim_to_reply(self, wish: Wish, root: RunRecord) -> bool:
        """Continue a log without an owner here, to reply to a wish; return whether there may be a reply now."""
        try:
            return await self.claim(wish.log_id, root, to_cancel=wish.kind == "cancel") is not None
        except UnknownAgent:
            if await self._store.reply_to(wish.log_id, wish.wish_id) is None:
                raise
            return True  # the owner replied and left after the inbox was read

    async def _engine_of(self, log_id: str) -> Engine | None:
        """Return the engine that schedules a log, or None; raise if this runtime has another engine."""
        name = await self._store.engine_of(log_id)
        if name is None:
            return None
        dispatcher = self._runs.dispatcher
        if dispatcher is None or dispatcher.engine.name != name:
            raise RunElsewhere(log_id, f"workers of engine {name!r}: open this runtime with that engine")
        return dispatcher.engine

    async def _wait_for_end(self, record: RunRecord) -> RunResult:
        """Return the result of a run after an answer. If the process that continues it dies, continue it here."""
        run_id, log_id = record.identity.run_id, record.log_id
        root = record if log_id == run_id else await self._runs.record(log_id)
        async with running(self._runs.result(run_id)) as ending:
            while not await join([ending], LOOK_EVERY):
                owner = await self._store.owner_of(log_id)
                if not ending.done() and (owner is None or is_gone(owner)) and self._has_agent(root):
                    await self.claim(log_id, root)
            return ending.result()

    async def _check_answered(self, record: RunRecord, decisions: Mapping[str, Decision]) -> None:
        """Raise DecisionRefused unless an ended run had accepted these decisions before."""
        stored = await StoredEvents(self._runs, record.log_id).so_far()
        resumed = [event.decision for event in stored if isinstance(event, ToolCallResumed)]
        known = {decision.id for decision in resumed if decision is not None}
        if not all(decision.id in known for decision in decisions.values()):
            error = None if record.result is None else record.result.error
            why = "" if error is None else f": {error}"
            raise DecisionRefused(f"run {record.identity.run_id!r} is {record.status}, it waits for nothing{why}")

    # --- reading

    async def result(self, run_id: str) -> RunResult:
        """Wait until a run has ended or is suspended, and return its result."""
        try:
            with self._store.watch((await self._runs.record(run_id)).log_id or run_id) as watch:
                while True:
                    record = await self._runs.record(run_id)
                    if record.result is not None:
                        return self._runs.typed(record)
                    if self._runs.is_closing:
                        raise RuntimeClosed(run_id)
                    await watch.wait(LOOK_EVERY)
        except StoreError as exc:
            if self._runs.is_closing:
                raise RuntimeClosed(run_id) from exc
            raise

    async def _last_leg(self, record: RunRecord) -> Opened:
        """Return the log of an answered run, and the number of the last event before its new leg."""
        first = 0
        for event in await StoredEvents(self._runs, record.log_id).so_far():
            if isinstance(event, RunStarted) and event.run_id == record.identity.run_id:
                first = event.seq - 1
        return self._runs.stored_log(record.log_id), first
