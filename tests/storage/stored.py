"""Runs in a database, written as a runtime writes them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from retinue import Message, PersistedState, RunIdentity, RunResult, RunStatus, SuspendTicket
from retinue.core.events import (
    Event,
    InferenceFinished,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextDelta,
    ToolCallFinished,
    ToolCallReady,
    ToolCallStarted,
)
from retinue.core.messages import ToolCall
from retinue.core.results import ToolCallStatus, ToolResult
from retinue.core.rows import LogRow, Private
from retinue.core.runs import Usage
from retinue.core.stores import LogBatch, ThreadUpdate
from retinue.storage.sql import SqlStore
from retinue.stores import RunRecord, ThreadRecord

OWNER = "host:1"
CALL = ToolCall("call_1", "write_file", {"path": "a.md"})
TICKET = SuspendTicket("ticket_1", "permission", "May I write a.md?", {"path": "a.md"}, path=("call_1",))


def events_of(run_id: str, status: RunStatus, deltas: int = 3, *, said: str = "All is well.") -> list[Event]:
    """A run of one step with one call: what it says comes in so many deltas."""
    stamp: dict[str, Any] = {"run_id": run_id, "agent": "assistant"}
    waits = status is RunStatus.SUSPENDED
    call = ToolCallStatus.SUSPENDED if waits else ToolCallStatus.SUCCEEDED
    made: list[Event] = [
        RunStarted(thread_id="t", messages=(Message.user("How is it?"),), **stamp),
        StepStarted(step=1, model="test:model", **stamp),
        *[TextDelta(delta="so ", message_id="m1", **stamp) for _ in range(deltas)],
        ToolCallStarted(call_id="call_1", tool_name="write_file", **stamp),
        InferenceFinished(step=1, message=Message.assistant(said, tool_calls=(CALL,)), **stamp),
        ToolCallReady(call_id="call_1", tool_name="write_file", args={"path": "a.md"}, **stamp),
        ToolCallFinished(
            call_id="call_1",
            tool_name="write_file",
            status=call,
            result=ToolResult.suspended(TICKET.message, TICKET) if waits else ToolResult.success("written"),
            message=Message.tool("written", tool_call_id="call_1"),
            **stamp,
        ),
        StepFinished(step=1, **stamp),
    ]
    if status is not RunStatus.RUNNING:
        error = "it broke" if status is RunStatus.FAILED else None
        usage = Usage(requests=1, input_tokens=100, output_tokens=20)
        made.append(
            RunFinished(status=status, termination="natural", response=said, error=error, steps=1, usage=usage, **stamp)
        )
    return [_numbered(event, number) for number, event in enumerate(made, 1)]


def _numbered(event: Event, number: int) -> Event:
    return replace(event, seq=number, at=1_700_000_000.0 + number)


def rows_of(events: Sequence[Event]) -> list[LogRow]:
    """Rows of events: the beginning and the end of a call have private parts, and so has a row of its own."""
    rows: list[LogRow] = []
    for event in events:
        if isinstance(event, RunStarted):
            identity = RunIdentity(event.run_id, event.thread_id, event.agent)
            rows.append(LogRow(event.seq, 0, event, Private(identity=identity)))
        elif isinstance(event, ToolCallFinished):
            entered = Private(kind="entered", run_id=event.run_id, call_id=event.call_id)
            rows.append(LogRow(event.seq - 1, 1, None, entered))
            rows.append(LogRow(event.seq, 0, event, Private(writes={"secret": "never shown"}, revision=1)))
        else:
            rows.append(LogRow(event.seq, 0, event))
    return rows


async def put_run(
    store: SqlStore,
    run_id: str,
    status: RunStatus = RunStatus.COMPLETED,
    *,
    thread_id: str = "t",
    user_id: str | None = None,
    deltas: int = 3,
    at: float = 1_700_000_000.0,
    owned: bool = False,
    said: str = "All is well.",
) -> None:
    """Store a run as it stands. One that runs has an owner; one that waits or has ended has none unless `owned`."""
    identity = RunIdentity(run_id, thread_id, "assistant", user_id=user_id)
    record = RunRecord(identity=identity, started_at=at, log_id=run_id)
    taken = await store.begin_run(record, b"{}", OWNER, 60.0)
    assert taken is None, f"the thread is held by {taken}"
    runs = status is RunStatus.RUNNING
    if not runs:
        record.result = RunResult(
            status=status,
            run_id=run_id,
            thread_id=thread_id,
            response=said,
            state=PersistedState(),
            steps=1,
            usage=Usage(requests=1, input_tokens=100, output_tokens=20),
            error="it broke" if status is RunStatus.FAILED else None,
            termination="suspended" if status is RunStatus.SUSPENDED else "natural",
            suspended={"call_1": TICKET} if status is RunStatus.SUSPENDED else {},
        )
    thread = ThreadRecord(thread_id=thread_id, user_id=user_id, messages=(Message.user("How is it?"),))
    leaves = not runs and not owned
    await store.write(
        LogBatch(
            log_id=run_id,
            epoch=1,
            rows=rows_of(events_of(run_id, status, deltas, said=said)),
            threads=[ThreadUpdate(thread)],
            runs=[record],
            released=leaves,
            ended=leaves and status.is_terminal,
        )
    )


TABLES = ("runs", "logs", "events", "inbox", "threads", "messages")


async def tamper(store: SqlStore, statement: str, *values: Any) -> Sequence[Any]:
    """Do something to a database that nobody should."""
    return await store.database.write(lambda link: link.run(statement, *values))


async def rows_in(store: SqlStore) -> dict[str, int]:
    return {table: (await tamper(store, f"SELECT COUNT(*) FROM {table}"))[0][0] for table in TABLES}


def sql(path: Path | str, statement: str, *values: Any) -> Sequence[Any]:
    """Do something to a file that nobody should."""
    with closing(sqlite3.connect(path)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def counts(path: Path | str) -> dict[str, int]:
    return {table: sql(path, f"SELECT COUNT(*) FROM {table}")[0][0] for table in TABLES}
