"""A tree of agents with side effects, run by processes that are going to be killed, frozen and confused.

The boss has three sub-agents work at once, of which one asks a helper, and one more in the background. Each appends
lines to a file, which cannot be done twice; one line only when a human agrees. What a model does is a function of its
conversation alone, so whatever happens to the processes in between, the end is the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

if ahead := float(os.environ.get("PLUG_CLOCK_AHEAD", "0")):  # before anybody takes the function
    real_time = time.time
    time.time = lambda: real_time() + ahead

from retinue import (
    Agent,
    Decision,
    DecisionRefused,
    HarnessAgent,
    ModelRequest,
    Plugin,
    Registrar,
    RetinueError,
    RunResult,
    Runtime,
    StateKey,
    SuspendTicket,
    ToolContext,
    ToolOutput,
    ToolResult,
    tool,
)
from retinue.models import ModelChunk
from retinue.testing import ScriptedModel, call, say
from retinue.workers import Worker
from tests import inside

NOTES: StateKey[tuple[str, ...], str] = StateKey(
    "plug.notes",
    tuple[str, ...],
    update=str,
    reduce=lambda notes, note: tuple(sorted({*notes, note})),
    merge="commutative",
    persistent=True,
    default=tuple[str, ...],
)


class Notes(Plugin):
    name = "notes"

    def register(self, r: Registrar) -> None:
        r.key(NOTES)


class Place:
    """The folder of a round: its effects, which tools began, and what humans were told."""

    def __init__(self, folder: Path, pause: float) -> None:
        self.folder, self.pause = folder, pause
        self.effects = folder / "effects.txt"

    async def rest(self) -> None:
        await asyncio.sleep(random.uniform(0, self.pause))

    def write(self, name: str, *words: object) -> None:
        with (self.folder / name).open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    async def effect(self, text: str) -> None:
        """Append a line: an effect that must not happen twice."""
        self.write("starts.txt", text, os.environ.get("PLUG_NODE", "?"), time.monotonic())
        await self.rest()
        self.write("effects.txt", text)
        await self.rest()


def tools(place: Place) -> list[Any]:
    @tool
    async def note(text: str) -> ToolOutput:
        """Append a line to the file."""
        await place.effect(text)
        return ToolOutput(f"noted {text}", {NOTES: text})

    @tool(idempotent=True)
    def look(text: str) -> ToolOutput:
        """Find out whether a line is in the file."""
        there = place.effects.exists() and text in place.effects.read_text().splitlines()
        return ToolOutput(f"{text} is there" if there else f"{text} is missing", {NOTES: text} if there else None)

    @tool
    async def pay(text: str, ctx: ToolContext) -> Any:
        """Append a line to the file, if a human agrees."""
        if ctx.resume_input is None:
            return ToolResult.suspended("may I?", ticket=SuspendTicket(f"pay-{ctx.call_id}", "pay", "may I?"))
        await place.effect(text)
        return ToolOutput(f"noted {text}", {NOTES: text})

    return [note, look, pay]


def next_effect(request: Any, wanted: list[str], by: str = "note") -> Any:
    """The next call that is needed for the lines to be there once each, or None."""
    state = dict.fromkeys(wanted, "missing")
    asked: dict[str, str] = {}
    for message in request.messages:
        for made in message.tool_calls:
            asked[made.id] = made.args.get("text", "")
        text = asked.get(message.tool_call_id or "")
        if text in state:
            if "outcome unknown" in message.text:
                state[text] = "unknown"
            elif message.text in (f"noted {text}", f"{text} is there"):
                state[text] = "done"
            elif message.text == f"{text} is missing":
                state[text] = "missing"
    for text, known in state.items():
        if known == "unknown":
            return call("look", {"text": text})
        if known == "missing":
            return call(by, {"text": text})
    return None


class Slow:
    """A model that takes its time between the pieces of its answer."""

    def __init__(self, decide: Any, place: Place) -> None:
        self._inner, self._place, self.name = ScriptedModel(decide), place, "scripted"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        async for chunk in self._inner.stream(request):
            await self._place.rest()
            yield chunk


def worker(request: Any) -> Any:
    label = next(m.text for m in request.messages if m.role == "user").split()[-1]
    if effect := next_effect(request, [f"{label}-1", f"{label}-2"]):
        return effect
    if label == "B" and not any(m.name == "task" for m in request.messages):
        return call("task", {"subagent_type": "helper", "description": "help B-help"})
    return say(f"{label} done", chunks=[label, " ", "do", "ne"])


def helper(request: Any) -> Any:
    return next_effect(request, ["help-1", "help-2"]) or say("helped", chunks=["hel", "ped"])


def boss(request: Any) -> Any:
    """Has others work; pays while one of them works in the background; then waits for it."""
    asks = "asks" in next(m.text for m in request.messages if m.role == "user")
    results = [m for m in request.messages if m.role == "tool"]
    spawns = [m for m in results if m.name == "agent_spawn"]
    if not spawns:
        ask = [call("agent_spawn", {"agent_id": "worker", "task": f"work {x}", "timeout_seconds": 600}) for x in "ABC"]
        ask = [*ask, call("agent_spawn", {"agent_id": "worker", "task": "work D", "timeout_seconds": 0})]
        return [*ask, call("pay", {"text": "paid"})] if asks else ask
    if asks and (effect := next_effect(request, ["paid"], "pay")):
        return effect
    if effect := next_effect(request, ["boss-1", "boss-2"]):
        return effect
    outputs = [m for m in results if m.name == "task_output"]
    task_id = next(line.split()[1] for m in spawns for line in m.text.splitlines() if line.startswith("task_id:"))
    if not outputs or "status: running" in outputs[-1].text:
        return call("task_output", {"task_id": task_id, "block": True, "timeout": 60_000})
    replies = [m.text.rpartition("reply:\n")[2] for m in spawns[:3]]
    return say(f"{', '.join(replies)}; {'D done' if 'D done' in outputs[-1].text else outputs[-1].text}")


def agents(place: Place) -> list[Agent]:
    given, plugins = tools(place), [Notes()]
    helps = Agent("helper", Slow(helper, place), "You help.", given, plugins)
    works = Agent("worker", Slow(worker, place), "You work.", given, plugins, subagents=[helps], max_steps=60)
    leads = HarnessAgent(
        "boss",
        Slow(boss, place),
        "You lead.",
        given,
        plugins,
        subagents=[works],
        workspace=place.folder / "ws",
        general_purpose=False,
        max_steps=60,
    )
    return [leads]


async def node(runtime: Runtime, place: Place, says: str) -> None:
    """Start the run of this folder, or continue it, and see it to its end."""
    known = place.folder / "run_id"
    if not known.exists():
        run = runtime.stream("boss", says, thread_id="thread-1")
        started = place.folder / "run_id.new"
        started.write_text(run.run_id)
        await anext(aiter(run))  # it has begun, so it is stored
        started.rename(known)
    run_id = known.read_text()
    while not (await result_of(runtime, run_id)).status.is_terminal:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    async for _ in runtime.events(run_id):
        pass


async def result_of(runtime: Runtime, run_id: str) -> RunResult:
    """How a run ended, or where it waits, though another process may take it over meanwhile."""
    while True:
        try:
            return await runtime.result(run_id)
        except RetinueError:
            await asyncio.sleep(0.05)


async def human(runtime: Runtime, place: Place, name: str) -> None:
    """Answer whatever the run waits for, until it ends, and write down what was said to that."""
    run_id = (place.folder / "run_id").read_text()
    answered: set[str] = set()
    while not (result := await result_of(runtime, run_id)).status.is_terminal:
        for ticket in [ticket for ticket in result.suspended.values() if ticket.id not in answered]:
            decision = Decision.resume(name, id=f"{name}-{ticket.id}")
            await meet(place, name, ticket.id)
            try:
                await runtime.resume(run_id, {ticket.id: decision})
                said = "accepted"
            except DecisionRefused:
                said = "refused"
            except RetinueError:
                continue  # who has the run did not reply, or lost it: ask again
            answered.add(ticket.id)
            place.write("humans.txt", json.dumps([name, ticket.id, said]))
        await asyncio.sleep(random.uniform(0, 0.05))


async def meet(place: Place, name: str, ticket: str) -> None:
    """Wait a while for the other human to see a ticket, so that both answer it at once."""
    (place.folder / f"{name}-sees-{ticket}").touch()
    for _ in range(40):
        if len(list(place.folder.glob(f"*-sees-{ticket}"))) > 1:
            break
        await asyncio.sleep(0.05)
    await place.rest()


async def work(runtime: Runtime) -> None:
    """Work for an engine until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await Worker(runtime).run(stop)


async def main(folder: Path, url: str, pause: float, role: str, lease: float, says: str) -> None:
    os.makedirs(folder / "ws", exist_ok=True)
    place, engine = Place(folder, pause), os.environ.get("PLUG_ENGINE")
    inside.try_suspects_after(0.5)
    known = agents(place) if engine is None or role == "worker" else []
    async with Runtime.open(url, known, lease=lease, on_close="leave", engine=engine, max_takeovers=1000) as runtime:
        if role == "worker":
            await work(runtime)
        elif role == "node":
            await node(runtime, place, says)
        else:
            await human(runtime, place, role)


if __name__ == "__main__":
    _, where, at, takes, who, lasts, text = sys.argv
    asyncio.run(main(Path(where), at, float(takes), who, float(lasts), text))
