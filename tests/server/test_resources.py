"""What the interface tells of runs, agents, threads and their state, for a page to show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Plugin, Registrar, Runtime, StateKey, ToolOutput, tool
from retinue.core.runs import Usage
from retinue.testing import ScriptedModel, call, say

from .agents import Gate, boss, speaker
from .serving import serving

RUNS, THREADS = "/api/v1/runs", "/api/v1/threads"
SEEN = StateKey("seen", int, persistent=True)


class Counts(Plugin):
    name = "counts"

    def register(self, r: Registrar) -> None:
        r.key(SEEN)


@pytest.fixture(params=["memory:", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param if request.param == "memory:" else f"sqlite:///{tmp_path}/a.db"


async def test_a_queued_run_shows_its_input_and_a_run_at_work_what_it_has_used(url: str) -> None:
    gate = Gate()

    @tool
    async def wait_for_it() -> str:
        """Wait."""
        await gate.gates.get()
        return "it came"

    def turn(request: Any) -> Any:
        done = request.messages[-1].role == "tool"
        return say("done") if done else [say("", usage=Usage(input_tokens=5)), call("wait_for_it")]

    agent = Agent("caller", ScriptedModel(turn), tools=[wait_for_it])
    priced = {"known": False}

    def price(model: str, usage: Usage) -> float | None:
        return 0.0 if priced["known"] else None

    async with serving(Runtime.open(url, agents=[agent, speaker("hi")], price=price)) as site:
        first = (await site.start("caller", "one", thread_id="t1"))["run_id"]
        second = (await site.start("speaker", "two", thread_id="t1", when_busy="enqueue"))["run_id"]
        async for event in site.events(f"{RUNS}/{first}/events"):
            if event.event == "tool_call_ready":
                break
        shown = (await site.get(f"{RUNS}/{first}")).body
        assert (shown["status"], shown["input"], shown["usage"]["input_tokens"]) == ("running", [], 5)
        queued = (await site.get(f"{RUNS}/{second}")).body
        assert (queued["status"], [one["text"] for one in queued["input"]]) == ("queued", ["two"])
        assert [one["id"] for one in queued["input"]] == [f"{second}-m1"]
        assert shown["cost_known"] is False
        priced["known"] = True
        assert (await site.get(f"{RUNS}/{first}")).body["cost_known"] is True
        gate.say("go")
        await site.result(second)
        assert (await site.get(f"{RUNS}/{second}")).body["input"] == []


async def test_agents_that_are_only_named_by_others_are_marked(url: str) -> None:
    async with serving(Runtime.open(url, agents=[boss(), speaker("hi")])) as site:
        items = (await site.get("/api/v1/agents")).body["items"]
        assert {one["name"]: one["served"] for one in items} == {"boss": True, "clerk": False, "speaker": True}


async def test_the_state_of_a_thread_now_and_at_earlier_events(url: str) -> None:
    @tool
    def count(number: int) -> ToolOutput:
        """Note a number."""
        return ToolOutput("noted", {SEEN: number})

    model = ScriptedModel([call("count", {"number": 1}), call("count", {"number": 2}), say("a")])
    async with serving(Runtime.open(url, agents=[Agent("counter", model, tools=[count], plugins=[Counts()])])) as site:
        empty = (await site.post(THREADS, {"thread_id": "t0"})).body
        assert (await site.get(f"{THREADS}/{empty['thread_id']}/state")).body == {
            "thread_id": "t0", "run_id": None, "revision": 0, "values": {}
        }  # fmt: skip
        run_id = (await site.start("counter", thread_id="t1"))["run_id"]
        await site.result(run_id)
        now = (await site.get(f"{THREADS}/t1/state")).body
        assert (now["run_id"], now["values"]) == (run_id, {"seen": 2})
        deltas = [
            (event.data["seq"], event.data["revision"], event.data["delta"])
            for event in await site.all_events(f"{RUNS}/{run_id}/events?kinds=state_delta")
        ]
        assert len(deltas) == 2
        for seq, revision, delta in deltas:
            then = (await site.get(f"{THREADS}/t1/state?at={seq}")).body
            assert (then["revision"], then["values"]) == (revision, delta)
            assert (await site.get(f"{THREADS}/t1/state?run_id={run_id}&at={seq - 1}")).body["values"] != delta
        assert (await site.get(f"{THREADS}/t1/state?run_id={run_id}")).body["values"] == {"seen": 2}
        for path, status in (("t1/state?at=9999", 422), ("t1/state?run_id=none", 404), ("t0/state?at=1", 404),
                             (f"t0/state?run_id={run_id}", 404)):  # fmt: skip
            assert (await site.get(f"{THREADS}/{path}")).status == status


async def test_a_fork_at_a_message(url: str) -> None:
    heard: list[list[str]] = []

    def turn(request: Any) -> Any:
        heard.append([message.text for message in request.messages])
        return say("an answer")

    async with serving(Runtime.open(url, agents=[Agent("a", ScriptedModel(turn))])) as site:
        run_id = (await site.start("a", "one", thread_id="t1"))["run_id"]
        await site.result(run_id)
        messages = (await site.get(f"{RUNS}/{run_id}/snapshot")).body["run"]["messages"]
        assert (await site.get(f"{RUNS}/{run_id}")).body["can_fork"] == sorted(one["id"] for one in messages)
        for message, expected in ((messages[0], ["other"]), (messages[1], ["one", "an answer", "other"])):
            body = {"message_id": message["id"], "input": "other"}
            forked = await site.post(f"{RUNS}/{run_id}/fork", body)
            assert forked.status == 201
            await site.result(forked.body["run_id"])
            assert heard[-1] == expected
        refused = await site.post(f"{RUNS}/{run_id}/fork", {"message_id": "none"})
        assert (refused.status, refused.body["code"]) == (422, "invalid")
        assert refused.body["places"] == (await site.post(f"{RUNS}/{run_id}/fork", {"after": 9999})).body["places"]
        assert 1 in refused.body["places"]
        for wrong in ({}, {"after": 1, "message_id": "x"}):
            assert (await site.post(f"{RUNS}/{run_id}/fork", wrong)).body["code"] == "invalid_body"
