"""Handles of runs: events as they come, text, parts, children, the result, cancel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, cast

from msgspec.structs import replace

from ..core.concurrency import GRACE
from ..core.errors import ConfigurationError, OwnershipLost, UnknownRun
from ..core.events import AnyEvent, ChildStarted, ErrorRaised, Event, Namespace, RunFinished, RunStarted, TextDelta
from ..core.messages import Message, Role, as_messages
from ..core.runs import Out, RunResult, unique
from ..core.state import PersistedState
from ..log.read import RunLog, end_of, leg_of, read_until
from ..wire.parts import Mode, PartsProjection, StreamPart


class RunHome(Protocol):
    """The place that runs a handle's run: this process, or a server."""

    async def wait_until_stored(self, run_id: str, end: asyncio.Future[Any]) -> None: ...

    async def result(self, run_id: str) -> RunResult: ...

    async def cancel(self, run_id: str, reason: str, grace: float, tasks: bool, ns: Namespace = ()) -> RunResult: ...

    async def send(self, run_id: str, messages: tuple[Message, ...], ns: Namespace = ()) -> None: ...


Opened = tuple[RunLog, int]
"""The log of a run, and the number of the last event before the leg that a handle shows."""


class RunHandle(Generic[Out]):
    """A run to watch: the common part of `Run` and `ChildRun`.

    Iterate it for its events and those of everything below it. Leaving the iteration does not stop the run.
    """

    _ns: Namespace = ()

    def __init__(self, run_id: str, agent: str, home: RunHome) -> None:
        self.run_id, self.agent, self._home = run_id, agent, home

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        if (opened := await self._open()) is None:
            return
        log, first = opened
        depth, reader = len(self._ns), log.read(first, live=True)
        async with aclosing(read_until(reader, leg_of(self.run_id), reader.rests, notices=True)) as events:
            async for event in events:
                if event.ns[:depth] == self._ns:
                    yield cast("AnyEvent", event)

    if not TYPE_CHECKING:

        def __iter__(self) -> Iterator[AnyEvent]:
            raise ConfigurationError("a run is iterated with `async for event in run`, or use runtime.stream_sync(…)")

        def __await__(self) -> Generator[Any, None, None]:
            raise ConfigurationError("a run is a handle: write `await run.result()`, or `await runtime.run(…)`")

    @property
    async def events(self) -> AsyncIterator[AnyEvent]:
        """The events of this run alone, without those of its children, until it ends."""
        if (opened := await self._open()) is None:
            return
        reader = opened[0].read(live=True, run_id=self.run_id)
        async with aclosing(read_until(reader, end_of(self.run_id), reader.rests)) as events:
            async for event in events:
                yield cast("AnyEvent", event)

    @property
    def text(self) -> TextStream:
        """The text of this run: iterate it for pieces, or await it for the whole."""
        return TextStream(self)

    @property
    async def children(self) -> AsyncIterator[ChildRun]:
        """The children of this run, as they start."""
        async for event in self.events:
            if isinstance(event, ChildStarted) and (opened := await self._open()) is not None:
                yield ChildRun(event, opened[0], self._home)

    async def parts(self, modes: Mode | Iterable[Mode] = ("updates",)) -> AsyncIterator[StreamPart]:
        """Yield the events as LangGraph-shaped parts. `runtime.parts` also yields those of background children."""
        project, depth = PartsProjection(modes), len(self._ns)
        if (opened := await self._open()) is None:
            return
        log, first = opened
        if first:  # an answer continues calls and sub-agents of before
            async with aclosing(read_until(log.read(live=True))) as earlier:
                async for event in earlier:
                    if event.seq <= first:
                        project(event)
                    if event.seq >= first:
                        break
        async for event in self:
            for part in project(event):
                if part["ns"][:depth] == self._ns:
                    yield part

    async def result(self) -> RunResult[Out]:
        """Wait for the end of the run and return its result."""
        raise NotImplementedError

    async def cancel(self, reason: str = "cancelled", grace: float = GRACE) -> RunResult[Out]:
        """Stop the run, wait for its end and return its result."""
        raise NotImplementedError

    async def send(self, message: str | Message) -> str:
        """Give the run a message while it works or waits; return its id. The model reads it with its next request, after the
        results of the calls. Raises RunEnded if no request follows."""
        raise NotImplementedError

    async def _open(self) -> Opened | None:
        """Return the log and the place of the leg; None if there is none, because an answer was refused."""
        raise NotImplementedError


class Run(RunHandle[Out]):
    """A root run, from its start or an answer to its end or suspension."""

    def __init__(
        self,
        run_id: str,
        thread_id: str,
        agent: str,
        home: RunHome,
        end: asyncio.Future[RunResult[Out]],
        opened: Opened | asyncio.Future[Opened | None],
    ) -> None:
        """A future as `opened` is done once the run or its answer is accepted: until then its ids may be unknown. None: an
        answer was refused, so nothing follows."""
        super().__init__(run_id, agent, home)
        self.thread_id, self._end, self._opened = thread_id, end, opened
        self._cancelled: RunResult[Out] | None = None

    def __repr__(self) -> str:
        return f"<Run {self.run_id} of {self.agent!r}>"

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        if isinstance(self._opened, asyncio.Future):
            return super().__aiter__()
        log, first = self._opened  # every event of its log is its own: no second generator for each of them
        reader = log.read(first, live=True)
        stop = leg_of(self.run_id)
        return cast("AsyncIterator[AnyEvent]", read_until(reader, stop, reader.rests, notices=True))

    @property
    def ended(self) -> bool:
        """True if it has ended, or waits for a human."""
        return self._end.done()

    async def result(self) -> RunResult[Out]:
        """Wait until the run has ended or waits for a human. Cancelling this wait does not stop the run."""
        if self._cancelled is not None:  # perhaps while it waited for a human
            return self._cancelled
        try:
            return await asyncio.shield(self._end)
        except OwnershipLost:  # another process continues it
            return await self._home.result(self.run_id)

    async def stored(self) -> None:
        """Return once the store has the start of this run, or the answer that continues it.

        Raises ThreadBusy if another run has its thread, and DecisionRefused if the answer does not fit.
        """
        if await self._open() is None:
            await asyncio.shield(self._end)  # raises: the answer was refused
        await self._home.wait_until_stored(self.run_id, self._end)

    async def place(self) -> int:
        """Return the number of the last event before this start or answer."""
        if (opened := await self._open()) is None:
            self._end.result()  # raises: the answer was refused
            return 0
        return opened[1]

    async def cancel(self, reason: str = "cancelled", grace: float = GRACE, *, tasks: bool = False) -> RunResult[Out]:
        """Stop the model and the tools, and wait for the end. Work that does not stop within `grace` seconds is abandoned.

        Background tasks are stopped only with `tasks`.
        """
        self._cancelled = await self._home.cancel(self.run_id, reason, grace, tasks)
        return self._cancelled

    async def send(self, message: str | Message) -> str:
        await self._open()  # it has its id
        said = as_sent(message)
        await self._home.send(self.run_id, said)
        return said[0].id or ""

    async def follow(self, after: int = 0) -> AsyncIterator[AnyEvent]:
        """Yield the events of the log after number `after`, until the run has ended or waits, and its tasks have ended."""
        if (opened := await self._open()) is None:
            return
        reader = opened[0].read(after, live=True)
        async with aclosing(read_until(reader, idle=reader.rests, notices=True)) as events:
            async for event in events:
                yield cast("AnyEvent", event)

    async def _open(self) -> Opened | None:
        if not isinstance(self._opened, asyncio.Future):
            return self._opened
        await asyncio.wait({self._end, self._opened}, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            self._end.result()  # raises: it was refused
        return self._opened.result()


class ChildRun(RunHandle[Any]):
    """A child of a run, during its work and after. The call that started it identifies it."""

    def __init__(self, started: ChildStarted, log: RunLog, home: RunHome) -> None:
        super().__init__(started.child_run_id, started.child_agent, home)
        self.name, self.call_id = started.child_agent, started.call_id
        self.ns = self._ns = started.child_ns
        self._log, self._first = log, started.seq

    def __repr__(self) -> str:
        return f"<ChildRun {self.run_id} of {self.agent!r}, call {self.call_id}>"

    @property
    def thread_id(self) -> str:
        """The thread of the child; empty until its first event."""
        return self._log.thread_of(self.run_id)

    async def result(self) -> RunResult:
        """Wait for the end of the child and return its result. A suspended child is waited for."""
        last = [event async for event in self.events][-1]
        if self.run_id not in self._log.results and isinstance(last, RunFinished):
            return _result_of(last, self.thread_id)
        return self._log.results[self.run_id]

    async def cancel(self, reason: str = "cancelled", grace: float = GRACE) -> RunResult:
        """Stop this child alone; its parent reads a cancelled result and continues."""
        return await self._home.cancel(self._log.log_id, reason, grace, False, self.ns)

    async def send(self, message: str | Message) -> str:
        said = as_sent(message)
        await self._home.send(self._log.log_id, said, self.ns)
        return said[0].id or ""

    async def _open(self) -> Opened:
        return self._log, self._first


def _result_of(end: RunFinished, thread_id: str) -> RunResult:
    """Return the result of a run from its last event, for runs on a server whose result is not known here."""
    return RunResult(
        status=end.status,
        run_id=end.run_id,
        thread_id=thread_id,
        response=end.response,
        output=end.output,
        steps=end.steps,
        state=PersistedState(),
        usage=end.usage,
        error=end.error,
        termination=end.termination,
    )


def as_sent(given: str | Message | Iterable[Message]) -> tuple[Message, ...]:
    """Return messages for a run at work, each with an id."""
    messages = as_messages(given)
    for message in messages:
        if message.role is not Role.USER:
            raise ConfigurationError(f"a run is sent messages of the user, not of the role {message.role.value!r}")
        if not message.parts:
            raise ConfigurationError('the message is empty: give text, such as "Only the last week"')
    return tuple([message if message.id else replace(message, id=f"message_{unique()}") for message in messages])


async def result_at(
    events: AsyncGenerator[Event], ns: Namespace, seconds: float, known: Mapping[str, RunResult] = MappingProxyType({})
) -> RunResult:
    """Return the result of the run at a namespace, from the events of its log; raise TimeoutError if it has not ended."""
    thread_id = ""
    async with asyncio.timeout(seconds), aclosing(events):
        async for event in events:
            if event.ns != ns:
                continue
            if isinstance(event, RunStarted):
                thread_id = event.thread_id
            elif isinstance(event, RunFinished) and event.status.is_terminal:
                return known.get(event.run_id) or _result_of(event, thread_id)
    raise UnknownRun("|".join(ns))


class TextStream:
    """The text of a run: iterate it for pieces as they come, or await it for the whole.

    The whole text leaves out partial answers that were dropped and retried; the pieces include them.
    """

    def __init__(self, run: RunHandle[Any]) -> None:
        self._run = run

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self._run.events:
            if isinstance(event, TextDelta):
                yield event.delta

    def __await__(self) -> Generator[Any, None, str]:
        return self._whole().__await__()

    async def _whole(self) -> str:
        said: list[TextDelta] = []
        async for event in self._run.events:
            if isinstance(event, TextDelta):
                said.append(event)
            elif isinstance(event, ErrorRaised) and event.dropped_message_id is not None:
                said = [delta for delta in said if delta.message_id != event.dropped_message_id]
        return "".join([delta.delta for delta in said])


async def result_or_cancel(run: Run[Out]) -> RunResult[Out]:
    """Wait for a run that belongs to this caller: cancelling the caller cancels the run."""
    try:
        return await run.result()
    except asyncio.CancelledError:
        await run.cancel("the caller was cancelled")
        raise


def check_loop() -> None:
    """Raise unless an event loop runs here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(
            "stream() needs an event loop: call it in an async function, or write runtime.stream_sync(…)"
        ) from None


def fork_place(at: int | None, message_id: str | None) -> int | str:
    """Return the event number or the message id at which to fork. Raise unless exactly one is given."""
    if (at is None) == (message_id is None):
        raise ConfigurationError("fork(…) needs either at=event number or message_id=id of a message")
    return message_id if at is None else at  # pyright: ignore[reportReturnType]  # one of them is given


def check_place(after: Any) -> int:
    """Return the number of an event; raise if it is none."""
    if not isinstance(after, int):
        raise ConfigurationError(f"after is the number of an event (event.seq), not {after!r:.80}")
    return after
