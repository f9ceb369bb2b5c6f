"""Rosters: how many runs below a run stand, sent by what a reader looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue import Agent, Runtime
from retinue.models import ModelRequest, TextChunk
from retinue.testing import ScriptedModel, call, say

from .agents import Gate, speaker
from .serving import Site, Socket, serving

MANY = "/api/v1/events"
CHILDREN = 120


@pytest.fixture(params=["memory:", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param if request.param == "memory:" else f"sqlite:///{tmp_path}/a.db"


class Talker:
    """A model of a child that says a word for each that is let through; each child has its own gate."""

    name = "testing:talker"

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}

    async def stream(self, request: ModelRequest) -> Any:
        gate = self.gates.setdefault(request.messages[-1].text, Gate())
        while (word := await gate.gates.get()) is not None:
            yield TextChunk(word)


def lead(talker: Talker) -> Agent:
    def says(request: ModelRequest) -> Any:
        if request.messages[-1].role == "tool":
            return say("all done")
        names = [f"c{number:03}" for number in range(CHILDREN)]
        return [call("task", {"subagent_type": "talker", "description": name}, id=name) for name in names]

    child = Agent("talker", talker)  # pyright: ignore[reportArgumentType]
    return Agent("lead", ScriptedModel(says), subagents=[child])


class Reader:
    """What a page keeps of a roster."""

    def __init__(self, socket: Socket) -> None:
        self.socket, self.rows, self.counts = socket, dict[str, dict[str, Any]](), dict[str, int]()
        self.sizes: list[int] = []

    async def next(self) -> list[dict[str, Any]]:
        """Return the rows of the next message."""
        found = (await self.socket.news())["roster"]
        self.counts = found["counts"]
        self.sizes.append(len(found["rows"]))
        for row in found["rows"]:
            self.rows[row["ns"]] = self.rows.get(row["ns"], {}) | row
        return found["rows"]

    async def until(self, ns: str, **wanted: Any) -> None:
        while any(self.rows.get(ns, {}).get(name) != value for name, value in wanted.items()):
            await self.next()


async def test_a_roster_follows_its_window(url: str) -> None:
    talker = Talker()
    async with serving(Runtime.open(url, agents=[lead(talker)])) as site:
        run_id = (await site.start("lead", limits={"parallel": CHILDREN}))["run_id"]
        async with site.socket(MANY) as socket:
            reader = Reader(socket)
            await socket.send(subscribe="r", run_id=run_id, roster=True, window=["tools:c000", "tools:c001"])
            while reader.counts != {"running": CHILDREN}:
                await reader.next()
            assert len(reader.rows) == CHILDREN
            assert {row["agent"] for row in reader.rows.values()} == {"talker"}
            assert reader.rows["tools:c007"]["task"] == "c007"
            for gate in talker.gates.values():
                gate.say("one ", "two")
            await reader.until("tools:c000", tail="one two")
            await reader.until("tools:c001", tail="one two")
            assert [ns for ns, row in reader.rows.items() if row.get("tail")] == ["tools:c000", "tools:c001"]
            await socket.send(watch="r", window=["tools:c050"])
            await reader.until("tools:c050", tail="one two")
            await socket.send(watch="nobody", window=[])
            for gate in talker.gates.values():
                gate.say(None)
            while reader.counts != {"completed": CHILDREN}:
                await reader.next()
            assert await _end_of(reader) == {"subscription": "r", "ended": True}
            assert {row["status"] for row in reader.rows.values()} == {"completed"}
            snapshot = (await site.get(f"/api/v1/runs/{run_id}/children")).body["items"]
            assert {one["run_id"] for one in snapshot} == {row["run_id"] for row in reader.rows.values()}
            # Of an ended run all rows come at once, with the words of the window.
            await socket.send(subscribe="again", run_id=run_id, roster=True, window=["tools:c003"])
            again = Reader(socket)
            await again.next()
            assert again.rows["tools:c003"].pop("tail") == "one two"
            assert again.rows == {ns: {k: v for k, v in row.items() if k != "tail"} for ns, row in reader.rows.items()}


async def _end_of(reader: Reader) -> Any:
    """Read to the end; return the last message."""
    while "ended" not in (message := await reader.socket.news()):
        for row in message["roster"]["rows"]:
            reader.rows[row["ns"]] |= row
    return message


async def test_what_a_roster_sends_does_not_follow_how_fast_agents_talk() -> None:
    """Rows outside the window come at most 50 at a time; their words do not come."""
    talker = Talker()
    async with serving(Runtime([lead(talker)])) as site, site.socket(MANY) as socket:
        run_id = (await site.start("lead", limits={"parallel": CHILDREN}))["run_id"]
        reader = Reader(socket)
        await socket.send(subscribe="r", run_id=run_id, roster=True)
        while reader.counts != {"running": CHILDREN}:
            await reader.next()
        while any(row["steps"] == 0 for row in reader.rows.values()):  # their first steps are counters
            await reader.next()
        before = len(reader.sizes)
        for gate in talker.gates.values():
            gate.say(*["word "] * 50)
        talker.gates["c000"].say(None)
        await reader.until("tools:c000", status="completed")
        assert set(reader.sizes[before:]) == {1}
        for gate in talker.gates.values():
            gate.say(None)


@pytest.mark.parametrize(
    "fields",
    [{"thread_id": "t1"}, {}, {"run_id": "RUN", "merge": 5}, {"run_id": "RUN", "after": 3}, {"run_id": "nobody"},
     {"run_id": "RUN", "window": ["x"] * 501}, {"run_id": "RUN", "window": ["\0"]}],
)  # fmt: skip
async def test_what_is_no_roster_is_refused(fields: dict[str, Any]) -> None:
    async with serving(Runtime([speaker("hi")])) as site, site.socket(MANY) as socket:
        run = await _ended(site)
        fields = {name: run if value == "RUN" else value for name, value in fields.items()}
        await socket.send(subscribe="r", roster=True, **fields)
        assert (await socket.news())["error"]["code"] in ("invalid", "not_found")


async def _ended(site: Site) -> str:
    run_id = (await site.start("speaker"))["run_id"]
    await site.result(run_id)
    return run_id
