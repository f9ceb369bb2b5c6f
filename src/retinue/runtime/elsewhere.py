"""Runs that this process does not own: claim and continue them, or reach their owners through the store.

There is one way to continue a run, whatever the reason (a crash, an answer, a cancel, `load`): claim its log, fold it,
and enter the loop. Invariant: a log is read and folded only after the claim, and every write carries its epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..core.agents import Agent
from ..core.backend import RunRequest
from ..core.concurrency import GRACE, join, run_together, running
from ..core.content import id_problem
from ..core.engine import Engine, FirstLeg
from ..core.errors import (
    ConfigurationError,
    RetinueError,
    RunElsewhere,
    RuntimeClosed,
    StoreError,
    UnknownAgent,
    UnknownRun,
)
from ..core.events import ErrorRaised, RunStarted, ToolCallResumed
from ..core.probation import EPISODE, RECENT, SUSPECT, is_given_up, judge, pause_after
from ..core.results import ToolCallStatus
from ..core.rows import Private, StoredRequest
from ..core.runs import RunIdentity, RunResult, RunStatus
from ..core.stores import Losses, OpenLog, RunFacts, RunRecord, StoredLog, Wish
from ..log.ask import (
    RUN_ENDED,
    Cancel,
    CancelTask,
    Command,
    Decide,
    Reply,
    Say,
    WidenGrant,
    decode_reply,
    make_wish,
    read_cancel,
)
from ..log.fold import fold_all
from ..log.owned import LogWriter
from ..log.ownership import Owner, is_gone
from ..log.state import LogState, RunState
from .live import WORKER_LOST, LiveRun
from .stored_start import NoModel, StoredStart, decode_start, restored

if TYPE_CHECKING:
    from .runs import LocalRuns

_log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds in which a living owner replies to a wish."""
LATER = 2.0
"""Seconds in which an owner has cancelled a run, once its grace is over."""
LOOK_EVERY = 1.0
TOGETHER = 50
"""Runs that are taken over at once."""
_SOON = 0.25
"""Seconds until the next look at runs that wait for their turn."""


def _at_work(tree: LogState) -> str:
    """Return the calls that were at work in a log, with the names of their tools, or that a model was called."""
    calls = [
        f"call {call.call.id!r} of tool {call.call.name!r} was at work"
        for run in tree.runs.values()
        if run.status is RunStatus.RUNNING
        for call in run.open()
        if call.status is ToolCallStatus.RUNNING and not call.children
    ]
    return ", ".join(calls[:3]) or "no call was at work"


class Elsewhere:
    """The runs of a store that this process does not own."""

    def __init__(self, runs: LocalRuns, owner: Owner) -> None:
        self._runs, self.owner, self._store = runs, owner, owner.store
        self._has_looked = False
        """True if the orphaned logs were looked at once."""
        self._waiting: dict[str, float] = {}
        """Logs whose owners have died and that wait for their turn, each with the time since when it is known."""
        self._left_alone: set[str] = set()
        """Runs that cannot be continued here; each was logged once."""

    # --- claiming

    async def recover(self) -> list[LiveRun]:
        """Continue the runs whose owners are gone; return those that this process has taken over.

        A run whose processes have died waits for its turn and for its pause.
        """
        self._has_looked = True
        return await self._recover_all(await self._in_turn(await self.owner.orphans()))

    def pause(self) -> float:
        """Return the seconds until the next `recover` is due."""
        return _SOON if self._waiting or not self._has_looked else inf

    async def recover_left(self) -> None:
        """Continue the runs that their owners have left. One that cannot be continued here is not tried again at once."""
        await self._recover_all([log for log in await self._store.left_logs() if log.log_id not in self._left_alone])

    async def note_deaths(self) -> None:
        """Learn how many processes have died, before this one begins anything."""
        await self._note_deaths([log for log in await self.owner.orphans() if log.owner is not None])

    async def _note_deaths(self, lost: Sequence[OpenLog]) -> None:
        probation = self._runs.probation
        probation.note_deaths(await self._store.deaths(RECENT))
        probation.note_deaths({log.owner: 0.0 for log in lost if log.owner is not None and log.owner != self.owner.id})

    async def _in_turn(self, logs: Sequence[OpenLog]) -> list[OpenLog]:
        """Return the orphaned logs that may be continued now; note the others as waiting."""
        lost = sorted([log for log in logs if log.owner not in (None, self.owner.id)], key=lambda log: log.lost)
        if not lost:
            self._waiting = {}
            return list(logs)
        probation, now = self._runs.probation, monotonic()
        await self._note_deaths(lost)
        seen = {log.log_id: self._waiting.get(log.log_id, now) for log in lost}
        chosen = [log for log in logs if log.log_id not in seen]
        places = probation.places()
        for log in lost:
            is_suspect = log.lost + 1 >= probation.suspect_from
            if now - seen[log.log_id] < pause_after(log.lost):
                continue
            if probation.has_place_for_suspect() if is_suspect else places > 0:
                places -= 1
                chosen.append(log)
                del seen[log.log_id]
                if is_suspect or probation.is_strict:
                    probation.reserve(log.log_id)
        self._waiting = seen
        return chosen

    async def _recover_all(self, logs: Sequence[OpenLog]) -> list[LiveRun]:
        found: list[LiveRun | None] = []
        for first in range(0, len(logs), TOGETHER):
            found += await run_together([self._recover(log) for log in logs[first : first + TOGETHER]])
        return [run for run in found if run is not None]

    async def _recover(self, log: OpenLog) -> LiveRun | None:
        try:
            record = await self._store.load_run(log.log_id)
            if record is None or not self._has_agent(record) or self._runs.get(log.log_id) is not None:
                self._runs.probation.leave(log.log_id)
                return None
            epoch = await self.owner.claim(log.log_id, log)
            if epoch is None:
                self._runs.probation.leave(log.log_id)
                return None
            _log.info("continuing run %s, which %s left", log.log_id, log.owner)
            return await self.take_over(log.log_id, epoch)
        except (RetinueError, ValueError) as exc:  # one bad run must not stop the recovery of others
            self._runs.probation.leave(log.log_id)
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
        facts = await self._facts(run_id)
        if facts.record.has_ended:  # its log keeps its owner while tasks are left
            return None if facts.owner is None else await self.claim(run_id, facts)
        claimed = await self.claim(run_id, facts)
        if claimed is None:
            raise RunElsewhere(run_id, await self._store.owner_of(run_id) or "another process")
        return claimed

    async def claim(self, log_id: str, facts: RunFacts, *, to_cancel: bool = False) -> LiveRun | None:
        """Claim a log and continue its run; None if another process owns it or an engine schedules it.

        Raises UnknownAgent if this process does not have the agent. A cancel does not need it.
        """
        if not to_cancel and facts.engine is not None:
            return None
        if facts.record.identity.agent not in self._runs.registry.agents and not to_cancel:
            if facts.owner is not None and not is_gone(facts.owner):
                return None
            self._require_agent(facts.record)
        epoch = await self.owner.claim(log_id, facts=facts)
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
                return await self._begin(record, writer, wishes, lost=self._lost_before(record, stored.losses))
            return await self._continue(record, writer, wishes, tree, state, stored.losses)
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
        self,
        record: RunRecord,
        writer: LogWriter,
        wishes: Sequence[Wish],
        first: FirstLeg | None = None,
        lost: str = "",
    ) -> LiveRun:
        """Start a run that has only its request in the store. If it was `lost` for good, it fails with that reason."""
        identity = record.identity
        body = await self._store.read_request(identity.run_id) if first is None else first.request
        if body is None:
            raise ConfigurationError(f"run {identity.run_id!r}: its request is not stored")
        log, backend, agent = self._runs.make_log(writer), self._runs.backend, self._agent(identity.agent, wishes)
        start = StoredStart(identity=identity, request=StoredRequest())
        if lost:  # nothing of its own may begin here
            agent = Agent(identity.agent, NoModel())
        try:
            start = decode_start(body)
            problem = lost or start.request.problem
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
        run.start(None, problem, WORKER_LOST if lost else "error")
        self._runs.add(run)
        await self._deliver(run, wishes)
        return run

    async def _continue(
        self,
        record: RunRecord,
        writer: LogWriter,
        wishes: Sequence[Wish],
        tree: LogState,
        state: RunState,
        losses: Losses,
    ) -> LiveRun:
        """Continue a run from its folded state, and deliver the wishes in its inbox."""
        agent = self._agent(state.first_agent or record.identity.agent, wishes, tree)
        log = self._runs.make_log(writer, tree)
        log.append_private(Private(kind="resumed", at=log.clock()))
        await self._runs.registry.follow_rests(log)
        problem = state.request.problem
        request = self._restored(agent, state.identity, state.request)
        run = self._adopt(LiveRun(self._runs, request, log, record, writer))
        run.losses = losses
        if losses.epoch == writer.epoch - 1 and not any(wish.kind == "cancel" for wish in wishes):
            await self._judge(run, writer, state)
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

    async def _judge(self, run: LiveRun, writer: LogWriter, state: RunState) -> None:
        """Note that the last process which worked on a run has died. If too many did, end what is at work in it."""
        losses = run.losses = judge(run.losses, state.total_steps)
        deaths = len(await self._store.deaths(EPISODE)) if losses.is_alone else 0
        times = "time" if losses.count == 1 else "times in a row, each time without progress"
        said = f"the process that worked on this run died {losses.count} {times}"
        if is_given_up(losses, self._runs.probation.max_takeovers, deaths):
            run.close_lost(f"{said}: it is not continued any more ({_at_work(run.log.tree)})")
        elif losses.count >= SUSPECT:
            run.log.append(state, ErrorRaised(message=f"{said}: it is continued", code=WORKER_LOST))
        await writer.settle(losses=losses)

    def _lost_before(self, record: RunRecord, losses: Losses) -> str:
        """Return why a run is not continued whose processes died before they stored its first event; "" if it is.

        A run that waits for its thread has not begun, so deaths do not accuse it."""
        if record.queued or losses.count <= self._runs.probation.max_takeovers:
            return ""
        return f"the process that was to begin this run died {losses.count} times before it could"

    def _adopt(self, run: LiveRun) -> LiveRun:
        run.is_adopted = True
        if (above := run.request.above) is not None:
            from .placed import make_widen

            run.log.widen = make_widen(run, above)
        return run

    async def _deliver(self, run: LiveRun, wishes: Sequence[Wish]) -> None:
        """Carry out the wishes in the inbox. Each has begun on return: a result that is asked for next comes after it."""
        for wish in wishes:
            run.receive(wish)
        await asyncio.sleep(0)

    # --- reaching their owners

    async def ask(self, run_id: str, command: Command, *, of_parent: bool) -> tuple[Reply, LiveRun | None]:
        """Put a command into the inbox of the log of a run, and return the reply of the owner; if there is no owner, claim
        the log. Also return the run, if this process works on it."""
        facts = await self._facts(run_id)
        record, log_id = facts.record, facts.record.log_id or run_id
        if isinstance(command, Decide):
            if record.has_ended:
                return await self._accepted_before(record, command), None
            if log_id == run_id and record.identity.parent_run_id is not None and not of_parent:
                return Reply(f"run {run_id!r} was placed for another run: answer that one, or its root"), None
        elif isinstance(command, Say) and record.has_ended and not command.ns:
            return Reply(f"it is {record.status}", code=RUN_ENDED), None
        elif isinstance(command, Cancel) and record.has_ended and not (command.tasks or command.ns):
            return Reply(), None
        reply, run = await self._put(facts if log_id == run_id else await self._facts(log_id), command)
        if reply.refused and run is None and isinstance(command, Decide):
            record = (await self._facts(run_id)).record
            if record.has_ended:  # meanwhile
                reply = await self._accepted_before(record, command)
        return reply, run

    async def _put(self, root: RunFacts, command: Command) -> tuple[Reply, LiveRun | None]:
        """Store a command for the owner of a log, and return the reply."""
        log_id = root.record.identity.run_id
        engine = self._engine_of(log_id, root)
        is_free = engine is None and (root.owner is None or is_gone(root.owner))
        if is_free and isinstance(command, Decide | Say):
            self._require_agent(root.record)  # no owner would read it: raise before anything is stored
        wish = make_wish(log_id, command)
        await self._store.put_wish(wish)
        if engine is not None and not isinstance(command, WidenGrant):  # the parent that grants is running
            await (engine.cancel if wish.kind == "cancel" else engine.answer)(log_id)
        if is_free and (run := await self._claim_to_reply(wish, root)) is not None:
            if (reply := await run.inbox.deliver(wish)) is not None:
                return reply, run
        # A worker reads it when it gets the leg, so there is no time limit.
        is_patient = engine is not None and not isinstance(command, Cancel)
        return await self._wait_for_reply(wish, float("inf") if is_patient else _patience(command))

    async def _wait_for_reply(self, wish: Wish, patience: float) -> tuple[Reply, LiveRun | None]:
        store, runs, now = self._store, self._runs, asyncio.get_running_loop().time
        log_id, end = wish.log_id, now() + patience
        with store.watch(log_id) as watch:
            while True:
                if (run := runs.get(log_id)) is not None:  # this process carries it out
                    reply = await run.inbox.deliver(wish)
                    if reply is not None:
                        return reply, run
                root = await self._facts(log_id)  # before the reply: the log may end with it
                if (body := await store.reply_to(log_id, wish.wish_id)) is not None:
                    return decode_reply(body), runs.get(log_id)
                if (
                    root.record.has_ended
                    and wish.run_id == log_id
                    and (wish.kind not in ("cancel_run", "message") or not root.owner)
                ):
                    return Reply(f"run {log_id!r} is {root.record.status}, it waits for nothing", code=RUN_ENDED), None
                if await self._claim_to_reply(wish, root) is not None:
                    continue
                if now() >= end:
                    owner = root.owner or "another process"
                    raise RunElsewhere(wish.run_id, f"{owner}, which was asked and has not replied yet")
                await watch.wait(min(max(end - now(), 0.0), LOOK_EVERY))

    async def _claim_to_reply(self, wish: Wish, root: RunFacts) -> LiveRun | None:
        """Continue a log without an owner here, to carry out a wish. Return None if this process cannot."""
        try:
            return await self.claim(wish.log_id, root, to_cancel=wish.kind == "cancel")
        except UnknownAgent:
            if await self._store.reply_to(wish.log_id, wish.wish_id) is None:
                raise
            return None  # the owner replied and left after the inbox was read

    def _engine_of(self, log_id: str, facts: RunFacts) -> Engine | None:
        """Return the engine that schedules a log, or None; raise if this runtime has another engine."""
        dispatcher = self._runs.dispatcher
        if facts.engine is None:
            return None
        if dispatcher is None or dispatcher.engine.name != facts.engine:
            raise RunElsewhere(log_id, f"workers of engine {facts.engine!r}: open this runtime with that engine")
        return dispatcher.engine

    async def wait_for_end(self, run_id: str, log_id: str) -> RunResult:
        """Return the result of a run after an answer. If the process that continues it dies, continue it here."""
        async with running(self.result(run_id)) as ending:
            while not await join([ending], LOOK_EVERY):
                root = await self._facts(log_id)
                is_free = root.owner is None or is_gone(root.owner)
                if not ending.done() and is_free and self._has_agent(root.record):
                    await self.claim(log_id, root)
            return ending.result()

    async def _accepted_before(self, record: RunRecord, command: Decide) -> Reply:
        """Return the reply to decisions on a run that has ended: refused, unless the run had accepted them."""
        run_id, stored = command.run_id, await self._store.read_log(record.log_id) or StoredLog()
        events = [row.event for row in stored.rows if row.event is not None]
        known = {event.decision.id for event in events if isinstance(event, ToolCallResumed) and event.decision}
        if not all(decision.id in known for decision in command.decisions.values()):
            error = None if record.result is None else record.result.error
            why = "" if error is None else f": {error}"
            return Reply(f"run {run_id!r} is {record.status}, it waits for nothing{why}")
        starts = [event.seq for event in events if isinstance(event, RunStarted) and event.run_id == run_id]
        return Reply(place=max(starts, default=1) - 1)

    async def _facts(self, run_id: str) -> RunFacts:
        if self._runs.dispatcher is not None:
            await self._runs.dispatcher.wait_until_begun(run_id)
        facts = None if id_problem(run_id) else await self._store.facts_of(run_id)
        if facts is None:
            raise UnknownRun(run_id)
        return facts

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


def _patience(command: Command) -> float:
    """Return the seconds in which a living owner has replied to a command."""
    match command:
        case Cancel():
            return command.grace + LATER
        case CancelTask():
            return GRACE + LATER
        case Decide() | Say():
            return PATIENCE
        case WidenGrant():
            return float("inf")
