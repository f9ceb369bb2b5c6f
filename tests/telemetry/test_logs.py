"""Log lines of runs, and ids on whatever is logged inside one."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from inline_snapshot import snapshot

from retinue import Agent, Child, Runtime, ToolContext, tool
from retinue.telemetry import JsonLogFormatter, RunLogFilter, RunLogSink
from retinue.testing import ScriptedModel, call, fail, say
from tests.telemetry.collector import Collector

app = logging.getLogger("app")


@pytest.fixture
def lines() -> Iterator[Any]:
    """Everything that is logged, as JSON lines with ids."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RunLogFilter())
    handler.setFormatter(JsonLogFormatter())
    loggers = [app, logging.getLogger("retinue.runs")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    for logger in loggers:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


@tool
async def work(tag: str, ctx: ToolContext) -> str:
    """Work."""
    await asyncio.sleep(0.001)
    app.info("working", extra={"tag": tag, "truth": (ctx.run.run_id, ctx.call_id, ctx.run.thread_id)})
    return "secret-result"


@tool
def compute(tag: str, ctx: ToolContext) -> str:
    """Work in a thread."""
    app.info("working", extra={"tag": tag, "truth": (ctx.run.run_id, ctx.call_id, ctx.run.thread_id)})
    return "secret-result"


async def test_what_a_tool_logs_has_the_ids_of_its_call(lines: Any) -> None:
    child = Agent(
        "child",
        ScriptedModel(lambda r: say("ok") if r.messages[-1].role == "tool" else [call("work", {"tag": "deep"})]),
        tools=[work],
    )

    @tool
    async def fan(ctx: ToolContext) -> str:
        """Fan out."""
        await ctx.run_children([Child(child, "a"), Child(child, "b")])
        app.info("back", extra={"truth": (ctx.run.run_id, ctx.call_id, ctx.run.thread_id)})
        return "ok"

    calls = [call("fan"), call("work", {"tag": "shallow"}), call("compute", {"tag": "thread"})]
    agent = Agent("parent", ScriptedModel([calls, say("ok")]), tools=[fan, work, compute])
    app.info("before")
    await Runtime([agent], sinks=[RunLogSink()]).run("parent", "secret-input")
    app.info("after")
    mine = [line for line in lines() if line["logger"] == "app"]
    assert len(mine) == 7
    for line in mine:
        assert line.get("truth") == ([line["run_id"], line["call_id"], line["thread_id"]] if "run_id" in line else None)
    assert [line["message"] for line in mine if "run_id" not in line] == ["before", "after"]
    assert len({line["run_id"] for line in mine if "run_id" in line}) == 3


async def test_the_story_of_a_run_without_content(lines: Any) -> None:
    failing = Agent("child", ScriptedModel([call("work", {"tag": 3}), fail(OSError("secret-reason"))]), tools=[work])
    turns = [call("task", {"subagent_type": "child", "description": "secret"}), say("secret-answer")]
    await Runtime([Agent("parent", ScriptedModel(turns), subagents=[failing])], sinks=[RunLogSink()]).run("parent", "x")
    told = [line for line in lines() if line["logger"] == "retinue.runs"]
    assert [f"{line['level']} {line['agent']}: {line['message']}" for line in told] == snapshot(
        [
            "INFO parent: run of parent started",
            "DEBUG parent: inference of parent: tool_calls",
            "INFO child: run of child started",
            "DEBUG child: inference of child: tool_calls",
            "WARNING child: tool call work: failed",
            "WARNING child: inference of child: OSError",
            "WARNING child: run of child: failed",
            "WARNING parent: tool call task: failed",
            "DEBUG parent: inference of parent: stop",
            "INFO parent: run of parent: completed",
        ]
    )
    assert "secret" not in json.dumps(told)
    assert {key: value for key, value in told[-1].items() if key not in ("time", "run_id", "thread_id", "seconds")} == (
        snapshot(
            {
                "level": "INFO",
                "logger": "retinue.runs",
                "message": "run of parent: completed",
                "agent": "parent",
                "tokens": 0,
                "cost": 0.0,
                "event": "run_finished",
                "status": "completed",
            }
        )
    )


async def test_errors_that_do_not_end_a_run_are_told(lines: Any) -> None:
    agent = Agent("a", ScriptedModel([say("secret"), say("7")]), output=int)
    await Runtime([agent], sinks=[RunLogSink()]).run("a", "x")
    assert [line["message"] for line in lines() if line["level"] == "WARNING"] == snapshot(
        ["error in run of a: code=output_invalid"]
    )


async def test_lines_name_the_span_they_were_made_in(lines: Any) -> None:
    got = Collector()
    agent = Agent("a", ScriptedModel([call("work", {"tag": "x"}), say("ok")]), tools=[work])
    await Runtime([agent], sinks=[got.sink, RunLogSink()]).run("a", "go")
    line = next(line for line in lines() if line["message"] == "working")
    context = got.span("execute_tool work").get_span_context()
    assert context is not None
    assert (line["trace_id"], line["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")


def test_an_exception_and_odd_values_are_written() -> None:
    try:
        raise ValueError("boom")
    except ValueError as exc:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "said %s", ("é",), (ValueError, exc, exc.__traceback__))
    record.__dict__["odd"] = {1, 2}
    line = json.loads(JsonLogFormatter().format(record))
    assert (line["message"], line["odd"], line["level"]) == ("said é", "{1, 2}", "ERROR")
    assert "ValueError: boom" in line["exception"]
    assert line["time"].endswith("Z")
