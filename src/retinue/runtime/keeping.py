"""What is stored of one run: nothing but its end, or everything, in the log that this process owns."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ..core.errors import OwnershipLost, RetinueError, RunElsewhere, ThreadBusy
from ..core.stores import DurableStore, JournalEntry, RunRecord, Store, ThreadRecord, WhenBusy
from ..loop.decide import Answer, encode_answers
from ..storage.logs import LogWriter

_log = logging.getLogger(__name__)

DECISIONS = "decisions"
LEASE = 30.0
"""Seconds for which the owner of a run is believed to be alive without a word."""
_LOOK_AGAIN = 1.0

Interrupt = Callable[[str], Awaitable[object]]
"""Cancels the run of that id, wherever it is."""


class Keeping(Protocol):
    """How one run is stored."""

    async def enter(self, record: RunRecord) -> None:
        """Write down that it waits for its thread, so that it does so whatever becomes of this process."""
        ...

    async def begin(self, record: RunRecord) -> ThreadRecord | None:
        """Write down that it begins, when its thread is free; its thread as it is then."""
        ...

    def begin_after_its_end(self) -> None:
        """Go on with what is left of a run that has ended: the tasks under it."""
        ...

    def check(self, answers: Sequence[Answer]) -> None:
        """Whether decisions can be written down; DecisionRefused where not."""
        ...

    async def go_on(self, answers: Sequence[Answer]) -> None:
        """Write down that it goes on with what was decided."""
        ...

    async def settle(self, record: RunRecord, thread: ThreadRecord | None, thread_from: int) -> None:
        """Write how it ended or where it waits, with its thread where that has changed."""
        ...

    async def note_cancel(self, reason: str) -> None:
        """Write down that it is to be cancelled, for the case that its process ends before it does."""
        ...

    async def finish(self) -> None:
        """Return when everything is written that is there."""
        ...


class StoreKeeping:
    """Keeps threads and results."""

    __slots__ = ("_store",)

    def __init__(self, store: Store) -> None:
        self._store = store

    async def enter(self, record: RunRecord) -> None:
        return

    async def begin(self, record: RunRecord) -> ThreadRecord | None:
        thread = await self._store.load_thread(record.identity.thread_id)
        await self._store.save_run(record)
        return thread

    def begin_after_its_end(self) -> None:
        return

    def check(self, answers: Sequence[Answer]) -> None:
        return

    async def go_on(self, answers: Sequence[Answer]) -> None:
        return

    async def settle(self, record: RunRecord, thread: ThreadRecord | None, thread_from: int) -> None:
        if thread is not None:
            await self._store.save_thread(thread)
        await self._store.save_run(record)

    async def note_cancel(self, reason: str) -> None:
        return

    async def finish(self) -> None:
        return


class LogKeeping:
    """Keeps everything a run does, as the owner of its log."""

    def __init__(
        self,
        store: DurableStore,
        owner: str,
        lease: float,
        writer: LogWriter,
        *,
        request: bytes | None = None,
        legs: int = 0,
        when_busy: WhenBusy = "reject",
        interrupt: Interrupt | None = None,
    ) -> None:
        self._store, self._owner, self._lease, self.writer = store, owner, lease, writer
        self._request = request
        """What was asked, of a run that is not written down yet."""
        self._legs = legs
        self._when_busy, self._interrupt = when_busy, interrupt

    async def enter(self, record: RunRecord) -> None:
        record.queued = True
        await self._begin_run(record)

    async def _begin_run(self, record: RunRecord) -> str | None:
        """Write down what was asked of it, once; the run that has its thread, where another has."""
        request, self._request = self._request, None
        if request is None:
            return None
        entry = JournalEntry(record.identity.run_id, "request", "request", request)
        return await self._store.begin_run(record, entry, self._owner, self._lease)

    async def begin(self, record: RunRecord) -> ThreadRecord | None:
        identity, known = record.identity, self._request is None
        record.queued = record.queued or self._when_busy != "reject"
        holder = await self._begin_run(record)
        if holder is not None and self._when_busy == "reject":
            raise ThreadBusy(identity.thread_id, holder)
        if record.result is not None and record.result.status.is_terminal:
            self.writer.done = True  # only its tasks go on: it has left its thread, and waits for nobody
        elif holder is not None or known:
            await self._take_thread(record, holder)
        record.queued = False
        self.writer.start()
        return await self._store.load_thread(identity.thread_id)

    def begin_after_its_end(self) -> None:
        self.writer.done = True
        self.writer.start()

    async def _take_thread(self, record: RunRecord, holder: str | None) -> None:
        """Wait for the thread; with "interrupt", end what stands before."""
        interrupted: set[str] = set()
        while True:
            if holder is not None and self._when_busy == "interrupt" and holder not in interrupted:
                interrupted.add(holder)
                if self._interrupt is not None:
                    with contextlib.suppress(RunElsewhere):  # it was asked to stop, and is waited for
                        await self._interrupt(holder)
            with self._store.watch(holder or record.identity.run_id) as watch:
                holder = await self._store.take_thread(record)
                if holder is None:
                    return
                await watch.wait(_LOOK_AGAIN)

    def check(self, answers: Sequence[Answer]) -> None:
        encode_answers(answers)

    async def go_on(self, answers: Sequence[Answer]) -> None:
        writer, run_id = self.writer, self.writer.log_id
        if await writer.has_let_go():
            epoch = await self._store.claim(run_id, self._owner, self._lease)
            if epoch is None:
                raise RunElsewhere(run_id, await self._store.owner_of(run_id) or "another process")
            if epoch != writer.epoch + 1:  # somebody went on with it in between: what is here is old
                writer.epoch = epoch
                await writer.give_back()
                raise OwnershipLost(self._store.place, run_id)
            writer.own_again(epoch)
        self._legs += 1
        body = encode_answers(answers)
        await writer.record(JournalEntry(run_id, f"{DECISIONS}:{self._legs}", DECISIONS, body))

    async def settle(self, record: RunRecord, thread: ThreadRecord | None, thread_from: int) -> None:
        try:
            await self.writer.settle(record, thread, thread_from)
        except OwnershipLost as exc:
            if not self.writer.is_cut:
                _log.warning("%s: its end is not written", exc)

    async def note_cancel(self, reason: str) -> None:
        if self.writer.is_cut:
            return
        try:
            await self._store.ask_cancel(self.writer.log_id, reason)
        except RetinueError as exc:
            _log.warning("run %s: that it is cancelled is not written: %s", self.writer.log_id, exc)

    async def finish(self) -> None:
        await self.writer.finish()
