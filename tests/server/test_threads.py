"""Threads over HTTP: what was said on them, also while runs work or wait for their turn; how they stand, in lists."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, HarnessAgent, Message, Permissions, Runtime
from retinue.core.stores import ThreadRecord
from retinue.models import ModelChunk, ModelRequest, TextChunk
from retinue.server import ProxyHeader
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, call, fail, say
from retinue.testing.model import ScriptedTurn

from ..prefix.scenes import SCENES
from ..prefix.tape import build, undisturbed
from .agents import Gate, boss, pay, speaker
from .serving import Site, serving

RUNS = "/api/v1/runs"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/a.db"


async def said(site: Site, thread_id: str) -> list[tuple[str, str]]:
    items = (await site.get(f"/api/v1/threads/{thread_id}/messages")).body["items"]
    ids = [one["id"] for one in items]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return [(one["role"], one["text"]) for one in items]


def user(text: str) -> tuple[str, str]:
    return "user", text


async def test_the_input_of_a_run_is_in_its_thread_from_its_start(url: str) -> None:
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent(), speaker("hi")])) as site:
        await site.result((await site.start("speaker", "first", thread_id="t1"))["run_id"])
        key = {"Idempotency-Key": "k1"}
        body = {"agent": "gated", "input": "second", "thread_id": "t1"}
        made = [(await site.post(RUNS, body, headers=key)).body["run_id"] for _ in range(2)]
        assert made[0] == made[1]
        before = [user("first"), ("assistant", "hi")]
        assert await said(site, "t1") == [*before, user("second")]
        queued = [(await site.start("speaker", text, thread_id="t1", when_busy="enqueue"))["run_id"] for text in "ab"]
        assert await said(site, "t1") == [*before, user("second"), user("a"), user("b")]
        gone = await site.post(f"{RUNS}/{queued[0]}/cancel", {})
        assert gone.body["status"] == "cancelled"
        assert await said(site, "t1") == [*before, user("second"), user("b")]
        gate.say("done", None)
        await site.result(queued[1])
        assert await said(site, "t1") == [
            *before, user("second"), ("assistant", "done"), user("b"), ("assistant", "hi")
        ]  # fmt: skip


async def test_the_input_of_a_run_that_waits_is_in_its_thread_once(url: str) -> None:
    model = ScriptedModel([call("pay", {"amount": 3}, id="pay_1"), say("Paid.")])
    payer = Agent("payer", model, tools=[pay], plugins=[Permissions(ask=["pay"])])
    async with serving(Runtime.open(url, agents=[payer])) as site:
        run_id = (await site.start("payer", "Pay!", thread_id="t1"))["run_id"]
        assert (await site.result(run_id))["status"] == "suspended"
        assert await said(site, "t1") == [user("Pay!")]
        ids = [one["id"] for one in (await site.get("/api/v1/threads/t1/messages")).body["items"]]
        snapshot = (await site.get(f"{RUNS}/{run_id}/snapshot")).body
        assert [one["id"] for one in snapshot["run"]["messages"] if one["role"] == "user"] == ids
        await site.post(f"{RUNS}/{run_id}/decisions", {"decisions": {"pay_1": {"action": "approve"}}})
        assert (await site.result(run_id))["status"] == "completed"
        assert await said(site, "t1") == [user("Pay!"), ("assistant", ""), ("tool", "paid 3"), ("assistant", "Paid.")]
        assert (await site.get("/api/v1/threads/t1/messages")).body["items"][0]["id"] == ids[0]


async def test_a_fork_shows_what_was_said_before_it_and_its_own_input(url: str) -> None:
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent()])) as site:
        gate.say("one", None, "two", None)
        await site.result((await site.start("gated", "first", thread_id="t1"))["run_id"])
        run_id = (await site.start("gated", "second", thread_id="t1"))["run_id"]
        await site.result(run_id)
        seq = (await site.get(f"{RUNS}/{run_id}/snapshot")).body["seq"]
        forked = (await site.post(f"{RUNS}/{run_id}/fork", {"after": seq, "input": "third"})).body
        before = [user("first"), ("assistant", "one"), user("second"), ("assistant", "two"), user("third")]
        assert await said(site, forked["thread_id"]) == before
        gate.say("three", None)
        await site.result(forked["run_id"])
        assert await said(site, forked["thread_id"]) == [*before, ("assistant", "three")]
        assert await said(site, "t1") == before[:-1]


@pytest.mark.parametrize("place", ["sqlite", "postgres"])
async def test_a_process_that_dies_leaves_the_input_in_the_thread(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """At every row of a run whose process has died, before and after its end."""
    history = ThreadRecord(thread_id="thread-1", messages=(Message.user("before", id="m1"),))
    scene = SCENES["parallel calls"]
    end = await undisturbed(scene.plan, history=history)
    whole = [(message.role.value, message.text) for message in (*history.messages, *end.result.messages)]
    cuts = end.tape.cuts()
    for cut in [cuts[0], *cuts[1:-2:4], cuts[-2], cuts[-1]]:
        with contextlib.ExitStack() as stack:
            url = f"sqlite:///{tmp_path}/{cut}.db"
            if place == "postgres":
                url = stack.enter_context(request.getfixturevalue("postgres_server").empty_url())
            store: Any = open_store(url)
            await store.open()
            await build(store, end.tape, cut)
            await store.close()
            async with serving(Runtime.open(url, recover=False)) as site:
                assert await said(site, "thread-1") == (whole if cut == cuts[-1] else whole[:2]), cut


# --- lists


def failing() -> Agent:
    return Agent("failing", ScriptedModel(lambda request: fail(RuntimeError("no"))))


async def listed(site: Site, query: str = "") -> list[tuple[str, str, str, int, int, int]]:
    """Return of each listed thread its id, title, status, questions, children, and requests to models."""
    items = (await site.get(f"/api/v1/threads{query}")).body["items"]
    for one in items:
        alone = (await site.get(f"/api/v1/threads/{one['thread_id']}")).body
        assert {name: alone[name] for name in one} == one
    names = ("thread_id", "title", "status", "questions", "children")
    return [(*[one[name] for name in names], one["usage"]["requests"]) for one in items]


async def test_the_list_shows_how_threads_stand(url: str) -> None:
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent(), speaker("hi"), boss(), failing()])) as site:
        assert await listed(site) == []
        made = {"thread_id": "empty", "messages": [{"content": "Hello\n  there"}]}
        assert (await site.post("/api/v1/threads", made)).status == 201
        asked = (await site.start("boss", "ask", thread_id="asks"))["run_id"]
        await site.result(asked)
        await site.result((await site.start("failing", "try", thread_id="fails"))["run_id"])
        at_work = (await site.start("gated", "Work 100%", thread_id="works"))["run_id"]
        queued = [
            (await site.start("speaker", "more", thread_id=name, when_busy="enqueue"))["run_id"]
            for name in ("works", "asks")
        ]
        asks, works = ("asks", "ask", "waiting", 1, 1, 2), ("works", "Work 100%", "running", 0, 0, 0)
        fails, empty = ("fails", "try", "failed", 0, 0, 0), ("empty", "Hello there", "idle", 0, 0, 0)
        assert await listed(site) == [asks, works, fails, empty]
        for query, found in {
            "?status=waiting": [asks],
            "?status=queued": [],
            "?status=idle": [empty],
            "?q=HELLO": [empty],
            "?q=0%25": [works],
            "?q=_": [],
            "?q=k&status=running": [works],
        }.items():
            assert await listed(site, query) == found, query
        page = (await site.get("/api/v1/threads?limit=3")).body
        rest = await listed(site, f"?limit=3&cursor={page['next_cursor']}")
        assert [one["thread_id"] for one in page["items"]] + [one[0] for one in rest] == [
            "asks",
            "works",
            "fails",
            "empty",
        ]
        for query in ("?status=done", "?user=x", "?limit=0"):
            assert (await site.get(f"/api/v1/threads{query}")).status == 422
        gate.say("done", None)
        await site.post(f"{RUNS}/{asked}/decisions", {"decisions": {"pay_1": {"action": "approve"}}})
        for run_id in (at_work, *queued):
            await site.result(run_id)
        assert await listed(site) == [
            ("asks", "ask", "completed", 0, 0, 5), ("works", "Work 100%", "completed", 0, 0, 2), fails, empty
        ]  # fmt: skip


async def test_a_thread_that_has_been_named_keeps_its_title(url: str) -> None:
    async with serving(Runtime.open(url, agents=[speaker("hi")])) as site:
        await site.result((await site.start("speaker", "first", thread_id="t1"))["run_id"])
        named = await site.ask("PATCH", "/api/v1/threads/t1", {"title": "Ärger"})
        assert (named.status, named.body["title"], named.body["status"]) == (200, "Ärger", "completed")
        run_id = (await site.start("speaker", "second", thread_id="t1"))["run_id"]
        await site.result(run_id)
        assert await listed(site, "?q=äRGER") == [("t1", "Ärger", "completed", 0, 0, 2)]
        seq = (await site.get(f"{RUNS}/{run_id}/snapshot")).body["seq"]
        forked = (await site.post(f"{RUNS}/{run_id}/fork", {"after": seq, "input": "third"})).body
        assert (await site.get(f"/api/v1/threads/{forked['thread_id']}")).body["title"] == "first"
        for body in ({}, {"title": ""}, {"title": "x" * 201}, {"title": "x", "status": "failed"}):
            assert (await site.ask("PATCH", "/api/v1/threads/t1", body)).status == 422
        spoiled = await site.ask("PATCH", "/api/v1/threads/t1", {"title": "a\0b\nc"})
        assert (spoiled.status, spoiled.body["title"]) == (200, "a b c")
        assert (await site.ask("PATCH", "/api/v1/threads/nope", {"title": "x"})).status == 404


async def test_a_task_keeps_its_thread_running_after_its_run(url: str, tmp_path: Path) -> None:
    gate = Gate()
    agent = HarnessAgent("lead", Leading(gate), workspace=tmp_path)  # pyright: ignore[reportArgumentType]
    async with serving(Runtime.open(url, agents=[agent])) as site:
        run_id = (await site.start("lead", "go", thread_id="t1"))["run_id"]
        assert (await site.result(run_id))["status"] == "completed"
        async for event in site.events(f"{RUNS}/{run_id}/events?kinds=text_delta&ns=tools:spawn_1"):
            assert event.data["delta"] == "I look"
            break
        assert await listed(site) == [("t1", "go", "running", 0, 1, 2)]
        gate.say(None)
        await site.all_events(f"{RUNS}/{run_id}/events")
        assert await listed(site) == [("t1", "go", "completed", 0, 0, 3)]


class Leading:
    """A model that starts a background task, which says something and ends when it is let through."""

    name = "testing:leading"

    def __init__(self, gate: Gate) -> None:
        self._gates = gate.gates
        self._script = ScriptedModel(self._turn)

    def _turn(self, request: ModelRequest) -> ScriptedTurn:
        if any(message.role == "tool" for message in request.messages):
            return say("started")
        work = {"agent_id": "general-purpose", "task": "slow", "timeout_seconds": 0}
        return call("agent_spawn", work, id="spawn_1")

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        if request.messages[-1].text == "slow":
            yield TextChunk("I look")
            await self._gates.get()
            return
        async for chunk in self._script.stream(request):
            yield chunk


async def test_changes_of_the_list_are_sent(url: str) -> None:
    """Each change of a thread of the user, once, with all that the list shows of it."""
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent(), boss()])) as site:
        await site.post("/api/v1/threads", {"thread_id": "before"})
        async with site.session.ws_connect("/api/v1/events") as socket:
            await socket.send_json({"subscribe": "threads"})
            assert await socket.receive_json() == {"subscription": "threads", "caught_up": True}

            async def changed() -> tuple[str, str, str, int]:
                while "beat" in (message := await socket.receive_json(timeout=20)):
                    pass
                thread = message["thread_updated"]
                assert thread == {
                    name: value
                    for name, value in (await site.get(f"/api/v1/threads/{thread['thread_id']}")).body.items()
                    if name != "run"
                }
                return thread["thread_id"], thread["title"], thread["status"], thread["questions"]

            run_id = (await site.start("gated", "go", thread_id="t1"))["run_id"]
            assert await changed() == ("t1", "go", "running", 0)
            await site.ask("PATCH", "/api/v1/threads/t1", {"title": "Named"})
            assert await changed() == ("t1", "Named", "running", 0)
            gate.say("done", None)
            await site.result(run_id)
            assert await changed() == ("t1", "Named", "completed", 0)
            await site.post("/api/v1/threads", {"thread_id": "t2"})
            assert await changed() == ("t2", "", "idle", 0)
            await socket.send_json({"unsubscribe": "threads"})
            await socket.send_json({"subscribe": "x"})
            refused = await socket.receive_json()
            assert refused["error"]["code"] == "invalid"


async def test_a_thread_is_listed_once_its_run_has_begun(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server owns the thread before it stores the run: lists and changes do not show it meanwhile."""
    runtime, seen = Runtime.open(url, agents=[speaker("hi")]), list[tuple[str, str]]()
    create = runtime.store.create_thread

    async def create_and_look(record: ThreadRecord, **options: Any) -> bool:
        created = await create(record, **options)
        seen.extend([(thread.thread_id, thread.status) for thread in await runtime.threads()])
        return created

    monkeypatch.setattr(runtime.store, "create_thread", create_and_look)
    async with serving(runtime) as site:
        await site.post("/api/v1/threads", {"thread_id": "empty"})
        run_id = (await site.start("speaker", "go", thread_id="t1"))["run_id"]
        assert seen == [("empty", "idle")] * 2
        await site.result(run_id)
        assert sorted(thread[:2] for thread in await listed(site)) == [("empty", ""), ("t1", "go")]


async def test_changes_of_the_list_are_those_of_the_user(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    runtime = Runtime.open(url, agents=[speaker("hi")])
    async with serving(runtime, auth=ProxyHeader("x-user")) as site:
        async with site.session.ws_connect("/api/v1/events", headers={"x-user": "ann"}) as socket:
            await socket.send_json({"subscribe": "threads"})
            assert "caught_up" in await socket.receive_json()
            for name in ("bob", "ann"):
                body = {"agent": "speaker", "input": f"of {name}"}
                answer = await site.post(RUNS, body, headers={"x-user": name})
                assert answer.status == 201
            updated = (await socket.receive_json())["thread_updated"]
            assert (updated["user_id"], updated["title"]) == ("ann", "of ann")


@pytest.mark.parametrize("place", ["sqlite", "postgres"])
async def test_another_server_lists_and_follows_the_same(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A server that has no agents, on the database of another one."""
    url = f"sqlite:///{tmp_path}/a.db" if place == "sqlite" else request.getfixturevalue("postgres_url")
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent()])) as site, serving(Runtime.open(url)) as other:
        async with other.session.ws_connect("/api/v1/events") as socket:
            await socket.send_json({"subscribe": "threads"})
            assert "caught_up" in await socket.receive_json()
            run_id = (await site.start("gated", "go", thread_id="t1"))["run_id"]
            assert (await socket.receive_json())["thread_updated"]["status"] == "running"
            assert await listed(other) == [("t1", "go", "running", 0, 0, 0)]
            gate.say("done", None)
            await site.result(run_id)
            while (message := await socket.receive_json()).get("thread_updated", {}).get("status") != "completed":
                assert "beat" in message or message["thread_updated"]["status"] == "running"
            assert await listed(other) == await listed(site) == [("t1", "go", "completed", 0, 0, 1)]
