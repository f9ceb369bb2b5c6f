"""What the log of a recovered run says of its past: what was used, how long it took, which call ended first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from ..core.events import ChildStarted, Event, InferenceFinished, RunFinished, RunStarted, ToolCallFinished
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
        self._open: set[str] = set()

    def follow(self, event: Event) -> None:
        if isinstance(event, InferenceFinished) and event.parent_run_id is not None:
            self._usages.setdefault(event.run_id, []).append(event.usage)
        elif isinstance(event, ChildStarted):
            self._started.setdefault(event.run_id, {}).setdefault(event.call_id, []).append(event.child_run_id)
            self._open.add(event.child_run_id)
        elif isinstance(event, RunFinished) and event.status is not RunStatus.SUSPENDED:
            self._open.discard(event.run_id)

    @property
    def has_open(self) -> bool:
        """Whether there are children whose end was not told."""
        return bool(self._open)

    def close(self, run_id: str) -> None:
        """A run has ended, or is not gone on with."""
        self._open.discard(run_id)

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


class Order:
    """In which order the calls of a run have ended: who is first decides what is committed."""

    def __init__(self) -> None:
        self._left: dict[str, list[str]] = {}
        self._waiting: list[asyncio.Future[None]] = []

    def follow(self, event: Event) -> None:
        if isinstance(event, ToolCallFinished):
            self._left.setdefault(event.run_id, []).append(event.call_id)

    def ended(self, run_id: str, call_id: str) -> None:
        """A call has ended again."""
        left = self._left.get(run_id, [])
        if call_id in left:
            left.remove(call_id)
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)

    async def turn(self, run: Any, call_id: str) -> None:
        """Wait until the calls of this step that ended before this one have ended again."""
        while before := self._before(run, call_id):
            give_slot_back(run, call_id)  # they may need it
            change = asyncio.get_running_loop().create_future()
            self._waiting.append(change)
            done, _ = await asyncio.wait({change}, timeout=_PATIENCE)
            if not done:
                _log.warning("run %s: call %s does not end again as it did", run.run_id, before[0])
                return

    def _before(self, run: Any, call_id: str) -> list[str]:
        left = self._left.get(run.run_id, [])
        earlier = left[: left.index(call_id)] if call_id in left else left
        open_calls = run.open_calls
        return [one for one in earlier if one in open_calls and open_calls[one].status is not ToolCallStatus.SUSPENDED]
