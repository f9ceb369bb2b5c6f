"""Rows and batches of logs, for checks of stores."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ..core.errors import StoreError
from ..core.events import Event, StepStarted, TextDelta, ToolCallReady
from ..core.lifecycle import RunStatus
from ..core.rows import LogRow, Private
from ..core.stores import DurableStore, LogBatch, Reply, RunRecord, ThreadUpdate, WhenBusy
from .stores import ODD, stored_run, stored_thread

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
