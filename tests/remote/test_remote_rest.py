"""Background tasks that a remote run leaves behind are followed until they have ended."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, ConfigurationError, HarnessAgent, RunStatus, Runtime
from retinue.backends import tasks_http
from retinue.core.backend import RunRequest
from retinue.core.concurrency import CancellationToken
from retinue.core.events import DELTAS
from retinue.core.runs import RunIdentity
from retinue.events import AnyEvent, Custom, RunFinished, RunStarted, TaskUpdated
from retinue.models import ModelRequest, TextChunk
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say
from retinue.wire.task_protocol import RemoteTask
from tests.server.serving import TOKEN, Site, serving

from ..waiting import until

HEADERS = {"authorization": f"Bearer {TOKEN}"}


class Model:
    """Starts a background task and answers; the task says its words when it is let through."""

    name = "testing:far"

    def __init__(self, *, hangs: bool = False, chatters: bool = False) -> None:
        self.words: asyncio.Queue[str | None] = asyncio.Queue()
        self._hangs, self._chatters = hangs, chatters
        self._script, self.said = ScriptedModel(self._turn), 0

    def _turn(self, request: ModelRequest) -> Any:
        if any(message.role == "tool" for message in request.messages):
            return say("It is started.")
        return call("agent_spawn", {"agent_id": "general-purpose", "task": "errand", "timeout_seconds": 0}, id="s1")

    async def stream(self, request: ModelRequest):
        if request.messages[-1].text == "errand":
            while self._chatters:
                self.said += 1
                yield TextChunk("word ")
                await asyncio.sleep(0)
            while (word := await self.words.get()) is not None:
                yield TextChunk(word)
        else:
            if self._chatters and request.messages[-1].role == "tool":
                await until(lambda: self.said > 100)
            if self._hangs and request.messages[-1].role == "tool":
                await until(lambda: False)
            async for chunk in self._script.stream(request):
                yield chunk

    def let_through(self, *words: str | None) -> None:
        for word in words:
            self.words.put_nowait(word)


def far(model: Model, folder: Path) -> HarnessAgent:
    return HarnessAgent("far", model, workspace=folder / "far")  # pyright: ignore[reportArgumentType]


def near(url: str) -> Agent:
    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("Done.")
        return call("task", {"subagent_type": "far", "description": "go"}, id="task_p")

    return Agent("near", ScriptedModel(turn), subagents=[RemoteSubagentStub("far", url=url, headers=HEADERS)])


async def check_copied(site: Site, events: list[AnyEvent]) -> None:
    """The log here has every event of the log there, once and in order, under the namespace of the call."""
    (run,) = (await site.get("/api/v1/runs")).body["items"]
    there = await site.all_events(f"/api/v1/runs/{run['run_id']}/events")
    wanted = [
        (received.event, ["tools:task_p", *received.data["ns"]], received.data.get("delta"))
        for received in there
        if received.data["ns"]
    ]
    copied = [(event.kind, list(event.ns), getattr(event, "delta", None)) for event in events if len(event.ns) > 1]
    assert copied == wanted
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


def statuses(events: list[AnyEvent]) -> list[str]:
    return [event.status for event in events if isinstance(event, TaskUpdated)]


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_what_a_task_does_after_the_end_of_its_run_is_in_the_log(store: str, tmp_path: Path) -> None:
    url, model = "memory:" if store == "memory:" else f"sqlite:///{tmp_path}/near.db", Model()
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/far.db", [far(model, tmp_path)])) as site:
        async with Runtime.open(url, [near(site.url)]) as runtime:
            run = runtime.stream("near", "go")
            result = await run.result()
            assert (result.status, result.response) == (RunStatus.COMPLETED, "Done.")
            assert not await runtime.log(run.run_id).has_ended()
            model.let_through("one ", "two", None)
            events = [event async for event in runtime.events(run.run_id)]
            assert statuses(events)[-1] == "COMPLETED"
            assert [e.delta for e in events if isinstance(e, DELTAS) and len(e.ns) > 1] == ["one ", "two"]
            await check_copied(site, events)
            await until(runtime.log(run.run_id).has_ended)


class Together:
    """A server that sends the end of a run together with what a task under it does next, and then nothing."""

    def __init__(self) -> None:
        self.is_read = False

    async def state(self, task_id: str) -> RemoteTask:
        return RemoteTask("success" if self.is_read else "running", "It is started.", seq=3, open=True)

    async def events(self, task_id: str, after: int):
        self.is_read = True
        ended = RunFinished(seq=2, status=RunStatus.COMPLETED, termination="completed")
        yield [RunStarted(seq=1, thread_id="t"), ended, Custom(seq=3, ns=("tools:s1",), data={})]
        pytest.fail("the run there has ended, and its events are read on")


async def test_the_end_of_a_run_counts_whatever_comes_with_it() -> None:
    copied: list[int] = []
    identity = RunIdentity(run_id="r", thread_id="t", agent="far")
    request = RunRequest(
        agent=Agent("far"),
        identity=identity,
        messages=(),
        cancellation=CancellationToken(),
        emit_remote=lambda event: copied.append(event.seq),
    )
    client: Any = Together()
    follower = tasks_http.TaskFollower(tasks_http.TaskHttpBackend(client, patience=60.0), request)
    await follower.follow()
    state = follower.state
    assert (state.status, state.result, copied) == ("success", "It is started.", [1, 2, 3])


async def test_the_next_process_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    url, model = f"sqlite:///{tmp_path}/near.db", Model()
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/far.db", [far(model, tmp_path)])) as site:
        async with Runtime.open(url, [near(site.url)], on_close="leave") as first:
            run = first.stream("near", "go")
            await run.result()
            model.let_through("one ", "two ")
            deltas = 0
            async for event in first.log(run.run_id).follow():
                deltas += event.kind == "text_delta" and len(event.ns) > 1
                if deltas == 2:
                    break
        async with Runtime.open(url, [near(site.url)]) as second:
            model.let_through("three", None)
            events = [event async for event in second.events(run.run_id)]
            await check_copied(site, events)
            assert statuses(events)[-1] == "COMPLETED"
        async with Runtime.open(url, [near(site.url)]) as third:
            await until(third.log(run.run_id).has_ended)


async def test_a_cancel_with_tasks_reaches_them(tmp_path: Path) -> None:
    model = Model()
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/far.db", [far(model, tmp_path)])) as site:
        async with Runtime.open(f"sqlite:///{tmp_path}/near.db", [near(site.url)]) as runtime:
            run = runtime.stream("near", "go")
            await run.result()
            (task,) = await until(lambda: _running(site))
            await runtime.cancel(run.run_id)
            assert (await site.get(f"/api/v1/tasks/{task['task_id']}")).body["status"] == "running"
            with pytest.raises(ConfigurationError, match="cannot be forked"):
                await runtime.fork(run.run_id, at=await runtime.log(run.run_id).last(), input="again")
            await runtime.cancel(run.run_id, tasks=True)
            events = [event async for event in runtime.events(run.run_id)]
            assert statuses(events)[-1] == "CANCELLED"
            assert (await site.get(f"/api/v1/tasks/{task['task_id']}")).body["status"] == "cancelled"
            await check_copied(site, events)


async def test_a_run_that_is_cancelled_leaves_its_task_at_work(tmp_path: Path) -> None:
    model = Model(hangs=True)
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/far.db", [far(model, tmp_path)])) as site:
        async with Runtime.open(f"sqlite:///{tmp_path}/near.db", [near(site.url)]) as runtime:
            run = runtime.stream("near", "go")
            await until(lambda: _running(site))
            assert (await run.cancel()).status is RunStatus.CANCELLED
            model.let_through("one ", None)
            events = [event async for event in runtime.events(run.run_id)]
            assert statuses(events)[-1] == "COMPLETED"
            await check_copied(site, events)


@pytest.mark.parametrize("store", ["memory:", "sqlite"])
async def test_a_task_that_never_stops_talking_does_not_hold_the_parent(store: str, tmp_path: Path) -> None:
    url, model = "memory:" if store == "memory:" else f"sqlite:///{tmp_path}/far.db", Model(chatters=True)
    async with serving(Runtime.open(url, [far(model, tmp_path)])) as site:
        async with Runtime.open(f"sqlite:///{tmp_path}/near.db", [near(site.url)]) as runtime:
            run = runtime.stream("near", "go")
            assert (await run.result()).response == "Done."
            await runtime.cancel(run.run_id, tasks=True)
            events = [event async for event in runtime.events(run.run_id)]
            assert statuses(events)[-1] == "CANCELLED"
            await check_copied(site, events)


async def _running(site: Site) -> list[Any]:
    return [one for one in (await site.get("/api/v1/tasks")).body["items"] if one["status"] == "running"]


async def test_a_server_that_is_gone_for_good_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, there = Model(), AsyncExitStack()
    monkeypatch.setattr("retinue.backends.remote.PATIENCE", 0.0)
    remote = Runtime.open(f"sqlite:///{tmp_path}/far.db", [far(model, tmp_path)], on_close="leave")
    site = await there.enter_async_context(serving(remote))
    async with Runtime.open(f"sqlite:///{tmp_path}/near.db", [near(site.url)]) as runtime:
        run = runtime.stream("near", "go")
        await run.result()
        await until(lambda: _running(site))
        await there.aclose()
        events = [event async for event in runtime.events(run.run_id)]
        assert statuses(events)[-1] == "FAILED"
        await until(runtime.log(run.run_id).has_ended)


async def test_over_two_servers(tmp_path: Path) -> None:
    model = Model()
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/far.db", [far(model, tmp_path)])) as site:
        async with serving(Runtime.open(f"sqlite:///{tmp_path}/middle.db", [near(site.url)])) as middle:
            stub = RemoteSubagentStub("near", url=middle.url, headers=HEADERS)
            turns = [call("task", {"subagent_type": "near", "description": "go"}, id="task_q"), say("All done.")]
            async with Runtime([Agent("top", ScriptedModel(turns), subagents=[stub])]) as runtime:
                run = runtime.stream("top", "go")
                await run.result()
                model.let_through("one ", None)
                events = [event async for event in runtime.events(run.run_id)]
    last = events[-1]
    assert isinstance(last, TaskUpdated)
    assert (last.status, last.ns[:2]) == ("COMPLETED", ("tools:task_q", "tools:task_p"))
