"""Scenes of one agent."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from typing import Any

from msgspec import Struct

from retinue import Agent, HookContext, Limits, Plugin, Registrar, StateKey, ToolOutput, Usage, tool
from retinue.testing import ScriptedModel, call, say

from ..waiting import until
from .scene import Model, Scene, Spot, turn_of, turns

SEEN: StateKey[tuple[str, ...], str] = StateKey(
    "solo.seen",
    tuple[str, ...],
    update=str,
    reduce=lambda seen, one: (*seen, one),
    merge="commutative",
    persistent=True,
    scope="thread",
    default=tuple[str, ...],
)
CROWD = 60
"""How many runs are interrupted at once."""
LAST = StateKey("solo.last", str, persistent=True)
GONE = StateKey("solo.gone", str, persistent=True)


class Keys(Plugin):
    name = "keys"

    def register(self, r: Registrar) -> None:
        r.key(SEEN)
        r.key(LAST)


def tools(spot: Spot) -> list[Any]:
    @tool
    async def work(text: str) -> ToolOutput:
        """Work that may not be done twice."""
        spot.did(f"work {text}")
        await spot.point(f"work:{text}")
        return ToolOutput(f"worked {text}", {SEEN: text})

    @tool(idempotent=True)
    async def look(text: str) -> ToolOutput:
        """Work that may be done twice."""
        spot.did(f"look {text}")
        await spot.point(f"look:{text}")
        return ToolOutput(f"looked {text}", {SEEN: text})

    return [work, look]


def plain(spot: Spot) -> Scene:
    """Two steps with calls, then an answer in four pieces."""
    usage = Usage(requests=1, input_tokens=10, output_tokens=5)
    model = turns(
        spot,
        "m",
        [say("I look. ", usage=usage), call("look", {"text": "a"}, id="c1")],
        [say("I work. ", usage=usage), call("work", {"text": "b"}, id="c2")],
        say("It is done.", chunks=["It ", "is ", "do", "ne."], usage=usage),
    )
    return Scene([Agent("solo", model, "You work.", tools(spot), [Keys()])])


def streaming(spot: Spot) -> Scene:
    """An answer that says something and asks for a call, in pieces."""
    model = turns(
        spot,
        "m",
        [say("I will look", chunks=["I ", "will ", "look"]), call("look", {"text": "a"}, id="c1")],
        say("It is done.", chunks=["It ", "is ", "done."]),
    )
    return Scene([Agent("solo", model, "You work.", tools(spot), [Keys()])])


def longer(spot: Spot) -> Scene:
    """Four steps, for a process that dies again and again."""
    model = turns(
        spot,
        "m",
        [say("One. ", chunks=["One", ". "]), call("look", {"text": "a"}, id="c1")],
        [say("Two. ", chunks=["Two", ". "]), call("work", {"text": "b"}, id="c2")],
        [call("work", {"text": "c"}, id="c3")],
        say("Four.", chunks=["Fo", "ur."]),
    )
    return Scene([Agent("solo", model, "You work.", tools(spot), [Keys()])])


def conflict(spot: Spot) -> Scene:
    """Three calls at once write one exclusive key, the last that was asked for first."""

    @tool
    async def mark(text: str, after: int) -> ToolOutput:
        """Write the key, once others have."""
        await until(lambda: spot.done().get("marked", 0) >= after)
        spot.did(f"mark {text}")
        spot.did("marked")
        return ToolOutput(f"marked {text}", {LAST: text})

    @tool
    async def linger() -> str:
        """End last."""
        await until(lambda: spot.done().get("marked", 0) >= 3)
        spot.did("linger")
        await spot.point("linger")
        return "lingered"

    calls = [
        call("mark", {"text": "x", "after": 2}, id="c1"),
        call("mark", {"text": "y", "after": 1}, id="c2"),
        call("mark", {"text": "z", "after": 0}, id="c3"),
        call("linger", id="c4"),
    ]
    model = turns(spot, "m", calls, say("It is done."))
    return Scene([Agent("solo", model, "You work.", [mark, linger], [Keys()])])


def history(spot: Spot) -> Scene:
    """The second run of a thread, with state that adds up."""
    model = turns(
        spot,
        "m",
        call("look", {"text": "a"}, id="c1"),
        say("First."),
        call("work", {"text": "b"}, id="c2"),
        call("look", {"text": "c"}, id="c3"),
        say("Second."),
    )
    return Scene([Agent("solo", model, "You work.", tools(spot), [Keys(), Farewell(spot)])], "again")


class Farewell(Plugin):
    """Dies when the second run has ended and nothing of that is stored."""

    name = "farewell"

    def __init__(self, spot: Spot) -> None:
        self._spot = spot

    def register(self, r: Registrar) -> None:
        r.hook("run_end", self._end)

    async def _end(self, ctx: HookContext) -> None:
        if any(message.text == "Second." for message in ctx.messages):
            self._spot.did("farewell")
            await self._spot.point("run_end")


def handed(spot: Spot) -> Scene:
    """One agent hands over to another, which works."""
    second = Agent(
        "second",
        Model(spot, "n", lambda request: _second(request)),
        "You end it.",
        tools(spot),
        [Keys()],
    )
    first = Agent(
        "first",
        turns(spot, "m", call("look", {"text": "a"}, id="c1"), call("transfer_to_second", {}, id="c2")),
        "You begin.",
        tools(spot),
        [Keys()],
        handoffs=[second],
    )
    return Scene([first])


def _second(request: Any) -> Any:
    return say("Ended.") if request.messages[-1].text == "looked b" else call("look", {"text": "b"}, id="c3")


class Answer(Struct):
    value: int


def answering(spot: Spot) -> Scene:
    """An answer with a type, which does not fit at first."""
    model = turns(
        spot,
        "m",
        call("look", {"text": "a"}, id="c1"),
        say("forty-two"),
        say('{"value": 42}', chunks=['{"value"', ": 42}"]),
    )
    return Scene([Agent("solo", model, "You answer.", tools(spot), [Keys()], output=Answer)])


def limited(spot: Spot) -> Scene:
    """A model that never has enough, with a limit on its steps."""
    used = Usage(requests=1, input_tokens=1000)

    def more(request: Any) -> Any:
        if "limit" in request.messages[-1].text:
            return say("Enough.", usage=used)
        return [
            say("", chunks=(), usage=used),
            call("look", {"text": str(turn_of(request))}, id=f"c{turn_of(request)}"),
        ]

    return Scene([Agent("solo", Model(spot, "m", more), "", tools(spot), [Keys()], limits=Limits(tokens=4500))])


def slow(spot: Spot) -> Scene:
    """Calls that take time, with a limit on it."""

    @tool(idempotent=True)
    async def rest(seconds: float) -> str:
        """Take time."""
        spot.did("rest")
        spot.pass_time(seconds)
        return "rested"

    def more(request: Any) -> Any:
        return call("rest", {"seconds": 1801 * turn_of(request)}, id=f"c{turn_of(request)}")

    return Scene([Agent("solo", Model(spot, "m", more), "", [rest], limits=Limits(seconds=3600))])


def _has_cancel(spot: Spot) -> bool:
    """Return whether the store has the cancel of a run."""
    with closing(sqlite3.connect(spot.folder / "app.db")) as file:
        return bool(file.execute("SELECT 1 FROM inbox WHERE kind = 'cancel'").fetchall())


def unwanted(spot: Spot) -> Scene:
    """A run that is cancelled, with a tool that takes its time to stop."""

    @tool(idempotent=True)
    async def linger() -> str:
        """Take long, and then some."""
        spot.did("linger")
        try:
            await asyncio.sleep(3600 if spot.done()["linger"] == 1 else 0)
        finally:
            spot.did("stopping")
            if spot.die == "stopping":
                await until(partial(_has_cancel, spot))  # before that, a cancel that is not acknowledged may be lost
            await spot.point("stopping")
        return "lingered"

    model = turns(
        spot, "m", call("look", {"text": "a"}, id="c1"), [say("I linger. "), call("linger", id="c2")], say("Not this.")
    )
    agent = Agent("solo", model, "You work.", [*tools(spot), linger], [Keys()])
    return Scene([agent], cancel_after="linger")


def older(spot: Spot) -> Scene:
    """As `plain`, by agents of an earlier version, with a state key that is gone since."""

    class OlderKeys(Keys):
        def register(self, r: Registrar) -> None:
            super().register(r)
            r.key(GONE)

    @tool(idempotent=True)
    async def look(text: str) -> ToolOutput:
        """Work that may be done twice."""
        return ToolOutput(f"looked {text}", {GONE: text})

    return Scene([Agent("solo", plain(spot).agents[0].model, "You work.", [tools(spot)[0], look], [OlderKeys()])])


def forgetful(spot: Spot) -> Scene:
    """As `plain`, by agents of a later version, which do not know the state keys."""
    before = plain(spot).agents[0]
    return Scene([Agent("solo", before.model, "You work.", list(before.tools))])


def nobody(spot: Spot) -> Scene:
    """Somebody else's agents."""
    return Scene([Agent("stranger", turns(spot, "s", say("Hello.")))])


def many(spot: Spot) -> Scene:
    """One of a crowd: a step, and then a long wait until somebody kills it."""

    async def decide(request: Any) -> Any:
        if turn_of(request) == 1:
            return call("look", {"text": "a"}, id="c1")
        spot.did("waits")
        while spot.die:
            if spot.done()["waits"] >= CROWD:
                await spot.point("crowd")
            await asyncio.sleep(0.05)
        return say("It is done.")

    @tool(idempotent=True)
    async def look(text: str) -> ToolOutput:
        """Look."""
        return ToolOutput(f"looked {text}", {SEEN: text})

    return Scene([Agent("solo", ScriptedModel(decide), "You work.", [look], [Keys()])], crowd=CROWD)


def elsewhere(spot: Spot) -> Scene:
    """As `plain`, on another thread."""
    return Scene(plain(spot).agents, options={"thread_id": "thread-2"})


def broken(spot: Spot) -> Scene:
    """As `plain`, with a model that has nothing to say."""
    return Scene([Agent("solo", ScriptedModel([]), "You work.", tools(spot), [Keys()])])


def queued(spot: Spot) -> Scene:
    """A run, and another on the same thread that waits for it."""
    model = turns(
        spot,
        "m",
        call("look", {"text": "a"}, id="c1"),
        say("First."),
        call("look", {"text": "b"}, id="c2"),
        say("Second."),
    )
    return Scene([Agent("solo", model, "You work.", tools(spot), [Keys()])], then="again")
