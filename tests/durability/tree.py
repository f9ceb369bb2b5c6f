"""A tree of agents with side effects, run by a process that is going to be killed.

The boss has three sub-agents work at once, of which one asks a helper, and one more in the background. Each appends
lines to a file, which cannot be done twice. What a model does is a function of its conversation alone, so whatever
happens to the process in between, the end is the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from retinue import (
    Agent,
    HarnessAgent,
    ModelChunk,
    ModelRequest,
    Plugin,
    Registrar,
    Runtime,
    StateKey,
    ToolOutput,
    tool,
)
from retinue.testing import ScriptedModel, call, say

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


def note_tool(path: Path, pause: float) -> Any:
    @tool
    async def note(text: str) -> ToolOutput:
        """Append a line to the file: an effect that must not happen twice."""
        await asyncio.sleep(random.uniform(0, pause))
        with path.open("a") as file:
            file.write(f"{text}\n")
        await asyncio.sleep(random.uniform(0, pause))
        return ToolOutput(f"noted {text}", {NOTES: text})

    return note


def look_tool(path: Path) -> Any:
    @tool(idempotent=True)
    def look(text: str) -> ToolOutput:
        """Find out whether a line is in the file."""
        there = path.exists() and text in path.read_text().splitlines()
        return ToolOutput(f"{text} is there" if there else f"{text} is missing", {NOTES: text} if there else None)

    return look


def next_effect(request: Any, wanted: list[str]) -> Any:
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
            return call("note", {"text": text})
    return None


class Slow:
    """A model that takes its time between the pieces of its answer."""

    def __init__(self, decide: Any, pause: float) -> None:
        self._inner, self._pause, self.name = ScriptedModel(decide), pause, "scripted"

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelChunk]:
        async for chunk in self._inner.stream(request):
            await asyncio.sleep(random.uniform(0, self._pause))
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
    results = [m for m in request.messages if m.role == "tool"]
    spawns = [m for m in results if m.name == "agent_spawn"]
    if not spawns:
        ask = [call("agent_spawn", {"agent_id": "worker", "task": f"work {x}", "timeout_seconds": 600}) for x in "ABC"]
        return [*ask, call("agent_spawn", {"agent_id": "worker", "task": "work D", "timeout_seconds": 0})]
    if effect := next_effect(request, ["boss-1", "boss-2"]):
        return effect
    outputs = [m for m in results if m.name == "task_output"]
    task_id = next(line.split()[1] for m in spawns for line in m.text.splitlines() if line.startswith("task_id:"))
    if not outputs or "status: running" in outputs[-1].text:
        return call("task_output", {"task_id": task_id, "block": True, "timeout": 60_000})
    replies = [m.text.rpartition("reply:\n")[2] for m in spawns[:3]]
    return say(f"{', '.join(replies)}; {'D done' if 'D done' in outputs[-1].text else outputs[-1].text}")


def agents(folder: Path, pause: float) -> list[Agent]:
    tools = [note_tool(folder / "effects.txt", pause), look_tool(folder / "effects.txt")]
    plugins = [Notes()]
    helps = Agent("helper", Slow(helper, pause), "You help.", tools, plugins)
    works = Agent("worker", Slow(worker, pause), "You work.", tools, plugins, subagents=[helps], max_steps=60)
    leads = HarnessAgent(
        "boss",
        Slow(boss, pause),
        "You lead.",
        tools,
        plugins,
        subagents=[works],
        workspace=folder / "ws",
        general_purpose=False,
        max_steps=60,
    )
    return [leads]


async def main(folder: Path, url: str, pause: float) -> None:
    """Start the run of this folder, or go on with it, and see it to its end."""
    os.makedirs(folder / "ws", exist_ok=True)
    known = folder / "run_id"
    async with Runtime.open(url, agents(folder, pause)) as runtime:
        if not known.exists():
            run = runtime.stream("boss", "go", thread_id="thread-1")
            started = folder / "run_id.new"
            started.write_text(run.run_id)
            await anext(aiter(run))  # it has begun, so it is stored
            started.rename(known)
        await runtime.result(known.read_text())
        async for _ in runtime.events(known.read_text()):
            pass


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
