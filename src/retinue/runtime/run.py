"""A run in progress, as whoever started it sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from ..backends.local import LocalBackend
from ..backends.local_run import LocalRun
from ..core.context import GRACE
from ..core.decisions import Decision
from ..core.errors import DecisionRefused, RetinueError
from ..core.events import Event
from ..core.journal import Journal
from ..core.lifecycle import RunStatus
from ..core.runs import RunResult
from ..core.state import PersistedState
from ..core.stores import RunRecord
from ..loop.decide import Answer
from ..loop.handles import ChildHandle, children_of
from ..wire.parts import Mode, PartsProjection, StreamPart
from .keeping import Keeping


class Past(Struct):
    """What a process that has ended left of a run."""

    record: RunRecord
    legs: Sequence[Sequence[Answer]] = ()
    """The decisions it went on with, each time."""
    held: bool = False
    """Whether it stays this process's where it waits: somebody is about to answer."""

    @property
    def result(self) -> RunResult | None:
        """How it ended, where only its background tasks are left."""
        result = self.record.result
        return result if result is not None and result.status.is_terminal else None


class Run:
    """A run in progress. Iterate it for events; leaving the iteration does not stop it."""

    def __init__(
        self,
        local: LocalRun,
        backend: LocalBackend,
        keeping: Keeping,
        on_end: Callable[[Run, bool], None],
        *,
        before: asyncio.Future[None] | None = None,
        behind: Run | None = None,
        past: Past | None = None,
        leg: tuple[Sequence[Answer], Mapping[str, Decision]] | None = None,
    ) -> None:
        self._local, self._backend, self.keeping, self._on_end = local, backend, keeping, on_end
        self._before, self._behind, self._past, self._leg = before, behind, past, leg
        self._first = len(local.log.events)
        identity = local.request.identity
        self.run_id, self.thread_id, self.agent = identity.run_id, identity.thread_id, identity.agent
        self._record = RunRecord(identity=identity, started_at=local.journal.now()) if past is None else past.record
        self._next_leg: Run | None = None
        self._went_on = self._settling = False
        loop = asyncio.get_running_loop()
        self.left: asyncio.Future[None] = loop.create_future()
        """Done when it has left its thread to others."""
        self._entered = asyncio.Event()
        """Set when its store knows of it, or never will."""
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

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody has told it to stop."""
        return self._local.request.cancellation.reason is not None

    @property
    def is_over(self) -> bool:
        """Whether it had ended with its process, and only its background tasks go on here."""
        return self._past is not None and self._past.result is not None

    @property
    def is_stored(self) -> bool:
        """Whether it has begun, so that its store knows of it."""
        return self._local.scope is not None

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

    async def settled(self) -> None:
        """Wait until it has ended or waits, however that went."""
        await asyncio.wait({self._end})

    @property
    def failure(self) -> BaseException | None:
        """What came out of it in place of a result."""
        return self._end.exception() if self._end.done() and not self._end.cancelled() else None

    def resumed(self, decisions: Mapping[str, Decision]) -> Run:
        """The next leg of a suspended run; itself where the decisions were taken in before."""
        if not self.is_stored:
            raise DecisionRefused(f"run {self.run_id!r} has not begun yet, it waits for nothing")
        answers = self._local.match(decisions)
        if not answers:
            return self
        if self._leg is not None and not self._went_on:  # it does not look like it yet
            raise DecisionRefused(f"run {self.run_id!r} is running, it waits for nothing")
        self.keeping.check(answers)
        self._local.log.reopen()
        self._next_leg = next_leg = Run(
            self._local, self._backend, self.keeping, self._on_end, leg=(answers, self._local.take(answers))
        )
        next_leg._record, next_leg.left = self._record, self.left
        return next_leg

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
            noted = asyncio.create_task(self.keeping.note_cancel(reason))
            await self.come_up_to_date(grace)
            self._local.request.cancellation.set(reason)
            if self._local.scope is None and (self._before is not None or self._record.queued):
                await self._leave_behind(reason)  # it has not come to its turn
                return await self.result()
            # Before the loop has begun it sees for itself that it need not; once it has ended there is nothing to stop.
            if self._local.scope is not None and not self._settling:
                self._task.cancel(reason)
            await asyncio.wait({self._task}, timeout=grace)
            if not self._end.done() and not self._settling:
                await self._leave_behind(reason)
            await asyncio.wait({noted}, timeout=grace)
        return await self.result()

    async def come_up_to_date(self, grace: float = GRACE) -> None:
        """Let a run of a process that has ended come to where it was: what it said and did there is part of it."""
        if self._past is None:
            return
        there = asyncio.create_task(self.journal.caught_up())
        await asyncio.wait({there, self._end}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        there.cancel()

    @property
    def tasks(self) -> int:
        """How many background tasks that were started under it have not ended."""
        return len(self._local.log.holders)

    async def cancel_tasks(self) -> None:
        """Stop the background tasks that were started under this run."""
        await asyncio.gather(*[cancel("cancelled") for cancel in list(self._local.log.holders.values())])

    async def _give_up(self, reason: str) -> RunResult:
        """End a run that waits for an answer which will not come."""
        self._local.log.reopen()
        await self.keeping.go_on(())
        self._local.request.cancellation.set(reason)
        result = self._local.abandon()
        assert result is not None
        self._end = asyncio.get_running_loop().create_future()
        await self._settle(result)
        return result

    async def _leave_behind(self, reason: str) -> None:
        """End a run that does not stop, or never came to its beginning."""
        if self._local.scope is not None:
            await self._settle(self._local.abandoned())
            return
        self._task.cancel(reason)
        if self._before is not None or self._record.queued:
            self._local.begin()  # it tells a beginning and an end; its thread is not its own to change
        result = self._local.abandon() or RunResult(
            status=RunStatus.CANCELLED,
            run_id=self.run_id,
            thread_id=self.thread_id,
            state=PersistedState(),
            error=reason,
            termination="cancelled",
        )
        self._end.set_result(result)
        self._record.result = result
        await self.keeping.settle(self._record, None, 0)
        self._close()

    async def _conduct(self) -> None:
        """The life of a run: its thread is loaded, it runs, its thread is saved."""
        try:
            result = await self._work()
            if result is None:
                self._close()
                return
            if result.status is RunStatus.SUSPENDED and self._past is not None and self._past.held:
                self._end.set_result(result)
                return
            try:
                await self._settle(result)
            except asyncio.CancelledError:  # too late to cancel: what there is must be kept
                await self._settle(result)
        except asyncio.CancelledError:
            if not self._end.done():
                await self._stop_before_it_went_on()
        except Exception as exc:
            if not self._end.done():
                self._end.set_exception(exc)
                self._end.exception()  # nobody need be waiting
            if not self.is_lost:
                await self._break_down(str(exc))
            self._close()

    @property
    def is_lost(self) -> bool:
        """Whether it was to go on here and could not, so that its store knows better how it stands."""
        return self._leg is not None and not self._went_on and self.failure is not None

    async def _stop_before_it_went_on(self) -> None:
        """End a leg that was told to stop before it had begun; or the event loop is going down."""
        stopped = self._leg is not None and self._local.request.cancellation.is_set()
        if stopped and (result := self._local.abandon()) is not None:
            await self._settle(result)
            return
        self._end.cancel()
        self._close()

    def let_go(self) -> None:
        """Leave a run that was held for an answer to whoever answers it."""
        if self._past is not None and self._past.held and self.waits:
            self._past.held = False
            self._close()

    async def _break_down(self, reason: str) -> None:
        """Store the end of a run that something came out of which is no result: its thread is for others."""
        if self._local.scope is None or self.is_over:
            return
        self._local.request.cancellation.set(reason)
        self._record.result = self._local.log.results.get(self.run_id) or self._local.abandon()
        with contextlib.suppress(RetinueError):
            await self.keeping.settle(self._record, None, 0)

    async def _work(self) -> RunResult | None:
        """Run to the end or to where it waits; None where it has ended before, and only its tasks go on."""
        if self._leg is not None:
            answers, fresh = self._leg
            await self.keeping.go_on(answers)
            self._went_on = True
            return await self._local.resume(fresh)
        if self._before is not None:
            if self._behind is not None:
                await self._behind._entered.wait()
                self._behind = None
            await self.keeping.enter(self._record)
            self._entered.set()
            await self._before
        past = self._past or Past(self._record)
        if past.result is not None:
            self.keeping.begin_after_its_end()
            self._backend.begin(self._local)
            self._end.set_result(self._local.take_result(past.result))
            await self._local.take_up_tasks()
            return None
        thread = await self.keeping.begin(self._record)
        self._entered.set()
        self._before = None
        self._backend.begin(self._local, thread)
        result = await self._local.execute()
        for answers in past.legs:  # what was decided before its process ended
            if result.status is RunStatus.SUSPENDED:
                result = await self._local.resume(self._local.take(answers))
        return result

    async def _settle(self, result: RunResult) -> None:
        """Store what came of it and tell whoever waits."""
        self._settling = True
        thread = None if result.status is RunStatus.SUSPENDED else self._local.thread_after()
        self._record.result, self._record.decided = result, self._local.decided()
        await self.keeping.settle(self._record, thread, self._local.history)
        if not self._end.done():
            self._end.set_result(result)
        self._close()

    def _close(self) -> None:
        self._entered.set()
        self._local.log.close()
        waits = self.waits
        if not waits:
            self._backend.forget(self.run_id)
        self._on_end(self, waits)
