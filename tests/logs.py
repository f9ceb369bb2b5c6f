"""What the log of a run says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from retinue import Runtime

PATIENCE = 90.0
"""Seconds after which a test fails because something did not happen."""


async def events_so_far(runtime: Runtime, run_id: str, last: Callable[[Any], bool]) -> list[Any]:
    """Return the log of a run up to the first event for which `last` holds."""
    events: list[Any] = []
    async with asyncio.timeout(PATIENCE):
        async for event in runtime.events(run_id):
            events.append(event)
            if last(event):
                return events
    raise AssertionError(f"the log ended before that: {[event.kind for event in events]}")


async def whole_log(runtime: Runtime, run_id: str) -> list[Any]:
    """Return the events of a run whose log has ended, numbered without gaps."""
    async with asyncio.timeout(PATIENCE):
        events: list[Any] = [event async for event in runtime.events(run_id)]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    return events


def ends_of(events: Sequence[Any]) -> dict[str, list[str]]:
    """Return how each run of a log ended: the statuses of its `run_finished`, without those where it only waits."""
    ends: dict[str, list[str]] = {event.run_id: [] for event in events if event.kind == "run_started"}
    for event in events:
        if event.kind == "run_finished" and event.status != "suspended":
            ends[event.run_id].append(str(event.status.value))
    return ends
