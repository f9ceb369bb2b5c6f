"""A long run whose process was killed: its log, written straight into a store, and what it takes to continue it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from msgspec.structs import replace

from retinue import Agent, Message, ModelRequest, Runtime, TextChunk, TurnEnd, tool
from retinue.core.events import (
    Event,
    InferenceFinished,
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
from retinue.core.rows import LogRow, Private, StoredRequest
from retinue.core.runs import RunIdentity, Usage
from retinue.core.stores import LogBatch, RunRecord
from retinue.models import ModelChunk
from retinue.storage.stores import open_store

STEPS, DELTAS = 600, 1_000_000
RUN = "run_killed"
_BATCH = 5_000


def _step(number: int, deltas: int) -> Iterator[Event]:
    """A step with one call, whose answer was streamed."""
    call = ToolCall(f"call_{number}", "look", {"key": "a"})
    answer_id = f"{RUN}-m{number * 2}"
    said = Message.assistant("token " * deltas, (call,), id=answer_id)
    found = Message.tool("found", tool_call_id=call.id, name="look", id=f"{RUN}-m{number * 2 + 1}")
    yield StepStarted(step=number, model="bench:model")
    for _ in range(deltas):
        yield TextDelta(delta="token ", message_id=answer_id)
    yield ToolCallStarted(call_id=call.id, tool_name="look", message_id=answer_id)
    yield InferenceFinished(step=number, message=said, usage=Usage(requests=1, input_tokens=9, output_tokens=deltas))
    yield ToolCallReady(call_id=call.id, tool_name="look", args=call.args)
    result = ToolResult.success("found")
    status = ToolCallStatus.SUCCEEDED
    yield ToolCallFinished(call_id=call.id, tool_name="look", status=status, result=result, message=found)
    yield StepFinished(step=number)


def _rows(identity: RunIdentity) -> Iterator[LogRow]:
    """The rows of a run that was killed while the model answered in the step after the last whole one."""
    started = RunStarted(thread_id=identity.thread_id, messages=(Message.user("go", id=f"{RUN}-m1"),))
    seq = 0

    def row(event: Event, private: Private | None = None) -> LogRow:
        nonlocal seq
        seq += 1
        return LogRow(seq, 0, replace(event, seq=seq, at=1.0, run_id=RUN, agent=identity.agent), private)

    yield row(started, Private(identity=identity, request=StoredRequest()))
    for number in range(1, STEPS + 1):
        for event in _step(number, DELTAS // (STEPS + 1)):
            yield row(event)
    for event in list(_step(STEPS + 1, DELTAS - STEPS * (DELTAS // (STEPS + 1))))[:-5]:
        yield row(event)


async def fill(url: str) -> None:
    """Write the log as the process would have that was killed."""
    store: Any = open_store(url)
    await store.open()
    identity = RunIdentity(RUN, "thread_killed", "killed")
    await store.begin_run(
        RunRecord(identity=identity, started_at=1.0, log_id=RUN), b"{}", "a process that is gone", 0.0
    )
    rows: list[LogRow] = []
    for row in _rows(identity):
        rows.append(row)
        if len(rows) == _BATCH:
            await store.write(LogBatch(log_id=RUN, epoch=1, rows=rows))
            rows = []
    await store.write(LogBatch(log_id=RUN, epoch=1, rows=rows))
    await store.close()


class Resumed:
    """Notes when it is asked, and answers."""

    name = "bench:model"

    def __init__(self) -> None:
        self.asked_at = 0.0
        self.messages = 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        self.asked_at, self.messages = time.perf_counter(), len(request.messages)
        yield TextChunk("done")
        yield TurnEnd()


@tool
async def look(key: str) -> str:
    """Look something up."""
    return "found"


async def resumed(url: str) -> float:
    """Milliseconds from opening the store to the next model call of the killed run."""
    await fill(url)
    model = Resumed()
    began = time.perf_counter()
    async with Runtime.open(url, [Agent("killed", model, tools=[look], max_steps=STEPS + 2)]) as runtime:
        result = await runtime.result(RUN)
    assert (result.response, result.steps) == ("done", STEPS + 1), result
    assert model.messages == 2 * STEPS + 1, model.messages
    return (model.asked_at - began) * 1e3
