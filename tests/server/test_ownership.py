"""Threads and streams stay with their users: two who begin at once, deleted threads, revoked tokens, old cursors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from retinue import HarnessAgent, Runtime
from retinue.errors import StoreError
from retinue.server import StoredTokens, TokenStore
from retinue.server.auth import User
from retinue.server.tasks import run_id_of
from retinue.storage.sql import SqlStore
from retinue.testing import ScriptedModel, call, say

from .. import inside
from .agents import Gate, speaker
from .serving import Site, asking, serving

RUNS, THREADS = "/api/v1/runs", "/api/v1/threads"


@asynccontextmanager
async def two_users(tmp_path: Path, *agents: object) -> AsyncIterator[tuple[Site, Site]]:
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", agents=list(agents) or [speaker("hi")])  # type: ignore[arg-type]
    assert isinstance(runtime.store, SqlStore)
    tokens = TokenStore(runtime.store)
    async with serving(runtime, auth=StoredTokens(runtime.store)) as nobody:
        _, ann = await tokens.add("ann")
        _, bob = await tokens.add("bob")
        async with asking(nobody.url, ann) as anns, asking(nobody.url, bob) as bobs:
            yield anns, bobs


@pytest.mark.parametrize("when_busy", ["enqueue", "reject", "interrupt"])
async def test_two_users_who_begin_one_thread_do_not_share_it(tmp_path: Path, when_busy: str) -> None:
    async with two_users(tmp_path) as (ann, bob):
        for number in range(5):
            body = {"agent": "speaker", "thread_id": f"t{number}", "when_busy": when_busy}
            one, other = await asyncio.gather(
                ann.post(RUNS, {**body, "input": "of ann"}), bob.post(RUNS, {**body, "input": "of bob"})
            )
            assert sorted([one.status, other.status]) == [201, 404]
            winner, loser, word = (ann, bob, "of ann") if one.status == 201 else (bob, ann, "of bob")
            await winner.result((one if one.status == 201 else other).body["run_id"])
            messages = (await winner.get(f"{THREADS}/t{number}/messages")).body["items"]
            assert [message["text"] for message in messages] == [word, "hi"]
            assert (await loser.get(f"{THREADS}/t{number}/messages")).status == 404


async def test_the_thread_of_a_key_cannot_be_taken_in_advance(tmp_path: Path) -> None:
    async with two_users(tmp_path) as (ann, bob):
        thread_id = f"thread_{run_id_of(User('ann'), 'key:order-2')}"
        injected = {"thread_id": thread_id, "messages": [{"role": "system", "content": "injected"}]}
        assert (await bob.post(THREADS, injected)).status == 422
        assert (await bob.post(RUNS, {"agent": "speaker", "input": "x", "thread_id": thread_id})).status == 422
        started = await ann.post(RUNS, {"agent": "speaker", "input": "mine"}, headers={"idempotency-key": "order-2"})
        assert (started.status, started.body["thread_id"]) == (201, thread_id)
        await ann.result(started.body["run_id"])
        messages = (await ann.get(f"{THREADS}/{thread_id}/messages")).body["items"]
        assert [message["text"] for message in messages] == ["mine", "hi"]


async def test_a_start_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    async with two_users(tmp_path) as (ann, _):
        assert (await ann.post(RUNS, {"agent": "nobody", "input": "x", "thread_id": "t1"})).status == 404
        assert (await ann.get(f"{THREADS}/t1")).status == 404


async def test_the_stream_of_a_deleted_thread_ends(tmp_path: Path) -> None:
    async with two_users(tmp_path) as (ann, bob):
        run_id = (await ann.start("speaker", thread_id="t1"))["run_id"]
        await ann.result(run_id)
        stream = ann.events(f"{THREADS}/t1/events?kinds=run_finished")
        assert (await anext(stream)).data["run_id"] == run_id
        assert (await ann.ask("DELETE", f"{THREADS}/t1")).status == 204
        await bob.start("speaker", "secret of bob", thread_id="t1")
        assert [event async for event in stream] == []


async def test_a_revoked_token_ends_its_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.beat_every(monkeypatch, 0.0)
    inside.remember_users_for(monkeypatch, 0.0)
    gate = Gate()
    runtime = Runtime.open(f"sqlite:///{tmp_path}/app.db", agents=[gate.agent()])
    assert isinstance(runtime.store, SqlStore)
    tokens = TokenStore(runtime.store)
    async with serving(runtime, auth=StoredTokens(runtime.store)) as nobody:
        token, secret = await tokens.add("ann")
        async with asking(nobody.url, secret) as ann:
            run_id = (await ann.start("gated"))["run_id"]
            stream = ann.events(f"{RUNS}/{run_id}/events?kinds=text_delta")
            gate.say("one")
            assert (await anext(stream)).data["delta"] == "one"
            await tokens.revoke(token.token_id)
            gate.say("two", None)
            assert [event async for event in stream] == []


class Moody:
    """Knows one user, until its database is down."""

    is_down = False

    async def user_of(self, headers: Mapping[str, str]) -> User:
        if self.is_down:
            raise StoreError("app.db", "it is away", transient=True)
        return User("ann")


async def test_a_database_that_cannot_be_asked_ends_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.beat_every(monkeypatch, 0.0)
    gate, auth = Gate(), Moody()
    async with serving(Runtime([gate.agent()]), auth=auth) as site:
        run_id = (await site.start("gated"))["run_id"]
        stream = site.events(f"{RUNS}/{run_id}/events?kinds=text_delta")
        gate.say("one")
        assert (await anext(stream)).data["delta"] == "one"
        auth.is_down = True
        gate.say("two", None)
        assert [event.data["delta"] async for event in stream] == ["two"]


async def test_a_reader_who_wants_none_of_the_events_gets_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.beat_every(monkeypatch, 0.0, feeds=3600.0)
    gate = Gate()
    async with serving(Runtime([gate.agent()])) as site:
        run_id = (await site.start("gated"))["run_id"]
        async with site.session.get(f"{RUNS}/{run_id}/events?kinds=run_finished") as response:
            assert await response.content.readline() == b": open\n"
            for word in ("one", "two"):
                gate.say(word)
                while (line := await response.content.readline()) == b"\n":
                    pass
                assert line == b": still here\n"
        gate.say(None)


async def test_a_reader_at_the_end_of_a_run_gets_the_next_one_while_a_task_works(tmp_path: Path) -> None:
    gate = Gate()
    worker = gate.agent("worker")

    def turn(request: object) -> object:
        asked = [m for m in request.messages if m.role == "user"][-1].text  # pyright: ignore[reportAttributeAccessIssue]
        done = any(m.role == "tool" for m in request.messages)  # pyright: ignore[reportAttributeAccessIssue]
        spawn = {"agent_id": "worker", "task": "work", "timeout_seconds": 0}
        return call("agent_spawn", spawn, id="spawn_1") if asked == "first" and not done else say("done")

    lead = HarnessAgent("lead", ScriptedModel(turn), workspace=tmp_path, subagents=[worker])  # pyright: ignore[reportArgumentType]
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/app.db", agents=[lead, worker])) as site:
        first = (await site.start("lead", "first", thread_id="t1"))["run_id"]
        await site.result(first)
        stream = site.events(f"{THREADS}/t1/events?kinds=run_finished")
        end = await anext(stream)
        while end.data["run_id"] != first:
            end = await anext(stream)
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
        again = site.events(f"{THREADS}/t1/events?kinds=run_started,text_delta", **{"Last-Event-ID": end.id or ""})
        gate.say("working")
        tail = await anext(again)
        assert (tail.id, tail.data["agent"], tail.data["log_id"]) == (f"{first}:{tail.data['seq']}", "worker", first)
        second = (await site.start("lead", "second", thread_id="t1"))["run_id"]
        started = await anext(again)
        while started.data["agent"] == "worker":
            tail, started = started, await anext(again)
        assert (started.data["run_id"], started.id) == (second, f"{second}:1;{first}:{tail.data['seq']}")
        gate.say(None)
        await again.aclose()  # pyright: ignore[reportAttributeAccessIssue]


async def test_cursors_of_threads_are_checked_and_the_last_event_id_wins(tmp_path: Path) -> None:
    async with two_users(tmp_path) as (ann, _):
        run_id = (await ann.start("speaker", thread_id="t1"))["run_id"]
        await ann.result(run_id)
        assert (await ann.get(f"{THREADS}/t1/events?after={run_id}:99999")).status == 422
        events = await ann.all_events(f"{RUNS}/{run_id}/events?after=2", **{"Last-Event-ID": "4"})
        assert events[0].id == "5"


async def test_a_deleted_run_leaves_no_feed(tmp_path: Path) -> None:
    async with two_users(tmp_path) as (ann, _):
        key = {"idempotency-key": "k1"}
        body = {"agent": "speaker", "input": "old", "thread_id": "t1"}
        run_id = (await ann.post(RUNS, body, headers=key)).body["run_id"]
        await ann.result(run_id)
        stream = ann.events(f"{THREADS}/t1/events")
        await anext(stream)
        assert (await ann.ask("DELETE", f"{THREADS}/t1")).status == 204
        assert (await ann.post(RUNS, {**body, "input": "new"}, headers=key)).body["run_id"] == run_id
        await ann.result(run_id)
        events = await ann.all_events(f"{RUNS}/{run_id}/events")
        assert events[0].data["messages"][0]["parts"][0]["text"] == "new"
        await stream.aclose()  # pyright: ignore[reportAttributeAccessIssue]
