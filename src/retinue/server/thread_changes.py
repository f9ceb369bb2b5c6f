"""The changes of a user's threads, as the list of threads shows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from ..wire.resources import thread_json
from .auth import User
from .service import Service

LOOK_AGAIN = 1.0
"""Seconds between two looks if no change is notified: threads without a user have no topic that a user watches."""
PAUSE = 0.1
"""Seconds between two looks: the changes meanwhile are one."""
_OVERLAP = 5.0
"""Seconds by which a look goes back: a transaction that began earlier may be stored later."""
_BASE = 100


async def thread_changes(service: Service, user: User) -> AsyncGenerator[dict[str, Any] | None]:
    """Yield None once changes are seen, then each thread that has changed, with all that a list shows of it."""
    runtime, filters = service.runtime, service.filters(user)
    with runtime.watch_threads(user.id) as watch:
        known = await runtime.threads(limit=_BASE, **filters)
        seen = {thread.thread_id: thread_json(thread) for thread in known}
        since = max([thread.changed_at for thread in known], default=0.0)
        yield None
        while True:
            await watch.wait(LOOK_AGAIN)
            for thread in reversed(await runtime.threads(changed_after=since - _OVERLAP, **filters)):
                since = max(since, thread.changed_at)
                if seen.get(thread.thread_id) != (shown := thread_json(thread)):
                    seen[thread.thread_id] = shown
                    yield shown
            await asyncio.sleep(PAUSE)
