"""Tapes: everything that a run wrote to its store, so that a store can be made that holds any prefix of it."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from msgspec import Struct

from retinue import Decision, DecisionRefused, Limits, RunResult, RunStatus, Runtime
from retinue.core.processes import process_identity
from retinue.core.rows import LogRow
from retinue.core.stores import LogBatch, RunRecord, ThreadRecord, Wish
from retinue.log.fold import fold_all
from retinue.log.owned import LiveLog
from retinue.log.state import LogState
from retinue.storage.check import check
from retinue.storage.packs import DELTAS
from retinue.storage.stores import open_store
from retinue.tasks.repository import TaskLiveness, TaskSettings
from retinue.tasks.task import TaskRecord, TaskScope

from .. import inside
from ..places import FAST
from .program import Plan, World

GONE = f"{process_identity()}/gone"
"""An owner that is known to be gone."""


class Tasks:
    """Task records in memory, which can be copied at any moment."""

    def __init__(self, records: dict[str, TaskRecord] | None = None) -> None:
        self.records = dict(records or {})
        self.results: dict[str, str] = {}
        self.settings = TaskSettings(look_every=0.02)

    async def add(self, record: TaskRecord) -> None:
        self.records[record.task_id] = record

    async def get(self, scope: TaskScope, task_id: str) -> TaskRecord | None:
        record = self.records.get(task_id)
        return record if record is not None and record.scope == scope else None

    async def list(self, scope: TaskScope) -> list[TaskRecord]:
        return [record for record in self.records.values() if record.scope == scope]

    async def update(self, scope: TaskScope, task_id: str, change: Any) -> TaskRecord | None:
        record = await self.get(scope, task_id)
        if record is None or record.status.is_terminal:
            return record
        self.records[task_id] = changed = change(record) or record
        return changed

    async def keep_result(self, record: TaskRecord, text: str) -> str | None:
        return None

    async def read_result(self, record: TaskRecord) -> str | None:
        return record.result

    async def open_scopes(self) -> list[TaskScope]:
        return [record.scope for record in self.records.values() if not record.status.is_terminal]

    async def liveness(self, scope: TaskScope) -> dict[str, TaskLiveness]:
        return {}


class Entry(Struct):
    """One row, and what the records of tasks said when it was appended."""

    row: LogRow
    tasks: dict[str, TaskRecord]


class Tape(Struct):
    """What a run wrote: its rows in order, and what was written beside them."""

    record: RunRecord
    request: bytes
    entries: list[Entry]
    batches: list[tuple[int, LogBatch]]
    """How many rows were stored after each batch, and the batch."""
    history: ThreadRecord | None = None
    """The thread as it was before the run."""

    @property
    def rows(self) -> list[LogRow]:
        return [entry.row for entry in self.entries]

    def cuts(self) -> list[int]:
        """How many rows a prefix may have: any number; of several deltas in a row only the first counts."""
        found = [0]
        for number, entry in enumerate(self.entries, 1):
            is_delta = isinstance(entry.row.event, DELTAS)
            if not is_delta or not isinstance(self.entries[number - 2].row.event, DELTAS):
                found.append(number)
        return found

    def state(self, cut: int) -> LogState:
        """The fold of a prefix."""
        return fold_all(self.rows[:cut])


class Recorder:
    """Records what is written to a store. Rows that a store has before are given."""

    def __init__(self, store: Any, tasks: Tasks | None, before: Tape | None = None) -> None:
        self.store, self._tasks = store, tasks
        self.entries: list[Entry] = list(before.entries) if before else []
        self.batches: list[tuple[int, LogBatch]] = list(before.batches) if before else []
        self.wishes: list[Wish] = []
        self.history = before.history if before else None
        self._stored = len(self.entries)
        self._request = before.request if before else None
        """Of the root run: the packer removes it from the store once the log has ended."""
        self._write, self._put, self._begin = store.write, store.put_wish, store.begin_run
        store.write, store.put_wish, store.begin_run = self.write, self.put_wish, self.begin_run

    def append(self, row: LogRow) -> None:
        self.entries.append(Entry(row, dict(self._tasks.records) if self._tasks is not None else {}))

    def write(self, batch: LogBatch) -> Any:
        self._stored += len(batch.rows)
        kept = copy.copy(batch)
        kept.runs = [copy.copy(run) for run in batch.runs]
        self.batches.append((self._stored, kept))
        return self._write(batch)

    def begin_run(self, record: RunRecord, request: bytes, *args: Any, **options: Any) -> Any:
        self._request = self._request or request
        return self._begin(record, request, *args, **options)

    async def put_wish(self, wish: Wish) -> None:
        self.wishes.append(wish)
        await self._put(wish)

    async def tape(self, run_id: str) -> Tape:
        record = await self.store.load_run(run_id)
        assert record is not None
        assert self._request is not None
        begun = RunRecord(identity=record.identity, started_at=record.started_at, log_id=run_id)
        return Tape(begun, self._request, self.entries, self.batches, self.history)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of every row that a log with a writer gets."""

    def record(log: LiveLog, row: LogRow) -> None:
        if log.writer is not None:
            recorder.append(row)

    with inside.recorded_rows(record):
        yield


class End(Struct):
    """What a program came to: its result, the state of all its runs, its log, and what its process did."""

    result: RunResult
    tree: LogState
    events: list[Any]
    tape: Tape
    world: World
    wishes: list[Wish]
    problems: list[str]
    """What `db check` finds wrong with the store."""


@asynccontextmanager
async def a_store() -> AsyncIterator[Any]:
    """An empty store."""
    with tempfile.TemporaryDirectory(prefix="prefix-", dir=FAST) as folder:
        store: Any = open_store(f"sqlite:///{folder}/app.db")
        await store.open()
        try:
            yield store
        finally:
            await store.close()


def needs_tasks(plan: Plan) -> bool:
    from .program import calls_of, plans_of

    delegates = ("spawn", "background", "promoted", "send", "output")
    return any(call.does in delegates for one in plans_of(plan) for call in calls_of(one))


Prepare = Callable[[World], None]


async def undisturbed(
    plan: Plan,
    limits: Limits | None = None,
    *,
    history: ThreadRecord | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> End:
    """Run a program to its end, answering as it says."""
    async with a_store() as store:
        tasks = Tasks() if needs_tasks(plan) else None
        world = World(plan, tasks)
        if prepare is not None:
            prepare(world)
        if history is not None:
            await store.save_thread(history)
        recorder = Recorder(store, tasks)
        recorder.history = history
        with recorded(recorder):
            async with Runtime(world.agents(), store=store, **options) as runtime:
                run = runtime.stream(world.agents()[0].name, f"do {plan.label}", thread_id="thread-1", limits=limits)
                return await see_through(runtime, run.run_id, world, recorder)


async def build(store: Any, tape: Tape, cut: int, wishes: list[Wish] | None = None, *, bare: bool = False) -> None:
    """Store the first rows of a tape, with what was written beside them in whole batches, as if the owner were gone.

    With `bare`, what was written beside the last row is not there.
    """
    if tape.history is not None:
        await store.save_thread(tape.history)
    await store.begin_run(copy.copy(tape.record), tape.request, GONE, 60.0)
    runs: dict[str, RunRecord] = {}
    threads: dict[str, Any] = {}
    released = ended = False
    for stored, batch in tape.batches:
        if stored < cut or (stored == cut and not bare):
            runs.update({run.identity.run_id: run for run in batch.runs})
            threads.update({update.record.thread_id: update for update in batch.threads})
            # A later owner has rows of its own.
            released, ended = batch.released and stored == cut, batch.ended and stored == cut
    run_id = tape.record.identity.run_id
    await store.write(
        LogBatch(
            log_id=run_id,
            epoch=1,
            rows=tape.rows[:cut],
            runs=[copy.copy(run) for run in runs.values()],
            threads=[copy.copy(update) for update in threads.values()],
            released=released,
            ended=ended,
        )
    )
    for wish in wishes or ():
        await store.put_wish(wish)


async def continued(
    tape: Tape,
    cut: int,
    plan: Plan,
    *,
    late: bool = False,
    bare: bool = False,
    wishes: list[Wish] | None = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> End:
    """Continue a prefix of a tape in a new runtime, to the end.

    With `late`, the records of tasks are as they were when the next row was appended.
    """
    async with a_store() as store:
        await build(store, tape, cut, wishes, bare=bare)
        tasks = None
        if needs_tasks(plan):
            at = min(cut + late, len(tape.entries)) - 1
            tasks = Tasks(tape.entries[at].tasks if at >= 0 else {})
        world = World(plan, tasks)
        if prepare is not None:
            prepare(world)
        batches = [one for one in tape.batches if one[0] < cut or (one[0] == cut and not bare)]
        before = Tape(tape.record, tape.request, tape.entries[:cut], batches, tape.history)
        recorder = Recorder(store, tasks, before)
        with recorded(recorder):
            runtime = Runtime(world.agents(), store=store, **options)
            world.cancel = lambda: runtime.cancel(tape.record.identity.run_id, reason="halted")
            async with runtime:
                return await see_through(runtime, tape.record.identity.run_id, world, recorder)


async def see_through(runtime: Runtime, run_id: str, world: World, recorder: Recorder) -> End:
    """See a run to its end, answering what waits; then read everything back."""
    world.cancel = lambda: runtime.cancel(run_id, reason="halted")
    tasks = asyncio.create_task(answer_tasks(runtime, world))
    try:
        result = await asyncio.wait_for(answer_all(runtime, run_id, world), 90)
        events = await asyncio.wait_for(_events(runtime, run_id), 90)
    finally:
        tasks.cancel()
    store: Any = runtime.store
    for _ in range(200):  # the log is given up a moment after its last event
        if await store.owner_of(run_id) is None:
            break
        await asyncio.sleep(0.005)
    stored = await store.read_log(run_id)
    assert stored.ended, "the log has not ended"
    for job in world.jobs:
        await job
    problems = [str(finding) for finding in await check(store)]
    tape = await recorder.tape(run_id)
    return End(result, fold_all(stored.rows), events, tape, world, recorder.wishes, problems)


async def _events(runtime: Runtime, run_id: str) -> list[Any]:
    return [event async for event in runtime.events(run_id)]


async def answer_tasks(runtime: Runtime, world: World) -> None:
    """Answer what background children ask, for as long as somebody waits for this."""
    while world.repository is not None:
        for record in list(world.repository.records.values()):
            if record.awaiting and not record.status.is_terminal:
                result = await _result_of_child(runtime, record.run_id or "")
                if result is not None and result.status is RunStatus.SUSPENDED:
                    with suppress(DecisionRefused):  # somebody has answered before, as the log says
                        await _answer(runtime, result, world)
        await asyncio.sleep(0.002)


async def _result_of_child(runtime: Runtime, run_id: str) -> RunResult | None:
    """What is known of a background child: with a store only what is stored, as for any other process."""
    if not inside.has_store(runtime):
        return inside.result_in_memory(runtime, run_id)
    record = await runtime.store.load_run(run_id)
    return None if record is None else record.result


async def _answer(runtime: Runtime, result: RunResult, world: World) -> RunResult:
    waiting = sorted(result.suspended.items(), key=lambda item: str((item[1].parameters or {}).get("key", "")))
    assert waiting, "it waits for nothing"
    return await runtime.resume(result.run_id, dict([answer(world, name, ticket) for name, ticket in waiting[:2]]))


async def answer_all(runtime: Runtime, run_id: str, world: World) -> RunResult:
    """The end of a run, whose questions are answered two at a time in the order of their keys."""
    result = await runtime.result(run_id)
    while result.status is RunStatus.SUSPENDED:
        result = await _answer(runtime, result, world)
    return result


def answer(world: World, name: str, ticket: Any) -> tuple[str, Decision]:
    """What the program says to a ticket."""
    key, number = ticket.parameters["key"], ticket.parameters["n"]
    call = world.calls[key]
    place = number + (call.hook == "suspend")
    if not call.answers[place % len(call.answers)]:
        return name, Decision.cancel(f"no to {key} {number}")
    return name, Decision.resume({"key": key, "n": number + 1})
