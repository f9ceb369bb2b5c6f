"""Threads over HTTP: what was said on them, also while runs work or wait for their turn."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Permissions, Runtime
from retinue.core.messages import Message
from retinue.core.stores import ThreadRecord
from retinue.storage.stores import open_store
from retinue.testing import ScriptedModel, call, say

from ..prefix.scenes import SCENES
from ..prefix.tape import build, undisturbed
from .agents import Gate, pay, speaker
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
