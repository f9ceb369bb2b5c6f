"""Runs in a store that others use too: begun here, or taken up where a process that has ended left them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ..backends.local import LocalBackend
from ..core.backend import RunRequest
from ..core.context import CancellationToken
from ..core.decisions import Decision
from ..core.errors import ConfigurationError, RetinueError, RunElsewhere, UnknownRun
from ..core.events import Event
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..core.state import PersistedState
from ..core.stores import DurableStore, JournalEntry, OwnedLog, Retention, RunRecord, WhenBusy
from ..loop.decide import decode_answers
from ..loop.log import EventLog
from ..loop.past import Pause
from ..loop.records import StoredRequest, decode_request, encode_request
from ..loop.recovery import Told, close_runs
from ..storage.durable import DurableJournal, Recorded
from ..storage.logs import LogWriter
from ..storage.sql import SqlStore
from ..storage.upkeep import keep_pruning
from .asking import Asking
from .keeping import DECISIONS, LogKeeping
from .node import Node, is_gone
from .registry import AgentRegistry
from .run import Past, Run

_log = logging.getLogger(__name__)

PAUSE = "pause"

_pause = msgspec.json.Decoder(Pause).decode


class Home(Protocol):
    """The runtime these runs are in."""

    def take(self, run: Run) -> None: ...

    def run_ended(self, run: Run, waits: bool) -> None: ...

    async def cancel(self, run_id: str) -> RunResult: ...

    async def resume(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult: ...

    def awaits(self, run_id: str) -> bool | None: ...


class StoredRuns:
    """The runs of one runtime in a durable store."""

    def __init__(
        self, store: DurableStore, lease: float, backend: LocalBackend, registry: AgentRegistry, home: Home
    ) -> None:
        self.store, self._backend, self._registry, self._home = store, backend, registry, home
        self.node = Node(store, lease)
        self.asking = Asking(store, self.node, home)
        self._left: set[str] = set()
        """Runs that cannot be gone on with here, as has been told."""
        self._ends: set[asyncio.Task[None]] = set()

    def start(
        self,
        request: RunRequest,
        log: EventLog,
        when_busy: WhenBusy,
        before: asyncio.Future[None] | None,
        behind: Run | None,
    ) -> Run:
        """A new run, which may begin after `before` and stands in line behind another."""
        run_id = request.identity.run_id
        writer = LogWriter(run_id, log, self.store)
        log.writer = writer
        local = self._backend.open(request, DurableJournal(run_id, writer, Recorded()), log)
        keeping = self._keeping(writer, encode_request(request), when_busy=when_busy)
        run = Run(local, self._backend, keeping, self._home.run_ended, before=before, behind=behind)
        self.node.take(run)
        return run

    def _keeping(
        self, writer: LogWriter, request: bytes | None = None, *, legs: int = 0, when_busy: WhenBusy = "reject"
    ) -> LogKeeping:
        return LogKeeping(
            self.store,
            self.node.owner,
            self.node.lease,
            writer,
            request=request,
            legs=legs,
            when_busy=when_busy,
            interrupt=self._home.cancel,
        )

    def ended(self, run: Run) -> None:
        """A leg of a run has ended: its log is ours until the last task under it is done."""
        job = asyncio.create_task(self._finish(run))
        self._ends.add(job)
        job.add_done_callback(self._ends.discard)

    async def _finish(self, run: Run) -> None:
        await run.keeping.finish()
        if self.node.runs.get(run.run_id) is run:
            self.node.let_go(run.run_id)

    def keep_recovering(self) -> None:
        self.node.look_for_orphans(self.take_up)

    def keep_pruning(self, retention: Retention) -> None:
        """From time to time, drop what is left of runs that ended long ago."""
        if not isinstance(self.store, SqlStore):
            raise ConfigurationError(f"retention is for databases, which {self.store!r} is not")
        self.node.start(keep_pruning(self.store, retention))

    async def recover(self) -> list[Run]:
        """Take up every run whose owner is gone."""
        found = [await self.take_up(log) for log in await self.node.orphans()]
        return [run for run in found if run is not None]

    async def take_up(self, log: OwnedLog) -> Run | None:
        """Go on with a run whose owner is gone; None where it is not for this runtime, or somebody was quicker."""
        record = await self.store.load_run(log.log_id)
        if record is None or not self._knows(record):
            return None
        epoch = await self.store.claim(log.log_id, self.node.owner, self.node.lease, after=log.owner)
        if epoch is None:
            return None
        _log.info("going on with run %s, which %s left", log.log_id, log.owner)
        try:
            return await self._open(log.log_id, epoch)
        except (RetinueError, ValueError) as exc:  # others must not suffer for it
            _log.error("run %s, which %s left, cannot be gone on with: %s", log.log_id, log.owner, exc)
            return None

    def _knows(self, record: RunRecord) -> bool:
        agent, run_id = record.identity.agent, record.identity.run_id
        if agent in self._registry.agents:
            return True
        if run_id not in self._left:
            self._left.add(run_id)
            _log.warning("run %s was interrupted; it is left, as no agent is named %r here", run_id, agent)
        return False

    async def load(self, run_id: str) -> Run | None:
        """A run that waits, or whose owner is gone, as one of this process; None where it has ended."""
        record = await self.record(run_id)
        if record.result is not None and record.result.status.is_terminal:
            return None
        owner = await self.store.owner_of(run_id)
        if owner is not None and owner != self.node.owner and not is_gone(owner):
            if record.identity.agent not in self._registry.agents:
                raise RunElsewhere(run_id, owner)
            epoch = await self.store.claim(run_id, self.node.owner, self.node.lease)
        else:
            self._registry.agent(record.identity.agent)  # who does not know it leaves it to others
            epoch = await self.store.claim(run_id, self.node.owner, self.node.lease, after=owner)
        if epoch is None:
            raise RunElsewhere(run_id, await self.store.owner_of(run_id) or "another process")
        return await self._open(run_id, epoch, held=True)

    async def _open(self, run_id: str, epoch: int, *, held: bool = False) -> Run:
        """Set up a run from what its store holds, and let it go on; one that cannot is ended, with the reason."""
        record = await self.record(run_id)
        events = await self._events(run_id)
        entries = await self.store.read_journal(run_id)
        log = EventLog(self._backend.sinks, events)
        writer = LogWriter(run_id, log, self.store, epoch, written=len(events), entries=len(entries))
        log.told, log.writer = Told(events, _pauses(run_id, events, entries, writer)), writer
        try:
            stored = _request_in(entries)
            request = self._request(stored)
            legs = [decode_answers(entry.body) for entry in entries if entry.kind == DECISIONS]
            local = self._backend.open(request, DurableJournal(run_id, writer, Recorded(entries)), log)
        except (RetinueError, ValueError) as exc:
            await self._fail(record, log, writer, str(exc))
            raise
        past = Past(record, [leg for leg in legs if leg], held)
        keeping = self._keeping(writer, legs=len(legs))
        run = Run(local, self._backend, keeping, self._home.run_ended, past=past)
        self.node.take(run)
        self._home.take(run)
        return run

    def _request(self, stored: StoredRequest) -> RunRequest:
        agent = self._registry.agent(stored.agent)
        return RunRequest(
            agent=agent,
            identity=stored.identity,
            messages=stored.messages,
            seed=stored.seed,
            limits=stored.limits,
            cancellation=CancellationToken(),
            context=stored.context,
            model=stored.model,
        )

    async def _fail(self, record: RunRecord, log: EventLog, writer: LogWriter, reason: str) -> None:
        """End a run that cannot be gone on with, and everything under it."""
        error = f"its process ended, and it cannot be gone on with: {reason}"
        close_runs(log, (), error, status=RunStatus.FAILED)
        identity = record.identity
        record.result = RunResult(
            status=RunStatus.FAILED,
            run_id=identity.run_id,
            thread_id=identity.thread_id,
            state=PersistedState(),
            error=error,
            termination="error",
        )
        log.close()
        await writer.settle(record, None, 0)
        await writer.finish()

    async def _events(self, run_id: str) -> list[Event]:
        found: list[Event] = []
        while True:
            events, _ = await self.store.read_events(run_id, len(found), 10_000) or ((), True)
            if not events:
                return found
            found.extend(events)

    async def record(self, run_id: str) -> RunRecord:
        record = await self.store.load_run(run_id)
        if record is None:
            raise UnknownRun(run_id)
        return record

    async def is_old(self, run: Run) -> bool:
        """Whether another process has gone on with a run that waits here."""
        if not run.waits or not isinstance(run.keeping, LogKeeping):
            return False
        writer = run.keeping.writer
        return await writer.has_let_go() and await self.store.epoch_of(run.run_id) != writer.epoch

    async def is_elsewhere(self, run_id: str) -> bool:
        """Whether another process that lives is at work on it."""
        owner = await self.store.owner_of(run_id)
        return owner is not None and owner != self.node.owner and not is_gone(owner)

    async def cancel(self, run_id: str, reason: str, grace: float) -> RunResult:
        """Ask the process that works on a run to stop it, and wait for its end."""
        await self.store.ask_cancel(run_id, reason)
        try:
            return await asyncio.wait_for(self.result(run_id), grace)
        except TimeoutError:
            owner = await self.store.owner_of(run_id) or "its process"
            raise RunElsewhere(run_id, f"{owner}, which was asked to stop it and has not yet") from None

    async def result(self, run_id: str) -> RunResult:
        """How a run ended, or where it waits."""
        with self.store.watch(run_id) as watch:
            while True:
                record = await self.record(run_id)
                if record.result is not None and await self.store.owner_of(run_id) is None:
                    return record.result
                if record.result is not None and record.result.status.is_terminal:
                    return record.result
                await watch.wait(1.0)

    async def leave(self) -> None:
        """Write no more of what runs here: the next process goes on with it, at once."""
        await self.node.fall_silent()
        keepings = [run.keeping for run in self.node.runs.values()]
        await asyncio.gather(*[keeping.writer.cut() for keeping in keepings if isinstance(keeping, LogKeeping)])
        try:
            await self.store.renew(self.node.owner, 0.0)
        except RetinueError as exc:
            _log.warning("what runs here is gone on with when its lease is over: %s", exc)

    async def close(self, runs: list[Run], grace: float) -> None:
        """Write what is left, and let go of the store."""
        for run in runs:
            run.let_go()
        if ends := [asyncio.create_task(run.keeping.finish()) for run in runs]:
            await asyncio.wait([*ends, *self._ends], timeout=grace)
        await self.asking.close()
        await self.node.close()
        await self.store.close()


def _pauses(run_id: str, events: Sequence[Event], entries: Sequence[JournalEntry], writer: LogWriter) -> list[Pause]:
    """When nobody was at work on a run, by its journal, and since the last that was told of it."""
    pauses = [_pause(entry.body) for entry in entries if entry.kind == PAUSE]
    if events:
        pauses.append((events[-1].at, time.time()))
        writer.add(JournalEntry(run_id, f"{PAUSE}:{len(pauses)}", PAUSE, msgspec.json.encode(pauses[-1])))
    return pauses


def _request_in(entries: Sequence[JournalEntry]) -> StoredRequest:
    for entry in entries:
        if entry.kind == "request":
            stored = decode_request(entry.body)
            if stored.lost is not None:
                raise ConfigurationError(stored.lost)
            return stored
    raise ConfigurationError("what was asked of it is not stored")
