"""The engine on Temporal: each run is a workflow that schedules its legs. Its log in PostgreSQL is the source of truth.

Invariant: a workflow only makes a worker look at a log. Starting, waking or losing a workflow never changes a run, and
workers find the runs that have none (`temporal_sweeper.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.common import (
    Priority,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.envconfig import ClientConfigProfile
from temporalio.runtime import LoggingConfig, TelemetryConfig, TelemetryFilter
from temporalio.runtime import Runtime as SdkRuntime
from temporalio.service import RPCError, RPCStatusCode

from ..core.concurrency import join
from ..core.engine import DoLeg, WorkerInfo
from ..core.errors import ConfigurationError, EngineError
from ..core.stores import DurableStore, Placement, RunRecord
from ..storage.legs import PlacedLogs
from ..storage.sql import SqlStore
from .temporal_worker import LegWorker
from .temporal_workflow import AGENT, QUESTIONS, STEP, WORKFLOW

_log = logging.getLogger(__name__)

T = TypeVar("T")

TEMPORAL = "temporal"
_CONNECT, _CALL = timedelta(seconds=3), timedelta(seconds=5)
_UPDATE = timedelta(seconds=1)
"""The time in which a worker accepts an update. After it a signal is sent, which waits for a worker."""
_TASK = timedelta(seconds=5)
"""Until another worker decides for a workflow whose worker is gone; Temporal waits 10 s if not told."""
_QUIET = 0.3
"""Seconds after the last request before the process may end: the SDK may hang or abort if one is still open."""
_CLOSE = 15.0
_AT_ONCE = 32
"""Workflows that are started at once: more would wait in the server, and time out there."""
_MIDDLE = 3
"""Temporal's middle priority, of five: 1 comes first."""


class TemporalEngine:
    """Schedules runs with Temporal: `temporal://host:port/namespace?queue=prefix`.

    The task queue of queue `gpu` is `<prefix>-gpu`. TLS and keys come from Temporal's environment variables
    (`TEMPORAL_API_KEY`, `TEMPORAL_TLS_…`). Or give it a connected `client`.
    """

    name = TEMPORAL

    def __init__(self, url: str = "temporal://localhost:7233/default", *, client: Client | None = None) -> None:
        self.address, self.namespace, self.prefix = parse(url)
        if client is not None:
            self.address, self.namespace = client.service_client.config.target_host, client.namespace
        self.place = f"temporal://{self.address}/{self.namespace}"
        self._given, self._client = client, client
        self._store: SqlStore | None = None
        self._indexed = False
        self._last_request = 0.0
        self._workers: set[asyncio.Task[None]] = set()
        self._starting = asyncio.Semaphore(_AT_ONCE)

    @property
    def client(self) -> Client:
        if self._client is None:
            raise EngineError(self.place, "it is not connected: enter the runtime first")
        return self._client

    @property
    def store(self) -> SqlStore:
        assert self._store is not None
        return self._store

    def task_queue(self, queue: str) -> str:
        return f"{self.prefix}-{queue}"

    async def open(self, store: DurableStore) -> None:
        self._store = cast("SqlStore", store)
        if self._given is None:
            self._client = await self._connect()
        request = DescribeNamespaceRequest(namespace=self.namespace)
        await self.call(lambda: self.client.workflow_service.describe_namespace(request, timeout=_CALL))
        self._indexed = await self._is_indexed()

    async def _connect(self) -> Client:
        settings: Any = ClientConfigProfile.load(disable_file=True).to_client_connect_config()
        settings.update(target_host=self.address, namespace=self.namespace)
        try:
            return await Client.connect(**settings, connect_timeout=_CONNECT, runtime=_sdk())
        except (RuntimeError, ValueError) as exc:
            _log.debug("connecting to %s failed: %s", self.place, exc)
            raise EngineError(self.place, f"no Temporal server can be reached there ({_reason(exc)})") from exc

    async def _is_indexed(self) -> bool:
        """Return whether the search attributes of runs are registered in the namespace."""
        query = f"{AGENT.name} = 'x' AND {STEP.name} = 0 AND {QUESTIONS.name} = 'x'"
        try:
            await self.call(lambda: self.client.count_workflows(query, rpc_timeout=_CALL))
            return True
        except EngineError as exc:
            _log.debug("search attributes are not used: %s", exc)
            return False

    async def close(self) -> None:
        await join(self._workers, _CLOSE)
        await asyncio.sleep(max(0.0, self._last_request + _QUIET - time.monotonic()))

    # --- runs

    async def start(self, run_id: str, placement: Placement) -> None:
        record = await self.store.load_run(run_id)
        if record is not None and not record.queued:  # a worker starts it when its thread is free
            await self.start_workflow(record, placement)

    async def start_workflow(self, record: RunRecord, placement: Placement, signal: str | None = None) -> None:
        """Start the workflow of a run unless it has one; with `signal`, send it that signal."""
        identity = record.identity
        order = {"run_id": identity.run_id, "agent": identity.agent, "indexed": self._indexed}
        attributes = [SearchAttributePair(AGENT, identity.agent)] if self._indexed else []
        delay = timedelta(seconds=placement.delay) if placement.delay > 0 and signal is None else None
        async with self._starting:
            await self.call(
                lambda: self.client.start_workflow(
                    WORKFLOW,
                    order,
                    id=identity.run_id,
                    task_queue=self.task_queue(placement.queue),
                    id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                    id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                    memo={"agent": identity.agent},
                    search_attributes=TypedSearchAttributes(attributes),
                    static_summary=identity.agent,
                    start_delay=delay,
                    start_signal=signal,
                    priority=priority_of(placement.priority, identity.user_id or identity.thread_id),
                    task_timeout=_TASK,
                    rpc_timeout=_CALL,
                )
            )

    async def answer(self, log_id: str) -> None:
        handle: Any = self.client.get_workflow_handle(log_id)
        try:
            await self.call(lambda: handle.execute_update("answer", rpc_timeout=_UPDATE))
        except EngineError as exc:  # no worker, no workflow, or too many updates
            _log.debug("run %s is answered by a signal: %s", log_id, exc)
            await self._quietly(log_id, lambda: self.wake(log_id))

    async def wake(self, log_id: str) -> None:
        """Make a worker look at a log, as soon as there is a worker; start its workflow again if needed."""
        record, found = await self.store.load_run(log_id), await PlacedLogs(self.store, TEMPORAL).find(log_id)
        if record is not None and found is not None:
            await self.start_workflow(record, found, "wake")

    async def cancel(self, log_id: str) -> None:
        handle = self.client.get_workflow_handle(log_id)
        await self._quietly(log_id, lambda: self.call(lambda: handle.cancel(rpc_timeout=_CALL)))

    async def _quietly(self, log_id: str, request: Callable[[], Awaitable[object]]) -> None:
        """Make a request and ignore its failure: a worker finds the same in the store."""
        try:
            await request()
        except NoWorkflow:
            pass  # it has ended, or was not started yet
        except EngineError as exc:
            _log.warning("run %s: workers find out later: %s", log_id, exc)

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Make a request; raise EngineError if it fails."""
        try:
            return await request()
        except RPCError as exc:
            if exc.status is RPCStatusCode.NOT_FOUND:
                raise NoWorkflow(self.place, exc.message) from exc
            raise EngineError(self.place, exc.message or exc.status.name) from exc
        except (WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError) as exc:
            raise EngineError(self.place, f"the update was not accepted: {exc}") from exc
        finally:
            self._last_request = time.monotonic()

    # --- working

    async def work(self, worker: WorkerInfo, do_leg: DoLeg, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        await LegWorker(self, worker, do_leg).work(stop, ready, self._keep)

    def _keep(self, closing: asyncio.Task[None]) -> None:
        """Wait for a worker that reports its last legs, before the runtime is closed."""
        self._workers.add(closing)
        closing.add_done_callback(self._forget)

    def _forget(self, closed: asyncio.Task[None]) -> None:
        self._workers.discard(closed)
        self._last_request = time.monotonic()


@cache
def _sdk() -> SdkRuntime:
    """Return the SDK's threads for this process. The SDK prints only errors: we log failures that are retried."""
    errors = LoggingConfig(filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"))
    return SdkRuntime(telemetry=TelemetryConfig(logging=errors))


class NoWorkflow(EngineError):
    """There is no such workflow, or no such namespace."""


def parse(url: str) -> tuple[str, str, str]:
    """Return the address, the namespace and the prefix of the task queues."""
    parts = urlsplit(url)
    try:
        port = parts.port or 7233
    except ValueError:
        port = None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("queue", "retinue")
    if parts.scheme != TEMPORAL or not parts.hostname or port is None or "@" in parts.netloc or options or not prefix:
        raise ConfigurationError(
            f"the engine is named temporal://host:port/namespace?queue=prefix, not {url.rpartition('@')[2]!r}; "
            "keys come from the environment, as TEMPORAL_API_KEY"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}", parts.path.strip("/") or "default", prefix


def priority_of(priority: int, flow: str) -> Priority:
    """Temporal has five priorities, 1 being the first, and is fair between keys of up to 64 bytes."""
    key = flow if flow.isascii() and len(flow) <= 64 else hashlib.sha256(flow.encode()).hexdigest()
    return Priority(priority_key=min(5, max(1, _MIDDLE - priority)), fairness_key=key)


def _reason(exc: Exception) -> str:
    said = str(exc)
    for known in ("Connection refused", "dns error", "timed out", "Unauthenticated", "certificate"):
        if known.lower() in said.lower():
            return known.lower()
    return said.splitlines()[0][:200] if said else type(exc).__name__
