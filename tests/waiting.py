"""Waits that end with what they wait for. None has a deadline of its own: the timeout of the test is the deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


async def until(holds: Callable[[], Any]) -> Any:
    """Return the first true value of a condition, which may be a coroutine. What takes longer is looked at less often."""
    pause = 0.002
    while True:
        value = holds()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(pause)
        pause = min(1.2 * pause, 0.02)


async def let_others_run(turns: int = 50) -> None:
    """Give every other task some turns of the event loop; no time need pass."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def expire_lease(store: Any, log_id: str) -> None:
    """End the lease of a log now; its owner does not notice."""
    await store.renew(await store.owner_of(log_id), -1.0)
