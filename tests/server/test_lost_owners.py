"""A reader who waits is told when nobody works on the run, and when another process does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from retinue import Agent, Runtime
from retinue.client import Client
from retinue.events import AnyEvent, ErrorRaised
from retinue.log.ownership import is_orphan
from retinue.storage.sql import SqlStore
from retinue.subagents import RemoteSubagentStub
from retinue.testing import ScriptedModel, call, say

from .. import inside
from ..waiting import expire_lease, until
from .agents import Gate, boss, speaker
from .serving import TOKEN, Received, serving

pytestmark = pytest.mark.usefixtures("no_grace")
RUNS = "/api/v1/runs"


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    inside.look_at_silent_logs_every(monkeypatch, 0.02)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/served.db"


async def leave_run(url: str, gate: Gate, **more: str) -> str:
    """Start a run that says a word, and leave it as its process ends."""
    async with Runtime.open(url, [gate.agent()], on_close="leave") as runtime:
        run = runtime.stream("gated", "go", user_id="local", **more)  # pyright: ignore[reportArgumentType]
        gate.say("one ")
        async for event in run:
            if event.kind == "text_delta":
                break
    return run.run_id


async def next_notice(stream: AsyncIterator[Received]) -> Received:
    async for received in stream:
        if received.data["seq"] == 0:
            return received
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("path", ["runs/{run}/events", "runs/{run}/events?ns=tools:x", "threads/t1/events"])
async def test_a_stream_says_that_the_owner_is_lost_and_that_another_is_found(path: str, url: str) -> None:
    gate = Gate()
    run_id = await leave_run(url, gate, thread_id="t1")
    async with serving(Runtime.open(url, [speaker("x")])) as site:  # it cannot continue the run
        stream = site.events(f"/api/v1/{path}".format(run=run_id))
        lost = await next_notice(stream)
        assert (lost.id, lost.event, lost.data["code"]) == (None, "error", "owner_lost")
        assert (lost.data["run_id"], lost.data["agent"], lost.data.get("fatal", False)) == (run_id, "gated", False)
        late = site.events(f"{RUNS}/{run_id}/events")
        assert (await next_notice(late)).data["code"] == "owner_lost"  # who comes later is told, too
        store = site.service.runtime.store
        assert await store.claim(run_id, "process/of-another-machine", 3600.0) is not None
        for reader in (stream, late):
            assert (await next_notice(reader)).data["code"] == "owner_found"
        await expire_lease(store, run_id)
        assert (await next_notice(late)).data["code"] == "owner_lost"
        async with Runtime.open(url, [gate.agent()]) as other:
            gate.say("two", None)
            rest = [received async for received in late if received.data["seq"]]
            assert [int(one.id or 0) for one in rest] == list(range(int(rest[0].id or 0), int(rest[-1].id or 0) + 1))
            assert (await other.result(run_id)).response == "two"
        assert all(one.data["seq"] for one in await site.all_events(f"{RUNS}/{run_id}/events"))  # nothing is stored


async def test_a_filter_by_kinds_holds_for_notices(url: str) -> None:
    gate = Gate()
    run_id = await leave_run(url, gate)
    async with serving(Runtime.open(url, [speaker("x")])) as site:
        waiting = site.events(f"{RUNS}/{run_id}/events?kinds=error")
        assert (await anext(waiting)).data["code"] == "owner_lost"
        deaf = site.events(f"{RUNS}/{run_id}/events?kinds=run_finished")
        async with Runtime.open(url, [gate.agent()]):
            gate.say(None)
            assert [one.event async for one in deaf] == ["run_finished"]


async def test_a_socket_says_it_too(url: str) -> None:
    gate = Gate()
    run_id = await leave_run(url, gate)
    async with serving(Runtime.open(url, [speaker("x")])) as site:
        async with site.session.ws_connect("/api/v1/events") as socket:
            await socket.send_json({"subscribe": "x", "run_id": run_id})
            async for message in socket:
                assert message.type is aiohttp.WSMsgType.TEXT
                said = message.json()
                if "event" in said and said["event"]["seq"] == 0:
                    assert (said["event"]["code"], "id" in said) == ("owner_lost", False)
                    break


async def test_the_client_and_the_runtime_pass_it_on(url: str) -> None:
    gate = Gate()
    run_id = await leave_run(url, gate)
    async with serving(Runtime.open(url, [speaker("x")])) as site, Client(site.url, token=TOKEN) as client:
        async with Runtime.open(url, [speaker("x")]) as third:
            readers, logs = [client.events(run_id), third.events(run_id)], list[list[AnyEvent]]()
            for reader in readers:
                seen = [await anext(reader)]
                while seen[-1].seq:
                    seen.append(await anext(reader))
                logs.append(seen)
            assert [error.code for seen in logs for error in seen if isinstance(error, ErrorRaised)] == [
                "owner_lost"
            ] * 2
            async with Runtime.open(url, [gate.agent()]) as other:
                gate.say(None)
                await other.result(run_id)
                for seen, reader in zip(logs, readers, strict=True):
                    numbers = [event.seq for event in [*seen, *[event async for event in reader]] if event.seq]
                    assert numbers == list(range(1, len(numbers) + 1))


async def test_a_lease_that_has_ended_counts_as_lost(url: str) -> None:
    gate = Gate()
    async with Runtime.open(url, [gate.agent()], recover=False) as owner:
        run = owner.stream("gated", "go", user_id="local")
        await run.stored()
        store = owner.store
        assert isinstance(store, SqlStore)
        await until(lambda: store.last_event(run.run_id))
        async with serving(Runtime.open(url, [speaker("x")], recover=False)) as site:
            assert not (await site.get(f"{RUNS}/{run.run_id}")).body["orphaned"]
            await expire_lease(store, run.run_id)
            assert is_orphan((await store.open_logs(run.run_id))[0])
            assert (await next_notice(site.events(f"{RUNS}/{run.run_id}/events"))).data["code"] == "owner_lost"
            assert (await site.get(f"{RUNS}/{run.run_id}")).body["orphaned"]


async def test_a_run_that_waits_for_a_human_is_not_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    real = SqlStore.open_logs

    async def counted(self: SqlStore, log_id: str | None = None) -> object:
        nonlocal asked
        asked += log_id is not None
        return await real(self, log_id)

    async with Runtime.open(url, [boss()]) as owner:
        run_id = (await owner.run("boss", "go", user_id="local")).run_id
    async with serving(Runtime.open(url, [speaker("x")])) as site:
        monkeypatch.setattr(SqlStore, "open_logs", counted)
        stream = site.events(f"{RUNS}/{run_id}/events")
        seen = [await anext(stream)]
        while seen[-1].event != "run_finished" or seen[-1].data["run_id"] != run_id:
            seen.append(await anext(stream))
        await until(lambda: asked > 3)
        await site.post(f"{RUNS}/{run_id}/cancel")
        seen += [received async for received in stream]
        assert all(one.data["seq"] for one in seen)


async def test_a_parent_on_another_server_is_told(url: str) -> None:
    gate = Gate()
    async with serving(Runtime.open(url, [gate.agent()])) as far:
        stub = RemoteSubagentStub("gated", url=far.url, headers={"authorization": f"Bearer {TOKEN}"})
        turns = [call("task", {"subagent_type": "gated", "description": "go"}, id="c1"), say("done")]
        async with Runtime([Agent("lead", ScriptedModel(turns), subagents=[stub])]) as runtime:
            run = runtime.stream("lead", "go")
            gate.say("one ")
            events = aiter(run)
            while (await anext(events)).kind != "text_delta":
                pass
            # The server goes on answering, and works on nothing.
            await inside.stop_work(far.service.runtime)
            while (event := await anext(events)).kind != "error":
                pass
            assert isinstance(event, ErrorRaised)
            assert (event.code, event.ns, event.agent) == ("owner_lost", ("tools:c1",), "gated")
            assert event.seq  # in the log of the parent it is an event like any other
            async with Runtime.open(url, [gate.agent()]):
                gate.say("two", None)
                assert (await run.result()).response == "done"
