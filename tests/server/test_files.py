"""Files of workspaces and background tasks over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from retinue import HarnessAgent, ModelRequest, Runtime, ToolContext, ToolResult, tool
from retinue.server import StoredTokens, TokenStore
from retinue.storage.sql import SqlStore
from retinue.stores import StoreFilesystem
from retinue.testing import ScriptedModel, ScriptedTurn, call, say

from .serving import asking, serving

FILES = "/api/v1/files"


async def test_files_of_a_folder_are_listed_read_written_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "notes" / f"{name}.md").write_text(f"# {name}")
    (tmp_path.parent / "secret.txt").write_text("secret")
    agent = HarnessAgent("helper", ScriptedModel([]), workspace=tmp_path)
    async with serving(Runtime(agents=[agent])) as site:
        first = (await site.get(f"{FILES}?path=notes&limit=2")).body
        assert [one["path"] for one in first["items"]] == ["notes/a.md", "notes/b.md"]
        rest = (await site.get(f"{FILES}?path=notes&limit=2&cursor={first['next_cursor']}")).body
        assert ([one["path"] for one in rest["items"]], rest["next_cursor"]) == (["notes/c.md"], None)
        read = await site.get(f"{FILES}/notes/a.md")
        assert (read.status, read.body) == (200, "# a")
        assert read.headers["content-disposition"] == "attachment"
        assert read.headers["x-content-type-options"] == "nosniff"
        assert (await site.ask("PUT", f"{FILES}/new/file.txt", data=b"\x00\xff")).body == {
            "path": "new/file.txt",
            "size": 2,
        }
        assert (tmp_path / "new/file.txt").read_bytes() == b"\x00\xff"
        assert (await site.ask("DELETE", f"{FILES}/new/file.txt")).status == 204
        assert (await site.ask("DELETE", f"{FILES}/new/file.txt")).status == 404
        assert (await site.get(f"{FILES}/nothing")).status == 404
        assert (await site.get(f"{FILES}?path=nothing")).status == 404
        assert (await site.get(f"{FILES}?agent=nobody")).status == 404
        for outside in ("..%2Fsecret.txt", "%2e%2e/secret.txt", "notes/..%2F..%2Fsecret.txt", "%2Fetc/passwd"):
            answer = await site.get(f"{FILES}/{outside}")
            assert answer.status in (404, 422), outside
            assert "secret" not in str(answer.body).replace("secret.txt", "")


async def test_a_workspace_that_is_not_there_yet_is_empty_and_its_place_is_not_told(tmp_path: Path) -> None:
    agent = HarnessAgent("helper", ScriptedModel([]), workspace=tmp_path / "later")
    async with serving(Runtime(agents=[agent])) as site:
        assert (await site.get(FILES)).body == {"items": [], "next_cursor": None}
        for path in (f"{FILES}/a.md", f"{FILES}?path=notes"):
            answer = await site.get(path)
            assert (answer.status, answer.body["code"]) == (404, "not_found")
            assert str(tmp_path) not in answer.body["detail"]
        assert (await site.ask("PUT", f"{FILES}/a.md", data=b"x")).status == 200
        assert [one["path"] for one in (await site.get(FILES)).body["items"]] == ["a.md"]


async def test_users_have_files_of_their_own(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    runtime = Runtime.open(url)
    assert isinstance(runtime.store, SqlStore)
    shared = HarnessAgent("shared", ScriptedModel([]), workspace=tmp_path)
    divided = HarnessAgent("divided", ScriptedModel([]), filesystem=StoreFilesystem(url))
    runtime = Runtime.open(url, agents=[divided, shared])
    assert isinstance(runtime.store, SqlStore)
    async with serving(runtime, auth=StoredTokens(runtime.store)) as nobody:
        tokens = TokenStore(runtime.store)
        _, ann = await tokens.add("ann")
        _, bob = await tokens.add("bob")
        async with asking(nobody.url, ann) as anns, asking(nobody.url, bob) as bobs:
            assert (await anns.ask("PUT", f"{FILES}/diary.md", data=b"dear diary")).status == 200
            assert (await anns.get(f"{FILES}/diary.md")).body == "dear diary"
            assert (await bobs.get(f"{FILES}/diary.md")).status == 404
            assert (await bobs.get(FILES)).body["items"] == []
            assert (await bobs.ask("DELETE", f"{FILES}/diary.md")).status == 404
            assert (await anns.get(f"{FILES}?agent=shared")).status == 404  # a folder that nobody shares


PLACES = pytest.mark.parametrize("place", ["memory:", "sqlite:///{}/app.db"], ids=["memory", "sqlite"])


@PLACES
async def test_background_tasks_are_listed(tmp_path: Path, place: str) -> None:
    def turn(request: object) -> object:
        done = [m for m in request.messages if m.role == "tool"]  # pyright: ignore[reportAttributeAccessIssue]
        spawn = {"agent_id": "general-purpose", "task": "look around", "timeout_seconds": 0}
        return say("started") if done else call("agent_spawn", spawn, id="spawn_1")

    def model(request: object) -> object:
        is_child = "look around" in request.messages[-1].text  # pyright: ignore[reportAttributeAccessIssue]
        return say("seen") if is_child else turn(request)

    agent = HarnessAgent("lead", ScriptedModel(model), workspace=tmp_path)  # pyright: ignore[reportArgumentType]
    async with serving(Runtime.open(place.format(tmp_path), agents=[agent])) as site:
        run_id = (await site.start("lead"))["run_id"]
        events = await site.all_events(f"/api/v1/runs/{run_id}/events")
        assert (events[-1].event, events[-1].data["status"]) == ("task_updated", "COMPLETED")
        (task,) = (await site.get("/api/v1/tasks")).body["items"]
        assert (task["log_id"], task["status"], task["call_id"]) == (run_id, "completed", "spawn_1")
        (shown,) = (await site.get(f"/api/v1/runs/{run_id}/tasks")).body["items"]
        assert (shown["task_id"], shown["run_id"]) == (task["task_id"], run_id)
        child_id = shown["child_run_id"]
        child = (await site.get(f"/api/v1/runs/{child_id}")).body
        assert (child["run_id"], child["parent_run_id"], child["response"]) == (child_id, run_id, "seen")
        own = await site.all_events(f"/api/v1/runs/{child_id}/events")
        assert own == [event for event in events if event.data["ns"][:1] == ["tools:spawn_1"]]
        assert {event.data["run_id"] for event in own} >= {child_id}
        snapshot = (await site.get(f"/api/v1/runs/{child_id}/snapshot")).body
        assert (snapshot["run"]["run_id"], snapshot["run"]["ns"]) == (child_id, ["tools:spawn_1"])
        for path in ("events", "snapshot"):  # one meaning of ns everywhere
            same = await site.get(f"/api/v1/runs/{child_id}/{path}?ns=tools:spawn_1")
            assert same[:2] == (await site.get(f"/api/v1/runs/{child_id}/{path}"))[:2]
        async with site.socket(f"/api/v1/runs/{child_id}/events") as socket:
            assert await socket.all() == [event.data for event in own]
        async with site.socket("/api/v1/events") as socket:
            await socket.send(subscribe="x", run_id=child_id)
            assert [(await socket.news())["event"] for _ in own] == [event.data for event in own]
            assert (await socket.news())["ended"]
        assert (await site.get("/api/v1/tasks?status=failed")).body["items"] == []


@PLACES
async def test_a_task_that_waits_for_a_human_shows_the_question(tmp_path: Path, place: str) -> None:
    @tool
    def ask(ctx: ToolContext) -> ToolResult:
        """Ask a human."""
        return ToolResult.suspended("Which one?") if ctx.resume_input is None else ToolResult.success(ctx.resume_input)

    def model(request: ModelRequest) -> ScriptedTurn:
        if request.messages[-1].role == "tool":
            return say("done")
        if request.messages[-1].text == "ask them":
            return call("ask", {}, id="ask_1")
        return call("agent_spawn", {"agent_id": "general-purpose", "task": "ask them", "timeout_seconds": 0})

    agent = HarnessAgent("lead", ScriptedModel(model), workspace=tmp_path, tools=[ask])
    async with serving(Runtime.open(place.format(tmp_path), agents=[agent])) as site:
        run_id = (await site.start("lead"))["run_id"]
        tasks = f"/api/v1/runs/{run_id}/tasks"

        async def shown(status: str, awaiting: str | None) -> dict[str, Any]:
            while True:
                (task,) = (await site.get(tasks)).body["items"]
                if (task["status"], task["awaiting"]) == (status, awaiting):
                    return task
                await asyncio.sleep(0.01)

        await site.result(run_id)
        task = await shown("running", "Which one?")
        assert (await site.get(f"/api/v1/tasks/{task['task_id']}")).body["awaiting"] == "Which one?"
        answer = {"decisions": {"ask_1": {"action": "resume", "payload": "the red one"}}}
        assert (await site.post(f"/api/v1/runs/{task['child_run_id']}/decisions", answer)).status == 202
        await shown("completed", None)
