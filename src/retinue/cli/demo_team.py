"""The team of `retinue demo`, and a process that works on its run: scripted models, real everything else.

As a program: `python -m retinue.cli.demo_team URL [QUESTION]` starts a run and prints its id, or continues what is there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..core.agents import Agent
from ..core.decisions import Decision
from ..core.functions import in_thread, tool
from ..core.messages import Role
from ..core.model import CallChunk, ModelChunk, ModelRequest, TextChunk, TurnEnd
from ..core.runs import Usage
from ..plugins.permissions import Permissions
from ..runtime import Runtime

QUESTION = "Book the cheapest way to Oslo on Friday."
SPEED = float(os.environ.get("RETINUE_DEMO_SPEED", "1"))
"""How many times faster than a person reads everything goes."""
_PIECE, _PRICE = 0.09, 3e-6
"""Seconds for a word, and what a token costs: about the list price of a middle-sized model."""


class Order(msgspec.Struct):
    """An answer, from the process that shows the run to the one that works on it."""

    run_id: str
    decisions: dict[str, Decision]


class Turn(NamedTuple):
    """One answer of a model: its words, one after the other, and the calls it asks for."""

    text: str = ""
    calls: Sequence[tuple[str, dict[str, str]]] = ()
    pace: float = _PIECE


class Actor:
    """A model that plays its turns. Its place follows from the conversation, so any process can go on with it."""

    def __init__(self, name: str, *turns: Turn) -> None:
        self.name, self._turns = f"scripted:{name}", turns

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        done = sum(message.role is Role.ASSISTANT for message in request.messages)
        turn = self._turns[min(done, len(self._turns) - 1)]
        for word in turn.text.split(" ") if turn.text else []:
            await asyncio.sleep(turn.pace / SPEED)
            yield TextChunk(f"{word} ")
        for index, (name, args) in enumerate(turn.calls):
            yield CallChunk(index, None, name, msgspec.json.encode(args).decode())
        read, written = request.estimate_tokens() + 400, len(turn.text) // 4 + 30 * len(turn.calls)
        usage = Usage(requests=1, input_tokens=read, output_tokens=written, cost=read * _PRICE + written * 5 * _PRICE)
        yield TurnEnd("tool_calls" if turn.calls else "stop", usage, cost_known=True)


@tool(idempotent=True)
async def find_trains(day: str) -> str:
    """List the trains of a day."""
    await asyncio.sleep(1.0 / SPEED)
    return "4 trains, from 61 €: 06:20, 09:05, 12:30, 17:50"


@tool(idempotent=True)
async def search_fares(day: str) -> str:
    """List the fares of a day."""
    await asyncio.sleep(1.2 / SPEED)
    return "12 fares. The cheapest: DY 1204, 09:40, 49 €"


@tool(idempotent=True)
async def find_rooms(area: str) -> str:
    """List the free rooms of an area."""
    await asyncio.sleep(1.5 / SPEED)
    return "2 rooms: Hotel Vest 88 €, Hotel Bjørvika 131 €"


@tool(idempotent=True)
async def compare(what: str) -> str:
    """Compare two offers."""
    await asyncio.sleep(2.0 / SPEED)
    return "DY 1204 is 12 € cheaper than the first train"


def _hold_tool(folder: Path) -> object:
    @tool
    async def hold_seat(flight: str) -> str:
        """Hold a seat. Doing it twice would hold two."""
        with (folder / "held.txt").open("a") as file:
            file.write(f"{flight}\n")
        await asyncio.sleep(0.4 / SPEED)
        return f"{flight} is held until noon, 49 €"

    return hold_seat


def _task(agent: str, description: str) -> tuple[str, dict[str, str]]:
    return "task", {"subagent_type": agent, "description": description}


def make_team(folder: Path) -> list[Agent]:
    """Return the lead with everybody below it. `folder` is where a held seat is noted."""
    hold = Agent(
        "hold",
        Actor(
            "hold",
            Turn("I hold it if I may.", [("hold_seat", {"flight": "DY 1204"})]),
            Turn("The seat is held until noon."),
        ),
        tools=[_hold_tool(folder)],  # pyright: ignore[reportArgumentType]
        plugins=[Permissions(ask=["hold_seat"])],
        description="holds a seat",
    )
    fares = Agent(
        "fares",
        Actor(
            "fares",
            Turn("Friday has twelve fares.", [("search_fares", {"day": "Friday"})]),
            Turn("DY 1204 is the cheapest, at 49 €. It should be held.", [_task("hold", "Hold a seat on DY 1204.")]),
            Turn(
                "Held. I compare it once more with the first train, so that nothing is missed.",
                [("compare", {"what": "DY 1204 and the 06:20"})],
            ),
            Turn("DY 1204 is the cheapest: 49 €, the seat is held."),
        ),
        tools=[search_fares, compare],
        subagents=[hold],
        description="compares fares",
    )
    flights = Agent(
        "flights",
        Actor(
            "flights",
            Turn("I look for the cheapest fare.", [_task("fares", "Find the cheapest fare on Friday.")]),
            Turn("The seat on DY 1204 is held, for 49 €."),
        ),
        subagents=[fares],
        description="finds flights",
    )
    trains = Agent(
        "trains",
        Actor(
            "trains",
            Turn("Friday has four trains, the first at", [("find_trains", {"day": "Friday"})]),
            Turn("Four trains, from 61 €."),
        ),
        tools=[find_trains],
        description="finds trains",
    )
    hotels = Agent(
        "hotels",
        Actor(
            "hotels",
            Turn("Two rooms near the station are free; I ask what they cost.", [("find_rooms", {"area": "station"})]),
            Turn("Hotel Vest has a room for 88 €."),
        ),
        tools=[find_rooms],
        description="finds rooms",
    )
    asked = [
        _task("trains", "Which trains go to Oslo on Friday?"),
        _task("flights", "Find and hold the cheapest flight to Oslo on Friday."),
        _task("hotels", "Find a room near the station."),
    ]
    answer = "Take flight **DY 1204** on Friday at 09:40 for 49 €: the seat is held until noon. The train is 12 € more. Hotel Vest has a room for 88 €."
    lead = Agent(
        "lead",
        Actor("lead", Turn("I ask three of my people side by side.", asked), Turn(answer, pace=0.05)),
        subagents=[trains, flights, hotels],
        description="books journeys",
    )
    return [lead]


def agents() -> list[Agent]:
    """Return the team for `retinue serve retinue.cli.demo_team:agents`."""
    return make_team(Path.cwd())


async def work(url: str, question: str | None) -> None:
    """Start a run, or continue the one that is there, and stay until nothing works any more."""
    folder = Path(url.removeprefix("sqlite:///")).parent
    async with Runtime.open(url, agents=make_team(folder)) as runtime:
        if question is not None:
            run = runtime.stream("lead", question, thread_id="demo")
            await run.stored()
            print(run.run_id, flush=True)
        print("ready", flush=True)
        while line := await in_thread(sys.stdin.buffer.readline, {}):  # until the one who shows it ends this process
            order = msgspec.json.decode(line, type=Order)
            runtime.stream_resume(order.run_id, order.decisions)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
