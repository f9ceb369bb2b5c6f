"""Synchronous use of a runtime: scripts, notebooks (a running loop in the main thread), Ctrl-C."""

import asyncio
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    Decision,
    DecisionRefused,
    Event,
    RunStatus,
    Runtime,
    ThreadBusy,
    ToolContext,
    ToolResult,
    tool,
)
from retinue.stores import MemoryStore, RunRecord
from retinue.testing import ScriptedModel, call, say
from tests.prepared import PYTHON

from .. import inside


def answering(text: str = "hi") -> Agent:
    return Agent("a", ScriptedModel(lambda request: say(text)))


def test_a_script_runs_an_agent_without_await() -> None:
    runtime = Runtime([answering()])
    result = runtime.run_sync("a", "go", thread_id="t")
    assert (result.status, result.response, result.thread_id) == (RunStatus.COMPLETED, "hi", "t")
    again = runtime.run_sync("a", "go", thread_id="t")
    assert [message.text for message in again.messages] == ["go", "hi"]


def test_a_sync_with_block_closes_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    before = set(threading.enumerate())
    with Runtime.open(url, [answering()]) as runtime:
        run_id = runtime.run_sync("a", "go").run_id
        assert "retinue-sync" in {thread.name for thread in set(threading.enumerate()) - before}
    assert not {thread.name for thread in set(threading.enumerate()) - before} & {"retinue-sync", "retinue-store"}
    with pytest.raises(ConfigurationError, match="this runtime is closed"):
        runtime.run_sync("a", "go")

    async def read() -> Any:
        async with Runtime.open(url, [answering()]) as later:
            return await later.result(run_id)

    assert asyncio.run(read()).response == "hi"


def test_a_waiting_run_is_answered_without_await() -> None:
    @tool
    async def ask() -> ToolResult:
        """Ask."""
        return ToolResult.suspended("Which city?")

    runtime = Runtime([Agent("a", ScriptedModel([call("ask", id="c1"), say("ok")]), tools=[ask])])
    waiting = runtime.run_sync("a", "go")
    with pytest.raises(DecisionRefused, match=r"Decision.resume\(value\) answers it"):
        runtime.resume_sync(waiting.run_id, {"c1": Decision.approve()})
    assert runtime.resume_sync(waiting.run_id, {"c1": Decision.answer("Rome")}).response == "ok"


def test_events_can_be_iterated_without_await() -> None:
    runtime = Runtime([answering()])
    kinds = [event.kind for event in runtime.stream_sync("a", "go")]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")
    assert "text_delta" in kinds


def test_a_mistake_raises_in_the_caller() -> None:
    with pytest.raises(ConfigurationError, match="agent 'a' has no model"):
        Runtime([Agent("a")]).run_sync("a", "go")
    with pytest.raises(ConfigurationError, match="no option .thred_id.: write thread_id"):
        Runtime([answering()]).run_sync("a", "go", thred_id="t")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("stored", [False, True])
async def test_a_notebook_uses_both_ways_on_one_runtime(tmp_path: Path, stored: bool) -> None:
    """A notebook's main thread has a running loop, which waits while a cell runs synchronous code."""
    agents = [answering()]
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", agents) if stored else Runtime(agents)
    async with runtime:
        first = await runtime.run("a", "one", thread_id="t")
        second = runtime.run_sync("a", "two", thread_id="t")
        third = await runtime.run("a", "three", thread_id="t")
        assert [result.status for result in (first, second, third)] == [RunStatus.COMPLETED] * 3
        # What one way made, the other reads.
        assert (await runtime.result(second.run_id)).response == "hi"
        events = [event async for event in runtime.events(second.run_id)]
        assert events[-1].kind == "run_finished"
        thread = await runtime.store.load_thread("t")
        assert thread is not None
        assert [message.text for message in thread.messages] == ["one", "hi", "two", "hi", "three", "hi"]


async def test_a_thread_that_the_blocked_loop_holds_is_busy() -> None:
    """Waiting for it would wait for ever: the loop that works on it is blocked."""

    @tool
    async def hang() -> None:
        """Hang."""
        await asyncio.Event().wait()

    agent = Agent("a", ScriptedModel([call("hang"), say("never")]), tools=[hang])
    runtime = Runtime([agent])
    run = runtime.stream("a", "go", thread_id="t")
    for when_busy in ("reject", "enqueue", "interrupt"):
        with pytest.raises(ThreadBusy):
            runtime.run_sync("a", "go", thread_id="t", when_busy=when_busy)
    await run.cancel()
    await runtime.close()


async def test_a_run_that_waits_is_answered_the_other_way() -> None:
    @tool
    def ask(ctx: ToolContext) -> Any:
        """Ask."""
        return ctx.resume_input or ToolResult.suspended("sure?")

    agent = Agent("a", ScriptedModel([call("ask", {}, id="c"), say("done")]), tools=[ask])
    async with Runtime([agent]) as runtime:
        waiting = runtime.run_sync("a", "go")
        assert waiting.status is RunStatus.SUSPENDED
        assert (await runtime.resume(waiting.run_id, {"c": Decision.resume("yes")})).response == "done"


def test_sync_code_inside_a_tool_may_run_agents_too() -> None:
    runtime: Runtime

    @tool
    def nested() -> str:
        """Run another agent."""
        return runtime.run_sync("a", "go").response or ""

    outer = Agent("outer", ScriptedModel([call("nested"), say("outer done")]), tools=[nested])
    runtime = Runtime([answering("inner"), outer])
    result = runtime.run_sync("outer", "go")
    assert [message.text for message in result.messages if message.role == "tool"] == ["inner"]


def test_async_code_of_the_thread_is_told_to_await() -> None:
    runtime: Runtime

    @tool
    async def nested() -> str:
        """Block the loop."""
        return runtime.run_sync("a", "go").response or ""

    outer = Agent("outer", ScriptedModel([call("nested"), say("end")]), tools=[nested])
    runtime = Runtime([answering(), outer])
    result = runtime.run_sync("outer", "go")
    told = [message.text for message in result.messages if message.role == "tool"]
    assert "await runtime.run(…)" in told[0]


_INTERRUPTED = """
import asyncio, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
from retinue import Agent, Runtime, tool
from retinue.testing import ScriptedModel, call, say

@tool
async def hang() -> None:
    "Hang."
    print("hanging", flush=True)
    await asyncio.Event().wait()

def sink(event):
    if event.kind == "run_finished":
        print(event.status.value, flush=True)

runtime = Runtime([Agent("a", ScriptedModel([call("hang"), say("never")]), tools=[hang])], sinks=[sink])
try:
    runtime.run_sync('a', 'go')
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_cancels_the_run_and_waits_for_its_end() -> None:
    with subprocess.Popen([PYTHON, "-c", _INTERRUPTED], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "hanging\n"
        program.send_signal(signal.SIGINT)
        try:
            assert program.communicate(timeout=60)[0].splitlines() == ["cancelled", "interrupted"]
        finally:
            program.kill()


def test_ctrl_c_before_the_work_begins_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime([answering()])
    runtime.run_sync("a", "go")
    loop, seen = inside.loop_of_sync(runtime), list[Any]()
    schedule = loop.call_soon_threadsafe

    def interrupted(work: Any, *args: Any) -> None:
        schedule(work, *args)
        if not seen:
            seen.append(work)
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.run_sync("a", "go")
    monkeypatch.undo()
    assert runtime.run_sync("a", "again").response == "hi"


def test_leaving_the_events_cancels_the_run() -> None:
    ended = threading.Event()

    @tool
    async def hang() -> None:
        """Hang."""
        await asyncio.Event().wait()

    def sink(event: Event) -> None:
        if event.kind == "run_finished":
            ended.set()

    agent = Agent("a", ScriptedModel([call("hang"), say("never")]), tools=[hang])
    for event in Runtime([agent], sinks=[sink]).stream_sync("a", "go"):
        if event.kind == "tool_call_ready":
            break
    assert ended.wait(60)


class SlowStore(MemoryStore):
    """Stores the end of a leg only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    async def save_run(self, record: RunRecord) -> None:
        if record.result is not None:
            await asyncio.to_thread(self.may_end.wait)
        await super().save_run(record)


@pytest.mark.parametrize("is_left_at_the_last_event", [False, True])
def test_a_run_that_waits_is_not_cancelled_by_the_end_of_the_iteration(is_left_at_the_last_event: bool) -> None:
    """The last event comes before the end is stored, so the handle has not ended when the iteration does."""

    @tool
    async def ask() -> ToolResult:
        """Ask."""
        return ToolResult.suspended("Which city?")

    store = SlowStore()
    runtime = Runtime([Agent("a", ScriptedModel([call("ask", id="c1"), say("ok")]), tools=[ask])], store=store)
    run_id = ""
    for event in runtime.stream_sync("a", "go"):
        run_id = event.run_id
        if is_left_at_the_last_event and event.kind == "run_finished":
            break
    store.may_end.set()
    answered = runtime.resume_sync(run_id, {"c1": Decision.answer("Rome")})
    assert (answered.status, answered.response) == (RunStatus.COMPLETED, "ok")
