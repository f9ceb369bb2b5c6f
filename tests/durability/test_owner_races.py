"""Owners and handles at awkward moments: a heartbeat while runs begin and end, a cancel right after an answer, a lost run."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retinue import Agent, Decision, HarnessAgent, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.core.stores import Wish
from retinue.events import TextDelta
from retinue.log.owned import LiveLog, LogWriter
from retinue.log.ownership import Owner
from retinue.log.state import RunState
from retinue.testing import ScriptedModel, call, say

from .. import inside
from ..server.agents import Gate
from ..waiting import expire_lease, until


@tool(idempotent=True)
async def ask(ctx: ToolContext) -> Any:
    """Ask a human."""
    return "yes" if ctx.resume_input else ToolResult.suspended("may I?")


def asking() -> Agent:
    def turn(request: Any) -> Any:
        return say("done") if request.messages[-1].role == "tool" else call("ask", {}, id="c1")

    return Agent("asks", ScriptedModel(turn), tools=[ask])


def saying() -> Agent:
    return Agent("says", ScriptedModel(lambda request: say("hello")))


@pytest.mark.parametrize("thread_id", [None, "t"])
@pytest.mark.parametrize("turns", range(6))
async def test_a_heartbeat_does_not_drop_runs_that_begin_or_end(
    tmp_path: Path, turns: int, thread_id: str | None
) -> None:
    async with Runtime.open(f"sqlite:///{tmp_path}/app.db", [saying()]) as runtime, asyncio.timeout(90):
        run = runtime.stream("says", "hi", thread_id=thread_id)
        for _ in range(turns):
            await asyncio.sleep(0)
        await inside.renew_leases(runtime)
        assert (await run.result()).status is RunStatus.COMPLETED


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_cancel_right_after_an_answer_counts(tmp_path: Path, kind: str) -> None:
    url = "memory:" if kind == "memory" else f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, [asking()]) as runtime, asyncio.timeout(90):
        waiting = await runtime.run("asks", "go", thread_id="t")
        handle = runtime.stream_resume(waiting.run_id, {"c1": Decision.resume(True)})
        ended = await runtime.cancel(waiting.run_id)
        assert ended.status in (RunStatus.CANCELLED, RunStatus.COMPLETED)
        assert (await runtime.result(waiting.run_id)).status is ended.status
        if kind == "memory":
            assert (await handle.result()).status is ended.status is RunStatus.CANCELLED
        assert (await runtime.run("asks", "more", thread_id="t")).status is RunStatus.SUSPENDED


async def test_whoever_follows_a_run_that_is_lost_reads_on_in_the_store(tmp_path: Path) -> None:
    url, entered = f"sqlite:///{tmp_path}/app.db", asyncio.Event()

    @tool(idempotent=True)
    async def work() -> str:
        """Hang the first time."""
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()
        return "worked"

    def turn(request: Any) -> Any:
        return say("done") if request.messages[-1].role == "tool" else call("work", {})

    def agent() -> Agent:
        return Agent("works", ScriptedModel(turn), tools=[work])

    async with Runtime.open(url, [agent()]) as first, asyncio.timeout(90):
        run = first.stream("works", "go")
        seen: list[Any] = []

        async def follow() -> None:
            seen.extend([event async for event in run])

        following = asyncio.create_task(follow())
        await entered.wait()
        store: Any = first.store
        await store.renew(inside.owner_id(first), -1.0)  # its lease is over
        async with Runtime.open(url, [agent()]) as second:
            assert (await second.result(run.run_id)).status is RunStatus.COMPLETED
            await inside.renew_leases(first)
            await following
            assert (await run.result()).status is RunStatus.COMPLETED
        assert (seen[-1].kind, seen[-1].status) == ("run_finished", RunStatus.COMPLETED)


async def test_whoever_has_seen_what_was_never_stored_sees_what_another_process_writes_instead(tmp_path: Path) -> None:
    """A handle gives events before they are stored. The next owner of the log gives their numbers to other events."""
    url, gate = f"sqlite:///{tmp_path}/app.db", Gate()
    async with Runtime.open(url, [gate.agent("says")]) as first, asyncio.timeout(90):
        store: Any = first.store
        write = store.write

        def hang_with_text(batch: Any) -> Any:
            has_text = any(isinstance(row.event, TextDelta) for row in batch.rows)
            return asyncio.get_running_loop().create_future() if has_text else write(batch)

        store.write = hang_with_text
        run = first.stream("says", "go")
        seen: list[Any] = []

        async def follow() -> None:
            async for event in run:
                seen.append(event)

        following = asyncio.create_task(follow())
        await until(lambda: seen and seen[-1].kind == "step_started")
        log = await inside.log_of(run)
        await log.writer.flush()
        gate.say("c ", "d ", "e ")
        await until(lambda: seen[-1].seq == log.tree.seq == log.stored_seq + 3)
        await expire_lease(store, run.run_id)
        again = Agent("says", ScriptedModel([say("once more", chunks=["once ", "more"])]))
        async with Runtime.open(url, [again]) as second:
            assert (await second.result(run.run_id)).response == "once more"
            await inside.renew_leases(first)
            await following
            stored = [event async for event in second.events(run.run_id)]
    (notice,) = [place for place, event in enumerate(seen) if not event.seq]
    assert (seen[notice].kind, seen[notice].code) == ("error", "owner_lost")
    assert [event.delta for event in seen[:notice] if event.kind == "text_delta"] == ["c ", "d ", "e "]
    last_kept = seen[notice + 1].seq - 1
    assert last_kept < seen[notice - 1].seq, "it goes back"
    assert [event for event in seen[:notice] if event.seq <= last_kept] + seen[notice + 1 :] == stored


async def test_a_background_child_that_begins_when_its_log_is_lost_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be appended to a lost log: the loop of the child must not wait for its state to change."""
    lost = asyncio.Event()
    emitted, append = list[Any](), LiveLog.append

    def append_some(self: LiveLog, run: RunState, event: Any, *more: Any) -> Any:
        if lost.is_set():
            emitted.append(event)
        if len(emitted) >= 10:
            raise asyncio.CancelledError
        return append(self, run, event, *more)

    monkeypatch.setattr(LiveLog, "append", append_some)
    inside.delay_tasks(monkeypatch, lost)
    spawn = call("agent_spawn", {"agent_id": "worker", "task": "work", "timeout_seconds": 0})
    boss = HarnessAgent(
        "boss",
        ScriptedModel([spawn, say("started")]),
        subagents=[Agent("worker", ScriptedModel([say("worked")]))],
        workspace=tmp_path,
        general_purpose=False,
    )
    async with Runtime.open(f"sqlite:///{tmp_path}/app.db", [boss]) as runtime:
        run_id = (await runtime.run("boss", "go")).run_id
        log = inside.lose_log(runtime, run_id)
        lost.set()
        await until(lambda: not log.holders)
    assert len(emitted) < 10


async def test_a_damaged_record_does_not_keep_others_from_their_work(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    async with Runtime.open(url, [asking(), saying()], on_close="leave") as runtime:
        waiting = await runtime.run("asks", "go")
        store: Any = runtime.store
        broken = "UPDATE runs SET identity = '{}', status = 'running', result = NULL WHERE run_id = ?"
        await store.database.write(lambda link: link.run(broken, waiting.run_id))
    async with Runtime.open(url, [asking(), saying()]) as runtime:
        assert (await runtime.run("says", "hi")).status is RunStatus.COMPLETED


async def test_a_log_of_ours_that_nothing_works_on_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run can break down here while the store says that we own its log: nobody else may continue it."""
    now, gate = [1000.0], asyncio.Event()

    async def turn(request: Any) -> Any:
        await gate.wait()
        return say("hello")

    waits = Agent("says", ScriptedModel(turn))
    inside.set_clock_of_owners(monkeypatch, lambda: now[0])
    async with Runtime.open(f"sqlite:///{tmp_path}/app.db", [waits], recover=False) as runtime, asyncio.timeout(90):
        run = runtime.stream("says", "hi")
        await run.stored()
        inside.forget_log(runtime, run.run_id)
        assert await runtime.recover() == []  # perhaps it is just being begun
        now[0] += 11.0
        gate.set()
        (again,) = await runtime.recover()
        assert (await again.result()).status is RunStatus.COMPLETED
        assert (await runtime.result(run.run_id)).response == "hello"


async def test_the_start_of_a_run_is_stored_before_its_rows_in_every_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event loop may call a timer that is due before what was to be called soon, as uvloop does when it is late."""
    real = LogWriter.notify

    def notify_late(self: LogWriter) -> None:
        real(self)
        self.write()

    monkeypatch.setattr(LogWriter, "notify", notify_late)
    async with Runtime.open(f"sqlite:///{tmp_path}/app.db", [saying()], recover=False) as runtime, asyncio.timeout(90):
        run = runtime.stream("says", "hi")
        await run.stored()
        assert (await run.result()).status is RunStatus.COMPLETED


async def test_a_poke_during_a_look_at_the_inboxes_is_not_lost() -> None:
    """Who pokes while the inboxes are read may have put a wish there after the read: they are read again at once."""
    reading, go_on, looks_again = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Never:
        async def wait(self, seconds: float) -> None:
            await asyncio.Event().wait()

    class Store:
        def watch(self, topic: str) -> Any:
            return nullcontext(Never())

        async def wishes(self, owner: str) -> list[Wish]:
            if reading.is_set():
                looks_again.set()
            reading.set()
            await go_on.wait()
            return []

    store: Any = Store()
    owned = Owner(store, 3600.0)
    run: Any = SimpleNamespace(writer=None)
    owned.add("log", run)
    await reading.wait()
    owned.check_inboxes()
    go_on.set()
    async with asyncio.timeout(90):
        await looks_again.wait()
    await owned.close()
