"""Humans who answer tomorrow: suspended runs are answered by another runtime, or another process, than they began in."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Decision,
    DecisionRefused,
    ResumeMode,
    RunStatus,
    Runtime,
    SuspendTicket,
    ToolContext,
    ToolResult,
    UnknownRun,
    tool,
)
from retinue.core.events import RunFinished
from retinue.core.stores import DurableStore
from retinue.errors import OwnershipLost
from retinue.testing import ScriptedModel, call, say

from ..prepared import PYTHON
from ..waiting import until

Build = Callable[[], list[Agent]]


def asking(ran: list[str], mode: ResumeMode = ResumeMode.REPLAY) -> Any:
    """A tool that wants to be allowed what it does."""

    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay somebody."""
        if ctx.resume_input is None:
            schema = {"type": "object", "required": ["ok"]}
            return ToolResult.suspended(
                "may I?", ticket=SuspendTicket(f"t-{to}", "pay", "may I?", {"to": to}, schema, mode)
            )
        ran.append(f"paid {to} {ctx.resume_input}")
        return f"paid {to}"

    return pay


def counting(ran: list[str]) -> Any:
    @tool
    async def count(what: str) -> str:
        """Count something."""
        ran.append(f"counted {what}")
        return what

    return count


def yes(**more: Any) -> Decision:
    return Decision.resume({"ok": True, **more})


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


async def suspended(url: str, build: Build, *, expect: set[str]) -> str:
    """Run the first agent until it waits, in a runtime that is closed then."""
    agents = build()
    async with Runtime.open(url, agents) as runtime:
        result = await runtime.run(agents[0].name, "go", thread_id="t")
        assert result.status is RunStatus.SUSPENDED
        assert set(result.suspended) == expect
        return result.run_id


async def test_a_call_is_answered_in_another_runtime(url: str) -> None:
    ran: list[str] = []

    def build() -> list[Agent]:
        def turn(request: Any) -> Any:
            if request.messages[-1].role == "tool":
                return say(f"done: {request.messages[-1].text}")
            return [call("count", {"what": "x"}, id="c0"), call("pay", {"to": "ann"}, id="c1")]

        return [Agent("a", ScriptedModel(turn), tools=[asking(ran), counting(ran)])]

    run_id = await suspended(url, build, expect={"c1"})
    async with Runtime.open(url, build()) as runtime:
        record = await runtime.store.load_run(run_id)
        assert record is not None
        assert record.status == "suspended"
        with pytest.raises(DecisionRefused, match="schema"):
            await runtime.resume(run_id, {"c1": Decision.resume({"no": 1})})
        with pytest.raises(DecisionRefused, match="does not wait for 'c9'"):
            await runtime.resume(run_id, {"c9": yes()})
        answer = yes()
        result = await runtime.resume(run_id, {"c1": answer})
    assert (result.status, result.response) == (RunStatus.COMPLETED, "done: paid ann")
    assert ran == ["counted x", "paid ann {'ok': True}"]
    async with Runtime.open(url, build()) as runtime:
        again = await runtime.resume(run_id, {"c1": answer})
        assert again.response == "done: paid ann"
        with pytest.raises(DecisionRefused, match="completed, it waits for nothing"):
            await runtime.resume(run_id, {"c1": yes()})
        events = [event async for event in runtime.events(run_id)]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        kinds = [event.kind for event in events if event.run_id == run_id]
        assert kinds.count("run_started") == kinds.count("run_finished") == 2
        assert kinds.count("tool_call_resumed") == 1
        with pytest.raises(UnknownRun):
            await runtime.resume("run_nobody", {"c1": yes()})


def nested(ran: list[str]) -> list[Agent]:
    """A boss with two children that each wait, one of them through a grandchild, and a third that does not."""

    def boss(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(" | ".join(m.text for m in request.messages if m.role == "tool"))
        return [
            call("task", {"subagent_type": name, "description": f"do {name}"}, id=f"b-{name}")
            for name in ("mid", "payer", "counter")
        ]

    def mid(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(f"mid: {request.messages[-1].text}")
        return call("task", {"subagent_type": "payer", "description": "do deep"}, id="m-deep")

    def payer(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say(f"payer: {request.messages[-1].text}")
        to = request.messages[-1].text.split()[-1]
        return [call("count", {"what": to}, id=f"k-{to}"), call("pay", {"to": to}, id=f"p-{to}")]

    def counter(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("counted")
        return call("count", {"what": "third"}, id="c-third")

    tools = [asking(ran), counting(ran)]
    pays = Agent("payer", ScriptedModel(payer), tools=tools)
    middle = Agent("mid", ScriptedModel(mid), subagents=[pays])
    counts = Agent("counter", ScriptedModel(counter), tools=tools)
    return [Agent("boss", ScriptedModel(boss), subagents=[middle, pays, counts])]


async def test_nested_and_parallel_children_go_on_where_they_stopped(url: str) -> None:
    ran: list[str] = []
    run_id = await suspended(url, lambda: nested(ran), expect={"p-deep", "p-payer"})
    assert sorted(ran) == ["counted deep", "counted payer", "counted third"]
    async with Runtime.open(url, nested(ran)) as runtime:
        half = await runtime.resume(run_id, {"t-payer": yes()})
        assert (half.status, set(half.suspended)) == (RunStatus.SUSPENDED, {"p-deep"})
    async with Runtime.open(url, nested(ran)) as runtime:
        result = await runtime.resume(run_id, {"p-deep": yes()})
        events = [event async for event in runtime.events(run_id)]
    assert result.response == "mid: payer: paid deep | payer: paid payer | counted"
    assert sorted(ran) == [
        "counted deep",
        "counted payer",
        "counted third",
        "paid deep {'ok': True}",
        "paid payer {'ok': True}",
    ]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    runs = {event.run_id: event.ns for event in events}
    assert len(runs) == len(set(runs.values())) == 5
    ends = [event.status for event in events if isinstance(event, RunFinished) and event.run_id != run_id]
    assert ends.count(RunStatus.COMPLETED) == 4


@pytest.mark.parametrize("mode", list(ResumeMode))
async def test_every_resume_mode_holds_across_runtimes(url: str, mode: ResumeMode) -> None:
    ran: list[str] = []

    def build() -> list[Agent]:
        def turn(request: Any) -> Any:
            last = request.messages[-1]
            return say(last.text) if last.role == "tool" else call("pay", {"to": "ann"}, id="c1")

        return [Agent("a", ScriptedModel(turn), tools=[asking(ran, mode)])]

    run_id = await suspended(url, build, expect={"c1"})
    async with Runtime.open(url, build()) as runtime:
        result = await runtime.resume(run_id, {"c1": Decision.resume({"ok": True, "to": "bob"})})
    if mode is ResumeMode.PASS_DECISION:  # the tool does not take what its own ticket asks for
        assert "The new arguments are not valid" in result.suspended["c1"].message
        return
    told = {
        ResumeMode.REPLAY: "paid ann",
        ResumeMode.USE_DECISION: '{"ok":true,"to":"bob"}',
    }
    assert told[mode] in (result.response or "")


async def test_a_no_is_an_answer_too(url: str) -> None:
    ran: list[str] = []
    run_id = await suspended(url, lambda: nested(ran), expect={"p-deep", "p-payer"})
    async with Runtime.open(url, nested(ran)) as runtime:
        result = await runtime.resume(run_id, {"p-deep": Decision.cancel("too dear"), "p-payer": yes()})
    assert "too dear" in (result.response or "")
    assert [line for line in ran if line.startswith("paid")] == ["paid payer {'ok': True}"]


async def test_one_that_nobody_answers_can_be_cancelled_elsewhere(url: str) -> None:
    ran: list[str] = []
    run_id = await suspended(url, lambda: nested(ran), expect={"p-deep", "p-payer"})
    async with Runtime.open(url, nested(ran)) as runtime:
        result = await runtime.cancel(run_id)
        assert result.status is RunStatus.CANCELLED
        events = [event async for event in runtime.events(run_id)]
    open_runs = {event.run_id for event in events}
    for event in events:
        if isinstance(event, RunFinished) and event.status is not RunStatus.SUSPENDED:
            open_runs.discard(event.run_id)
    assert not open_runs
    async with Runtime.open(url, nested(ran)) as runtime:
        assert (await runtime.run("boss", "again", thread_id="t")).status is RunStatus.SUSPENDED


async def test_a_runtime_that_still_holds_it_sees_that_another_has_answered(url: str) -> None:
    ran: list[str] = []
    async with Runtime.open(url, nested(ran)) as first, Runtime.open(url, nested(ran)) as second:
        run_id = (await first.run("boss", "go")).run_id
        half = await second.resume(run_id, {"p-payer": yes()})
        assert set(half.suspended) == {"p-deep"}
        result = await first.resume(run_id, {"p-deep": yes()})
        assert result.status is RunStatus.COMPLETED
        with pytest.raises((DecisionRefused, OwnershipLost)):
            await second.resume(run_id, {"p-deep": yes()})
    assert len(ran) == 5


ANSWERER = """
import asyncio, sys
from retinue import Decision, RetinueError, Runtime
from tests.durability.test_answers import slow_payer
async def main():
    async with Runtime.open(sys.argv[1], slow_payer(sys.argv[2]), recover=False) as runtime:
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            result = await runtime.resume(sys.argv[3], {"c1": Decision.resume({"ok": True})})
            print("answered", result.status, flush=True)
        except RetinueError as exc:
            print("told", type(exc).__name__, flush=True)
asyncio.run(main())
"""


def slow_payer(file: str) -> list[Agent]:
    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay somebody, slowly."""
        if ctx.resume_input is None:
            return ToolResult.suspended("may I?")
        with Path(file).open("a") as paid:
            paid.write(f"{to}\n")
        await until(Path(f"{file}.go").exists)
        return "paid"

    def turn(request: Any) -> Any:
        return say("done") if request.messages[-1].role == "tool" else call("pay", {"to": "ann"}, id="c1")

    return [Agent("a", ScriptedModel(turn), tools=[pay])]


async def test_two_processes_answer_at_once_and_one_wins(url: str, tmp_path: Path) -> None:
    file = tmp_path / "paid.txt"
    run_id = await suspended(url, lambda: slow_payer(str(file)), expect={"c1"})
    command = [PYTHON, "-c", ANSWERER, url, str(file), run_id]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
    file.with_name("paid.txt.go").touch()
    said = await asyncio.gather(*[asyncio.to_thread(process.communicate, "go\n") for process in both])
    lines = sorted([out.strip() for out, _ in said])
    assert lines[0] == "answered completed"
    assert lines[1] in ("told RunElsewhere", "told DecisionRefused")
    assert file.read_text() == "ann\n"


async def test_what_another_runtime_works_on_is_not_taken_from_it(url: str, tmp_path: Path) -> None:
    file = tmp_path / "paid.txt"
    run_id = await suspended(url, lambda: slow_payer(str(file)), expect={"c1"})
    async with Runtime.open(url, slow_payer(str(file))) as first, Runtime.open(url, slow_payer(str(file))) as second:
        job = asyncio.create_task(first.resume(run_id, {"c1": yes()}))
        await until(file.exists)
        with pytest.raises(DecisionRefused, match="is running, it waits for nothing"):
            await second.resume(run_id, {"c1": yes()})
        file.with_name("paid.txt.go").touch()
        assert (await second.result(run_id)).status is RunStatus.COMPLETED
        assert (await job).status is RunStatus.COMPLETED
    assert json.loads(json.dumps(file.read_text())) == "ann\n"


HEARTBEAT = {"wishes", "renew"}
"""The calls of the owner's heartbeat, which come as time passes."""


async def test_an_answer_from_another_process_costs_few_calls_to_the_store(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def build() -> list[Agent]:
        def turn(request: Any) -> Any:
            return say("done") if request.messages[-1].role == "tool" else call("pay", {"to": "ann"}, id="c1")

        return [Agent("a", ScriptedModel(turn), tools=[asking(ran)])]

    run_id = await suspended(url, build, expect={"c1"})
    async with Runtime.open(url, build(), recover=False) as runtime:
        calls = counted(runtime.store, monkeypatch)
        result = await runtime.resume(run_id, {"c1": yes()})
        made = [name for name in calls if name not in HEARTBEAT]
    assert result.response == "done"
    assert len(made) <= 10, made
    assert {"put_wish", "claim", "read_log", "write"} <= {*made}, "it counts"


def counted(store: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the methods of a store as they are called."""
    calls: list[str] = []

    def count(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return method(*args, **options)

        return counting

    for name in dir(DurableStore):
        if not name.startswith("_") and callable(method := getattr(store, name)):
            patch.setattr(store, name, count(name, method))
    return calls
