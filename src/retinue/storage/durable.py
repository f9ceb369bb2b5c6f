"""The journal of a run that outlives its process: what is recorded is in the store before anything follows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ..core.errors import ExecutionFailed, InternalError, RetinueError, StateError
from ..core.ids import unique
from ..core.journal import Kind
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.messages import ToolCall
from ..core.stores import JournalEntry
from ..loop.outcomes import CallOutcome, failed
from ..loop.records import decode_outcome, decode_result, decode_turn, encode_outcome, encode_result, encode_turn
from ..loop.scope import RunScope
from .logs import LogWriter

T = TypeVar("T")

BEGUN, AGAIN = "begun", "again"
"""What was begun and may not be begun twice; what waits for a child, and is run again to find it."""


class Recorded:
    """The entries of one journal, by run and key, as the process before left them."""

    def __init__(self, entries: Iterable[JournalEntry] = ()) -> None:
        self.by_run: dict[str, dict[str, JournalEntry]] = {}
        self.begun: dict[str, set[str]] = {}
        self.told_again = asyncio.Event()
        """Set when a run asks for something that is not here."""
        for entry in entries:
            if entry.kind == BEGUN:
                self.begun.setdefault(entry.run_id, set()).add(entry.key)
            else:
                self.by_run.setdefault(entry.run_id, {})[entry.key] = entry
        if not any(entry.kind == "model" for known in self.by_run.values() for entry in known.values()):
            self.told_again.set()


class DurableJournal:
    """Does the work and records it, or gives what was recorded. One for each run; those of a tree share a writer."""

    keeps = True

    def __init__(self, run_id: str, writer: LogWriter, recorded: Recorded) -> None:
        self._run_id, self._writer, self._recorded = run_id, writer, recorded
        self._known = recorded.by_run.get(run_id, {})
        self._begun = recorded.begun.get(run_id, frozenset[str]())
        self._with_next: list[JournalEntry] = []
        self._run: RunScope | None = None
        self._unsure = False
        """Whether the last answer of the model may not be in the store yet: it is, before anything follows from it."""

    def bind(self, run: Any) -> None:
        self._run = run

    def now(self) -> float:
        return time.time()

    def new_id(self, prefix: str) -> str:
        return f"{prefix}_{unique()}"

    def child(self, run_id: str) -> DurableJournal:
        return DurableJournal(run_id, self._writer, self._recorded)

    async def caught_up(self) -> None:
        await self._recorded.told_again.wait()

    def recall(self, key: str) -> bytes | None:
        entry = self._known.get(key)
        return None if entry is None else entry.body

    def note(self, key: str, body: bytes, *, with_next: bool = False) -> None:
        entry = JournalEntry(self._run_id, key, "note", body)
        if with_next:
            self._with_next.append(entry)
        else:
            self._writer.add(entry)

    async def record(
        self,
        kind: Kind,
        key: str,
        about: Any,
        work: Callable[..., Awaitable[T]],
        *args: Any,
        instead: Callable[[], T] | None = None,
    ) -> T:
        before = self._known.get(key)
        if before is not None and (before.kind != AGAIN or self._went_on(key)):
            return self._read(kind, key, before.body)
        self._recorded.told_again.set()
        if instead is not None and before is None:
            if key in self._begun:
                return await self._keep(kind, key, instead())
            await self._write(JournalEntry(self._run_id, key, BEGUN))
        elif self._unsure:
            self._unsure = False
            await self._writer.flush()
        return await self._keep(kind, key, await work(*args))

    async def _keep(self, kind: Kind, key: str, value: Any) -> Any:
        """Record what came of it. An outcome that cannot be recorded is told as a failure, to the model as to us."""
        run = self._run
        assert run is not None
        if kind == "tool":
            value, body = _outcome_on_paper(run, key, value)
            waits = value.status is ToolCallStatus.SUSPENDED and _has_children(run, key)
            if waits and key in self._known:
                return value
            await self._write(JournalEntry(self._run_id, key, AGAIN if waits else kind, body))
        elif kind == "model":
            self._add(JournalEntry(self._run_id, key, kind, encode_turn(value)))
            self._unsure = True
        elif kind == "effect":
            await self._write(JournalEntry(self._run_id, key, kind, value))
        elif value.status is not RunStatus.SUSPENDED:  # a child that waits is found again by its own journal
            await self._write(JournalEntry(self._run_id, key, kind, encode_result(value, None)))
        return value

    def _read(self, kind: Kind, key: str, body: bytes) -> Any:
        run = self._run
        assert run is not None
        if kind == "tool":
            run.count_call(_call_id(key))
            return decode_outcome(body, run.state, run.hooks)
        if kind == "model":
            turn = decode_turn(body)
            run.retell(turn.message.text)
            return turn
        return body if kind == "effect" else decode_result(body, None)

    def _add(self, entry: JournalEntry) -> None:
        for held in self._with_next:
            self._writer.add(held)
        self._with_next.clear()
        self._writer.add(entry)

    async def _write(self, entry: JournalEntry) -> None:
        self._add(entry)
        self._unsure = False
        await self._writer.flush()

    def _went_on(self, key: str) -> bool:
        """Whether a call that waited for a child has ended since: then nobody need find that child again."""
        call, _, leg = key.partition("#")
        entry = self._known.get(f"{call}#{int(leg or 0) + 1}")
        return entry is not None and (entry.kind != AGAIN or self._went_on(entry.key))


def _outcome_on_paper(run: RunScope, key: str, outcome: CallOutcome) -> tuple[CallOutcome, bytes]:
    """An outcome and its record. One that could not be read back, or not be committed, is a failed call's."""
    try:
        if outcome.command is not None:
            run.hooks.check(outcome.command)
            run.state.check(outcome.command)
        return outcome, encode_outcome(outcome)
    except RetinueError as exc:
        call = ToolCall(_call_id(key), outcome.result.tool_name, {})
        reason = f"call {call.id!r} could not commit its state: {exc}"
        lost = failed(call, ExecutionFailed(reason) if isinstance(exc, StateError) else InternalError(str(exc)))
        return lost, encode_outcome(lost)


def _call_id(key: str) -> str:
    return key.removeprefix("tool:").partition("#")[0]


def _has_children(run: RunScope, key: str) -> bool:
    open_call = run.open_calls.get(_call_id(key))
    return open_call is not None and bool(open_call.children)
