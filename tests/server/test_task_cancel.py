"""One background task is cancelled, whichever process works on it; the others go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import HarnessAgent, Runtime
from retinue.client import Client
from retinue.errors import ConfigurationError
from retinue.models import ModelRequest, TextChunk
from retinue.server import StoredTokens, TokenStore
from retinue.storage.sql import SqlStore
from retinue.testing import ScriptedModel, call, say
from retinue.testing.model import ScriptedTurn

from .. import inside
from ..waiting import until
from .agents import speaker
from .serving import TOKEN, Site, asking, serving

RUNS, TASKS = "/api/v1/runs", "/api/v1/tasks"


class Lead:
    """Starts two background tasks, `slow` and `other`, which never end by themselves."""

    name = "testing:lead"

    def __init__(self) -> None:
        self._script = ScriptedModel(self._turn)

    def _turn(self, request: ModelRequest) -> ScriptedTurn:
        if any(message.role == "tool" for message in request.messages):
            return say("started")
        tasks = {"slow": "spawn_1", "other": "spawn_2"}
        return [
            call("agent_spawn", {"agent_id": "general-purpose", "task": task, "timeout_seconds": 0}, id=call_id)
            for task, call_id in tasks.items()
        ]

    async def stream(self, request: ModelRequest):
        if request.messages[-1].text in ("slow", "other"):
            yield TextChunk("I look")
            await until(lambda: False)
        async for chunk in self._script.stream(request):
            yield chunk


def lead(folder: Path) -> HarnessAgent:
    return HarnessAgent("lead", Lead(), workspace=folder)  # pyright: ignore[reportArgumentType]


async def started(site: Site) -> tuple[str, dict[str, Any]]:
    """Start a run; return its id and its tasks by call, once both are at work."""
    run_id = (await site.start("lead"))["run_id"]

    async def at_work() -> list[Any]:
        items = (await site.get(f"{RUNS}/{run_id}/tasks")).body["items"]
        return items if [one["status"] for one in items] == ["running", "running"] else []

    return run_id, {task["call_id"]: task for task in await until(at_work)}


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
async def test_one_task_is_cancelled_and_the_other_goes_on(url: str, tmp_path: Path) -> None:
    database = "memory:" if url == "memory:" else f"sqlite:///{tmp_path}/a.db"
    async with serving(Runtime.open(database, [lead(tmp_path)])) as site:
        run_id, tasks = await started(site)
        slow, other = tasks["spawn_1"], tasks["spawn_2"]
        shown = (await site.get(f"{TASKS}/{slow['task_id']}")).body
        assert shown == {**slow, "log_id": run_id, "thread_id": shown["thread_id"]}
        for body in ({}, {"run_id": run_id}):  # again changes nothing
            answer = await site.post(f"{TASKS}/{slow['task_id']}/cancel", body)
            assert (answer.status, answer.body["status"], answer.body["log_id"]) == (200, "cancelled", run_id)
        if url == "sqlite":
            child = (await site.get(f"{RUNS}/{slow['child_run_id']}")).body
            assert child["status"] == "cancelled"
            by_child = await site.get(f"{TASKS}/{other['task_id']}?run_id={slow['child_run_id']}")
            assert by_child.body["status"] == "running"
        assert (await site.get(f"{TASKS}/{other['task_id']}")).body["status"] == "running"
        for missing in (f"{TASKS}/nothing/cancel", f"{TASKS}/{run_id}/cancel"):
            assert (await site.post(missing)).body["code"] == "not_found"
        assert (await site.post(f"{TASKS}/{slow['task_id']}/cancel", {"run_id": "run_x"})).status == 404
        async with Client(site.url, token=TOKEN) as client:
            with pytest.raises(ConfigurationError, match="no background task 'nothing'"):
                await client.cancel_task(run_id, "nothing")
            assert await client.cancel_task(run_id, other["task_id"]) == "cancelled"
        with pytest.raises(ConfigurationError, match="no background task 'nothing'"):
            await site.service.runtime.cancel_task(run_id, "nothing")
        events = await site.all_events(f"{RUNS}/{run_id}/events")  # the log has ended with its last task
        ends = [event.data["task_id"] for event in events if event.data.get("status") == "CANCELLED"]
        assert ends == [slow["task_id"], other["task_id"]]


async def test_another_node_and_the_next_process_cancel_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    async with serving(Runtime.open(url, [lead(tmp_path)], on_close="leave")) as first:
        run_id, tasks = await started(first)
        async with serving(Runtime.open(url, [speaker("x")])) as second:  # it need not know the agent
            answer = await second.post(f"{TASKS}/{tasks['spawn_1']['task_id']}/cancel")
            assert (answer.status, answer.body["status"]) == (200, "cancelled")
        assert (await first.get(f"{TASKS}/{tasks['spawn_2']['task_id']}")).body["status"] == "running"
    inside.wait_for_task_cancels(monkeypatch, 3600.0)  # the reply comes, though the log ends with the task
    async with serving(Runtime.open(url, [lead(tmp_path)], recover=False)) as third:  # nobody works on it
        answer = await third.post(f"{TASKS}/{tasks['spawn_2']['task_id']}/cancel")
        assert (answer.status, answer.body["status"]) == (200, "cancelled")
        assert [e.event for e in await third.all_events(f"{RUNS}/{run_id}/events")][-1] == "task_updated"


async def test_the_task_of_another_user_is_not_there(tmp_path: Path) -> None:
    runtime = Runtime.open(f"sqlite:///{tmp_path}/a.db", [lead(tmp_path)])
    assert isinstance(runtime.store, SqlStore)
    async with serving(runtime, auth=StoredTokens(runtime.store)) as nobody:
        tokens = TokenStore(runtime.store)
        _, ann = await tokens.add("ann")
        _, bob = await tokens.add("bob")
        _, reader = await tokens.add("ann", scopes=["read"])
        async with asking(nobody.url, ann) as anns, asking(nobody.url, bob) as bobs, asking(nobody.url, reader) as eve:
            run_id, tasks = await started(anns)
            path = f"{TASKS}/{tasks['spawn_1']['task_id']}"
            for body in ({}, {"run_id": run_id}):
                refused, missing = await bobs.post(f"{path}/cancel", body), await bobs.post(f"{TASKS}/x/cancel", body)
                assert (refused.status, refused.body) == (404, missing.body)
            assert (await bobs.get(path)).status == 404
            assert ((await eve.get(path)).status, (await eve.post(f"{path}/cancel")).status) == (200, 403)
            assert (await anns.get(path)).body["status"] == "running"
