"""The objects that all endpoints of one application share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Coroutine, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from ..core.concurrency import Jobs, until_stopped
from ..core.errors import RetinueError
from ..core.stores import RunRecord, ThreadRecord
from ..runtime import Runtime
from ..subagents.harness import find_undivided
from .auth import LOCAL, Auth, HasFirstUser, User, token_in
from .feeds import Feeds
from .http import ApiError, not_found
from .limits import UserLimits
from .sessions import cookie_in, sessions_of

T = TypeVar("T")
MAX_BODY = 4_000_000
OWN_PREFIX = "thread_run_"
"""The ids of threads that are derived from an idempotency key. Clients may not choose such an id."""
MOST_WAIT = 300.0
"""Seconds for which a request may wait for the end of a run."""
BODY_SECONDS = 60.0
"""Seconds in which a client must have sent the body of its request."""

BUCKETS = (0.005, 0.025, 0.1, 0.5, 2.5, 10.0)
"""Bounds of the seconds that requests take, in the figures."""

_log = logging.getLogger(__name__)


class Metrics:
    """Counts of requests, their seconds, open streams and sent events, as Prometheus reads them."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: Counter[tuple[str, float]] = Counter()
        self._total_seconds: Counter[str] = Counter()
        self.requests = 0
        """The number of requests that are being handled."""
        self.streams = 0
        self.events_sent = 0

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests[method, route, status] += 1
        self._total_seconds[route] += seconds  # pyright: ignore[reportArgumentType]
        for bound in BUCKETS:
            if seconds <= bound:
                self._seconds[route, bound] += 1

    def lines(self) -> Iterable[str]:
        yield "# TYPE retinue_http_requests_total counter"
        for (method, route, status), count in sorted(self._requests.items()):
            yield f'retinue_http_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}'
        yield "# TYPE retinue_http_request_seconds histogram"
        counts: Counter[str] = Counter()
        for (_, route, _), count in self._requests.items():
            counts[route] += count
        for route, count in sorted(counts.items()):
            for bound in BUCKETS:
                shown = f'{{route="{route}",le="{bound:g}"}} {self._seconds[route, bound]}'
                yield f"retinue_http_request_seconds_bucket{shown}"
            yield f'retinue_http_request_seconds_bucket{{route="{route}",le="+Inf"}} {count}'
            yield f'retinue_http_request_seconds_sum{{route="{route}"}} {self._total_seconds[route]:.6f}'
            yield f'retinue_http_request_seconds_count{{route="{route}"}} {count}'
        yield "# TYPE retinue_http_requests_active gauge"
        yield f"retinue_http_requests_active {self.requests}"
        yield "# TYPE retinue_streams gauge"
        yield f"retinue_streams {self.streams}"
        yield "# TYPE retinue_events_sent_total counter"
        yield f"retinue_events_sent_total {self.events_sent}"


class Service:
    """The runtime of an application, its authentication and limits, and its event feeds."""

    def __init__(
        self,
        runtime: Runtime,
        auth: Auth,
        limits: UserLimits,
        max_body: int = MAX_BODY,
        origins: Collection[str] = (),
        *,
        shared_files: bool = False,
    ) -> None:
        self.runtime, self.auth, self.limits, self.max_body, self.origins = runtime, auth, limits, max_body, origins
        self.sessions = sessions_of(auth, runtime.store)
        self.shared_files = shared_files
        """True if users may share files that are not divided by user; else only one user works on them."""
        self.feeds, self.metrics = Feeds(runtime), Metrics()
        self.body_seconds = BODY_SECONDS
        self.description: dict[str, Any] = {}
        """The OpenAPI description of the application."""
        self.closing = asyncio.Event()
        """Set when the server is about to end: streams tell their readers to reconnect."""
        self._idle = asyncio.Event()
        self._jobs = Jobs(report=lambda problem: _log.warning("what a request had begun failed: %s", problem))

    async def user_of(self, headers: Mapping[str, str]) -> User | None:
        """Return the user of a request: that of its token, else of the session of its cookie, else the one `auth` names."""
        secret = cookie_in(headers) if token_in(headers) is None else None
        user = None if secret is None else await self.sessions.user_of(secret)
        return user or await self.auth.user_of(headers)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work to its end, also after the request that started it is over."""
        return self._jobs.start(work)

    def close(self) -> None:
        """Refuse new requests, answer those that wait, and tell the readers of streams to connect again."""
        self.closing.set()
        self.feeds.wake_all()
        if not self.metrics.requests:
            self._idle.set()

    @contextmanager
    def request(self) -> Generator[None]:
        """Count a request while it is handled."""
        self.metrics.requests += 1
        try:
            yield
        finally:
            self.metrics.requests -= 1
            if not self.metrics.requests and self.closing.is_set():
                self._idle.set()

    async def finish_requests(self) -> None:
        """Wait until every request that came before `close` has its answer."""
        await self._idle.wait()

    async def unless_closing(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        """Return the result of work; None once the time is over or the server is about to end."""
        async with until_stopped(work, self.closing.wait(), seconds) as task:
            return task.result() if task.done() else None

    async def run_of(self, user: User, run_id: str, what: str = "run") -> RunRecord:
        """Return a run of a user: a root run or a background child."""
        record = await self.runtime.store.load_run(run_id)
        if record is None or not owns(user, record.identity.user_id):
            raise not_found(what)
        return record

    async def run_to_continue(self, user: User, run_id: str, what: str = "run") -> RunRecord:
        """Return a run of a user that is answered or forked. Raise if the user may not work on the files of its agents."""
        record = await self.run_of(user, run_id, what)
        root = await self.runtime.store.load_run(record.log_id or run_id)
        await self._check_files(user, (root or record).identity.agent)
        return record

    async def check_thread(self, user: User, thread_id: str) -> None:
        """Raise unless a thread is the user's."""
        found = await self.runtime.store.user_of_thread(thread_id)
        if found is None or not owns(user, found[0]):
            raise not_found("thread")

    @contextlib.asynccontextmanager
    async def thread_for(
        self, user: User, agent: str, thread_id: str | None, *, is_ours: bool = False
    ) -> AsyncGenerator[None]:
        """Hold a thread while a run of an agent on it is started, if the user may work on the files of the agent.

        A new thread belongs to the user from now on: if two users start one at the same moment, the store decides. It is
        listed once its run has begun, and removed again if the start fails. `is_ours`: the id is one we made.
        """
        await self._check_files(user, agent)
        store, created = self.runtime.store, False
        known = None if thread_id is None else await store.user_of_thread(thread_id)
        if thread_id is not None and known is None:
            if not is_ours:
                check_chosen(thread_id)
            record = ThreadRecord(thread_id=thread_id, user_id=user.id)
            created = await store.create_thread(record, is_listed=False)
            known = (user.id,) if created else await store.user_of_thread(thread_id)
        if thread_id is not None and (known is None or not owns(user, known[0])):
            raise not_found("thread")
        try:
            yield
        except BaseException:
            if created and thread_id is not None:
                with contextlib.suppress(RetinueError):
                    await store.delete_thread(thread_id)
            raise

    async def _check_files(self, user: User, agent: str) -> None:
        """Raise if an agent would show the user files of another one."""
        if self.shared_files or (known := self.runtime.agents.get(agent)) is None:
            return
        one = find_undivided(known, self.runtime.agents)
        if one is None or (isinstance(self.auth, HasFirstUser) and user.id == await self.auth.first_user()):
            return
        detail = f"agent {one.name!r} works on files that are for one user; the operator of the server can share them"
        raise ApiError(403, "files_not_shared", detail)

    def filters(self, user: User) -> dict[str, Any]:
        """Return the arguments with which a store lists what belongs to a user."""
        return {"user_id": user.id, "unowned": user.id == LOCAL}


def check_chosen(thread_id: str) -> None:
    """Raise unless a client may choose this id for a new thread."""
    if thread_id.startswith(OWN_PREFIX):
        problem = f"ids that begin with {OWN_PREFIX!r} are made by the server: choose another"
        raise ApiError(422, "invalid_body", problem)


def owns(user: User, user_id: str | None) -> bool:
    return user.id == (user_id or LOCAL)
