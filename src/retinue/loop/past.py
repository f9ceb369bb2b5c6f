"""What the log of a recovered run says of its past: what was used, how long it took, which call ended first."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from ..core.events import ChildStarted, Event, InferenceFinished, Namespace, RunFinished, RunStarted, ToolCallFinished
from ..core.lifecycle import RunStatus, ToolCallStatus
from ..core.runs import Usage
from .children import give_slot_back

_log = logging.getLogger(__name__)

Pause = tuple[float, float]
"""From when to when nobody was at work."""
_PATIENCE = 5.0
"""Seconds for which a call waits for those that ended before it."""


class Spent:
    """What children used that are not run again, because how their calls ended is recorded."""

    def __init__(self) -> None:
        self._usages: dict[str, list[Usage]] = {}
        self._started: dict[str, dict[str, list[str]]] = {}
        """The children of each run, by the call that started them."""
        self._open: dict[str, Namespace] = {}
        """Where the children are whose end was not told."""
        self._open_under: Counter[Namespace] = Counter()

    def follow(self, event: Event) -> None:
        if isinstance(event, InferenceFinished) and event.parent_run_id is not None:
            self._usages.setdefault(event.run_id, []).append(event.usage)
        elif isinstance(event, ChildStarted):
            self._started.setdefault(event.run_id, {}).setdefault(event.call_id, []).append(event.child_run_id)
            if event.child_run_id not in self._open:
                self._open[event.child_run_id] = event.child_ns
                self._open_under.update(_above(event.child_ns))
        elif isinstance(event, RunFinished) and event.status is not RunStatus.SUSPENDED:
            self.close(event.run_id)

    def has_open_under(self, ns: Namespace) -> bool:
        """Whether there are children below a place whose end was not told."""
        return self._open_under[ns] > 0

    def close(self, run_id: str) -> None:
        """A run has ended, or is not gone on with."""
        if (ns := self._open.pop(run_id, None)) is not None:
            self._open_under.subtract(_above(ns))

    def take_call(self, run_id: str, call_id: str) -> tuple[int, list[Usage]]:
        """How many children a call has, at any depth, and what each of their model calls used; once.

        Those that have not ended go on in the background, and are counted when they do.
        """
        ended = [child for child in self._started.get(run_id, {}).pop(call_id, ()) if child not in self._open]
        count, usages = len(ended), list[Usage]()
        for child in ended:
            below, used = self.take_run(child)
            count += below
            usages += used
        return count, usages

    def take_run(self, run_id: str) -> tuple[int, list[Usage]]:
        """As `take_call`, for all calls of a run, with what it used itself."""
        count, usages = 0, self._usages.pop(run_id, [])
        for call_id in list(self._started.get(run_id, ())):
            below, used = self.take_call(run_id, call_id)
            count += below
            usages = [*usages, *used]
        return count, usages


def _above(ns: Namespace) -> list[Namespace]:
    """The places above one."""
    return [ns[:length] for length in range(len(ns))]


class Clock:
    """How long runs have been at work."""

    def __init__(self, pauses: Iterable[Pause]) -> None:
        self._pauses = list(pauses)
        self._began: dict[str, float] = {}
        self._waits: dict[str, list[Pause]] = {}
        self._suspended: dict[str, float] = {}

    def follow(self, event: Event) -> None:
        run_id = event.run_id
        if isinstance(event, RunStarted):
            self._began.setdefault(run_id, event.at)
            if (since := self._suspended.pop(run_id, None)) is not None:
                self._waits.setdefault(run_id, []).append((since, event.at))
        elif isinstance(event, RunFinished) and event.status is RunStatus.SUSPENDED:
            self._suspended[run_id] = event.at

    def used(self, run_id: str, now: float) -> float:
        """Seconds a run has been at work until now, without those in which it waited or its process was gone."""
        until = self._began.get(run_id)
        if until is None:
            return 0.0
        used = 0.0
        for start, end in sorted([*self._pauses, *self._waits.get(run_id, ())]):
            used += max(0.0, min(start, now) - until)
            until = max(until, end)
        return used + max(0.0, now - until)


class _Line:
    """The calls of one run, in the order in which they ended."""

    def __init__(self) -> None:
        self.calls: deque[str] = deque()
        self.gone: Counter[str] = Counter()
        """Those that have ended again, behind one that has not."""
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.moves = 0

    def take_out(self, call_id: str) -> None:
        self.gone[call_id] += 1
        while self.calls and self.gone[self.calls[0]]:
            self.gone[self.calls.popleft()] -= 1

    def left(self) -> Iterator[str]:
        """Those that have not ended again."""
        gone = +self.gone
        for call_id in self.calls:
            if gone[call_id]:
                gone[call_id] -= 1
            else:
                yield call_id


class Order:
    """In which order the calls of a run have ended: who is first decides what is committed."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def follow(self, event: Event) -> None:
        if isinstance(event, ToolCallFinished):
            self._lines.setdefault(event.run_id, _Line()).calls.append(event.call_id)

    def ended(self, run: Any, call_id: str, *, again: bool) -> None:
        """A call has ended, again where it had before; whose turn it is then goes on."""
        line = self._lines.get(run.run_id)
        if line is None:
            return
        line.moves += 1
        if again:
            line.take_out(call_id)
        for one in line.left() if line.waiting else ():
            if one in line.waiting:
                _wake(line.waiting.pop(one))
                return
            if _is_at_work(run, one):
                return
        for one in list(line.waiting):  # those that had not ended come after all that had
            _wake(line.waiting.pop(one))

    async def turn(self, run: Any, call_id: str) -> None:
        """Wait until the calls of this step that ended before this one have ended again."""
        line = self._lines.get(run.run_id)
        while line is not None and (before := self._before(run, line, call_id)) is not None:
            give_slot_back(run, call_id)  # they may need it
            moves, change = line.moves, asyncio.get_running_loop().create_future()
            line.waiting[call_id] = change
            try:
                done, _ = await asyncio.wait({change}, timeout=_PATIENCE)
            finally:
                line.waiting.pop(call_id, None)
            if not done and line.moves == moves:
                _log.warning("run %s: call %s does not end again as it did", run.run_id, before)
                return

    def _before(self, run: Any, line: _Line, call_id: str) -> str | None:
        for one in line.left():
            if one == call_id:
                return None
            if _is_at_work(run, one):
                return one
        return None


def _is_at_work(run: Any, call_id: str) -> bool:
    open_call = run.open_calls.get(call_id)
    return open_call is not None and open_call.status is not ToolCallStatus.SUSPENDED


def _wake(change: asyncio.Future[None]) -> None:
    if not change.done():
        change.set_result(None)
