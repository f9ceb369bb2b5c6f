"""Copies the events of a run elsewhere into the log here.

The rest of a log is what background tasks append after the end of the run. The log here stays open until the log there
has ended. Until then the child's state key `retinue.remote` has `open`, so the next owner continues to follow it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from msgspec.structs import replace

from ..core.backend import Backend, RunRequest
from ..core.concurrency import GRACE, CancellationToken, Cause, join, supervise
from ..core.context import OUT_OF_TIME
from ..core.errors import ExecutionBackendError
from ..core.events import DELTAS, Event, RunFinished, RunStarted, Sink, TaskUpdated, TextDelta
from ..core.receipts import reported
from ..core.rows import Private
from ..core.runs import REMOTE_KEY, RunResult
from ..log.owned import LiveLog
from ..log.state import RunState
from ..loop.budget import deadline
from .local import LocalBackend

_log = logging.getLogger(__name__)


def host_of(backend: Backend) -> str:
    """Return the name under which receipts show the origin of what a backend reports."""
    return getattr(backend, "host", None) or type(backend).__name__


def append_event(log: LiveLog, run: RunState, event: Event, seen: int, host: str | None) -> None:
    """Append an event of a run's log elsewhere; `seen` is the number of the last one copied. Starts and ends of the run
    itself are only noted. A receipt from a host is marked as its word."""
    if host is not None and isinstance(event, RunFinished):
        event = replace(event, receipt=reported(event.receipt, event.status.value, event.steps, host))
    if event.__class__ in DELTAS and event.seq != seen + 1:
        log.append_private(Private(kind="remote", run_id=run.run_id, remote=event.seq - 1))
    if not event.ns and isinstance(event, RunStarted | RunFinished):
        log.append_private(Private(kind="remote", run_id=run.run_id, remote=event.seq))
    else:
        log.append_remote(run, event)


async def last_seen(log: LiveLog, run: RunState) -> int:
    """Return the number of the last event copied from a run's log elsewhere: the last one noted plus later deltas."""
    if not run.remote_seq:
        return 0
    events = await log.history(run.remote_at)
    return run.remote_seq + sum([event.__class__ in DELTAS and event.ns[: len(run.ns)] == run.ns for event in events])


async def streamed_text(log: LiveLog, run: RunState) -> str:
    """Return the text that a run elsewhere has streamed so far, for protocols whose events have no numbers."""
    if run.remote_seq:
        return ""
    events = await log.history()
    return "".join([event.delta for event in events if isinstance(event, TextDelta) and event.run_id == run.run_id])


class Heard:
    """Passes the events of a run without a log to a sink."""

    def __init__(self, request: RunRequest, sink: Sink) -> None:
        self._identity, self._sink, self._seq = request.identity, sink, 0
        self.has_text = False

    def emit(self, event: Event) -> None:
        if event.ns:  # of a run below it
            return
        self._seq += 1
        self.has_text = self.has_text or isinstance(event, TextDelta)
        self._sink(replace(event, seq=self._seq, run_id=self._identity.run_id, agent=self._identity.agent))


def has_rest(backend: Backend, result: RunResult) -> bool:
    """Return whether an ended run has open background tasks elsewhere that can be followed: its backend has `follow_rest`.

    That gives `emit_remote` the events after `seen` until the log there has ended. When the token is set, it has the
    background tasks there stopped. It raises ConnectionError if the server is away for too long."""
    remote: Any = result.state.extensions.get(REMOTE_KEY)
    is_open = result.status.is_terminal and isinstance(remote, dict) and cast("Any", remote).get("open") is True
    return is_open and hasattr(backend, "follow_rest")


class Rest:
    """Copies the rest of a run's log elsewhere.

    Invariant: it ends with the log elsewhere or, after a cancel or at the end of the tree's time, a grace period later:
    what is open then is given up. The time is stored, so the next owner keeps to it."""

    def __init__(
        self, backend: Backend, local: LocalBackend, log: LiveLog, run: RunState, seen: int, host: str | None
    ) -> None:
        self._backend: Any = backend
        self._host = host
        self._local, self._log, self._run, self._seen = local, log, run, seen
        self._token, self._key, self._is_over = CancellationToken(), f"rest of {run.run_id}", False
        self._task: asyncio.Task[None] | None = None

    def start(self, request: RunRequest) -> None:
        """Start following in a task, and keep the log open meanwhile. `request` is the request of the run."""
        request = replace(
            request,
            cancellation=self._token,
            is_dispatched=True,
            seen=self._seen,
            emit=None,
            emit_remote=self._append,
            decisions={},
        )
        # Deltas that were appended here, at the end of the run, do not count among those of the log there.
        self._log.append_private(Private(kind="remote", run_id=self._run.run_id, remote=self._seen))
        self._log.holders[self._key] = self._cancel
        if self._log.are_tasks_cancelled:
            self._token.set()
        self._task = self._local.rests.start(self._follow(request), name=self._key)

    def _append(self, event: Event) -> None:
        if not self._is_over:
            append_event(self._log, self._run, event, self._seen, self._host)
            self._seen = event.seq

    async def _cancel(self, reason: str) -> None:
        self._token.set(reason)
        if self._task is not None:
            await join([self._task])

    def _seconds_left(self) -> float | None:
        """Return the seconds until the first limit on time ends the rest; store that time when it is first known."""
        log, run, now = self._log, self._run, self._log.clock()
        remote: dict[str, Any] = run.values.get(REMOTE_KEY, {})
        if (until := remote.get("until")) is None:
            if (until := deadline(log.tree, run, now)) is None:
                return None
            _write(log, run, {**remote, "until": until})
        return max(until - now, 0.0)

    def _stop(self, work: asyncio.Task[None], cause: Cause) -> None:
        if cause == "cancelled":  # this process ends: the next owner continues to follow
            work.cancel()
        else:
            self._token.set(OUT_OF_TIME)

    async def _follow(self, request: RunRequest) -> None:
        log, run = self._log, self._run
        work, seconds = self._backend.follow_rest(request), self._seconds_left()
        async with log.waiting_for(run.run_id, lambda: False):
            end = await supervise(work, token=self._token, deadline=seconds, grace=GRACE, stop=self._stop)
        self._is_over = True
        if end.has_no_outcome or end.error is not None:
            exc = end.error or f"they did not end ({self._token.reason})"
            shown = None if isinstance(exc, ConnectionError | ExecutionBackendError | str) else exc
            problem = "run %s: the background tasks that it left elsewhere are given up: %s"
            _log.warning(problem, run.run_id, exc, exc_info=shown)
            await give_up(log, run)
        close(log, run)
        log.release(self._key)


async def give_up(log: LiveLog, run: RunState) -> None:
    """Report the open tasks of a run elsewhere as failed, because they cannot be followed."""
    last: dict[str, TaskUpdated] = {}
    for event in await log.history():
        if isinstance(event, TaskUpdated) and event.ns[: len(run.ns)] == run.ns:
            last[event.task_id] = event
    for event in last.values():
        if event.status.upper() in ("PENDING", "RUNNING"):
            log.append_stamped(replace(event, status="FAILED"), Private(run_id=run.run_id, remote=run.remote_seq))


def close(log: LiveLog, run: RunState) -> None:
    """Note that the log elsewhere has ended or is given up."""
    remote = run.values.get(REMOTE_KEY, {})
    _write(log, run, {name: value for name, value in remote.items() if name not in ("open", "until")})


def _write(log: LiveLog, run: RunState, remote: dict[str, Any]) -> None:
    row = Private(kind="commit", run_id=run.run_id, writes={REMOTE_KEY: remote}, revision=run.revision + 1)
    log.append_private(row)
