"""Streams of runs and threads: the live end, joined deltas, cursors that cover background children, over SSE and WebSocket."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, HarnessAgent, Runtime
from retinue.core.events import event_from_json
from retinue.testing import ScriptedModel, call, say
from retinue.wire.snapshot import SnapshotTree

from .agents import Gate, speaker
from .serving import Received, Site, serving

RUNS, THREADS = "/api/v1/runs", "/api/v1/threads"


@pytest.fixture(params=["memory:", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param if request.param == "memory:" else f"sqlite:///{tmp_path}/a.db"


async def text_of(site: Site, path: str) -> str:
    async with site.session.get(path) as response:
        return await response.text()


async def test_the_live_end_is_told_once(url: str) -> None:
    gate = Gate()
    async with serving(Runtime.open(url, agents=[gate.agent()])) as site:
        run = await site.start("gated", thread_id="t1")
        run_id = run["run_id"]
        async with site.socket(f"{RUNS}/{run_id}/events") as socket, site.socket(f"{THREADS}/t1/events") as thread:
            gate.say("one")
            for reader, end in ((socket, lambda seq: seq), (thread, lambda seq: f"{run_id}:{seq}")):
                seen = 0
                while "caught_up" not in (found := await reader.next()):
                    seen = found["seq"]
                assert found == {"caught_up": end(seen)}
            gate.say("two", None)
            assert "caught_up" not in [key for one in await socket.all() for key in one]
        last = (await site.get(f"{RUNS}/{run_id}/snapshot")).body["seq"]
        assert re.findall(r"^: caught_up (.*)$", await text_of(site, f"{RUNS}/{run_id}/events"), re.M) == [str(last)]
        threads = await text_of(site, f"{THREADS}/t1/events?until=idle")
        assert re.findall(r"^: caught_up (.*)$", threads, re.M) == [f"{run_id}:{last}"]
        nothing = await text_of(site, f"{RUNS}/{run_id}/events?after={last}")
        assert re.findall(r"^: caught_up (.*)$", nothing, re.M) == [str(last)]


@pytest.mark.parametrize("of", ["run", "thread"])
async def test_a_replay_has_each_message_once_and_the_same_tree(url: str, of: str) -> None:
    def turn(request: Any) -> Any:
        if request.messages[-1].role == "tool":
            return say("all of it", chunks=["all ", "of ", "it"])
        return [call("task", {"subagent_type": "speaker", "description": "speak"}, id=name) for name in ("one", "two")]

    lead = Agent("lead", ScriptedModel(turn), subagents=[speaker(*"abc")])
    async with serving(Runtime.open(url, agents=[lead])) as site:
        run = await site.start("lead")
        await site.result(run["run_id"])
        path = f"{RUNS}/{run['run_id']}" if of == "run" else f"{THREADS}/{run['thread_id']}"
        events = await site.all_events(f"{path}/events?until=idle")
        merged = await site.all_events(f"{path}/events?merge=5000&until=idle")
        deltas = ("text_delta", "reasoning_delta", "tool_call_args_delta")
        assert any(event.event == "text_delta" for event in events)
        assert [e.data for e in merged] == [e.data for e in events if e.event not in deltas]
        assert tree(merged) == tree(events)
        # Without the whole message the deltas are all there is: joined, as far as they follow each other.
        texts = await site.all_events(f"{path}/events?merge=5000&kinds=text_delta&until=idle")
        whole = [event for event in events if event.event == "text_delta"]
        assert len(texts) < len(whole)
        assert "".join(event.data["delta"] for event in texts) == "".join(event.data["delta"] for event in whole)
        assert texts[-1].id == whole[-1].id


def tree(events: list[Received]) -> Any:
    return SnapshotTree([event_from_json({**event.data}) for event in events]).snapshot()


@pytest.mark.parametrize("of", [RUNS, THREADS])
async def test_deltas_are_joined_at_the_live_end(of: str) -> None:
    gate, words = Gate(), [f"{number} " for number in range(20)]
    async with serving(Runtime([gate.agent()])) as site:
        run = await site.start("gated", thread_id="t1")
        path = f"{of}/{run['run_id'] if of == RUNS else 't1'}/events?kinds=text_delta"
        async with site.socket(path) as plain, site.socket(f"{path}&merge=5000&until=idle") as joined:
            while "caught_up" not in await joined.next():
                pass
            for word in words:  # each is there before the next one is said
                gate.say(word)
                assert (await plain.news())["delta"] == word
            gate.say(None)
            found = await joined.all()
        assert "".join(event["delta"] for event in found) == "".join(words)
        assert len(found) < len(words)


async def test_the_cursor_of_a_thread_covers_its_background_children(tmp_path: Path) -> None:
    """A reader that breaks off after every event and continues by its id reads each event once, in the order of its log."""
    gate = Gate()
    worker = gate.agent("worker")

    def turn(request: Any) -> Any:
        asked = next(m.text for m in reversed(request.messages) if m.role == "user")
        done = request.messages[-1].role == "tool"
        spawn = {"agent_id": "worker", "task": "work", "timeout_seconds": 0}
        return call("agent_spawn", spawn, id="spawn_1") if asked == "first" and not done else say("done")

    lead = HarnessAgent("lead", ScriptedModel(turn), workspace=tmp_path, subagents=[worker])
    async with serving(Runtime.open(f"sqlite:///{tmp_path}/app.db", agents=[lead, worker])) as site:
        first = (await site.start("lead", "first", thread_id="t1"))["run_id"]
        await site.result(first)
        gate.say("one ", "two ")
        second = (await site.start("lead", "second", thread_id="t1"))["run_id"]
        await site.result(second)
        gate.say("three", None)
        await site.all_events(f"{RUNS}/{first}/events")  # until its task has ended, too
        third = (await site.start("lead", "third", thread_id="t1"))["run_id"]
        await site.result(third)
        logs = {run: [e.data for e in await site.all_events(f"{RUNS}/{run}/events")] for run in (first, second, third)}
        whole = await site.all_events(f"{THREADS}/t1/events?until=idle")
        by_log: dict[str, list[Any]] = {}
        for event in whole:
            by_log.setdefault(event.data["log_id"], []).append(event.data)
        assert {
            log: [{k: v for k, v in one.items() if k != "log_id"} for one in found] for log, found in by_log.items()
        } == logs
        got, cursor = list[Any](), ""
        while len(got) < len(whole):
            async with site.socket(f"{THREADS}/t1/events?until=idle&after={cursor}") as socket:
                event = await socket.news()
            cursor = event.pop("id")
            got.append(event)
        for log, found in by_log.items():
            assert [event for event in got if event["log_id"] == log] == found
        rest = await site.all_events(f"{THREADS}/t1/events?until=idle&after={cursor}")
        assert rest == []
        for wrong in ("x", f"{first}:1;{first}:1", f"{third}:99999", f"{first}:1;{second}:99999"):
            assert (await site.get(f"{THREADS}/t1/events?after={wrong}")).body["code"] == "unknown_cursor"


async def test_a_socket_is_compressed_and_says_why_it_is_refused() -> None:
    async with serving(Runtime([speaker("hi")])) as site:
        run = await site.start("speaker")
        async with site.session.ws_connect(f"{RUNS}/{run['run_id']}/events", compress=15) as socket:
            assert socket.compress
        code, reason = await site.refusal(f"{RUNS}/none/events")
        assert (code, reason[:20]) == (4404, "there is no such run")
        assert (await site.refusal(f"{THREADS}/none/events"))[0] == 4404
        assert (await site.refusal("/api/v1/events", authorization="Bearer no"))[0] == 4401
