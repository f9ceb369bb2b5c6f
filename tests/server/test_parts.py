"""Parts over HTTP: the same as in the process, from any id, until the background tasks have ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Child, Decision, HarnessAgent, Permissions, RunStatus, Runtime, ToolContext, ToolResult, tool
from retinue.client import Client
from retinue.testing import ScriptedModel, call, say
from retinue.wire.parts import MODES

from ..subagents.stage import harness
from .agents import speaker
from .serving import TOKEN, Site, serving

RUNS = "/api/v1/runs"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/a.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@tool
async def fan_out(ctx: ToolContext) -> str:
    """Ask two."""
    ctx.stream_output("two ")
    ctx.report_progress("running", "asking", 0.5)
    ctx.report_activity("plan", {"steps": 1})
    ctx.report_activity_delta("plan", [{"op": "replace", "path": "/steps", "value": 2}])
    results = await ctx.run_children([Child("w", "a"), Child("w", "b")])
    return " ".join([str(result.response) for result in results])


def team() -> list[Agent]:
    w = Agent("w", ScriptedModel(lambda request: say(f"did {request.messages[-1].text}")))
    return [Agent("root", ScriptedModel([call("fan_out", {}, id="c1"), say("end")]), tools=[fan_out]), w]


async def received(site: Site, path: str, **headers: str) -> AsyncIterator[tuple[str, Any]]:
    """Yield the id and the data of each part until the stream ends."""
    async with site.session.get(path, headers=headers) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream"), await response.text()
        name = ""
        async for line in response.content:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            assert field in ("id", "data", "") or line.startswith(b":"), line
            name = value if field == "id" else name
            if field == "data":
                yield name, json.loads(value)


async def all_received(site: Site, path: str, **headers: str) -> list[tuple[str, Any]]:
    return [one async for one in received(site, path, **headers)]


def as_json(parts: list[Any]) -> list[Any]:
    return json.loads(json.dumps(parts))


async def test_parts_go_on_after_any_of_them(url: str) -> None:
    runtime = Runtime.open(url, team())
    async with serving(runtime) as site:
        run_id = (await site.start("root"))["run_id"]
        await site.result(run_id)
        path = f"{RUNS}/{run_id}/parts?modes={','.join(MODES)}"
        whole = await all_received(site, path)
        assert [part for _, part in whole] == as_json([part async for part in runtime.parts(run_id, MODES)])
        ids = [name for name, _ in whole]
        assert len(set(ids)) == len(ids)
        assert any("." in name for name in ids)  # several parts of one event
        for place, name in enumerate(ids, 1):
            assert await all_received(site, f"{path}&after={name}") == whole[place:]
            assert await all_received(site, f"{path}&after=1", **{"last-event-id": name}) == whole[place:]


async def test_own_modes_show_what_a_call_does_while_it_works(url: str) -> None:
    runtime = Runtime.open(url, team())
    async with serving(runtime) as site, Client(site.url, token=TOKEN) as client:
        run_id = (await client.run("root", "go")).run_id
        found = [part async for part in client.parts(run_id, ["output", "progress", "activities"])]
        assert found == [part async for part in runtime.parts(run_id, ["output", "progress", "activities"])]
        progress = {"status": "running", "message": "asking", "progress": 0.5}
        assert [(part["type"], part["ns"], part["data"]) for part in found] == [
            ("output", (), {"tool_call_id": "c1", "name": "fan_out", "delta": "two "}),
            ("progress", (), {"tool_call_id": "c1", "name": "fan_out", **progress}),
            ("activities", (), {"tool_call_id": "c1", "type": "plan", "content": {"steps": 1}}),
            (
                "activities",
                (),
                {"tool_call_id": "c1", "type": "plan", "patch": [{"op": "replace", "path": "/steps", "value": 2}]},
            ),
        ]


async def test_a_subtree_and_what_is_refused(url: str) -> None:
    async with serving(Runtime.open(url, [*team(), speaker("hi")])) as site:
        run_id = (await site.start("root"))["run_id"]
        await site.result(run_id)
        found = await all_received(site, f"{RUNS}/{run_id}/parts?modes=updates&ns=tools:c1~2")
        assert {tuple(part["ns"]) for _, part in found} == {("tools:c1~2",)}
        for query, code in (
            ("modes=updates,everything", "unknown_mode"),
            ("modes=", "unknown_mode"),
            ("after=x", "unknown_cursor"),
            ("after=1.x", "unknown_cursor"),
            ("after=9999", "unknown_cursor"),
            ("kinds=text_delta", "invalid_query"),
        ):
            refused = await site.get(f"{RUNS}/{run_id}/parts?{query}")
            assert (refused.status, refused.body["code"]) == (422, code), query
        assert (await site.get(f"{RUNS}/run_x/parts")).status == 404


async def test_parts_of_a_run_go_on_until_its_background_child_has_ended(url: str, tmp_path: Path) -> None:
    opened = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        await opened.wait()
        return "waited"

    def child(request: Any) -> Any:
        return say("worked") if request.messages[-1].role == "tool" else call("wait", {}, id="c1")

    def boss() -> HarnessAgent:
        turn = call("agent_spawn", {"agent_id": "general-purpose", "task": "work", "timeout_seconds": 0}, id="c1")
        return harness(tmp_path, turn, child=child, tools=[wait])

    runtime = Runtime.open(url, [boss()])
    async with serving(runtime) as site, Client(site.url, token=TOKEN) as client:
        run = client.stream("boss", "go")
        own = [part async for part in run.parts()]
        assert [message(part) for part in own][:2] == [
            ("ai", [("task", "c1", "general-purpose", "work")]),
            ("agent_spawn", "c1", own[1]["data"]["tools"]["messages"][0]["content"]),
        ]
        assert "status: accepted" in message(own[1])[2]
        opened.set()
        parts = [part async for part in client.parts(run.run_id)]
        assert [message(part) for part in parts if part["ns"] == ()][-1] == ("task", "c1", "worked")
        assert message(parts[-1]) == ("task", "c1", "worked")
        over_http = await all_received(site, f"{RUNS}/{run.run_id}/parts")
        assert [part for _, part in over_http] == as_json(parts)


def message(part: Any) -> Any:
    """The calls of an answer, or the name, call and text of a result."""
    ((_, update),) = part["data"].items()
    (one,) = update["messages"]
    if one["type"] == "ai":
        return "ai", [
            (c["name"], c["id"], c["args"].get("subagent_type"), c["args"].get("description"))
            for c in one["tool_calls"]
        ]
    return one["name"], one["tool_call_id"], one["content"]


@pytest.mark.parametrize("kind", ["runtime", "client"])
async def test_the_parts_after_an_answer_know_the_calls_of_before(kind: str, url: str) -> None:
    """The sub-agent of a hand-written tool started before the answer: its end is that of a `task` all the same."""

    @tool
    async def pay() -> str:
        """Pay."""
        return "paid"

    @tool
    async def ask(ctx: ToolContext) -> Any:
        """Ask."""
        outcome = await ctx.run_child("w", "pay it")
        return ToolResult.suspended("it waits") if outcome.status.is_waiting else outcome.response

    turns = lambda request: say("done") if request.messages[-1].role == "tool" else call("pay", {}, id="p1")  # noqa: E731
    w = Agent("w", ScriptedModel(turns), tools=[pay], plugins=[Permissions(ask=["pay"])])
    root = Agent("root", ScriptedModel([call("ask", {}, id="c1"), say("end")]), tools=[ask])
    runtime = Runtime.open(url, [root, w])
    async with serving(runtime) as site, Client(site.url, token=TOKEN) as client:
        place: Any = client if kind == "client" else runtime
        waiting = await place.run("root", "go")
        assert waiting.status.is_waiting, waiting
        run = place.stream_resume(waiting.run_id, {"p1": Decision.approve()})
        parts = [part async for part in run.parts()]
        assert (await run.result()).status is RunStatus.COMPLETED
        assert [message(part) for part in parts if part["ns"] == ()] == [("task", "c1", "done"), ("ai", [])]
