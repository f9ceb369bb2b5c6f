"""What all endpoints of one application share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from ..core.stores import RunRecord
from ..runtime import Runtime
from .auth import LOCAL, Auth, User
from .feeds import Feeds
from .http import ApiError, not_found
from .limits import UserLimits
from .metrics import Metrics

MAX_BODY = 4_000_000
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Service:
    """The runtime behind an application, who may use it, and who reads its events."""

    def __init__(self, runtime: Runtime, auth: Auth, limits: UserLimits, max_body: int = MAX_BODY) -> None:
        self.runtime, self.auth, self.limits, self.max_body = runtime, auth, limits, max_body
        self.feeds, self.metrics = Feeds(runtime), Metrics()
        self.closing = asyncio.Event()
        """Set when the server is about to end: streams tell their readers to reconnect."""

        self._jobs: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something to its end, also if the request that began it is over."""
        job = asyncio.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._forget)
        return job

    def _forget(self, job: asyncio.Task[Any]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (problem := job.exception()) is not None:
            _log.warning("what a request had begun failed: %s", problem)

    def close(self) -> None:
        self.closing.set()
        self.feeds.wake_all()

    async def run_of(self, user: User, run_id: str, what: str = "run") -> RunRecord:
        """Return a run of a user: a root run or a background child."""
        record = await self.runtime.store.load_run(run_id)
        if record is None or not owns(user, record.identity.user_id):
            raise not_found(what)
        return record

    async def check_thread(self, user: User, thread_id: str) -> None:
        """Raise unless a thread is the user's."""
        found = await self.runtime.store.user_of_thread(thread_id)
        if found is None or not owns(user, found[0]):
            raise not_found("thread")

    async def check_new_thread(self, user: User, thread_id: str) -> None:
        """Raise if a thread is another user's; one that does not exist yet may be begun."""
        found = await self.runtime.store.user_of_thread(thread_id)
        if found is not None and not owns(user, found[0]):
            raise not_found("thread")

    def filters(self, user: User) -> dict[str, Any]:
        """Return the arguments with which a store lists what belongs to a user."""
        return {"user_id": user.id, "unowned": user.id == LOCAL}


def owns(user: User, user_id: str | None) -> bool:
    return user.id == (user_id or LOCAL)


def busy(detail: str) -> ApiError:
    return ApiError(429, "too_many", detail, {"retry-after": "1"})
