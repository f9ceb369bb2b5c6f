"""Answers to runs that another process still works on, for the sake of their tasks: it takes them in, and says so."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from retinue import (
    Agent,
    ConfigurationError,
    Decision,
    DecisionRefused,
    HarnessAgent,
    RunResult,
    RunStatus,
    Runtime,
    ToolContext,
    ToolResult,
    UnknownAgent,
    UnknownRun,
    tool,
)
from retinue.core.events import Event, RunFinished, TaskUpdated
from retinue.core.stores import Wish
from retinue.errors import RunElsewhere, StoreError
from retinue.loop.tickets import encode_decisions
from retinue.runtime.live import LiveRun
from retinue.tasks import TaskStatus
from retinue.testing import ScriptedModel, call, say

from .. import inside
from ..prepared import PYTHON
from ..waiting import until
from .scene import is_free

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
        (folder / "waits").touch()
        await until((folder / name).exists)
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
        if task not in ("wait", "ask"):
            return [call("pay", {"to": who}, id=f"p-{who}") for who in (task, *more)]
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
        """Return how the task under a run ended."""
        async for event in runtime.events(run_id):
            if isinstance(event, TaskUpdated) and TaskStatus(event.status).is_terminal:
                return event.status
        raise AssertionError("no task ended")


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
        child = await desk.child_of(second, run.run_id)  # as it is stored
        desk.let_tasks_end()
        result = await second.resume(child, {"w1": Decision.resume("yes")})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "end: there it is")
        assert await desk.task_ended(second, run.run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid bob"]


async def test_a_reply_of_an_owner_that_leaves_at_once_is_found_without_the_agent(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk.open() as first, Runtime.open(desk.url, []) as second:
        run = await first.run("boss", "ask", thread_id="t")
        child = await desk.child_of(second, run.run_id)
        desk.let_tasks_end()
        store: Any = second.store
        reply_to = store.reply_to

        async def reply_slowly(log_id: str, wish_id: str) -> Any:
            body = await reply_to(log_id, wish_id)
            if body is None:
                await until(lambda: is_free(store, log_id))
            return body

        monkeypatch.setattr(store, "reply_to", reply_slowly)
        result = await second.resume(child, {"w1": Decision.resume("yes")})
        assert (result.status, result.response) == (RunStatus.COMPLETED, "end: there it is")
    assert desk.done == ["paid bob"]


async def test_nobody_is_asked_about_a_run_that_there_is_not(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.set_patience(monkeypatch, 3600)
    async with desk.open() as second:
        with pytest.raises(UnknownRun, match="run_none"):
            await second.resume("run_none", {"c": Decision.resume()})
        inside.set_patience(monkeypatch, 0.1)
        async with desk.open() as first:
            await start(first, "wait ann")
            with pytest.raises(UnknownRun, match="run_none"):
                await second.resume("run_none", {"c": Decision.resume()})


OTHER = """
import asyncio, sys
from pathlib import Path
from retinue import Runtime
from tests.durability.scene import stored
from tests.durability.test_asking import agents
async def main():
    async with Runtime.open(sys.argv[1], agents(Path(sys.argv[2]))) as runtime:
        result = await runtime.run("boss", sys.argv[3], thread_id="t")
        print(result.run_id, flush=True)
        async for event in runtime.events(result.run_id):
            if event.kind == "run_started" and event.run_id != result.run_id:
                while "ask" in sys.argv[3] and await runtime.store.load_run(event.run_id) is None:
                    await asyncio.sleep(0.01)  # it is stored that it waits
                await stored()
                print(event.run_id, flush=True)
asyncio.run(main())
"""


class Elsewhere:
    """A process with a run of which a task goes on."""

    def __init__(self, desk: Desk, input: str, *, stopped: bool = False) -> None:
        self._is_stopped = stopped
        self._process = subprocess.Popen(
            [PYTHON, "-c", OTHER, desk.url, str(desk.folder), input],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def __aenter__(self) -> tuple[str, str]:
        """The ids of the run and of its background child; with `stopped`, the process does nothing any more."""
        out: Any = self._process.stdout
        run_id, child_id = [(await asyncio.to_thread(out.readline)).strip() for _ in range(2)]
        if self._is_stopped:
            self._process.send_signal(signal.SIGSTOP)
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
        result = await asyncio.wait_for(here.resume(run_id, decisions), 90)
        assert result.status is RunStatus.COMPLETED
        told = [message.text for message in result.messages if message.role == "tool"]
        assert "interrupted" in told[1]
        desk.let_tasks_end()
        assert await desk.task_ended(here, run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid ann"]


async def test_what_a_background_child_was_told_is_not_lost_with_its_process(desk: Desk) -> None:
    async with Elsewhere(desk, "ask") as (run_id, child_id), desk.open(recover=False) as here:
        answer = asyncio.create_task(here.resume(child_id, {"w1": Decision.resume("yes")}))
        await until((desk.folder / "waits").exists)
    answer.cancel()
    desk.let_tasks_end()
    async with desk.open() as next_one:
        assert await desk.task_ended(next_one, run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid bob"]


async def retinue(desk: Desk, *args: str) -> tuple[int, str, str]:
    command = [PYTHON, "-m", "retinue", "runs", *args, "--db", desk.url]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=PROJECT, capture_output=True, text=True, timeout=90, check=False
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


def staff(url: str) -> Runtime:
    """The agents of a desk, for --target."""
    return Runtime.open(url, agents(Path(url.removeprefix("sqlite:///")).parent), recover=False)


async def test_the_command_line_answers_background_children_of_dead_processes(tmp_path: Path) -> None:
    desk = Desk(tmp_path, f"sqlite:///{tmp_path}/app.db")
    async with Elsewhere(desk, "ask ann") as (run_id, child_id), desk.open(recover=False) as here:
        await desk.child_of(here, run_id)
    target = ("--target", "tests.durability.test_asking:staff")
    desk.let_tasks_end()
    code, _, said = await retinue(desk, "resume", child_id, "--approve", "w9", *target)
    assert (code, "does not wait for 'w9'" in said, said.count("\n")) == (2, True, 1), said
    assert await retinue(desk, "resume", child_id, "--approve", "w1", *target) == (0, "end: there it is\n", "")
    code, out, said = await retinue(desk, "resume", run_id, "--approve", 'p-ann="yes"', *target)
    assert (code, said, "All done." in out) == (0, "", True), said
    assert sorted(desk.done) == ["paid ann", "paid bob"]


async def test_who_does_not_know_an_agent_leaves_its_runs_alone(desk: Desk) -> None:
    async with desk.open() as first:
        run_id = (await start(first, "wait ann")).run_id
        desk.let_tasks_end()
        await desk.task_ended(first, run_id)
    async with Runtime.open(desk.url) as stranger:
        for answering in (stranger.load(run_id), stranger.resume(run_id, {"p-ann": Decision.resume("yes")})):
            with pytest.raises(UnknownAgent, match=f"'boss'.*no process works on run '{run_id}': continue it in one"):
                await answering
        assert await stranger.store.wishes_for(run_id) == []  # type: ignore[attr-defined]
    async with desk.open() as second:
        assert (await second.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED


async def test_of_two_answers_to_one_background_child_the_second_is_refused(desk: Desk) -> None:
    async with desk.open() as first:
        run = await first.run("boss", "ask", thread_id="t")
        child = await desk.child_of(first, run.run_id)
        yes, no = Decision.resume("slowly"), Decision.cancel("no")
        answer = asyncio.create_task(first.resume(child, {"w1": yes}))
        await until(lambda: desk.done == ["paid bob"])
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
        await until((desk.folder / "waits").exists)
    answer.cancel()
    (desk.folder / "waits").unlink()
    refused = 0
    async with desk.open() as next_one:
        while refused < 20 or not (desk.folder / "waits").exists():  # while it comes to where it was, and after
            with pytest.raises((DecisionRefused, UnknownRun)):
                await next_one.resume(child_id, {"w1": Decision.cancel("I say no")})
            refused += 1
            await asyncio.sleep(0)
        desk.let_tasks_end()
        assert await desk.task_ended(next_one, run_id) == TaskStatus.COMPLETED
    assert desk.done == ["paid bob"]


async def test_who_asks_is_told_of_whatever_happened(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk.open() as first, desk.open() as second:
        run_id = (await start(first, "wait ann")).run_id

        def broken(*args: Any) -> bool:
            raise RuntimeError("something odd")

        with monkeypatch.context() as patched:
            patched.setattr(LiveRun, "accept", broken)
            with pytest.raises(DecisionRefused, match="something odd"):
                await asyncio.wait_for(second.resume(run_id, {"p-ann": Decision.resume("yes")}), 90)
        assert (await second.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED


def wish(run_id: str, number: int, decisions: Mapping[str, Decision], log_id: str = "") -> Wish:
    body = encode_decisions(decisions)
    return Wish(log_id=log_id or run_id, wish_id=f"wish_{number}", run_id=run_id, kind="decide", body=body)


async def test_wishes_of_a_dead_process_are_heard_by_the_next_owner_in_order(desk: Desk) -> None:
    async with desk.open() as first:
        run_id = (await start(first, "wait ann eve")).run_id
        desk.let_tasks_end()
        await released(first, run_id)
        store: Any = first.store
        asked_at = await store.last_event(run_id)
        first_answer, second_answer = Decision.resume("yes"), Decision.cancel("no")
        for number, decisions in enumerate(
            ({"p-ann": first_answer}, {"p-ann": second_answer}, {"p-ann": first_answer}, {"p-bob": first_answer})
        ):
            await store.put_wish(wish(run_id, number, decisions))
        await store.put_wish(Wish(log_id=run_id, wish_id="odd", run_id=run_id, kind="decide", body=b'{"p-eve": 3}'))
    async with desk.open() as second:
        assert await second.load(run_id) is not None
        store = second.store

        async def is_heard() -> bool:
            return not await store.wishes_for(run_id) and (await store.load_run(run_id)).result is not None

        await until(is_heard)
        said = [json.loads(await store.reply_to(run_id, f"wish_{number}")) for number in range(4)]
        assert said[0] == said[2] == {"place": asked_at}, "the first counts, and saying it again changes nothing"
        assert "waits for nothing" in said[1]["refused"]
        assert "waits for nothing" in said[3]["refused"]
        assert json.loads(await store.reply_to(run_id, "odd"))["refused"]
        result = await second.resume(run_id, {"p-eve": Decision.resume("yes")})
        assert result.status is RunStatus.COMPLETED
        assert [m.text for m in result.messages if m.role == "tool"][1:] == ["paid ann: yes", "paid eve: yes"]
    assert sorted(desk.done) == ["paid ann", "paid eve"]


async def test_an_owner_that_dies_leaves_its_inbox_to_the_next(desk: Desk) -> None:
    async with Elsewhere(desk, "ask ann", stopped=True) as (run_id, child_id):
        async with desk.open(recover=False) as here:
            store: Any = here.store
            await store.put_wish(wish(run_id, 1, {"p-ann": Decision.resume("yes")}))
            await store.put_wish(wish(child_id, 2, {"w1": Decision.resume("yes")}, run_id))
    desk.let_tasks_end()
    async with desk.open() as next_one:
        assert await desk.task_ended(next_one, run_id) == TaskStatus.COMPLETED
        assert (await next_one.result(run_id)).status is RunStatus.COMPLETED
        store = next_one.store
        replies = [json.loads(await store.reply_to(run_id, name)) for name in ("wish_1", "wish_2")]
        assert [list(reply) for reply in replies] == [["place"], ["place"]]
    assert sorted(desk.done) == ["paid ann", "paid bob"]


async def test_a_cancel_is_carried_out_by_the_next_owner(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.give_up_cancels_after(monkeypatch, 0.0)
    async with Elsewhere(desk, "wait ann", stopped=True) as (run_id, _):
        async with desk.open(recover=False) as here:
            with pytest.raises(RunElsewhere, match="has not replied yet"):
                await here.cancel(run_id, reason="enough", tasks=True, grace=0.1)
    async with desk.open() as next_one:
        result = await next_one.result(run_id)  # at once: the cancel has begun before the runtime is open
        assert (result.status, result.error) == (RunStatus.CANCELLED, "enough")
        assert await desk.task_ended(next_one, run_id) == TaskStatus.CANCELLED
    assert desk.done == []


async def left_at_work(desk: Desk) -> str:
    """Start a run whose task works, and leave both to another process; return the id of the run."""
    async with desk.open() as first:
        run_id = (await start(first, "wait ann")).run_id
        await until((desk.folder / "waits").exists)
        await first.close(grace=0)
    return run_id


async def test_a_task_that_is_cancelled_before_its_child_goes_on_ends_as_cancelled(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, has_come = await left_at_work(desk), asyncio.Event()
    async with desk.open(recover=False) as second:

        async def hold_thread(*args: Any) -> Any:  # the child continues, and takes its conversation first
            has_come.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(second.store, "hold_thread", hold_thread)
            assert await second.load(run_id) is not None
            await has_come.wait()
            assert (await second.cancel(run_id, reason="enough", tasks=True)).status is RunStatus.CANCELLED
        assert await desk.task_ended(second, run_id) == TaskStatus.CANCELLED
        events = [event async for event in second.events(run_id)]
    begun, ended = [{e.run_id for e in events if e.kind == kind} for kind in ("run_started", "run_finished")]
    assert begun == ended
    assert desk.done == []


async def test_a_child_that_cannot_go_on_ends_with_its_task(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = await left_at_work(desk)
    async with desk.open(recover=False) as second:

        async def hold_thread(*args: Any) -> Any:
            raise StoreError("the store", "it was restarted")

        monkeypatch.setattr(second.store, "hold_thread", hold_thread)
        assert await second.load(run_id) is not None
        assert await desk.task_ended(second, run_id) == TaskStatus.FAILED
        assert (await second.resume(run_id, {"p-ann": Decision.resume("yes")})).status is RunStatus.COMPLETED
        events = [event async for event in second.events(run_id)]
    [end] = [e for e in events if isinstance(e, RunFinished) and e.run_id != run_id]
    assert (end.status, end.error) == (RunStatus.FAILED, "the store: it was restarted")


async def test_a_run_that_is_cancelled_while_it_finds_its_tasks_again_ends_as_cancelled(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @tool(idempotent=True)
    async def wait() -> None:
        """Wait for good."""
        has_begun.set()
        await asyncio.Event().wait()

    has_begun, has_come = asyncio.Event(), asyncio.Event()
    lead = HarnessAgent("lead", ScriptedModel([call("wait")]), tools=[wait], workspace=desk.folder)
    async with Runtime.open(desk.url, [lead]) as first:
        run_id = first.stream("lead", "wait").run_id
        await has_begun.wait()
        await first.close(grace=0)

    async def resume_tasks(*args: Any) -> None:
        has_come.set()
        await asyncio.Event().wait()

    async with Runtime.open(desk.url, [lead], recover=False) as second:
        monkeypatch.setattr(HarnessAgent, "resume_tasks", resume_tasks)
        assert await second.load(run_id) is not None
        await has_come.wait()
        result = await second.cancel(run_id, reason="enough")
        assert (result.status, result.error) == (RunStatus.CANCELLED, "enough")
        assert (await second.result(run_id)).status is RunStatus.CANCELLED


async def released(runtime: Runtime, run_id: str) -> None:
    """Return when nobody owns a run."""
    await until(lambda: is_free(runtime.store, run_id))


async def test_an_answer_that_nobody_heard_can_be_given_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk.open() as first:
        run_id = (await start(first, "wait ann")).run_id
        desk.let_tasks_end()
        await released(first, run_id)
        store: Any = first.store

        async def no(*args: Any, **options: Any) -> None:
            return None

        yes = Decision.resume("yes")
        with monkeypatch.context() as patched:
            inside.set_patience(patched, 0.1)
            patched.setattr(store, "claim", no)  # another was quicker
            with pytest.raises(RunElsewhere):
                await first.resume(run_id, {"p-ann": yes})
        assert (await first.resume(run_id, {"p-ann": yes})).status is RunStatus.COMPLETED
    assert desk.done == ["paid ann"]


async def test_a_background_child_is_not_cancelled_as_if_it_were_its_run(desk: Desk) -> None:
    async with desk.open() as first, desk.open() as second:
        run_id = (await start(first, "ask ann")).run_id
        child = await desk.child_of(second, run_id)
        for runtime in (first, second):
            with pytest.raises(ConfigurationError, match="cancel its task"):
                await runtime.cancel(child)
        assert (await second.result(run_id)).status is RunStatus.SUSPENDED


async def test_a_handle_yields_what_follows_an_answer(desk: Desk) -> None:
    async with desk.open() as first, desk.open() as second:
        run_id = (await start(first, "wait ann eve")).run_id
        refused = second.stream_resume(run_id, {"p-bob": Decision.resume("yes")})
        assert [event async for event in refused] == []
        with pytest.raises(DecisionRefused, match="p-bob"):
            await refused.result()
        half = second.stream_resume(run_id, {"p-ann": Decision.resume("yes")})
        assert [event.kind async for event in half][-1] == "run_finished"
        desk.let_tasks_end()
        await released(first, run_id)
        rest = second.stream_resume(run_id, {"p-eve": Decision.resume("yes")})
        events = [event async for event in rest]
        assert [event.kind for event in events][:2] == ["run_started", "messages_snapshot"]
        assert [event.kind for event in events].count("tool_call_resumed") == 1
        assert (await rest.result()).status is RunStatus.COMPLETED
        assert [event async for event in rest.follow(events[-1].seq)] == []


async def test_an_answer_that_comes_while_the_question_is_being_stored(desk: Desk) -> None:
    """The event that a run waits is seen by listeners in its process before it is stored."""
    answers: list[asyncio.Task[RunResult]] = []

    def listen(event: Event) -> None:
        if isinstance(event, RunFinished) and not event.ns and event.status is RunStatus.SUSPENDED:
            who = "p-ann" if not answers else "p-eve"
            answers.append(asyncio.create_task(runtime.resume(event.run_id, {who: Decision.resume("yes")})))

    for input in ("wait ann eve", "ann eve"):
        answers.clear()
        async with desk.open(sinks=[listen]) as runtime:
            await runtime.run("boss", f"{input}")
            await asyncio.wait_for(asyncio.gather(*answers), 90)
            assert (await answers[-1]).status is RunStatus.COMPLETED
            desk.let_tasks_end()
    assert sorted(desk.done) == ["paid ann", "paid ann", "paid eve", "paid eve"]


async def test_a_cancel_that_comes_while_the_question_is_being_stored(desk: Desk) -> None:
    cancels: list[asyncio.Task[RunResult]] = []

    def listen(event: Event) -> None:
        if isinstance(event, RunFinished) and not event.ns and event.status is RunStatus.SUSPENDED:
            cancels.append(asyncio.create_task(runtime.cancel(event.run_id, reason="enough")))

    async with desk.open(sinks=[listen]) as runtime:
        await runtime.run("boss", "wait ann")
        assert (await cancels[0]).status is RunStatus.CANCELLED
