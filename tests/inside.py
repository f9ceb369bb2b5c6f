"""The one place where tests reach into private parts of Retinue.

A test says what it must see or steer, and a function here knows where that is. So a change of the inside changes this
file, and no test. `tests/meta/test_inside.py` holds the rule.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from retinue import Run, RunResult, Runtime
from retinue.core import concurrency
from retinue.core.context import CancellationToken
from retinue.log.owned import LiveLog
from retinue.log.read import leg_of, read_until

if TYPE_CHECKING:
    from retinue import Agent, Event
    from retinue.core.rows import LogRow
    from retinue.log.state import LogState
    from retinue.runtime.worker import Worker
    from retinue.tasks import TaskRepository
    from retinue.tasks.service import TaskService

# --- the runs of a runtime


def owned_run(runtime: Runtime, run_id: str) -> Any:
    """Return a root run that this process works on, or None."""
    return runtime._runs.get(run_id)


def owned_runs(runtime: Runtime) -> list[Any]:
    """Return all root runs that this process works on."""
    return list(runtime._runs._live.values())


async def log_of(run: Run) -> Any:
    """Return the log behind the handle of a run that has begun."""
    opened = await run._open()
    assert opened is not None
    return opened[0]


def local_backend(runtime: Runtime) -> Any:
    """Return the backend that executes runs in this process."""
    return runtime._runs.backend


def is_waiting_for_others(runtime: Runtime) -> bool:
    """Return True while a child of this process runs on a server or another worker."""
    return bool(runtime._runs.backend.elsewhere)


def is_idle(runtime: Runtime) -> bool:
    """Return True if no root run is at work."""
    return all(run.is_done for run in owned_runs(runtime))


def waiting_lines(runtime: Runtime) -> list[list[Any]]:
    """Return, for each run in memory, the runs that have its thread or wait for it."""
    runs = runtime._runs
    return [list(runs._line(run.record.identity.thread_id)) for run in owned_runs(runtime)]


def executions(runtime: Runtime) -> Mapping[str, Any]:
    """Return what executes in this process, by the id of its run."""
    return runtime._runs.backend._executions


def toolbox_of(runtime: Runtime, agent: Agent) -> Mapping[str, Any]:
    """Return the tools that a run of an agent gets, by name."""
    return runtime._runs.backend._blueprint(agent).toolbox


def registry_of(runtime: Runtime) -> Any:
    """Return the agents and backends of a runtime."""
    return runtime._runs.registry


def kill_run(runtime: Runtime, run_id: str) -> None:
    """Stop the work on a run without a word in its log, as if the process were gone."""
    run: Any = owned_run(runtime, run_id)
    run._task.cancel()


async def stop_work(runtime: Runtime) -> None:
    """Let a runtime leave all its runs and take no new ones. It goes on to answer questions about runs."""
    await runtime._runs.close(1.0, leave=True)


def refuse_new_runs(runtime: Runtime) -> None:
    """Let no new run begin, as at the first moment of closing."""
    runtime._runs.is_closing = True


def result_in_memory(runtime: Runtime, run_id: str) -> RunResult | None:
    """Return the result of a run or child whose log is in the memory of this process."""
    run = runtime._runs.run_with(run_id)
    return None if run is None else run.log.results.get(run_id)


async def continue_in_memory(runtime: Runtime, rows: list[LogRow], tree: LogState, run_id: str) -> LiveLog:
    """Continue a run from the rows of its log and their fold, in a runtime without a store; return its log."""
    from retinue.core.stores import RunRecord
    from retinue.runtime.live import LiveRun
    from retinue.runtime.stored_start import restored

    runs, state, log = runtime._runs, tree.runs[run_id], LiveLog((), tree)
    log.first, log.events = 0, [row.event for row in rows if row.event is not None]
    log.privates = [row for row in rows if row.private is not None]
    request = restored(runtime.agents[state.first_agent], state.identity, state.request)
    record = RunRecord(identity=state.identity, started_at=0.0, log_id=run_id)
    live = runs.add(LiveRun(runs, request, log, record, None))
    if state.waits or state.is_over:
        await live.resume_tasks()
    else:
        live.proceed()
    return log


def loop_of_sync(runtime: Runtime) -> asyncio.AbstractEventLoop:
    """Return the event loop behind `run_sync`."""
    assert runtime._thread is not None
    return runtime._thread._loop


# --- ownership of logs


def has_store(runtime: Runtime) -> bool:
    """Return True if the logs of a runtime are stored and owned."""
    return runtime._runs.owner is not None


def owner_id(runtime: Runtime) -> str:
    """Return the id under which this process owns logs."""
    owner: Any = runtime._runs.owner
    return owner.id


async def renew_leases(runtime: Runtime) -> None:
    """Do what the heartbeat does: renew the leases of all logs of this process, and drop the lost ones."""
    owner: Any = runtime._runs.owner
    await owner._renew()


def stop_heartbeats(patch: pytest.MonkeyPatch) -> None:
    """Let no lease be renewed, as in a process that is frozen."""
    from retinue.log.ownership import Owner

    async def no_renewal(self: Owner) -> None:
        """Renew nothing."""

    patch.setattr(Owner, "_renew", no_renewal)


def set_clock_of_owners(patch: pytest.MonkeyPatch, clock: Callable[[], float]) -> None:
    """Have owners measure their leases with a clock of the test."""
    patch.setattr("retinue.log.ownership._now", clock)


def lose_log(runtime: Runtime, run_id: str) -> LiveLog:
    """Let the owner of a log find out that it has lost the log; return the log."""
    run: Any = owned_run(runtime, run_id)
    run.lose()
    return run.log


def forget_log(runtime: Runtime, run_id: str) -> None:
    """Drop a log here, while the store still names this process as its owner."""
    lose_log(runtime, run_id)
    owner: Any = runtime._runs.owner
    owner.remove(run_id)


# --- reading logs


async def events_to_rest(runtime: Runtime, run_id: str) -> list[Event]:
    """Return the stored events of a run up to its end, or to where it waits."""
    reader = runtime._runs.stored_log(run_id).read()
    return [event async for event in read_until(reader, idle=reader.rests)]


async def rest_of_last_leg(runtime: Runtime, run_id: str) -> list[Event]:
    """Return what a reader of a stored log, which another process writes, gives after the end of the last leg."""
    log = runtime._runs.stored_log(run_id)
    *_, last = [event async for event in read_until(log.read(), leg_of(run_id))]
    reader = log.read(last.seq)
    return [event async for event in read_until(reader, idle=reader.rests)]


@contextmanager
def recorded_rows(record: Callable[[LiveLog, LogRow], None]) -> Iterator[None]:
    """Call `record` with each row that a log gets, before the log keeps it."""
    keep = LiveLog._keep

    def record_and_keep(self: LiveLog, row: LogRow) -> None:
        record(self, row)
        keep(self, row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveLog, "_keep", record_and_keep)
        yield


def look_at_silent_logs_every(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have readers of stored logs look for lost owners after this many seconds without an event."""
    patch.setattr("retinue.log.read.LOOK_AGAIN", seconds)


def keep_ended_logs(patch: pytest.MonkeyPatch, count: int) -> None:
    """Keep the events of so many ended runs in a runtime without a store."""
    patch.setattr("retinue.runtime.runs.KEPT_LOGS", count)


# --- questions to owners


def set_patience(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give another process this many seconds to reply to a decision or a cancel."""
    patch.setattr("retinue.runtime.elsewhere.PATIENCE", seconds)


def look_for_replies_every(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have a process look for the reply of another this often."""
    patch.setattr("retinue.runtime.elsewhere.LOOK_EVERY", seconds)


def give_up_cancels_after(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Wait this many seconds, beyond its grace, for the end of a run that another process cancels."""
    patch.setattr("retinue.runtime.elsewhere.LATER", seconds)


def wait_for_task_cancels(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give the owner of a background task this many seconds to reply to its cancel."""
    patch.setattr("retinue.runtime.elsewhere.GRACE", seconds)


# --- workers and engines


def engine_of(runtime: Runtime) -> Any:
    """Return the engine that gives the runs of a runtime to workers."""
    dispatcher = runtime._runs.dispatcher
    assert dispatcher is not None
    return dispatcher.engine


def report_unserved_after(runtime: Runtime | Worker, seconds: float) -> None:
    """Have a runtime report a queue that nobody serves after this many seconds."""
    dispatcher = runtime._runs.dispatcher
    assert dispatcher is not None
    dispatcher.unserved_after = seconds


def placed_backend(runtime: Runtime) -> Any:
    """Return the backend that gives children to other workers."""
    placement = runtime._registry.placement
    assert placement is not None
    return placement.backend


# --- background tasks


def task_service(runtime: Runtime, repository: TaskRepository | None = None) -> TaskService:
    """Return the service of a task repository; without one, of the only repository that is in use."""
    if repository is not None:
        return runtime._runs.background.service(repository)
    (service,) = runtime._runs.background._services.values()
    return service


def has_local_tasks(service: TaskService) -> bool:
    """Return True while a task of a service is at work in this process."""
    return bool(service._local)


def next_sweep(service: TaskService) -> float:
    """Return when a service looks for lost tasks again, by the monotonic clock; 0 before its first look."""
    return service._next_sweep or 0.0


def delay_tasks(patch: pytest.MonkeyPatch, gate: asyncio.Event) -> None:
    """Let no task begin before the gate opens."""
    from retinue.tasks.service import TaskService

    begin = TaskService._begin

    async def begin_late(self: TaskService, task: Any) -> bool:
        await gate.wait()
        return await begin(self, task)

    patch.setattr(TaskService, "_begin", begin_late)


def fail_to_end_tasks(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Raise an error where the end of a task is written to its record."""
    from retinue.tasks.service import TaskService

    async def refuse(*args: Any) -> None:
        raise error

    patch.setattr(TaskService, "_write_end", refuse)


# --- concurrency


def left_behind() -> list[asyncio.Future[Any]]:
    """Return the work that did not stop within its grace and has not ended since."""
    return list(concurrency._left)


def waits_for_token(token: CancellationToken) -> bool:
    """Return True if something wants to know when a token is set."""
    return bool(token._callbacks)


# --- stores


def database_of(store: Any) -> Any:
    """Return the database under a store of files or tasks."""
    return store._database


def write_lanes(store: Any) -> list[Any]:
    """Return the lanes in which a PostgreSQL store writes, each with its own connection."""
    return list(store.database._writers)


def notify_lane(store: Any) -> Any:
    """Return the lane in which a PostgreSQL store sends notifications."""
    return store.database._notifier


def counted_transactions(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets, for each transaction from now on, how many jobs share it."""
    from retinue.storage import database

    sizes, real = list[int](), database._run_in_one

    def count(link: Any, works: Any, *, eager: bool) -> Any:
        sizes.append(len(works))
        return real(link, works, eager=eager)

    patch.setattr(database, "_run_in_one", count)
    return sizes


def counted_statements(patch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that gets each statement that PostgreSQL executes from now on."""
    from retinue.storage.postgres import PostgresLink

    statements, execute = list[bytes](), PostgresLink._execute

    def count(link: PostgresLink, statement: bytes, values: Any = ()) -> Any:
        statements.append(statement)
        return execute(link, statement, values)

    patch.setattr(PostgresLink, "_execute", count)
    return statements


def connection_parameters(address: Any) -> dict[str, Any]:
    """Return what a connection to a PostgreSQL address is opened with."""
    return address._parameters


def wait_for_lock(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have SQLite wait this many seconds for another process that writes."""
    patch.setattr("retinue.storage.sqlite._BUSY_SECONDS", seconds)


def pack_rows_by(patch: pytest.MonkeyPatch, rows: int) -> None:
    """Store so many rows of a log together."""
    patch.setattr("retinue.storage.packs.MOST_ROWS", rows)


def pack_logs_up_to(patch: pytest.MonkeyPatch, size: int) -> None:
    """Rewrite only logs of up to so many bytes of streamed text."""
    patch.setattr("retinue.storage.cold.MOST_STREAMED", size)


def replace_packing(patch: pytest.MonkeyPatch, pack: Callable[[str, Any], Any]) -> None:
    """Replace the function that a store packs the rows of a log with."""
    patch.setattr("retinue.storage.writes.pack_rows", pack)


def prune_by(patch: pytest.MonkeyPatch, runs: int) -> None:
    """Look for old runs in portions of this size."""
    patch.setattr("retinue.storage.prune._PAGE", runs)


# --- servers


def set_clock_of_limits(limits: Any, clock: Callable[[], float]) -> None:
    """Have the limits of a running server measure rates with a clock of the test."""
    limits._clock = clock


def users_with_rates(limits: Any) -> int:
    """Return for how many users a server remembers how much they asked."""
    return len(limits._buckets)


def open_streams(limits: Any) -> dict[str, int]:
    """Return how many streams each user has open."""
    return dict(limits._streams)


def head_timer(protocol: Any) -> Any:
    """Return the timer that ends a connection whose request has no headers yet, or None."""
    return protocol._head_timer


def beat_every(patch: pytest.MonkeyPatch, seconds: float, feeds: float | None = None) -> None:
    """Send a sign of life to quiet readers this often, and check as often that they may still read.

    `feeds` is for the feed that all readers of a log share, which has a pace of its own.
    """
    for name in ("streams", "sockets", "a2a"):
        patch.setattr(f"retinue.server.{name}.BEAT", seconds)
    if feeds is not None:
        patch.setattr("retinue.server.feeds.BEAT", feeds)


def remember_users_for(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have a server ask the store for a token again after this many seconds."""
    patch.setattr("retinue.server.auth._REMEMBER_SECONDS", seconds)


def allow_subscriptions(patch: pytest.MonkeyPatch, most: int) -> None:
    """Allow so many subscriptions at once on a WebSocket."""
    patch.setattr("retinue.server.sockets._MOST_SUBSCRIPTIONS", most)


def replace_push_reader(patch: pytest.MonkeyPatch, reader: Callable[..., Any]) -> None:
    """Replace the function that makes notifications of the events of a run."""
    patch.setattr("retinue.server.a2a_push._notifications", reader)


def is_pushing(push: Any) -> bool:
    """Return True while a server sends notifications."""
    return bool(push._jobs)


def push_store(push: Any) -> Any:
    """Return where a server keeps the notifications that it has promised."""
    return push._store


# --- other processes that runs are given to


async def find_task(follower: Any, run_id: str) -> bool:
    """Have the follower of an A2A task look for a task that it sent before; return True if there is one."""
    return await follower._find(run_id)


def http_of(client: Any) -> Any:
    """Return the HTTP client under an A2A client."""
    return client._link().http


def read_length_of_errors() -> int:
    """Return how many bytes of a server's error are read."""
    from retinue.backends.http_client import _ERROR_BODY

    return _ERROR_BODY


def look_for_unknown_runs(patch: pytest.MonkeyPatch, times: int, every: float) -> None:
    """Have the workers of Temporal look so often for a run that they do not know, this many seconds apart."""
    patch.setattr("retinue.engines.temporal_worker._UNKNOWN", times)
    patch.setattr("retinue.engines.temporal_worker._SOON", every)


# --- models, tools and commands


def add_provider(patch: pytest.MonkeyPatch, name: str, module: str) -> None:
    """Let model names that begin with `name:` be looked up in a module."""
    from retinue.models import registry

    patch.setitem(registry._PROVIDERS, name, module)


async def end_lease_of_slots(table: Any, owner: str) -> None:
    """Let the lease of an owner of slots of a gate run out now."""
    await table._database.change("UPDATE gate_slots SET seen_until = 0 WHERE owner = ?", owner, key=owner)


def provider_names() -> set[str]:
    """Return the names that telemetry gives to providers."""
    from retinue.telemetry import conventions

    return set(conventions._PROVIDERS.values())


def file_tools(files: Any) -> Any:
    """Return the functions behind the file tools of a filesystem."""
    from retinue.workspace import tools

    return tools._FileTools(files)


def copy_in_pieces_above(patch: pytest.MonkeyPatch, values: int) -> None:
    """Copy values piece by piece if they hold more than so many."""
    patch.setattr("retinue.core.schema._MANY", values)


def edit_in_pieces_of(patch: pytest.MonkeyPatch, size: int) -> None:
    """Search so many bytes of a text at once for what an edit replaces."""
    patch.setattr("retinue.workspace.text._PIECE", size)


def sort_in_parts_of(patch: pytest.MonkeyPatch, entries: int) -> None:
    """Sort so many entries of a folder at once."""
    patch.setattr("retinue.workspace.paths._SORTED_AT_ONCE", entries)


def wait_for_probe(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Give a sandbox this many seconds to show that it works."""
    patch.setattr("retinue.workspace.sandbox._PROBE_SECONDS", seconds)


def declared_commands() -> set[str]:
    """Return the names of all commands that the parser knows."""
    from retinue.cli import parsers

    return set(parsers._COMMANDS)


def metric_lines(depths: Any, worker: Any) -> list[str]:
    """Return the lines of `retinue worker --metrics`."""
    from retinue.cli.worker import _figures

    return list(_figures(depths, worker))


def try_suspects_after(seconds: float) -> None:
    """In this process, wait at most so long before a run is tried that was lost several times: here its process is killed on purpose,
    sooner than the pauses end."""
    from retinue.core import probation

    probation.LONGEST_PAUSE = seconds
