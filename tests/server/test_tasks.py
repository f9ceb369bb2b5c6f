"""The task protocol of the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Limits, Runtime
from retinue.server.auth import User
from retinue.server.tasks import run_id_of
from retinue.testing import ScriptedModel, say

from .agents import Gate, boss, speaker
from .serving import asking, listening, serving

MORE: list[dict[str, Any]] = [
    {"input": [{"role": "user", "content": "go"}, {"role": "user", "content": "on"}]},
    {"input": [{"role": "user", "content": "go", "visibility": "internal"}]},
    {"context": {"tenant": "other"}},
    {"state": {"notes": 1}},
    {"limits": {"steps": 3}},
    {"thread_id": "t9"},
    {"when_busy": "enqueue"},
]
"""What a request may have beside its agent and its text."""


def task(task_id: str = "t1", agent: str = "speaker", **context: Any) -> dict[str, Any]:
    return {"task_id": task_id, "agent_id": agent, "input": "go", "context": context}


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_a_task_is_a_run_and_a_repeat_changes_nothing(url: str, tmp_path: Path) -> None:
    database = "memory:" if url == "memory:" else f"sqlite:///{tmp_path}/a.db"
    async with serving(Runtime.open(database, [speaker("Hello ", "there.")])) as site:
        given = await asyncio.gather(*[site.post("/tasks", task(session_id="s1")) for _ in range(5)])
        assert {answer.status for answer in given} <= {200, 201}
        assert {answer.body["task_id"] for answer in given} == {"t1"}
        ended = (await site.get("/tasks/t1/wait?timeout_seconds=30")).body
        assert (ended["status"], ended["result"], ended["usage"]) == ("success", "Hello there.", {"requests": 1})
        events = await site.all_events("/tasks/t1/events?after=0")
        assert [int(event.id or 0) for event in events] == list(range(1, ended["seq"] + 1))
        assert [event.data["delta"] for event in events if event.event == "text_delta"] == ["Hello ", "there."]
        rest = await site.all_events("/tasks/t1/events?after=3")
        assert rest == events[3:]
        assert (await site.post("/tasks", task(session_id="s1"))).body == ended
        runs = (await site.get("/api/v1/runs")).body["items"]
        assert [run["run_id"] for run in runs] == [ended["run_id"]]
        messages = (await site.get("/api/v1/threads/s1/messages")).body["items"]
        assert len(messages) == 2


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_a_key_of_another_request_is_refused(url: str, tmp_path: Path) -> None:
    database = "memory:" if url == "memory:" else f"sqlite:///{tmp_path}/a.db"
    agents = [speaker("Hi."), boss()]
    key = {"idempotency-key": "k1"}
    async with serving(Runtime.open(database, agents)) as site:
        bodies = [{"agent": "speaker", "input": text} for text in ("go", "stop")]
        for _ in range(2):
            assert (await site.post("/api/v1/runs", bodies[0], headers=key)).status == 201
            assert (await site.post("/tasks", task())).status in (200, 201)
            assert (await site.post("/api/v1/runs", {"input": "go", "agent": "speaker"}, headers=key)).status == 201
            for other in (bodies[1], {**bodies[0], "agent": "boss"}, *[{**bodies[0], **more} for more in MORE]):
                refused = await site.post("/api/v1/runs", other, headers=key)
                assert (refused.status, refused.body["code"]) == (409, "key_reused")
            for other in ({**task(), "input": "stop"}, task(agent="boss"), task(session_id="s9"), task(mood="good")):
                refused = await site.post("/tasks", other)
                assert (refused.status, refused.body["code"]) == (409, "key_reused")
        two = [{**task("t2"), "input": text} for text in ("go", "stop")]
        assert sorted([one.status for one in await asyncio.gather(*[site.post("/tasks", one) for one in two])]) == [
            201,
            409,
        ]
    if url == "sqlite":
        async with serving(Runtime.open(database, agents)) as site:
            assert (await site.post("/api/v1/runs", bodies[1], headers=key)).status == 409
            assert (await site.post("/api/v1/runs", bodies[0], headers=key)).status == 201
            assert (await site.post("/tasks", {**task(), "input": "stop"})).status == 409
            assert (await site.post("/tasks", task())).status == 200


async def test_a_key_is_the_same_after_the_agent_has_changed(tmp_path: Path) -> None:
    url, key, body = f"sqlite:///{tmp_path}/a.db", {"idempotency-key": "k1"}, {"agent": "speaker", "input": "go"}
    async with serving(Runtime.open(url, [speaker("Hi.")])) as site:
        first = await site.post("/api/v1/runs", body, headers=key)
    async with serving(
        Runtime.open(url, [Agent("speaker", ScriptedModel([say("x")]), limits=Limits(steps=5))])
    ) as site:
        assert (await site.post("/api/v1/runs", body, headers=key)).body["run_id"] == first.body["run_id"]


async def test_another_node_of_the_same_store_has_the_same_tasks(tmp_path: Path) -> None:
    url, gate = f"sqlite:///{tmp_path}/a.db", Gate()
    async with serving(Runtime.open(url, [gate.agent()])) as first:
        async with serving(Runtime.open(url, [gate.agent()])) as second:
            given = await asyncio.gather(
                first.post("/tasks", task(agent="gated")), second.post("/tasks", task(agent="gated"))
            )
            assert {answer.status for answer in given} <= {200, 201}
            gate.say("one", None)
            ended = (await second.get("/tasks/t1/wait?timeout_seconds=60")).body
            assert (ended["status"], ended["result"]) == ("success", "one")
            assert ended == (await first.get("/tasks/t1")).body
            assert await first.all_events("/tasks/t1/events") == await second.all_events("/tasks/t1/events")
            assert gate.gates.empty()


async def test_a_task_that_waits_for_a_human_is_running_and_can_be_answered(tmp_path: Path) -> None:
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/a.db", [boss()])) as site:
        await site.post("/tasks", task(agent="boss"))
        waiting = (await site.get("/tasks/t1/wait?timeout_seconds=30")).body
        assert waiting["status"] == "running"
        assert waiting["awaiting"]["pay_1"]["path"] == ["task_1", "pay_1"]
        wrong = await site.post("/tasks/t1/resume", {"decisions": {"pay_1": {"action": "resume", "payload": {"x": 1}}}})
        assert (wrong.status, wrong.body["code"]) == (409, "decision_refused")
        unknown = await site.post("/tasks/t1/resume", {"decisions": {"pay_2": {"action": "cancel"}}})
        assert (unknown.status, unknown.body["code"]) == (409, "decision_refused")
        yes = {"decisions": {"task_1/pay_1": {"action": "resume", "payload": {"approved": True}, "id": "d1"}}}
        for _ in range(2):
            assert (await site.post("/tasks/t1/resume", yes)).status == 202
            ended = (await site.get("/tasks/t1/wait?timeout_seconds=30")).body
            assert (ended["status"], ended["result"]) == ("success", "boss: clerk: paid 3")
        again = {"decisions": {"pay_1": {"action": "resume", "payload": {"approved": True}, "id": "d2"}}}
        assert (await site.post("/tasks/t1/resume", again)).status == 409


async def test_a_cancel_stops_the_run_and_may_be_repeated(tmp_path: Path) -> None:
    gate = Gate()
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/a.db", [gate.agent()])) as site:
        await site.post("/tasks", task(agent="gated"))
        assert (await site.get("/tasks/t1/wait?timeout_seconds=0")).body["status"] == "running"
        for _ in range(2):
            assert (await site.post("/tasks/t1/cancel")).status == 200
            assert (await site.get("/tasks/t1/wait?timeout_seconds=30")).body["status"] == "cancelled"


async def test_tasks_of_one_session_come_one_after_the_other() -> None:
    gate = Gate()
    async with serving(Runtime([gate.agent()])) as site:
        for number in (1, 2):
            given = await site.post("/tasks", task(f"t{number}", "gated", session_id="s1"))
            assert given.status == 201
        gate.say("one", None, "two", None)
        assert (await site.get("/tasks/t2/wait?timeout_seconds=30")).body["result"] == "two"
        assert (await site.get("/tasks/t1")).body["result"] == "one"


async def test_a_task_belongs_to_its_user(tmp_path: Path) -> None:
    from retinue.server import create_app

    class TwoUsers:
        async def user_of(self, headers: Any) -> User | None:
            name = headers.get("authorization", "").removeprefix("Bearer ")
            return User(name, frozenset({"read", "run", "answer"})) if name in ("ann", "bob") else None

    assert run_id_of(User("a", frozenset()), "b/c") != run_id_of(User("a/b", frozenset()), "c")
    async with Runtime.open(f"sqlite:///{tmp_path}/a.db", [speaker("Hi.")]) as runtime:
        async with listening(create_app(runtime, auth=TwoUsers())) as url:
            async with asking(url, "ann") as ann, asking(url, "bob") as bob, asking(url, None) as nobody:
                assert (await ann.post("/tasks", task(session_id="s1"))).status == 201
                for site, status in ((bob, 404), (nobody, 401)):
                    assert (await site.get("/tasks/t1")).status == status
                    assert (await site.get("/tasks/t1/wait")).status == status
                    assert (await site.get("/tasks/t1/events")).status == status
                    assert (await site.post("/tasks/t1/cancel")).status == status
                    assert (await site.post("/tasks/t1/resume", {"decisions": {}})).status == status
                unknown = (await bob.get("/tasks/nothing")).body
                assert (await bob.get("/tasks/t1")).body == unknown
                taken = await bob.post("/tasks", task("t2", session_id="s1"))
                assert (taken.status, taken.body["code"]) == (404, "not_found")
                own = await bob.post("/tasks", task(session_id="s2"))
                assert own.body["run_id"] != (await ann.get("/tasks/t1")).body["run_id"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "invalid_body"),
        ({"task_id": " ", "agent_id": "speaker", "input": "go"}, 422, "invalid_body"),
        ({"task_id": "a/b", "agent_id": "speaker", "input": "go"}, 422, "invalid_body"),
        ({"task_id": "a\nb", "agent_id": "speaker", "input": "go"}, 422, "invalid_body"),
        ({"task_id": "..", "agent_id": "speaker", "input": "go"}, 422, "invalid_body"),
        ({"task_id": "x" * 300, "agent_id": "speaker", "input": "go"}, 422, "invalid_body"),
        ({"task_id": "t1", "agent_id": "nobody", "input": "go"}, 404, "unknown_agent"),
        ({"task_id": "t1", "agent_id": "speaker", "input": 3}, 422, "invalid_body"),
        ({"task_id": "t1", "agent_id": "speaker", "input": "go", "context": {"session_id": 3}}, 422, "invalid_body"),
        (
            {"task_id": "t1", "agent_id": "speaker", "input": "go", "context": {"session_id": "a b"}},
            422,
            "invalid_body",
        ),
    ],
)
async def test_a_bad_submission_changes_nothing(body: Any, status: int, code: str) -> None:
    async with serving(Runtime([speaker("Hi.")])) as site:
        answer = await site.post("/tasks", body)
        assert (answer.status, answer.body["code"]) == (status, code)
        assert (await site.get("/api/v1/runs")).body["items"] == []


@pytest.mark.parametrize(
    "path", ["/tasks/t1/events?after=x", "/tasks/t1/events?after=99", "/tasks/t1/wait?timeout_seconds=a"]
)
async def test_bad_queries(path: str) -> None:
    async with serving(Runtime([speaker("Hi.")])) as site:
        await site.post("/tasks", task())
        await site.get("/tasks/t1/wait?timeout_seconds=30")
        assert (await site.get(path)).status == 422
