"""The inbox of a log, from outside: decisions and cancels for runs that this process does not own.

A wish needs no epoch: it is put into the inbox, and the owner, or the next one, makes a fact of it and replies. Where
nobody owns the log, the process that has a wish becomes its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

from ..core.decisions import Decision
from ..core.errors import ConfigurationError, DecisionRefused, RunElsewhere, UnknownRun
from ..core.events import Event, RunFinished, RunStarted, ToolCallResumed
from ..core.ids import unique
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..core.stores import DurableStore, RunRecord, StoredLog, Wish
from ..loop.log import LiveLog
from ..loop.tickets import encode_decisions
from ..storage.logs import stored_events
from .owner import is_gone
from .requests import CancelWish, Refusal

if TYPE_CHECKING:
    from .runs import LocalRuns

PATIENCE = 5.0
"""Seconds in which an owner that lives replies to a wish."""
LATER = 2.0
"""Seconds after which a run has been cancelled by its owner, once its grace is over."""
LOOK_EVERY = 1.0

_encode = msgspec.json.Encoder().encode
_refusal = msgspec.json.Decoder(Refusal).decode


class Inbox:
    """Answers and cancels runs wherever they are."""

    def __init__(self, runs: LocalRuns, store: DurableStore | None) -> None:
        self._runs, self._store_or_none = runs, store

    @property
    def _store(self) -> DurableStore:
        assert self._store_or_none is not None
        return self._store_or_none

    async def answer(self, run_id: str, decisions: Mapping[str, Decision]) -> RunResult:
        """Answer a run that waits, and return what comes of it."""
        runs = self._runs
        await runs.here(run_id)
        if (here := runs.resume_here(run_id, decisions)) is not None:
            return await here.result()
        if (log := runs.log_with(run_id)) is not None:
            await runs.background.answer(log, run_id, decisions)
            return await self._end_of_child(log, run_id)
        if self._store_or_none is None:
            raise UnknownRun(run_id)
        record = await runs.record(run_id)
        if record.result is not None and record.result.status.is_terminal:
            return await self._answered_before(record, decisions)
        refused = await self._ask(record, _wish(record, "decide", encode_decisions(decisions)), PATIENCE)
        record = await runs.record(run_id)
        if refused and record.result is not None and record.result.status.is_terminal:
            return await self._answered_before(record, decisions)
        if refused:
            raise DecisionRefused(refused)
        return await self._see_through(record)

    async def cancel(self, run_id: str, reason: str, grace: float, tasks: bool) -> RunResult:
        """Have a run stopped by its owner, or stop it here where nobody owns it."""
        if self._store_or_none is None:
            raise UnknownRun(run_id)
        record = await self._runs.record(run_id)
        if record.log_id != run_id:
            raise ConfigurationError(f"run {run_id!r} is in the background of {record.log_id!r}: cancel its task")
        if record.result is None or not record.result.status.is_terminal or tasks:
            await self._ask(record, _wish(record, "cancel", _encode(CancelWish(reason, tasks, grace))), grace + LATER)
        return await self._runs.result(run_id)

    async def last_leg(self, run_id: str, end: asyncio.Future[RunResult]) -> tuple[LiveLog, int]:
        """Return the log of a run that is being answered, and the number of the event before its new leg."""
        store = self._store
        begun = asyncio.create_task(self._until_running(run_id))
        await asyncio.wait({end, begun}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        log = LiveLog()
        if end.done() and (end.cancelled() or end.exception() is not None):
            log.close()  # the answer was refused: nothing follows
            return log, 0
        if (run := self._runs.get(run_id)) is not None:
            return run.log, run.first
        log_id, first, last = (await self._runs.record(run_id)).log_id, 0, 0
        for event in await self._events_of(log_id):
            if isinstance(event, RunStarted) and event.run_id == run_id:
                first, last = event.seq - 1, 0
            elif isinstance(event, RunFinished) and event.run_id == run_id:
                last = event.seq
        log.earlier = lambda after, until: stored_events(store, log_id, after, until)
        if last and await store.owner_of(log_id) is None:
            log.first = last
            log.close()
        else:
            log.first, log.lost = first, True
        return log, first

    async def _events_of(self, log_id: str) -> list[Event]:
        """Return the events of a log that are stored by now, without deltas."""
        stored = await self._store.read_log(log_id) or StoredLog()
        return [row.event for row in stored.rows if row.event is not None]

    async def _until_running(self, run_id: str) -> None:
        with self._store.watch(run_id) as watch:
            while (await self._runs.record(run_id)).result is not None:
                await watch.wait(LOOK_EVERY)

    async def _see_through(self, record: RunRecord) -> RunResult:
        """Return what came of a run that was answered; where the process that continues it is gone, continue it."""
        run_id, log_id = record.identity.run_id, record.log_id
        root = record if log_id == run_id else await self._runs.record(log_id)
        ending = asyncio.create_task(self._runs.result(run_id))
        try:
            while not ending.done():
                await asyncio.wait({ending}, timeout=LOOK_EVERY)
                owner = None if ending.done() else await self._store.owner_of(log_id)
                if not ending.done() and (owner is None or is_gone(owner)) and self._runs.knows(root):
                    await self._runs.claim(log_id, root)
            return ending.result()
        finally:
            ending.cancel()

    async def _answered_before(self, record: RunRecord, decisions: Mapping[str, Decision]) -> RunResult:
        """Return the result of a run that has ended with these decisions; others come too late."""
        assert record.result is not None
        events = await self._events_of(record.log_id)
        resumed = [event.decision for event in events if isinstance(event, ToolCallResumed)]
        known = {decision.id for decision in resumed if decision is not None}
        if all(decision.id in known for decision in decisions.values()):
            return self._runs.typed(record)
        raise DecisionRefused(f"run {record.identity.run_id!r} is {record.result.status}, it waits for nothing")

    async def _ask(self, record: RunRecord, wish: Wish, patience: float) -> str:
        """Put a wish into an inbox, see that somebody hears it, and return the reply: why not, or nothing."""
        store, runs, now = self._store, self._runs, asyncio.get_running_loop().time
        root = record if wish.log_id == record.identity.run_id else await runs.record(wish.log_id)
        owner = await store.owner_of(wish.log_id)
        if owner is None or is_gone(owner):
            runs.require_agent(root.identity.agent)  # nobody would hear it: raises before anything is stored
        await store.put_wish(wish)
        end = now() + patience
        with store.watch(wish.log_id) as watch:
            while True:
                ended = (await runs.record(root.identity.run_id)).result
                body = await store.reply_to(wish.log_id, wish.wish_id)
                if body is not None:
                    return _refusal(body).refused
                if ended is not None and ended.status.is_terminal and wish.run_id == wish.log_id:
                    return f"run {wish.run_id!r} is {ended.status}, it waits for nothing"
                if runs.get(wish.log_id) is not None:
                    if runs.owner is not None:
                        runs.owner.poke()
                elif await runs.claim(wish.log_id, root) is not None:
                    continue
                if now() >= end:
                    owner = await store.owner_of(wish.log_id) or "another process"
                    raise RunElsewhere(wish.run_id, f"{owner}, which was asked and has not replied yet")
                await watch.wait(min(end - now(), LOOK_EVERY))

    async def _end_of_child(self, log: LiveLog, run_id: str) -> RunResult:
        """Return how a background child ended here, or where it waits next."""
        if log.tree.runs[run_id].status is RunStatus.RUNNING:
            async for _ in log.follow(log.tree.seq, run_id):
                pass
        return log.results[run_id] if run_id in log.results else await self._runs.result(run_id)


def _wish(record: RunRecord, kind: Literal["decide", "cancel"], body: bytes) -> Wish:
    run_id = record.identity.run_id
    return Wish(log_id=record.log_id, wish_id=f"wish_{unique()}", run_id=run_id, kind=kind, body=body)
