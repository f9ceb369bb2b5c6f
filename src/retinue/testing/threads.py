"""Rows and batches for checks of stores, and the part of the DurableStore contract that is about threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec

from ..core.errors import OwnershipLost, StoreError
from ..core.events import Event, StepStarted, TextDelta, ToolCallReady
from ..core.rows import LogRow, Private
from ..core.runs import RunStatus
from ..core.stores import DurableStore, LogBatch, Reply, RunRecord, ThreadUpdate, WhenBusy
from .stores import ODD, StoreSuite, stored_run, stored_thread

LONG = 60.0


def text_rows(first: int, last: int, text: str = ODD) -> list[LogRow]:
    """Return rows of text deltas with these numbers."""
    stamp: dict[str, Any] = {"run_id": "r1", "agent": "a", "ns": ("tools:c1",), "message_id": "m1"}
    events = [TextDelta(seq=seq, at=seq / 4, delta=text, **stamp) for seq in range(first, last + 1)]
    return [LogRow(event.seq, 0, event) for event in events]


def step_rows(first: int, text: str = ODD) -> list[LogRow]:
    """Return five rows with three events from this number on: with, without and with only a private part."""
    stamp: dict[str, Any] = {"at": first / 4, "run_id": "r1", "agent": "a"}
    return [
        LogRow(first, 0, StepStarted(seq=first, step=1, model=text, **stamp), Private(values={"k": [1, text]})),
        LogRow(first, 1, None, Private(kind="commit", run_id="r1", writes={"secret": text}, revision=first)),
        LogRow(first, 2, None, Private(kind="entered", call_id="c1")),
        LogRow(first + 1, 0, ToolCallReady(seq=first + 1, call_id="c1", tool_name="look", args={"a": text}, **stamp)),
        LogRow(first + 2, 0, StepStarted(seq=first + 2, step=2, **stamp), Private(limit=text)),
    ]


def public(rows: list[LogRow]) -> list[Event]:
    """Return the events of rows."""
    return [row.event for row in rows if row.event is not None]


async def begin(
    store: DurableStore, record: RunRecord, owner: str = "p1", lease: float = LONG, when_busy: WhenBusy = "reject"
) -> str | None:
    """Begin a run whose request is its id."""
    return await store.begin_run(record, record.identity.run_id.encode(), owner, lease, when_busy)


async def refused(write: Awaitable[Any], error: type[StoreError] = StoreError) -> None:
    """Await a write that must fail with an error that is not transient."""
    try:
        await write
    except error as exc:
        assert not exc.transient, f"said to be transient: {exc}"
    else:
        raise AssertionError("it was not refused")


def ended_run(run_id: str, number: float = 1.0, status: RunStatus = RunStatus.COMPLETED, **fields: Any) -> LogBatch:
    """Return the batch with which the owner of epoch 1 ends a run."""
    return LogBatch(log_id=run_id, epoch=1, runs=[stored_run(run_id, number, status, **fields)], ended=True)


def full_batch(epoch: int = 1, **fields: Any) -> LogBatch:
    """Return a batch for log r1 with every kind of content."""
    return LogBatch(
        log_id="r1",
        epoch=epoch,
        rows=[*step_rows(1), *text_rows(4, 20)],
        runs=[stored_run("r1", 1.0, RunStatus.COMPLETED)],
        threads=[ThreadUpdate(stored_thread("t1", "one"))],
        replies=[Reply("w1", b"reply")],
        **fields,
    )


class ThreadSuite(StoreSuite[DurableStore]):
    """The contract of threads in a DurableStore."""

    async def check_a_busy_thread_refuses(self, store: DurableStore, other: DurableStore) -> None:
        assert await begin(store, stored_run("r1")) is None
        assert await begin(other, stored_run("r2", 2.0), "p2") == "r1"
        assert await other.load_run("r2") is None
        assert await other.read_events("r2") is None
        assert await begin(other, stored_run("r3", 3.0, thread_id="t2"), "p2") is None

    async def check_a_run_that_ends_releases_its_thread(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        waits = stored_run("r1", 1.0, RunStatus.SUSPENDED)
        await store.write(LogBatch(log_id="r1", epoch=1, runs=[waits], released=True))
        assert await begin(other, stored_run("r2", 2.0), "p2") == "r1"
        assert await store.claim("r1", "p1", LONG) == 2
        done = stored_run("r1", 1.0, RunStatus.COMPLETED)
        thread = ThreadUpdate(stored_thread("t1", "one"))
        await store.write(LogBatch(log_id="r1", epoch=2, runs=[done], threads=[thread], ended=True))
        assert await begin(other, stored_run("r2", 2.0), "p2") is None
        await other.write(ended_run("r2", 2.0, RunStatus.FAILED))
        assert await begin(store, stored_run("r3", 3.0)) is None

    async def check_a_thread_that_was_saved_since_refuses(self, store: DurableStore, other: DurableStore) -> None:
        seen = await other.saved_at("t1")
        assert seen == 0
        await begin(store, stored_run("r1"))
        assert await other.begin_run(stored_run("r2", 2.0), b"r2", "p2", LONG, saved_at=seen) == "r1"
        thread = ThreadUpdate(stored_thread("t1", "one"))
        await store.write(msgspec.structs.replace(ended_run("r1"), threads=[thread]))
        for _ in range(2):
            assert await other.begin_run(stored_run("r2", 2.0), b"r2", "p2", LONG, saved_at=seen) == ""
        assert await other.load_run("r2") is None
        saved_at = await other.saved_at("t1")
        assert saved_at > seen
        assert await other.begin_run(stored_run("r2", 2.0), b"r2", "p2", LONG, saved_at=saved_at) is None

    async def check_a_log_holds_the_threads_of_its_children(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await begin(other, stored_run("r2", 2.0, thread_id="t2"), "p2")
        assert await store.holder_of("sub") is None
        for _ in range(2):
            assert await store.hold_thread("r1", 1, "sub", "u1") is None
        assert await store.load_thread("sub") is None
        assert await other.holder_of("sub") == "r1"
        assert await other.hold_thread("r2", 1, "sub", "u1") == "r1"
        assert await begin(other, stored_run("r3", 3.0, thread_id="sub"), "p2") == "r1"
        # The root has ended, and a task in its log works on.
        await store.write(msgspec.structs.replace(ended_run("r1"), ended=False))
        assert await other.hold_thread("r2", 1, "sub", "u1") == "r1"
        thread = ThreadUpdate(stored_thread("sub", "one"))
        await store.write(LogBatch(log_id="r1", epoch=1, threads=[thread]))
        assert await other.holder_of("sub") == "r1", "saved, but not left"
        await store.write(LogBatch(log_id="r1", epoch=1, threads=[thread], left=["sub"]))
        assert await other.hold_thread("r2", 1, "sub", "u1") is None
        assert await other.load_thread("sub") == stored_thread("sub", "one")
        await store.write(LogBatch(log_id="r1", epoch=1, left=["sub", "unknown"]))
        assert await store.holder_of("sub") == "r2", "only the holder can leave it"
        await other.write(LogBatch(log_id="r2", epoch=1, left=["sub"]))
        assert await begin(other, stored_run("r3", 3.0, thread_id="sub"), "p2") is None
        assert await store.hold_thread("r1", 1, "sub", "u1") == "r3"

    async def check_who_takes_a_log_over_has_its_threads(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await begin(other, stored_run("r2", 2.0, thread_id="t2"), "p2")
        assert await store.hold_thread("r1", 1, "sub", None) is None
        assert await other.claim("r1", "p2", LONG, gone="p1") == 2
        await refused(store.hold_thread("r1", 1, "sub", None), OwnershipLost)
        await refused(store.hold_thread("r1", 1, "free", None), OwnershipLost)
        assert await other.hold_thread("r2", 1, "sub", None) == "r1"
        assert await other.hold_thread("r1", 2, "sub", None) is None
        await other.write(LogBatch(log_id="r1", epoch=2, ended=True))
        assert await store.holder_of("sub") is None, "a log that has ended holds nothing"
        assert await other.hold_thread("r2", 1, "sub", None) is None

    async def check_a_run_that_was_placed_for_another_is_in_no_list(
        self, store: DurableStore, other: DurableStore
    ) -> None:
        await begin(store, stored_run("r1"))
        child = stored_run("r2", 2.0, thread_id="t2", parent_run_id="r1")
        await begin(store, child)
        assert await other.load_run("r2") == child
        assert [run.identity.run_id for run in await other.list_runs()] == ["r1"]
        assert [thread.thread_id for thread in await other.list_threads()] == ["t1"]

    async def check_a_queue_keeps_its_order(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        assert await begin(store, stored_run("r2", 2.0), when_busy="enqueue") == "r1"
        assert await begin(other, stored_run("r3", 3.0), "p2", when_busy="enqueue") == "r2"
        assert await other.load_run("r3") == stored_run("r3", 3.0, queued=True)
        assert await begin(store, stored_run("r4", 4.0)) == "r3"
        assert await other.take_thread("r3") == "r2"
        assert await store.take_thread("r2") == "r1"
        await store.write(ended_run("r1"))
        assert await begin(store, stored_run("r4", 4.0)) == "r3"
        assert await other.take_thread("r3") == "r2"
        for _ in range(2):
            assert await store.take_thread("r2") is None
        assert await store.load_run("r2") == stored_run("r2", 2.0)
        assert await store.list_runs(status="queued") == [stored_run("r3", 3.0, queued=True)]
        assert await other.take_thread("r3") == "r2"
        await store.write(ended_run("r2", 2.0, RunStatus.CANCELLED))
        assert await other.take_thread("r3") is None

    async def check_a_queue_does_not_follow_the_clocks_of_clients(
        self, store: DurableStore, other: DurableStore
    ) -> None:
        await begin(store, stored_run("r1", 100.0))
        assert await begin(other, stored_run("r2", 160.0), "p2", when_busy="enqueue") == "r1"
        assert await begin(store, stored_run("r3", 101.0), when_busy="enqueue") == "r2"
        for _ in range(2):
            assert await begin(store, stored_run("r4", 40.0), when_busy="interrupt") == "r3"
        assert {wish.log_id for wish in await store.wishes("p1")} == {"r1", "r3"}
        assert {wish.log_id for wish in await store.wishes("p2")} == {"r2"}
        for run_id in ("r1", "r2", "r3"):
            await store.write(ended_run(run_id, status=RunStatus.CANCELLED))
        assert await store.take_thread("r4") is None
        assert await begin(other, stored_run("r5", 39.0), "p2", when_busy="enqueue") == "r4"
        # A retry of a run that has its thread interrupts nobody.
        assert await begin(store, stored_run("r4", 40.0), when_busy="interrupt") is None
        assert await store.wishes("p2") == []

    async def check_one_process_queues_runs_in_the_order_of_its_calls(
        self, store: DurableStore, other: DurableStore
    ) -> None:
        await begin(store, stored_run("r0"))
        begins = [begin(store, stored_run(f"r{number}"), when_busy="enqueue") for number in range(1, 20)]
        assert await asyncio.gather(*begins) == [f"r{number}" for number in range(19)]

    async def check_a_queued_run_that_was_cancelled_takes_nothing(
        self, store: DurableStore, other: DurableStore
    ) -> None:
        await begin(store, stored_run("r1"))
        for number in (2, 3):
            assert await begin(store, stored_run(f"r{number}", float(number)), when_busy="enqueue") is not None
        await store.write(ended_run("r2", 2.0, RunStatus.CANCELLED))
        await store.write(ended_run("r1"))
        assert await store.take_thread("r2") is None
        assert (await other.load_run("r2")) == stored_run("r2", 2.0, RunStatus.CANCELLED)
        assert await other.take_thread("r3") is None
        assert await begin(store, stored_run("r4", 4.0)) == "r3"

    async def check_a_free_thread_is_taken_at_once(self, store: DurableStore, other: DurableStore) -> None:
        for number, when_busy in enumerate(("enqueue", "interrupt"), 1):
            record = stored_run(f"r{number}", thread_id=f"t{number}")
            assert await begin(store, record, when_busy=when_busy) is None
            assert await other.load_run(f"r{number}") == record
        assert await other.wishes("p1") == []

    async def check_an_interrupt_cancels_all_before_it(self, store: DurableStore, other: DurableStore) -> None:
        await begin(store, stored_run("r1"))
        await begin(other, stored_run("r2", 2.0), "p2", when_busy="enqueue")
        await begin(store, stored_run("other", thread_id="t2"))
        for _ in range(2):
            assert await begin(other, stored_run("r3", 3.0), "p2", when_busy="interrupt") == "r2"
        (first,), (second,) = await store.wishes("p1"), await other.wishes("p2")
        assert (first.log_id, first.run_id, first.kind) == ("r1", "r1", "cancel")
        assert first.body == b'"a newer run was started"'
        assert (second.log_id, second.run_id, second.kind) == ("r2", "r2", "cancel")
        assert await begin(store, stored_run("r4", 4.0), when_busy="interrupt") == "r3"
        assert [wish.log_id for wish in await other.wishes("p2")] == ["r2", "r2", "r3"]
