"""Spawned sub-agents: the keys, labels and turns of those that a session has."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from msgspec import Struct

from ..core.context import ToolContext
from ..core.state import StateKey

LABEL = re.compile(r"\w[\w .-]{0,63}")


class Spawned(Struct, frozen=True, gc=False, omit_defaults=True):
    """A sub-agent with a conversation of its own. It belongs to one user and one session."""

    agent_key: str
    agent_id: str
    session_id: str
    label: str | None = None
    depth: int = 1
    user_id: str | None = None
    closed: bool = False
    """As an update: remove it."""


def _note(known: dict[str, Spawned], change: Spawned) -> dict[str, Spawned]:
    if change.closed:
        return {key: spawned for key, spawned in known.items() if key != change.agent_key}
    return {**known, change.agent_key: change}


SPAWNED: StateKey[dict[str, Spawned], Spawned] = StateKey(
    "retinue.subagents",
    dict[str, Spawned],
    update=Spawned,
    reduce=_note,
    merge="commutative",
    scope="thread",
    default=dict[str, Spawned],
    sure=True,
)
"""Kept with the thread of the session, so that it is there after a restart."""


def spawned_of(ctx: ToolContext) -> dict[str, Spawned]:
    """Return the sub-agents that the user of this call has spawned in this session, by key."""
    return {key: spawned for key, spawned in ctx.state(SPAWNED).items() if spawned.user_id == ctx.run.user_id}


class Labels:
    """The labels claimed in a run. Calls of one step cannot see each other's in their snapshot."""

    def __init__(self) -> None:
        self._given: dict[tuple[str | None, str, str], tuple[str, str]] = {}

    def claim(self, label: str, ctx: ToolContext) -> bool:
        """Claim a label; False if another call of this run has it. A call that runs again keeps its own."""
        place, holder = _place(label, ctx), (ctx.run.run_id, ctx.call_id)
        before = self._given.get(place, holder)
        if before != holder and before[0] == ctx.run.run_id:
            return False
        self._given[place] = holder  # claims of earlier runs are in the snapshot, or were never stored
        return True

    def release(self, label: str, ctx: ToolContext) -> None:
        self._given.pop(_place(label, ctx), None)

    def forget_run(self, run_id: str) -> None:
        self._given = {place: holder for place, holder in self._given.items() if holder[0] != run_id}


def _place(label: str, ctx: ToolContext) -> tuple[str | None, str, str]:
    return ctx.run.user_id, ctx.run.thread_id, label.casefold()


class Turns:
    """Gives each sub-agent one message at a time. One that waits for a human gets no other message."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._held: dict[str, tuple[str | None, str]] = {}
        self._expected: Counter[str] = Counter()
        self._closed: dict[str, str] = {}

    def of(self, session_id: str) -> asyncio.Lock:
        return self._locks.setdefault(session_id, asyncio.Lock())

    def hold(self, session_id: str, ctx: ToolContext, *, beyond_run: bool) -> None:
        """Note that a sub-agent waits in the middle of this call's message; a background task waits beyond the run."""
        self._held[session_id] = None if beyond_run else ctx.run.run_id, ctx.call_id

    def release(self, session_id: str) -> None:
        self._held.pop(session_id, None)

    def is_held(self, session_id: str, ctx: ToolContext) -> bool:
        """Return whether it waits for a human in the middle of another call's message of this run."""
        if session_id not in self._held:
            return False
        run_id, call_id = self._held[session_id]
        return run_id in (None, ctx.run.run_id) and call_id != ctx.call_id

    @contextmanager
    def expected(self, session_id: str) -> Generator[None]:
        """Mark a sub-agent as busy, within the block, while a message is on its way to it."""
        self._expected[session_id] += 1
        try:
            yield
        finally:
            self._expected -= Counter((session_id,))  # drops a count of 0

    def is_busy(self, session_id: str) -> bool:
        return session_id in self._expected or self.is_working(session_id)

    def is_working(self, session_id: str) -> bool:
        """Return whether this process has a message for it, at work or queued."""
        return self.of(session_id).locked()

    def close(self, session_id: str, ctx: ToolContext) -> None:
        """Refuse further messages, also from calls of the same step, whose snapshot cannot show it."""
        self._closed[session_id] = ctx.run.run_id

    def is_closed(self, session_id: str) -> bool:
        return session_id in self._closed

    def forget_run(self, run_id: str) -> None:
        self._held = {session: holder for session, holder in self._held.items() if holder[0] != run_id}
        self._closed = {session: closer for session, closer in self._closed.items() if closer != run_id}
