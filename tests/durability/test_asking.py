"""Answers to runs that another process still works on, for the sake of their tasks: it takes them in, and says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    Decision,
    DecisionRefused,
    ExecutionBackendError,
    HarnessAgent,
    RunElsewhere,
    RunResult,
    RunStatus,
    Runtime,
    TaskStatus,
    ToolContext,
    ToolResult,
    UnknownAgent,
    UnknownRun,
    tool,
)
from retinue.core.events import RunFinished
from retinue.core.stores import Asked
from retinue.runtime import asking
from retinue.storage.upkeep import prune
from retinue.testing import ScriptedModel, call, say

PROJECT = Path(__file__).parents[2]


def agents(folder: Path) -> list[Agent]:
    """A boss that starts a task and asks to be allowed something; its worker waits for a file, or asks as well.

    Every effect is a line of the file `done`.
    """

    def did(what: str) -> None:
        with (folder / "done").open("a") as file:
            file.write(f"{what}\n")

    @tool
    async def pay(to: str, ctx: ToolContext) -> Any:
        """Pay somebody who may be paid."""
        if ctx.resume_input is None:
            return ToolResult.suspended(f"may I pay {to}?")
        did(f"paid {to}")
        if ctx.resume_input == "and die":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.2 if ctx.resume_input == "slowly" else 0)
        return f"paid {to}: {ctx.resume_input}"

    @tool(idempotent=True)
    async def wait_for(name: str) -> str:
        """Wait for a file."""
        while not (folder / name).exists():  # noqa: ASYNC110 - it is a file
            await asyncio.sleep(0.02)
        return "there it is"

    def work(request: Any) -> Any:
        what, last = request.messages[-1].text, request.messages[-1]
        if last.role == "tool":
            said = [m.text for m in request.messages if m.role == "tool"]
            return (
                call("wait_for", {"name": "gate"}, id="w2")
                if len(said) == 1 and "paid" in what
                else say(f"end: {what}")
            )
        return call("pay", {"to": "bob"}, id="w1") if "ask" in what else call("wait_for", {"name": "gate"}, id="w1")

    def lead(request: Any) -> Any:
        if any(message.role == "tool" for message in request.messages):
            return say("All done.")
        task, *more = request.messages[-1].text.split()
        spawn = call("agent_spawn", {"agent_id": "worker", "task": task, "timeout_seconds": 0}, id="c1")
        return [spawn, *[call("pay", {"to": who}, id=f"p-{who}") for who in more]]

    worker = Agent("worker", ScriptedModel(work), "You work.", [pay, wait_for])
    (folder / "ws").mkdir(exist_ok=True)
    return [
        HarnessAgent(
            "boss",
            ScriptedModel(lead),
            tools=[pay],
            subagents=[worker],
            workspace=folder / "ws",
            general_purpose=False,
        )
    ]


class Desk:
    """Runs of one folder and database."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url

    def open(self, **options: Any) -> Runtime:
        return Runtime.open(self.url, agents(self.folder), **options)

    def let_tasks_end(self) -> None:
        (self.folder / "gate").touch()

    @property
    def done(self) -> list[str]:
        file = self.folder / "done"
        return file.read_text().split("\n")[:-1] if file.exists() else []

    async def child_of(self, runtime: Runtime, run_id: str) -> str:
        """The background child of a run, when it waits."""
        async for event in runtime.events(run_id):
            if isinstance(event, RunFinished) and event.run_id != run_id and event.status is RunStatus.SUSPENDED:
                return event.run_id
        raise AssertionError("there is no child that waits")

    async def task_ended(self, runtime: Runtime, run_id: str) -> str:
        """How the task under a run ended; its log is complete then."""
        statuses = [event.status async for event in runtime.events(run_id) if event.kind == "task_updated"]  # type: ignore[attr-defined]
        return statuses[-1]


@pytest.fixture(params=["sqlite", "postgres"])
async def desk(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Desk]:
    made = Desk(
        tmp_path,
        f"sqlite:///{tmp_path}/app.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url"),
    )
    yield made
    made.let_tasks_end()


async def start(runtime: Runtime, input: str) -> RunResult:
    result = await runtime.run("boss", input, thread_id="t")
    assert result.status is RunStatus.SUSPENDED
    return result


async def test_a_run_that_waits_while_its_task_goes_on_is_answered_from_elsewhere(desk: Desk) -> None:
    async with desk.open() as first, desk.open() as second:
        run_id = (await start(first, "wait ann")).run_id
        result = await second.resume(run_id, {"p-ann": Decision.resume("yes")})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "All done.")
        assert await first.result(run_id) == result
        desk.let_tasks_end()
        assert await desk.task_ended(second, run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid ann"]


async def test_part_by_part_and_twice(desk: Desk) -> None:
    async with desk.open() as first, desk.open() as second:
        run_id = (await start(first, "wait ann eve")).run_id
        yes = Decision.resume("yes")
        half = await second.resume(run_id, {"p-ann": yes})
        assert (half.status, set(half.suspended)) == (RunStatus.SUSPENDED, {"p-eve"})
        assert await second.resume(run_id, {"p-ann": yes}) == half
        whole = await second.resume(run_id, {"p-eve": Decision.cancel("too dear")})
        assert whole.status is RunStatus.COMPLETED
        assert await second.resume(run_id, {"p-ann": yes}) == whole
    assert desk.done == ["paid ann"]


async def test_what_does_not_fit_is_refused_by_who_knows(desk: Desk) -> None:
    async with desk.open() as first, desk.open() as second:
        run_id = (await start(first, "wait ann")).run_id
        with pytest.raises(DecisionRefused, match="does not wait for 'nobody'; it waits for: p-ann"):
            await second.resume(run_id, {"nobody": Decision.resume("yes")})
        with pytest.raises(DecisionRefused, match="no decision was given"):
            await second.resume(run_id, {})
        assert (await first.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED


async def test_of_two_who_answer_one_wins(desk: Desk) -> None:
    async with desk.open() as first, desk.open() as second, desk.open() as third:
        run_id = (await start(first, "wait ann")).run_id
        answers = [runtime.resume(run_id, {"p-ann": Decision.resume("slowly")}) for runtime in (second, third)]
        said = await asyncio.gather(*answers, return_exceptions=True)
        (won,) = [one for one in said if isinstance(one, RunResult)]
        (lost,) = [one for one in said if not isinstance(one, RunResult)]
        assert won.status is RunStatus.COMPLETED
        assert isinstance(lost, RunElsewhere | DecisionRefused), lost
    assert desk.done == ["paid ann"]


async def test_a_background_child_that_waits_is_answered_from_elsewhere(desk: Desk) -> None:
    async with desk.open() as first, desk.open() as second:
        run = await first.run("boss", "ask", thread_id="t")
        assert run.status is RunStatus.COMPLETED
        child = await desk.child_of(first, run.run_id)
        desk.let_tasks_end()
        result = await second.resume(child, {"w1": Decision.resume("yes")})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "end: there it is")
        assert await desk.task_ended(second, run.run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid bob"]


async def test_nobody_is_asked_about_a_run_that_there_is_not(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk.open() as second:
        began = time.monotonic()
        with pytest.raises(UnknownRun, match="run_none"):
            await second.resume("run_none", {"c": Decision.resume()})
        assert time.monotonic() - began < asking.PATIENCE / 2
        monkeypatch.setattr(asking, "PATIENCE", 0.3)
        async with desk.open() as first:
            await start(first, "wait ann")
            with pytest.raises(UnknownRun, match="run_none"):
                await second.resume("run_none", {"c": Decision.resume()})


OTHER = """
import asyncio, sys
from pathlib import Path
from retinue import Runtime
from tests.durability.test_asking import agents
async def main():
    async with Runtime.open(sys.argv[1], agents(Path(sys.argv[2])), lease=2.0) as runtime:
        result = await runtime.run("boss", sys.argv[3], thread_id="t")
        print(result.run_id, flush=True)
        async for event in runtime.events(result.run_id):
            if event.kind == "run_started" and event.run_id != result.run_id:
                print(event.run_id, flush=True)
asyncio.run(main())
"""


class Elsewhere:
    """A process with a run of which a task goes on."""

    def __init__(self, desk: Desk, input: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER, desk.url, str(desk.folder), input],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def __aenter__(self) -> tuple[str, str]:
        """The ids of the run and of its background child."""
        out: Any = self._process.stdout
        run_id, child_id = [(await asyncio.to_thread(out.readline)).strip() for _ in range(2)]
        return run_id, child_id

    async def __aexit__(self, *exc: object) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.communicate)


async def test_another_process_takes_answers_in(desk: Desk) -> None:
    async with Elsewhere(desk, "ask ann") as (run_id, child_id), desk.open() as here:
        result = await here.resume(run_id, {"p-ann": Decision.resume("yes")})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "All done.")
        desk.let_tasks_end()
        child = await here.resume(child_id, {"w1": Decision.resume("yes")})
        assert child.response == "end: there it is"
        assert await desk.task_ended(here, run_id) == TaskStatus.COMPLETED
    assert sorted(desk.done) == ["paid ann", "paid bob"]


async def test_where_it_dies_of_it_whoever_answered_goes_on(desk: Desk) -> None:
    async with Elsewhere(desk, "wait ann") as (run_id, _), desk.open(recover=False) as here:
        decisions = {"p-ann": Decision.resume("and die")}
        result = await asyncio.wait_for(here.resume(run_id, decisions), 30)
        assert result.status is RunStatus.COMPLETED
        told = [message.text for message in result.messages if message.role == "tool"]
        assert "interrupted" in told[1]
        desk.let_tasks_end()
        assert await desk.task_ended(here, run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid ann"]


async def test_what_a_background_child_was_told_is_not_lost_with_its_process(desk: Desk) -> None:
    async with Elsewhere(desk, "ask") as (run_id, child_id), desk.open(recover=False) as here:
        answer = asyncio.create_task(here.resume(child_id, {"w1": Decision.resume("yes")}))
        async with asyncio.timeout(20):
            while "paid bob" not in desk.done:  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)  # it waits for the gate now
    answer.cancel()
    desk.let_tasks_end()
    async with desk.open() as next_one:
        assert await desk.task_ended(next_one, run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid bob"]


async def retinue(desk: Desk, *args: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "retinue", "runs", *args, "--db", desk.url]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout, done.stderr


async def test_the_command_line_answers_runs_that_are_worked_on(desk: Desk) -> None:
    async with Elsewhere(desk, "ask ann") as (run_id, child_id):
        code, _, said = await retinue(desk, "resume", run_id)
        assert (code, "p-ann" in said) == (2, True), said
        code, _, said = await retinue(desk, "resume", run_id, "--approve", "p-eve")
        assert (code, "does not wait for 'p-eve'" in said, said.count("\n")) == (2, True, 1), said
        code, out, said = await retinue(desk, "resume", run_id, "--approve", 'p-ann="yes"')
        assert (code, said) == (0, ""), said
        assert "All done." in out
        assert "pay(" in out
        desk.let_tasks_end()
        assert await retinue(desk, "resume", child_id, "--approve", "w1") == (0, "end: there it is\n", "")
        code, _, said = await retinue(desk, "resume", "run_none", "--approve", "w1")
        assert (code, "run_none" in said, said.count("\n")) == (2, True, 1), said
    assert sorted(desk.done) == ["paid ann", "paid bob"]


async def test_who_does_not_know_an_agent_leaves_its_runs_alone(desk: Desk) -> None:
    async with desk.open() as first:
        run_id = (await start(first, "wait ann")).run_id
        desk.let_tasks_end()
        await desk.task_ended(first, run_id)
    async with Runtime.open(desk.url) as stranger:
        for answering in (stranger.load(run_id), stranger.resume(run_id, {"p-ann": Decision.resume("yes")})):
            with pytest.raises(UnknownAgent, match="boss"):
                await answering
    async with desk.open() as second:
        assert (await second.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED


async def test_of_two_answers_to_one_background_child_the_second_is_refused(desk: Desk) -> None:
    async with desk.open() as first:
        run = await first.run("boss", "ask", thread_id="t")
        child = await desk.child_of(first, run.run_id)
        yes, no = Decision.resume("slowly"), Decision.cancel("no")
        answer = asyncio.create_task(first.resume(child, {"w1": yes}))
        await asyncio.sleep(0.05)
        with pytest.raises(DecisionRefused, match="waits for nothing|does not wait"):
            await first.resume(child, {"w1": no})
        again = asyncio.create_task(first.resume(child, {"w1": yes}))
        desk.let_tasks_end()
        assert await again == await answer
        assert (await answer).response == "end: there it is"
    assert desk.done == ["paid bob"]


async def test_an_answer_that_cannot_be_kept_is_refused_and_changes_nothing(desk: Desk) -> None:
    odd = {"w1": Decision.resume(object())}
    async with Elsewhere(desk, "ask ann") as (run_id, child_id), desk.open(recover=False) as here:
        for target in (run_id, child_id):
            with pytest.raises(DecisionRefused, match="JSON form"):
                await here.resume(target, odd)
    async with desk.open() as first:
        run_id = (await first.run("boss", "ask", thread_id="t2")).run_id
        child = await desk.child_of(first, run_id)
        with pytest.raises(DecisionRefused, match="JSON form"):
            await first.resume(child, odd)
        root = (await first.run("boss", "wait eve", thread_id="t3")).run_id
        with pytest.raises(DecisionRefused, match="JSON form"):
            await first.resume(root, {"p-eve": Decision.resume(object())})
        assert (await first.resume(root, {"p-eve": Decision.resume("yes")})).status is RunStatus.COMPLETED


async def test_what_a_child_was_told_cannot_be_told_otherwise_after_a_crash(desk: Desk) -> None:
    async with Elsewhere(desk, "ask") as (run_id, child_id), desk.open(recover=False) as here:
        answer = asyncio.create_task(here.resume(child_id, {"w1": Decision.resume("yes")}))
        async with asyncio.timeout(20):
            while "paid bob" not in desk.done:  # noqa: ASYNC110 - it is a file
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
    answer.cancel()
    refused = 0
    async with desk.open() as next_one:
        end = time.monotonic() + 1
        while time.monotonic() < end:  # while it comes to where it was, and after
            try:
                await asyncio.wait_for(next_one.resume(child_id, {"w1": Decision.cancel("I say no")}), 2)
                raise AssertionError("it was answered twice")
            except (DecisionRefused, UnknownRun):
                refused += 1
            await asyncio.sleep(0)
        desk.let_tasks_end()
        assert await desk.task_ended(next_one, run_id) == TaskStatus.COMPLETED
    assert refused
    assert desk.done == ["paid bob"]


async def test_who_asks_is_told_of_whatever_happened(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk.open() as first, desk.open() as second:
        run_id = (await start(first, "wait ann")).run_id

        async def broken(*args: Any) -> RunResult:
            raise RuntimeError("something odd")

        with monkeypatch.context() as patched:
            patched.setattr(first, "resume", broken)
            with pytest.raises(ExecutionBackendError, match="something odd"):
                await asyncio.wait_for(second.resume(run_id, {"p-ann": Decision.resume("yes")}), 10)
        assert (await second.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED


async def test_nobody_does_what_was_asked_long_ago(desk: Desk) -> None:
    async with desk.open() as first:
        run_id = (await start(first, "wait ann")).run_id
        store: Any = first.store
        body = b'{"p-ann":{"id":"d1","action":"resume","payload":"yes"}}'
        await store.ask(Asked("ask_old", run_id, body))
        await store.database.write(lambda link: link.run("UPDATE asks SET asked_at = asked_at - 100"))
        await asyncio.sleep(1)
        assert (await store.load_run(run_id)).status == "suspended"
        await store.database.write(lambda link: link.run("UPDATE asks SET asked_at = asked_at - 10000, reply = body"))
        await prune(store, 3600)
        assert await store.ask_status("ask_old") is None


async def test_a_run_that_could_not_go_on_here_can_be_answered_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk.open() as first:
        run_id = (await start(first, "wait ann")).run_id
        desk.let_tasks_end()
        store: Any = first.store
        async with asyncio.timeout(10):
            while await store.owner_of(run_id) is not None:  # noqa: ASYNC110 - the store tells
                await asyncio.sleep(0.01)

        async def no(*args: Any, **options: Any) -> None:
            return None

        with monkeypatch.context() as patched:
            patched.setattr(store, "claim", no)  # another was quicker
            with pytest.raises(RunElsewhere):
                await first.resume(run_id, {"p-ann": Decision.resume("yes")})
        assert (await first.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED
    assert desk.done == ["paid ann"]
